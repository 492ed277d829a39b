"""A stop ends in time whatever is under way, and nothing that it has broken off counts."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import DataFrame

from penstock.spark.flows.declare import flow, stream, topic
from penstock.spark.flows.gate import GateClosedError
from penstock.spark.flows.inputs import Place
from penstock.spark.flows.overseeing import Overseer, Settings, Unit
from penstock.spark.flows.running import Running
from penstock.spark.flows.supervisor import Failure
from penstock.spark.flows.turns import Turns
from tests.waiting import eventually


@flow(inputs=stream("in", text=True), output=topic("out"))
def same(rows: DataFrame) -> DataFrame:
    return rows


class Breaking:
    """A writer in the midst of whose sending the micro-batch is broken off."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.committed = 0

    def write(self, _rows: Any, _batch_id: int, *, with_letters: bool, check: Any) -> None:
        self.running.stop(0.0)
        check()
        self.committed += 1

    def write_prepared(self, rows: Any, batch_id: int, check: Any) -> None:
        self.write(rows, batch_id, with_letters=False, check=check)

    def write_letters(self, _rows: Any, _batch_id: int) -> int:
        self.committed += 1
        return 1

    def close(self) -> None: ...


@pytest.mark.parametrize("is_prepared", [False, True])
def test_nothing_of_a_micro_batch_that_was_broken_off_counts(is_prepared: bool) -> None:
    spark: Any = None
    rows: Any = SimpleNamespace(columns=[])
    verdict: Any = SimpleNamespace(before_commit=lambda: None)
    query: Any = SimpleNamespace(is_active=True, stop=lambda: None)
    running = Running(spark, same, Place("nowhere:1", {}, str), "nowhere")
    writer: Any = Breaking(running)
    running._writer, running._query = writer, query
    running._gate.enter()

    def write() -> None:
        if is_prepared:
            running.write_prepared(rows, 0, verdict)
        else:
            running.write(rows, 0, with_letters=False)

    with pytest.raises(GateClosedError):
        write()
    # Nor does it begin to write: that would take the transactional id from its successor.
    for begin in (write, lambda: running.write_letters(rows, 0)):
        with pytest.raises(GateClosedError):
            begin()
    assert writer.committed == 0


class Hanging(Overseer[Unit[Any]]):
    """Starts that wait for a job which no cluster runs."""

    kind = "things"

    def __init__(self) -> None:
        spark: Any = None
        settings = Settings("", stop_timeout_s=0.0, keeps_counts=False, turns=Turns(1))
        super().__init__(spark, settings, 1)
        self.began, self.cancelled = threading.Event(), threading.Event()

    def start(self) -> None:
        self._live["one"] = Unit("one", self._settings.policy)
        self._begin(self._live["one"])

    def _new_query(self, unit: Unit[Any]) -> Any:
        return SimpleNamespace(explain=lambda error: Failure(str(error)), close=lambda: None)

    def _launch(self, unit: Unit[Any], query: Any) -> None:
        self.began.set()
        assert self.cancelled.wait(60)
        raise RuntimeError("cancelled")

    def _break_off_start(self, unit: Unit[Any]) -> None:
        self.cancelled.set()

    def _remember(self, unit: Unit[Any]) -> None: ...

    def _note(self, unit: Unit[Any]) -> None: ...

    def _switch(self, rebuilt: Unit[Any]) -> None: ...


def test_a_start_that_hangs_is_broken_off_by_a_stop() -> None:
    hanging = Hanging()
    hanging.start()
    assert hanging.began.wait(60)
    assert not hanging.step()
    assert not hanging.step()
    assert not hanging.cancelled.is_set()
    hanging.stop()
    eventually(hanging.step)
    assert hanging.failed == []
    assert hanging._live["one"].life.state == "stopped"
    hanging.close()
