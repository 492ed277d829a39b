"""A migration from plan to end: make topics, copy, follow, verify, move groups, release.

It says what happens through a `Reporter` and returns a `Summary`; it prints nothing itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from penstock.cli.kafka import BrokerError
from penstock.cli.migration import groups as group_moves
from penstock.cli.migration.copier import BATCH_RECORDS, Copier, TransactionAbortedError
from penstock.cli.migration.ends import End
from penstock.cli.migration.plan import (
    MAPPING_SETTINGS,
    TopicPlan,
    change_settings,
    chosen,
    create,
    make_plan,
    prepare,
)
from penstock.cli.migration.schemas import copy_schemas
from penstock.cli.migration.state import Place
from penstock.cli.migration.verify import OK, Comparison, Seen, compare

# How often a run that follows looks for new topics and partitions, and for the source's ends.
REFRESH_S: Final = 5.0
# A run that follows compares what it has copied whenever it is so much, so that little is left to
# be compared at the cut-over, while producers stand still.
COMPARE_RECORDS: Final = 200_000


class Reporter(Protocol):
    """Who is told what happens."""

    def phase(self, name: str, total: int | None) -> None:
        """A new part of the work begins, of so many records if that is known."""

    def advance(self, count: int) -> None:
        """So many records are done."""

    def lag(self, records: int) -> None:
        """So many records of the source were not copied yet when it was last asked."""

    def note(self, text: str) -> None:
        """Something that a person should know."""


@dataclass(frozen=True, slots=True)
class Options:
    """What is to be moved, and how."""

    topics: Sequence[str] = ()
    excluded: Sequence[str] = ()
    groups: Sequence[str] = ()
    replication: int | None = None
    follow: bool = False
    verify: bool = True
    batch_records: int = BATCH_RECORDS


@dataclass(slots=True)
class Summary:
    """What a run came to."""

    source: str
    target: str
    topics: list[TopicPlan] = field(default_factory=list)
    copied: dict[Place, int] = field(default_factory=dict)
    positions: dict[Place, int] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    groups: list[group_moves.Moved] = field(default_factory=list)
    queues: list[str] = field(default_factory=list)
    # Records that retention had taken from the source before they were copied.
    missed: dict[Place, int] = field(default_factory=dict)
    clamped: int = 0
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        return all(found.verdict in OK for found in self.comparisons) and all(
            moved.outcome != "failed" for moved in self.groups
        )


class Migration:
    """One run."""

    def __init__(self, source: End, target: End, options: Options, reporter: Reporter) -> None:
        self._source, self._target = source, target
        self._options = options
        self._report = reporter
        source_id = source.cluster_id()
        if source_id == target.cluster_id():
            raise BrokerError(
                "the source and the target are the same cluster",
                advice="Name two different ones with --from and --to.",
            )
        self.name = f"{group_moves.OWN_PREFIX}{source_id}"
        self.mapping_topic = f"__{self.name}"
        self.summary = Summary(source.connection.bootstrap, target.connection.bootstrap)
        # Set from outside, from another thread or a signal: stop following and finish.
        self.cut_over: Callable[[], bool] = lambda: False
        # The same: end at once. For an interruption that was lost on its way.
        self.stopped: Callable[[], bool] = lambda: False

    def plan(self) -> tuple[list[TopicPlan], list[group_moves.Group]]:
        """What would be done."""
        plans = self._plan()
        found, self.summary.queues = self._find_groups(plans)
        return plans, found

    def _plan(self) -> list[TopicPlan]:
        options = self._options
        return make_plan(self._source, self._target, options.topics, options.excluded)

    def _find_groups(self, plans: Sequence[TopicPlan]) -> tuple[list[group_moves.Group], list[str]]:
        places = [place for plan in plans for place in plan.places()]
        return group_moves.find_groups(self._source, places, self._options.groups)

    def run(self) -> Summary:
        """Do it all."""
        began = time.monotonic()
        plans = self._plan()
        create(self._target, self.mapping_topic, 1, MAPPING_SETTINGS, self._options.replication)
        self._target.await_partitions({self.mapping_topic: 1})
        copier = Copier(
            self._source,
            self._target,
            self.name,
            self.mapping_topic,
            self._options.batch_records,
        )
        try:
            self._migrate(copier, plans)
        finally:
            copier.close()
            self.summary.seconds = time.monotonic() - began
            self.summary.copied, self.summary.clamped = copier.copied, copier.clamped
        return self.summary

    def _migrate(self, copier: Copier, plans: list[TopicPlan]) -> None:
        self.summary.topics = plans
        self.summary.comparisons = self._find_foreign(copier, plans)
        if not self.summary.ok:
            return
        plans = self._take_up(copier, plans)
        self._copy(copier, plans)
        if self._options.follow:
            plans = self._follow(copier, plans)
        self._say_what_is_open(plans)
        if self.summary.ok:
            self._verify(copier, plans)
        if self.summary.ok:
            self._move_groups(copier, plans)
            for plan in plans:
                change_settings(self._target, plan.name, plan.released())

    def _advance(self, count: int) -> None:
        if self.stopped():
            raise KeyboardInterrupt
        self._report.advance(count)

    # ---- taking up -------------------------------------------------------------------------

    def _find_foreign(self, copier: Copier, plans: Sequence[TopicPlan]) -> list[Comparison]:
        """Partitions of the target with records behind the copied ones, before anything is done.

        Records count, not offsets: a transaction that was aborted takes offsets too.
        """
        ids = {
            place: plan.topic_id
            for plan in plans
            for place in plan.places()[: plan.target_partitions]
        }
        if not ids:
            return []
        self._target.await_partitions(
            {plan.name: plan.target_partitions for plan in plans if plan.target_partitions}
        )
        new = copier.load(ids)
        found = []
        last = {place: copier.progress[place].last_target for place in ids}
        tails = self._target.tails({place: at + 1 for place, at in last.items()})
        for place, tail in tails.items():
            if tail.record is None:
                continue
            if place in new:
                raise BrokerError(
                    f"{place} of the target already has records that this migration did not write",
                    advice="Delete the target's topic, or leave it out with --exclude.",
                )
            window = copier.progress[place]
            copied = Seen(window.count, window.digest)
            found.append(Comparison(place, copied, None, None, "different", tail.record))
        return found

    def _take_up(self, copier: Copier, plans: Sequence[TopicPlan]) -> list[TopicPlan]:
        """Prepare the target's topics and find where each partition goes on."""
        for plan in plans:
            prepare(self._target, plan, self._options.replication)
        self._target.await_partitions({plan.name: plan.partitions for plan in plans})
        ids = {place: plan.topic_id for plan in plans for place in plan.places()}
        if not ids:
            raise BrokerError(
                "there is nothing to migrate: the source has no such topics",
                advice="`penstock topics list` shows what there is.",
            )
        new = copier.load(ids)
        starts = self._source.bounds(ids)
        for place, bounds in starts.items():
            position = copier.progress[place].position
            if bounds.start > position:
                if place not in new:
                    self.summary.missed[place] = bounds.start - position
                    self._report.note(
                        f"{place}: up to {bounds.start - position:,} records were removed by "
                        "retention before they could be copied"
                    )
                copier.skip_to(place, bounds.start)
        copier.read_on()
        return list(plans)

    # ---- copying ---------------------------------------------------------------------------

    def _ends(self, plans: Sequence[TopicPlan]) -> dict[Place, int]:
        places = [place for plan in plans for place in plan.places()]
        return {place: bounds.end for place, bounds in self._source.bounds(places).items()}

    def _behind(self, copier: Copier, ends: dict[Place, int]) -> int:
        return sum(max(0, end - copier.progress[place].position) for place, end in ends.items())

    def _copy(self, copier: Copier, plans: Sequence[TopicPlan]) -> None:
        ends = self._ends(plans)
        # Events up to the ends name no others.
        count = copy_schemas(self._source, self._target, self._options.replication)
        if count:
            self._report.note(f"{count:,} schemas of captured tables were added to the target's")
        self._report.phase("copying", self._behind(copier, ends))
        copier.copy_until(ends, self._advance)
        self.summary.topics = list(plans)
        self.summary.positions = {place: copier.progress[place].position for place in ends}

    def _follow(self, copier: Copier, plans: list[TopicPlan]) -> list[TopicPlan]:
        """Go on with what comes, until told to cut over; then to the ends at that moment."""
        self._verify_meanwhile(copier, plans)
        looked = time.monotonic()
        while self.summary.ok and not self.cut_over():
            self._advance(copier.step())
            if time.monotonic() - looked > REFRESH_S:
                plans = self._refresh(copier, plans)
                behind = self._behind(copier, self._ends(plans))
                self._report.lag(behind)
                if self._is_due(copier, plans, behind):
                    self._verify_meanwhile(copier, plans)
                looked = time.monotonic()
        if not self.summary.ok:
            return plans
        plans = self._refresh(copier, plans)
        self._copy(copier, plans)
        return plans

    def _verify_meanwhile(self, copier: Copier, plans: Sequence[TopicPlan]) -> None:
        """Compare what there is, before it is followed further."""
        # If the target goes away before it is marked, it is compared again later.
        with suppress(TransactionAbortedError):
            self._verify(copier, plans)
        self._report.phase("following", None)

    def _is_due(self, copier: Copier, plans: Sequence[TopicPlan], behind: int) -> bool:
        """Whether there is much to compare, and time for it: no records wait to be copied."""
        if not self._options.verify or behind > self._options.batch_records:
            return False
        waiting = sum(copier.progress[place].count for plan in plans for place in plan.places())
        return waiting >= COMPARE_RECORDS

    def _refresh(self, copier: Copier, plans: list[TopicPlan]) -> list[TopicPlan]:
        """With topics and partitions that were made meanwhile."""
        options, there = self._options, self._source.topics()
        names = chosen(there, options.topics, options.excluded)
        if {name: there[name] for name in names} == {plan.name: plan.partitions for plan in plans}:
            return plans
        plans = self._plan()
        foreign = self._find_foreign(copier, plans)
        if foreign:
            raise BrokerError(
                f"someone else writes to {foreign[0].place} of the target",
                advice="Nobody may write there before the migration is finished. Stop the other "
                "writer, delete the target's topic and start again.",
            )
        return self._take_up(copier, plans)

    # ---- the end ---------------------------------------------------------------------------

    def _say_what_is_open(self, plans: Sequence[TopicPlan]) -> None:
        """Nobody can know yet whether records behind an open transaction count."""
        places = [place for plan in plans for place in plan.places()]
        for place, offset in self._source.uncommitted(places).items():
            self._report.note(
                f"{place}: records from offset {offset} on are behind an open transaction and "
                "were not copied; run this again when it has ended"
            )

    def _verify(self, copier: Copier, plans: Sequence[TopicPlan]) -> None:
        places = [place for plan in plans for place in plan.places()]
        windows = {place: copier.progress[place] for place in places}
        copier.settle()
        if not self._options.verify:
            return
        compacted = {
            plan.name for plan in plans if "compact" in plan.settings.get("cleanup.policy", "")
        }
        self._report.phase("verifying", 2 * sum(window.count for window in windows.values()))
        found = compare(
            self._source,
            self._target,
            windows,
            lambda place: place.topic in compacted,
            self._advance,
        )
        known = {item.place: item for item in self.summary.comparisons}
        known |= {item.place: item for item in found}
        self.summary.comparisons = list(known.values())
        copier.mark_verified([item.place for item in found if item.verdict in OK])

    def _move_groups(self, copier: Copier, plans: Sequence[TopicPlan]) -> None:
        self._report.phase("moving group offsets", None)
        found, self.summary.queues = self._find_groups(plans)
        for group in found:
            if group.busy:
                self._report.note(
                    f"group {group.name} still has members in the source; what it commits from "
                    "now on is not moved"
                )
        last_copied = {place: progress.last_target for place, progress in copier.progress.items()}
        translation = group_moves.translate(self._target, self.mapping_topic, found, last_copied)
        self.summary.groups = group_moves.commit(
            self._target, found, translation, copier.note_groups
        )


def as_json(summary: Summary) -> dict[str, Any]:
    """The summary for programs."""
    compared = {found.place: found for found in summary.comparisons}
    return {
        "ok": summary.ok,
        "source": summary.source,
        "target": summary.target,
        "seconds": round(summary.seconds, 3),
        "records": sum(summary.copied.values()),
        "clamped_timestamps": summary.clamped,
        "topics": [
            {
                "name": plan.name,
                "settings": dict(plan.settings),
                "left_out": [
                    {"name": item.name, "value": item.value, "reason": item.reason}
                    for item in plan.left_out
                ],
                "partitions": [
                    _partition(summary, place, compared.get(place)) for place in plan.places()
                ],
            }
            for plan in summary.topics
        ],
        "groups": [
            {
                "group": moved.group,
                "topic": moved.place.topic,
                "partition": moved.place.partition,
                "source": moved.source,
                "target": moved.target,
                "outcome": moved.outcome,
                "reason": moved.reason,
            }
            for moved in summary.groups
        ],
        "share_groups_not_moved": summary.queues,
    }


def _partition(summary: Summary, place: Place, found: Comparison | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "partition": place.partition,
        "copied": summary.copied.get(place, 0),
        "missed": summary.missed.get(place, 0),
        "source_position": summary.positions.get(place, 0),
        "verdict": "not compared" if found is None else found.verdict,
    }
    if found is not None:
        for side, seen in (("source", found.source), ("target", found.target)):
            if seen is not None:
                row[side] = {"records": seen.count, "digest": seen.digest.hex()}
        if found.foreign is not None:
            row["foreign_offset"] = found.foreign
    return row
