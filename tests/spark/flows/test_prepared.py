"""Small micro-batches over a plan that is prepared once; large ones by stages."""

from __future__ import annotations

import shutil
from dataclasses import replace
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark import views
from penstock.spark.flows import operated, prepared
from penstock.spark.flows.dead_letters import DeadLetterGuard
from penstock.spark.flows.declare import Flow, flow, stream, topic
from penstock.spark.flows.folder import Folder
from penstock.spark.flows.parts import Part
from penstock.spark.flows.prepared import Prepared
from penstock.spark.flows.running import Running
from penstock.spark.runtime.micro_batches import MicroBatches
from penstock.spark.sink.prepared import PreparedFailedError, PreparedTooMuchError
from penstock.testing.flows import FlowFailedError, FlowTester

EVENTS = stream(
    "events", json="id bigint, number bigint", dead_letters="events.dead",
    options={"maxOffsetsPerTrigger": "3"},
)  # fmt: skip


ROWS = stream("rows", changelog="id bigint, number bigint", options=EVENTS.options)


class Calls:
    """How often a function was called, and how often the prepared plan was run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.function = self.prepared = 0
        write = Running.write_prepared

        def counting(running: Running, *args: Any) -> Any:
            self.prepared += 1
            return write(running, *args)

        monkeypatch.setattr(Running, "write_prepared", counting)

    def forget(self) -> None:
        self.function = self.prepared = 0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


def doubled(calls: Calls, more: str = "number * 2") -> Flow:
    @flow(inputs=EVENTS, output=topic("doubled", key="id"), name="doubled")
    def body(events: DataFrame) -> DataFrame:
        calls.function += 1
        return events.withColumn("number", F.expr(more))

    return body


def summed(calls: Calls) -> Flow:
    @flow(inputs=ROWS, output=topic("summed", key="_key"), shards=2, name="summed")
    def body(rows: DataFrame) -> DataFrame:
        calls.function += 1
        query = "SELECT number % 3 AS third, sum(number) AS total FROM rows GROUP BY number % 3"
        return views.sql(query, keys={"rows": "id"}, rows=rows).changes()

    return body


def rows(count: int, first: int = 0) -> list[Any]:
    return [{"id": number, "number": number} for number in range(first, first + count)]


def feed_rows(tester: FlowTester, count: int, first: int = 0) -> None:
    keys = [str(first + number) for number in range(count)]
    tester.feed("rows", rows(count, first), key=keys)


def test_a_function_is_called_once_for_many_micro_batches(tester: FlowTester, calls: Calls) -> None:
    tester.use(doubled(calls))
    tester.feed("events", [*rows(5), "{", *rows(5, 5)])
    status = tester.run()["doubled"]
    assert sorted(row["number"] for row in tester.rows("doubled")) == list(range(0, 20, 2))
    # Once for its checks, once for all micro-batches, and never again.
    assert (calls.function, calls.prepared) == (2, 4)
    told = status.progress
    assert (told.batches, told.rows_in, told.rows_out, told.dead_letters) == (4, 11, 10, 1)
    assert [each.value for each in tester.records("events.dead")] == [b"{"]


def test_state_is_the_same_whichever_way_a_micro_batch_goes(
    tester: FlowTester, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    tester.use(summed(calls))
    for turn, most in enumerate((20_000, 0, 20_000)):
        monkeypatch.setattr(prepared, "PREPARED_RECORDS", most)
        calls.forget()
        feed_rows(tester, 6, 6 * turn)
        tester.run()
        assert calls.prepared == (2 if most else 0)
    last = {row["third"]: row["total"] for row in tester.rows("summed")}
    assert last == {each: sum(range(each, 18, 3)) for each in range(3)}


@pytest.mark.parametrize("most", [20_000, 0])
def test_records_without_a_value_count_the_same_either_way(
    tester: FlowTester, calls: Calls, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(prepared, "PREPARED_RECORDS", most)
    judged: list[tuple[int | None, int]] = []
    check = DeadLetterGuard.check

    def checking(guard: DeadLetterGuard, every: int | None, dead: int, first: Any) -> None:
        judged.append((every, dead))
        check(guard, every, dead, first)

    monkeypatch.setattr(DeadLetterGuard, "check", checking)
    tester.use(doubled(calls))
    tester.feed("events", [*rows(2), None, None, "{", *rows(1)])
    told = tester.run()["doubled"].progress
    assert bool(calls.prepared) == bool(most)
    assert (told.rows_in, told.null_values, told.dead_letters) == (6, 2, 1)
    # Dead letters are a share of what has a value or should have one.
    assert judged == [(2, 0), (2, 1)]


def test_a_flow_without_dead_letters_has_nothing_to_judge(
    tester: FlowTester, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    noted: list[int] = []
    monkeypatch.setattr(DeadLetterGuard, "note", lambda *_: noted.append(1))
    plain = replace(doubled(calls), inputs=(replace(EVENTS, dead_letters=None),))
    tester.use(plain)
    tester.feed("events", [*rows(2), None])
    told = tester.run()["doubled"].progress
    assert calls.prepared == 1
    assert (told.rows_in, told.null_values) == (3, 0)
    assert not noted


@pytest.mark.parametrize("more", ["number + 0 * cast(rand() * 2 as bigint)", "unix_timestamp()"])
def test_what_spark_computes_once_goes_by_stages(
    tester: FlowTester, calls: Calls, more: str
) -> None:
    tester.use(doubled(calls, more))
    tester.feed("events", rows(4))
    tester.run()
    assert len(tester.rows("doubled")) == 4
    assert calls.prepared == 0


def test_an_error_of_the_user_is_told_as_ever(tester: FlowTester, calls: Calls) -> None:
    tester.use(doubled(calls, "if(number = 4, raise_error('four is too many'), number)"))
    tester.feed("events", rows(6))
    with pytest.raises(FlowFailedError, match="four is too many"):
        tester.run()
    assert calls.prepared == 2
    # What came before it is there, and only that.
    assert sorted(row["id"] for row in tester.rows("doubled")) == [0, 1, 2]


def test_a_job_that_fails_is_made_up_for_by_stages(
    tester: FlowTester, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_running: Running, *_: Any) -> Any:
        calls.prepared += 1
        raise PreparedFailedError("lost")

    monkeypatch.setattr(Running, "write_prepared", fail)
    tester.use(summed(calls))
    feed_rows(tester, 15)
    tester.run()
    last = {row["third"]: row["total"] for row in tester.rows("summed")}
    assert last == {each: sum(range(each, 15, 3)) for each in range(3)}
    # After that many failures it is given up.
    assert calls.prepared == prepared.MOST_FAILURES


def test_a_flow_that_has_run_does_not_begin_anew_without_its_checkpoint(
    tester: FlowTester, calls: Calls
) -> None:
    tester.use(doubled(calls))
    tester.feed("events", rows(2))
    tester.run()
    (checkpoint,) = tester.data.glob("doubled/g1/checkpoint")
    folder = Folder(tester.data)
    shutil.move(checkpoint, tester.data / "elsewhere")
    folder.write_counts("doubled", {"rows_in": 2})
    with pytest.raises(FlowFailedError, match="has run before, and there is no checkpoint"):
        tester.run()
    shutil.move(tester.data / "elsewhere", checkpoint)
    tester.run()
    assert len(tester.rows("doubled")) == 2


def test_a_function_that_counts_its_rows_goes_by_stages(tester: FlowTester, calls: Calls) -> None:
    @flow(inputs=EVENTS, output=topic("counted", key="id"), name="counted")
    def body(events: DataFrame) -> DataFrame:
        return events if events.isStreaming else events.withColumn("of", F.lit(events.count()))

    tester.use(body)
    tester.feed("events", rows(5))
    tester.run()
    assert sorted((row["id"], row["of"]) for row in tester.rows("counted")) == [
        (0, 3), (1, 3), (2, 3), (3, 2), (4, 2)
    ]  # fmt: skip
    assert calls.prepared == 0


def test_without_threads_of_their_own_flows_go_by_stages(
    tester: FlowTester, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepared, "are_threads_pinned", lambda _: False)
    tester.use(doubled(calls))
    tester.feed("events", rows(2))
    tester.run()
    assert (len(tester.rows("doubled")), calls.prepared) == (2, 0)


def test_after_too_much_as_many_records_go_by_stages(
    tester: FlowTester, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_running: Running, *_: Any) -> Any:
        calls.prepared += 1
        raise PreparedTooMuchError

    monkeypatch.setattr(Running, "write_prepared", fail)
    tester.use(doubled(calls))
    tester.feed("events", rows(8))
    tester.run()
    # Of three, three and two records.
    assert (len(tester.rows("doubled")), calls.prepared) == (8, 2)


def test_only_flows_with_operators_send_rows_to_python_by_their_number(
    tester: FlowTester, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def settings(_session: Any, running: Running) -> dict[str, str]:
        asked.append(running.flow.name)
        return {}

    monkeypatch.setattr(operated, "micro_batch_settings", settings)
    tester.use(doubled(calls))
    tester.feed("events", rows(1))
    tester.run()
    assert (calls.prepared, asked) == (1, [])


def test_nothing_runs_if_a_start_fails(
    tester: FlowTester, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise PermissionError("no watching here")

    monkeypatch.setattr(Running, "_start_watching", fail)
    monkeypatch.setattr(MicroBatches, "start", lambda _: calls.forget())
    calls.prepared = 7
    tester.use(doubled(calls))
    with pytest.raises(FlowFailedError, match="no watching here"):
        tester.run()
    assert calls.prepared == 7


def test_streams_that_nobody_reads_have_no_bad_records(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = spark.range(1)
    bad = spark.sql(
        "SELECT 'events' topic, 0 partition, 7L offset, 'cut' _error,"
        " current_timestamp() timestamp, cast('k' as binary) key,"
        " named_struct('value', cast('{' as binary)) _raw"
    )
    parts = [Part(stream("plain", raw=True), raw, raw), Part(EVENTS, bad, bad)]
    monkeypatch.setattr(Prepared, "_parts", lambda *_: parts)
    micro_batch: Any = None
    assert Prepared._first(object.__new__(Prepared), micro_batch) == "events-0 at offset 7: cut"
