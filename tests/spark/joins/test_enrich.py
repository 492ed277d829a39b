"""Enrichment: the same in one go and in any split of the log, and what DuckDB says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from penstock.spark.flows.declare import flow, stream, topic
from penstock.spark.flows.errors import DeclarationError
from penstock.spark.joins.enriching import AsOf, Latest, Shape
from penstock.spark.joins.tables import enrich
from penstock.spark.state import Batch, Planning, Shard, State, entered
from penstock.testing import Broker
from penstock.testing.flows import FlowTester

pytestmark = pytest.mark.timeout(600)

STAMP = pa.timestamp("us", "UTC")
KEPT = pa.schema([("_k0", pa.int64()), ("_c_rate", pa.int64()), ("_from", STAMP)])
OUT = pa.schema([("id", pa.int64()), ("_time", STAMP), ("rate", pa.int64())])
SHAPE = Shape(("id", "_time"), (("rate", "rate"),), ("_k0",), False, KEPT, OUT)


@dataclass(frozen=True)
class Event:
    id: int
    key: int | None
    time: int


@dataclass(frozen=True)
class Change:
    key: int
    # None: deleted.
    rate: int | None
    time: int
    valid: int


def events_table(events: Sequence[Event]) -> pa.Table:
    return pa.table(
        {
            "_e_id": pa.array([each.id for each in events], pa.int64()),
            "_e__time": pa.array([each.time for each in events], STAMP),
            "_k0": pa.array([each.key for each in events], pa.int64()),
        }
    )


def changes_table(changes: Sequence[Change]) -> pa.Table:
    return pa.table(
        {
            "_k0": pa.array([each.key for each in changes], pa.int64()),
            "_c_rate": pa.array([each.rate for each in changes], pa.int64()),
            "_gone": pa.array([each.rate is None for each in changes], pa.bool_()),
            "_from": pa.array([each.valid for each in changes], STAMP),
            "_at": pa.array([max(each.valid, each.time) for each in changes], STAMP),
            "_known": pa.array([each.time for each in changes], STAMP),
        }
    )


def run(
    operator: AsOf | Latest,
    batches: Sequence[tuple[Sequence[Event], Sequence[Change], int | None]],
) -> tuple[dict[int, int | None], State]:
    """Micro-batches one after the other on one state: the rate for each event."""
    state, told = State(), dict[int, int | None]()
    for version, (events, changes, watermark) in enumerate(batches):
        inputs = {}
        if events:
            inputs["events"] = events_table(events)
        if changes:
            inputs["changes"] = changes_table(changes)
        rows = operator.process(Shard(0, 1, version, watermark, state), inputs).cast(OUT)
        for row in rows.to_pylist():
            assert row["id"] not in told
            told[row["id"]] = row["rate"]
    return told, state


def naive(events: Sequence[Event], changes: Sequence[Change]) -> dict[int, int | None]:
    """Word by word: the changes known at the time of the event, applied one after the other."""
    told: dict[int, int | None] = {}
    for event in events:
        counting = [
            each
            for at, each in enumerate(changes)
            if each.key == event.key
            and max(each.time, each.valid) <= event.time
            and not retracted(at, each, changes)
        ]
        best: Change | None = None
        for each in sorted(counting, key=lambda change: max(change.time, change.valid)):
            if best is None or each.valid >= best.valid:
                best = each
        told[event.id] = None if best is None else best.rate
    return told


def retracted(at: int, change: Change, changes: Sequence[Change]) -> bool:
    """Taken back before it was valid, by a later change or by being the taking back itself."""
    return any(
        other.rate is None
        and other.valid > other.time
        and (other.key, other.valid) == (change.key, change.valid)
        for other in changes[at:]
    )


def split(
    data: st.DataObject, events: Sequence[Event], changes: Sequence[Change]
) -> list[tuple[list[Event], list[Change], int | None]]:
    """Both logs cut at random places, with the watermark that follows from what was read."""
    batches: list[tuple[list[Event], list[Change], int | None]] = []
    left_events, left_changes = list(events), list(changes)
    while left_events or left_changes:
        a = data.draw(st.integers(0, len(left_events)))
        b = data.draw(st.integers(0, len(left_changes)))
        taken, known = left_events[:a], left_changes[:b]
        left_events, left_changes = left_events[a:], left_changes[b:]
        # Nothing that is still to come is before it.
        coming = [each.time for each in left_events] + [each.time for each in left_changes]
        batches.append((taken, known, min(coming, default=1_000)))
    return batches


CHANGES = st.lists(
    st.builds(
        lambda key, rate, time, ahead: Change(key, rate, time, time + ahead),
        st.integers(0, 3),
        st.none() | st.integers(0, 99),
        st.integers(0, 50),
        st.just(0) | st.integers(-10, 10),
    ),
    max_size=20,
)
EVENTS = st.lists(st.tuples(st.none() | st.integers(0, 4), st.integers(0, 60)), max_size=20).map(
    lambda rows: [Event(at, *row) for at, row in enumerate(rows)]
)


@settings(max_examples=30, deadline=None)
@given(st.data(), EVENTS, CHANGES)
def test_as_of_is_the_same_however_the_log_is_cut(
    data: st.DataObject, events: list[Event], changes: list[Change]
) -> None:
    changes = sorted(changes, key=lambda each: each.time)
    # A deletion says nothing of the future but of what was to be valid then.
    told, state = run(AsOf(SHAPE, False), split(data, events, changes))
    assert told == run(AsOf(SHAPE, True), [(events, changes, None)])[0]
    assert told == naive(events, changes)
    assert len(state.table("rows", KEPT, ["_k0"])) <= 4
    waiting = [state.value(each) for each in ("events", "changes")]
    assert all(each is None or not len(each) for each in waiting)


@settings(max_examples=15, deadline=None)
@given(EVENTS, CHANGES)
def test_as_of_is_what_duckdb_says(events: list[Event], changes: list[Change]) -> None:
    # Of changes at the same time DuckDB would take any.
    own = {(each.key, each.time): each for each in changes}
    changes = [Change(c.key, c.rate, c.time, c.time) for c in own.values()]
    told, _ = run(AsOf(SHAPE, True), [(events, changes, None)])
    e, c = events_table(events), changes_table(changes)  # noqa: F841
    rows = duckdb.execute(
        "select e._e_id, c._c_rate from e asof left join c "
        "on e._k0 = c._k0 and e._e__time >= c._known"
    ).fetchall()
    assert told == dict(rows)


@settings(max_examples=15, deadline=None)
@given(st.data(), EVENTS, CHANGES)
def test_latest_is_the_table_after_the_micro_batch(
    data: st.DataObject, events: list[Event], changes: list[Change]
) -> None:
    batches = split(data, events, changes)
    told, _ = run(Latest(SHAPE), batches)
    table, expected = dict[int | None, int | None](), dict[int, int | None]()
    for taken, known, _ in batches:
        table |= {each.key: each.rate for each in known}
        expected |= {each.id: table.get(each.key) for each in taken}
    assert told == expected


def test_events_wait_for_the_watermark_and_versions_go() -> None:
    change = [Change(1, at, at * 10, at * 10) for at in range(5)]
    operator = AsOf(SHAPE, False)
    told, state = run(operator, [([Event(0, 1, 25)], change, 20)])
    assert told == {}
    kept = state.value("changes")
    assert kept is not None
    assert kept["_c_rate"].to_pylist() == [2, 3, 4]
    assert state.table("rows", KEPT, ["_k0"]).scan()["_c_rate"].to_pylist() == [1]


# ---- through Spark -----------------------------------------------------------------------

ROW = "struct<id: bigint, name: string, at: timestamp>"
CHANGE = (
    f"_before {ROW}, _after {ROW}, _op string, _key binary, _topic string, _partition int, "
    "_offset bigint, _timestamp timestamp"
)


def at(second: int) -> datetime:
    return datetime.fromtimestamp(second, UTC)


def frames(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    def row(id: int, name: str) -> tuple[Any, ...]:
        return (id, name, at(0))

    def key(id: int) -> bytearray:
        return bytearray(f'{{"id":{id}}}'.encode())

    told: list[tuple[Any, ...]] = [
        (None, row(1, "ann"), "c", key(1), 10),
        (None, row(2, "bob"), "c", key(2), 10),
        (row(1, "ann"), row(1, "anna"), "u", key(1), 20),
        # Its key is changed; then it is deleted, with a tombstone of another after it.
        (row(2, "bob"), row(3, "bob"), "u", key(3), 30),
        (row(3, "bob"), None, "d", key(3), 40),
        (None, None, None, key(1), 50),
    ]
    rows = [
        (before, after, op, own, "people", 0, offset, at(second))
        for offset, (before, after, op, own, second) in enumerate(told)
    ]
    seen = [(1, 15), (1, 20), (2, 15), (2, 30), (3, 30), (3, 40), (1, 60), (None, 60)]
    events = [(person, f"e{n}", at(second)) for n, (person, second) in enumerate(seen)]
    return (
        spark.createDataFrame(events, "person int, event string, _time timestamp"),
        spark.createDataFrame(rows, CHANGE),
    )


def names(rows: DataFrame) -> dict[str, str | None]:
    return {each.event: each.who for each in rows.collect()}


def test_through_spark(penstock_spark: SparkSession, tmp_path: Path) -> None:
    events, changes = frames(penstock_spark)
    asked: dict[str, Any] = {"on": {"person": "id"}, "columns": {"name": "who"}}
    expected = {"e0": "ann", "e1": "anna", "e2": "bob", "e3": None, "e4": "bob", "e5": None,
                "e6": None, "e7": None}  # fmt: skip
    found = {key: value for key, value in expected.items() if value is not None}
    assert names(enrich(events, changes, version="as_of", how="inner", **asked)) == found
    # In micro-batches: the first has the changes, and the watermark in between.
    told: dict[str, str | None] = {}
    for number, (new, watermark) in enumerate(((events, 25), (events.limit(0), 100))):
        context = Batch(folder=str(tmp_path), batch_id=number, watermark_us=watermark * 1_000_000)
        with entered(context):
            told |= names(enrich(new, changes if not number else changes.limit(0),
                                 version="as_of", **asked))  # fmt: skip
        assert number or set(told) == {"e0", "e1", "e2"}
    assert told == expected
    early = changes.where("_offset < 3")
    latest = enrich(events, early, **asked)
    told = names(latest)
    assert (told["e0"], told["e5"]) == ("anna", None)


def test_in_a_flow(spark: SparkSession, tmp_path: Path) -> None:
    @flow(
        inputs=[
            stream("sales", json="country string, amount bigint, at timestamp", time="at"),
            stream("rates", debezium="code string, rate bigint", time="_timestamp"),
        ],
        output=topic("taxed"),
    )
    def taxed(sales: DataFrame, rates: DataFrame) -> DataFrame:
        return enrich(sales, rates, on={"country": "code"}, columns=["rate"], version="as_of")

    def sell(amount: int) -> None:
        row = {"country": "DE", "amount": amount, "at": tester.now.isoformat()}
        tester.feed("sales", [row])

    with Broker() as broker:
        tester = FlowTester(spark, broker, tmp_path / "data")
        tester.use(taxed)
        tester.feed_table("rates", [{"code": "DE", "rate": 19}], key="code")
        tester.advance(10)
        sell(1)
        tester.run()
        # Another rate might still come for this moment.
        assert tester.rows("taxed") == []
        tester.advance(10)
        tester.feed_table("rates", [{"code": "DE", "rate": 16}], key="code")
        tester.advance(10)
        sell(2)
        tester.advance(10)
        tester.feed_table("rates", [{"code": "DE", "rate": 16}], key="code", deleted=True)
        sell(3)
        tester.advance(10)
        tester.feed_table("rates", [{"code": "FR", "rate": 20}], key="code")
        sell(4)
        tester.run()
        told = {each["amount"]: each["rate"] for each in tester.rows("taxed")}
        assert told == {1: 19, 2: 16, 3: None}


def test_a_wrong_declaration_points_at_the_place(penstock_spark: SparkSession) -> None:
    events, changes = frames(penstock_spark)
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"on": {"nobody": "id"}}, "events have no column 'nobody'"),
        ({"on": {"person": "nothing"}}, "table has no column 'nothing'"),
        ({"on": {"person": "name"}}, "they are never equal"),
        ({"on": {"person": "id"}, "columns": {"name": "event"}}, "'event' already"),
        ({"on": {"person": "id"}, "version": "as_of", "valid_from": "name"}, "not a time"),
        ({"on": {"person": "id"}, "valid_from": "at"}, 'is for version="as_of"'),
        ({"on": {"person": "id"}, "how": "outer"}, "is not known"),
        ({"on": {}}, "names no column"),
    ]
    for asked, message in wrong:
        with pytest.raises(DeclarationError, match=message) as raised:
            enrich(events, changes, **asked)
        assert str(raised.value).startswith("test_enrich.py:")
    untimed = changes.drop("_time")
    with pytest.raises(DeclarationError, match="changes has no time"), entered(Planning()):
        enrich(events, untimed, on={"person": "id"}, version="as_of")
    with pytest.raises(DeclarationError, match="no stream of changes"):
        enrich(events, events, on="person")
    with pytest.raises(DeclarationError, match="have no time"):
        enrich(events.drop("_time"), changes, on={"person": "id"}, version="as_of")
