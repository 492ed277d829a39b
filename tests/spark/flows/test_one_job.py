"""Micro-batches of which the source tells the time: as those that look at the rows first."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark import windows
from penstock.spark.flows import prepared
from penstock.spark.flows.declare import Flow, flow, stream, topic
from penstock.spark.flows.folder import Folder
from penstock.spark.joins import enrich
from penstock.spark.source.planning import Range
from penstock.spark.state import layout, watching
from penstock.spark.state.time import Times, TimesFolder
from penstock.testing.flows import FlowFailedError, FlowTester
from tests.harness.profiles import (
    ONE_JOB_RESTS,
    ONE_JOB_ROUNDS,
    ONE_JOB_SECONDS,
    ONE_JOB_TURNS,
    ONE_JOB_VARIANTS,
    PACKED_ATTEMPTS,
)
from tests.spark.failing import fail_at

pytestmark = pytest.mark.timeout(600)
SCHEMA = "id bigint, at timestamp"
FLOW = "penstock.error.flow"


def counting(
    name: str,
    *,
    many: bool = False,
    twice: bool = False,
    mapped: bool = False,
    wanted: list[int] | None = None,
) -> Flow:
    """Counts by id in windows; by one job, unless something is against it."""
    options = {"maxOffsetsPerTrigger": "60"}
    # Several tasks for a partition cannot tell.
    options |= {"minPartitions": "6"} if many else {}
    read = stream(
        "events", json=SCHEMA, time="at", lateness="10 seconds", options=options,
        late=f"{name}.late", dead_letters=f"{name}.dead", idle="1 hour",
    )  # fmt: skip

    def same(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches

    def body(rows: DataFrame) -> DataFrame:
        if wanted is not None:
            rows = rows.where(F.col("id").isin(wanted))
        if mapped:
            rows = rows.mapInArrow(same, rows.schema)
        if twice:
            rows = rows.where("id % 2 = 0").union(rows.where("id % 2 != 0"))
        return windows.tumbling(rows, "5 s", by=["id"], values={"n": windows.count()})

    return flow(inputs=read, output=topic(name), shards=2, name=name)(body)


def feed(tester: FlowTester, seed: int, seconds: int = 60) -> None:
    rng = random.Random(seed)
    for number in range(2):
        rows: list[Any] = []
        for second in range(seconds):
            at = tester.now + timedelta(seconds=second - rng.choice([0, 0, 0, 5, 11, 30]))
            rows.append({"id": rng.randint(0, 3), "at": at if rng.random() < 0.95 else None})
        tester.feed("events", rows, partition=number)


def watched(tester: FlowTester, name: str) -> Path:
    return Path(Folder(tester.data).checkpoint(name, 1)) / watching.FOLDER


def shown(tester: FlowTester, name: str) -> list[Any]:
    return sorted((row["window_start"], row["id"], row["n"]) for row in tester.rows(name))


def aside(tester: FlowTester, name: str) -> list[Any]:
    # All but whose they are.
    return sorted(
        (each.value, sorted(item for item in each.headers.items() if item[0] != FLOW))
        for each in tester.records(name)
    )


def test_one_job_and_two_give_the_same(tester: FlowTester) -> None:
    variants = [
        counting("one"),
        counting("many", many=True),
        counting("twice", twice=True),
        counting("mapped", mapped=True),
    ]
    flows = {each.name: each for each in variants[:ONE_JOB_VARIANTS]}
    tester.use(*flows.values())
    tester.make_topic("events", partitions=2)
    rounds = [tuple(flows), ("one", "many")]
    for seed, names in enumerate(rounds[:ONE_JOB_ROUNDS]):
        feed(tester, seed)
        statuses = tester.run(*names)
        wanted = shown(tester, "many")
        assert len(wanted) > 20
        for name in names:
            assert shown(tester, name) == wanted, name
            for kind in ("late", "dead"):
                assert aside(tester, f"{name}.{kind}") == aside(tester, f"many.{kind}"), name
            told, other = statuses[name].progress, statuses["many"].progress
            assert told.late_rows == other.late_rows > 5
            assert told.dead_letters == other.dead_letters > 0
            assert told.watermark == other.watermark
            assert told.rows_out == other.rows_out
        assert statuses["one"].progress.rows_in == statuses["many"].progress.rows_in
        tester.advance(70)
    assert [name for name in flows if watched(tester, name).exists()] == ["one"]


def test_a_micro_batch_that_was_written_is_told_again(tester: FlowTester) -> None:
    """It came to its end but for its time and the note that it is done."""
    tester.use(counting("again"))
    tester.make_topic("events", partitions=2)
    feed(tester, 3)
    tester.run()
    checkpoint = Folder(tester.data).checkpoint("again", 1)
    rows, late, dead = (tester.records(each) for each in ("again", "again.late", "again.dead"))
    found = layout.find(checkpoint)
    assert found is not None
    last = max(int(each.name) for each in Path(checkpoint, "commits").glob("[0-9]*"))
    times = TimesFolder(f"{found.folder}/{layout.TIME}")
    wanted = times.before(last + 1)
    assert isinstance(wanted, Times)
    before = times.before(last)
    for each in (f"{found.folder}/{layout.TIME}/{last}.json", f"{checkpoint}/commits/{last}"):
        Path(each).unlink()
    shutil.rmtree(watched(tester, "again"))
    tester.run()
    assert times.before(last + 1) == wanted != before
    assert len(tester.records("again")) == len(rows)
    assert len(tester.records("again.late")) == len(late) > 0
    assert len(tester.records("again.dead")) == len(dead)


def test_windows_close_where_no_row_is_of_use(tester: FlowTester) -> None:
    """Spark does not read what a list that is empty by now lets through; yet time passes."""
    wanted = [0, 1, 2, 3]
    made = {
        name: counting(name, many=name == "many", wanted=wanted) for name in ("one", "many")
    }  # fmt: skip
    tester.use(*made.values())
    tester.make_topic("events", partitions=2)
    feed(tester, 5, ONE_JOB_SECONDS)
    tester.run()
    before = shown(tester, "one")
    assert before
    wanted.clear()
    tester.advance(70)
    feed(tester, 6, ONE_JOB_SECONDS)
    told = tester.run()
    assert watched(tester, "one").exists()
    assert shown(tester, "one") == shown(tester, "many")
    assert len(shown(tester, "one")) > len(before)
    for what in ("watermark", "late_rows", "rows_in", "dead_letters"):
        one, many = (getattr(told[name].progress, what) for name in made)
        assert one == many, what
    for kind in ("late", "dead"):
        assert aside(tester, f"one.{kind}") == aside(tester, f"many.{kind}")


def test_what_was_told_of_other_records_is_forgotten(tester: FlowTester) -> None:
    """A micro-batch that was planned, given up, and planned anew with other records."""
    tester.use(counting("one"))
    tester.make_topic("events", partitions=2)
    at = tester.now
    tester.feed("events", [{"id": 1, "at": at}], partition=0)
    tester.feed("events", [{"id": 1, "at": at}], partition=1)
    tester.run()
    watch = watching.Watch(str(watched(tester, "one")))
    # A task of the same number, of records that are far ahead.
    ahead = watching.Told("events", 1, 1, round((at.timestamp() + 3600) * 1e6), read=1)
    stray = replace(watch.now(), batch_id=1)
    watch.tell(stray, [Range("events", 1, 1, 2)], [ahead])
    tester.feed("events", [{"id": 1, "at": at + timedelta(seconds=1)}], partition=0)
    tester.run()
    tester.feed("events", [{"id": 1, "at": at + timedelta(seconds=1)}] * 5, partition=1)
    told = tester.run()["one"]
    assert told.progress.late_rows == 0


def joining(name: str, *, many: bool = False) -> Flow:
    """Events with the row of their time; both streams are read by one job, unless cut."""
    options = {"maxOffsetsPerTrigger": "60"} | ({"minPartitions": "6"} if many else {})
    inputs = [
        stream(
            "events", json=SCHEMA, time="at", lateness="10 seconds", options=options,
            late=f"{name}.late", dead_letters=f"{name}.dead", idle="1 hour",
        ),
        stream(
            "names", changelog="id bigint, name string", time="_timestamp", lateness="5 seconds",
            options=options, dead_letters=f"{name}.unnamed", idle="1 hour",
        ),
    ]  # fmt: skip

    def body(events: DataFrame, names: DataFrame) -> DataFrame:
        return enrich(events, names, on="id", columns=["name"], version="as_of")

    return flow(inputs=inputs, output=topic(name), shards=2, name=name)(body)


def test_two_streams_in_one_job_and_in_two_give_the_same(tester: FlowTester) -> None:
    flows = {"one": joining("one"), "many": joining("many", many=True)}
    tester.use(*flows.values())
    tester.make_topic("events", partitions=2)
    tester.make_topic("names", partitions=2)
    rng = random.Random(11)
    known = 0
    # In the end only one of the two has anything new.
    for turn in range(4)[-ONE_JOB_TURNS:]:
        if turn < 3:
            feed(tester, turn, ONE_JOB_SECONDS)
        if turn != 2:
            start = tester.now
            for second in range(0, ONE_JOB_SECONDS, 3):
                number = rng.randint(0, 3)
                row: Any = {"id": number, "name": f"{number} in turn {turn}"}
                tester.now = start + timedelta(seconds=second)
                tester.feed("names", [row if second > 3 else "{"], key=["1"], partition=number % 2)
            tester.now = start
        statuses = tester.run()
        found, wanted = (
            sorted((row["at"], row["id"], row["name"] or "") for row in tester.rows(name))
            for name in flows
        )
        assert found == wanted
        assert turn == 2 or len(wanted) > known
        known = len(wanted)
        for kind in ("late", "dead", "unnamed"):
            assert aside(tester, f"one.{kind}") == aside(tester, f"many.{kind}")
        one, many = (statuses[name].progress for name in flows)
        for what in ("watermark", "late_rows", "rows_in", "rows_out", "dead_letters"):
            assert getattr(one, what) == getattr(many, what), what
        tester.advance(70)
    assert min(len(tester.records(f"one.{kind}")) for kind in ("late", "dead", "unnamed")) > 2
    assert [name for name in flows if watched(tester, name).exists()] == ["one"]


def test_packed_rows_are_written_once_whatever_fails(
    tester: FlowTester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is computed; when state is written and output is not; when both are."""
    fail_at(PACKED_ATTEMPTS, lambda sink: sink.name == "one", monkeypatch)
    flows = {"one": joining("one"), "many": joining("many", many=True)}
    tester.use(*flows.values())
    tester.make_topic("events", partitions=2)
    tester.make_topic("names", partitions=2)
    for second in range(0, ONE_JOB_SECONDS * 3 // 2, 3):
        row = {"id": second % 4, "name": f"since {second}"}
        tester.feed("names", [row], key=["1"], partition=second % 2)
        tester.advance(3)
    tester.now -= timedelta(seconds=ONE_JOB_SECONDS * 3 // 2)
    feed(tester, 21, ONE_JOB_SECONDS)
    statuses = tester.run(tries=20)
    assert statuses["one"].restarts >= len(set(PACKED_ATTEMPTS) - {"none"})
    found, wanted = (
        sorted((row["at"], row["id"], row["name"] or "") for row in tester.rows(name))
        for name in flows
    )
    assert found == wanted
    assert len({name for _, _, name in wanted}) > 5
    for kind in ("late", "dead"):
        assert aside(tester, f"one.{kind}") == aside(tester, f"many.{kind}")
    assert statuses["one"].progress.watermark == statuses["many"].progress.watermark


def test_rows_that_are_packed_can_still_be_needed_elsewhere(tester: FlowTester) -> None:
    """A function that does with a micro-batch what it did not do when it was planned."""
    more: list[str] = []
    inputs = [
        stream("events", json=SCHEMA, time="at", lateness="10 seconds"),
        stream("names", changelog="id bigint, name string", time="_timestamp"),
    ]

    @flow(inputs=inputs, output=topic("both"), shards=2)
    def both(events: DataFrame, names: DataFrame) -> DataFrame:
        found = enrich(events, names, on="id", columns=["name"]).select("id", "name")
        for each in more:
            found = found.unionByName(events.select("id", F.lit(each).alias("name")))
        return found

    tester.use(both)
    wanted = []
    for turn in range(3):
        tester.feed("names", [{"id": 1, "name": "one"}], key=["1"])
        rows = [{"id": number % 2, "at": tester.now} for number in range(10)]
        tester.feed("events", rows)
        told = tester.run()["both"]
        wanted += [(number % 2, "one" if number % 2 else None) for number in range(10)]
        wanted += [(number % 2, each) for each in more for number in range(10)]
        found = [(row["id"], row["name"]) for row in tester.rows("both")]
        assert sorted(found, key=str) == sorted(wanted, key=str), turn
        assert told.progress.rows_in == 11
        more[:] = ["again"] if turn == 0 else []
    assert watched(tester, "both").exists()


def test_a_table_that_rests_is_no_reason_to_read_twice(
    tester: FlowTester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Most tables seldom change: of most micro-batches only the events are new."""
    # By stages, as large ones.
    monkeypatch.setattr(prepared, "PREPARED_RECORDS", 0)
    inputs = [
        stream("events", json=SCHEMA, time="at", lateness="10 seconds"),
        stream("names", changelog="id bigint, name string", time="_timestamp"),
    ]

    @flow(inputs=inputs, output=topic("both"), shards=2)
    def both(events: DataFrame, names: DataFrame) -> DataFrame:
        return enrich(events, names, on="id", columns=["name"]).select("id", "name")

    tester.use(both)
    tester.feed("names", [{"id": 1, "name": "one"}], key=["1"])
    for turn in range(1, ONE_JOB_RESTS + 1):
        tester.feed("events", [{"id": 1, "at": tester.now}])
        told = tester.run()["both"]
        assert tester.rows("both") == [{"id": 1, "name": "one"}] * turn
        assert told.progress.rows_in == (2 if turn == 1 else 1)
        now = watching.Watch(str(watched(tester, "both"))).now()
        assert (now.batch_id, list(now.packings)) == (turn - 1, [0])
    # And of some only the table.
    tester.feed("names", [{"id": 1, "name": "uno"}], key=["1"])
    tester.run()
    tester.feed("events", [{"id": 1, "at": tester.now}])
    tester.run()
    assert tester.rows("both")[ONE_JOB_RESTS:] == [{"id": 1, "name": "uno"}]


def test_a_stream_that_goes_past_the_operator(tester: FlowTester) -> None:
    """Its tasks need not have told anything when the operator begins."""
    inputs = [
        stream("others", json=SCHEMA, time="at", lateness="10 seconds"),
        stream("events", json=SCHEMA, time="at", lateness="10 seconds"),
        stream("names", changelog="id bigint, name string", time="_timestamp"),
    ]

    @flow(inputs=inputs, output=topic("all"), shards=2)
    def everything(others: DataFrame, events: DataFrame, names: DataFrame) -> DataFrame:
        found = enrich(events, names, on="id", columns=["name"]).select("id", "name")
        return found.unionByName(others.select("id", F.lit("other").alias("name")))

    tester.use(everything)
    tester.feed("names", [{"id": 1, "name": "one"}], key=["1"])
    for name in ("events", "others"):
        tester.feed(name, [{"id": 1, "at": tester.now}])
    tester.run()
    found = sorted((row["id"], row["name"]) for row in tester.rows("all"))
    assert found == [(1, "one"), (1, "other")]
    assert not watched(tester, "everything").exists()


def test_a_packed_stream_fails_at_a_bad_record(tester: FlowTester) -> None:
    @flow(
        inputs=[
            stream("events", json=SCHEMA, time="at", dead_letters=None),
            stream("names", changelog="id bigint, name string", time="_timestamp"),
        ],
        output=topic("named"),
    )
    def named(events: DataFrame, names: DataFrame) -> DataFrame:
        return enrich(events, names, on="id", columns=["name"])

    tester.use(named)
    tester.feed("names", [{"id": 1, "name": "one"}], key=["1"])
    tester.feed("events", [{"id": 1, "at": tester.now}, "{", {"id": 1, "at": tester.now}])
    with pytest.raises(FlowFailedError, match="offset 1 cannot be read"):
        tester.run()


def test_a_sketch_beside_a_set_reads_twice_and_says_so(tester: FlowTester) -> None:
    @flow(inputs=stream("events", json=SCHEMA, time="at", lateness="1 hour"), output=topic("two"))
    def two(rows: DataFrame) -> DataFrame:
        values = {"near": windows.approx_distinct("id"), "exact": windows.distinct("id")}
        return windows.tumbling(rows, "5 s", values=values)

    tester.use(two)
    tester.make_topic("events", partitions=1)
    tester.feed("events", [{"id": number, "at": tester.now} for number in range(40)])
    assert tester.run()["two"].progress.rows_in == 40
    assert not watched(tester, "two").exists()


def test_time_passes_where_the_rows_are_of_no_use(tester: FlowTester) -> None:
    @flow(
        inputs=stream("events", json=SCHEMA, time="at", lateness="10 seconds", idle="1 hour"),
        output=topic("nothing"),
        shards=2,
    )
    def nothing(rows: DataFrame) -> DataFrame:
        counts = windows.tumbling(rows.where("1 = 0"), "5 s", values={"n": windows.count()})
        return counts.where("n < 0")

    tester.use(nothing)
    tester.make_topic("events", partitions=2)
    feed(tester, 4)
    status = tester.run()["nothing"]
    assert watched(tester, "nothing").exists()
    assert status.progress.watermark > "2026-01-01T00:00:30"
    assert status.progress.late_rows > 0
    assert len(tester.records("events.dead")) == status.progress.dead_letters > 0
