"""One run of a sink as the driver sees it; the work is done in a resident task (`sink_loop`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock.errors import PenstockError
from penstock.sinks.contract import Position
from penstock.sinks.spec import SinkSpec
from penstock.spark.flows.progress import Progress
from penstock.spark.flows.supervisor import Failure
from penstock.spark.runtime.resident import ResidentTasks, Run
from penstock.spark.runtime.sink_loop import Report, Start, failure_of

# A store that is slow to open is waited for; one that hangs is noticed by whoever watches the task.
_SWITCH_S: Final = 3600.0


class SinkFailedError(PenstockError):
    """A run has failed in its task."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message, advice=failure.advice)
        self.failure = failure


@dataclass(slots=True)
class Applied:
    """What a sink has come to, over all of its runs."""

    position: Position | None = None
    # The newest record that is in the store, in seconds since 1970.
    newest_s: float = 0.0
    put: int = 0
    deleted: int = 0
    freshness: tuple[float, float] | None = None


class SinkQuery:
    """Feeds one sink, from a start to its end."""

    def __init__(
        self,
        tasks: ResidentTasks,
        spec: SinkSpec,
        start: Callable[[], Start],
        *,
        progress: Progress | None = None,
        applied: Applied | None = None,
    ) -> None:
        """`start` says how to begin, when it is time for it."""
        self.spec = spec
        self.progress = progress if progress is not None else Progress()
        self.applied = applied if applied is not None else Applied()
        # What is read, and where it is: known once it has begun.
        self.topic = self.topic_id = self.cluster_id = ""
        self._tasks = tasks
        self._make_start = start
        self._once = self._is_rebuild = False
        self._changed = threading.Condition()
        self._run: Run | None = None
        self._report = Report()
        # What was added to the totals already.
        self._counted = Report()
        self._lost: Failure | None = None

    # ---- the start -----------------------------------------------------------------------

    def start(self) -> None:
        """Begin in a task; it runs when this returns."""
        start = self._make_start()
        self._once, self._is_rebuild = start.once, start.rebuild
        self._run = self._tasks.start(self.spec.name, start, self._take, self._lose)
        with self._changed:
            self._changed.wait_for(lambda: self._report.state != "starting" or self._lost)
        failure = self.failure()
        if failure is not None:
            raise SinkFailedError(failure)
        self._count()

    def _take(self, report: Report) -> None:
        with self._changed:
            self._report = report
            self.topic = report.topic or self.topic
            self.topic_id = report.topic_id or self.topic_id
            self.cluster_id = report.cluster_id or self.cluster_id
            self._changed.notify_all()

    def _lose(self, why: str) -> None:
        with self._changed:
            # What was built beside is switched by the task that has built it.
            waits = self._is_rebuild and self._report.state == "ended"
            if waits or self._report.state in {"starting", "running"}:
                self._lost = Failure(f"sink {self.spec.name!r}: {why}", retriable=True)
            self._changed.notify_all()

    # ---- watching ------------------------------------------------------------------------

    @property
    def is_active(self) -> bool:
        return self._lost is None and self._report.state in {"starting", "running"}

    @property
    def is_waiting(self) -> bool:
        """Whether it has looked for records, and found none."""
        return self._report.is_idle

    def failure(self) -> Failure | None:
        """Why it has ended; None if it came to its end, or was stopped."""
        return self._lost or self._report.failure

    def explain(self, error: BaseException) -> Failure:
        """The failure that an error of `start`, `stop` or `switch` stands for."""
        if isinstance(error, SinkFailedError):
            return error.failure
        reached = self.applied.position is not None
        return failure_of(error, self.spec.name, once=self._once, reached=reached)

    def poll(self) -> bool:
        """Take in what was reported; whether a transaction was completed since the last time."""
        if self._tasks.broken is not None:
            raise self._tasks.broken
        return self._count()

    def _count(self) -> bool:
        """Add what is new in the last report to the totals."""
        with self._changed:
            new, old = self._report, self._counted
            self._counted = new
        fresh, before, total = new.progress, old.progress, self.progress
        for name in ("batches", "rows_in", "rows_out", "dead_letters"):
            grown = getattr(total, name) + getattr(fresh, name) - getattr(before, name)
            setattr(total, name, grown)
        for name in ("in_per_s", "out_per_s", "batch_ms"):
            setattr(total, name, getattr(fresh, name))
        total.batch_id = fresh.batch_id
        applied = self.applied
        applied.put += new.put - old.put
        applied.deleted += new.deleted - old.deleted
        applied.newest_s = max(applied.newest_s, new.newest_s)
        applied.freshness = new.freshness
        if new.position is not None:
            applied.position = new.position
        return fresh.batches > before.batches

    # ---- the end -------------------------------------------------------------------------

    def switch(self) -> None:
        """Of a rebuild that has come to its end: put what was built in the place of the old."""
        self._tell("switch")
        with self._changed:
            self._changed.wait_for(
                lambda: self._report.state in {"switched", "failed"} or self._lost, _SWITCH_S
            )
        failure = self.failure()
        if failure is not None:
            raise SinkFailedError(failure)

    def stop(self, timeout_s: float) -> None:
        """End it after the transaction that runs; it is left alone after the time limit."""
        self._tell("stop")
        with self._changed:
            self._changed.wait_for(lambda: not self.is_active, timeout_s)
        self._count()
        self.close()

    def close(self) -> None:
        """Give connections back."""
        run, self._run = self._run, None
        if run is not None:
            self._tasks.forget(run)

    def _tell(self, do: str) -> None:
        if self._run is not None:
            self._run.tell(do)
