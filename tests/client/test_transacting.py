"""Transactions in their parts: several writers, one end, and no doubt about it."""

from __future__ import annotations

import pickle
import threading

import pytest
from confluent_kafka import Consumer, TopicPartition

from penstock.client import topics
from penstock.client.connection import TRANSACTION, Address, Cluster, Connection
from penstock.client.errors import (
    ClientError,
    FencedError,
    GaveUpError,
    OutcomeUnknownError,
    RefusedError,
)
from penstock.client.metadata import Place
from penstock.client.producing import Sender
from penstock.client.transacting import Ids, Transaction
from penstock.client.transactions import described
from penstock.client.writer import LogWriter
from penstock.records.record import BatchOptions, simple_batch
from penstock.testing.broker import Broker
from penstock.testing.tcp_proxy import TcpProxy
from penstock.wire.messages.end_txn import EndTxnRequest
from tests.client.conftest import KEEP, MakeTopic, unique
from tests.client.reader import Through, read_topic, values
from tests.waiting import eventually


def write(
    bootstrap: str, name: str, ids: Ids, place: Place, *contents: bytes, adds: bool = False
) -> None:
    """What another process does with ids that were handed to it."""
    ids = pickle.loads(pickle.dumps(ids))
    with Cluster(bootstrap) as cluster, Sender(cluster, transactional_id=name) as sender:
        sender.adds_partitions = adds
        for sequence, value in enumerate(contents):
            options = BatchOptions(0, *ids, sequence, transactional=True)
            sender.send(*place, simple_batch([value], options=options))


def test_several_writers_one_transaction(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic, marks = make_topic(4), make_topic()
    places: list[Place] = [(topic, number) for number in range(4)]
    transaction = Transaction(cluster, unique("txn"))
    name = transaction.transactional_id
    transaction.init()
    seen: set[Ids] = set()
    for step in range(6):
        ids = transaction.ids
        assert ids not in seen
        seen.add(ids)
        transaction.add_partitions(places)
        assert transaction.is_open
        threads = [
            threading.Thread(
                target=write, args=(cluster.bootstrap, name, ids, place, b"%d" % step, b"x")
            )
            for place in places
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        transaction.put(marks, 0, b"batch", b"%d" % step)
        transaction.put(marks, 0, b"more", None, headers=[("why", b"not")], timestamp_ms=5)
        before = [record.value for record in read_topic(cluster, marks, settled=False)[0]]
        assert b"%d" % step not in before
        transaction.end(commit=step % 2 == 0)
        assert not transaction.is_open
    found = read_topic(cluster, topic)
    for number in range(4):
        assert [record.value for record in found[number]] == [b"0", b"x", b"2", b"x", b"4", b"x"]
    marked = read_topic(cluster, marks)[0]
    assert [record.value for record in marked] == [b"0", None, b"2", None, b"4", None]
    assert marked[1].headers == (("why", b"not"),)
    assert marked[1].timestamp_ms == 5


def test_a_writer_that_is_late_is_refused(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic()
    transaction = Transaction(cluster, unique("txn"))
    old = transaction.init()
    transaction.add_partitions([(topic, 0)])
    write(cluster.bootstrap, transaction.transactional_id, old, (topic, 0), b"in time")
    transaction.end(commit=True)
    transaction.add_partitions([(topic, 0)])
    with pytest.raises(FencedError):
        write(cluster.bootstrap, transaction.transactional_id, old, (topic, 0), b"late")
    transaction.end(commit=True)
    assert values(cluster, topic) == [b"in time"]


def test_what_was_not_added_is_not_written(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic(2)
    transaction = Transaction(cluster, unique("txn"))
    ids = transaction.init()
    transaction.add_partitions([(topic, 0)])
    with pytest.raises(RefusedError, match=f"{topic}-1"):
        write(cluster.bootstrap, transaction.transactional_id, ids, (topic, 1), b"stray")
    transaction.end(commit=False)
    hasty = Transaction(cluster, unique("txn"), retry_s=0.5)
    hasty.init()
    with pytest.raises(RefusedError, match="UNKNOWN_TOPIC"):
        hasty.add_partitions([(unique("nowhere"), 0), (topic, 0)])


def test_nothing_is_nothing(cluster: Cluster) -> None:
    transaction = Transaction(cluster, unique("txn"))
    with pytest.raises(ClientError, match="not ours yet"):
        transaction.end(commit=True)
    ids = transaction.init()
    assert transaction.end(commit=True) == transaction.end(commit=False) == ids
    assert transaction.init() > ids


def test_what_a_predecessor_left_open_is_aborted(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic, name = make_topic(), unique("txn")
    first, second = Transaction(cluster, name), Transaction(cluster, name)
    first.init()
    first.put(topic, 0, None, b"lost")
    second.init()
    second.put(topic, 0, None, b"kept")
    second.end(commit=True)
    assert values(cluster, topic) == [b"kept"]
    with pytest.raises(FencedError):
        first.put(topic, 0, None, b"zombie")


def test_a_transaction_that_took_too_long(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic, name = make_topic(), unique("txn")
    transaction = Transaction(cluster, name, timeout_ms=1_000)
    transaction.init()
    transaction.put(topic, 0, None, b"late")
    eventually(lambda: not described(cluster, name).is_open)
    with pytest.raises(FencedError, match="committing"):
        transaction.end(commit=True)
    assert not transaction.is_ours
    transaction = Transaction(cluster, name)
    transaction.init()
    transaction.put(topic, 0, None, b"in time")
    transaction.end(commit=True)
    assert values(cluster, topic) == [b"in time"]


class Older(Cluster):
    """Brokers that do not raise the epoch with the end of a transaction."""

    def connect(self, address: Address, *, timeout_s: float | None = None) -> Connection:
        made = super().connect(address, timeout_s=timeout_s)
        made.versions[EndTxnRequest.API_KEY] = (0, 4)
        return made


def test_brokers_that_do_not_raise_the_epoch(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic()
    with Older(bootstrap) as cluster:
        transaction = Transaction(cluster, unique("txn"))
        seen = [transaction.init()]
        for step in range(4):
            transaction.put(topic, 0, None, b"%d" % step)
            transaction.put(topic, 0, None, b"more")
            seen.append(transaction.end(commit=step != 1))
            assert transaction.ids == seen[-1]
        assert seen == sorted(set(seen))
        with pytest.raises(FencedError):
            write(bootstrap, transaction.transactional_id, seen[-2], (topic, 0), b"late")
        assert values(cluster, topic)[::2] == [b"0", b"2", b"3"]


def test_a_write_adds_its_partition(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic(2)
    transaction = Transaction(cluster, unique("txn"))
    transaction.init()
    assert transaction.adds_by_writing
    name = transaction.transactional_id
    for step in range(4):
        old = transaction.ids
        for number in range(2):
            transaction.will_write([(topic, number)])
            write(cluster.bootstrap, name, old, (topic, number), b"%d" % step, adds=True)
        transaction.end(commit=step % 2 == 0)
        # Apache Kafka answers before it has ended it everywhere.
        eventually(lambda: described(cluster, name).state.startswith("Complete"))
        # What comes late neither counts nor begins a transaction.
        with pytest.raises(FencedError):
            write(cluster.bootstrap, name, old, (topic, 0), b"late", adds=True)
        assert not described(cluster, name).is_open
    found = read_topic(cluster, topic)
    assert [[record.value for record in found[number]] for number in range(2)] == [[b"0", b"2"]] * 2


def test_a_write_that_never_arrived_can_be_aborted(cluster: Cluster, make_topic: MakeTopic) -> None:
    transaction = Transaction(cluster, unique("txn"))
    old = transaction.init()
    transaction.will_write([(make_topic(), 0)])
    assert transaction.end(commit=False) != old
    assert not transaction.is_open


@pytest.mark.parametrize("level", [0, 1])
def test_brokers_that_want_to_be_asked_first(level: int) -> None:
    with Broker(transaction_version=level) as broker, Cluster(broker.bootstrap) as cluster:
        topics.create(cluster, "events")
        with LogWriter(cluster, transactional_id="older") as writer:
            for step in range(3):
                writer.begin()
                assert not writer.transaction.adds_by_writing
                writer.write("events", None, [b"%d" % step])
                writer.commit()
        assert values(cluster, "events") == [b"0", b"1", b"2"]


def test_offsets_are_committed_with_it(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic, group = make_topic(2), unique("group")
    transaction = Transaction(cluster, unique("txn"))
    transaction.init()
    for step, commit in ((1, True), (2, False), (3, True), (4, False)):
        transaction.send_offsets(group, {(topic, 0): 10 * step, (topic, 1): 20 * step})
        transaction.end(commit=commit)
    settings = {"bootstrap.servers": cluster.bootstrap, "group.id": group}
    consumer = Consumer(settings)
    try:
        asked = [TopicPartition(topic, 0), TopicPartition(topic, 1)]
        assert [item.offset for item in consumer.committed(asked, timeout=60)] == [30, 60]
    finally:
        consumer.close()


def test_a_lost_answer_to_a_commit_is_asked_for_again(embedded: Broker) -> None:
    with TcpProxy(embedded.bootstrap) as proxy, Through(proxy) as cluster:
        topic = unique("lost")
        topics.create(cluster, topic, config=KEEP)
        transaction = Transaction(cluster, unique("txn"))
        transaction.init()
        for step in range(5):
            transaction.put(topic, 0, None, b"%d" % step)
            swallow = threading.Thread(target=cut_soon, args=(proxy,))
            proxy.delay_ms = 30
            swallow.start()
            transaction.end(commit=True)
            swallow.join()
            proxy.delay_ms = 0
        assert values(cluster, topic) == [b"%d" % step for step in range(5)]


def cut_soon(proxy: TcpProxy) -> None:
    """Cut once something has passed to the server, which is on its way back then."""
    before = proxy.passed_bytes["server"]
    proxy.wait_for(lambda it: it.passed_bytes["server"] > before, 60)
    proxy.cut()


def test_a_commit_of_which_nobody_hears_is_unknown() -> None:
    with Broker() as broker, TcpProxy(broker.bootstrap) as proxy:
        with Through(proxy) as cluster:
            topics.create(cluster, "t", config=KEEP)
            transaction = Transaction(cluster, "txn")
            transaction.init()
            transaction.put("t", 0, None, b"a")
            cluster.coordinator(TRANSACTION, "txn").set_timeout(0.3)
            proxy.swallow = True
            with pytest.raises(OutcomeUnknownError, match="not known"):
                transaction.end(commit=True, retry_s=0.0)
            proxy.swallow = False
            proxy.cut()
            with pytest.raises(ClientError, match="not ours yet"):
                transaction.put("t", 0, None, b"b")
            transaction.init()
            transaction.put("t", 0, None, b"c")
            transaction.end(commit=True)
            assert values(cluster, "t") == [b"c"]


def test_a_broker_that_is_gone_before_the_commit() -> None:
    with Broker() as broker, Cluster(broker.bootstrap) as cluster:
        topics.create(cluster, "t", config=KEEP)
        transaction = Transaction(cluster, "txn")
        transaction.init()
        transaction.put("t", 0, None, b"a")
        cluster.close()
        broker.crash()
        with pytest.raises(GaveUpError, match="committing"):
            transaction.end(commit=True, retry_s=0.3)
        broker.start()


def test_a_broker_that_dies_in_the_middle() -> None:
    with Broker() as broker, Cluster(broker.bootstrap) as cluster:
        topics.create(cluster, "t", config=KEEP)
        transaction = Transaction(cluster, "txn")
        transaction.init()
        for step in range(6):
            transaction.put("t", 0, None, b"%d" % step)
            broker.crash()
            broker.start()
            transaction.put("t", 0, None, b"more")
            transaction.end(commit=step % 3 != 1)
            broker.crash()
            broker.start()
        kept = [b"%d" % step for step in range(6) if step % 3 != 1]
        assert values(cluster, "t")[::2] == kept
