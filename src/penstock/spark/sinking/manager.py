"""Runs sinks: starts, watches, restarts and stops them, pauses and rebuilds them.

As with flows one loop looks after all, a few times a second, and what may take long happens on
threads: no sink waits for another, and one that fails for good stops alone.

**Lag** is measured against the log itself, also for sinks that wait, are paused or have failed:
records that are in the topic and not in the store, and how long ago the newest record in the store
was written, if there are newer ones (after a start, the oldest that is not in it). A sink whose lag
in seconds passes its `max_lag`, one that cannot be started for so long, and one that has failed are
alarming: told once in the log, and shown until it has caught up.

**Rebuilding.** A second query fills a store beside the old one, from the start of the topic to what
is there when it begins, and then what has come since. Then the first is stopped, the second reads
the rest, the new store takes the place of the old, which so does not go back in time, and the sink
goes on from there.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from penstock.client.metadata import LATEST, Metadata, offsets
from penstock.client.reading import read_batches
from penstock.errors import PenstockError
from penstock.sinks.contract import Position
from penstock.sinks.spec import SinkSpec
from penstock.spark.flows.inputs import Place
from penstock.spark.flows.manager import Settings
from penstock.spark.flows.progress import Progress
from penstock.spark.flows.supervisor import Do, Failure, Policy, Supervised
from penstock.spark.flows.trouble import is_java_gone
from penstock.spark.sinking.errors import UnknownSinkError
from penstock.spark.sinking.feeding import Applied, Feeding
from penstock.spark.sinking.folder import SinkFolder, SinkRecord

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

STEP_S: Final = 0.2
# How often what is built beside follows the old store, while that goes on.
MOST_ROUNDS: Final = 2
MEASURE_S: Final = 2.0
UNREAD_TIMEOUT_S: Final = 10.0


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


class _Unit:
    """A sink under supervision, or what is built beside it."""

    def __init__(self, spec: SinkSpec, policy: Policy, *, rebuild: bool = False) -> None:
        self.spec = spec
        self.rebuild = rebuild
        self.life = Supervised(policy, random.random)
        self.progress = Progress()
        self.applied = Applied()
        self.feeding: Feeding | None = None
        self.work: Future[None] | None = None
        self.stop_wanted = False
        self.switching = False
        self.rounds = 0
        self.begun_s = time.monotonic()
        # Since when the store lacks what it lacks, and where it was when that was looked at.
        self.unread: tuple[Position, float | None] | None = None
        self.lag: int | None = None
        self.lag_s: float | None = None
        self.alarming = False


class SinkManager:
    """Sinks on one session and one data folder."""

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
        self._make = make
        self._spark = spark
        self._specs = specs
        self._folder = folder
        self._settings = settings
        self._place = Place(settings.bootstrap, settings.options, resolve)
        self._lock = threading.RLock()
        self._live: dict[str, _Unit] = {}
        self._rebuilds: dict[str, _Unit] = {}
        self._stopping = False
        self._wake = threading.Event()
        self._pool = ThreadPoolExecutor(2 * len(specs) + 2, thread_name_prefix="sink")
        self._measured = float("-inf")
        self._measuring: Future[None] | None = None
        self.broken: Failure | None = None
        self.on_change: Callable[[SinkStatus], None] = lambda status: None
        self.on_alarm: Callable[[SinkStatus], None] = lambda status: None

    # ---- the loop ------------------------------------------------------------------------

    def start(self) -> None:
        """Begin with all sinks, but those that are paused."""
        with self._lock:
            for spec in self._specs:
                record = self._folder.sink(spec.name)
                unit = self._live[spec.name] = _Unit(spec, self._settings.policy)
                if record.paused:
                    unit.life.state = "stopped"
                    self._note(unit)
                    continue
                self._begin(unit)
                if record.rebuilding:
                    self._begin_rebuild(spec)

    def run(self) -> None:
        """Look after the sinks until all have ended, or `stop` has ended them."""
        while not self.step():
            self._wake.wait(STEP_S)
            self._wake.clear()

    def step(self) -> bool:
        """One look at everything; whether all is over."""
        for unit in self._units():
            with self._lock:
                self._look_at(unit)
        self._measure()
        with self._lock:
            if self.broken is not None:
                return True
            units = self._units()
            if any(unit.work is not None or not unit.life.is_ended for unit in units):
                return False
            if self._stopping or self._settings.once:
                return True
            return all(unit.life.state == "failed" for unit in units)

    def _units(self) -> list[_Unit]:
        with self._lock:
            return [*self._live.values(), *self._rebuilds.values()]

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
        self._pool.shutdown(wait=self.broken is None, cancel_futures=True)

    @property
    def failed(self) -> list[str]:
        """The sinks that have failed for good."""
        return sorted({u.spec.name for u in self._units() if u.life.state == "failed"})

    def _look_at(self, unit: _Unit) -> None:
        state, before = unit.life.state, unit.life.shown
        if unit.work is not None:
            if not unit.work.done():
                return
            self._finish_work(unit)
        feeding = unit.feeding
        if unit.work is None and feeding is not None and state in ("running", "stopping"):
            self._watch(unit, feeding)
        self._do(unit, unit.life.tick(time.monotonic()))
        if unit.life.shown != before:
            self._note(unit)
        if unit.rebuild and unit.life.state == "finished":
            self._switch(unit)

    def _finish_work(self, unit: _Unit) -> None:
        work, unit.work = unit.work, None
        error = work.exception() if work is not None else None
        if error is None:
            if unit.life.state in {"starting", "stopping"} and not unit.stop_wanted:
                self._do(unit, unit.life.started())
                if unit.feeding is not None and not unit.rebuild:
                    self._remember(unit, topic_id=unit.feeding.topic_id)
            return
        if is_java_gone(error):
            self._break(error)
        failure = unit.feeding.explain(error) if unit.feeding is not None else Failure(str(error))
        if unit.feeding is not None:
            unit.feeding.close()
        if unit.switching:
            # What was built stays beside; the old store is kept in step as before.
            unit.switching = False
            unit.life.failure, unit.life.state = failure, "failed"
            self._go_on(self._live[unit.spec.name])
            return
        self._do(unit, unit.life.failed(failure, time.monotonic()))

    def _go_on(self, live: _Unit) -> None:
        """Feed a sink again that was stopped for a rebuild."""
        if not self._stopping and not self._folder.sink(live.spec.name).paused:
            self._do(live, live.life.restart())
            self._note(live)

    def _watch(self, unit: _Unit, feeding: Feeding) -> None:
        try:
            if feeding.poll():
                unit.life.progressed()
            if feeding.is_active:
                return
            feeding.poll()
            failure = feeding.failure()
        except Exception as error:
            if not is_java_gone(error):
                raise
            self._break(error)
            return
        if failure is not None:
            feeding.close()
            self._do(unit, unit.life.failed(failure, time.monotonic()))
            return
        if not unit.rebuild:
            feeding.close()
        self._do(unit, unit.life.ended())

    def _break(self, error: BaseException) -> None:
        self.broken = Failure(
            f"Spark's Java process has ended: {error}",
            "Look above for its last words: memory (spark.driver.memory) is the usual cause. "
            "Start again; sinks go on where they were.",
        )

    # ---- what is to be done --------------------------------------------------------------

    def _do(self, unit: _Unit, what: Do) -> None:
        if what is Do.START:
            self._begin(unit)
        elif what is Do.STOP and unit.feeding is not None:
            unit.stop_wanted = True
            unit.work = self._pool.submit(unit.feeding.stop, self._settings.stop_timeout_s)

    def _begin(self, unit: _Unit) -> None:
        unit.stop_wanted = False
        feeding = Feeding(
            self._spark,
            unit.spec,
            self._place,
            self._folder.place(unit.spec.name, rebuild=unit.rebuild),
            once=self._settings.once,
            rebuild=unit.rebuild,
            known_id=self._known_id(unit),
            make=self._make,
        )
        feeding.progress, feeding.applied = unit.progress, unit.applied
        unit.feeding = feeding
        unit.work = self._pool.submit(self._launch, unit, feeding)

    def _known_id(self, unit: _Unit) -> str:
        """The topic that a store was filled from, if that was on the same cluster."""
        known = self._folder.sink(unit.spec.name)
        is_same = known.bootstrap == self._settings.bootstrap and known.topic == unit.spec.topic
        return known.topic_id if is_same and not unit.rebuild else ""

    def _launch(self, unit: _Unit, feeding: Feeding) -> None:
        # Sinks and flows share the machine fairly.
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", f"sink {unit.spec.name}")
        feeding.start()

    # ---- rebuilding ----------------------------------------------------------------------

    def _begin_rebuild(self, spec: SinkSpec) -> None:
        unit = self._rebuilds[spec.name] = _Unit(spec, self._settings.policy, rebuild=True)
        self._begin(unit)

    def _switch(self, rebuilt: _Unit) -> None:
        """What was built beside has caught up: it takes the place of the old store."""
        name = rebuilt.spec.name
        live = self._live[name]
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
            assert rebuilt.feeding is not None
            rebuilt.switching = True
            rebuilt.work = self._pool.submit(rebuilt.feeding.switch)
            return
        assert rebuilt.feeding is not None
        rebuilt.feeding.close()
        del self._rebuilds[name]
        self._remember(live, rebuilding=False, topic_id=rebuilt.feeding.topic_id)
        log.info("sink %s was rebuilt", name)
        self._go_on(live)

    def _follow(self, rebuilt: _Unit, live: _Unit, most: int) -> bool:
        """Read once more what has come to the old store since; whether that is to be done."""
        old, new = live.applied.position, rebuilt.applied.position
        if old is None or new is None or new.reaches(old) or rebuilt.rounds >= most:
            return False
        rebuilt.rounds = most if most > MOST_ROUNDS else rebuilt.rounds + 1
        assert rebuilt.feeding is not None
        rebuilt.feeding.close()
        self._do(rebuilt, rebuilt.life.restart())
        return True

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

    def _watch_lag(self, unit: _Unit) -> None:
        most_s = unit.spec.max_lag_s
        behind = unit.lag_s is not None and unit.lag_s > most_s
        lost = unit.applied.position is None and time.monotonic() - unit.begun_s > most_s
        rests = unit.life.state in {"stopped", "finished"}
        alarming = unit.life.state == "failed" or behind or (lost and not rests)
        if alarming == unit.alarming:
            return
        unit.alarming = alarming
        status = self._status(unit)
        if alarming:
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
        failure = unit.life.failure
        waits = unit.life.state == "waiting" and not unit.life.is_looking
        at = unit.applied.position
        paused = unit.life.state == "stopped" and self._folder.sink(unit.spec.name).paused
        return SinkStatus(
            name=unit.spec.name,
            state="paused" if paused else unit.life.shown,
            rebuilding=unit.rebuild,
            restarts=unit.life.restarts,
            error=failure.message if failure is not None else "",
            advice=failure.advice if failure is not None else "",
            retry_in_s=max(0.0, unit.life.due - time.monotonic()) if waits else None,
            progress=replace(unit.progress),
            topic=unit.spec.topic,
            store=unit.spec.shown,
            position={} if at is None else at.as_json(),
            lag=unit.lag,
            lag_s=unit.lag_s,
            alarming=unit.alarming,
            put=unit.applied.put,
            deleted=unit.applied.deleted,
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
            self._command(do, unit)
            self._note(unit)
            self._wake.set()
            return self._status(unit).as_dict()

    def _command(self, do: str, unit: _Unit) -> None:
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
                live.beside(fresh=True).close()
            self._folder.write_sink(replace(self._record(unit), rebuilding=True))
            self._begin_rebuild(unit.spec)
        else:
            raise PenstockError(f"{do!r} is not known")

    def _record(self, unit: _Unit) -> SinkRecord:
        return self._folder.sink(unit.spec.name)


def ends_of(place: Place, topics: set[str]) -> dict[tuple[str, int], int]:
    """Where the logs of topics end now."""
    if not topics:
        return {}
    with place.cluster() as cluster:
        metadata = Metadata(cluster)
        there = metadata.topics(sorted(map(place.resolve, topics)))
        wanted = [(topic, number) for topic in there for number in metadata.partitions(topic)]
        return offsets(
            cluster, dict.fromkeys(wanted, LATEST), isolation="read_committed", metadata=metadata
        )


def unread_since(
    place: Place, topic: str, at: Position, ends: Mapping[tuple[str, int], int]
) -> float | None:
    """When the oldest record was written that a store lacks, in seconds since 1970."""
    behind = {
        number: at.offsets.get((name, number), 0)
        for (name, number), end in ends.items()
        if name == topic and at.offsets.get((name, number), 0) < end
    }
    oldest: list[float] = []
    if not behind:
        return None
    try:
        with place.cluster() as cluster:
            seen: set[int] = set()
            for number, batch in read_batches(
                cluster, topic, start={n: o for n, o in behind.items() if o},
                partitions=sorted(behind), timeout_s=UNREAD_TIMEOUT_S,
            ):  # fmt: skip
                if number not in seen:
                    seen.add(number)
                    oldest.append(batch.column("timestamp")[0].as_py().timestamp())
                if len(seen) == len(behind):
                    break
    except PenstockError as error:
        log.debug("the log does not say since when %s is behind: %s", topic, error)
    return min(oldest, default=None)


def lag_of(
    at: Position, ends: Mapping[tuple[str, int], int], topic: str, newest_s: float
) -> tuple[int, float | None]:
    """Records that a store lacks, and for how many seconds it has; None if nobody knows."""
    behind = sum(
        max(0, end - at.offsets.get(place, 0)) for place, end in ends.items() if place[0] == topic
    )
    if behind == 0:
        return 0, 0.0
    return behind, max(0.0, time.time() - newest_s) if newest_s else None
