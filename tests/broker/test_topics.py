"""Topics: made on demand, limited, deleted while in use, and made anew."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.testing.broker import Broker
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.create_topics import CreatableTopicConfig
from penstock.wire.messages.find_coordinator import FindCoordinatorRequest
from penstock.wire.messages.metadata import MetadataRequest, MetadataRequestTopic
from tests.broker.conftest import NEVER_MS
from tests.broker.disks import GatedDisk
from tests.broker.raw import RawClient
from tests.broker.requests import (
    LATEST,
    SET,
    alter,
    batch,
    create,
    delete,
    fetch,
    list_offsets,
    metadata,
    new_name,
    one,
    produce,
    values_of,
)
from tests.broker.waits import wait_until

Connect = Callable[[Broker], RawClient]


def code_of(result: object) -> ErrorCode:
    return ErrorCode(result.error_code)  # type: ignore[attr-defined]


# ---- on demand -------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(14))
def test_asking_for_a_topic_makes_it(client: RawClient, version: int) -> None:
    """In versions that cannot say whether it may be made, it may."""
    name = new_name()
    told = client.call(metadata(name, create_missing=True), version).topics[0]
    assert code_of(told) == ErrorCode.NONE
    assert [part.partition_index for part in told.partitions] == [0]
    assert one(client.call(produce(name, batch()), 12)).base_offset == 0


def test_several_that_ask_at_once_get_the_same_topic(shared: Broker, connect: Connect) -> None:
    name = new_name()
    clients = [connect(shared) for _ in range(8)]
    for client in clients:
        client.send_all(*[metadata(name, create_missing=True)] * 3)
    told = [client.receive().topics[0] for client in clients for _ in range(3)]
    assert {code_of(topic) for topic in told} == {ErrorCode.NONE}
    assert len({topic.topic_id for topic in told}) == 1


def test_no_topic_is_made_where_that_is_switched_off() -> None:
    with Broker(auto_create_topics=False) as broker, RawClient(broker.bootstrap) as client:
        for version in range(14):
            told = client.call(metadata("t", create_missing=True), version).topics[0]
            assert code_of(told) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        assert broker.call(lambda server: dict(server.catalog.topics)) == {}


def test_topics_on_demand_have_the_brokers_defaults() -> None:
    defaults = {"retention.ms": "1234"}
    with (
        Broker(default_partitions=4, topic_defaults=defaults, durability="disk") as broker,
        RawClient(broker.bootstrap) as client,
    ):
        told = client.call(metadata("t", create_missing=True)).topics[0]
        assert len(told.partitions) == 4
        config = broker.call(lambda server: server.catalog.topics["t"].config)
        assert (config.retention_ms, config.durability) == (1234, "disk")


def test_topics_on_demand_and_colliding_names(client: RawClient) -> None:
    base = new_name()
    client.call(create(f"a.{base}"))
    told = client.call(metadata(f"a_{base}", create_missing=True)).topics[0]
    assert code_of(told) == ErrorCode.INVALID_TOPIC_EXCEPTION


def test_the_brokers_own_topic_is_not_for_clients(client: RawClient) -> None:
    name = "__penstock_metadata"
    assert code_of(client.call(create(name)).topics[0]) == ErrorCode.INVALID_TOPIC_EXCEPTION
    told = client.call(metadata(name, create_missing=True)).topics[0]
    assert code_of(told) == ErrorCode.INVALID_TOPIC_EXCEPTION
    assert name not in {t.name for t in client.call(MetadataRequest(topics=None)).topics}
    expected = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert code_of(one(client.call(produce(name, batch()), 12))) == expected
    assert code_of(one(client.call(fetch(name), 12))) == expected
    assert code_of(client.call(delete(name)).responses[0]) == expected


@pytest.mark.parametrize("name", ["__consumer_offsets", "__transaction_state"])
def test_topics_of_kafkas_coordinators_are_not_made_on_demand(client: RawClient, name: str) -> None:
    """Whoever looks for committed offsets there must not find an empty topic."""
    told = client.call(metadata(name, create_missing=True)).topics[0]
    assert code_of(told) == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert name not in {t.name for t in client.call(MetadataRequest(topics=None)).topics}


def test_a_topic_without_name_or_id_is_refused(client: RawClient) -> None:
    request = MetadataRequest(topics=[MetadataRequestTopic(name=None)])
    told = client.call(request, 12).topics[0]
    assert code_of(told) == ErrorCode.UNKNOWN_TOPIC_ID


def test_who_coordinates(client: RawClient) -> None:
    answer = client.call(FindCoordinatorRequest(coordinator_keys=["a", "b"]), 4)
    assert [(c.key, c.error_code, c.node_id) for c in answer.coordinators] == [
        ("a", 0, 1), ("b", 0, 1),
    ]  # fmt: skip


# ---- limits ----------------------------------------------------------------------------------


@pytest.fixture
def small() -> Iterator[Broker]:
    """A broker for few topics and partitions."""
    broker = Broker()
    limits = replace(broker.config.limits, max_topics=3, max_partitions=10)
    broker.config = replace(broker.config, limits=limits)
    with broker:
        yield broker


def test_so_many_topics_and_partitions_and_no_more(small: Broker) -> None:
    refused = ErrorCode.POLICY_VIOLATION
    with RawClient(small.bootstrap) as client:
        assert code_of(client.call(create("a", 11)).topics[0]) == refused
        assert code_of(client.call(create("a", 8)).topics[0]) == ErrorCode.NONE
        assert code_of(client.call(create("b", 3)).topics[0]) == refused
        assert code_of(client.call(create("b")).topics[0]) == ErrorCode.NONE
        assert code_of(client.call(create("c")).topics[0]) == ErrorCode.NONE
        assert code_of(client.call(create("d")).topics[0]) == refused
        told = client.call(metadata("d", create_missing=True)).topics[0]
        assert code_of(told) == refused
        client.call(delete("a"))
        assert code_of(client.call(create("d", 8)).topics[0]) == ErrorCode.NONE


# ---- deletion --------------------------------------------------------------------------------


def test_nothing_is_left_of_a_deleted_topic(shared: Broker, client: RawClient) -> None:
    topic = new_name()
    client.call(create(topic, 4))
    for number in range(4):
        client.call(produce(topic, {number: batch(b"x")}), 12)
    client.call(delete(topic))
    assert not [path for path in Path(shared.data).iterdir() if path.name.startswith(topic)]
    assert topic not in {t.name for t in client.call(MetadataRequest(topics=None)).topics}
    code = code_of(one(client.call(produce(topic, batch()), 12)))
    assert code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


def test_a_topic_with_the_longest_name_can_be_deleted(shared: Broker, client: RawClient) -> None:
    name = "n" * 249
    assert code_of(client.call(create(name)).topics[0]) == ErrorCode.NONE
    client.call(produce(name, batch()), 12)
    assert code_of(client.call(delete(name)).responses[0]) == ErrorCode.NONE
    assert not [path for path in Path(shared.data).iterdir() if path.name.startswith("nnn")]


def test_topics_that_come_and_go_leave_no_open_files(shared: Broker, client: RawClient) -> None:
    def open_files() -> int:
        return len(os.listdir("/proc/self/fd"))

    def cycle() -> None:
        topic = new_name()
        client.call(create(topic, 5))
        client.call(produce(topic, batch()), 12)
        assert values_of(one(client.call(fetch(topic), 12)).records) == [b"x"]
        client.call(delete(topic))

    if not Path("/proc/self/fd").exists():
        pytest.skip("this system does not tell")
    cycle()
    before = open_files()
    for _ in range(10):
        cycle()
    assert open_files() <= before + 2


def test_made_anew_it_begins_from_nothing(client: RawClient) -> None:
    topic = new_name()
    for round_ in range(3):
        client.call(create(topic, 1 + round_, retention_ms=str(1000 + round_)))
        assert one(client.call(list_offsets(topic, LATEST))).offset == 0
        for n in range(3):
            assert one(client.call(produce(topic, batch(b"%d" % round_)), 12)).base_offset == n
        records = one(client.call(fetch(topic), 12)).records
        assert values_of(records) == [b"%d" % round_] * 3
        client.call(delete(topic))


def test_a_producer_with_writes_under_way_is_told_of_the_deletion() -> None:
    disk = GatedDisk()
    with (
        Broker(durability="disk", disk=disk, housekeeping_interval_ms=NEVER_MS) as broker,
        RawClient(broker.bootstrap) as producer,
        RawClient(broker.bootstrap) as admin,
    ):
        admin.call(create("t", 2))
        other = admin.call(create("u")).topics[0]
        assert not other.error_code
        with disk.closed("t"):
            producer.send_all(
                (produce("t", batch(b"single")), 12),
                (produce("t", batch(b"recognised")), 12),
                (produce("t", {0: batch(b"both"), 1: batch(b"both")}), 12),
            )
            disk.wait_for_sync()
            assert producer.is_silent()
            assert not admin.call(delete("t")).responses[0].error_code
            for _ in range(3):
                for part in producer.receive().responses[0].partition_responses:
                    # Retriable: a client asks for metadata, and learns that it is gone.
                    assert part.error_code != ErrorCode.NONE
                    assert part.base_offset == -1
        code = code_of(one(producer.call(produce("t", batch()), 12)))
        assert code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        admin.call(create("t"))
        assert one(producer.call(produce("t", batch()), 12)).base_offset == 0
        assert one(producer.call(produce("u", batch()), 12)).base_offset == 0


def test_an_old_id_does_not_delete_the_new_topic(client: RawClient, topic: str) -> None:
    old = client.call(metadata(topic)).topics[0].topic_id
    client.send_all(delete(topic), create(topic), delete(old))
    assert code_of(client.receive().responses[0]) == ErrorCode.NONE
    assert code_of(client.receive().topics[0]) == ErrorCode.NONE
    assert code_of(client.receive().responses[0]) != ErrorCode.NONE
    assert code_of(client.call(metadata(topic)).topics[0]) == ErrorCode.NONE


def test_changes_of_a_topic_that_is_being_deleted(client: RawClient, topic: str) -> None:
    client.send_all(delete(topic), alter(topic, (SET, "retention.ms", "1")), delete(topic))
    assert code_of(client.receive().responses[0]) == ErrorCode.NONE
    gone = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert code_of(client.receive().responses[0]) == gone
    assert code_of(client.receive().responses[0]) == gone


def test_many_partitions_are_made_without_delay(shared: Broker, client: RawClient) -> None:
    """Others are answered while a large topic is made."""
    large, small = new_name(), new_name()
    client.send(create(large, 300))
    with RawClient(shared.bootstrap) as other:
        wait_until(shared, lambda server: len(server.store.partitions) > 5)
        assert other.call(metadata()).brokers
    assert client.receive().topics[0].num_partitions == 300
    request = create(small)
    request.topics[0].configs = [CreatableTopicConfig(name="durability", value="memory")]
    assert code_of(client.call(request).topics[0]) == ErrorCode.NONE
