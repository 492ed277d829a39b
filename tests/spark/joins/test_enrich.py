"""Enrichment: the same in one go and in any split of the log, and what DuckDB says."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import pairwise
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
from penstock.spark.windows import WindowError
from penstock.testing import Broker
from penstock.testing.flows import FlowTester
from tests.harness.profiles import examples

pytestmark = pytest.mark.timeout(600)

STAMP = pa.timestamp("us", "UTC")
KEPT = pa.schema(
    [("_k0", pa.float64()), ("_c_rate", pa.int64()), ("_from", STAMP), ("_owner", pa.int64())]
)
OUT = pa.schema([("id", pa.int64()), ("_time", STAMP), ("rate", pa.int64())])
SHAPE = Shape(("id", "_time"), (("rate", "rate"),), ("_k0",), False, KEPT, OUT)


@dataclass(frozen=True)
class Event:
    id: int
    key: float | None
    time: int


@dataclass(frozen=True)
class Change:
    key: float
    # None: deleted.
    rate: int | None
    time: int
    valid: int
    owner: int = 0
    partition: int = 0
    offset: int = 0

    @property
    def place(self) -> tuple[int, int]:
        return self.partition, self.offset


def plain(key: float | None) -> object:
    """One zero and one NaN, as Spark's joins have them."""
    return "NaN" if key is not None and math.isnan(key) else key


def events_table(events: Sequence[Event]) -> pa.Table:
    return pa.table(
        {
            "_e_id": pa.array([each.id for each in events], pa.int64()),
            "_e__time": pa.array([each.time for each in events], STAMP),
            "_k0": pa.array([each.key for each in events], pa.float64()),
        }
    )


def changes_table(changes: Sequence[Change]) -> pa.Table:
    return pa.table(
        {
            "_k0": pa.array([each.key for each in changes], pa.float64()),
            "_c_rate": pa.array([each.rate for each in changes], pa.int64()),
            "_gone": pa.array([each.rate is None for each in changes], pa.bool_()),
            "_from": pa.array([each.valid for each in changes], STAMP),
            "_at": pa.array([max(each.valid, each.time) for each in changes], STAMP),
            "_known": pa.array([each.time for each in changes], STAMP),
            "_owner": pa.array([each.owner for each in changes], pa.int64()),
            "_partition": pa.array([each.partition for each in changes], pa.int32()),
            "_offset": pa.array([each.offset for each in changes], pa.int64()),
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
            # As they come to a task.
            inputs["changes"] = changes_table(sorted(changes, key=lambda each: each.place))
        rows = operator.process(Shard(0, 1, version, watermark, state), inputs).cast(OUT)
        for row in rows.to_pylist():
            assert row["id"] not in told
            told[row["id"]] = row["rate"]
    return told, state


def naive(events: Sequence[Event], changes: Sequence[Change]) -> dict[int, int | None]:
    """Word by word: the changes known at the time of the event, applied one after the other."""
    told: dict[int, int | None] = {}
    changes = sorted(changes, key=lambda each: each.place)
    for event in events:
        counting = [
            each
            for at, each in enumerate(changes)
            if plain(each.key) == plain(event.key)
            and max(each.time, each.valid) <= event.time
            and not retracted(at, each, changes)
        ]
        best: Change | None = None
        for each in sorted(counting, key=lambda change: max(change.time, change.valid)):
            if best is not None and each.valid < best.valid:
                continue
            if each.rate is not None:
                best = each
            elif best is not None and 0 in {each.owner, best.owner, each.owner - best.owner}:
                best = None
        told[event.id] = None if best is None else best.rate
    return told


def retracted(at: int, change: Change, changes: Sequence[Change]) -> bool:
    """Taken back before it was valid, by a later change or by being the taking back itself."""
    return any(
        other.rate is None
        and other.valid > other.time
        and (plain(other.key), other.valid) == (plain(change.key), change.valid)
        for other in changes[at:]
    )


def split(
    choose: Callable[[int], int], events: Sequence[Event], changes: Sequence[Change]
) -> list[tuple[list[Event], list[Change], int | None]]:
    """Both logs cut where `choose` says, with the watermark that follows from what was read."""
    batches: list[tuple[list[Event], list[Change], int | None]] = []
    left_events, left_changes = list(events), list(changes)
    while left_events or left_changes:
        a, b = choose(len(left_events)), choose(len(left_changes))
        taken, known = left_events[:a], left_changes[:b]
        left_events, left_changes = left_events[a:], left_changes[b:]
        # Nothing that is still to come is before it.
        coming = [each.time for each in left_events] + [each.time for each in left_changes]
        batches.append((taken, known, min(coming, default=1_000)))
    return batches


def drawn(data: st.DataObject) -> Callable[[int], int]:
    return lambda most: data.draw(st.integers(0, most))


ODD = (0.0, -0.0, math.nan)


def placed(changes: Sequence[Change]) -> list[Change]:
    """Each at its place in the log: those of an owner are in one partition, in their order."""
    return [
        replace(each, partition=each.owner % 2, offset=at)
        for at, each in enumerate(sorted(changes, key=lambda each: each.time))
    ]


CHANGES = st.lists(
    st.builds(
        lambda key, rate, time, ahead, owner: Change(key, rate, time, time + ahead, owner),
        st.sampled_from([*ODD, 1.0]),
        st.none() | st.integers(0, 99),
        # Many at the same time, in one partition or in two.
        st.integers(0, 8),
        st.just(0) | st.integers(-3, 3),
        # Those of 0 do not say whose they are.
        st.sampled_from([0, 1, 1, 2, 2]),
    ),
    max_size=30,
).map(placed)
EVENTS = st.lists(
    st.tuples(st.sampled_from([None, *ODD, 1.0, 3.0]), st.integers(0, 12)), max_size=20
).map(lambda rows: [Event(at, *row) for at, row in enumerate(rows)])


@settings(max_examples=examples(25))
@given(st.data(), EVENTS, CHANGES)
def test_as_of_is_the_same_however_the_log_is_cut(
    data: st.DataObject, events: list[Event], changes: list[Change]
) -> None:
    # A deletion says nothing of the future but of what was to be valid then.
    told, state = run(AsOf(SHAPE, False), split(drawn(data), events, changes))
    assert told == run(AsOf(SHAPE, True), [(events, changes, None)])[0]
    assert told == naive(events, changes)
    assert len(state.table("rows", KEPT, ["_k0"])) <= 3
    waiting = [state.value(each) for each in ("events", "changes")]
    assert all(each is None or not len(each) for each in waiting)


def test_as_of_refuses_what_comes_before_the_watermark() -> None:
    first: tuple[list[Event], list[Change], int] = ([Event(1, 1, 30)], [Change(1, 5, 20, 20)], 25)
    told, _ = run(AsOf(SHAPE, False), [first, ([Event(2, 1, 25)], [], 40)])
    assert told == {1: 5, 2: 5}
    late: list[tuple[list[Event], list[Change], int]] = [
        ([Event(2, 1, 24)], [], 40),
        ([], [Change(1, 6, 24, 24)], 40),
    ]
    for each in late:
        with pytest.raises(WindowError, match="watermark"):
            run(AsOf(SHAPE, False), [first, each])


@settings(max_examples=examples(5))
@given(EVENTS, CHANGES)
def test_as_of_is_what_duckdb_says(events: list[Event], changes: list[Change]) -> None:
    # Of changes at the same time DuckDB would take any.
    own = {(plain(each.key), each.time): each for each in changes}
    changes = [replace(each, valid=each.time, owner=0) for each in own.values()]
    told, _ = run(AsOf(SHAPE, True), [(events, changes, None)])
    e, c = events_table(events), changes_table(changes)  # noqa: F841
    rows = duckdb.execute(
        "select e._e_id, c._c_rate from e asof left join c "
        "on e._k0 = c._k0 and e._e__time >= c._known"
    ).fetchall()
    assert told == dict(rows)


@settings(max_examples=examples(25))
@given(st.data(), EVENTS, CHANGES)
def test_latest_is_the_table_after_the_micro_batch(
    data: st.DataObject, events: list[Event], changes: list[Change]
) -> None:
    batches = split(drawn(data), events, changes)
    told, _ = run(Latest(SHAPE), batches)
    table, expected = dict[object, Change](), dict[int, int | None]()
    for taken, known, _ in batches:
        # What an owner said last counts.
        last = {(plain(each.key), each.owner): each for each in known}
        for each in sorted(last.values(), key=lambda each: each.place):
            holder = table.get(plain(each.key))
            if each.rate is not None:
                table[plain(each.key)] = each
            elif holder is not None and 0 in {each.owner, holder.owner, each.owner - holder.owner}:
                del table[plain(each.key)]
        held = {key: each.rate for key, each in table.items()}
        expected |= {each.id: held.get(plain(each.key)) for each in taken}
    assert told == expected


def test_of_changes_at_one_time_the_last_in_the_log_counts() -> None:
    early, late = Change(1.0, 5, 10, 10, 2, partition=0), Change(1.0, 7, 10, 10, 1, partition=1)
    seen = [Event(0, 1.0, 20)]
    # Whichever partition is read first.
    for first, second in ((early, late), (late, early)):
        batches = [([], [first], 5), ([], [second], 8), (seen, [], 30)]
        assert run(AsOf(SHAPE, False), batches)[0] == {0: 7}
    assert run(AsOf(SHAPE, True), [(seen, [early, late], None)])[0] == {0: 7}


def test_a_place_that_a_row_had_in_between_is_not_taken_back() -> None:
    # The first partition has who came last.
    told = [Change(1.0, 5, 12, 12, 2, partition=0), Change(1.0, 7, 10, 10, 1, partition=1),
            Change(1.0, None, 11, 11, 1, partition=1, offset=1)]  # fmt: skip
    assert run(Latest(SHAPE), [([Event(0, 1.0, 20)], told, None)])[0] == {0: 5}


def test_events_wait_for_the_watermark_and_versions_go() -> None:
    change = [Change(1, at, at * 10, at * 10) for at in range(5)]
    operator = AsOf(SHAPE, False)
    told, state = run(operator, [([Event(0, 1, 25)], change, 20)])
    assert told == {}
    kept = state.value("changes")
    assert kept is not None
    assert kept["_c_rate"].to_pylist() == [2, 3, 4]
    assert state.table("rows", KEPT, ["_k0"]).scan()["_c_rate"].to_pylist() == [1]


Row = tuple[int, str, int]
NAMES = "abcd"


def history(luck: random.Random) -> tuple[list[tuple[Any, ...]], list[dict[str, Row]]]:
    """Rows that come, go, swap their names and take those of others, and who has which name then.

    The changes are (id, before, after, time, partition, offset); some are of no row at all.
    """
    told: list[tuple[Any, ...]] = []
    holders: list[dict[str, Row]] = []
    table: dict[int, Row] = {}

    def change(second: int, id: int, name: str | None) -> None:
        before, after = table.pop(id, None), None if name is None else (id, name, second)
        table.update({} if after is None else {id: after})
        told.append((id, before, after, second, id % 2, len(told)))

    for second in range(60):
        used = {name: id for id, name, _ in table.values()}
        name, id = luck.choice(NAMES), luck.randrange(6)
        other = used.get(name)
        if other in {None, id} or luck.random() < 0.2:
            if other not in {None, id}:
                # It takes the name first, and who had it goes afterwards.
                change(second, id, name)
                change(second, other, None)
            else:
                change(second, id, name if luck.random() < 0.7 else None)
        elif id in table:
            names = {id: name, other: table[id][1]}
            for each in luck.sample(sorted(names), 2):
                change(second, each, names[each])
        holders.append({row[1]: row for row in table.values()})
    return told, holders


def by_name(told: Sequence[tuple[Any, ...]]) -> list[Change]:
    """What Spark makes of changes: a row that has left its name is gone from there."""
    found = []
    for id, before, after, second, partition, offset in told:
        moved = before is not None and (after is None or before[1] != after[1])
        for row, gone in [(before, True)] * moved + [(after, False)] * (after is not None):
            rate = None if gone else number_of(row)
            found.append(
                Change(NAMES.index(row[1]), rate, second, second, id + 1, partition, offset)
            )
    return found


def number_of(row: Row) -> int:
    return row[0] * 100 + row[2]


@settings(max_examples=examples(10))
@given(st.integers(0, 10**6))
def test_names_that_move_between_rows(number: int) -> None:
    """What is deleted or moves away leaves the row that has come into its place."""
    luck = random.Random(number)
    told, holders = history(luck)
    changes = by_name(told)
    asked = [(second, key) for second in range(len(holders)) for key in range(len(NAMES))]
    events = [Event(at, key, second) for at, (second, key) in enumerate(asked)]
    expected = {
        at: number_of(holders[second][NAMES[key]]) if NAMES[key] in holders[second] else None
        for at, (second, key) in enumerate(asked)
    }
    batches = split(lambda most: luck.randint(0, min(most, 50)), events, changes)
    assert run(AsOf(SHAPE, False), batches)[0] == expected
    # With the latest row: events that stand at the end of a micro-batch see the table of then.
    ends = sorted({*luck.sample(range(60), luck.randrange(6)), 59})
    batches = [
        (
            [each for each in events if each.time == end],
            [each for each in changes if start < each.time <= end],
            None,
        )
        for start, end in pairwise([-1, *ends])
    ]
    latest = run(Latest(SHAPE), batches)[0]
    assert latest == {at: rate for at, rate in expected.items() if asked[at][0] in ends}


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


def test_moved_names_and_tombstones_through_spark(penstock_spark: SparkSession) -> None:
    """What Spark makes of changes before they come to the operator, in one job."""
    told, holders = history(random.Random(11))
    row = "struct<id: bigint, name: string, made: bigint>"
    changes = penstock_spark.createDataFrame(
        [
            (before, after, json_key(id=id), "people", partition, offset, at(second))
            for id, before, after, second, partition, offset in told
        ],
        f"_before {row}, _after {row}, _key binary, _topic string, _partition int, "
        "_offset bigint, _timestamp timestamp",
    )  # fmt: skip
    seen = penstock_spark.createDataFrame(
        [(name, second, at(second)) for second in range(len(holders)) for name in NAMES],
        "name string, second int, _time timestamp",
    )
    named = enrich(seen, changes, on="name", columns=["id", "made"], version="as_of")
    sales, rates = rates_with_tombstones(penstock_spark)
    taxed = enrich(
        sales, rates, on="c", columns=["rate"], version="as_of", valid_from="since"
    ).selectExpr("c", "second", "rate", "null")
    found = {
        (each.name, each.second): None if each.id is None else (each.id, each.made)
        for each in named.select("name", "second", "id", "made").union(taxed).collect()
    }
    expected: dict[tuple[str, int], tuple[int, int | None] | None] = {
        (name, second): None if name not in table else (table[name][0], table[name][2])
        for second, table in enumerate(holders)
        for name in NAMES
    }
    assert sum(each is not None for each in expected.values()) > 100
    # A tombstone ends its own row.
    rates_then = {5: None, 15: 16, 25: 19, 35: 19, 95: 19}
    expected |= {
        ("DE", second): None if rate is None else (rate, None)
        for second, rate in rates_then.items()
    }
    assert found == expected


def json_key(**columns: Any) -> bytearray:
    return bytearray(json.dumps(columns).encode())


def rates_with_tombstones(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    def key(since: int) -> bytearray:
        return json_key(c="DE", since=at(since).isoformat())

    told = [
        ("DE", at(10), 16, key(10), at(0)),
        ("DE", at(20), 19, key(20), at(1)),
        ("DE", at(90), 25, key(90), at(2)),
        # The one of before is cleared away, and one that was to come is taken back.
        (None, None, None, key(10), at(30)),
        (None, None, None, key(90), at(40)),
    ]
    changes = spark.createDataFrame(
        [(*each, "rates", 0, offset) for offset, each in enumerate(told)],
        "c string, since timestamp, rate int, _key binary, _timestamp timestamp, _topic string, "
        "_partition int, _offset bigint",
    ).selectExpr(
        "if(c IS NULL, null, struct(c, since, rate)) AS _after",
        "if(false, _after, null) AS _before",
        *("_key", "_timestamp", "_topic", "_partition", "_offset"),
    )
    sales = spark.createDataFrame(
        [("DE", second, at(second)) for second in (5, 15, 25, 35, 95)],
        "c string, second int, _time timestamp",
    )
    return sales, changes


def test_in_a_flow(spark: SparkSession, tmp_path: Path) -> None:
    @flow(
        inputs=[
            stream(
                "sales",
                json="country string, amount bigint, at timestamp",
                time="at",
                idle="1 hour",
            ),
            stream("rates", debezium="code string, rate bigint", time="_timestamp", idle="1 hour"),
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
        assert str(raised.value).startswith("tests/spark/joins/test_enrich.py:")
    untimed = changes.drop("_time")
    with pytest.raises(DeclarationError, match="changes has no time"), entered(Planning()):
        enrich(events, untimed, on={"person": "id"}, version="as_of")
    with pytest.raises(DeclarationError, match="no stream of changes"):
        enrich(events, events, on="person")
    with pytest.raises(DeclarationError, match="have no time"):
        enrich(events.drop("_time"), changes, on={"person": "id"}, version="as_of")


def test_state_of_events_that_wait_is_not_taken_for_that_of_others() -> None:
    kept = pa.schema([("_k0", pa.int64())])
    described = {
        AsOf(Shape(("id", "x"), (), ("_k0",), False, kept, out), everything=False).describes
        for out in (
            pa.schema([("id", pa.int64()), ("x", pa.int64())]),
            pa.schema([("id", pa.int64()), ("x", pa.string())]),
            pa.schema([("id", pa.int64()), ("y", pa.int64())]),
        )
    }
    assert len(described) == 3
