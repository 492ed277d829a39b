"""Real clients of every make: what each of them writes, all of them read, byte for byte."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from penstock.records.batch import headers
from penstock.records.compression import CODES
from penstock.testing.broker import Broker
from penstock.testing.kafka_tools import KafkaTools
from penstock.wire.messages.describe_producers import DescribeProducersRequest, TopicRequest
from tests.broker.clients import (
    AsyncClient,
    Client,
    ConfluentClient,
    Got,
    How,
    Item,
    JvmClient,
    KcatClient,
    PythonClient,
)
from tests.broker.raw import RawClient
from tests.broker.requests import (
    MIB,
    batch,
    create,
    fetch,
    new_name,
    now_ms,
    one,
    produce,
    records_of,
)

CODECS = tuple(CODES)
NAMES = ("confluent", "kcat", "python", "aio", "java")


@pytest.fixture(scope="module")
def clients(shared: Broker, kafka_tools: KafkaTools) -> Iterator[Mapping[str, Client]]:
    with kafka_tools.java_client(shared.bootstrap) as java:
        yield {
            "confluent": ConfluentClient(shared.bootstrap),
            "kcat": KcatClient(shared.bootstrap),
            "python": PythonClient(shared.bootstrap),
            "aio": AsyncClient(shared.bootstrap),
            "java": JvmClient(java),
        }


def items_for(client: Client, codec: str) -> list[Item]:
    """Nulls, empty values, other bytes than text, and enough of the same to be compressed."""
    head = (("a", b"1"), ("a", b""), *([("n", None)] if client.sends_null_headers else []))
    at = now_ms()
    plain = [
        Item(b"key", codec.encode() + b"-\xff\x00-" * 200, head, at),
        Item(None, b"no key" * 100, head, at + 1),
        Item(b"tombstone", None, head, at + 2),
    ]
    if not isinstance(client, PythonClient | AsyncClient):
        # Those two refuse to send nothing at all.
        plain.append(Item(None, None, head, at + 3))
    if not isinstance(client, KcatClient):
        # It takes what is empty for null.
        plain.append(Item(b"", b"", head, at + 4))
    return plain


class Written:
    """What a client has written to its topic: every codec once."""

    def __init__(self, client: Client, topic: str) -> None:
        self.topic = topic
        self.by_codec = {codec: items_for(client, codec) for codec in CODECS}
        self.sets_timestamps = client.sets_timestamps
        for codec, items in self.by_codec.items():
            client.produce(topic, items, How(codec))

    @property
    def items(self) -> list[Item]:
        return [item for items in self.by_codec.values() for item in items]

    def check(self, got: list[Got]) -> None:
        assert [g.offset for g in got] == list(range(len(self.items)))
        assert [(g.key, g.value, g.headers) for g in got] == [
            (i.key, i.value, i.headers) for i in self.items
        ]
        if self.sets_timestamps:
            assert [g.timestamp_ms for g in got] == [i.timestamp_ms for i in self.items]


@pytest.fixture(scope="module")
def written(
    request: pytest.FixtureRequest, clients: Mapping[str, Client], shared: Broker
) -> Written:
    name: str = request.param
    return Written(clients[name], new_name(name))


@pytest.mark.parametrize("written", NAMES, indirect=True)
@pytest.mark.parametrize("reader", NAMES)
def test_all_read_what_each_writes(
    written: Written, reader: str, clients: Mapping[str, Client]
) -> None:
    written.check(clients[reader].consume(written.topic, len(written.items)))


@pytest.mark.parametrize("written", NAMES, indirect=True)
def test_batches_stay_as_they_were_compressed(written: Written, shared: Broker) -> None:
    log = Path(shared.data, f"{written.topic}-0", "00000000000000000000.log").read_bytes()
    found = [(header.codec, header.record_count) for _, header in headers(log)]
    counts = {
        codec: sum(count for code, count in found if code == CODES[codec]) for codec in CODECS
    }
    assert counts == {codec: len(items) for codec, items in written.by_codec.items()}
    with RawClient(shared.bootstrap) as client:
        fetched = one(client.call(fetch(written.topic, partition_max_bytes=MIB), 12)).records
    assert bytes(fetched) == log


@pytest.mark.parametrize("how", [How(acks="0"), How(acks="1"), How(acks="all")], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_acknowledgement(
    name: str, how: How, clients: Mapping[str, Client], client: RawClient
) -> None:
    topic = new_name(name)
    client.call(create(topic))
    clients[name].produce(topic, [Item(b"k%d" % n, b"v%d" % n) for n in range(5)], how)
    got: list[Any] = []
    while len(got) < 5:
        # Of acks=0 nobody knows when it has arrived.
        part = one(client.call(fetch(topic, len(got), max_wait_ms=10_000), 12))
        assert not part.error_code
        assert part.records
        got += records_of(part.records)
    assert [(r.key, r.value) for r in got] == [(b"k%d" % n, b"v%d" % n) for n in range(5)]


@pytest.mark.parametrize("name", NAMES)
def test_idempotent_producers_count_their_records(
    name: str, clients: Mapping[str, Client], client: RawClient
) -> None:
    topic = new_name(name)
    client.call(create(topic))
    clients[name].produce(topic, [Item(None, b"v")] * 7, How("lz4", idempotent=True))
    answer = client.call(
        DescribeProducersRequest(topics=[TopicRequest(name=topic, partition_indexes=[0])])
    )
    (known,) = one(answer).active_producers
    assert (known.producer_epoch, known.last_sequence) == (0, 6)


@pytest.fixture(scope="module")
def timed(shared: Broker) -> tuple[str, int]:
    """A topic of ten records, one a second, two a batch."""
    topic, start = new_name(), now_ms() - 100_000
    with RawClient(shared.bootstrap) as client:
        client.call(create(topic))
        for n in range(0, 10, 2):
            both = batch(b"%d" % n, b"%d" % (n + 1), at_ms=start + n * 1000)
            client.call(produce(topic, both), 12)
    return topic, start


@pytest.mark.parametrize("name", NAMES)
def test_reading_from_an_offset(
    name: str, clients: Mapping[str, Client], timed: tuple[str, int]
) -> None:
    topic, _ = timed
    # Within a batch, at the start of one, and the last.
    for start in (3, 4, 9):
        got = clients[name].consume(topic, 10 - start, start)
        assert [g.value for g in got] == [b"%d" % n for n in range(start, 10)]


@pytest.mark.parametrize("name", NAMES)
def test_reading_from_a_time(
    name: str, clients: Mapping[str, Client], timed: tuple[str, int]
) -> None:
    topic, start_ms = timed
    for since, first in ((start_ms, 0), (start_ms + 3_500, 4), (start_ms + 8_000, 8)):
        got = clients[name].consume_since(topic, 10 - first, since)
        assert [g.offset for g in got] == list(range(first, 10))


def test_kcat_lists_and_queries(clients: Mapping[str, Client], timed: tuple[str, int]) -> None:
    kcat = clients["kcat"]
    assert isinstance(kcat, KcatClient)
    topic, start_ms = timed
    assert f'"topic":"{topic}"' in kcat.listing().replace(" ", "")
    assert kcat.query(topic, start_ms + 5_000) == 6
    assert kcat.query(topic, start_ms + 50_000) == -1


@pytest.mark.parametrize("name", NAMES)
def test_a_topic_is_made_by_writing_to_it(
    name: str, clients: Mapping[str, Client], shared: Broker
) -> None:
    topic = new_name(name)
    clients[name].produce(topic, [Item(b"k", b"v")], How())
    assert shared.call(lambda server: server.catalog.topics[topic].partitions) == 1
