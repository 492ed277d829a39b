"""Flows kept running: through a broker's crash, beside others that fail, rebuilt, and stopped."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from penstock.errors import PenstockError
from penstock.sinks.spec import SinkSpec
from penstock.spark.flows.declare import Batch, Collected, Flow, flow, stream, table, topic
from penstock.spark.flows.folder import Folder
from penstock.spark.flows.manager import Manager, Status
from penstock.spark.flows.overseeing import STOP_TIMEOUT_S, Settings
from penstock.spark.flows.supervisor import Policy
from penstock.spark.runtime import micro_batches
from penstock.spark.sinking.folder import SinkFolder
from penstock.spark.sinking.manager import SinkManager
from penstock.spark.sinking.output import store
from penstock.testing.flows import FlowFailedError, FlowTester
from tests.waiting import eventually

# The first job of a session starts Python workers and compiles kernels.
pytestmark = pytest.mark.timeout(600)

WAIT_S = 200.0
NUMBERS = stream("numbers", json="n long")


def doubling(output: str, name: str = "doubled", factor: int = 2) -> Flow:
    @flow(inputs=NUMBERS, output=topic(output), name=name)
    def doubled(numbers: DataFrame) -> DataFrame:
        return numbers.select((F.col("n") * factor).alias("n"))

    return doubled


def rows(*numbers: int) -> list[dict[str, Any]]:
    return [{"n": number} for number in numbers]


@contextmanager
def running(
    tester: FlowTester, *flows: Flow, stop_timeout_s: float = STOP_TIMEOUT_S
) -> Iterator[Manager]:
    """The flows, looked after on a thread as `penstock run` does; stopped at the end."""
    settings = Settings(
        tester.broker.bootstrap, policy=Policy(0.1, 1.0, 50), stop_timeout_s=stop_timeout_s
    )
    manager = Manager(tester.spark, tester.use(*flows), Folder(tester.data), settings)
    thread = threading.Thread(target=manager.run, daemon=True)
    manager.start()
    thread.start()
    try:
        yield manager
    finally:
        manager.stop()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        manager.close()


def status(manager: Manager, name: str, *, rebuilding: bool = False) -> Status | None:
    found = [e for e in manager.status() if e.name == name and e.rebuilding == rebuilding]
    return found[0] if found else None


def wait_for(manager: Manager, name: str, state: str) -> Status:
    """The flow, once it is in a state."""

    def found() -> Status | None:
        seen = status(manager, name)
        return seen if seen is not None and seen.state == state else None

    seen = eventually(found, WAIT_S)
    assert seen is not None
    return seen


class AwayError(PenstockError):
    """What comes and goes."""

    retriable = True


class Flaky:
    """An output that fails at first, and takes each batch once."""

    target = "flaky"

    def __init__(self) -> None:
        self.calls = 0
        self.batches: dict[int, list[int]] = {}

    def write(self, rows: DataFrame, batch: Batch) -> int:
        self.calls += 1
        if self.calls <= 2:
            raise AwayError("not now", advice="Wait.")
        numbers = [row["n"] for row in rows.collect()]
        self.batches[batch.batch_id] = numbers
        return len(numbers)


def test_what_may_pass_is_tried_again_and_what_cannot_stops_alone(tester: FlowTester) -> None:
    flaky = Flaky()

    @flow(inputs=NUMBERS, outputs={"log": topic("copied"), "other": flaky})
    def copied(numbers: DataFrame) -> dict[str, DataFrame]:
        return {"log": numbers.select("n"), "other": numbers.where("n > 1").select("n")}

    @flow(inputs=NUMBERS, output=topic("inverse"))
    def inverse(numbers: DataFrame) -> DataFrame:
        half = F.udf(lambda n: 1 / n, "double")
        return numbers.select(half("n").alias("n"))

    tester.feed("numbers", rows(1, 2, 0))
    with running(tester, copied, inverse) as manager:
        bad = wait_for(manager, "inverse", "failed")
        assert "ZeroDivisionError" in bad.error
        assert bad.restarts == 0
        eventually(lambda: flaky.batches == {0: [2]}, WAIT_S)
        assert tester.rows("copied") == rows(1, 2, 0)
        # The broker dies and comes back: nothing is lost, nothing is there twice.
        tester.broker.crash()
        tester.broker.start()
        tester.feed("numbers", rows(4))
        eventually(lambda: flaky.batches.get(1) == [4], WAIT_S)
        good = wait_for(manager, "copied", "running")
        assert good.restarts >= 2
        assert good.error == ""
    assert tester.rows("copied") == rows(1, 2, 0, 4)
    assert manager.failed == ["inverse"]
    assert Folder(tester.data).record("copied").state == "stopped"
    assert Folder(tester.data).record("inverse").error == bad.error


def rows_of(store: Path) -> set[int]:
    with closing(sqlite3.connect(store)) as connection:
        return {number for (number,) in connection.execute("SELECT n FROM doubles")}


@contextmanager
def fed(tester: FlowTester, flows: Manager | None, spec: SinkSpec) -> Iterator[SinkManager]:
    """A sink beside flows, or a run with an end of it alone."""
    settings = Settings(tester.broker.bootstrap, once=flows is None, policy=Policy(0.1, 1.0, 50))
    folder = SinkFolder(tester.data / "sinks")
    if flows is None:
        manager = SinkManager(
            tester.spark, [spec], folder, settings, Folder(tester.data).resolve
        )  # fmt: skip
    else:
        manager = SinkManager(tester.spark, [spec], folder, settings, flows.resolve, flows.make)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop()
        eventually(manager.step, WAIT_S)
        manager.close()


def test_whoever_reads_what_is_rebuilt_follows(tester: FlowTester, tmp_path: Path) -> None:
    @flow(inputs=stream("doubled", json="n long"), output=topic("sums"))
    def sums(doubled: DataFrame) -> DataFrame:
        return doubled.selectExpr("n + 1 as n")

    file = tmp_path / "shop.db"
    spec = SinkSpec("doubles", "doubled", f"sqlite:///{file}", ("n",), "n bigint")
    tester.feed("numbers", rows(1, 2))
    tester.use(doubling("doubled", factor=3))
    tester.run()
    assert tester.rows("doubled") == rows(3, 6)
    with running(tester, doubling("doubled"), sums) as manager, fed(tester, manager, spec) as sinks:

        def is_in_store(wanted: set[int]) -> bool:
            sinks.step()
            return file.exists() and sinks.status()[0].put > 0 and rows_of(file) == wanted

        eventually(lambda: len(tester.rows("sums")) == 2, WAIT_S)
        eventually(lambda: is_in_store({3, 6}), WAIT_S)
        manager.answer({"do": "reset", "flow": "doubled"})
        tester.feed("numbers", rows(3))
        # The store has no row of the old version any more.
        eventually(lambda: is_in_store({2, 4, 6}), WAIT_S)
        eventually(lambda: [each.generation for each in manager.status()] == [2, 2], WAIT_S)
        eventually(lambda: tester.rows("sums") == rows(3, 5, 7), WAIT_S)
        wait_for(manager, "sums", "running")
        assert tester.rows("doubled") == rows(2, 4, 6)
        # Nothing is left that looks healthy and is not in step.
        assert [each.error for each in manager.status()] == ["", ""]
        eventually(lambda: sinks.step() or sinks.status()[0].state == "running", WAIT_S)
        assert [(each.error, each.rebuilding) for each in sinks.status()] == [("", False)]
    record = Folder(tester.data).record("doubled")
    assert (record.generation, record.rebuilding) == (2, 0)
    assert record.outputs == ("topic doubled.v2",)
    assert not Path(Folder(tester.data).checkpoint("doubled", 1)).exists()
    # Readers that do not run meanwhile follow when they are started.
    tester.use(doubling("doubled", factor=5), sums)
    tester.reset("doubled")
    tester.run("sums")
    assert tester.rows("sums") == rows(6, 11, 16)
    with fed(tester, None, spec) as sinks:
        eventually(sinks.step, WAIT_S)
        assert sinks.failed == []
    assert rows_of(file) == {5, 10, 15}


def test_a_store_is_rebuilt_with_its_flow(tester: FlowTester, tmp_path: Path) -> None:
    file = tmp_path / "shop.db"

    def doubling_to_store(factor: int) -> Flow:
        output = store(f"sqlite:///{file}?table=doubles", key="n")

        @flow(inputs=NUMBERS, output=output, name="doubled")
        def doubled(numbers: DataFrame) -> DataFrame:
            return numbers.select((F.col("n") * factor).alias("n"))

        return doubled

    tester.feed("numbers", rows(1, 2))
    tester.use(doubling_to_store(3))
    tester.run()
    assert rows_of(file) == {3, 6}
    tester.use(doubling_to_store(2))
    tester.reset("doubled")
    # 3 is a row of the old code alone.
    assert rows_of(file) == {2, 4}
    tester.feed("numbers", rows(3))
    tester.run()
    assert rows_of(file) == {2, 4, 6}


def test_stop_finishes_the_batch_and_restart_goes_on(tester: FlowTester) -> None:
    began, go_on = threading.Event(), threading.Event()

    @flow(inputs=NUMBERS, output=topic("slow"))
    def slow(numbers: DataFrame) -> DataFrame:
        if not numbers.isStreaming:
            began.set()
            assert go_on.wait(WAIT_S)
        return numbers.select("n")

    tester.feed("numbers", rows(1))
    with running(tester, slow) as manager:
        assert began.wait(WAIT_S)
        manager.answer({"do": "stop", "flow": "slow"})
        assert manager.status()[0].state == "stopping"
        go_on.set()
        eventually(lambda: manager.status()[0].state == "stopped", WAIT_S)
        # The batch was finished, and Spark has noted it down.
        assert tester.rows("slow") == rows(1)
        commits = Path(Folder(tester.data).checkpoint("slow", 1)) / "commits" / "0"
        assert commits.exists()
        tester.feed("numbers", rows(2))
        manager.answer({"do": "restart", "flow": "slow"})
        eventually(lambda: tester.rows("slow") == rows(1, 2), WAIT_S)
    assert manager.failed == []


def test_what_a_stop_leaves_behind_writes_nothing(
    tester: FlowTester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on when its successor has written the micro-batch, and more."""
    monkeypatch.setattr(micro_batches, "CANCEL_S", 0.3)
    began, go_on = threading.Event(), threading.Event()
    left: list[threading.Thread] = []

    @flow(inputs=NUMBERS, output=topic("left"))
    def leaves(numbers: DataFrame) -> DataFrame:
        if not numbers.isStreaming and not left:
            left.append(threading.current_thread())
            began.set()
            assert go_on.wait(WAIT_S)
        return numbers.select("n")

    tester.feed("numbers", rows(1))
    with running(tester, leaves, stop_timeout_s=0.1) as manager:
        assert began.wait(WAIT_S)
        manager.answer({"do": "stop", "flow": "leaves"})
        wait_for(manager, "leaves", "stopped")
        assert left[0].is_alive()
        tester.feed("numbers", rows(2))
        manager.answer({"do": "restart", "flow": "leaves"})
        eventually(lambda: tester.rows("left") == rows(1, 2), WAIT_S)
        go_on.set()
        left[0].join(WAIT_S)
        assert not left[0].is_alive()
        tester.feed("numbers", rows(3))
        eventually(lambda: tester.rows("left") == rows(1, 2, 3), WAIT_S)
        assert manager.status()[0].restarts == 0
    assert manager.failed == []


@pytest.mark.filterwarnings("ignore::penstock.spark.UnboundedStateWarning")
def test_a_flow_with_state_sees_the_table_of_the_moment(tester: FlowTester) -> None:
    @flow(
        inputs=[NUMBERS, table("names", json="name string", key="id")],
        output=topic("named"),
    )
    def named(numbers: DataFrame, names: DataFrame) -> DataFrame:
        return numbers.dropDuplicates(["n"]).join(names, F.col("n") == F.col("id")).select("name")

    tester.feed("names", [{"name": "one"}, {"name": "two"}], key=["1", "2"])
    tester.feed("numbers", rows(1, 1))
    with running(tester, named):
        eventually(lambda: tester.rows("named") == [{"name": "one"}], WAIT_S)
        tester.feed("names", [{"name": "TWO"}], key=["2"])
        tester.feed("numbers", rows(2, 1))
        eventually(lambda: tester.rows("named")[1:] == [{"name": "TWO"}], WAIT_S)


@pytest.mark.filterwarnings("ignore::penstock.spark.UnboundedStateWarning")
def test_a_change_that_does_not_fit_is_refused_and_a_reset_helps(tester: FlowTester) -> None:
    def counting(*keys: str) -> Flow:
        @flow(inputs=stream("events", json="a string, b string"), output=topic("counts"),
              mode="update", name="counts")  # fmt: skip
        def counts(events: DataFrame) -> DataFrame:
            return events.groupBy(*keys).count()

        return counts

    events = [{"a": "x", "b": "1"}, {"a": "x", "b": "2"}, {"a": "y", "b": "1"}]
    tester.feed("events", events)
    tester.use(counting("a"))
    tester.run()
    assert {row["a"]: row["count"] for row in tester.rows("counts")} == {"x": 2, "y": 1}
    tester.use(counting("a", "b"))
    with pytest.raises(FlowFailedError, match="has changed so that it cannot go on") as caught:
        tester.run()
    # In the words of the flow: no plan of Spark's.
    assert "groupBy: also b now" in str(caught.value)
    assert "Aggregate" not in str(caught.value)
    assert "penstock flows reset counts" in caught.value.advice
    tester.reset("counts")
    # The same as a computation over the whole input at once.
    frame = tester.spark.createDataFrame(events)
    whole = {
        (row["a"], row["b"], row["count"]) for row in frame.groupBy("a", "b").count().collect()
    }
    assert {(row["a"], row["b"], row["count"]) for row in tester.rows("counts")} == whole
    assert Folder(tester.data).record("counts").outputs == ("topic counts.v2",)


def test_a_topic_that_is_not_there_or_is_gone(tester: FlowTester) -> None:
    settings = Settings(tester.broker.bootstrap, once=True)
    made = doubling("doubled")
    manager = Manager(tester.spark, Collected([made]), Folder(tester.data), settings)
    manager.start()
    manager.run()
    manager.close()
    [found] = manager.status()
    assert found.state == "failed"
    assert found.error.startswith("flow 'doubled' reads topic 'numbers', which does not exist")
    assert "penstock topics create numbers" in found.advice
    # Deleted and made again: what the checkpoint remembers is of another topic.
    tester.feed("numbers", rows(1, 2, 3))
    tester.use(made)
    tester.run()
    admin = AdminClient({"bootstrap.servers": tester.broker.bootstrap})
    admin.delete_topics(["numbers"])["numbers"].result(60)
    eventually(lambda: "numbers" not in admin.list_topics(timeout=60).topics)
    tester.feed("numbers", rows(4))
    with pytest.raises(FlowFailedError, match="topic numbers was deleted and made again"):
        tester.run()
    tester.reset("doubled")
    assert tester.rows("doubled") == rows(8)


def test_two_outputs_or_inputs_changed_are_told(tester: FlowTester) -> None:
    tester.feed("numbers", rows(1))
    tester.use(doubling("a"))
    tester.run()
    tester.use(doubling("b"))
    with pytest.raises(FlowFailedError, match="it wrote topic a and now writes topic b"):
        tester.run()
    # A change of the function alone goes on where it was.
    tester.use(doubling("a", factor=5))
    tester.feed("numbers", rows(2))
    tester.run()
    assert tester.rows("a") == rows(2, 10)
    record = Folder(tester.data).record("doubled")
    assert replace(record, updated_ms=0).state == "finished"
