"""`penstock migrate`: captures, flows and sinks go on in the target, with the next record."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.capture.delivery.capture import Capture
from penstock.capture.delivery.config import CaptureConfig
from penstock.capture.delivery.control import state_of
from penstock.capture.delivery.state import state_topic
from penstock.client.connection import Cluster
from penstock.client.metadata import Metadata
from penstock.client.migration_map import Move, find
from penstock.client.reading import read_all
from penstock.client.writer import LogWriter
from penstock.sinks.spec import SinkSpec
from penstock.spark.flows.declare import Flow, flow, stream, topic
from penstock.spark.flows.folder import Folder
from penstock.spark.flows.overseeing import Settings
from penstock.spark.flows.supervisor import Policy
from penstock.spark.sinking.folder import SinkFolder
from penstock.spark.sinking.manager import SinkManager, SinkStatus
from penstock.testing import Broker
from penstock.testing.apache_kafka import ApacheKafka
from penstock.testing.flows import FlowFailedError, FlowTester
from tests.cli.migrating import (
    clients,  # noqa: F401
    create,
    fill,
    producer,
    short_waits,  # noqa: F401
)
from tests.cli.runner import Ran, run
from tests.waiting import eventually

WAIT_S = 200.0


@pytest.fixture
def source() -> Iterator[Broker]:
    with Broker() as found:
        yield found


@pytest.fixture
def target() -> Iterator[Broker]:
    with Broker() as found:
        yield found


def migrate(source: Any, target: Any, *args: str) -> Ran:
    return run("migrate", "--from", source.bootstrap, "--to", target.bootstrap, *args)


# ---- captures ----------------------------------------------------------------------------


@contextmanager
def capturing(config: CaptureConfig, broker: Any) -> Iterator[None]:
    """A capture on a thread."""
    stop = threading.Event()
    capture = Capture(config, broker.bootstrap)
    thread = threading.Thread(target=capture.run, args=(stop,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(WAIT_S)
        assert not thread.is_alive()


def events(broker: Any, name: str) -> list[tuple[str, Any]]:
    with Cluster(broker.bootstrap) as cluster:
        found = [orjson.loads(row.value) for row in read_all(cluster, name) if row.value]
    return [(each["op"], (each["after"] or each["before"])["id"]) for each in found]


def test_a_capture_goes_on_in_the_target(source: Broker, target: Broker, tmp_path: Path) -> None:
    file = tmp_path / "shop.db"

    def write(*ids: int) -> None:
        with closing(sqlite3.connect(file)) as database:
            database.execute("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY)")
            database.executemany("INSERT INTO orders VALUES (?)", [(each,) for each in ids])
            database.commit()

    write(1, 2)
    config = CaptureConfig.from_mapping(
        "shop", {"url": f"sqlite:///{file}", "idle_ms": 10, "linger_ms": 0, "position_ms": 0}
    )
    with capturing(config, source):
        eventually(lambda: len(events(source, "shop.orders")) == 2, WAIT_S)
        write(3)
        eventually(lambda: len(events(source, "shop.orders")) == 3, WAIT_S)
    write(4)
    done = migrate(source, target, "--json").ok().json
    assert done["captures"] == ["shop"]
    assert events(target, "shop.orders") == events(source, "shop.orders")
    # Again does no harm.
    assert migrate(source, target, "--json").ok().json["captures"] == ["shop"]
    with capturing(config, target):
        eventually(lambda: len(events(target, "shop.orders")) == 4, WAIT_S)
    # No second snapshot, nothing twice, nothing missed.
    assert events(target, "shop.orders") == [("r", 1), ("r", 2), ("c", 3), ("c", 4)]
    with Cluster(source.bootstrap) as here, Cluster(target.bootstrap) as there:
        old, new = state_of(here, "shop"), state_of(there, "shop")
        assert old is not None
        assert new is not None
        assert new.events == old.events + 1
        # The source is written to once more: the target is left alone.
        with LogWriter(here) as writer:
            more = replace(old, paused=True, ts_ms=old.ts_ms + 1).encode()
            writer.write(state_topic("shop"), [b"shop"], [more])
    create(source.bootstrap, "other")
    again = migrate(source, target, "--exclude", "shop.*", "--json").ok()
    assert again.json["captures"] == []
    assert "capture shop has gone on in the target" in again.err


# ---- the map -----------------------------------------------------------------------------


def test_offsets_are_translated_by_the_map(
    source: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    """For each offset of the source: what follows it there follows it here."""
    create(source.bootstrap, topic, 2)
    for number in range(4):
        writer = producer(source.bootstrap, transactional_id=f"t-{topic}")
        writer.init_transactions(10)
        writer.begin_transaction()
        writer.produce(topic, str(number), partition=0)
        if number % 2:
            writer.abort_transaction(10)
        else:
            writer.commit_transaction(10)
    fill(source.bootstrap, topic, [b"x", b"y"], 0)
    done = migrate(source, apache_kafka, "--topic", topic, "--json").ok().json
    [moved] = done["topics"]
    end = moved["partitions"][0]["source_position"]
    with Cluster(source.bootstrap) as here, Cluster(apache_kafka.bootstrap) as there:
        rows = [(row.offset, row.value) for row in read_all(here, topic)]
        source_id = str(Metadata(here).topic_id(topic))
        move = find(there, {topic: source_id})[topic]
        assert move.source_id == source_id
        assert find(there, {topic: "other"}) == {}
        assert move.missing({0: end, 1: 0}) == {}
        assert move.missing({0: end + 1, 1: 5}) == {0: end + 1, 1: 5}
        copies = [(row.offset, row.value) for row in read_all(there, topic)]
        for offset in range(end + 1):
            at = move.translated(there, {0: offset, 1: 0})
            assert at[1] == 0
            expected = [value for place, value in rows if place >= offset]
            assert [value for place, value in copies if place >= at[0]] == expected
    assert Move.decode(move.encode()) == move


# ---- flows and sinks ---------------------------------------------------------------------


def doubling(output: str = "doubled") -> Flow:
    @flow(inputs=stream("numbers", json="n long"), output=topic(output, key="n"), name="doubled")
    def doubled(numbers: DataFrame) -> DataFrame:
        return numbers.selectExpr("n * 2 as n")

    return doubled


def counting() -> Flow:
    @flow(inputs=stream("numbers", json="n long"), output=topic("counts"), mode="update")
    def counted(numbers: DataFrame) -> DataFrame:
        return numbers.selectExpr("n % 2 as odd").groupBy("odd").count()

    return counted


def fed(penstock_spark: SparkSession, broker: Broker, folder: Path, spec: SinkSpec) -> SinkStatus:
    """A run of a sink to the end of what is there."""
    settings = Settings(broker.bootstrap, once=True, policy=Policy(0.1, 1.0, 1))
    manager = SinkManager(penstock_spark, [spec], SinkFolder(folder), settings)
    manager.start()
    eventually(manager.step, WAIT_S)
    manager.close()
    return manager.status()[0]


def rows_of(store: Path) -> list[int]:
    with closing(sqlite3.connect(store)) as connection:
        return sorted(number for (number,) in connection.execute("SELECT n FROM doubles"))


@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore::penstock.spark.UnboundedStateWarning")
def test_flows_and_sinks_go_on_in_the_target(
    penstock_spark: SparkSession, source: Broker, target: Broker, tmp_path: Path
) -> None:
    store = tmp_path / "shop.db"
    spec = SinkSpec("doubles", "doubled", f"sqlite:///{store}", ("n",), "n bigint")
    before = FlowTester(penstock_spark, source, tmp_path / "data")
    before.use(doubling(), counting())
    # Two transactions, so offsets have gaps that the target does not have.
    for numbers in ((1, 2), (3,)):
        before.feed("numbers", [{"n": n} for n in numbers])
        before.run()
    first = fed(penstock_spark, source, tmp_path / "sinks", spec)
    assert (first.error, first.put) == ("", 3)
    assert rows_of(store) == [2, 4, 6]
    # In another cluster with topics of these names it is told that it is another one.
    with Broker() as stranger:
        other = FlowTester(penstock_spark, stranger, tmp_path / "data")
        other.use(doubling(), counting())
        other.feed("numbers", [{"n": 9}])
        with pytest.raises(FlowFailedError, match="this is another cluster than the one") as caught:
            other.run("doubled")
        assert "deleted and made again" not in str(caught.value)
        assert "penstock migrate" in caught.value.advice
    migrate(source, target).ok()
    # What is written to the source later lacks in the target: it is not passed over.
    before.feed("numbers", [{"n": 4}])
    before.run("doubled")
    after = FlowTester(penstock_spark, target, tmp_path / "data")
    after.use(doubling(), counting())
    with pytest.raises(FlowFailedError, match="were moved here") as caught:
        after.run("doubled")
    assert "Run `penstock migrate` once more" in caught.value.advice
    migrate(source, target).ok()
    after.feed("numbers", [{"n": 5}])
    after.run()
    assert [row["n"] for row in after.rows("doubled")] == [2, 4, 6, 8, 10]
    # State went along: counts go on, they do not begin anew.
    last = {row["odd"]: row["count"] for row in after.rows("counts")}
    assert last == {1: 3, 0: 2}
    record = Folder(tmp_path / "data").record("doubled")
    assert (record.generation, record.moving) == (1, {})
    # The sink reads on, too, and reads nothing twice.
    status = fed(penstock_spark, target, tmp_path / "sinks", spec)
    assert (status.error, status.put) == ("", 3 + 2)
    assert rows_of(store) == [2, 4, 6, 8, 10]
