"""Runs flows: starts, watches, restarts and stops them, and rebuilds their outputs.

One loop looks after all of them, a few times a second. What may take long, starting and stopping a
query, happens on threads of its own, one for each flow, so that none waits for another. What is to
be done is decided by the `supervisor`, what went wrong is explained by `trouble`.

**Rebuilding.** `reset` begins the next generation of a flow: a checkpoint and output topics of its
own, filled by replay from the start of the log, while the present generation goes on. Once the new
one has caught up, the old query is stopped, `flow.json` is pointed at the new generation, and it
goes on from there. The old topics stay, for whoever still reads them, until somebody deletes them.
Flows that read them are stopped and say so: their input will not grow any more.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Literal

from penstock.errors import PenstockError
from penstock.spark.flows.declare import Collected, Flow, Topic, physical
from penstock.spark.flows.errors import CheckpointFullError, IncompatibleError, UnknownFlowError
from penstock.spark.flows.folder import Folder, Record
from penstock.spark.flows.inputs import Place
from penstock.spark.flows.outputs import make_topics
from penstock.spark.flows.progress import Progress
from penstock.spark.flows.running import Running
from penstock.spark.flows.supervisor import Do, Failure, Policy, Supervised
from penstock.spark.flows.trouble import RESET_ADVICE, is_java_gone

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

STEP_S: Final = 0.2
STOP_TIMEOUT_S: Final = 60.0

Kind = Literal["live", "rebuild"]


@dataclass(frozen=True, slots=True)
class Settings:
    """How flows are run."""

    bootstrap: str
    # For the log, as the source takes them: `kafka.` and the client's own name.
    options: Mapping[str, str] = field(default_factory=dict)
    # Stop when all that is there at the start has been read.
    once: bool = False
    policy: Policy = field(default_factory=Policy)
    stop_timeout_s: float = STOP_TIMEOUT_S
    file: str = ""


@dataclass(frozen=True, slots=True)
class Status:
    """A flow at a moment."""

    name: str
    state: str
    generation: int
    rebuilding: bool
    restarts: int
    error: str
    advice: str
    # Seconds until it is tried again.
    retry_in_s: float | None
    progress: Progress

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Unit:
    """One generation of a flow, under supervision."""

    def __init__(self, flow: Flow, generation: int, kind: Kind, policy: Policy) -> None:
        self.flow = flow
        self.generation = generation
        self.kind = kind
        self.life = Supervised(policy, random.random)
        self.progress = Progress()
        self.running: Running | None = None
        # What a thread is doing for it: starting or stopping.
        self.work: Future[None] | None = None
        self.stop_wanted = False
        # What was last said about its waiting, so that it is said once.
        self.told = ""


class Manager:
    """Flows of one file, on one session and one data folder."""

    def __init__(
        self,
        spark: SparkSession,
        flows: Collected,
        folder: Folder,
        settings: Settings,
        *,
        known: Collected | None = None,
    ) -> None:
        """Run `flows`; `known` are those whose outputs they may read, if there are more."""
        self._spark = spark
        self._flows = flows
        self._known = known or flows
        self._folder = folder
        self._settings = settings
        self._lock = threading.RLock()
        self._live: dict[str, _Unit] = {}
        self._rebuilds: dict[str, _Unit] = {}
        self._cascade: set[str] = set()
        self._stopping = False
        self._wake = threading.Event()
        self._pool = ThreadPoolExecutor(2 * len(flows) + 2, thread_name_prefix="flow")
        # Java itself does not answer: nothing can go on.
        self.broken: Failure | None = None
        self.on_change: Callable[[Status], None] = lambda status: None

    # ---- the loop ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin with all flows."""
        with self._lock:
            for flow in self._flows:
                record = self._record(flow)
                unit = _Unit(flow, record.generation, "live", self._settings.policy)
                self._live[flow.name] = unit
                self._begin(unit)
                if record.rebuilding:
                    self._begin_rebuild(flow, record.rebuilding)

    def run(self) -> None:
        """Look after the flows until all have ended, or `stop` has ended them."""
        while not self.step():
            self._wake.wait(STEP_S)
            self._wake.clear()

    def step(self) -> bool:
        """One look at everything; whether all is over."""
        with self._lock:
            units = [*self._live.values(), *self._rebuilds.values()]
        for unit in units:
            with self._lock:
                self._look_at(unit)
        with self._lock:
            if self.broken is not None and not self._stopping:
                self._stopping = True
                for unit in units:
                    unit.life.stop()
            return self._is_over()

    def _is_over(self) -> bool:
        units = [*self._live.values(), *self._rebuilds.values()]
        if self.broken is not None:
            return True
        if any(unit.work is not None or not unit.life.is_ended for unit in units):
            return False
        if self._stopping or self._settings.once:
            return True
        # Flows that failed or were stopped can still be restarted or reset, unless all failed.
        return all(unit.life.state == "failed" for unit in units)

    def stop(self) -> None:
        """End all flows, each after its micro-batch."""
        with self._lock:
            self._stopping = True
            for unit in (*self._live.values(), *self._rebuilds.values()):
                before = unit.life.shown
                self._do(unit, unit.life.stop())
                if unit.life.shown != before:
                    self._note(unit)
        self._wake.set()

    def close(self) -> None:
        """Let go of the threads, once all is over."""
        self._pool.shutdown(wait=self.broken is None, cancel_futures=True)

    @property
    def failed(self) -> list[str]:
        """The flows that have failed for good."""
        with self._lock:
            units = (*self._live.values(), *self._rebuilds.values())
            return sorted({unit.flow.name for unit in units if unit.life.state == "failed"})

    def _look_at(self, unit: _Unit) -> None:
        before = unit.life.shown
        if unit.work is not None:
            if not unit.work.done():
                return
            self._finish_work(unit)
        if unit.work is None and unit.running is not None and unit.life.state in (
            "running", "stopping"
        ):  # fmt: skip
            self._watch(unit, unit.running)
        self._do(unit, unit.life.tick(time.monotonic()))
        if unit.life.shown != before:
            self._note(unit)
        if unit.kind == "rebuild" and unit.life.state == "finished":
            self._switch(unit)

    def _finish_work(self, unit: _Unit) -> None:
        work, unit.work = unit.work, None
        assert work is not None
        error = work.exception()
        if error is None:
            if unit.life.state in {"starting", "stopping"} and not unit.stop_wanted:
                self._do(unit, unit.life.started())
            return
        if is_java_gone(error) and not self._java_answers():
            self._break(error)
        running = unit.running
        failure = (
            running.explain(error)
            if running is not None
            else Failure(str(error), getattr(error, "advice", ""))
        )
        self._do(unit, unit.life.failed(failure, time.monotonic()))

    def _watch(self, unit: _Unit, running: Running) -> None:
        try:
            if running.poll():
                unit.life.progressed()
            if running.is_active:
                return
            # What was done between the last look and the end.
            running.poll()
            failure = running.failure()
        except Exception as error:
            if not is_java_gone(error):
                raise
            self._break(error)
            return
        running.close()
        if failure is None:
            self._do(unit, unit.life.ended())
        else:
            self._do(unit, unit.life.failed(failure, time.monotonic()))

    def _java_answers(self) -> bool:
        """A flow's own function may fail with the same errors, at a server of its own."""
        try:
            jvm: Any = self._spark.sparkContext._jvm
            jvm.java.lang.System.nanoTime()
        except Exception:
            return False
        return True

    def _break(self, error: BaseException) -> None:
        self.broken = Failure(
            f"Spark's Java process has ended: {error}",
            "Look above for its last words: memory (spark.driver.memory) is the usual cause. "
            "Start again; flows go on where they were.",
        )

    # ---- what is to be done --------------------------------------------------------------

    def _do(self, unit: _Unit, what: Do) -> None:
        if what is Do.START:
            self._begin(unit)
        elif what is Do.STOP and unit.running is not None:
            running, timeout_s = unit.running, self._settings.stop_timeout_s
            unit.stop_wanted = True
            unit.work = self._pool.submit(running.stop, timeout_s)

    def _begin(self, unit: _Unit) -> None:
        unit.stop_wanted = False
        running = Running(
            self._spark,
            unit.flow,
            Place(self._settings.bootstrap, self._settings.options, self.resolve),
            self._folder.checkpoint(unit.flow.name, unit.generation),
            generation=unit.generation,
            once=self._settings.once or unit.kind == "rebuild",
        )
        running.progress = unit.progress
        unit.running = running
        unit.work = self._pool.submit(self._launch, unit, running)

    def _launch(self, unit: _Unit, running: Running) -> None:
        """Plan and start a query; on a thread of its own."""
        # Flows share the machine fairly; one with much to do does not hold up the others.
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", unit.flow.name)
        self._make_inputs(unit.flow, running.place)
        plan = running.plan()
        with self._lock:
            record = self._record(unit.flow)
            known = record.fingerprint(unit.generation)
            changed = known.differences(plan.fingerprint) if known is not None else []
            if changed:
                raise IncompatibleError(
                    f"flow {unit.flow.name!r} has changed so that it cannot go on from where it "
                    f"was: {'; '.join(changed)}",
                    advice=RESET_ADVICE.format(name=unit.flow.name),
                )
            if known is None:
                self._folder.write(record.remembering(unit.generation, plan.fingerprint))
        running.start(plan)

    def _make_inputs(self, flow: Flow, place: Place) -> None:
        """What another flow here writes may be read before that one has begun."""
        for topic in {each.topic for each in flow.inputs}:
            self._make(topic, place, reader=flow.name)

    def _make(self, topic: str, place: Place, *, reader: str = "") -> None:
        for writer in self._known:
            if writer.name != reader and any(each.name == topic for each in writer.topics):
                record = self._folder.find(writer.name)
                make_topics(place, writer, record.generation if record is not None else 1)

    def make(self, topic: str) -> None:
        """Make a topic, and what else its flow writes, if a flow here writes it."""
        self._make(topic, Place(self._settings.bootstrap, self._settings.options, self.resolve))

    def resolve(self, topic: str) -> str:
        """The topic that stands for a name: of an output that was rebuilt, the latest one."""
        with self._lock:
            for flow in self._known:
                if any(each.name == topic for each in flow.topics):
                    record = self._folder.find(flow.name)
                    return physical(topic, record.generation) if record is not None else topic
        return topic

    # ---- what is kept --------------------------------------------------------------------

    def _record(self, flow: Flow) -> Record:
        found = self._folder.find(flow.name) or Record(flow.name)
        return replace(
            found,
            file=self._settings.file,
            where=flow.where,
            bootstrap=self._settings.bootstrap,
            inputs=tuple(_describe(each) for each in flow.inputs),
            outputs=tuple(
                f"topic {physical(each.name, found.generation)}"
                if isinstance(each, Topic)
                else each.target
                for each in flow.outputs.values()
            ),
        )

    def _note(self, unit: _Unit) -> None:
        """Write down a change of state, and tell of it."""
        if unit.kind == "live":
            failure = unit.life.failure
            record = replace(
                self._record(unit.flow),
                state=unit.life.shown,
                error=failure.message if failure is not None else "",
                advice=failure.advice if failure is not None else "",
                updated_ms=time.time_ns() // 1_000_000,
            )
            try:
                self._folder.write(record)
            except PenstockError as error:
                log.warning("%s", error)
        self.on_change(self._status(unit))

    # ---- questions and commands ----------------------------------------------------------

    def status(self) -> list[Status]:
        """All flows now, and beside them what is being rebuilt."""
        with self._lock:
            found = []
            for name, unit in self._live.items():
                found.append(self._status(unit))
                if name in self._rebuilds:
                    found.append(self._status(self._rebuilds[name]))
            return found

    def _status(self, unit: _Unit) -> Status:
        failure = unit.life.failure
        waits = unit.life.state == "waiting" and not unit.life.is_looking
        return Status(
            name=unit.flow.name,
            state=unit.life.shown,
            generation=unit.generation,
            rebuilding=unit.kind == "rebuild",
            restarts=unit.life.restarts,
            error=failure.message if failure is not None else "",
            advice=failure.advice if failure is not None else "",
            retry_in_s=max(0.0, unit.life.due - time.monotonic()) if waits else None,
            progress=replace(unit.progress),
        )

    def answer(self, question: Mapping[str, Any]) -> Any:
        """What `penstock flows` asks of a process that runs."""
        do, name = str(question.get("do", "")), str(question.get("flow", ""))
        if do == "list":
            return [each.as_dict() for each in self.status()]
        with self._lock:
            unit = self._live.get(name)
            if unit is None:
                raise UnknownFlowError(
                    f"no flow {name!r} runs here", advice="`penstock flows list` shows which do."
                )
            if do == "stop":
                self._do(unit, unit.life.stop())
            elif do == "restart":
                self._do(unit, unit.life.restart())
            elif do == "reset":
                if question.get("dependents"):
                    self._cascade.add(name)
                return self._reset(unit)
            else:
                raise PenstockError(f"{do!r} is not known")
            self._note(unit)
            self._wake.set()
            return self._status(unit).as_dict()

    def reset(self, name: str) -> None:
        """Begin to rebuild the outputs of a flow."""
        self.answer({"do": "reset", "flow": name})

    def _reset(self, unit: _Unit) -> dict[str, Any]:
        flow = unit.flow
        under_way = self._rebuilds.get(flow.name)
        if under_way is not None and not under_way.life.is_ended:
            raise PenstockError(
                f"flow {flow.name!r} is being rebuilt already, as generation "
                f"{under_way.generation}",
                advice="`penstock flows describe` shows how far it is.",
            )
        record = self._record(flow)
        generation = record.next_generation()
        self._folder.write(replace(record, rebuilding=generation))
        self._begin_rebuild(flow, generation)
        self._wake.set()
        return self._status(self._rebuilds[flow.name]).as_dict()

    def _begin_rebuild(self, flow: Flow, generation: int) -> None:
        unit = _Unit(flow, generation, "rebuild", self._settings.policy)
        self._rebuilds[flow.name] = unit
        self._begin(unit)

    def _switch(self, rebuilt: _Unit) -> None:
        """The new generation has caught up: once the old query has ended, it takes its place."""
        live = self._live[rebuilt.flow.name]
        if not live.life.is_ended:
            if live.life.state != "stopping":
                self._do(live, live.life.stop())
            return
        if live.work is not None:
            return
        name, old = rebuilt.flow.name, live.generation
        record = replace(self._record(rebuilt.flow), generation=rebuilt.generation, rebuilding=0)
        try:
            self._folder.write(record)
        except CheckpointFullError as error:
            # Until there is space again the old generation counts; each look tries once more.
            if rebuilt.told != str(error):
                rebuilt.told = str(error)
                log.warning("flow %s waits to be switched: %s. %s", name, error, error.advice)
            return
        self._folder.forget_checkpoint(name, old)
        del self._rebuilds[name]
        unit = _Unit(rebuilt.flow, rebuilt.generation, "live", self._settings.policy)
        unit.progress = rebuilt.progress
        self._live[name] = unit
        log.info("flow %s goes on as generation %d", name, rebuilt.generation)
        if self._stopping or self._settings.once:
            unit.life.started()
            unit.life.ended()
        else:
            self._begin(unit)
        self._note(unit)
        self._tell_readers(rebuilt.flow, with_them=name in self._cascade)
        self._cascade.discard(name)

    def _tell_readers(self, rebuilt: Flow, *, with_them: bool) -> None:
        """Flows that read what was rebuilt read the old one, which does not grow any more."""
        written = {each.name for each in rebuilt.topics}
        for unit in list(self._live.values()):
            if unit.flow is rebuilt or not written & {each.topic for each in unit.flow.inputs}:
                continue
            if written & {each.topic for each in unit.flow.streams}:
                if with_them:
                    self._cascade.add(unit.flow.name)
                    self._reset(unit)
                else:
                    # Its fingerprint does not fit any more: it is refused, and says why.
                    self._do(unit, unit.life.restart())
            else:
                self._do(unit, unit.life.restart())
            self._note(unit)


def _describe(declared: Any) -> str:
    kind = type(declared).__name__.lower()
    return f"{kind} {declared.topic} ({declared.reading.describe()})"
