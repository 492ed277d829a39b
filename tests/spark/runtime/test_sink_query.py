"""A sink's run as the driver sees it, when the task that it lives in goes away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from penstock.sinks.spec import SinkSpec
from penstock.spark.runtime.resident import Run
from penstock.spark.runtime.sink_loop import Report, Start, State
from penstock.spark.runtime.sink_query import SinkFailedError, SinkQuery


class Tasks:
    """Takes one run, and is told what becomes of it."""

    broken = None

    def start(
        self,
        sink: str,
        start: Start,
        on_report: Callable[[Report], None],
        on_lost: Callable[[str], None],
    ) -> Run:
        self.run = Run(1, sink, on_report, on_lost)
        on_report(Report(state="running"))
        return self.run

    def forget(self, run: Run) -> None:
        assert run is self.run


def begun(*, rebuild: bool) -> tuple[SinkQuery, Tasks]:
    tasks: Any = Tasks()
    query = SinkQuery(
        tasks, SinkSpec("s", "t", "sqlite:///s.db"), lambda: Start("t", rebuild=rebuild)
    )
    query.start()
    assert query.is_active
    return query, tasks


@pytest.mark.parametrize("rebuild", [False, True])
@pytest.mark.parametrize("state", ["running", "ended", "failed"])
def test_a_task_that_is_lost(rebuild: bool, state: State) -> None:
    query, tasks = begun(rebuild=rebuild)
    tasks.run.on_report(Report(state=state))
    tasks.run.on_lost("its task has ended")
    failure = query.failure()
    assert not query.is_active
    # One that had come to its end has not failed, unless it was still to be switched.
    assert (failure is not None) == (state == "running" or (rebuild and state == "ended"))
    if failure is not None:
        assert failure.retriable
        assert "its task has ended" in failure.message


def test_what_was_built_beside_is_not_waited_for_where_its_task_is_gone() -> None:
    query, tasks = begun(rebuild=True)
    tasks.run.on_report(Report(state="ended"))
    assert query.failure() is None
    tasks.run.on_lost("its task has ended")
    with pytest.raises(SinkFailedError, match="its task has ended"):
        query.switch()
