"""A history of what was sent and acknowledged, and a judge of what is read back.

Whoever writes tells the history of each record before it is sent and when it is acknowledged;
whoever reads hands over all records of a partition. `check` then names every broken promise:

- *lost*: acknowledged, or seen by a reader before, and not there any more;
- *changed*: another record is at its offset;
- *duplicated*: a record that was sent once is there twice;
- *reordered*: offsets do not rise, or the records of one producer are not in its order;
- *reused*: an offset that belonged to one record was given to another;
- *unknown*: a record that nobody has sent to this partition.

A record that was sent and not acknowledged may be there or not. Only digests are kept, so a
history of millions of records fits in memory. It may be told by many threads at once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from typing import Final, NamedTuple

_DIGEST_BYTES: Final = 12
_PROBLEMS_SHOWN: Final = 20


class Place(NamedTuple):
    """A partition of a topic."""

    topic: str
    partition: int


class Read(NamedTuple):
    """A record as it was read."""

    offset: int
    key: bytes | None
    value: bytes | None


@dataclass(frozen=True, slots=True)
class Problem:
    """One broken promise."""

    kind: str
    place: Place
    offset: int
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.place.topic}-{self.place.partition}@{self.offset} {self.detail}"


class HistoryError(AssertionError):
    """What was read does not agree with what was acknowledged."""

    def __init__(self, problems: list[Problem]) -> None:
        shown = "\n  ".join(map(str, islice(problems, _PROBLEMS_SHOWN)))
        super().__init__(f"{len(problems)} problems:\n  {shown}")
        self.problems = problems


@dataclass(slots=True)
class _Sent:
    """Who sent a record, and as its which to this partition."""

    producer: str
    number: int
    may_repeat: bool


@dataclass(slots=True)
class _PartitionHistory:
    sent: dict[bytes, _Sent] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    # What is at an offset, by the word of an acknowledgement or of a reader.
    known: dict[int, bytes] = field(default_factory=dict)
    # The largest known offset of each key.
    latest: dict[bytes | None, int] = field(default_factory=dict)
    acknowledged: int = 0
    problems: list[Problem] = field(default_factory=list)

    def learn(self, offset: int, key: bytes | None, digest: bytes) -> None:
        self.known[offset] = digest
        self.latest[key] = max(offset, self.latest.get(key, -1))


class History:
    """What is known of any number of partitions."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._partitions: dict[Place, _PartitionHistory] = {}

    # ---- writers -------------------------------------------------------------------------

    def sending(
        self,
        producer: str,
        place: Place,
        key: bytes | None,
        value: bytes | None,
        *,
        may_repeat: bool = False,
    ) -> None:
        """Before a record is sent. Records must differ from each other in key or value.

        `may_repeat` is for producers that send again what may have arrived already.
        """
        digest = digest_of(key, value)
        with self._lock:
            part = self._part(place)
            assert digest not in part.sent, f"{place} was sent this record before: {value!r}"
            number = part.counts.get(producer, 0)
            part.counts[producer] = number + 1
            part.sent[digest] = _Sent(producer, number, may_repeat)

    def acknowledged(
        self, place: Place, offset: int, key: bytes | None, value: bytes | None
    ) -> None:
        """The broker has promised to keep the record at this offset."""
        digest = digest_of(key, value)
        with self._lock:
            part = self._part(place)
            before = part.known.get(offset)
            if before is not None and before != digest:
                problem = Problem("reused", place, offset, f"acknowledged now for {value!r:.60}")
                part.problems.append(problem)
            part.learn(offset, key, digest)
            part.acknowledged += 1

    # ---- readers -------------------------------------------------------------------------

    def end(self, place: Place) -> int:
        """One past the largest offset known; take it before reading, for `check`."""
        with self._lock:
            known = self._part(place).known
            return max(known, default=-1) + 1

    def check(
        self,
        place: Place,
        records: Iterable[Read],
        *,
        end: int,
        log_start: int = 0,
        compacted: bool = False,
    ) -> list[Problem]:
        """Everything wrong with what was read, from `log_start` on and at least up to `end`.

        Writers may go on meanwhile. What was read counts as known from now on.
        """
        found = list(records)
        with self._lock:
            part = self._part(place)
            problems, part.problems = part.problems, []
            problems += _order_problems(place, part, found)
            problems += _content_problems(place, part, found)
            # First: a record may be gone for one that was read but is not acknowledged yet.
            for item in found:
                part.learn(item.offset, item.key, digest_of(item.key, item.value))
            problems += _missing(place, part, found, _Bounds(log_start, end, compacted))
        return problems

    def verify(
        self,
        place: Place,
        records: Iterable[Read],
        *,
        end: int,
        log_start: int = 0,
        compacted: bool = False,
    ) -> None:
        """`check`, and HistoryError if there is anything wrong."""
        problems = self.check(place, records, end=end, log_start=log_start, compacted=compacted)
        if problems:
            raise HistoryError(problems)

    # ---- the whole -----------------------------------------------------------------------

    def forget(self, topic: str) -> None:
        """The topic was deleted: none of its records may be seen again."""
        with self._lock:
            for place in [place for place in self._partitions if place.topic == topic]:
                del self._partitions[place]

    def places(self) -> list[Place]:
        with self._lock:
            return sorted(self._partitions)

    @property
    def acknowledged_count(self) -> int:
        with self._lock:
            return sum(part.acknowledged for part in self._partitions.values())

    def unacknowledged(self) -> int:
        """How many records were sent and are at no known offset."""
        with self._lock:
            return sum(
                len(part.sent) - len(set(part.known.values()) & part.sent.keys())
                for part in self._partitions.values()
            )

    def _part(self, place: Place) -> _PartitionHistory:
        part = self._partitions.get(place)
        if part is None:
            part = self._partitions[place] = _PartitionHistory()
        return part


class _Bounds(NamedTuple):
    log_start: int
    end: int
    compacted: bool


def digest_of(key: bytes | None, value: bytes | None) -> bytes:
    """What stands for a record in a history."""
    head = b"%d %d " % (-1 if key is None else len(key), -1 if value is None else len(value))
    return blake2b(head + (key or b"") + (value or b""), digest_size=_DIGEST_BYTES).digest()


def _order_problems(place: Place, part: _PartitionHistory, found: list[Read]) -> Iterator[Problem]:
    last_offset = -1
    last_number: dict[str, int] = {}
    for item in found:
        if item.offset <= last_offset:
            yield Problem("reordered", place, item.offset, f"comes after {last_offset}")
        last_offset = item.offset
        sent = part.sent.get(digest_of(item.key, item.value))
        if sent is None or sent.may_repeat:
            continue
        before = last_number.get(sent.producer, -1)
        if sent.number < before:
            detail = f"number {sent.number} of {sent.producer} comes after {before}"
            yield Problem("reordered", place, item.offset, detail)
        last_number[sent.producer] = sent.number


def _content_problems(
    place: Place, part: _PartitionHistory, found: list[Read]
) -> Iterator[Problem]:
    first_at: dict[bytes, int] = {}
    for item in found:
        digest = digest_of(item.key, item.value)
        sent = part.sent.get(digest)
        if sent is None:
            yield Problem("unknown", place, item.offset, f"{item.value!r:.60}")
            continue
        known = part.known.get(item.offset)
        if known is not None and known != digest:
            yield Problem("changed", place, item.offset, f"now {item.value!r:.60}")
        if digest in first_at and not sent.may_repeat:
            detail = f"{item.value!r:.60} is also at {first_at[digest]}"
            yield Problem("duplicated", place, item.offset, detail)
        first_at.setdefault(digest, item.offset)


def _missing(
    place: Place, part: _PartitionHistory, found: list[Read], bounds: _Bounds
) -> Iterator[Problem]:
    there = {item.offset for item in found}
    read_end = max(bounds.end, found[-1].offset + 1 if found else 0)
    # A compacted log may drop a record only for a later one with the same key.
    required = part.latest.values() if bounds.compacted else part.known
    for offset in sorted(required):
        if bounds.log_start <= offset < read_end and offset not in there:
            yield Problem("lost", place, offset)
