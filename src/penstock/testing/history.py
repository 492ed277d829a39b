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

Records may belong to a transaction. Its producer tells when it begins to commit, and how it ended;
`check(..., committed=True)` judges what a reader of committed records saw:

- *lost*: its transaction is known to be committed, and it is not there;
- *aborted*: its transaction was aborted, or nobody ever asked to commit it, and it is there;
- *torn* (`check_transactions`, when all partitions were read): a transaction of which nobody knows
  how it ended is there in part.

`QueueHistory` is the same for records that are delivered one by one and acknowledged:

- *redelivered*: given out once more after its acknowledgement was confirmed;
- *lost*: neither finished by a consumer nor among the dead letters;
- *buried*: among the dead letters though it was accepted.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from operator import itemgetter
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
    transaction: str | None = None


# How far a transaction is known to have come. From COMMITTING on it may be seen.
_OPEN, _COMMITTING, _COMMITTED, _ABORTED = range(4)


@dataclass(slots=True)
class _PartitionHistory:
    sent: dict[bytes, _Sent] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    # What is at an offset, by the word of an acknowledgement or of a reader.
    known: dict[int, bytes] = field(default_factory=dict)
    # The largest known offset of each key.
    latest: dict[bytes | None, int] = field(default_factory=dict)
    # What a reader of committed records has last seen.
    visible: dict[bytes, int] = field(default_factory=dict)
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
        self._transactions: dict[str, int] = {}

    # ---- writers -------------------------------------------------------------------------

    def sending(
        self,
        producer: str,
        place: Place,
        key: bytes | None,
        value: bytes | None,
        *,
        may_repeat: bool = False,
        transaction: str | None = None,
    ) -> None:
        """Before a record is sent. Records must differ from each other in key or value.

        `may_repeat` is for producers that send again what may have arrived already. A transaction
        has a name of its own, used once.
        """
        digest = digest_of(key, value)
        with self._lock:
            part = self._part(place)
            assert digest not in part.sent, f"{place} was sent this record before: {value!r}"
            number = part.counts.get(producer, 0)
            part.counts[producer] = number + 1
            part.sent[digest] = _Sent(producer, number, may_repeat, transaction)
            if transaction is not None:
                state = self._transactions.setdefault(transaction, _OPEN)
                assert state == _OPEN, f"{transaction} is at its end already"

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

    def committing(self, transaction: str) -> None:
        """Before the broker is asked to commit; without it nothing of it may ever be seen."""
        with self._lock:
            self._transactions[transaction] = _COMMITTING

    def ended(self, transaction: str, *, committed: bool) -> None:
        """The broker has said how the transaction ended."""
        with self._lock:
            before = self._transactions.get(transaction, _OPEN)
            assert before != _OPEN or not committed, f"nobody has asked to commit {transaction}"
            self._transactions[transaction] = _COMMITTED if committed else _ABORTED

    def transaction_counts(self) -> dict[str, int]:
        """How many transactions ended how, as far as is known."""
        names = ("open", "unknown", "committed", "aborted")
        with self._lock:
            states = list(self._transactions.values())
        return {name: states.count(state) for state, name in enumerate(names)}

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
        committed: bool = False,
    ) -> list[Problem]:
        """Everything wrong with what was read, from `log_start` on and at least up to `end`.

        Writers may go on meanwhile. What was read counts as known from now on. `committed`: by a
        reader of committed records, to the end of a partition without open transactions.
        """
        assert not (compacted and committed), "cannot tell what compaction takes of transactions"
        found = list(records)
        with self._lock:
            part = self._part(place)
            problems, part.problems = part.problems, []
            problems += _order_problems(place, part, found)
            problems += _content_problems(place, part, found)
            # First: a record may be gone for one that was read but is not acknowledged yet.
            for item in found:
                part.learn(item.offset, item.key, digest_of(item.key, item.value))
            bounds = _Bounds(log_start, end, compacted)
            if committed:
                problems += self._uncommitted(place, part, found)
                problems += self._missing_committed(place, part, found, bounds)
                digests = {digest_of(item.key, item.value): item.offset for item in found}
                part.visible = digests
            else:
                problems += _missing(place, part, found, bounds)
        return problems

    def check_transactions(self) -> list[Problem]:
        """Once all partitions were checked as `committed`: what is there in part."""
        seen: dict[str, set[bool]] = {}
        where: dict[str, tuple[Place, int]] = {}
        with self._lock:
            for place, part in self._partitions.items():
                for digest, sent in part.sent.items():
                    name = sent.transaction
                    if name is None or self._transactions[name] != _COMMITTING:
                        continue
                    seen.setdefault(name, set()).add(digest in part.visible)
                    if digest in part.visible:
                        where[name] = (place, part.visible[digest])
        return [
            Problem("torn", *where[name], f"part of {name} is there, part is not")
            for name, both in seen.items()
            if len(both) > 1
        ]

    def verify(
        self,
        place: Place,
        records: Iterable[Read],
        *,
        end: int,
        log_start: int = 0,
        compacted: bool = False,
        committed: bool = False,
    ) -> None:
        """`check`, and HistoryError if there is anything wrong."""
        problems = self.check(
            place, records, end=end, log_start=log_start, compacted=compacted, committed=committed
        )
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

    def _state(self, sent: _Sent) -> int:
        return _COMMITTED if sent.transaction is None else self._transactions[sent.transaction]

    def _uncommitted(
        self, place: Place, part: _PartitionHistory, found: list[Read]
    ) -> Iterator[Problem]:
        for item in found:
            sent = part.sent.get(digest_of(item.key, item.value))
            if sent is not None and self._state(sent) in (_OPEN, _ABORTED):
                detail = f"{item.value!r:.60} of {sent.transaction}"
                yield Problem("aborted", place, item.offset, detail)

    def _missing_committed(
        self, place: Place, part: _PartitionHistory, found: list[Read], bounds: _Bounds
    ) -> Iterator[Problem]:
        there = {digest_of(item.key, item.value) for item in found}
        offsets = {digest: offset for offset, digest in part.known.items()}
        for digest, sent in part.sent.items():
            if digest in there or offsets.get(digest, bounds.log_start) < bounds.log_start:
                continue
            # Outside of a transaction only an acknowledgement promises anything.
            promised = self._state(sent) == _COMMITTED and (sent.transaction or digest in offsets)
            if promised or digest in part.visible:
                detail = f"number {sent.number} of {sent.producer} in {sent.transaction}"
                yield Problem("lost", place, offsets.get(digest, -1), detail)

    def _part(self, place: Place) -> _PartitionHistory:
        part = self._partitions.get(place)
        if part is None:
            part = self._partitions[place] = _PartitionHistory()
        return part


@dataclass(slots=True)
class _Delivery:
    """What is known of one record of a queue."""

    # When its acceptance or rejection was confirmed, and which it was.
    confirmed_at: float | None = None
    accepted: bool = False
    # Answers for it that were not refused, whether or not they were confirmed.
    answers: int = 0
    deliveries: int = 0
    # The last that was asked for: by whom, and when.
    consumer: str = ""
    asked_at: float = -math.inf


class QueueHistory:
    """What happened to each record of a share group.

    Times are of one clock, in seconds; what happened may be told in any order.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._records: dict[tuple[Place, int], _Delivery] = {}

    def written(self, place: Place, offset: int) -> None:
        """The broker has acknowledged the record: it must be delivered."""
        with self._lock:
            self._record(place, offset)

    def delivered(self, consumer: str, place: Place, offset: int, *, asked_at: float) -> None:
        """A consumer got the record, with a request that it began at that time."""
        with self._lock:
            record = self._record(place, offset)
            record.deliveries += 1
            if asked_at > record.asked_at:
                record.consumer, record.asked_at = consumer, asked_at

    def answering(self, place: Place, offset: int) -> None:
        """Before a consumer accepts or rejects the record."""
        with self._lock:
            self._record(place, offset).answers += 1

    def refused(self, place: Place, offset: int) -> None:
        """The broker has said that an answer has changed nothing."""
        with self._lock:
            self._record(place, offset).answers -= 1

    def confirmed(self, place: Place, offset: int, *, accepted: bool, at: float) -> None:
        """The broker has confirmed that the record is accepted or rejected."""
        with self._lock:
            record = self._record(place, offset)
            before = record.confirmed_at
            record.confirmed_at = at if before is None else min(at, before)
            record.accepted = record.accepted or accepted

    def unfinished(self) -> int:
        """Records that nobody is known to have finished."""
        with self._lock:
            return sum(record.confirmed_at is None for record in self._records.values())

    @property
    def delivery_count(self) -> int:
        with self._lock:
            return sum(record.deliveries for record in self._records.values())

    def check(self, dead_letters: Collection[tuple[Place, int]]) -> list[Problem]:
        """Everything wrong once the queue is empty; dead letters by where they came from."""
        buried = set(dead_letters)
        problems: list[Problem] = []
        with self._lock:
            for (place, offset), record in sorted(self._records.items(), key=itemgetter(0)):
                if record.confirmed_at is not None and record.asked_at > record.confirmed_at:
                    late_s = record.asked_at - record.confirmed_at
                    detail = f"to {record.consumer}, {late_s:.3f} s after it was finished"
                    problems.append(Problem("redelivered", place, offset, detail))
                if record.accepted and (place, offset) in buried:
                    problems.append(Problem("buried", place, offset, "was accepted"))
                elif (place, offset) in buried:
                    continue
                elif record.confirmed_at is not None and not record.accepted:
                    problems.append(Problem("lost", place, offset, "rejected, but not buried"))
                elif not record.answers:
                    detail = f"delivered {record.deliveries} times, finished by nobody"
                    problems.append(Problem("lost", place, offset, detail))
        problems += [
            Problem("unknown", *where, "nobody has written it")
            for where in sorted(buried - self._records.keys())
        ]
        return problems

    def verify(self, dead_letters: Collection[tuple[Place, int]]) -> None:
        """`check`, and HistoryError if there is anything wrong."""
        problems = self.check(dead_letters)
        if problems:
            raise HistoryError(problems)

    def _record(self, place: Place, offset: int) -> _Delivery:
        return self._records.setdefault((place, offset), _Delivery())


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
