"""One loop that looks after many queries: starts, watches, restarts and stops them.

Flows and sinks are run by it alike. The loop looks at all of them a few times a second. What may
take long, starting and stopping a query, happens on threads of its own, one for each. They start a
few at a time, in `turns`, and none waits for another for long. What is to be done is decided by the
`supervisor`; one that fails for good stops alone. Only a Java process that is gone ends all.

What a query is, and what is written down of it, is said by whoever derives from `Overseer`.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Protocol, TypeVar

from penstock.errors import PenstockError
from penstock.spark.flows.progress import Progress
from penstock.spark.flows.supervisor import Do, Failure, Policy, Supervised
from penstock.spark.flows.trouble import is_java_gone
from penstock.spark.flows.turns import Turn, Turns, turns_on

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

STEP_S: Final = 0.2
STOP_TIMEOUT_S: Final = 60.0
# How often it is written down how much was done.
COUNTS_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How queries are run."""

    bootstrap: str
    # For the log, as the source takes them: `kafka.` and the client's own name.
    options: Mapping[str, str] = field(default_factory=dict)
    # Stop when all that is there at the start has been read.
    once: bool = False
    policy: Policy = field(default_factory=Policy)
    stop_timeout_s: float = STOP_TIMEOUT_S
    file: str = ""
    # Whether one whose records are mostly dead letters stops, and whether it goes on counting from
    # where it was; not in a test, which feeds what it likes.
    stops_at_dead_letters: bool = True
    keeps_counts: bool = True
    # Shared with others that start queries on the same session.
    turns: Turns | None = None


class Query(Protocol):
    """One run of something, from its start to its end."""

    @property
    def is_active(self) -> bool: ...

    @property
    def is_waiting(self) -> bool: ...

    def poll(self) -> bool:
        """Take in what Spark reports; whether a micro-batch was completed since the last time."""

    def failure(self) -> Failure | None:
        """Why it has ended; None if it came to its end, or was stopped."""

    def explain(self, error: BaseException) -> Failure: ...

    def stop(self, timeout_s: float) -> None: ...

    def close(self) -> None: ...


Q = TypeVar("Q", bound=Query)


class Unit(Generic[Q]):
    """What is run, or built anew beside what runs, under supervision."""

    def __init__(self, name: str, policy: Policy, *, rebuild: bool = False) -> None:
        self.name = name
        self.rebuild = rebuild
        self.life = Supervised(policy, random.random)
        self.progress = Progress()
        self.query: Q | None = None
        # What a thread is doing for it: starting or stopping.
        self.work: Future[None] | None = None
        self.stop_wanted = False
        # When a stop was first seen to wait for the start to end.
        self.stopping_s: float | None = None
        self.turn: Turn | None = None
        # How many micro-batches there had been when it was last started.
        self.batches = 0
        # When it was last written down how much was done.
        self.counted_s = float("-inf")

    @property
    def has_begun(self) -> bool:
        """Whether it has done what there was to do since it was started, or does not run."""
        if self.progress.batches > self.batches or self.life.state != "running":
            return True
        return self.query is None or self.query.is_waiting

    @property
    def retry_in_s(self) -> float | None:
        """Seconds until it is tried again; None if that is not what it waits for."""
        waits = self.life.state == "waiting" and not self.life.is_looking
        return max(0.0, self.life.due - time.monotonic()) if waits else None


U = TypeVar("U", bound=Unit[Any])


class Overseer(ABC, Generic[U]):
    """Looks after queries of one kind, on one session."""

    # What they are called, in the plural.
    kind: ClassVar[str]

    def __init__(self, spark: SparkSession, settings: Settings, count: int) -> None:
        self._spark = spark
        self._settings = settings
        self._lock = threading.RLock()
        self._live: dict[str, U] = {}
        self._rebuilds: dict[str, U] = {}
        self._stopping = False
        self._wake = threading.Event()
        self._pool = ThreadPoolExecutor(2 * count + 2, thread_name_prefix=self.kind)
        self.turns = settings.turns or Turns(turns_on(spark))
        # Java, or in a run with an end the broker, does not answer: nothing can go on.
        self.broken: Failure | None = None

    # ---- what is run ---------------------------------------------------------------------

    @abstractmethod
    def _new_query(self, unit: U) -> Any:
        """A run of it, not begun yet."""

    @abstractmethod
    def _launch(self, unit: U, query: Any) -> None:
        """Start it; on a thread of its own, when it is its turn."""

    @abstractmethod
    def _remember(self, unit: U) -> None:
        """Write down how it is."""

    @abstractmethod
    def _note(self, unit: U) -> None:
        """Write down a change of state, and tell of it."""

    @abstractmethod
    def _switch(self, rebuilt: U) -> None:
        """What was built beside is done: let it take the place of the old, once that can be."""

    def _write_counts(self, unit: U) -> None:
        """Remember how much was done."""

    def _started(self, unit: U) -> None:
        """Spark has taken the query."""

    def _break_off_start(self, unit: U) -> None:
        """A start has not ended, and a stop has waited for it long enough; called repeatedly."""

    def _ended(self, unit: U, query: Any) -> None:
        """A query came to its end."""
        query.close()

    def _not_done(self, unit: U, failure: Failure) -> None:
        """What a thread did for it has failed."""
        self._do(unit, unit.life.failed(failure, time.monotonic()))

    # ---- the loop ------------------------------------------------------------------------

    def run(self) -> None:
        """Look after all until they have ended, or `stop` has ended them."""
        while not self.step():
            self._wake.wait(STEP_S)
            self._wake.clear()

    def step(self) -> bool:
        """One look at everything; whether all is over."""
        for unit in self._units():
            with self._lock:
                self._look_at(unit)
        with self._lock:
            return self._is_over()

    def _units(self) -> list[U]:
        with self._lock:
            return [*self._live.values(), *self._rebuilds.values()]

    def _is_over(self) -> bool:
        if self.broken is not None:
            return True
        units = self._units()
        if any(unit.work is not None or not unit.life.is_ended for unit in units):
            return False
        if self._stopping or self._settings.once:
            return True
        # What failed or was stopped can still be restarted, unless all failed.
        return all(unit.life.state == "failed" for unit in units)

    def stop(self) -> None:
        """End all, each after its micro-batch."""
        with self._lock:
            self._stopping = True
            for unit in self._units():
                before = unit.life.shown
                self._do(unit, unit.life.stop())
                if unit.life.shown != before:
                    self._note(unit)
        self._wake.set()

    def close(self) -> None:
        """Let go of the threads, once all is over."""
        self.turns.close()
        self._pool.shutdown(wait=self.broken is None, cancel_futures=True)

    @property
    def failed(self) -> list[str]:
        """Those that have failed for good."""
        return sorted({unit.name for unit in self._units() if unit.life.state == "failed"})

    def _look_at(self, unit: U) -> None:
        before = unit.life.shown
        if unit.work is not None:
            if not unit.work.done():
                self._watch_start(unit)
                return
            self._finish_work(unit)
        if unit.work is None and unit.query is not None and unit.life.state in (
            "running", "stopping"
        ):  # fmt: skip
            self._watch(unit, unit.query)
        self._do(unit, unit.life.tick(time.monotonic()))
        if (
            unit.work is None
            and unit.turn is not None
            and unit.turn.is_over(lambda: unit.has_begun)
        ):
            unit.turn = None
        # That Java is gone is told once for all.
        if unit.life.shown != before and self.broken is None:
            self._note(unit)
        if unit.rebuild and unit.life.state == "finished":
            self._switch(unit)

    def _watch_start(self, unit: U) -> None:
        """A stop waits no longer for a start than for a micro-batch."""
        if unit.life.state != "stopping" or unit.stop_wanted:
            return
        now = time.monotonic()
        if unit.stopping_s is None:
            unit.stopping_s = now
        elif now - unit.stopping_s >= self._settings.stop_timeout_s:
            self._break_off_start(unit)

    def _finish_work(self, unit: U) -> None:
        work, unit.work = unit.work, None
        assert work is not None
        error = work.exception()
        if error is None:
            if unit.life.state in {"starting", "stopping"} and not unit.stop_wanted:
                self._do(unit, unit.life.started())
                self._started(unit)
            return
        if is_java_gone(error) and not self._java_answers():
            self._break(error)
        assert unit.query is not None
        failure = unit.query.explain(error)
        unit.query.close()
        self._not_done(unit, failure)

    def _watch(self, unit: U, query: Query) -> None:
        try:
            if query.poll():
                unit.life.progressed()
                self._count(unit, every_s=COUNTS_S)
            if query.is_active:
                return
            # What was done between the last look and the end.
            query.poll()
            self._count(unit)
            failure = query.failure()
        except Exception as error:
            if not is_java_gone(error):
                raise
            self._break(error)
            return
        if failure is None:
            self._ended(unit, query)
            self._do(unit, unit.life.ended())
        else:
            query.close()
            self._do(unit, unit.life.failed(failure, time.monotonic()))

    def _count(self, unit: U, every_s: float = 0.0) -> None:
        now = time.monotonic()
        if not self._settings.keeps_counts or now - unit.counted_s < every_s:
            return
        unit.counted_s = now
        try:
            self._write_counts(unit)
        except PenstockError as error:
            log.debug("%s: %s", unit.name, error)

    def _java_answers(self) -> bool:
        """A user's own function, or a store, may fail with the same errors, at another server."""
        try:
            jvm: Any = self._spark.sparkContext._jvm
            jvm.java.lang.System.nanoTime()
        except Exception:
            return False
        return True

    def _break(self, error: BaseException) -> None:
        self.give_up(
            Failure(
                f"Spark's Java process has ended: {error}",
                "Look above for its last words: memory (spark.driver.memory) is the usual cause. "
                f"Start again; {self.kind} go on where they were.",
            )
        )

    def give_up(self, why: Failure) -> None:
        """End at once, without waiting for what is under way: nothing can go on."""
        self.broken = why
        for unit in self._live.values():
            if not unit.life.is_ended:
                # Nobody is left to note it later.
                unit.life.state, unit.life.failure = "failed", self.broken
                self._remember(unit)

    # ---- what is to be done --------------------------------------------------------------

    def _do(self, unit: U, what: Do) -> None:
        if what is Do.START:
            self._begin(unit)
        elif what is Do.STOP and unit.query is not None:
            unit.stop_wanted = True
            self._work(unit, unit.query.stop, self._settings.stop_timeout_s)

    def _begin(self, unit: U) -> None:
        unit.stop_wanted, unit.stopping_s = False, None
        query = unit.query = self._new_query(unit)
        if unit.turn is not None:
            # Of a start that came to nothing.
            unit.turn.end()
        unit.turn, unit.batches = self.turns.asked(), unit.progress.batches
        self._work(unit, self._in_turn, unit, query)

    def _in_turn(self, unit: U, query: Any) -> None:
        assert unit.turn is not None
        unit.turn.wait(lambda: unit.life.state == "starting")
        self._launch(unit, query)

    def _work(self, unit: U, task: Any, *args: Any) -> None:
        """Let a thread do something for it; the loop looks when it is done."""
        unit.work = self._pool.submit(task, *args)
        unit.work.add_done_callback(lambda _: self._wake.set())
