"""The writer: every record once, in its key's order, in the partition that other clients choose."""

from __future__ import annotations

import random
import threading
from collections import defaultdict

import pyarrow as pa
import pytest
from confluent_kafka import Producer

from penstock.client import topics
from penstock.client.connection import Cluster
from penstock.client.errors import (
    ClientError,
    FencedError,
    GaveUpError,
    OffsetGoneError,
    RefusedError,
)
from penstock.client.reading import last_values, read_all, read_batches
from penstock.client.writer import LogWriter
from penstock.testing.broker import Broker
from penstock.testing.tcp_proxy import TcpProxy
from tests.client.conftest import KEEP, MakeTopic, unique
from tests.client.reader import Through, read_topic
from tests.harness.profiles import WRITER_RECORDS

CODECS = ["none", "gzip", "snappy", "lz4", "zstd"]


def in_order(cluster: Cluster, topic: str, count: int, keys: int) -> None:
    """Numbers from 0 on were written with key = number modulo keys: each is there once."""
    by_key: dict[bytes | None, list[int]] = defaultdict(list)
    for row in read_all(cluster, topic, settled=True):
        by_key[row.key].append(int(row.value or b""))
    assert by_key == {b"%d" % key: list(range(key, count, keys)) for key in range(min(keys, count))}


def write_numbers(writer: LogWriter, topic: str, numbers: range, keys: int, step: int) -> None:
    for first in range(numbers.start, numbers.stop, step):
        some = range(first, min(first + step, numbers.stop))
        writer.write(topic, [b"%d" % (n % keys) for n in some], [b"%d" % n for n in some])


@pytest.mark.parametrize("codec", CODECS)
def test_records_come_once_and_in_their_keys_order(
    cluster: Cluster, make_topic: MakeTopic, codec: str
) -> None:
    topic = make_topic(3)
    with LogWriter(cluster, codec=codec, batch_bytes=2_000) as writer:
        count = WRITER_RECORDS * 2 // 3
        write_numbers(writer, topic, range(count), 50, 700)
        writer.flush()
        assert sum(writer.ends.values()) == count
        write_numbers(writer, topic, range(count, count + 100), 50, 1)
    in_order(cluster, topic, count + 100, 50)


def test_keys_go_where_other_clients_put_them(cluster: Cluster, make_topic: MakeTopic) -> None:
    ours, theirs = make_topic(7), make_topic(7)
    random_bytes = random.Random(7).randbytes
    keys = [random_bytes(length) for length in range(60) for _ in range(5)]
    with LogWriter(cluster) as writer:
        writer.write(ours, keys, keys)
    producer = Producer({"bootstrap.servers": cluster.bootstrap, "partitioner": "murmur2_random"})
    for key in keys:
        if key:
            producer.produce(theirs, key, key)
    assert producer.flush(60) == 0
    found = [
        {row.key: row.partition for row in read_all(cluster, it, settled=True)}
        for it in (ours, theirs)
    ]
    found[0].pop(b"")
    assert found[0] == found[1]


def test_what_a_record_can_hold(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic(2)
    headers: list[list[tuple[str, bytes | None]]] = [[("a", b"1"), ("b", None)], [], [("a", b"")]]
    with LogWriter(cluster) as writer:
        writer.write(topic, None, [b"plain"], partition=0, timestamps_ms=5)
        writer.write(
            topic,
            [b"k", None, b""],
            [None, b"v", b""],
            headers=headers,
            timestamps_ms=[1, 2, 3],
            partition=1,
        )
        writer.write(topic, [b"later"], None, partition=0, timestamps_ms=6)
        writer.write(topic, pa.array([b"x", None]), pa.array([b"y", b"z"]), partition=1)
        writer.write(topic, [], [])
    rows = read_all(cluster, topic, settled=True)
    assert [(row.partition, row.offset) for row in rows] == [
        (0, 0), (0, 1), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4)
    ]  # fmt: skip
    assert [(row.key, row.value) for row in rows] == [
        (None, b"plain"), (b"later", None),
        (b"k", None), (None, b"v"), (b"", b""), (b"x", b"y"), (None, b"z"),
    ]  # fmt: skip
    assert [row.timestamp_ms for row in rows[:5]] == [5, 6, 1, 2, 3]
    assert [row.headers for row in rows[2:6]] == [*(tuple(items) for items in headers), ()]
    assert rows[5].timestamp_ms > 1_600_000_000_000


@pytest.mark.parametrize("id_", [None, "few"])
def test_few_records_and_many_are_written_alike(
    cluster: Cluster, make_topic: MakeTopic, seed: int, id_: str | None
) -> None:
    """Into one partition: few go another way than many, and columns another than lists."""
    topic, rng = make_topic(), random.Random(seed)
    name = None if id_ is None else unique(id_)
    expected: list[tuple[bytes | None, bytes | None, int, tuple[tuple[str, bytes | None], ...]]]
    expected = []
    with LogWriter(cluster, transactional_id=name, codec=rng.choice(CODECS)) as writer:
        for _ in range(40):
            writer.begin()
            for _ in range(rng.randint(1, 3)):
                count = rng.choice([1, 1, 2, 4, 5, 30])
                keys = [rng.choice([None, b"", b"k%d" % at]) for at in range(count)]
                values = [rng.choice([None, b"v" * rng.choice([0, 9, 20_000])]) for _ in keys]
                headers = [[("h", rng.choice([None, b"x"]))] * rng.randint(0, 2) for _ in keys]
                times = [rng.randint(1, 10**12) for _ in keys]
                has_headers, columns = rng.random() < 0.3, rng.random() < 0.3
                writer.write(
                    topic,
                    pa.array(keys, pa.binary()) if columns else keys,
                    pa.array(values, pa.binary()) if columns else values,
                    headers=headers if has_headers else None,
                    timestamps_ms=times,
                    partition=rng.choice([None, 0]),
                )
                given = [tuple(items) if has_headers else () for items in headers]
                expected += zip(keys, values, times, given, strict=True)
            writer.commit()

        def elsewhere() -> None:
            writer.begin()
            writer.write(topic, [b"k"], [b"v"], partition=1)
            writer.flush()

        with pytest.raises(ClientError, match="no partition 1"):
            elsewhere()
        writer.abort()
    found = read_all(cluster, topic, settled=True)
    assert [(row.key, row.value, row.timestamp_ms, row.headers) for row in found] == expected


def test_records_without_keys_are_spread(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic(4)
    with LogWriter(cluster) as writer:
        writer.write(topic, None, [b"x"] * 10_000)
        writer.write(topic, pa.nulls(10_000, pa.binary()), pa.array([b"x"] * 10_000))
    counts = {number: len(records) for number, records in read_topic(cluster, topic).items()}
    assert sum(counts.values()) == 20_000
    assert min(counts.values()) >= 3_000


def test_what_cannot_be_written(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic, nowhere = make_topic(), unique("nowhere")
    with pytest.raises(ClientError, match="unknown codec 'zip'"):
        LogWriter(cluster, codec="zip")
    with LogWriter(cluster) as writer:
        with pytest.raises(ClientError, match="different lengths"):
            writer.write(topic, [b"a"], [b"b", b"c"])
        with pytest.raises(ClientError, match="neither"):
            writer.write(topic, None, None)
        with pytest.raises(ClientError, match="must be bytes"):
            writer.write(topic, [b"a"], [1])
        writer.write(topic, [b"good"], [b"good"])
        writer.flush()
        writer.write(topic, [b"a"], [b"a"], partition=1)
        with pytest.raises(ClientError, match="no partition 1"):
            writer.flush()
        with pytest.raises(ClientError, match="failed before"):
            writer.write(topic, [b"b"], [b"b"])
        writer.abort()
        hasty = LogWriter(cluster, timeout_s=0.3)
        hasty.write(nowhere, [b"a"], [b"a"])
        with pytest.raises((RefusedError, GaveUpError), match=nowhere):
            hasty.flush()
        hasty.close()
        writer.write(topic, [b"again"], [b"again"])
        writer.flush()
    with pytest.raises(ClientError, match="closed"):
        writer.write(topic, [b"a"], [b"a"])
    assert [row.key for row in read_all(cluster, topic, settled=True)] == [b"good", b"again"]


def test_transactions_are_whole_or_not_there(cluster: Cluster, make_topic: MakeTopic) -> None:
    first, second = make_topic(3), make_topic(2)
    with LogWriter(cluster, transactional_id=unique("txn"), batch_bytes=1_000) as writer:
        with pytest.raises(ClientError, match="is open"):
            writer.write(first, [b"a"], [b"a"])
        for step in range(6):
            writer.begin()
            write_numbers(writer, first, range(step * 1_000, step * 1_000 + 1_000), 10, 100)
            writer.write(second, [b"step"], [b"%d" % step])
            if step == 3:
                writer.flush()
            if step % 3 == 2:
                writer.abort()
            else:
                writer.commit()
        writer.begin()
        writer.commit()
        writer.begin()
        with pytest.raises(ClientError, match="open already"):
            writer.begin()
        writer.write(second, [b"step"], [b"never"])
        writer.flush()
    kept = [step for step in range(6) if step % 3 != 2]
    assert [row.value for row in read_all(cluster, second, settled=True)] == [
        b"%d" % step for step in kept
    ]
    numbers = sorted(int(row.value or b"") for row in read_all(cluster, first, settled=True))
    assert numbers == [step * 1_000 + n for step in kept for n in range(1_000)]
    everything = read_all(cluster, second, isolation="read_uncommitted")
    assert b"never" in {row.value for row in everything}


def test_offsets_of_a_group_go_along(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic, group = make_topic(), unique("group")
    with LogWriter(cluster, transactional_id=unique("txn")) as writer:
        writer.begin()
        writer.write(topic, [b"a"], [b"a"])
        writer.transaction.send_offsets(group, {(topic, 0): 5})
        writer.commit()
    with LogWriter(cluster) as plain, pytest.raises(ClientError, match="no transactional id"):
        plain.transaction.send_offsets(group, {(topic, 0): 6})
    assert [row.value for row in read_all(cluster, topic, settled=True)] == [b"a"]


def test_a_newer_writer_fences_the_old_one(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic, id_ = make_topic(), unique("txn")
    old, new = LogWriter(cluster, transactional_id=id_), LogWriter(cluster, transactional_id=id_)
    old.begin()
    old.write(topic, [b"old"], [b"old"])
    old.flush()
    new.begin()
    new.write(topic, [b"new"], [b"new"])
    old.write(topic, [b"late"], [b"late"])
    with pytest.raises(FencedError):
        old.commit()
    new.commit()
    with pytest.raises(FencedError):
        old.abort()
    old.close()
    new.close()
    assert [row.value for row in read_all(cluster, topic, settled=True)] == [b"new"]


def test_memory_is_bounded(embedded: Broker) -> None:
    with TcpProxy(embedded.bootstrap) as proxy, Through(proxy) as cluster:
        topic = unique("bounded")
        topics.create(cluster, topic, partitions=8, config=KEEP)
        proxy.rate_bytes_per_s = 20_000_000
        with LogWriter(cluster, codec="none", buffer_bytes=200_000) as writer:
            value = b"x" * 1_000
            for first in range(0, 10_000, 500):
                writer.write(topic, [b"%d" % n for n in range(first, first + 500)], [value] * 500)
                assert writer.held_bytes < 3_000_000
        assert sum(map(len, read_topic(cluster, topic).values())) == 10_000


@pytest.mark.parametrize("id_", [None, "txn"])
def test_a_broker_that_dies_and_comes_back(id_: str | None) -> None:
    with Broker() as broker, Cluster(broker.bootstrap) as cluster:
        topics.create(cluster, "t", partitions=3, config=KEEP)
        written = threading.Semaphore(0)

        def fail_often() -> None:
            for _ in range(3):
                for _ in range(20):
                    written.acquire()
                broker.crash()
                broker.start()

        thread = threading.Thread(target=fail_often)
        thread.start()
        with LogWriter(cluster, transactional_id=id_, batch_bytes=1_000, linger_ms=1) as writer:
            for first in range(0, WRITER_RECORDS, 100):
                if first % 3_000 == 0:
                    writer.begin()
                write_numbers(writer, "t", range(first, first + 100), 50, 100)
                if (first + 100) % 3_000 == 0:
                    writer.commit()
                written.release()
        thread.join()
        in_order(cluster, "t", WRITER_RECORDS, 50)


@pytest.mark.parametrize("id_", [None, "txn"])
def test_connections_that_are_cut(embedded: Broker, id_: str | None) -> None:
    with TcpProxy(embedded.bootstrap) as proxy, Through(proxy) as cluster:
        topic = unique("cut")
        topics.create(cluster, topic, partitions=3, config=KEEP)
        for at in (400, 1_000, 3_000, 5_001, 9_002, 20_003, 700, 705, 30_100):
            proxy.cut_after(at, towards="client")
            proxy.cut_after(at * 10, towards="server")
        with LogWriter(
            cluster, transactional_id=id_ and unique(id_), batch_bytes=1_000, linger_ms=1
        ) as writer:
            for first in range(0, 20_000, 1_000):
                writer.begin()
                write_numbers(writer, topic, range(first, first + 1_000), 50, 50)
                writer.commit()
        in_order(cluster, topic, 20_000, 50)


def test_last_values(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic(3, cleanup_policy="compact")
    assert last_values(cluster, topic) == {}
    with LogWriter(cluster, transactional_id=unique("txn")) as writer:
        writer.begin()
        writer.write(topic, [b"a", b"b", b"c"], [b"1", b"2", b"3"])
        writer.commit()
        writer.begin()
        writer.write(topic, [b"a", b"d"], [b"lost", b"lost"])
        writer.abort()
        writer.begin()
        writer.write(topic, [b"b", b"c", b"c"], [b"4", b"5", None])
        writer.commit()
        assert last_values(cluster, topic, settled=True) == {b"a": b"1", b"b": b"4"}
        writer.begin()
        writer.write(topic, [b"a"], [b"open"])
        writer.flush()
        assert last_values(cluster, topic) == {b"a": b"1", b"b": b"4"}
        writer.abort()


def test_reading_from_somewhere(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic(2)
    with LogWriter(cluster) as writer:
        for number in (0, 1):
            writer.write(topic, None, [b"%d" % n for n in range(10)], partition=number)
    rows = read_all(cluster, topic, start={1: 7})
    assert [(row.partition, row.offset) for row in rows] == [
        *((0, n) for n in range(10)),
        *((1, n) for n in range(7, 10)),
    ]
    assert [row.offset for row in read_all(cluster, topic, partitions=[1], start={1: 9})] == [9]
    with pytest.raises(OffsetGoneError, match="no offset 11"):
        read_all(cluster, topic, start={0: 11, 1: 11}, partitions=[0, 1])
    batches = list(read_batches(cluster, topic, partitions=[0]))
    assert sum(batch.num_rows for _, batch in batches) == 10
    assert {number for number, _ in batches} == {0}
