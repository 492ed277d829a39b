"""A store that lacks what the log does not have any more is told, and not fed further."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import Producer

from penstock.client.connection import Cluster
from penstock.client.metadata import EARLIEST, Metadata
from penstock.client.topics import create, delete
from penstock.errors import ConfigError
from penstock.sinks import FencedError, OutOfStepError, Position, Refused, Schema
from penstock.sinks.errors import StoreAwayError, StoreUnreachableError
from penstock.sinks.fields import from_text
from penstock.sinks.spec import SinkSpec
from penstock.spark.runtime.sink_loop import LogAddress, Report, SinkLoop, Start, failure_of
from penstock.spark.sinking.errors import RecordsGoneError, TopicReplacedError
from penstock.spark.sinking.folder import SinkFolder
from penstock.spark.sinking.learning import parser_of
from penstock.spark.sinking.letters import Letters
from penstock.spark.sinking.starting import Store, starting
from penstock.testing import Broker
from penstock.testing.sinks import changes, never
from tests.spark.sinking.changelog import records


@pytest.fixture
def cluster(log_broker: Broker) -> Iterator[Cluster]:
    with Cluster(log_broker.bootstrap) as made:
        yield made


def feed(broker: Broker, topic: str, count: int, *, time_ms: int = 0) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for number in range(count):
        headers = [("trace", b"abc"), ("penstock.error.reason", b"of before")]
        value = f'{{"id":{number}}}'
        producer.produce(
            topic, value, str(number), timestamp=time_ms, partition=0, headers=list(headers)
        )
    assert producer.flush(60) == 0


def begin(cluster: Cluster, topic: str, at: int, **more: object) -> dict[str, dict[str, int]]:
    position = Position({(topic, 0): at}) if at else Position()
    store = Store("orders", "the store", position, **more)  # type: ignore[arg-type]
    return starting(cluster, Metadata(cluster), topic, store)


def test_a_topic_that_is_another_now(log_broker: Broker, cluster: Cluster, topic: str) -> None:
    create(cluster, topic, partitions=1)
    feed(log_broker, topic, 5)
    known = str(Metadata(cluster).topic_id(topic))
    assert begin(cluster, topic, 0) == {topic: {"0": EARLIEST}}
    assert begin(cluster, topic, 3, topic_id=known) == {topic: {"0": 3}}
    with pytest.raises(TopicReplacedError, match="ends at 5"):
        begin(cluster, topic, 6)
    delete(cluster, [topic])
    create(cluster, topic, partitions=1)
    # It is as long as before, so that its end does not tell.
    feed(log_broker, topic, 5)
    with pytest.raises(TopicReplacedError, match="made again") as told:
        begin(cluster, topic, 3, topic_id=known)
    assert "rebuild orders" in told.value.advice
    # What the store knows itself counts, wherever it is fed.
    now = str(Metadata(cluster).topic_id(topic))
    mine = Store("orders", "the store", Position({(topic, 0): 3}, {topic: now}), known)
    assert starting(cluster, Metadata(cluster), topic, mine) == {topic: {"0": 3}}
    other = Store("orders", "the store", Position({(topic, 0): 3}, {topic: known}), now)
    with pytest.raises(TopicReplacedError, match="another cluster"):
        starting(cluster, Metadata(cluster), topic, other)
    with pytest.raises(TopicReplacedError, match="filled from other"):
        starting(cluster, Metadata(cluster), topic, Store("s", "s", Position({("other", 0): 1})))


def test_records_that_were_deleted(log_broker: Broker, cluster: Cluster, topic: str) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    create(cluster, topic, partitions=1)
    feed(log_broker, topic, 10)
    admin = AdminClient({"bootstrap.servers": log_broker.bootstrap})
    for done in admin.delete_records([TopicPartition(topic, 0, 7)]).values():
        done.result(60)
    assert begin(cluster, topic, 7) == {topic: {"0": 7}}
    with pytest.raises(RecordsGoneError, match="begins at 7") as told:
        begin(cluster, topic, 6)
    assert "rebuild orders" in told.value.advice
    # A new store takes what is there.
    assert begin(cluster, topic, 0) == {topic: {"0": EARLIEST}}


def test_tombstones_that_may_be_gone(log_broker: Broker, cluster: Cluster, topic: str) -> None:
    create(cluster, topic, partitions=1, config={"cleanup.policy": "compact"})
    old_ms = int((time.time() - 48 * 3600) * 1000)
    feed(log_broker, topic, 5, time_ms=old_ms)
    feed(log_broker, topic, 5)
    # All that is not read is younger than a tombstone must be to go; or it is all read.
    assert begin(cluster, topic, 5) == {topic: {"0": 5}}
    assert begin(cluster, topic, 10) == {topic: {"0": 10}}
    # It was fed lately, so that it had the tombstones that are gone.
    assert begin(cluster, topic, 3, fed_s=time.time() - 3600) == {topic: {"0": 3}}
    with pytest.raises(RecordsGoneError, match="without a trace") as told:
        begin(cluster, topic, 3)
    assert "rebuild orders" in told.value.advice


def test_when_it_was_last_fed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = SinkFolder(tmp_path)
    (tmp_path / "orders").mkdir()
    assert folder.fed("orders") == ()
    clock = iter(range(1000, 9000, 4))
    monkeypatch.setattr("penstock.spark.sinking.folder.time.time", lambda: float(next(clock)))
    for offset in (1, 2, 3, 3, 4, 5, 6):
        folder.note_fed("orders", Position({("t", 0): offset}))
    # Every ten seconds at most.
    assert [(at.offsets["t", 0], at_s) for at, at_s in folder.fed("orders")] == [
        (1, 1000), (3, 1012), (6, 1024),
    ]  # fmt: skip
    (tmp_path / "orders" / "fed.json").write_text("{")
    assert folder.fed("orders") == ()


def test_a_store_that_was_put_back_may_lack_tombstones(
    log_broker: Broker, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    """That its place was fed a moment ago tells nothing of what is in it now."""
    create(cluster, topic, partitions=1, config={"cleanup.policy": "compact"})
    feed(log_broker, topic, 5, time_ms=int((time.time() - 48 * 3600) * 1000))
    feed(log_broker, topic, 5)
    spec = SinkSpec("orders", topic, f"sqlite:///{tmp_path}/s.db", key=("id",), fields="id bigint",
                    format="json")  # fmt: skip
    schema = Schema.of(from_text(spec.fields), "id")
    with spec.sink() as sink:
        sink.open(schema)
        one = changes(schema, [{"id": 1}], [], since=0, until=3)
        sink.apply(replace(one, position=Position({(topic, 0): 3})), never)
    for fed_at, refused in ((10, True), (3, False)):
        fed = ((Position({(topic, 0): fed_at}), time.time()),)
        reports: list[Report] = []
        start = Start(topic, once=True, fed=fed)
        SinkLoop(spec, LogAddress(log_broker.bootstrap), start, reports.append).run()
        failure = reports[-1].failure
        assert (failure is not None and "without a trace" in failure.message) == refused, reports


def test_letters_are_the_records_as_they_were(
    log_broker: Broker, cluster: Cluster, topic: str
) -> None:
    create(cluster, topic, partitions=1)
    feed(log_broker, topic, 5, time_ms=1_700_000_000_123)
    letters = Letters(cluster, f"{topic}.dead", "orders")
    letters.refused([Refused((n,), f"too {n}", topic, 0, n) for n in (1, 4)], ["id"])
    found = records(log_broker.bootstrap, f"{topic}.dead")
    assert letters.written == 2
    by_key = {each.key(): each for each in found}
    for number in (1, 4):
        letter = by_key[str(number).encode()]
        assert letter.value() == f'{{"id":{number}}}'.encode()
        assert letter.headers() == [
            ("trace", b"abc"),
            ("penstock.error.topic", topic.encode()),
            ("penstock.error.partition", b"0"),
            ("penstock.error.offset", str(number).encode()),
            ("penstock.error.timestamp", b"1700000000123"),
            ("penstock.error.reason", f"too {number}".encode()),
            ("penstock.error.sink", b"orders"),
        ]


def test_avro_is_told_before_all_of_it_is_put_aside(
    log_broker: Broker, cluster: Cluster, topic: str, tmp_path: Path
) -> None:
    create(cluster, topic, partitions=1)
    producer = Producer({"bootstrap.servers": log_broker.bootstrap})
    producer.produce(topic, b"\0\0\0\0\1\2", b"k")
    assert producer.flush(60) == 0
    spec = SinkSpec("orders", topic, f"sqlite:///{tmp_path}/s.db", key=("id",))
    with pytest.raises(ConfigError, match="Avro"):
        parser_of(spec, cluster, topic, None)


@pytest.mark.parametrize("once", [True, False])
def test_a_store_that_was_never_reached(once: bool) -> None:
    """A run that is to end does not wait for it; it may have the wrong address."""

    def is_retried(error: Exception, *, reached: bool = False) -> bool:
        return failure_of(error, "orders", once=once, reached=reached).retriable

    assert is_retried(StoreAwayError("nobody is there")) is not once
    assert is_retried(StoreUnreachableError("it is locked"))
    assert is_retried(StoreAwayError("nobody is there any more"), reached=True)
    # One that was put back is fed again; two who write in turn would fence each other for ever.
    assert is_retried(OutOfStepError("the store is at 3"))
    assert not is_retried(FencedError("another writes"))
