"""Fetching: raw batches of many partitions, uncopied, whatever happens to connections."""

from __future__ import annotations

import threading
from time import monotonic

import pytest

from penstock.client import topics
from penstock.client.connection import Cluster, Reusable
from penstock.client.errors import GaveUpError, OffsetGoneError, RefusedError
from penstock.client.fetching import Fetcher
from penstock.client.metadata import Place
from penstock.client.producing import Sender
from penstock.records.batch import headers
from penstock.records.record import decode, simple_batch
from penstock.testing.broker import Broker
from penstock.testing.tcp_proxy import TcpProxy
from tests.client.conftest import KEEP, MakeTopic, unique
from tests.client.reader import Through, take, values


def fetch_on(fetcher: Fetcher, place: Place, offset: int) -> None:
    for _ in range(1000):
        fetcher.fetch({place: offset}, 100)


def test_batches_of_many_partitions(cluster: Cluster, make_topic: MakeTopic) -> None:
    names = [make_topic(3), make_topic(2)]
    places: list[Place] = [(names[0], 0), (names[0], 1), (names[0], 2), (names[1], 0)]
    with Sender(cluster) as sender:
        for number, (topic, partition) in enumerate(places):
            for step in range(5):
                sender.send(topic, partition, simple_batch([b"%d:%d" % (number, step)]))
    positions: dict[Place, int] = {**dict.fromkeys(places, 1), (names[1], 1): 0}
    got: dict[Place, list[bytes | None]] = {place: [] for place in positions}
    with Fetcher(cluster) as fetcher:
        while sum(map(len, got.values())) < 16:
            for place, fetched in fetcher.fetch(positions, 2000).items():
                positions[place], records = take(fetched.data, positions[place], fetched.aborted)
                got[place] += [record.value for record in records]
                assert fetched.high_watermark == fetched.last_stable_offset == positions[place]
                assert fetched.log_start == 0
    for number, place in enumerate(places):
        assert got[place] == [b"%d:%d" % (number, step) for step in range(1, 5)]


def test_few_bytes_still_bring_a_whole_batch(cluster: Cluster, make_topic: MakeTopic) -> None:
    name = make_topic()
    batch = simple_batch([b"x" * 50_000])
    with Sender(cluster) as sender:
        sender.send(name, 0, batch)
        sender.send(name, 0, batch)
    with Fetcher(cluster, max_bytes=1000, partition_max_bytes=1000) as fetcher:
        data = fetcher.fetch({(name, 0): 0}, 60_000)[name, 0].data
        assert [header.size for _, header in headers(data)] == [len(batch)]


def test_a_wait_ends_with_the_first_record(cluster: Cluster, make_topic: MakeTopic) -> None:
    name = make_topic()
    with Fetcher(cluster) as fetcher, Cluster(cluster.bootstrap) as other:
        assert not fetcher.fetch({(name, 0): 0}, 0)[name, 0].data
        assert not fetcher.fetch({(name, 0): 0}, 50)[name, 0].data

        def produce() -> None:
            with Sender(other) as sender:
                sender.send(name, 0, simple_batch([b"late"]))

        thread = threading.Thread(target=produce)
        thread.start()
        fetched = fetcher.fetch({(name, 0): 0}, 60_000)[name, 0]
        thread.join()
        assert [record.value for record in decode(fetched.data)] == [b"late"]


def test_other_places_need_not_wait_for_what_was_asked_before(
    cluster: Cluster, make_topic: MakeTopic
) -> None:
    quiet, busy = make_topic(), make_topic()
    with Sender(cluster) as sender:
        sender.send(busy, 0, simple_batch([b"a"]))
    with Fetcher(cluster) as fetcher:
        # A request is left behind that is held back for an hour.
        fetcher._ask({(quiet, 0): 0}, {}, monotonic() + 3_600)
        assert fetcher.fetch({(busy, 0): 0}, 60_000)[busy, 0].data


def test_views_stay_what_they_are(cluster: Cluster, make_topic: MakeTopic) -> None:
    name = make_topic()
    with Sender(cluster) as sender:
        for step in range(4):
            sender.send(name, 0, simple_batch([b"%d" % step * 1000]))
    with Fetcher(cluster, max_bytes=1000) as fetcher:
        kept = [fetcher.fetch({(name, 0): step}, 60_000)[name, 0].data for step in range(4)]
        for step, data in enumerate(kept):
            assert [record.value for record in decode(data)] == [b"%d" % step * 1000]


def test_memory_is_used_again_when_nobody_looks() -> None:
    memory = Reusable()
    first = memory.take(10)
    first[:] = b"0123456789"
    second = memory.take(10)
    second[:] = b"abcdefghij"
    assert bytes(first) == b"0123456789"
    del second
    third = memory.take(5)
    assert bytes(third) == b"abcde"


def test_offsets_that_are_gone(cluster: Cluster, make_topic: MakeTopic) -> None:
    name = make_topic()
    with Sender(cluster) as sender:
        sender.send(name, 0, simple_batch([b"a", b"b"]))
    with Fetcher(cluster) as fetcher:
        with pytest.raises(OffsetGoneError, match=f"{name}-0 has no offset 3.*from 0 to 2") as told:
            fetcher.fetch({(name, 0): 3}, 60_000)
        assert (told.value.log_start, told.value.log_end) == (0, 2)
        # And it goes on.
        assert fetcher.fetch({(name, 0): 0}, 60_000)[name, 0].data


def test_topics_that_are_not_there(cluster: Cluster, make_topic: MakeTopic) -> None:
    name, nowhere = make_topic(), unique("nowhere")
    with Sender(cluster) as sender:
        sender.send(name, 0, simple_batch([b"a"]))
    with Fetcher(cluster) as fetcher:
        # One that is not there does not stop the others at once.
        assert (name, 0) in fetcher.fetch({(nowhere, 0): 0, (name, 0): 0}, 60_000)
    with Fetcher(cluster, timeout_s=0.3) as fetcher:
        with pytest.raises((GaveUpError, RefusedError), match=nowhere):
            fetch_on(fetcher, (nowhere, 0), 0)


def test_connections_are_cut_and_made_anew(embedded: Broker) -> None:
    name = unique("cut")
    batches = [simple_batch([b"%d" % step, b"x" * 20_000]) for step in range(50)]
    with TcpProxy(embedded.bootstrap) as proxy:
        with Cluster(embedded.bootstrap) as direct, Sender(direct) as sender:
            topics.create(direct, name, config=KEEP)
            for batch in batches:
                sender.send(name, 0, batch)
        # Answers end in the middle, again and again.
        for at in (10, 100, 5_000, 60_000, 300_000):
            proxy.cut_after(at, towards="client")
        with Through(proxy) as cluster:
            found = values(cluster, name)
    assert found[::2] == [b"%d" % step for step in range(50)]


def test_a_broker_that_is_gone(embedded: Broker) -> None:
    with Broker() as broker, Cluster(broker.bootstrap) as cluster:
        topics.create(cluster, "t", config=KEEP)
        with Sender(cluster) as sender:
            sender.send("t", 0, simple_batch([b"a"]))
        broker.crash()
        with Fetcher(cluster, timeout_s=1) as fetcher:
            with pytest.raises(GaveUpError, match="fetching t-0"):
                fetch_on(fetcher, ("t", 0), 1)
        broker.start()
        with Fetcher(cluster) as fetcher:
            assert fetcher.fetch({("t", 0): 0}, 60_000)["t", 0].data
