"""Sinks fed by Spark: what is in the store is what the topic says, whatever happens."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from penstock.client.connection import Cluster
from penstock.client.topics import create
from penstock.sinks import Position
from penstock.sinks.spec import SinkSpec
from penstock.spark.runtime.sink_query import SinkQuery
from penstock.spark.sinking.manager import SinkManager
from penstock.testing import Broker
from tests.spark.sinking.changelog import Changelog, records, table
from tests.spark.sinking.managed import managed, rows_in, until
from tests.waiting import eventually

# Several starts of queries each, on a machine that may be busy.
pytestmark = pytest.mark.timeout(300)


def run_once(spark: SparkSession, broker: Broker, folder: Path, specs: list[SinkSpec]) -> None:
    with managed(spark, broker, folder, specs, once=True) as manager:
        eventually(manager.step, timeout_s=90)
        assert manager.failed == []


def test_a_table_follows_its_topic(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path, seed: int
) -> None:
    store = tmp_path / "shop.db"
    log = Changelog(log_broker.bootstrap, topic, seed)
    log.feed(250, bad=0.1)
    spec = SinkSpec("orders", topic, f"sqlite:///{store}", max_records=200)
    # A run with an end does not wait for the first record, which would tell the columns.
    with Cluster(log_broker.bootstrap) as cluster:
        create(cluster, f"{topic}.empty")
    empty = SinkSpec("empty", f"{topic}.empty", f"sqlite:///{tmp_path}/empty.db")
    run_once(spark, log_broker, tmp_path / "data", [spec, empty])
    assert not (tmp_path / "empty.db").exists()
    assert rows_in(store, "orders") == table(log_broker.bootstrap, topic)
    _check_letters(log_broker, topic)
    # A new column appears, and goes on from the store's position.
    log.feed(100, extra=True)
    run_once(spark, log_broker, tmp_path / "data", [spec])
    wanted = table(log_broker.bootstrap, topic)
    assert rows_in(store, "orders") == {key: {"note": None, **row} for key, row in wanted.items()}
    _check_letters(log_broker, topic)


def _check_letters(broker: Broker, topic: str) -> None:
    """Each bad record is put aside as it was, unless a good one came right after it."""
    log = sorted(records(broker.bootstrap, topic), key=lambda each: (each.partition(),
                                                                     each.offset()))  # fmt: skip
    bad = {(each.partition(), each.offset()): each for each in log
           if (each.value() or b"").endswith(b'"after":')}  # fmt: skip
    last = {each.key(): each for each in log}
    needed = {(each.partition(), each.offset()) for each in last.values()} & bad.keys()
    told: dict[tuple[int, int], Any] = {}
    for letter in records(broker.bootstrap, f"{topic}.dead"):
        headers = dict(letter.headers())
        at = (int(headers["penstock.error.partition"]), int(headers["penstock.error.offset"]))
        told[at] = letter
        assert (letter.key(), letter.value()) == (bad[at].key(), bad[at].value())
        assert headers["n"] == dict(bad[at].headers())["n"]
        assert b"JSON" in headers["penstock.error.reason"]
    assert needed <= told.keys() <= bad.keys()
    assert needed


def test_rebuilt_beside_while_another_fails_alone(
    spark: SparkSession,
    log_broker: Broker,
    topic: str,
    tmp_path: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = tmp_path / "shop.db"
    log = Changelog(log_broker.bootstrap, topic, seed)
    log.feed(200)
    good = SinkSpec("orders", topic, f"sqlite:///{store}", key=("id",))
    broken = SinkSpec("broken", topic, f"sqlite:///{tmp_path}?table=t")
    specs = [good, broken]
    with managed(spark, log_broker, tmp_path / "data", specs) as manager:
        until(manager, lambda: manager.failed == ["broken"])
        until(manager, lambda: _at_end(manager, log_broker, topic))
        assert rows_in(store, "orders") == table(log_broker.bootstrap, topic)
        # Someone has spoilt the table; rebuilding mends it, and it goes on afterwards.
        with closing(sqlite3.connect(store)) as connection, connection:
            connection.execute("UPDATE orders SET name = 'spoilt'")
        seen: list[tuple[Position | None, Position | None]] = []
        switch, start = SinkQuery.switch, SinkQuery.start

        def watched(built: SinkQuery) -> None:
            seen.append((built.applied.position, manager._live["orders"].applied.position))
            switch(built)

        def begun(query: SinkQuery) -> None:
            start(query)
            log.feed(10)

        monkeypatch.setattr(SinkQuery, "switch", watched)
        monkeypatch.setattr(SinkQuery, "start", begun)
        manager.answer({"do": "rebuild", "sink": "orders"})
        until(manager, lambda: not any(each.rebuilding for each in manager.status()))
        until(manager, lambda: _status(manager)["state"] == "running")
        # The table does not go back in time.
        ((new, old),) = seen
        assert new is not None
        assert old is not None
        assert new.reaches(old)
        # What is fed by a start that comes later would not be waited for.
        monkeypatch.setattr(SinkQuery, "start", start)
        log.feed(50)
        until(manager, lambda: _at_end(manager, log_broker, topic))
        assert rows_in(store, "orders") == table(log_broker.bootstrap, topic)
        # Paused: what comes then is not taken, and the lag is seen.
        manager.answer({"do": "pause", "sink": "orders"})
        until(manager, lambda: _status(manager)["state"] == "paused")
        log.feed(20)
        until(manager, lambda: (_status(manager)["lag"] or 0) >= 20)
        manager.answer({"do": "resume", "sink": "orders"})
        until(manager, lambda: _at_end(manager, log_broker, topic))
        assert rows_in(store, "orders") == table(log_broker.bootstrap, topic)
        assert "broken" not in {each.name for each in manager.status() if not each.error}


def _status(manager: SinkManager) -> dict[str, Any]:
    found: dict[str, Any] = next(
        each.as_dict() for each in manager.status() if each.name == "orders"
    )
    return found


def _at_end(manager: SinkManager, broker: Broker, topic: str) -> bool:
    from penstock.spark.flows.inputs import Place
    from penstock.spark.sinking.lag import ends_of

    ends = ends_of(Place(broker.bootstrap, {}, str), {topic})
    at = _status(manager)["position"].get(topic, {})
    return all(at.get(str(number), 0) >= end for (_, number), end in ends.items())


def test_a_topic_that_was_made_again_is_noticed(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path
) -> None:
    with Cluster(log_broker.bootstrap) as cluster:
        create(cluster, topic, partitions=1)
    spec = SinkSpec("orders", topic, f"sqlite:///{tmp_path}/s.db", key=("id",), fields="id bigint",
                    format="json")  # fmt: skip
    from penstock.sinks import Schema
    from penstock.sinks.fields import from_text
    from penstock.testing.sinks import changes, never

    schema = Schema.of(from_text(spec.fields), "id")
    with spec.sink() as sink:
        sink.open(schema)
        ahead = changes(schema, [{"id": 1}], [], since=0, until=5)
        from dataclasses import replace

        sink.apply(replace(ahead, position=Position({(topic, 0): 5}), since=Position()), never)
    with managed(spark, log_broker, tmp_path / "data", [spec]) as manager:
        until(manager, lambda: manager.failed)
        status = manager.status()[0]
        assert "made again" in status.error
        assert "rebuild" in status.advice
        assert json.loads((tmp_path / "data/orders/sink.json").read_text())["state"] == "failed"


@pytest.mark.parametrize("known_by", ["the store", "the folder"])
def test_the_same_topic_in_another_cluster_is_noticed(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path, known_by: str
) -> None:
    """Offsets are other ones there, also where its log is long enough to go on with the old."""
    store = tmp_path / "shop.db"
    spec = SinkSpec("orders", topic, f"sqlite:///{store}", key=("id",), fields="id bigint",
                    format="json")  # fmt: skip
    _rows(log_broker, topic, range(5))
    run_once(spark, log_broker, tmp_path / "data", [spec])
    folder = tmp_path / "data"
    if known_by == "the store":
        # As on another machine.
        folder = tmp_path / "elsewhere"
    else:
        # As stores were filled before they remembered the topic.
        with closing(sqlite3.connect(store)) as connection, connection:
            old = json.dumps({topic: {"0": 5}})
            connection.execute("UPDATE penstock_positions SET offsets = ?", (old,))
    with Broker() as other:
        _rows(other, topic, range(100, 110))
        with managed(spark, other, folder, [spec]) as manager:
            until(manager, lambda: manager.failed)
            status = _status(manager)
            assert "another cluster" in status["error"]
            assert "penstock sinks rebuild orders" in status["advice"]
            assert sorted(rows_in(store, "orders")) == [*range(5)]
            manager.answer({"do": "rebuild", "sink": "orders"})
            until(manager, lambda: _status(manager)["state"] == "running")
            assert sorted(rows_in(store, "orders")) == [*range(100, 110)]


def _rows(broker: Broker, topic: str, numbers: range) -> None:
    with Cluster(broker.bootstrap) as cluster:
        create(cluster, topic, partitions=1)
    producer = Producer({"bootstrap.servers": broker.bootstrap})
    for number in numbers:
        producer.produce(topic, json.dumps({"id": number}), str(number))
    assert producer.flush(60) == 0


def test_a_topic_that_is_made_later_is_waited_for(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path
) -> None:
    store, data = tmp_path / "s.db", tmp_path / "data"
    spec = SinkSpec("orders", topic, f"sqlite:///{store}", key=("id",), format="json")
    other = SinkSpec("other", f"{topic}-x", f"sqlite:///{store}", key=("id",), fields="id bigint",
                     format="json")  # fmt: skip
    with managed(spark, log_broker, data, [spec], once=True) as manager:
        eventually(manager.step, timeout_s=90)
        assert "does not exist" in manager.status()[0].error
        assert manager.failed == ["orders"]
    with managed(spark, log_broker, data, [spec, other]) as manager:
        told: list[tuple[str, str]] = []
        manager.on_change = lambda status: told.append((status.name, status.state))
        until(manager, lambda: "does not exist" in _error(manager))
        with Cluster(log_broker.bootstrap) as cluster:
            create(cluster, topic, partitions=1)
        # It is there, and has no rows yet to tell the columns by.
        until(manager, lambda: "no rows yet" in _error(manager))
        producer = Producer({"bootstrap.servers": log_broker.bootstrap})
        producer.produce(topic, b'{"id": 1, "name": "one"}', b"1")
        assert producer.flush(60) == 0
        until(manager, lambda: _status(manager)["put"])
        assert rows_in(store, "orders") == {1: {"id": 1, "name": "one"}}
        manager.stop()
        until(manager, manager.step)
        assert {each.name: each.state for each in manager.status()} == {
            "orders": "stopped", "other": "stopped",
        }  # fmt: skip
        assert [each.error for each in manager.status()] == ["", ""]
    states = [state for name, state in told if name == "orders"]
    assert states == ["waiting", "running", "stopping", "stopped"]
    # Once, however often it has looked.
    assert told.count(("other", "waiting")) == 1


def _error(manager: SinkManager) -> str:
    return str(_status(manager)["error"])


@pytest.mark.parametrize("text", ["id bigint"])
def test_a_row_of_json_with_a_plain_key(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path, text: str
) -> None:
    with Cluster(log_broker.bootstrap) as cluster:
        create(cluster, topic, partitions=1)
    producer = Producer({"bootstrap.servers": log_broker.bootstrap})
    given = [("1", b'{"id":1}'), ("2", b'{"id":2}'), ("1", None), ("3", b"{"), ("4", b"\0avro")]
    for key, value in given:
        producer.produce(topic, value, key)
    producer.flush(60)
    spec = SinkSpec("rows", topic, f"sqlite:///{tmp_path}/s.db", key=("id",), fields=text)
    run_once(spark, log_broker, tmp_path / "data", [spec])
    assert rows_in(tmp_path / "s.db", "rows") == {2: {"id": 2}}
    letters = records(log_broker.bootstrap, f"{topic}.dead")
    assert {(each.key(), each.value()) for each in letters} == {(b"3", b"{"), (b"4", b"\0avro")}


def test_a_sink_that_can_read_nothing_stops_before_anything_is_written(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path
) -> None:
    with Cluster(log_broker.bootstrap) as cluster:
        create(cluster, topic, partitions=1)
    spec = SinkSpec("orders", topic, f"sqlite:///{tmp_path}/s.db", key=("id",),
                    fields="id bigint, at timestamp, parts array<int>")  # fmt: skip
    producer = Producer({"bootstrap.servers": log_broker.bootstrap})
    for number in range(3):
        value = json.dumps({"id": number, "parts": [number, "x"]})
        producer.produce(topic, value, str(number))
    producer.flush(60)
    with managed(spark, log_broker, tmp_path / "data", [spec], once=True) as manager:
        eventually(manager.step, timeout_s=90)
        assert manager.failed == ["orders"]
        assert "field parts[] is not int32: 'x'" in _error(manager)
        assert f"{topic}-0 at offset 0" in _error(manager)
    with spec.sink() as store:
        assert store.position() in {None, Position()}
    # As it is the records that are wrong, and not the fields.
    run_once(spark, log_broker, tmp_path / "data", [replace(spec, max_dead_share=1.0)])
    assert rows_in(tmp_path / "s.db", "orders") == {}
    assert len(records(log_broker.bootstrap, f"{topic}.dead")) == 3
    # What was counted is still known at the next start.
    with managed(spark, log_broker, tmp_path / "data", [spec], once=True) as manager:
        assert _status(manager)["progress"]["dead_letters"] == 3
