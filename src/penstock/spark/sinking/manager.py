"""Runs sinks: starts, watches, restarts and stops them, pauses and rebuilds them.

They are looked after as flows are (`overseeing`).

**Lag** is measured against the log itself, also for sinks that wait, are paused or have failed:
records that are in the topic and not in the store, and how long ago the newest record in the store
was written, if there are newer ones (after a start, the oldest that is not in it). A sink whose lag
in seconds passes its `max_lag`, one that cannot be started for so long, and one that has failed are
alarming: told once in the log, and shown until it has caught up.

**Freshness** is how old records were when they came into the store: the half and 99% of those of
the last minute.

**Rebuilding.** A second run fills a store beside the old one, from the start of the topic to what
is there when it begins, and then what has come since. Then the first is stopped, the second reads
the rest, the new store takes the place of the old, which so does not go back in time, and the sink
goes on from there.

**Following.** If a flow that writes the topic is rebuilt, the topic has a new version, and the
store is rebuilt from it in the same way, by itself; until then it is fed from the old version. What
cannot be rebuilt, a webhook, stays in the old version, and says so, until somebody decides.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final

from penstock.errors import PenstockError
from penstock.sinks.contract import Position
from penstock.sinks.spec import SinkSpec
from penstock.spark.flows.inputs import Place
from penstock.spark.flows.overseeing import Overseer, Settings, Unit
from penstock.spark.flows.progress import Progress
from penstock.spark.flows.supervisor import Failure, Policy
from penstock.spark.flows.versions import Behind
from penstock.spark.runtime.resident import ResidentTasks
from penstock.spark.runtime.sink_loop import LogAddress, Start
from penstock.spark.runtime.sink_query import Applied, SinkQuery
from penstock.spark.sinking.errors import UnknownSinkError
from penstock.spark.sinking.folder import SinkFolder, SinkRecord
from penstock.spark.sinking.lag import ends_of, lag_of, unread_since
from penstock.spark.sinking.opening import BEGINNING, END, anew_advice

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

# How often what is built beside follows the old store, while that goes on.
MOST_ROUNDS: Final = 2
MEASURE_S: Final = 2.0


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """A sink at a moment; the first fields are those of a flow."""

    name: str
    state: str
    rebuilding: bool
    restarts: int
    error: str
    advice: str
    retry_in_s: float | None
    progress: Progress
    topic: str
    store: str
    position: dict[str, dict[str, int]]
    lag: int | None
    lag_s: float | None
    alarming: bool
    put: int
    deleted: int
    generation: int = 1
    # How old records were when they came into the store, over the last minute.
    fresh_p50_s: float | None = None
    fresh_p99_s: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def in_words(status: SinkStatus) -> str:
    """An alarm, or its end, as it is told; only what is known is said."""
    if not status.alarming:
        return f"sink {status.name} keeps up with {status.topic} again"
    if status.state == "failed":
        return f"sink {status.name} has failed: {status.error}"
    lag = "" if status.lag is None else f" {status.lag} records"
    seconds = "" if status.lag_s is None else f" {status.lag_s:.0f} s"
    told = f"sink {status.name} is{' and'.join(filter(None, (lag, seconds))) or ' far'} behind "
    return f"{told}{status.topic}" + (f": {status.error}" if status.error else "")


def check_anew(sink: str, anew: str) -> None:
    """PenstockError if it is not said where a sink begins that cannot be built beside itself."""
    if anew not in {BEGINNING, END}:
        raise PenstockError(
            f"sink {sink} cannot be built beside itself: what was sent cannot be taken back",
            advice="Say where it begins anew: `--from beginning` sends everything again, "
            "`--from end` only what comes from then on.",
        )


class _Unit(Unit[SinkQuery]):
    """A sink under supervision, or what is built beside it."""

    def __init__(self, spec: SinkSpec, policy: Policy, *, rebuild: bool = False) -> None:
        super().__init__(spec.name, policy, rebuild=rebuild)
        self.spec = spec
        self.applied = Applied()
        self.switching = False
        self.rounds = 0
        self.begun_s = time.monotonic()
        # Since when the store lacks what it lacks, and where it was when that was looked at.
        self.unread: tuple[Position, float | None] | None = None
        self.lag: int | None = None
        self.lag_s: float | None = None
        self.alarming = False
        # The version of the topic that it reads, if a newer one counts.
        self.behind: Behind | None = None


class SinkManager(Overseer[_Unit]):
    """Sinks on one session and one data folder."""

    kind: ClassVar[str] = "sinks"

    def __init__(
        self,
        spark: SparkSession,
        specs: Sequence[SinkSpec],
        folder: SinkFolder,
        settings: Settings,
        resolve: Callable[[str], str] = lambda topic: topic,
        make: Callable[[str], None] = lambda topic: None,
    ) -> None:
        """`resolve` and `make` know the topics that flows beside the sinks write."""
        super().__init__(spark, settings, len(specs))
        self._make = make
        self._specs = specs
        self._folder = folder
        self._place = Place(settings.bootstrap, settings.options, resolve)
        self._tasks = ResidentTasks(spark, specs, LogAddress(settings.bootstrap, settings.options))
        self._measured = float("-inf")
        self._looked = float("-inf")
        self._measuring: Future[None] | None = None
        self.on_change: Callable[[SinkStatus], None] = lambda status: None
        self.on_alarm: Callable[[SinkStatus], None] = lambda status: None

    # ---- what is run ---------------------------------------------------------------------

    def start(self) -> None:
        """Begin with all sinks, but those that are paused."""
        with self._lock:
            for spec in self._specs:
                record = self._folder.sink(spec.name)
                unit = self._live[spec.name] = self._unit(spec)
                if record.paused:
                    unit.life.state = "stopped"
                    self._note(unit)
                    continue
                self._begin(unit)
                if record.rebuilding:
                    self._begin_rebuild(spec)

    def _unit(self, spec: SinkSpec) -> _Unit:
        unit = _Unit(spec, self._settings.policy)
        if self._settings.keeps_counts:
            counts = self._folder.counts(spec.name)
            unit.progress = Progress.restored(counts)
            unit.applied.put, unit.applied.deleted = counts.get("put", 0), counts.get("deleted", 0)
        return unit

    def _write_counts(self, unit: _Unit) -> None:
        if not unit.rebuild:
            applied = {"put": unit.applied.put, "deleted": unit.applied.deleted}
            self._folder.write_counts(unit.spec.name, {**unit.progress.totals(), **applied})

    def step(self) -> bool:
        """One look at everything, and now and then at the lag; whether all is over."""
        self._follow_versions()
        over = super().step()
        self._measure()
        return over

    def close(self) -> None:
        """Let go of the tasks and the threads, once all is over."""
        self._tasks.close()
        super().close()

    def _new_query(self, unit: _Unit) -> SinkQuery:
        def start() -> Start:
            self._make(unit.spec.topic)
            record = self._folder.sink(unit.spec.name)
            return Start(
                self._place.resolve(unit.spec.topic),
                once=self._settings.once,
                rebuild=unit.rebuild,
                known_id=self._known_id(unit),
                known_cluster=record.cluster_id,
                anew="" if unit.rebuild else record.anew,
                fed=() if unit.rebuild else self._folder.fed(unit.spec.name),
            )

        return SinkQuery(
            self._tasks, unit.spec, start, progress=unit.progress, applied=unit.applied
        )

    def _known_id(self, unit: _Unit) -> str:
        """The topic that a store was filled from, for stores that do not tell themselves."""
        known = self._folder.sink(unit.spec.name)
        return known.topic_id if known.topic == unit.spec.topic and not unit.rebuild else ""

    def _launch(self, unit: _Unit, query: SinkQuery) -> None:
        query.start()

    def _started(self, unit: _Unit) -> None:
        if unit.query is not None and not unit.rebuild:
            query = unit.query
            self._remember(unit, topic_id=query.topic_id, cluster_id=query.cluster_id, anew="")
            self._follow_version(unit)

    def _ended(self, unit: _Unit, query: SinkQuery) -> None:
        # What was built beside is still to be put in the place of the old.
        if not unit.rebuild:
            query.close()

    def _not_done(self, unit: _Unit, failure: Failure) -> None:
        if not unit.switching:
            super()._not_done(unit, failure)
            if not unit.rebuild:
                self._follow_version(unit)
            return
        # What was built stays beside; the old store is kept in step as before.
        unit.switching = False
        unit.life.failure, unit.life.state = failure, "failed"
        self._go_on(self._live[unit.spec.name])

    def _go_on(self, live: _Unit) -> None:
        """Feed a sink again that was stopped for a rebuild."""
        if not self._stopping and not self._folder.sink(live.spec.name).paused:
            self._do(live, live.life.restart())
            self._note(live)

    # ---- rebuilding ----------------------------------------------------------------------

    def _begin_rebuild(self, spec: SinkSpec) -> None:
        unit = self._rebuilds[spec.name] = _Unit(spec, self._settings.policy, rebuild=True)
        self._begin(unit)

    def _switch(self, rebuilt: _Unit) -> None:
        """What was built beside has caught up: it takes the place of the old store."""
        name = rebuilt.spec.name
        live = self._live[name]
        assert rebuilt.query is not None
        if self._behind(rebuilt) is not None:
            # What it was built from was itself rebuilt meanwhile.
            if not self._stopping and rebuilt.work is None:
                rebuilt.query.close()
                self._begin_rebuild(rebuilt.spec)
            return
        if live.life.state == "running" and self._follow(rebuilt, live, MOST_ROUNDS):
            return
        if not live.life.is_ended:
            if live.life.state != "stopping":
                self._do(live, live.life.stop())
            return
        if live.work is not None or rebuilt.work is not None:
            return
        if not rebuilt.switching:
            if self._follow(rebuilt, live, MOST_ROUNDS + 1):
                return
            assert rebuilt.query is not None
            rebuilt.switching = True
            self._work(rebuilt, rebuilt.query.switch)
            return
        assert rebuilt.query is not None
        rebuilt.query.close()
        del self._rebuilds[name]
        self._remember(live, rebuilding=False, topic_id=rebuilt.query.topic_id)
        log.info("sink %s was rebuilt", name)
        self._go_on(live)

    def _follow(self, rebuilt: _Unit, live: _Unit, most: int) -> bool:
        """Read once more what has come to the old store since; whether that is to be done."""
        old, new = live.applied.position, rebuilt.applied.position
        assert rebuilt.query is not None
        if live.query is not None and live.query.topic != rebuilt.query.topic:
            # The old store is filled from a version that ends.
            return False
        if old is None or new is None or new.reaches(old) or rebuilt.rounds >= most:
            return False
        rebuilt.rounds = most if most > MOST_ROUNDS else rebuilt.rounds + 1
        rebuilt.query.close()
        self._do(rebuilt, rebuilt.life.restart())
        return True

    # ---- following the versions of topics --------------------------------------------------

    def _behind(self, unit: _Unit) -> Behind | None:
        """Whether the topic has a newer version than the one that is read."""
        query = unit.query
        if query is None or not query.topic:
            return None
        present = self._place.resolve(unit.spec.topic)
        return None if query.topic == present else Behind(unit.spec.topic, query.topic, present)

    def _follow_versions(self) -> None:
        """Look now and then whether flows have rebuilt what sinks read."""
        now = time.monotonic()
        if now - self._looked < MEASURE_S or self._stopping:
            return
        self._looked = now
        with self._lock:
            for unit in self._live.values():
                if unit.work is None and unit.life.state in {"running", "waiting"}:
                    self._follow_version(unit)

    def _follow_version(self, unit: _Unit) -> None:
        unit.behind = self._behind(unit)
        name = unit.spec.name
        if unit.behind is None or self._stopping or name in self._rebuilds:
            return
        with unit.spec.sink() as sink:
            if not sink.rebuildable:
                return
        log.info("sink %s reads %s: it is rebuilt from there", name, unit.behind)
        self._folder.write_sink(replace(self._record(unit), rebuilding=True))
        self._begin_rebuild(unit.spec)

    def _old_topic(self, unit: _Unit) -> Failure | None:
        """That a store is filled from what does not grow any more: it is fed, yet not in step."""
        if unit.behind is None:
            return None
        rebuild = self._rebuilds.get(unit.spec.name)
        with unit.spec.sink() as sink:
            if not sink.rebuildable:
                advice = anew_advice(unit.spec.name, unit.behind.present)
            elif rebuild is not None and rebuild.life.state != "failed":
                advice = "It is being rebuilt from there, and then goes on with it."
            else:
                advice = f"`penstock sinks rebuild {unit.spec.name}` rebuilds it from there."
        return Failure(f"it is still fed from {unit.behind}", advice)

    # ---- lag -----------------------------------------------------------------------------

    def _measure(self) -> None:
        """Ask now and then how far the log is, on a thread."""
        now = time.monotonic()
        busy = self._measuring is not None and not self._measuring.done()
        if now - self._measured < MEASURE_S or busy or self._stopping:
            return
        self._measured = now
        self._measuring = self._pool.submit(self._measure_all)

    def _measure_all(self) -> None:
        self._tasks.look()
        units = self._units()
        known = [unit for unit in units if unit.applied.position is not None]
        try:
            ends = ends_of(self._place, {unit.spec.topic for unit in known})
            for unit in known:
                self._measure_one(unit, ends)
        except PenstockError as error:
            log.debug("the log does not say where it ends: %s", error)
        for unit in units:
            self._watch_lag(unit)

    def _measure_one(self, unit: _Unit, ends: Mapping[tuple[str, int], int]) -> None:
        at = unit.applied.position
        assert at is not None
        topic = self._place.resolve(unit.spec.topic)
        lag, lag_s = lag_of(at, ends, topic, unit.applied.newest_s)
        if lag_s is None:
            if unit.unread is None or unit.unread[0] != at:
                unit.unread = at, unread_since(self._place, topic, at, ends)
            since = unit.unread[1]
            lag_s = None if since is None else max(0.0, time.time() - since)
        unit.lag, unit.lag_s = lag, lag_s
        if not unit.rebuild:
            self._folder.note_fed(unit.spec.name, at)

    def _watch_lag(self, unit: _Unit) -> None:
        most_s = unit.spec.max_lag_s
        behind = unit.lag_s is not None and unit.lag_s > most_s
        lost = unit.applied.position is None and time.monotonic() - unit.begun_s > most_s
        rests = unit.life.state in {"stopped", "finished"}
        alarming = unit.life.state == "failed" or behind or (lost and not rests)
        if unit.behind is not None and unit.spec.name not in self._rebuilds:
            alarming = True
        if alarming == unit.alarming:
            return
        unit.alarming = alarming
        status = self._status(unit)
        # A failure is told when it happens, as a change.
        if alarming and status.state != "failed":
            log.warning("%s", in_words(status))
        self.on_alarm(status)

    # ---- what is kept, questions and commands ----------------------------------------------

    def _remember(self, unit: _Unit, **changed: Any) -> None:
        failure = unit.life.failure
        known = self._folder.sink(unit.spec.name)
        record = replace(
            known,
            topic=unit.spec.topic,
            store=unit.spec.shown,
            bootstrap=self._settings.bootstrap,
            state=unit.life.shown,
            error=failure.message if failure is not None else "",
            advice=failure.advice if failure is not None else "",
            updated_ms=time.time_ns() // 1_000_000,
            **changed,
        )
        try:
            self._folder.write_sink(record)
        except PenstockError as error:
            log.warning("%s", error)

    def _note(self, unit: _Unit) -> None:
        if not unit.rebuild:
            self._remember(unit)
        self.on_change(self._status(unit))

    def status(self) -> list[SinkStatus]:
        """All sinks now, and beside them what is being rebuilt."""
        with self._lock:
            found = []
            for name, unit in self._live.items():
                found.append(self._status(unit))
                if name in self._rebuilds:
                    found.append(self._status(self._rebuilds[name]))
            return found

    def _status(self, unit: _Unit) -> SinkStatus:
        failure = unit.life.failure or self._old_topic(unit)
        at = unit.applied.position
        fresh_p50_s, fresh_p99_s = unit.applied.freshness or (None, None)
        paused = unit.life.state == "stopped" and self._folder.sink(unit.spec.name).paused
        return SinkStatus(
            name=unit.spec.name,
            state="paused" if paused else unit.life.shown,
            rebuilding=unit.rebuild,
            restarts=unit.life.restarts,
            error=failure.message if failure is not None else "",
            advice=failure.advice if failure is not None else "",
            retry_in_s=unit.retry_in_s,
            progress=replace(unit.progress),
            topic=unit.spec.topic,
            store=unit.spec.shown,
            position={} if at is None else at.as_json(),
            lag=unit.lag,
            lag_s=unit.lag_s,
            alarming=unit.alarming,
            put=unit.applied.put,
            deleted=unit.applied.deleted,
            fresh_p50_s=fresh_p50_s,
            fresh_p99_s=fresh_p99_s,
        )

    def answer(self, question: Mapping[str, Any]) -> Any:
        """What `penstock sinks` asks of a process that runs."""
        do, name = str(question.get("do", "")), str(question.get("sink", ""))
        if do == "list":
            return [each.as_dict() for each in self.status()]
        with self._lock:
            unit = self._live.get(name)
            if unit is None:
                raise UnknownSinkError(
                    f"no sink {name!r} runs here", advice="`penstock sinks list` shows which do."
                )
            self._command(do, unit, str(question.get("from", "")))
            self._note(unit)
            self._wake.set()
            return self._status(unit).as_dict()

    def _command(self, do: str, unit: _Unit, anew: str = "") -> None:
        name = unit.spec.name
        if do in {"pause", "remove"}:
            self._folder.write_sink(replace(self._record(unit), paused=True))
            self._do(unit, unit.life.stop())
            if name in self._rebuilds and do == "remove":
                self._do(self._rebuilds[name], self._rebuilds[name].life.stop())
        elif do == "resume":
            self._folder.write_sink(replace(self._record(unit), paused=False))
            if unit.life.is_ended or unit.life.state == "waiting":
                self._do(unit, unit.life.restart())
        elif do == "rebuild":
            under_way = self._rebuilds.get(name)
            if under_way is not None and not under_way.life.is_ended:
                raise PenstockError(f"sink {name!r} is being rebuilt already")
            with unit.spec.sink() as live:
                if not live.rebuildable:
                    self._begin_anew(unit, anew)
                    return
                live.beside(fresh=True).close()
            self._folder.write_sink(replace(self._record(unit), rebuilding=True))
            self._begin_rebuild(unit.spec)
        else:
            raise PenstockError(f"{do!r} is not known")

    def _begin_anew(self, unit: _Unit, anew: str) -> None:
        check_anew(unit.spec.name, anew)
        self._folder.write_sink(replace(self._record(unit), anew=anew, paused=False))
        self._do(unit, unit.life.restart())

    def _record(self, unit: _Unit) -> SinkRecord:
        return self._folder.sink(unit.spec.name)
