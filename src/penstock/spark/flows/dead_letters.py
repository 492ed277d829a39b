"""When so many records end as dead letters that it is not the records that are wrong.

If a schema does not fit its topic, every record becomes a dead letter: a flow or sink that went on
would look healthy while nothing arrives. So it stops, and says what the first of them lacks.

What is judged are the recent records: those of the last micro-batches that together have about a
thousand. A few bad ones never stop anything, however few others there are (`LEAST`), for one poison
record must not; but a run with an end, which nobody watches, says at its end if most of what it
read went aside.

Where it can be, a micro-batch is judged *before* it is committed. Nothing of it is written then,
and the position stays before it: after the schema was mended the same records are read again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from penstock.spark.flows.errors import FlowError

DEFAULT_SHARE: Final = 0.5
# Of fewer records nothing is said while they come in; of as few a run with an end says that not one
# of them could be read.
LEAST: Final = 10
LEAST_OF_ALL: Final = 2
# How many records are recent.
RECENT: Final = 1000


class TooManyDeadLettersError(FlowError):
    """So many records cannot be read that something else than the records must be wrong."""


@dataclass(frozen=True, slots=True)
class DeadLetterLimit:
    """From when on it is not the records."""

    # More than this share of the recent records; 1 never stops.
    share: float = DEFAULT_SHARE
    # More than so many in one micro-batch; None for any number.
    count: int | None = None


NO_LIMIT: Final = DeadLetterLimit(share=1)


@dataclass(frozen=True, slots=True)
class Remedy:
    """What to do: if the micro-batch was not committed, and if it was."""

    kept: str
    aside: str


class DeadLetterGuard:
    """Judges the micro-batches of one run of a flow or a sink."""

    def __init__(self, limit: DeadLetterLimit, remedy: Remedy, *, once: bool = False) -> None:
        self._limit = limit
        self._remedy = remedy
        self._once = once
        # Records and dead letters of recent micro-batches.
        self._recent: deque[tuple[int, int]] = deque(maxlen=RECENT)
        self._records = self._dead = 0
        self._first = ""

    def check(self, records: int | None, dead: int, first: Callable[[], str]) -> None:
        """Before a micro-batch is committed: TooManyDeadLettersError if it must not be.

        `first` tells where the first of them stood, and why it could not be read.
        """
        wrong = self._wrong(records, dead)
        if wrong:
            raise self._error(wrong, first(), self._remedy.kept)

    def committed(
        self, records: int, dead: int, first: Callable[[], str], *, is_judged: bool
    ) -> None:
        """After a micro-batch was committed, dead letters and all.

        One that was not judged before is judged now.
        """
        wrong = "" if is_judged else self._wrong(records, dead)
        if wrong:
            raise self._error(wrong, first(), self._remedy.aside)
        needs_first = self._once and not self._first and dead > self._limit.share * records
        self.note(records, dead, first() if needs_first else "")

    def note(self, records: int, dead: int, first: str) -> None:
        """Remember a micro-batch that was committed."""
        records = max(records, dead)
        if not records:
            return
        self._recent = self._with((records, dead))
        self._records += records
        self._dead += dead
        self._first = self._first or first

    def at_end(self) -> TooManyDeadLettersError | None:
        """What there is to say when a run has come to its end; None if it went well."""
        if not self._once or self._dead <= self._limit.share * self._records:
            return None
        return self._error(_told(self._records, self._dead), self._first, self._remedy.aside)

    def _wrong(self, records: int | None, dead: int) -> str:
        """What is wrong with a micro-batch on top of those before; nothing if it is not too bad."""
        most = self._limit.count
        if most is not None and dead > most:
            return f"{dead:,} records of one micro-batch are dead letters, more than {most:,}"
        if records is None or not dead:
            return ""
        recent = self._with((max(records, dead), dead))
        every, bad = sum(each for each, _ in recent), sum(each for _, each in recent)
        least = LEAST_OF_ALL if self._once and bad == every else LEAST
        if every >= least and bad > self._limit.share * every:
            return _told(every, bad)
        return ""

    def _with(self, batch: tuple[int, int]) -> deque[tuple[int, int]]:
        """The recent micro-batches with one more: no more of them than make a thousand records."""
        recent = deque([*self._recent, batch], maxlen=RECENT)
        while sum(each for each, _ in recent) - recent[0][0] >= RECENT:
            recent.popleft()
        return recent

    def _error(self, wrong: str, first: str, advice: str) -> TooManyDeadLettersError:
        told = f". The first: {first}" if first else ""
        return TooManyDeadLettersError(f"{wrong}{told}", advice=advice)


def _told(records: int, dead: int) -> str:
    if dead < records:
        return f"{dead:,} of the last {records:,} records are dead letters"
    return f"all of the last {records:,} records are dead letters" if records > 1 else (
        "the only record is a dead letter"
    )  # fmt: skip


class Verdict:
    """The judgement of one micro-batch, before it is committed or after."""

    def __init__(
        self,
        guard: DeadLetterGuard,
        count: Callable[[], tuple[int | None, int] | None],
        first: Callable[[], str],
    ) -> None:
        """`count` gives the records and the dead letters; None if nothing was computed."""
        self._guard = guard
        self._count = count
        self.first = first
        self._found: tuple[int | None, int] | None = None
        self._is_judged = False

    def before_commit(self) -> None:
        """TooManyDeadLettersError if the micro-batch must not be committed."""
        found = self._found = self._count()
        if found is not None:
            self._guard.check(*found, self.first)
            self._is_judged = True

    def after_commit(self) -> tuple[int | None, int]:
        """The same, if it could not be judged before; how many records and dead letters there were.

        Where the number of records is not known the guard is to be told when it is.
        """
        records, dead = (self._count() if self._found is None else self._found) or (None, 0)
        if records is not None:
            self._guard.committed(records, dead, self.first, is_judged=self._is_judged)
        return records, dead


def described(topic: str, partition: int, offset: int, reason: str) -> str:
    """Where a dead letter stood, and why it is one."""
    return f"{topic}-{partition} at offset {offset}: {reason}"
