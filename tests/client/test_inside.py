"""What a writer sees of a topic from inside its transaction; on both brokers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from penstock.client.connection import Cluster
from penstock.client.inside import Inside
from penstock.client.writer import LogWriter
from tests.broker.requests import delete_records
from tests.client.conftest import MakeTopic, unique


@contextmanager
def writer(cluster: Cluster, name: str = "") -> Iterator[LogWriter]:
    with LogWriter(cluster, transactional_id=name or unique("inside")) as made:
        yield made


def put(made: LogWriter, topic: str, *keys: str, commit: bool | None = None) -> None:
    """Write keys in a transaction of their own, and end it; None: leave it open."""
    made.begin()
    add(made, topic, *keys)
    if commit is not None:
        (made.commit if commit else made.abort)()


def add(made: LogWriter, topic: str, *keys: str) -> None:
    made.write(topic, [key.encode() for key in keys], [b"v"] * len(keys))
    made.flush()


def keys(look: Inside) -> list[str]:
    found = [key for _, batch in look.read() for key in batch.column("key").to_pylist()]
    return [key.decode() for key in found]


def look(
    cluster: Cluster, topic: str, made: LogWriter, start: Mapping[int, int] | None = None
) -> Inside:
    return Inside(cluster, topic, {made.ids.producer_id}, start=start)


def test_committed_records_and_our_own(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic()
    with writer(cluster) as ours, writer(cluster) as other:
        put(other, topic, "theirs", commit=True)
        put(ours, topic, "aborted", commit=False)
        put(ours, topic, "mine", commit=True)
        put(other, topic, "undone", commit=False)
        put(ours, topic, "open")
        assert keys(look(cluster, topic, ours)) == ["theirs", "mine", "open"]
        add(ours, topic, "more")
        assert keys(look(cluster, topic, ours)) == ["theirs", "mine", "open", "more"]
        ours.commit()
        # Also where a reader does not see the commit for a moment.
        assert keys(look(cluster, topic, ours)) == ["theirs", "mine", "open", "more"]


def test_beyond_what_another_has_open(cluster: Cluster, make_topic: MakeTopic) -> None:
    """Whoever hangs in the middle of a transaction hides nothing that was decided after."""
    topic = make_topic()
    with writer(cluster) as ours, writer(cluster) as other, writer(cluster) as hanging:
        put(ours, topic, "first", commit=True)
        put(hanging, topic, "hangs")
        put(ours, topic, "aborted", commit=False)
        put(other, topic, "undone", commit=False)
        put(other, topic, "theirs", commit=True)
        put(ours, topic, "mine", commit=True)
        put(ours, topic, "open")
        put(other, topic, "undecided")
        assert keys(look(cluster, topic, ours)) == ["first", "theirs", "mine", "open"]
        with LogWriter(cluster) as plain:
            plain.write(topic, [b"plain"], [b"v"])
            plain.flush()
        assert keys(look(cluster, topic, ours)) == ["first", "theirs", "mine", "open", "plain"]


def test_going_on_where_the_last_look_ended(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic(partitions=3)
    with writer(cluster) as ours:
        put(ours, topic, *map(str, range(100)), commit=True)
        first = look(cluster, topic, ours)
        assert sorted(keys(first)) == sorted(map(str, range(100)))
        assert first.count >= 100
        put(ours, topic, "later", commit=True)
        assert keys(look(cluster, topic, ours, first.ends)) == ["later"]
        # One that ends before it is another topic of the same name.
        beyond = dict.fromkeys(range(3), 1_000_000)
        assert len(keys(look(cluster, topic, ours, beyond))) == 101


def test_what_is_deleted_before_or_meanwhile_is_missed(
    cluster: Cluster, make_topic: MakeTopic
) -> None:
    topic = make_topic()
    with writer(cluster) as ours:
        put(ours, topic, *map(str, range(10)), commit=True)
        before = look(cluster, topic, ours)
        assert (keys(before), before.is_cut) == (list(map(str, range(10))), False)
        meanwhile = look(cluster, topic, ours)
        assert cluster.any().call(delete_records(topic, 4)).topics[0].partitions[0].error_code == 0
        assert (keys(meanwhile), meanwhile.is_cut) == (list(map(str, range(4, 10))), True)
        assert look(cluster, topic, ours).is_cut
        # What nobody asks for is not missed.
        later = look(cluster, topic, ours, {0: 4})
        assert (keys(later), later.is_cut) == (list(map(str, range(4, 10))), False)


def test_an_empty_topic(cluster: Cluster, make_topic: MakeTopic) -> None:
    with writer(cluster) as ours:
        ours.init()
        made = look(cluster, make_topic(partitions=2), ours)
        assert (keys(made), made.count) == ([], 0)
