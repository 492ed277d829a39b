"""Runs flows: starts, watches, restarts and stops them, and rebuilds their outputs.

They are looked after as all queries are (`overseeing`); what went wrong is explained by `trouble`.

**Rebuilding.** `reset` begins the next generation of a flow: a checkpoint and output topics of its
own, filled by replay from the start of the log, while the present generation goes on. Once the new
one has caught up, the old query is stopped, `flow.json` is pointed at the new generation, and it
goes on from there. The old topics stay, for whoever still reads them, until
`penstock flows cleanup` deletes them.

**Readers follow.** A flow that reads what was rebuilt stands in a version that does not grow any
more. It is rebuilt from the new one in its turn, and so are those that read it. Nothing has to be
remembered for that: whoever is started and finds itself in an older version does the same.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

from penstock.client import migration_map
from penstock.errors import PenstockError
from penstock.spark.flows import changed, moved, versions
from penstock.spark.flows.cleanup import cleaned
from penstock.spark.flows.declare import Collected, Flow, Topic
from penstock.spark.flows.errors import (
    CheckpointFullError,
    IncompatibleError,
    UnknownFlowError,
    UnknownTopicError,
)
from penstock.spark.flows.folder import Fingerprint, Folder, Record
from penstock.spark.flows.inputs import Place
from penstock.spark.flows.old_rows import Ask
from penstock.spark.flows.outputs import make_topics
from penstock.spark.flows.overseeing import Overseer, Query, Settings, Unit
from penstock.spark.flows.plans import Plan
from penstock.spark.flows.progress import Progress
from penstock.spark.flows.running import Running
from penstock.spark.flows.supervisor import Failure, Policy
from penstock.spark.flows.trouble import RESET_ADVICE
from penstock.spark.flows.versions import physical
from penstock.spark.runtime.spark_internals import cancel_group

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)


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


class _Unit(Unit[Running]):
    """One generation of a flow, under supervision."""

    def __init__(
        self, flow: Flow, generation: int, policy: Policy, *, rebuild: bool = False
    ) -> None:
        super().__init__(flow.name, policy, rebuild=rebuild)
        self.flow = flow
        self.generation = generation
        # Of the Spark jobs that its start runs, and whether a stop has cancelled them.
        self.job_group = ""
        self.is_broken_off = False
        # What was last said about its waiting, so that it is said once.
        self.told = ""
        # Whether its outputs other than topics take the place of those of before.
        self.switching = False
        # Inputs that it reads in an older version than the one that counts.
        self.behind: list[versions.Behind] = []


class Manager(Overseer[_Unit]):
    """Flows of one file, on one session and one data folder."""

    kind: ClassVar[str] = "flows"

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
        super().__init__(spark, settings, len(flows))
        self._flows = flows
        self._known = known or flows
        self._folder = folder
        self.on_change: Callable[[Status], None] = lambda status: None
        # Who knows of tables whose updates come without the old row.
        self.ask_old_rows: Ask | None = None

    # ---- what is run ---------------------------------------------------------------------

    def start(self) -> None:
        """Begin with all flows."""
        with self._lock:
            for flow in self._flows:
                record = self._record(flow)
                unit = self._unit(flow, record.generation)
                self._live[flow.name] = unit
                self._begin(unit)
                generation = record.rebuilding
                if generation and not self._behind(flow, generation):
                    self._begin_rebuild(flow, generation)
                elif generation or unit.behind:
                    self._reset(unit)

    def _unit(self, flow: Flow, generation: int, *, rebuild: bool = False) -> _Unit:
        unit = _Unit(flow, generation, self._settings.policy, rebuild=rebuild)
        if self._settings.keeps_counts:
            unit.progress = Progress.restored(self._folder.counts(flow.name, generation))
        return unit

    def _write_counts(self, unit: _Unit) -> None:
        self._folder.write_counts(unit.flow.name, unit.progress.totals(), unit.generation)

    def _new_query(self, unit: _Unit) -> Running:
        resolve = self.resolve
        if not unit.rebuild:
            unit.behind = self._behind(unit.flow, unit.generation)
            pinned = {each.name: each.reads for each in unit.behind}
            if pinned:
                # Its offsets are those of the older version.
                resolve = lambda topic: pinned.get(topic) or self.resolve(topic)  # noqa: E731
        running = Running(
            self._spark,
            unit.flow,
            Place(self._settings.bootstrap, self._settings.options, resolve),
            self._folder.checkpoint(unit.flow.name, unit.generation),
            generation=unit.generation,
            once=self._settings.once or unit.rebuild,
            stops_at_dead_letters=self._settings.stops_at_dead_letters,
        )
        running.progress, running.ask = unit.progress, self.ask_old_rows
        running.is_rebuild = unit.rebuild
        return running

    def _watch(self, unit: _Unit, query: Query) -> None:
        super()._watch(unit, query)
        wants = isinstance(query, Running) and query.wants_restart
        if wants and unit.life.state == "running" and not unit.rebuild:
            self._do(unit, unit.life.restart())
            self._note(unit)

    def _launch(self, unit: _Unit, query: Running) -> None:
        """Plan and start a query."""
        # In one pool the oldest job comes first, so each flow gets its turn; with a pool for each,
        # Spark prefers the first in the alphabet.
        self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", "flows")
        # Of what the function itself runs when it is asked for its plan. A name is not used again:
        # jobs of a group that was cancelled are refused from then on.
        unit.is_broken_off = False
        unit.job_group = f"penstock start {unit.name} {uuid4()}"
        self._spark.sparkContext.setJobGroup(unit.job_group, unit.name)
        self._make_inputs(unit.flow, query.place)
        plan = self._planned(unit, query)
        with self._lock:
            record = self._record(unit.flow)
            known = record.fingerprint(unit.generation)
            if known is not None and self._carry(unit, query, known, plan.fingerprint):
                record = self._record(unit.flow)
                known = record.fingerprint(unit.generation)
            differences = known.differences(plan.fingerprint) if known is not None else []
            if known is not None and differences:
                code = changed.lines(known.source, plan.fingerprint.source, unit.flow.where)
                raise IncompatibleError(
                    f"flow {unit.flow.name!r} has changed so that it cannot go on from where it "
                    f"was: {'; '.join([*differences, *code])}",
                    advice=_advice(unit.flow, known, plan.fingerprint),
                )
            columns = record.columns | {name: dict(own) for name, own in plan.columns.items()}
            # Where it stands does not tell fingerprints apart.
            is_known = known is not None and known.source == plan.fingerprint.source
            if not is_known or known != plan.fingerprint or record.columns != columns:
                record = replace(record, columns=columns)
                self._folder.write(record.remembering(unit.generation, plan.fingerprint))
        counts = self._folder.counts(unit.flow.name, unit.generation)
        query.has_run = known is not None and counts.get("rows_in", 0) > 0
        query.start(plan)

    def _break_off_start(self, unit: _Unit) -> None:
        if not unit.is_broken_off:
            unit.is_broken_off = True
            log.warning(
                "flow %s: its start did not end within %.0f s and is broken off",
                unit.name, self._settings.stop_timeout_s,
            )  # fmt: skip
        if unit.job_group:
            cancel_group(self._spark, unit.job_group)

    def _carry(self, unit: _Unit, query: Running, known: Fingerprint, now: Fingerprint) -> bool:
        """Take a flow along to another cluster, if its topics were moved there; whether it was."""
        replaced = known.replaced(now)
        if not replaced or known.streams != now.streams:
            return False
        with query.place.cluster() as cluster:
            moves = migration_map.find(cluster, replaced)
            if moves.keys() != replaced.keys():
                return False
            moved.check(unit.flow.name, known)
            record = self._record(unit.flow)
            done = moved.carry(
                self._folder, record, unit.generation, query.checkpoint, cluster, moves
            )
        here = replace(known, ids=now.ids, cluster=now.cluster)
        self._folder.write(done.remembering(unit.generation, here))
        log.info("flow %s goes on in another cluster", unit.flow.name)
        return True

    def _planned(self, unit: _Unit, query: Running) -> Plan:
        try:
            return query.plan()
        except UnknownTopicError as error:
            if not unit.behind:
                raise
            told = ", ".join(map(str, unit.behind))
            raise UnknownTopicError(
                f"flow {unit.flow.name!r} has read {told}, and it is gone",
                advice="It goes on with the new one when it is rebuilt from there, which has begun "
                "by itself.",
            ) from error

    def _behind(self, flow: Flow, generation: int) -> list[versions.Behind]:
        """Which inputs a generation of a flow reads in an older version."""
        record = self._folder.find(flow.name)
        known = None if record is None else record.fingerprint(generation)
        if known is None:
            return []
        names = [each.topic for each in flow.streams]
        return versions.behind(names, known.streams, {each: self.resolve(each) for each in names})

    def _make_inputs(self, flow: Flow, place: Place) -> None:
        """What another flow here writes may be read before that one has begun."""
        for topic in {each.topic for each in flow.inputs}:
            self._make(topic, place, reader=flow.name)

    def _make(self, topic: str, place: Place, *, reader: str = "") -> None:
        for writer in self._known:
            if writer.name != reader and any(each.name == topic for each in writer.topics):
                generation = self._generation(writer)
                make_topics(place, writer.of_generation(generation), generation)

    def make(self, topic: str) -> None:
        """Make a topic, and what else its flow writes, if a flow here writes it."""
        self._make(topic, Place(self._settings.bootstrap, self._settings.options, self.resolve))

    def resolve(self, topic: str) -> str:
        """The topic that stands for a name: of what was rebuilt, the latest one."""
        with self._lock:
            writer = self._known.writer(topic)
            if writer is None:
                # A flow of another file may write it, with the same data folder.
                return self._folder.resolve(topic)
            return physical(topic, self._generation(writer))

    def _generation(self, flow: Flow) -> int:
        record = self._folder.find(flow.name)
        return 1 if record is None else record.generation

    # ---- what is kept --------------------------------------------------------------------

    def _record(self, flow: Flow) -> Record:
        found = self._folder.find(flow.name) or Record(flow.name)
        return replace(
            found,
            file=self._settings.file,
            where=flow.where,
            bootstrap=self._settings.bootstrap,
            checkpoints=self._folder.checkpoints,
            inputs=tuple(map(_describe, flow.of_generation(found.generation).inputs)),
            dead_letters=tuple(sorted(flow.of_generation(found.generation).dead_letter_topics)),
            outputs=tuple(
                f"topic {physical(each.name, found.generation)}"
                if isinstance(each, Topic)
                else each.target
                for each in flow.outputs.values()
            ),
            topics=tuple(each.name for each in flow.topics),
            asides=tuple(sorted(flow.asides)),
        )

    def _remember(self, unit: _Unit) -> None:
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

    def _note(self, unit: _Unit) -> None:
        if not unit.rebuild:
            self._remember(unit)
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
        note = unit.query.note if unit.query is not None else None
        failure = unit.life.failure or self._old_input(unit) or note
        return Status(
            name=unit.flow.name,
            state=unit.life.shown,
            generation=unit.generation,
            rebuilding=unit.rebuild,
            restarts=unit.life.restarts,
            error=failure.message if failure is not None else "",
            advice=failure.advice if failure is not None else "",
            retry_in_s=unit.retry_in_s,
            progress=replace(unit.progress),
        )

    def _old_input(self, unit: _Unit) -> Failure | None:
        """That a flow reads what does not grow any more: it runs, and yet it is not in step."""
        if not unit.behind:
            return None
        rebuild = self._rebuilds.get(unit.flow.name)
        is_built = rebuild is not None and rebuild.life.state != "failed"
        return Failure(
            f"it still reads {', '.join(map(str, unit.behind))}",
            "It is being rebuilt from there, and then goes on with it."
            if is_built
            else f"`penstock flows reset {unit.flow.name}` rebuilds it from there.",
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
                self._follow(unit)
            elif do == "reset":
                return self._reset(unit)
            elif do == "cleaned":
                done = cleaned(self._record(unit.flow), question.get("generations", ()))
                self._folder.write(done)
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
        if self._stopping:
            raise PenstockError(
                "the flows are being stopped", advice="Ask again when they are, or run again."
            )
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
        unit = self._unit(flow, generation, rebuild=True)
        self._rebuilds[flow.name] = unit
        self._begin(unit)

    def _switch(self, rebuilt: _Unit) -> None:
        """The new generation has caught up: once the old query has ended, it takes its place."""
        live = self._live[rebuilt.flow.name]
        if not live.life.is_ended:
            if live.life.state != "stopping":
                self._do(live, live.life.stop())
            return
        if live.work is not None or rebuilt.work is not None:
            return
        if self._behind(rebuilt.flow, rebuilt.generation):
            # What it was rebuilt from was itself rebuilt meanwhile.
            if not self._stopping:
                self._reset(live)
            return
        if not rebuilt.switching and any(map(_can_switch, rebuilt.flow.outputs.values())):
            rebuilt.switching = True
            self._work(rebuilt, self._switch_outputs, rebuilt)
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
        unit = _Unit(rebuilt.flow, rebuilt.generation, self._settings.policy)
        unit.progress = rebuilt.progress
        self._live[name] = unit
        log.info("flow %s goes on as generation %d", name, rebuilt.generation)
        if self._stopping or self._settings.once:
            unit.life.started()
            unit.life.ended()
        else:
            self._begin(unit)
        self._note(unit)
        self._lead_readers(rebuilt.flow)

    def _switch_outputs(self, rebuilt: _Unit) -> None:
        """Stores that were filled beside those of before; topics have another name anyway."""
        for output in rebuilt.flow.outputs.values():
            if _can_switch(output):
                switch: Any = getattr(output, "switch", None)
                switch(rebuilt.flow.name, rebuilt.generation)

    def _not_done(self, unit: _Unit, failure: Failure) -> None:
        if not unit.switching:
            super()._not_done(unit, failure)
            return
        # What was built stays beside; the old generation goes on.
        unit.switching = False
        unit.life.failure, unit.life.state = failure, "failed"
        if not self._stopping:
            live = self._live[unit.flow.name]
            self._do(live, live.life.restart())
            self._note(live)

    def _lead_readers(self, rebuilt: Flow) -> None:
        """Flows that read what was rebuilt stand in the old version, which does not grow."""
        if self._stopping:
            # The next start finds them behind.
            return
        written = {each.name for each in rebuilt.topics}
        written |= {each for each in rebuilt.asides if self._known.writer(each) is rebuilt}
        for unit in list(self._live.values()):
            if unit.flow is rebuilt or not written & {each.topic for each in unit.flow.inputs}:
                continue
            unit.behind = self._behind(unit.flow, unit.generation)
            if not unit.behind:
                # It has read nothing yet, or reads it as a table.
                self._do(unit, unit.life.restart())
            elif unit.life.state not in {"stopping", "stopped"}:
                self._follow(unit)
            self._note(unit)

    def _follow(self, unit: _Unit) -> None:
        """Rebuild a flow that is behind, unless that is under way."""
        under_way = self._rebuilds.get(unit.flow.name)
        if unit.behind and (under_way is None or under_way.life.is_ended):
            self._reset(unit)


def _can_switch(output: Any) -> bool:
    return callable(getattr(output, "switch", None))


def _advice(flow: Flow, known: Fingerprint, now: Fingerprint) -> str:
    advice = RESET_ADVICE.format(name=flow.name)
    if known.cluster and now.cluster and known.cluster != now.cluster:
        return (
            "Were its topics moved here? Then run `penstock migrate` once more: it writes down how "
            f"offsets are translated, and the flow goes on. Else: {advice}"
        )
    return advice


def _describe(declared: Any) -> str:
    kind = type(declared).__name__.lower()
    aside = {"late": "late ones", "dead_letters": "unreadable ones"}
    names = {field: getattr(declared, field, None) for field in aside}
    names["dead_letters"] = names["dead_letters"] or getattr(declared, "letters_if_typed", None)
    told = [f"{what} to {names[field]}" for field, what in aside.items() if names[field]]
    return ", ".join([f"{kind} {declared.topic} ({declared.reading.describe()})", *told])
