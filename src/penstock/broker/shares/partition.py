"""One group's records of one partition: which are free, in whose hands, and finished.

Theory
    start ≤ end

Everything before `start` is finished; nothing from `end` on was ever delivered. Between them lie
*runs*: stretches of offsets, end to end, that are in the same state. A batch that is delivered
and acknowledged as a whole is one run all along; a run is split only where records of it fare
differently, and neighbours that have become alike are joined again. So the cost is that of the
batches, not of the records.

    AVAILABLE  may be delivered (again); `count` says how often it was
    ACQUIRED   a member has it, until it answers or `deadline_ms`
    DYING      given up, but its dead letter is not written yet
    DONE       acknowledged, or given up and buried, or never a record

Runs that are DONE at the front are dropped, and `start` moves over them. One record that takes
long holds nothing up: behind it a single DONE run grows.

What survives a restart is in `to_value`: the start, and per run its state and count. Locks do
not survive: what was ACQUIRED is AVAILABLE then, with the delivery counted.

Pure: no clock, no log, no sockets. Times are milliseconds of `Clock.elapsed_ms`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import Any, Final

from penstock.broker.shares.keys import KeyOrder

AVAILABLE, ACQUIRED, DYING, DONE = range(4)
GAP, ACCEPT, RELEASE, REJECT, RENEW = range(5)
# Why a record is given up.
NO_REASON, LIMIT_REACHED, REJECTED = range(3)

# How finely a group's records may be divided: beyond it nothing new is delivered until older
# records are finished. Bounds the memory and the journal's entry.
MAX_RUNS: Final = 4_096

_first: Final = attrgetter("first")


@dataclass(frozen=True, slots=True)
class ShareRules:
    """What a group's settings say about the delivery of its records."""

    delivery_limit: int = 5
    lock_ms: int = 30_000
    max_locks: int = 2_000
    dead_letters: bool = False
    renewable: bool = True
    ordered: bool = False


@dataclass(slots=True)
class Run:
    """A stretch of records in the same state, both ends included."""

    first: int
    last: int
    state: int
    count: int = 0
    member: str = ""
    deadline_ms: int = 0
    reason: int = NO_REASON

    @property
    def size(self) -> int:
        return self.last - self.first + 1

    def is_like(self, other: Run) -> bool:
        return self.state == other.state and (
            self.state == DONE
            or (
                self.count == other.count
                and self.member == other.member
                and self.deadline_ms == other.deadline_ms
                and self.reason == other.reason
            )
        )


# First offset, last offset, and either one kind for all of them or one for each.
Acknowledgement = tuple[int, int, Sequence[int]]
# First offset, last offset, how often they have been delivered with this time.
Acquired = tuple[int, int, int]


@dataclass(slots=True)
class Acquisition:
    """What one fetch takes for its member: how much it may yet, and what it has."""

    member: str
    deadline_ms: int
    # Records that may still be taken.
    budget: int
    taken: list[Acquired] = field(default_factory=list)
    # No more is to be taken, whatever the budget says.
    closed: bool = False

    @property
    def records(self) -> int:
        return sum(last - first + 1 for first, last, _ in self.taken)

    def add(self, first: int, last: int, count: int) -> None:
        self.budget -= last - first + 1
        if self.taken:
            before = self.taken[-1]
            if before[1] + 1 == first and before[2] == count:
                self.taken[-1] = (before[0], last, count)
                return
        self.taken.append((first, last, count))


class NotAcquiredError(Exception):
    """A member answers for records that are not in its hands."""


class NotDeliveredError(NotAcquiredError):
    """A member answers for records that were not delivered to anybody."""


class SharePartition:
    """The state of one group's records of one partition."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.end = start
        self.runs: list[Run] = []
        # How many records are in each state.
        self.sizes = [0, 0, 0, 0]
        # No record before this is AVAILABLE.
        self._free_from = start
        self.order: KeyOrder | None = None
        # About how many bytes a record has, as far as some were delivered.
        self.record_bytes: float | None = None

    # ---- what there is -------------------------------------------------------------------

    @property
    def locked(self) -> int:
        """Records that count against the limit: delivered, and neither back nor finished."""
        return self.sizes[ACQUIRED] + self.sizes[DYING]

    @property
    def unfinished(self) -> int:
        return self.sizes[AVAILABLE] + self.sizes[ACQUIRED] + self.sizes[DYING]

    def lag(self, log_end: int) -> int:
        """Records up to the log's end that are not finished."""
        return max(log_end - self.start - self.sizes[DONE], 0)

    def free(self, end: int) -> int:
        """Offsets below `end` that nobody has, whatever lies there."""
        return self.sizes[AVAILABLE] + max(end - self.end, 0)

    def next_offset(self, rules: ShareRules) -> int | None:
        """Where the next record to deliver is or will be; None if none may be now."""
        if self.locked >= rules.max_locks:
            return None
        if self.order is not None:
            return self.order.next_offset(self.unfinished)
        if self.sizes[AVAILABLE]:
            return self._first_available()
        return None if len(self.runs) >= MAX_RUNS else self.end

    def _first_available(self) -> int:
        at = max(bisect_right(self.runs, self._free_from, key=_first) - 1, 0)
        for run in self.runs[at:]:
            if run.state == AVAILABLE:
                self._free_from = run.first
                return run.first
        raise AssertionError("the sizes say that something is available")

    def next_deadline_ms(self) -> int | None:
        return min((run.deadline_ms for run in self.runs if run.state == ACQUIRED), default=None)

    def dying(self) -> list[Run]:
        return [run for run in self.runs if run.state == DYING] if self.sizes[DYING] else []

    def state_at(self, offset: int) -> int:
        if offset < self.start:
            return DONE
        if offset >= self.end:
            return AVAILABLE
        return self.runs[bisect_right(self.runs, offset, key=_first) - 1].state

    # ---- delivering ----------------------------------------------------------------------

    def acquire(self, wanted: Acquisition, first: int, last: int, rules: ShareRules) -> int:
        """Give what is free between two offsets to a member; how many records that were."""
        before = wanted.budget
        first = max(first, self.start)
        while first <= last and wanted.budget > 0 and not wanted.closed:
            if first >= self.end:
                self.skip(self.end, first - 1)
                stop = min(last, first + wanted.budget - 1)
                self._append(Run(first, stop, ACQUIRED, 1, wanted.member, wanted.deadline_ms))
                wanted.add(first, stop, 1)
                break
            run = self.runs[bisect_right(self.runs, first, key=_first) - 1]
            stop = min(run.last, last)
            if run.state == AVAILABLE:
                stop = self._acquire_from(run, wanted, first, stop, rules)
            first = max(stop + 1, self.start)
        return before - wanted.budget

    def _acquire_from(
        self, run: Run, wanted: Acquisition, first: int, last: int, rules: ShareRules
    ) -> int:
        """Take from a run that is free; the last offset that was considered."""
        if run.count >= rules.delivery_limit:
            # The limit was lowered, or the broker stopped before it could give them up.
            self._give_up(first, last, AVAILABLE, LIMIT_REACHED, rules)
            self._trim()
            return last
        portion = _portion(run, rules)
        if portion < run.size:
            if wanted.taken:
                # Suspicious records are delivered apart: another fetch will get these.
                return last
            wanted.closed = True
        stop = min(last, first + min(wanted.budget, portion) - 1)
        count = run.count + 1
        for changed in self._between(first, stop):
            self._set(changed, ACQUIRED, wanted.member, wanted.deadline_ms)
            changed.count = count
        self._join(first, stop)
        wanted.add(first, stop, count)
        return stop

    def skip(self, first: int, last: int) -> None:
        """Nothing between two offsets is to be delivered: no records, or not for consumers."""
        if last < first:
            return
        if last >= self.end:
            if first > self.end:
                self._append(Run(self.end, first - 1, AVAILABLE))
            self._append(Run(max(first, self.end), last, DONE))
        self._change(first, last, AVAILABLE, DONE)
        self._trim()

    def learn(self, next_offset: int) -> None:
        """Know of records that cannot be delivered yet."""
        if next_offset > self.end:
            self._append(Run(self.end, next_offset - 1, AVAILABLE))

    # ---- answers -------------------------------------------------------------------------

    def acknowledge(
        self,
        member: str,
        answers: Iterable[Acknowledgement],
        elapsed_ms: int,
        rules: ShareRules,
    ) -> None:
        """Take a member's answers, all or none: NotAcquiredError if it has not got the records."""
        parts = list(_by_kind(answers))
        for first, last, _ in parts:
            self._check_held(member, first, last)
        for first, last, kind in parts:
            self._answer(max(first, self.start), last, kind, elapsed_ms, rules)
        self._trim()

    def _check_held(self, member: str, first: int, last: int) -> None:
        if last >= self.end:
            raise NotDeliveredError(f"{last} was not delivered yet")
        # As in Kafka an answer for what is finished with all before it is no mistake.
        first = max(first, self.start)
        if last < first:
            return
        at = bisect_right(self.runs, first, key=_first) - 1
        while at < len(self.runs) and self.runs[at].first <= last:
            run = self.runs[at]
            if run.state != ACQUIRED or run.member != member:
                raise NotAcquiredError(f"{max(first, run.first)} is not in this member's hands")
            at += 1

    def _answer(self, first: int, last: int, kind: int, elapsed_ms: int, rules: ShareRules) -> None:
        if last < first:
            return
        if kind in (GAP, ACCEPT):
            self._change(first, last, ACQUIRED, DONE)
        elif kind == REJECT:
            self._give_up(first, last, ACQUIRED, REJECTED, rules)
        elif kind == RENEW:
            for run in self._between(first, last):
                if run.state == ACQUIRED:
                    run.deadline_ms = elapsed_ms + rules.lock_ms
            self._join(first, last)
        else:
            self._put_back(first, last, rules)

    def _put_back(self, first: int, last: int, rules: ShareRules) -> None:
        for run in self._between(first, last):
            if run.state != ACQUIRED:
                continue
            if run.count >= rules.delivery_limit:
                self._set(run, DYING if rules.dead_letters else DONE, reason=LIMIT_REACHED)
            else:
                self._set(run, AVAILABLE)
        self._join(first, last)

    def _give_up(self, first: int, last: int, before: int, reason: int, rules: ShareRules) -> None:
        for run in self._between(first, last):
            if run.state == before:
                self._set(run, DYING if rules.dead_letters else DONE, reason=reason)
        self._join(first, last)

    # ---- locks that end otherwise --------------------------------------------------------

    def expire(self, elapsed_ms: int, rules: ShareRules) -> bool:
        """Take back what was held too long; whether there was any."""
        return self._take_back(
            [r for r in self.runs if r.state == ACQUIRED and r.deadline_ms <= elapsed_ms], rules
        )

    def release(self, member: str, rules: ShareRules) -> bool:
        """Take back all that a member has; whether there was any.

        The delivery counts, though it may not have looked at all of it: whoever fails at a
        record and says goodbye would otherwise get it for ever.
        """
        return self._take_back(
            [r for r in self.runs if r.state == ACQUIRED and r.member == member], rules
        )

    def _take_back(self, held: list[Run], rules: ShareRules) -> bool:
        for first, last in [(run.first, run.last) for run in held]:
            self._put_back(first, last, rules)
        self._trim()
        return bool(held)

    def bury(self, first: int, last: int) -> None:
        """The dead letters of these records are safe."""
        self._change(max(first, self.start), last, DYING, DONE)
        self._trim()

    # ---- moving the start ----------------------------------------------------------------

    def cut(self, offset: int) -> None:
        """The log starts at `offset`: what was before is finished, whoever has it."""
        if offset > self.start:
            self._drop_below(offset)
        if self.order is not None:
            self.order.known_to = max(self.order.known_to, offset)

    def cut_end(self, offset: int) -> bool:
        """The log ends at `offset`, and begins anew to give out what lies behind; if it matters."""
        if offset >= self.end:
            return False
        if offset <= self.start:
            self.restart(offset)
            return True
        at = self._split(offset)
        for run in self.runs[at:]:
            self.sizes[run.state] -= run.size
        del self.runs[at:]
        self.end = offset
        self._free_from = min(self._free_from, offset)
        # It is learnt anew.
        self.order = None
        self._trim()
        return True

    def restart(self, offset: int) -> None:
        """Begin anew at an offset, in either direction."""
        self.runs, self.sizes = [], [0, 0, 0, 0]
        self.start = self.end = self._free_from = offset
        if self.order is not None:
            self.order = KeyOrder(offset)

    def _drop_below(self, offset: int) -> None:
        start = self.start
        if offset >= self.end:
            self.restart(offset)
            return
        for run in self._between(start, offset - 1):
            if run.state != DONE:
                self._set(run, DONE)
        self._join(start, offset - 1)
        self._trim()

    def set_ordered(self, ordered: bool) -> None:
        """Begin or cease to deliver the records of a key one after the other."""
        if ordered and self.order is None:
            self.order = KeyOrder(self.start)
        elif not ordered:
            self.order = None

    # ---- runs ----------------------------------------------------------------------------

    def _append(self, run: Run) -> None:
        """Add a run at the end."""
        assert run.first == self.end
        if run.last < run.first:
            return
        self.end = run.last + 1
        self.sizes[run.state] += run.size
        if self.runs and self.runs[-1].is_like(run):
            self.runs[-1].last = run.last
        else:
            self.runs.append(run)
        if run.state == AVAILABLE:
            self._free_from = min(self._free_from, run.first)

    def _split(self, offset: int) -> int:
        """Let a run begin at the offset; its place."""
        runs = self.runs
        at = bisect_right(runs, offset, key=_first) - 1
        if at < 0:
            return 0
        run = runs[at]
        if run.first == offset:
            return at
        if offset <= run.last:
            tail = Run(
                offset, run.last, run.state, run.count, run.member, run.deadline_ms, run.reason
            )
            run.last = offset - 1
            runs.insert(at + 1, tail)
        return at + 1

    def _between(self, first: int, last: int) -> list[Run]:
        """The runs that cover exactly these offsets; `_join` must follow."""
        first, last = max(first, self.start), min(last, self.end - 1)
        if last < first:
            return []
        low = self._split(first)
        return self.runs[low : self._split(last + 1)]

    def _set(
        self,
        run: Run,
        state: int,
        member: str = "",
        deadline_ms: int = 0,
        reason: int = NO_REASON,
    ) -> None:
        self.sizes[run.state] -= run.size
        self.sizes[state] += run.size
        run.state, run.member, run.deadline_ms, run.reason = state, member, deadline_ms, reason
        if state == AVAILABLE:
            self._free_from = min(self._free_from, run.first)
        if self.order is not None:
            if state == DONE:
                self.order.finish(run.first, run.last)
            elif state == AVAILABLE:
                self.order.put_back(run.first, run.last)

    def _change(self, first: int, last: int, before: int, after: int) -> None:
        for run in self._between(first, last):
            if run.state == before:
                self._set(run, after)
        self._join(first, last)

    def _join(self, first: int, last: int) -> None:
        """Join neighbours that are alike, from the one before `first` to the one after `last`."""
        runs = self.runs
        low = max(bisect_right(runs, first, key=_first) - 2, 0)
        high = min(bisect_right(runs, last, key=_first), len(runs) - 1)
        kept = runs[low : low + 1]
        for run in runs[low + 1 : high + 1]:
            if kept[-1].is_like(run):
                kept[-1].last = run.last
            else:
                kept.append(run)
        if len(kept) < high + 1 - low:
            runs[low : high + 1] = kept

    def _trim(self) -> None:
        """Let the start move over what is finished."""
        runs = self.runs
        if runs and runs[0].state == DONE:
            self._join(runs[0].first, runs[0].last)
            self.sizes[DONE] -= runs[0].size
            self.start = runs[0].last + 1
            del runs[0]
            self._free_from = max(self._free_from, self.start)

    # ---- over restarts -------------------------------------------------------------------

    def to_value(self) -> dict[str, Any]:
        """What survives: each run by its last offset, what it is, and its count."""
        runs: list[list[int]] = []
        for run in self.runs:
            kind = _KINDS[run.state, run.reason if run.state == DYING else NO_REASON]
            count = 0 if run.state == DONE else run.count
            if runs and runs[-1][1:] == [kind, count]:
                runs[-1][0] = run.last
            else:
                runs.append([run.last, kind, count])
        # What was never delivered need not be known.
        while runs and runs[-1][1:] == [0, 0]:
            runs.pop()
        return {"start": self.start, "runs": runs}

    @classmethod
    def from_value(cls, value: dict[str, Any]) -> SharePartition:
        share = cls(value["start"])
        for last, kind, count in value["runs"]:
            state, reason = _STATES[kind]
            share._append(Run(share.end, last, state, count, reason=reason))
        share._trim()
        return share


# What is written for a state: locks do not survive, reasons of giving up do.
_KINDS: Final = {
    (AVAILABLE, NO_REASON): 0,
    (ACQUIRED, NO_REASON): 0,
    (DONE, NO_REASON): 1,
    (DYING, LIMIT_REACHED): 2,
    (DYING, REJECTED): 3,
}
_STATES: Final = {
    0: (AVAILABLE, NO_REASON),
    1: (DONE, NO_REASON),
    2: (DYING, LIMIT_REACHED),
    3: (DYING, REJECTED),
}


def _by_kind(answers: Iterable[Acknowledgement]) -> Iterator[tuple[int, int, int]]:
    """Answers as stretches of the same kind."""
    for first, last, kinds in answers:
        if len(kinds) == 1:
            yield first, last, kinds[0]
            continue
        at = first
        for kind, group in groupby(kinds):
            stop = at + sum(1 for _ in group)
            yield at, stop - 1, kind
            at = stop


def _portion(run: Run, rules: ShareRules) -> int:
    """How many records of a run may be delivered together.

    If one record keeps a consumer from answering, those delivered with it are counted as well.
    So, as in Kafka, the more often they were delivered the fewer go together, and in the end
    each goes alone: only the one at fault reaches the limit.
    """
    suspicious_from = max(-(-rules.delivery_limit // 2), 2)
    if run.count < suspicious_from:
        return run.size
    if run.count >= rules.delivery_limit - 1:
        return 1
    return max(run.size >> (run.count - suspicious_from + 1), 1)
