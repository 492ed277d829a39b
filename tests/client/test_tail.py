"""Following a topic: what comes is what another client reads, however it is taken."""

from __future__ import annotations

import random
import threading
from collections.abc import Mapping

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition

from penstock.client import topics
from penstock.client.connection import Cluster
from penstock.client.errors import OffsetGoneError
from penstock.client.metadata import LATEST, Place, offsets
from penstock.client.producing import Sender
from penstock.client.tail import Piece, Tail
from penstock.records.record import simple_batch
from tests.client.conftest import MakeTopic
from tests.waiting import eventually

Rows = dict[Place, list[tuple[int, bytes]]]


def add(rows: Rows, pieces: list[Piece], positions: Mapping[Place, int]) -> None:
    """Take pieces in; the records of each partition must follow each other."""
    for piece in pieces:
        known = rows.setdefault(piece.partition, [])
        offsets_, values = (piece.records.column(name).to_pylist() for name in ("offset", "value"))
        assert all(offset < piece.next_offset for offset in offsets_)
        assert not known or not offsets_ or offsets_[0] > known[-1][0]
        assert piece.next_offset <= positions[piece.partition]
        known += zip(offsets_, values, strict=True)


def by_librdkafka(bootstrap: str, topic: str, partition: int) -> list[tuple[int, bytes]]:
    """The committed records of a partition."""
    consumer = Consumer({
        "bootstrap.servers": bootstrap, "group.id": "oracle", "enable.partition.eof": True,
    })  # fmt: skip
    found: list[tuple[int, bytes]] = []
    try:
        consumer.assign([TopicPartition(topic, partition, 0)])
        while (message := consumer.poll(60)) is not None:
            error = message.error()
            if error is not None:
                assert error.code() == KafkaError._PARTITION_EOF
                return found
            found.append((message.offset() or 0, message.value() or b""))
    finally:
        consumer.close()
    raise AssertionError(f"{topic}-{partition} does not end")


def test_all_that_comes_is_taken_once_and_in_order(
    cluster: Cluster, make_topic: MakeTopic, seed: int
) -> None:
    chance = random.Random(seed)
    topic = make_topic(3)
    places = [(topic, number) for number in range(3)]

    def produce() -> None:
        plain = Producer({"bootstrap.servers": cluster.bootstrap, "linger.ms": 1})
        moved = Producer({"bootstrap.servers": cluster.bootstrap, "transactional.id": topic})
        moved.init_transactions()
        for number in range(20):
            moved.begin_transaction()
            for _ in range(chance.randrange(1, 20)):
                moved.produce(topic, b"t%d" % number, partition=chance.randrange(3))
            if chance.random() < 0.4:
                moved.abort_transaction()
            else:
                moved.commit_transaction()
            for step in range(chance.randrange(30)):
                plain.produce(topic, b"p%d-%d" % (number, step), partition=chance.randrange(3))
            assert plain.flush(60) == 0

    thread = threading.Thread(target=produce)
    thread.start()
    rows: Rows = {}
    with Tail(cluster, dict.fromkeys(places, 0), ahead_rows=7) as tail:

        def is_done() -> bool:
            most = chance.choice([1, 3, 50])
            pieces = tail.take(most, 0.1)
            assert sum(piece.records.num_rows for piece in pieces) <= most
            add(rows, pieces, tail.positions)
            if thread.is_alive():
                return False
            return tail.positions == offsets(cluster, dict.fromkeys(places, LATEST))

        eventually(is_done, poll_s=0)
        assert not tail.is_done
    thread.join()
    assert rows == {place: by_librdkafka(cluster.bootstrap, *place) for place in places}


def test_it_ends_where_it_is_told(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic(2)
    with Sender(cluster) as sender:
        for number in (0, 1):
            sender.send(topic, number, simple_batch([b"%d" % n for n in range(10)]))
    rows: Rows = {}
    until = {(topic, 0): 4, (topic, 1): 0}
    with Tail(cluster, {(topic, 0): 2, (topic, 1): 0}, until=until) as tail:
        while not tail.is_done:
            add(rows, tail.take(100, 60), tail.positions)
    assert rows == {(topic, 0): [(2, b"2"), (3, b"3")]}
    with Tail(cluster, {(topic, 0): 4}, until={(topic, 0): 4}) as tail:
        assert tail.is_done
        assert tail.take(1, 0) == []


def test_what_is_gone_is_told_after_what_was_there(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic()
    with Sender(cluster) as sender:
        sender.send(topic, 0, simple_batch([b"a", b"b", b"c"]))
    with Tail(cluster, {(topic, 0): 1}) as tail:
        (piece,) = tail.take(10, 60)
        assert piece.records.column("value").to_pylist() == [b"b", b"c"]
        topics.delete(cluster, [topic])
        topics.create(cluster, topic, partitions=1)

        def fails() -> bool:
            try:
                tail.take(10, 1)
            except OffsetGoneError:
                return True
            return False

        eventually(fails)
    with Tail(cluster, {(topic, 0): 99}) as tail, pytest.raises(OffsetGoneError):
        tail.take(10, 60)


def test_ahead_of_a_slow_reader_it_holds_little(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic()
    with Sender(cluster) as sender:
        for _ in range(40):
            sender.send(topic, 0, simple_batch([b"x" * 1000] * 50))
    with Tail(cluster, {(topic, 0): 0}, ahead_rows=100, ahead_bytes=1 << 30) as tail:
        (piece,) = tail.take(1, 60)
        eventually(lambda: tail._rows >= 100)
        # Each answer of the broker is one piece, unless it is large.
        assert tail._rows <= 100 + 2000
        read = piece.next_offset
        while read < 2000:
            for piece in tail.take(500, 60):
                read = piece.next_offset
        assert tail._rows == tail._bytes == 0
