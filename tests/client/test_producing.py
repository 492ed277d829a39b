"""Producing: each batch once and in order, whatever connections and brokers do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Literal

import pytest

from penstock.client import topics
from penstock.client.connection import Cluster
from penstock.client.errors import (
    ClientError,
    FencedError,
    GaveUpError,
    LostRecordsError,
    RefusedError,
)
from penstock.client.metadata import Place
from penstock.client.producing import Sender
from penstock.client.transacting import Ids, Transaction, init_producer
from penstock.records.record import BatchOptions, simple_batch
from penstock.testing.broker import Broker
from penstock.testing.tcp_proxy import TcpProxy
from penstock.wire.errors import ErrorCode
from tests.client.conftest import KEEP, MakeTopic, unique
from tests.client.reader import Through, read_topic, values


class Batches:
    """Packs batches of one producer, with the right sequence numbers."""

    def __init__(self, ids: Ids, *, transactional: bool = False) -> None:
        self._ids = ids
        self._transactional = transactional
        self._sequences: dict[Place, int] = {}

    def pack(self, place: Place, *contents: bytes) -> bytes:
        sequence = self._sequences.get(place, 0)
        self._sequences[place] = sequence + len(contents)
        options = BatchOptions(0, *self._ids, sequence, transactional=self._transactional)
        return simple_batch(contents, timestamp_ms=1, options=options)


def work(places: list[Place], count: int) -> Iterator[tuple[Place, bytes]]:
    for step in range(count):
        for place in places:
            yield place, b"%s-%d %d" % (place[0].encode(), place[1], step)


def send_all(sender: Sender, place: Place, packed: list[bytes]) -> None:
    for batch in packed:
        sender.send(*place, batch)
    sender.flush()


def test_batches_come_once_and_in_order(cluster: Cluster, make_topic: MakeTopic) -> None:
    name = make_topic(3)
    places: list[Place] = [(name, number) for number in range(3)]
    batches = Batches(init_producer(cluster))
    with Sender(cluster, max_bytes=2000) as sender:
        for place, value in work(places, 100):
            sender.send(*place, batches.pack(place, value, b"second"))
            assert sender.held_bytes <= 2000
        sender.flush()
        assert sender.held_bytes == 0
        assert sender.ends == dict.fromkeys(places, 200)
    found = read_topic(cluster, name)
    for place in places:
        written = [value for at, value in work([place], 100)]
        assert [record.value for record in found[place[1]]][::2] == written


def test_many_partitions_at_once(cluster: Cluster, make_topic: MakeTopic) -> None:
    name = make_topic(40)
    places: list[Place] = [(name, number) for number in range(40)]
    batches = Batches(init_producer(cluster))
    with Sender(cluster) as sender:
        for place, value in work(places, 20):
            sender.send(*place, batches.pack(place, value))
    assert sender.ends == dict.fromkeys(places, 20)


def test_a_batch_that_is_there_already_is_acknowledged(
    cluster: Cluster, make_topic: MakeTopic
) -> None:
    name = make_topic()
    batches = Batches(init_producer(cluster))
    packed = [batches.pack((name, 0), b"%d" % step) for step in range(10)]
    # A broker remembers the last five.
    for again in (packed, packed[5:]):
        with Sender(cluster) as sender:
            for batch in again:
                sender.send(name, 0, batch)
        assert sender.ends == {(name, 0): 10}
    assert values(cluster, name) == [b"%d" % step for step in range(10)]


def test_a_gap_is_an_error(cluster: Cluster, make_topic: MakeTopic) -> None:
    name = make_topic()
    batches = Batches(init_producer(cluster))
    packed = [batches.pack((name, 0), b"%d" % step) for step in range(8)]
    with Sender(cluster) as sender:
        sender.send(name, 0, packed[0])
    sender = Sender(cluster)
    with pytest.raises(LostRecordsError, match=f"{name}-0"):
        send_all(sender, (name, 0), packed[2:])
    with pytest.raises(LostRecordsError):
        sender.send(name, 0, packed[1])
    sender.close()
    assert values(cluster, name) == [b"0"]


def test_what_the_broker_refuses_for_good(cluster: Cluster, make_topic: MakeTopic) -> None:
    name = make_topic(max_message_bytes="1000")
    with pytest.raises(RefusedError, match=f"{name}-0: MESSAGE_TOO_LARGE") as caught:
        with Sender(cluster) as sender:
            sender.send(name, 0, simple_batch([b"x" * 2000]))
    assert caught.value.code == ErrorCode.MESSAGE_TOO_LARGE
    with pytest.raises(RefusedError, match="no such partition"):
        with Sender(cluster, timeout_s=0.3) as sender:
            sender.send(name, 7, simple_batch([b"x"]))
    nowhere = unique("nowhere")
    with pytest.raises(RefusedError, match=f"{nowhere}.*UNKNOWN_TOPIC"):
        with Sender(cluster, timeout_s=0.3) as sender:
            sender.send(nowhere, 0, simple_batch([b"x"]))
    with pytest.raises(ClientError, match="acks=0"):
        Sender(cluster, acks=0)


def test_a_fenced_producer_writes_nothing_more(cluster: Cluster, make_topic: MakeTopic) -> None:
    name, id_ = make_topic(), unique("txn")
    zombie, heir = Transaction(cluster, id_), Transaction(cluster, id_)
    old = Batches(zombie.init(), transactional=True)
    zombie.add_partitions([(name, 0)])
    with Sender(cluster, transactional_id=id_) as sender:
        sender.send(name, 0, old.pack((name, 0), b"zombie"))
    new = Batches(heir.init(), transactional=True)
    heir.add_partitions([(name, 0)])
    with pytest.raises(FencedError), Sender(cluster, transactional_id=id_) as sender:
        sender.send(name, 0, old.pack((name, 0), b"late"))
    with Sender(cluster, transactional_id=id_) as sender:
        sender.send(name, 0, new.pack((name, 0), b"heir"))
    with pytest.raises(FencedError, match="committing"):
        zombie.end(commit=True)
    heir.end(commit=True)
    assert values(cluster, name) == [b"heir"]


@pytest.mark.parametrize("towards", ["client", "server"])
def test_connections_that_are_cut_lose_and_repeat_nothing(
    embedded: Broker, towards: Literal["client", "server"]
) -> None:
    with TcpProxy(embedded.bootstrap) as proxy, Through(proxy) as cluster:
        name = unique("cut")
        topics.create(cluster, name, partitions=2, config=KEEP)
        batches = Batches(init_producer(cluster))
        places: list[Place] = [(name, 0), (name, 1)]
        for at in (300, 2_000, 4_001, 8_002, 10_003, 700, 705, 10_100):
            proxy.cut_after(at, towards=towards)
        with Sender(cluster) as sender:
            for place, value in work(places, 300):
                sender.send(*place, batches.pack(place, value))
        found = read_topic(cluster, name)
    for place in places:
        written = [value for _, value in work([place], 300)]
        assert [record.value for record in found[place[1]]] == written
    assert proxy.accepted > 8


def test_a_broker_that_dies_and_comes_back() -> None:
    with Broker() as broker, Cluster(broker.bootstrap) as cluster:
        topics.create(cluster, "t", partitions=2, config=KEEP)
        batches = Batches(init_producer(cluster))
        places: list[Place] = [("t", 0), ("t", 1)]
        sent = threading.Semaphore(0)

        def fail_often() -> None:
            for _ in range(3):
                for _ in range(200):
                    sent.acquire()
                broker.crash()
                broker.start()

        thread = threading.Thread(target=fail_often)
        thread.start()
        with Sender(cluster, max_bytes=5_000) as sender:
            for place, value in work(places, 500):
                sender.send(*place, batches.pack(place, value))
                sent.release()
        thread.join()
        found = read_topic(cluster, "t")
    for place in places:
        written = [value for _, value in work([place], 500)]
        assert [record.value for record in found[place[1]]] == written


def test_a_broker_that_stays_away() -> None:
    with Broker() as broker, Cluster(broker.bootstrap) as cluster:
        topics.create(cluster, "t", config=KEEP)
        sender = Sender(cluster, timeout_s=0.5)
        broker.crash()
        with pytest.raises(GaveUpError, match="writing to t-0") as caught:
            send_all(sender, ("t", 0), [simple_batch([b"b"])])
        assert caught.value.retriable
        sender.close()
        broker.start()
