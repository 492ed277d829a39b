"""Standing queries of a document's own time: the same however the log is cut, and in batch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from functools import reduce
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark import UnboundedStateWarning
from penstock.spark.flows.declare import flow, stream, topic
from penstock.spark.flows.errors import DeclarationError
from penstock.spark.standing import asking, bad_queries, match
from penstock.spark.standing.index import Index
from penstock.spark.standing.operators import AsOf, Latest, Shape
from penstock.spark.standing.query import Kind, Node
from penstock.spark.state import Shard, State
from penstock.spark.windows import WindowError
from penstock.testing import Broker
from penstock.testing.flows import START, FlowTester
from tests.harness.profiles import OPERATOR_HISTORIES

pytestmark = pytest.mark.timeout(600)

FIELDS: dict[str, Kind] = {"title": "text", "price": "number"}
STAMP = pa.timestamp("us", "UTC")
OUT = pa.schema(
    [("query", pa.string()), ("matched", pa.list_(pa.string())), ("id", pa.int64()),
     ("title", pa.string()), ("price", pa.float64()), ("_time", STAMP)]
)  # fmt: skip
SHAPE = Shape(tuple(FIELDS.items()), ("id", "title", "price", "_time"), OUT)
# A document, the name of a query, and what of it holds.
Hit = tuple[int, str, tuple[str, ...]]


@dataclass(frozen=True)
class Document:
    id: int
    title: str
    price: float
    time: int


@dataclass(frozen=True)
class Change:
    name: str
    # None: removed.
    text: str | None
    time: int
    partition: int = 0
    offset: int = 0


# ---- read word by word -------------------------------------------------------------------

# Queries, and the conditions of which any will do.
TEXTS: dict[str | None, tuple[str, ...]] = {
    "red": ("title:red",),
    "title:blue": ("title:blue",),
    '{"query": "price:>2"}': ("price:>2",),
    "red OR price:>2": ("title:red", "price:>2"),
    "NOT red": (),
    "red OR": (),
    None: (),
}


def holding(text: str | None, document: Document) -> tuple[str, ...] | None:
    """What of a query holds for a document; None if it does not match."""
    there = {f"title:{each}" for each in document.title.split()}
    there |= {"price:>2"} if document.price > 2 else set()
    if text == "NOT red":
        return None if "title:red" in there else ()
    return tuple(sorted(there & set(TEXTS[text]))) or None


def naive(documents: Sequence[Document], changes: Sequence[Change]) -> list[Hit]:
    """For each document and each name the last change that was made by the document's time."""
    found = []
    for document in documents:
        for name in {each.name for each in changes}:
            known = [each for each in changes if each.name == name and each.time <= document.time]
            if known:
                last = max(known, key=lambda each: (each.time, each.partition, each.offset))
                held = holding(last.text, document)
                found += [] if held is None else [(document.id, name, held)]
    return sorted(found)


# ---- the operator ------------------------------------------------------------------------


def documents_table(documents: Sequence[Document]) -> pa.Table:
    return pa.table(
        {
            "_d_id": pa.array([each.id for each in documents], pa.int64()),
            "_d_title": pa.array([each.title for each in documents], pa.string()),
            "_d_price": pa.array([each.price for each in documents], pa.float64()),
            "_d__time": pa.array([each.time for each in documents], STAMP),
            "_lane": pa.array([each.id % 2 for each in documents], pa.int64()),
        }
    )


def changes_table(changes: Sequence[Change], lane: int) -> pa.Table:
    # As they come to a task.
    changes = sorted(changes, key=lambda each: (each.partition, each.offset))
    return pa.table(
        {
            "_id": pa.array([each.name for each in changes], pa.string()),
            "_text": pa.array([each.text for each in changes], pa.string()),
            "_partition": pa.array([each.partition for each in changes], pa.int32()),
            "_offset": pa.array([each.offset for each in changes], pa.int64()),
            "_time": pa.array([each.time for each in changes], STAMP),
            "_lane": pa.array([lane] * len(changes), pa.int64()),
        }
    )


@dataclass(frozen=True)
class Cut:
    """A micro-batch."""

    documents: Sequence[Document]
    changes: Sequence[Change]
    watermark: int | None


def hits(rows: pa.Table) -> Iterator[Hit]:
    for each in rows.cast(OUT).to_pylist():
        yield each["id"], each["query"], tuple(sorted(each["matched"]))


def run(
    operator: AsOf, cuts: Sequence[Cut], shards: int, luck: random.Random
) -> tuple[list[Hit], list[State]]:
    """Micro-batches one after the other; some are killed and run again, by another worker."""
    states, told = [State() for _ in range(shards)], list[Hit]()
    for version, cut in enumerate(cuts):
        tries = 1 + (luck.random() < 0.2)
        for number in range(shards):
            inputs = {}
            mine = [each for each in cut.documents if each.id % shards == number]
            if mine:
                inputs["documents"] = documents_table(mine)
            if cut.changes:
                inputs["queries"] = changes_table(cut.changes, number)
            before = dict(states[number].values)
            for _ in range(tries):
                states[number] = State(dict(before))
                shard = Shard(number, shards, version, cut.watermark, states[number])
                rows = operator.process(shard, inputs)
                if luck.random() < 0.1:
                    asking._indexes.clear()
            told += hits(rows)
    return sorted(told), states


def history(luck: random.Random) -> tuple[list[Document], list[list[Change]]]:
    """Documents in one partition and changes in two, in the order in which they are written."""

    def times(count: int, first: int) -> list[int]:
        # Many at the same time, some out of order.
        return [max(0, first + at // 3 + luck.choice((0, 0, -2, 2))) for at in range(count)]

    titles = ["red", "blue", "red blue", "green", ""]
    documents = [
        Document(at, luck.choice(titles), luck.randrange(5), time)
        for at, time in enumerate(times(luck.randrange(40), 0))
    ]
    logs = []
    for partition in range(2):
        log = [
            # Names that are in one partition, and one that is in both.
            Change(luck.choice("aabx" if partition else "cdex"), luck.choice(list(TEXTS)), time)
            for time in times(luck.randrange(30), luck.choice((0, 5)))
        ]
        for each in luck.sample(log, len(log) // 4):
            log.insert(luck.randrange(len(log)), each)
        logs.append([
            replace(each, partition=partition, offset=offset) for offset, each in enumerate(log)
        ])  # fmt: skip
    return documents, logs


def split(
    luck: random.Random, documents: Sequence[Document], logs: Sequence[Sequence[Change]]
) -> list[Cut]:
    """All logs cut at random places, with a watermark that follows from what was read."""
    cuts, watermark, most = list[Cut](), 0, luck.choice((2, 10, 40))
    shown, left = list(documents), [list(each) for each in logs]
    while shown or any(left):
        sizes = [luck.randrange(most + 1) for _ in (shown, *left)]
        seen, shown = shown[: sizes[0]], shown[sizes[0] :]
        told = [each for log, size in zip(left, sizes[1:], strict=True) for each in log[:size]]
        left = [log[size:] for log, size in zip(left, sizes[1:], strict=True)]
        # Nothing that is still to come is before it, and it may be behind.
        coming = [each.time for each in shown] + [each.time for log in left for each in log]
        watermark = max(watermark, min(coming, default=1_000) - luck.choice((0, 0, 3)))
        cuts.append(Cut(seen, told, watermark))
    return [*cuts, Cut([], [], 2_000)]


def test_the_same_however_the_log_is_cut(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    luck = random.Random(seed)
    found = 0
    for _ in range(OPERATOR_HISTORIES):
        monkeypatch.setattr(asking, "_FEW", luck.choice((0, 2, 64)))
        monkeypatch.setattr(asking, "_MAX_INDEXES", luck.choice((1, 4)))
        asking._indexes.clear()
        documents, logs = history(luck)
        changes = [each for log in logs for each in log]
        expected = naive(documents, changes)
        told, states = run(AsOf(SHAPE, False), split(luck, documents, logs), 2, luck)
        assert told == expected
        # A replay in other micro-batches; and all of it at once, as in batch.
        assert run(AsOf(SHAPE, False), split(luck, documents, logs), 1, luck)[0] == expected
        assert run(AsOf(SHAPE, True), [Cut(documents, changes, None)], 2, luck)[0] == expected
        for state in states:
            waiting = [state.value(each) for each in ("documents", "changes")]
            assert all(each is None or not len(each) for each in waiting)
        # Nothing but documents is of a shard alone.
        for name in {*states[0].values, *states[1].values} - {"documents"}:
            one, other = (each.value(name) for each in states)
            assert one is not None
            assert one.equals(other)
        found += len(expected)
    # Some histories have no hit at all: a few of them have fewer in proportion.
    assert found > (1_000 if OPERATOR_HISTORIES >= 60 else 5 * OPERATOR_HISTORIES)


def test_a_change_counts_from_its_own_time_on() -> None:
    changes = [Change("a", "red", 10), Change("a", "title:blue", 20, offset=1),
               Change("a", None, 30, offset=2)]  # fmt: skip
    seen = [Document(time, "red blue", 0, time) for time in (9, 10, 19, 20, 29, 30)]
    told, _ = run(AsOf(SHAPE, True), [Cut(seen, changes, None)], 1, random.Random(0))
    red, blue = ("title:red",), ("title:blue",)
    assert told == [(10, "a", red), (19, "a", red), (20, "a", blue), (29, "a", blue)]


def test_of_changes_at_one_time_the_last_in_the_log_counts() -> None:
    early, late = Change("a", "red", 10, 0, 7), Change("a", "title:blue", 10, 1, 3)
    seen = [Document(1, "red blue", 0, 10)]
    # Whichever partition is read first.
    for first, second in ((early, late), (late, early)):
        cuts = [Cut([], [first], 5), Cut(seen, [], 8), Cut([], [second], 10), Cut([], [], 30)]
        told, _ = run(AsOf(SHAPE, False), cuts, 1, random.Random(0))
        assert told == [(1, "a", ("title:blue",))]


def test_what_waits_and_what_is_refused() -> None:
    changes = [Change("a", "red", 5), Change("a", None, 30, offset=1)]
    seen = [Document(1, "red", 0, 19), Document(2, "red", 0, 20)]
    first = Cut(seen, changes, 20)
    told, [state] = run(AsOf(SHAPE, False), [first], 1, random.Random(0))
    assert told == [(1, "a", ("title:red",))]
    # Another change might still come for its time.
    waiting, coming = state.value("documents"), state.value("changes")
    assert waiting is not None
    assert coming is not None
    assert waiting["_d_id"].to_pylist() == [2]
    assert (coming["_text"].to_pylist(), "_lane" in coming.column_names) == ([None], False)
    for late in (Cut([Document(3, "red", 0, 19)], [], 40), Cut([], [Change("b", "red", 19)], 40)):
        with pytest.raises(WindowError, match="watermark"):
            run(AsOf(SHAPE, False), [first, late], 1, random.Random(0))


def test_no_index_is_made_where_none_has_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[int]()

    def index(fields: Mapping[str, Kind], queries: Sequence[Node]) -> Index:
        made.append(len(queries))
        return Index(fields, queries)

    monkeypatch.setattr(asking, "Index", index)
    asking._indexes.clear()
    steady = [Change(f"q{at}", "red", 0, offset=at) for at in range(100)]
    before = [Cut([Document(0, "red", 0, 5)], steady, 10)]
    before += [Cut([Document(at, "red", 0, at * 10)], [], at * 10 + 5) for at in range(1, 4)]
    told, _ = run(AsOf(SHAPE, False), before, 1, Never())
    assert len(told) == 400
    # All at once, and nothing beside them.
    assert made == [100, 0]
    made.clear()
    change = Cut([Document(9, "red", 0, 50), Document(10, "red", 0, 52)],
                 [Change("q7", "title:blue", 51)], 60)  # fmt: skip
    after = Cut([Document(11, "red", 0, 70)], [], 80)
    told, _ = run(AsOf(SHAPE, False), [*before, change, after], 1, Never())
    assert [each for each, *_ in told].count(9) == 100
    assert [each for each, *_ in told].count(10) == 99
    assert [each for each, *_ in told].count(11) == 99
    # What has changed, for the documents of that time and beside the others from then on.
    assert made == [1, 1]


def test_the_same_change_of_other_queries_is_another_index() -> None:
    asking._indexes.clear()
    changes = [Change("a", "red", 0), Change("b", "red", 10, offset=1),
               Change("a", "red", 20, offset=2)]  # fmt: skip
    cuts = [
        Cut([Document(each.time, "red", 0, each.time + 5)], [each], each.time + 8)
        for each in changes
    ]
    told, _ = run(AsOf(SHAPE, False), cuts, 1, Never())
    assert [(id, name) for id, name, _ in told] == [
        (0, "a"), (10, "a"), (10, "b"), (20, "a"), (20, "b")
    ]  # fmt: skip


class Never(random.Random):
    """Nothing is killed."""

    def random(self) -> float:
        return 1.0


def test_state_of_before_fits_and_modes_do_not_mix() -> None:
    assert Latest(SHAPE).describes == "standing queries by name"
    assert AsOf(SHAPE, False).describes != Latest(SHAPE).describes
    # What it was before there were two.
    state = State({
        "stamp": pa.table({"digest": pa.array([b"1"], pa.binary())}),
        "queries": pa.table({"_id": ["a"], "_text": ["red"]}),
    })  # fmt: skip
    inputs = {"documents": documents_table([Document(1, "red", 0, 0)])}
    rows = Latest(SHAPE).process(Shard(0, 1, 5, None, state), inputs)
    assert list(hits(rows)) == [(1, "a", ("title:red",))]


# ---- through Spark -----------------------------------------------------------------------

WRITTEN = [
    Change("ann", "red", 0, 0, 0),
    Change("bob", '{"query": "price:>2"}', 0, 1, 0),
    Change("ann", "title:blue", 20, 0, 1),
    Change("eve", "red OR", 20, 1, 1),
    Change("ann", None, 40, 0, 2),
    Change("bob", "red", 40, 1, 2),
    Change("eve", "NOT red", 60, 0, 3),
    Change("ann", "red", 60, 1, 3),
]
SHOWN = [
    Document(1, "red", 1, 5), Document(2, "blue", 4, 5),
    # Of the time of a change; and late, but not too late.
    Document(3, "red blue", 3, 20), Document(4, "red", 0, 19), Document(5, "red", 0, 12),
    Document(6, "blue", 0, 35), Document(7, "red blue", 0, 45), Document(8, "red", 0, 40),
    Document(9, "red", 0, 60),
]  # fmt: skip


def at(second: int) -> datetime:
    return START + timedelta(seconds=second)


def frames(spark: SparkSession) -> tuple[DataFrame, DataFrame]:
    documents = spark.createDataFrame(
        [(each.id, each.title, float(each.price), at(each.time)) for each in SHOWN],
        "id long, title string, price double, _time timestamp",
    )
    changes = spark.createDataFrame(
        [(each.name, each.text, "searches", each.partition, each.offset, at(each.time))
         for each in WRITTEN],
        "key string, value string, _topic string, _partition int, _offset long, _time timestamp",
    )  # fmt: skip
    return documents, changes


def of_rows(rows: Sequence[Mapping[str, Any]]) -> list[Hit]:
    return sorted((each["id"], each["query"], tuple(sorted(each["matched"]))) for each in rows)


def test_in_batch(penstock_spark: SparkSession) -> None:
    """In one job: all there is, up to a time that the rows say, and queries of a changelog."""
    documents, changes = frames(penstock_spark)
    of_text = match(documents, changes.repartition(3), fields=FIELDS, version="as_of")
    # The rows say up to when all of them are there: as a flow that has come so far.
    marks = [F.lit(at(second)).alias("_watermark_end") for second in (50, 40)]
    early = match(documents.select("*", marks[0]), changes.select("*", marks[1]), fields=FIELDS,
                  version="as_of")  # fmt: skip
    told = [("a", ("red",), 0), ("b", ("red OR",), 0), ("c", (None,), 0), ("a", None, 20)]
    rows = penstock_spark.createDataFrame(
        [(bytearray(name.encode()), row, 0, offset, at(second))
         for offset, (name, row, second) in enumerate(told)],
        "_key binary, _after struct<query: string>, _partition int, _offset long, _time timestamp",
    )  # fmt: skip
    of_changelog = match(documents, rows, fields=FIELDS, version="as_of")
    bad = bad_queries(rows, fields=FIELDS).select(
        "query", F.array("text").alias("matched"), F.lit(0).cast("long").alias("id")
    )
    parts = {"text": of_text, "early": early, "rows": of_changelog, "bad": bad}
    every = [
        each.select("query", "matched", "id", F.lit(part).alias("part"))
        for part, each in parts.items()
    ]
    found: dict[str, list[Mapping[str, Any]]] = {part: [] for part in parts}
    for row in reduce(DataFrame.union, every).collect():
        found[row.part].append(row.asDict())
    expected = naive(SHOWN, WRITTEN)
    assert of_rows(found["text"]) == expected
    before = naive([each for each in SHOWN if each.time < 40], WRITTEN)
    assert of_rows(found["early"]) == before != expected
    red = ("title:red",)
    assert of_rows(found["rows"]) == [(1, "a", red), (4, "a", red), (5, "a", red)]
    # What says no query is none, and what is gone is no wrong one.
    assert of_rows(found["bad"]) == [(0, "b", ("red OR",)), (0, "c", ("",))]


@pytest.mark.filterwarnings("ignore:flow 'found'.*:penstock.spark.UnboundedStateWarning")
def test_in_a_flow_and_its_replay(spark: SparkSession, tmp_path: Path) -> None:
    @flow(
        inputs=[
            stream("offers", json="id long, title string, price double, at timestamp", time="at",
                   lateness="10 seconds"),
            stream("searches", changelog="query string", time="_timestamp"),
        ],
        output=topic("found"),
        shards=2,
    )  # fmt: skip
    def found(offers: DataFrame, searches: DataFrame) -> DataFrame:
        hits = match(offers, searches, fields=FIELDS, version="as_of")
        return hits.select("query", "matched", "id")

    def feed(changes: Sequence[Change], documents: Sequence[Document]) -> None:
        for each in changes:
            tester.now = at(each.time)
            value = None if each.text is None else {"query": each.text}
            tester.feed("searches", [value], key=[each.name], partition=each.partition)
        tester.feed("offers", [
            {"id": each.id, "title": each.title, "price": each.price, "at": at(each.time)}
            for each in documents
        ])  # fmt: skip

    with Broker() as broker:
        tester = FlowTester(spark, broker, tmp_path / "data")
        tester.make_topic("searches", 2)
        tester.use(found)
        feed(WRITTEN[:2], SHOWN[:2])
        resting = "standing-1 keeps all .* a partition of 'offers' or 'searches' rests.*idle="
        with pytest.warns(UnboundedStateWarning, match=resting):
            tester.run()
        assert tester.rows("found") == []
        feed(WRITTEN[2:4], SHOWN[2:5])
        tester.run()
        # The offers have come to 20, and some may be 10 late.
        assert of_rows(tester.rows("found")) == naive(SHOWN[:2], WRITTEN)
        feed(WRITTEN[4:6], SHOWN[5:8])
        tester.run()
        feed(WRITTEN[6:], SHOWN[8:])
        tester.run()
        expected = naive([each for each in SHOWN if each.time < 50], WRITTEN)
        assert of_rows(tester.rows("found")) == expected
        # All in one micro-batch.
        tester.reset("found")
        assert tester._physical("found") == "found.v2"
        assert of_rows(tester.rows("found")) == expected


def test_a_wrong_declaration_points_at_the_place(penstock_spark: SparkSession) -> None:
    documents, changes = frames(penstock_spark)
    times = changes.withColumn("_time", changes.value)
    wrong: list[tuple[DataFrame, DataFrame, Any, str, str]] = [
        (documents.drop("_time"), changes, "as_of", "documents have no time", 'time="at"'),
        (documents, changes.drop("_time"), "as_of", "queries have no time", 'time="_timestamp"'),
        (documents, times, "as_of", "'_time' of the queries is string", 'time="_timestamp"'),
        (documents, changes, "newest", "version='newest' is not known", '"latest" or "as_of"'),
    ]
    for mine, theirs, version, message, advice in wrong:
        with pytest.raises(DeclarationError, match=message) as raised:
            match(mine, theirs, fields=FIELDS, version=version)
        assert str(raised.value).startswith("tests/spark/standing/test_as_of.py:")
        assert advice in raised.value.advice
