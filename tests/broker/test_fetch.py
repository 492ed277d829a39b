"""Fetch: waiting without polling, sizes, segments, and what happens to those who wait."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Any

import pytest

from penstock.broker.apis.fetch import PendingFetch
from penstock.records.batch import headers
from penstock.testing.broker import Broker
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.fetch import FetchPartition, FetchTopic
from tests.broker.raw import RawClient
from tests.broker.requests import (
    MIB,
    batch,
    batch_of_size,
    create,
    delete,
    fetch,
    metadata,
    new_name,
    one,
    produce,
    values_of,
)
from tests.broker.waits import wait_for_fetches, wait_until, waiting_fetches

Connect = Callable[[Broker], RawClient]
LONG_MS = 60_000


@pytest.fixture
def collections(monkeypatch: pytest.MonkeyPatch) -> list[PendingFetch]:
    """Every look that a fetch takes at the log."""
    looks: list[PendingFetch] = []
    collect = PendingFetch.collect

    def counted(self: PendingFetch) -> Any:
        looks.append(self)
        return collect(self)

    monkeypatch.setattr(PendingFetch, "collect", counted)
    return looks


# ---- waiting ---------------------------------------------------------------------------------


def test_a_waiting_fetch_is_woken_by_a_record(
    shared: Broker, client: RawClient, topic: str, connect: Connect,
    collections: list[PendingFetch],
) -> None:  # fmt: skip
    reader = connect(shared)
    reader.send(fetch(topic, max_wait_ms=LONG_MS), 12)
    wait_for_fetches(shared, 1)
    client.call(produce(topic, batch(b"news")), 12)
    assert values_of(one(reader.receive()).records) == [b"news"]
    # Once when it came, once when it was woken: nothing looks in between.
    assert len(collections) == 2
    assert shared.call(waiting_fetches) == 0


def test_a_fetch_that_waits_in_vain_looks_twice(
    client: RawClient, topic: str, collections: list[PendingFetch]
) -> None:
    began = monotonic()
    assert not one(client.call(fetch(topic, max_wait_ms=300), 12)).records
    assert monotonic() - began > 0.25
    assert len(collections) == 2


def test_a_broker_without_requests_looks_at_nothing(
    shared: Broker, client: RawClient, connect: Connect, collections: list[PendingFetch]
) -> None:
    topics = [new_name() for _ in range(3)]
    readers = [connect(shared) for _ in topics]
    for name, reader in zip(topics, readers, strict=True):
        client.call(create(name))
        reader.send(fetch(name, max_wait_ms=LONG_MS), 12)
    wait_for_fetches(shared, 3)
    assert len(collections) == 3
    client.call(produce(topics[1], batch(b"x")), 12)
    assert values_of(one(readers[1].receive()).records) == [b"x"]
    # The others have not been disturbed.
    assert len(collections) == 4
    assert shared.call(waiting_fetches) == 2


def test_a_fetch_waits_for_enough_bytes(
    shared: Broker, client: RawClient, topic: str, connect: Connect
) -> None:
    reader = connect(shared)
    reader.send(fetch(topic, max_wait_ms=LONG_MS, min_bytes=1200), 12)
    wait_for_fetches(shared, 1)
    for _ in range(2):
        client.call(produce(topic, batch_of_size(500)), 12)
        assert shared.call(waiting_fetches) == 1
        assert reader.is_silent()
    client.call(produce(topic, batch_of_size(500)), 12)
    assert len(one(reader.receive()).records) == 1500


@pytest.mark.parametrize("min_bytes", [0, -1])
def test_whoever_wants_nothing_gets_it_at_once(
    client: RawClient, topic: str, min_bytes: int
) -> None:
    answer = client.call(fetch(topic, max_wait_ms=LONG_MS, min_bytes=min_bytes), 12)
    assert not one(answer).records


def test_more_than_may_come_is_not_waited_for(client: RawClient, topic: str) -> None:
    client.call(produce(topic, batch_of_size(500)), 12)
    request = fetch(topic, max_wait_ms=LONG_MS, min_bytes=10_000, max_bytes=100)
    assert len(one(client.call(request, 12)).records) == 500


def test_more_than_the_broker_gives_is_not_waited_for() -> None:
    broker = Broker()
    limits = replace(broker.config.limits, max_fetch_bytes=1000)
    broker.config = replace(broker.config, limits=limits)
    with broker, RawClient(broker.bootstrap) as client:
        client.call(create("t"))
        for _ in range(3):
            client.call(produce("t", batch_of_size(600)), 12)
        request = fetch("t", max_wait_ms=LONG_MS, min_bytes=1500)
        assert len(one(client.call(request, 12)).records) == 600


def test_the_end_of_a_segment_is_not_waited_at(client: RawClient) -> None:
    """Records are there, in the next segment: whoever wants more than this one has gets on."""
    topic = new_name()
    client.call(create(topic, segment_bytes="2000"))
    for _ in range(6):
        client.call(produce(topic, batch_of_size(900)), 12)
    seen: list[int] = []
    offset = 0
    while offset < 4:
        part = one(client.call(fetch(topic, offset, max_wait_ms=LONG_MS, min_bytes=5000), 12))
        seen.append(len(part.records))
        offset += len(values_of(part.records))
    assert seen == [1800, 1800]


def test_several_partitions_are_waited_for_at_once(
    shared: Broker, client: RawClient, connect: Connect
) -> None:
    topic = new_name()
    client.call(create(topic, 5))
    reader = connect(shared)
    for number in (3, 0, 4):
        reader.send(fetch(topic, dict.fromkeys(range(5), 0), max_wait_ms=LONG_MS), 12)
        if number == 3:
            wait_for_fetches(shared, 1)
            client.call(produce(topic, {3: batch(b"x")}), 12)
        parts = reader.receive().responses[0].partitions
        assert [p.partition_index for p in parts] == [0, 1, 2, 3, 4]
        assert {p.partition_index for p in parts if p.records} == {3}


def test_topics_are_waited_for_at_once(shared: Broker, client: RawClient, connect: Connect) -> None:
    names = [new_name() for _ in range(3)]
    for name in names:
        client.call(create(name))
    request = fetch(None, max_wait_ms=LONG_MS)
    request.topics = [
        FetchTopic(topic=n, partitions=[FetchPartition(partition_max_bytes=MIB)]) for n in names
    ]
    reader = connect(shared)
    reader.send(request, 12)
    wait_for_fetches(shared, 1)
    client.call(produce(names[2], batch(b"x")), 12)
    answer = reader.receive()
    assert {t.topic: bool(t.partitions[0].records) for t in answer.responses} == {
        names[0]: False, names[1]: False, names[2]: True,
    }  # fmt: skip


def test_a_closed_connection_waits_for_nothing(
    shared: Broker, topic: str, connect: Connect
) -> None:
    reader = connect(shared)
    reader.send(fetch(topic, max_wait_ms=0x7FFFFFFF), 12)
    wait_for_fetches(shared, 1)
    reader.close()
    wait_for_fetches(shared, 0)


def test_a_record_of_the_same_read_is_fetched(client: RawClient, topic: str) -> None:
    client.send_all(
        (produce(topic, batch(b"a")), 12),
        (fetch(topic), 12),
        (produce(topic, batch(b"b")), 12),
        (fetch(topic, 1), 12),
    )
    client.receive()
    assert values_of(one(client.receive()).records) == [b"a"]
    client.receive()
    assert values_of(one(client.receive()).records) == [b"b"]


# ---- topics that go while someone waits ------------------------------------------------------


@pytest.mark.parametrize("by_id", [False, True])
def test_whoever_waits_is_told_when_the_topic_is_deleted(
    shared: Broker, client: RawClient, topic: str, connect: Connect, by_id: bool
) -> None:
    id_ = client.call(metadata(topic)).topics[0].topic_id
    reader = connect(shared)
    if by_id:
        reader.send(fetch(id_, max_wait_ms=LONG_MS), 13)
    else:
        reader.send(fetch(topic, max_wait_ms=LONG_MS), 12)
    wait_for_fetches(shared, 1)
    client.call(delete(topic))
    expected = ErrorCode.UNKNOWN_TOPIC_ID if by_id else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    assert one(reader.receive()).error_code == expected


def test_a_topic_made_anew_is_not_the_one_that_was_waited_for(
    client: RawClient, topic: str
) -> None:
    old = client.call(metadata(topic)).topics[0].topic_id
    first = client.call(fetch(old, session=(0, 0)), 13)
    client.call(delete(topic))
    client.call(create(topic))
    client.call(produce(topic, batch(b"new")), 12)
    again = client.call(fetch(None, session=(first.session_id, 1)), 13)
    assert one(again).error_code == ErrorCode.UNKNOWN_TOPIC_ID
    # The session goes on with the new one beside, and then without the old one.
    new = client.call(metadata(topic)).topics[0].topic_id
    both = client.call(fetch(new, session=(first.session_id, 2)), 13)
    told = {t.topic_id: t.partitions[0] for t in both.responses}
    assert told[old].error_code == ErrorCode.UNKNOWN_TOPIC_ID
    assert values_of(told[new].records) == [b"new"]
    request = fetch(None, session=(first.session_id, 3), forget=[(old, [0])])
    assert [t.topic_id for t in client.call(request, 13).responses] == [new]


def test_reading_goes_on_while_the_topic_is_deleted(
    shared: Broker, client: RawClient, connect: Connect
) -> None:
    """An answer that is under way is sent to its end, though the files have no names any more."""
    topic = new_name()
    client.call(create(topic))
    for n in range(16):
        client.call(produce(topic, batch_of_size(MIB // 2, at_ms=n)), 12)
    with RawClient(shared.bootstrap, receive_buffer_bytes=8192) as reader:
        reader.send(fetch(topic, partition_max_bytes=16 * MIB), 12)
        wait_until(shared, lambda s: any(c._outgoing for c in s.connections))
        client.call(delete(topic))
        records = bytes(one(reader.receive()).records)
    assert [header.base_timestamp for _, header in headers(records)] == list(range(16))


# ---- large answers ---------------------------------------------------------------------------


def fill(client: RawClient, topic: str, sizes: list[int]) -> bytes:
    """Write batches of these sizes; what the log must hold then."""
    for size in sizes:
        answer = one(client.call(produce(topic, batch_of_size(size)), 12))
        assert not answer.error_code, answer
    return b""


@pytest.mark.parametrize("segment_bytes", ["1000000", "5000000", "50000000"])
def test_large_answers_are_the_bytes_of_the_log(
    shared: Broker, client: RawClient, segment_bytes: str
) -> None:
    topic = new_name()
    client.call(create(topic, segment_bytes=segment_bytes))
    fill(client, topic, [100_000, 300_000, 61 + 20, 262_144, 262_143, 1_000_000, 80, 500_000] * 2)
    files = sorted(Path(shared.data, f"{topic}-0").glob("*.log"))
    on_disk = b"".join(path.read_bytes() for path in files)
    for limit in (MIB, 200_000, 262_144, 10 * MIB):
        got = bytearray()
        offset = 0
        while offset < 16:
            part = one(client.call(fetch(topic, offset, partition_max_bytes=limit), 12))
            found = [header for _, header in headers(part.records)]
            assert sum(header.size for header in found) == len(part.records)
            assert found[0].base_offset == offset
            assert len(part.records) <= limit or len(found) == 1
            got += part.records
            offset = found[-1].next_offset
        assert bytes(got) == on_disk


def test_many_partitions_in_one_large_answer(shared: Broker, client: RawClient) -> None:
    """Slices that are sent from the file and slices that are read, side by side."""
    topic = new_name()
    client.call(create(topic, 6))
    for number, size in enumerate((500_000, 1_000, 300_000, 900_000, 200_000, 700_000)):
        client.call(produce(topic, {number: batch_of_size(size)}), 12)
    answer = client.call(fetch(topic, dict.fromkeys(range(6), 0)), 12)
    for part in answer.responses[0].partitions:
        path = Path(shared.data, f"{topic}-{part.partition_index}", f"{0:020d}.log")
        assert bytes(part.records) == path.read_bytes()


def test_the_whole_answer_is_bounded(client: RawClient) -> None:
    topic = new_name()
    client.call(create(topic, 4))
    for number in range(4):
        for _ in range(5):
            client.call(produce(topic, {number: batch_of_size(1000)}), 12)
    for limit, expected in (
        (1, [1]),
        (2500, [2]),
        (5000, [5]),
        (7500, [5, 2]),
        (12_000, [5, 5, 2]),
    ):
        answer = client.call(fetch(topic, dict.fromkeys(range(4), 0), max_bytes=limit), 12)
        counts = [len(values_of(p.records)) for p in answer.responses[0].partitions]
        assert counts == expected + [0] * (4 - len(expected))
