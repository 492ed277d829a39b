"""Settings count from the moment they are changed; what is told of them is true."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.log.config import SETTINGS, TOPIC_SETTING_OF
from penstock.records.batch import read_header
from penstock.testing.broker import Broker
from penstock.testing.clock import START_MS, ManualClock
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
)
from tests.broker.disks import HastyDisk
from tests.broker.raw import RawClient
from tests.broker.requests import (
    DELETE,
    EARLIEST,
    MAX_TIMESTAMP,
    SET,
    alter,
    batch,
    batch_of_size,
    create,
    fetch,
    list_offsets,
    one,
    produce,
    records_of,
)


def change(client: RawClient, topic: str, name: str, value: str | None) -> None:
    step = (DELETE, name, None) if value is None else (SET, name, value)
    result = client.call(alter(topic, step)).responses[0]
    assert not result.error_code, result.error_message


def code(client: RawClient, topic: str, records: bytes) -> ErrorCode:
    return ErrorCode(one(client.call(produce(topic, records), 12)).error_code)


def described(client: RawClient, kind: int, name: str) -> dict[str, Any]:
    resource = DescribeConfigsResource(
        resource_type=kind, resource_name=name, configuration_keys=None
    )
    request = DescribeConfigsRequest(
        resources=[resource], include_synonyms=True, include_documentation=True
    )
    result = client.call(request).results[0]
    assert not result.error_code, result.error_message
    return {item.name: item for item in result.configs}


# ---- changed while in use --------------------------------------------------------------------


def test_the_size_of_batches(client: RawClient, topic: str) -> None:
    assert code(client, topic, batch_of_size(5000)) == ErrorCode.NONE
    change(client, topic, "max.message.bytes", "4999")
    assert code(client, topic, batch_of_size(5000)) == ErrorCode.MESSAGE_TOO_LARGE
    change(client, topic, "max.message.bytes", None)
    assert code(client, topic, batch_of_size(5000)) == ErrorCode.NONE


def test_keys_are_required_once_the_topic_is_compacted(client: RawClient, topic: str) -> None:
    assert code(client, topic, batch(b"v")) == ErrorCode.NONE
    change(client, topic, "cleanup.policy", "compact")
    assert code(client, topic, batch(b"v")) == ErrorCode.INVALID_RECORD
    assert code(client, topic, batch(b"v", key=b"k")) == ErrorCode.NONE
    change(client, topic, "cleanup.policy", "delete")
    assert code(client, topic, batch(b"v")) == ErrorCode.NONE


def test_segments_become_smaller(shared: Broker, client: RawClient, topic: str) -> None:
    def segments() -> int:
        return len(list(Path(shared.data, f"{topic}-0").glob("*.log")))

    for _ in range(5):
        code(client, topic, batch_of_size(2000))
    assert segments() == 1
    change(client, topic, "segment.bytes", "4096")
    for _ in range(5):
        code(client, topic, batch_of_size(2000))
    assert segments() == 4


def test_timestamps_that_are_accepted(client: RawClient, topic: str) -> None:
    old = batch(b"v", at_ms=5)
    assert code(client, topic, old) == ErrorCode.NONE
    change(client, topic, "message.timestamp.before.max.ms", "1000")
    assert code(client, topic, old) == ErrorCode.INVALID_TIMESTAMP
    assert code(client, topic, batch(b"v")) == ErrorCode.NONE


def test_a_change_that_is_refused_changes_nothing(
    shared: Broker, client: RawClient, topic: str
) -> None:
    answer = client.call(
        alter(topic, (SET, "retention.ms", "5"), (SET, "segment.bytes", "nonsense"))
    )
    assert answer.responses[0].error_code == ErrorCode.INVALID_CONFIG
    assert shared.call(lambda server: dict(server.catalog.topics[topic].settings)) == {}


# ---- whose time it is ------------------------------------------------------------------------


@pytest.mark.parametrize("codec", range(5))
def test_the_logs_time_or_the_producers(codec: int) -> None:
    clock = ManualClock()
    with (
        Broker(clock=clock, disk=HastyDisk()) as broker,
        RawClient(broker.bootstrap) as client,
    ):
        client.call(create("t"))

        def send(at_ms: int) -> int:
            records = batch(b"x" * 99, b"y" * 99, at_ms=at_ms, codec=codec)
            return int(one(client.call(produce("t", records), 12)).log_append_time_ms)

        assert send(START_MS - 50) == -1
        change(client, "t", "message.timestamp.type", "LogAppendTime")
        clock.advance(1000)
        assert send(START_MS - 40) == START_MS + 1000
        clock.advance(1000)
        # Time stamps of the log may be anything of the producer's.
        assert send(START_MS * 2) == START_MS + 2000
        change(client, "t", "message.timestamp.type", "CreateTime")
        assert send(START_MS - 30) == -1

        stored = []
        for n in range(0, 8, 2):
            raw = one(client.call(fetch("t", n, partition_max_bytes=1), 12)).records
            header = read_header(raw)
            stored.append((header.has_append_time, {r.timestamp_ms for r in records_of(raw)}))
            assert header.codec == codec
        assert stored == [
            (False, {START_MS - 50}),
            (True, {START_MS + 1000}),
            (True, {START_MS + 2000}),
            (False, {START_MS - 30}),
        ]
        newest = one(client.call(list_offsets("t", MAX_TIMESTAMP)))
        assert (newest.offset, newest.timestamp) == (4, START_MS + 2000)
        since = one(client.call(list_offsets("t", START_MS + 1)))
        assert (since.offset, since.timestamp) == (2, START_MS + 1000)


def test_a_duplicate_is_told_the_time_of_the_first() -> None:
    clock = ManualClock()
    with (
        Broker(clock=clock, disk=HastyDisk()) as broker,
        RawClient(broker.bootstrap) as client,
    ):
        client.call(create("t", message_timestamp_type="LogAppendTime"))
        once = batch(b"a", at_ms=START_MS, producer=(7, 0, 0))
        for _ in range(2):
            part = one(client.call(produce("t", once), 12))
            assert (part.base_offset, part.log_append_time_ms) == (0, START_MS)
            clock.advance(1000)


# ---- described -------------------------------------------------------------------------------


def test_every_setting_of_a_topic_is_described(client: RawClient, topic: str) -> None:
    found = described(client, 2, topic)
    assert set(found) == set(SETTINGS)
    for name, item in found.items():
        assert item.documentation
        assert not item.read_only
        assert item.synonyms[0].value == item.value
        setting = SETTINGS[name]
        # What is told can be set again as it is.
        assert setting.render(setting.parse(item.value)) == item.value


def test_where_a_value_comes_from() -> None:
    with (
        Broker(topic_defaults={"retention.ms": "99"}, durability="disk") as broker,
        RawClient(broker.bootstrap) as client,
    ):
        client.call(create("t", segment_bytes="4096"))
        found = described(client, 2, "t")
        told = {
            name: (found[name].value, found[name].config_source)
            for name in ("segment.bytes", "retention.ms", "durability", "retention.bytes")
        }
        topic, by_broker, default = 1, 4, 5
        assert told == {
            "segment.bytes": ("4096", topic),
            "retention.ms": ("99", by_broker),
            "durability": ("disk", by_broker),
            "retention.bytes": ("-1", default),
        }


def test_what_a_broker_is_given_at_its_start_is_described_and_not_changed(
    shared: Broker, client: RawClient
) -> None:
    found = described(client, 4, "1")
    assert found["auto.create.topics.enable"].value == "true"
    changeable = {name for name, item in found.items() if not item.read_only}
    assert changeable == set(TOPIC_SETTING_OF)
    request = alter("1", (SET, "num.partitions", "3"))
    request.resources[0].resource_type = 4
    assert client.call(request).responses[0].error_code == ErrorCode.INVALID_REQUEST


def test_only_known_operations(client: RawClient, topic: str) -> None:
    answer = client.call(alter(topic, (7, "retention.ms", "1")))
    assert answer.responses[0].error_code in (ErrorCode.INVALID_CONFIG, ErrorCode.INVALID_REQUEST)
    assert one(client.call(list_offsets(topic, EARLIEST))).offset == 0
