"""Who may write in which transaction, and what was decided, as a pure state machine.

Theory. A producer with a transactional id first asks for its ids (`init`), which fences whoever
had the transactional id before and aborts the transaction that was left open. Then it writes: each
partition, and each group whose offsets it commits, becomes a part of its transaction, because it
says so first (`add_partitions`, `add_group`) or by the first write to it (`admit_write` and
`admit_offsets` with `implicit`, KIP-890). At last it ends the transaction (`end`).

An end is a *decision*. It is carried out in three steps, by `markers`: the decision is durable;
each partition has a marker that ends the transaction there; `complete` closes it. Whatever happens
between them, a decided transaction is `undone` until it is complete, and is carried out again from
the start: a second marker does no harm.

What is waited for. Opening a transaction and adding to it is written to the journal without
waiting for the disk: the journal keeps its order, so the decision, which is waited for, covers
them. If the newest entries may be lost (`begin` with `lost`) nobody knows what else a producer was
told, so every producer is fenced and every transaction aborted that was open: its producer sees an
error instead of a commit of one half. The exception is an *enduring* transaction (KIP-939), which
somebody else decides. There everything is waited for before it is acknowledged, and it stays open,
over any loss and for any time, until it is decided.

Nor is a completion waited for. If it is lost the transaction is carried out again, and must not be
taken for the next one of its producer, which may have begun by then. In the newer form the two
have different epochs. In the older form they have the same, so there `add_partitions` and
`add_group` are to be asked only when everything before is durable, if they open a transaction.

Commands return codes and entries and change nothing but deadlines, which are checked again when
they have come.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

from penstock.broker.catalog import Topic
from penstock.broker.journal import Entry, Key
from penstock.broker.timers import Timers
from penstock.broker.transactions.state import (
    COMPLETE,
    DECIDED,
    LAST_EPOCH,
    NO_IDS,
    Ids,
    State,
    Transaction,
)
from penstock.wire.errors import ErrorCode

MAX_NAME_LENGTH: Final = 1_000
# Groups whose offsets one transaction commits.
MAX_GROUPS: Final = 1_000
# How often ids are looked for that nobody uses any more.
EXPIRY_INTERVAL_MS: Final = 600_000
# When something that was due is tried again, in case it could not be written.
_AGAIN_MS: Final = 1_000
_KIND: Final = "txn"
_EXPIRY: Final = ("expiry", "")


@dataclass(frozen=True, slots=True)
class TransactionSettings:
    """What the broker allows; names and defaults are Kafka's where Kafka has them."""

    max_timeout_ms: int = 900_000
    expiration_ms: int = 7 * 86_400_000
    two_phase_commit: bool = True
    max_transactional_ids: int = 50_000


class Then(Enum):
    """What is to be done after a command."""

    ANSWER = "answer"
    # A transaction is decided: carry it out first.
    FINISH = "finish"
    # A new producer id is needed: ask again with one.
    NEW_ID = "new id"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command came to."""

    then: Then = Then.ANSWER
    code: ErrorCode = ErrorCode.NONE
    ids: Ids = NO_IDS
    # What the records of a transaction carry that was kept for its producer to end.
    ongoing: Ids = NO_IDS
    entries: tuple[Entry, ...] = ()


@dataclass(frozen=True, slots=True)
class InitRequest:
    """What a producer asks for when it begins."""

    name: str
    timeout_ms: int
    # What it held before, if it says so: KIP-360.
    expected: Ids | None = None
    two_phase: bool = False
    keep_prepared: bool = False


Admission = tuple[ErrorCode, list[Entry]]


class TransactionCoordinator:
    """The transactions of one broker."""

    kinds: Final = frozenset({_KIND})

    def __init__(self, settings: TransactionSettings | None = None) -> None:
        self.settings = settings or TransactionSettings()
        self.transactions: dict[str, Transaction] = {}
        # Decided, and not carried out yet.
        self.undone: set[str] = set()
        self._timers: Timers[tuple[str, str]] = Timers()

    # ---- replay --------------------------------------------------------------------------

    def replay(self, key: Key, value: Any) -> None:
        """Apply one entry."""
        name = str(key[1])
        self.undone.discard(name)
        if value is None:
            self.transactions.pop(name, None)
            self._timers.cancel(("timeout", name))
            return
        txn = self.transactions[name] = Transaction.from_json(name, value)
        if txn.state in DECIDED:
            self.undone.add(name)
        if txn.state != State.ONGOING or txn.enduring:
            self._timers.cancel(("timeout", name))

    def reset(self) -> None:
        """Be as new: everything is about to be replayed."""
        self.transactions.clear()
        self.undone.clear()
        self._timers.clear()

    def begin(self, now_ms: int, elapsed_ms: int, *, lost: bool) -> Iterable[Entry]:
        """Everything is replayed: deadlines go on; after a loss nobody is believed any more."""
        self._timers.set(_EXPIRY, elapsed_ms + EXPIRY_INTERVAL_MS)
        entries: list[Entry] = []
        for txn in self.transactions.values():
            if lost and not txn.endures:
                entries += self._fenced(txn, now_ms)
            elif txn.state == State.ONGOING and not txn.enduring:
                passed_ms = min(max(now_ms - txn.started_ms, 0), txn.timeout_ms)
                self._timers.set(("timeout", txn.name), elapsed_ms + txn.timeout_ms - passed_ms)
        return entries

    def _fenced(self, txn: Transaction, now_ms: int) -> Iterator[Entry]:
        if txn.state == State.ONGOING:
            yield _entry(_aborted(txn, now_ms))
        elif txn.ids.epoch <= LAST_EPOCH and (txn.bumped or txn.state not in DECIDED):
            # A decided one is carried out as it was decided. Who repeats its end is told so, and
            # goes on from here: it has begun nothing since.
            ids = Ids(txn.ids.producer_id, txn.ids.epoch + 1)
            yield _entry(replace(txn, ids=ids, last_epoch=txn.last_epoch if txn.bumped else -1))

    def topic_deleted(self, topic: Topic) -> Iterable[Entry]:
        """Its partitions are no longer part of any transaction."""
        return [
            _entry(txn.without_topic(topic.id))
            for txn in self.transactions.values()
            if topic.id in txn.partitions
        ]

    # ---- time ----------------------------------------------------------------------------

    def tick(self, now_ms: int, elapsed_ms: int) -> Iterable[Entry]:
        """Abort what was open for too long; forget who was silent for too long."""
        entries: list[Entry] = []
        for kind, name in self._timers.due(elapsed_ms):
            if (kind, name) == _EXPIRY:
                self._timers.set(_EXPIRY, elapsed_ms + EXPIRY_INTERVAL_MS)
                entries += self._expired(now_ms)
                continue
            txn = self.transactions.get(name)
            if txn is not None and txn.state == State.ONGOING and not txn.enduring:
                # If the entry cannot be written it stays due; once it is written this is off.
                self._timers.set((kind, name), elapsed_ms + _AGAIN_MS)
                entries.append(_entry(_timed_out(txn, now_ms)))
        return entries

    def _expired(self, now_ms: int) -> list[Entry]:
        oldest_ms = now_ms - self.settings.expiration_ms
        return [
            ((_KIND, txn.name), None)
            for txn in self.transactions.values()
            if _is_idle(txn) and txn.updated_ms <= oldest_ms
        ]

    @property
    def next_due_ms(self) -> int | None:
        return self._timers.next_ms

    # ---- beginning -----------------------------------------------------------------------

    def init(self, request: InitRequest, *, fresh_id: int | None, now_ms: int) -> Outcome:
        """Give a producer its ids. `Then.FINISH`: carry out, then ask again.

        `fresh_id` is a producer id that nobody has; it is taken if one is needed.
        """
        name = request.name
        if not name or len(name) > MAX_NAME_LENGTH:
            return Outcome(code=ErrorCode.INVALID_REQUEST)
        if request.two_phase and not self.settings.two_phase_commit:
            return Outcome(code=ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
        if not request.two_phase and not 0 < request.timeout_ms <= self.settings.max_timeout_ms:
            return Outcome(code=ErrorCode.INVALID_TRANSACTION_TIMEOUT)
        txn = self.transactions.get(name)
        if txn is None:
            return self._init_new(request, fresh_id, now_ms)
        if request.expected is not None and not _may_be(txn, request.expected):
            return Outcome(code=ErrorCode.PRODUCER_FENCED)
        if txn.state in DECIDED:
            return Outcome(Then.FINISH)
        if txn.state != State.ONGOING:
            return self._init_next(request, txn, fresh_id, now_ms)
        if request.keep_prepared:
            return self._init_keeping(request, txn, fresh_id, now_ms)
        if request.expected is not None and request.expected.epoch != txn.ids.epoch:
            return Outcome(code=ErrorCode.PRODUCER_FENCED)
        aborted = _aborted(txn, now_ms)
        if request.expected is not None:
            # It goes on after its own mistake: it will ask again with the epoch it has.
            aborted = replace(aborted, last_epoch=txn.ids.epoch)
        return Outcome(Then.FINISH, entries=(_entry(aborted),))

    def _init_new(self, request: InitRequest, fresh_id: int | None, now_ms: int) -> Outcome:
        if fresh_id is None:
            return Outcome(Then.NEW_ID)
        entries: list[Entry] = []
        most = self.settings.max_transactional_ids
        if len(self.transactions) >= most:
            # The longest idle ones make room: a tenth, so that not each newcomer searches.
            idle = sorted(filter(_is_idle, self.transactions.values()), key=lambda t: t.updated_ms)
            entries += [((_KIND, txn.name), None) for txn in idle[: max(1, most // 10)]]
            if not entries:
                return Outcome(code=ErrorCode.POLICY_VIOLATION)
        txn = Transaction(request.name, Ids(fresh_id, 0))
        return _given(_as_asked(txn, request, now_ms), before=entries)

    def _init_next(
        self, request: InitRequest, txn: Transaction, fresh_id: int | None, now_ms: int
    ) -> Outcome:
        """Nothing is open: the next epoch, or a new producer id when there is none left."""
        expected = request.expected
        ids, last_epoch = txn.ids, -1 if expected is None else expected.epoch
        # It asks once more for what it has been given.
        again = expected is not None and last_epoch == txn.last_epoch and last_epoch != ids.epoch
        if expected is not None and not again and last_epoch != ids.epoch:
            return Outcome(code=ErrorCode.PRODUCER_FENCED)
        if again and ids.epoch <= LAST_EPOCH:
            pass
        elif txn.is_exhausted:
            if fresh_id is None:
                return Outcome(Then.NEW_ID)
            ids = Ids(fresh_id, 0)
        else:
            ids = Ids(ids.producer_id, ids.epoch + 1)
        given = replace(
            txn, ids=ids, state=State.EMPTY, last_epoch=last_epoch, bumped=False, started_ms=-1,
            previous_id=txn.previous_id if ids == txn.ids else txn.ids.producer_id,
        )  # fmt: skip
        return _given(_as_asked(given, request, now_ms))

    def _init_keeping(
        self, request: InitRequest, txn: Transaction, fresh_id: int | None, now_ms: int
    ) -> Outcome:
        """Somebody resumes an open transaction to end it: the one before is fenced from it."""
        if request.expected is not None and request.expected.epoch != txn.ids.epoch:
            return Outcome(code=ErrorCode.PRODUCER_FENCED)
        ids = Ids(txn.ids.producer_id, txn.ids.epoch + 1)
        if txn.is_exhausted:
            if fresh_id is None:
                return Outcome(Then.NEW_ID)
            ids = Ids(fresh_id, 0)
        kept = replace(
            txn,
            ids=ids,
            written=txn.txn_ids,
            enduring=txn.enduring or request.two_phase,
            last_epoch=-1,
            previous_id=txn.ids.producer_id,
        )
        return _given(_as_asked(kept, request, now_ms))

    # ---- writing -------------------------------------------------------------------------

    def admit_write(
        self,
        name: str,
        ids: Ids,
        topic: Topic,
        number: int,
        *,
        implicit: bool,
        now_ms: int,
        elapsed_ms: int,
        others: Iterable[tuple[Topic, int]] = (),
    ) -> Admission:
        """Whether a batch of the transaction may go to this partition.

        `implicit`: if the partition is not part of the transaction yet, it is now, and so are
        `others`, which are about to be written to.
        """
        txn = self._of(name, ids)
        if isinstance(txn, ErrorCode):
            return _as_producer_sees(txn), []
        if txn.state == State.ONGOING and txn.holds(topic.id, number):
            return ErrorCode.NONE, []
        if not implicit:
            return ErrorCode.TRANSACTION_ABORTABLE, []
        opened = self._opened(txn, now_ms, elapsed_ms)
        return ErrorCode.NONE, [_entry(opened.with_partitions([(topic, number), *others]))]

    def admit_offsets(
        self, name: str, ids: Ids, group: str, *, implicit: bool, now_ms: int, elapsed_ms: int
    ) -> Admission:
        """Whether offsets of the group may be committed in the transaction."""
        txn = self._of(name, ids)
        if isinstance(txn, ErrorCode):
            return _as_producer_sees(txn), []
        if txn.state == State.ONGOING and group in txn.groups:
            return ErrorCode.NONE, []
        if not implicit:
            return ErrorCode.TRANSACTION_ABORTABLE, []
        return self.add_group(name, ids, group, now_ms=now_ms, elapsed_ms=elapsed_ms)

    def add_partitions(
        self,
        name: str,
        ids: Ids,
        partitions: list[tuple[Topic, int]],
        *,
        now_ms: int,
        elapsed_ms: int,
    ) -> Admission:
        txn = self._of(name, ids)
        if isinstance(txn, ErrorCode):
            return txn, []
        ongoing = txn.state == State.ONGOING
        if ongoing and all(txn.holds(topic.id, number) for topic, number in partitions):
            return ErrorCode.NONE, []
        changed = self._opened(txn, now_ms, elapsed_ms).with_partitions(partitions)
        return ErrorCode.NONE, [_entry(changed)]

    def add_group(
        self, name: str, ids: Ids, group: str, *, now_ms: int, elapsed_ms: int
    ) -> Admission:
        txn = self._of(name, ids)
        if isinstance(txn, ErrorCode):
            return txn, []
        if txn.state == State.ONGOING and group in txn.groups:
            return ErrorCode.NONE, []
        opened = self._opened(txn, now_ms, elapsed_ms)
        if len(opened.groups) >= MAX_GROUPS:
            return ErrorCode.INVALID_REQUEST, []
        return ErrorCode.NONE, [_entry(replace(opened, groups=opened.groups | {group}))]

    def holds(self, name: str, ids: Ids, topic: Topic, number: int) -> ErrorCode:
        """Whether a partition is part of the open transaction; nothing is added."""
        txn = self._of(name, ids)
        if isinstance(txn, ErrorCode):
            return txn
        held = txn.state == State.ONGOING and txn.holds(topic.id, number)
        return ErrorCode.NONE if held else ErrorCode.TRANSACTION_ABORTABLE

    def would_open(self, name: str) -> bool:
        """Whether what is added next begins a transaction."""
        txn = self.transactions.get(name)
        return txn is not None and txn.state != State.ONGOING

    def endures(self, name: str) -> bool:
        """Whether what is done in its transaction must be durable before it is acknowledged."""
        txn = self.transactions.get(name)
        return txn is not None and txn.endures

    def _of(self, name: str, ids: Ids) -> Transaction | ErrorCode:
        """The transactional id, if these are its ids and its producer may write now."""
        txn = self.transactions.get(name)
        if not name:
            return ErrorCode.INVALID_REQUEST
        if txn is None or txn.ids.producer_id != ids.producer_id:
            return ErrorCode.INVALID_PRODUCER_ID_MAPPING
        if txn.ids.epoch != ids.epoch:
            return ErrorCode.PRODUCER_FENCED
        if txn.state in DECIDED:
            return ErrorCode.CONCURRENT_TRANSACTIONS
        if txn.is_kept:
            return ErrorCode.INVALID_TXN_STATE
        return txn

    def _opened(self, txn: Transaction, now_ms: int, elapsed_ms: int) -> Transaction:
        if txn.state != State.ONGOING and not txn.two_phase:
            self._timers.set(("timeout", txn.name), elapsed_ms + txn.timeout_ms)
        return txn.opened(now_ms)

    # ---- ending --------------------------------------------------------------------------

    def end(
        self,
        name: str,
        ids: Ids,
        *,
        commit: bool,
        bumps: bool,
        fresh_id: int | None,
        now_ms: int,
    ) -> Outcome:
        """Decide. `Then.FINISH`: carry out, then answer with the ids.

        `bumps`: the producer takes a new epoch with the answer (KIP-890).
        """
        if not name:
            return Outcome(code=ErrorCode.INVALID_REQUEST)
        txn = self.transactions.get(name)
        if txn is None:
            return Outcome(code=ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        repeated = _is_repeated_end(txn, ids) if bumps else txn.state != State.ONGOING
        if bumps and repeated:
            return _end_again(txn, commit=commit)
        if txn.ids.producer_id != ids.producer_id:
            return Outcome(code=ErrorCode.INVALID_PRODUCER_ID_MAPPING)
        if txn.ids.epoch != ids.epoch:
            return Outcome(code=ErrorCode.PRODUCER_FENCED)
        if repeated:
            return _end_again(txn, commit=commit)
        if txn.state in DECIDED:
            # Its producer has the ids of after this end already: it is not told of it twice.
            return Outcome(code=ErrorCode.CONCURRENT_TRANSACTIONS)
        if txn.state != State.ONGOING:
            if commit:
                return Outcome(code=ErrorCode.INVALID_TXN_STATE)
            # Nothing is open. The epoch is raised all the same: something may be on its way.
            txn = txn.opened(now_ms)
        if not bumps:
            next_ids = txn.ids
        elif txn.is_exhausted:
            if fresh_id is None:
                return Outcome(Then.NEW_ID)
            next_ids = Ids(fresh_id, 0)
        else:
            next_ids = Ids(txn.ids.producer_id, txn.ids.epoch + 1)
        decided = txn.decided(commit=commit, ids=next_ids, bumped=bumps, now_ms=now_ms)
        return Outcome(Then.FINISH, ids=next_ids, entries=(_entry(decided),))

    def complete(self, name: str, now_ms: int) -> list[Entry]:
        """Its markers are in the partitions: it is over."""
        txn = self.transactions.get(name)
        return [_entry(txn.completed(now_ms))] if txn is not None and txn.state in DECIDED else []

    # ---- what is left in partitions ------------------------------------------------------

    def adopt(self, topic: Topic, number: int, ids: Ids, now_ms: int) -> tuple[bool, list[Entry]]:
        """A partition has an open transaction of these ids: whether it is one of ours.

        Its producer had been admitted, but the entry that says so may have been lost. To be
        asked when what was decided is carried out.
        """
        for txn in self.transactions.values():
            if txn.txn_ids.producer_id != ids.producer_id:
                continue
            if txn.holds(topic.id, number) and txn.txn_ids == ids:
                return True, []
            if txn.state == State.ONGOING and txn.txn_ids == ids:
                return True, [_entry(txn.with_partitions([(topic, number)]))]
            if _is_idle(txn) and txn.endures and txn.ids == ids:
                # Its first write: not acknowledged yet, and about to be repeated.
                return True, [_entry(txn.opened(now_ms).with_partitions([(topic, number)]))]
        return False, []

    # ---- questions -----------------------------------------------------------------------

    def listed(
        self,
        *,
        states: Iterable[str] = (),
        producer_ids: Iterable[int] = (),
        longer_than_ms: int = -1,
        matches: Callable[[str], bool] = lambda _name: True,
        now_ms: int,
    ) -> list[Transaction]:
        """Those that pass all filters; an empty filter lets everything pass."""
        wanted_states, wanted_ids = frozenset(states), frozenset(producer_ids)
        return [
            txn
            for txn in self.transactions.values()
            if (not wanted_states or txn.state in wanted_states)
            and (not wanted_ids or txn.shown_ids.producer_id in wanted_ids)
            and (longer_than_ms < 0 or now_ms - txn.started_ms > longer_than_ms)
            and matches(txn.name)
        ]


def _entry(txn: Transaction) -> Entry:
    return (_KIND, txn.name), txn.to_json()


def _given(txn: Transaction, *, before: Iterable[Entry] = ()) -> Outcome:
    ongoing = txn.txn_ids if txn.is_kept else NO_IDS
    return Outcome(ids=txn.ids, ongoing=ongoing, entries=(*before, _entry(txn)))


def _as_asked(txn: Transaction, request: InitRequest, now_ms: int) -> Transaction:
    timeout_ms = txn.timeout_ms if request.two_phase else request.timeout_ms
    return replace(txn, timeout_ms=timeout_ms, two_phase=request.two_phase, updated_ms=now_ms)


def _aborted(txn: Transaction, now_ms: int) -> Transaction:
    """Aborted without its producer's knowledge, which is fenced thereby."""
    ids = Ids(txn.ids.producer_id, txn.ids.epoch + 1)
    decided = txn.decided(commit=False, ids=ids, bumped=False, now_ms=now_ms)
    return replace(decided, last_epoch=-1)


def _timed_out(txn: Transaction, now_ms: int) -> Transaction:
    """Aborted because it took too long.

    Its producer can write nothing more with its epoch. As in Kafka it may go on with the next
    one, which it is given if it aborts in the newer form or says who it was: nobody has replaced
    it.
    """
    if txn.is_exhausted:
        return _aborted(txn, now_ms)
    ids = Ids(txn.ids.producer_id, txn.ids.epoch + 1)
    return txn.decided(commit=False, ids=ids, bumped=True, now_ms=now_ms)


def _is_idle(txn: Transaction) -> bool:
    return txn.state == State.EMPTY or txn.state in COMPLETE


def _may_be(txn: Transaction, expected: Ids) -> bool:
    """Whether the ids that a producer says it has can be this transactional id's."""
    return expected.producer_id == txn.ids.producer_id or (
        expected.producer_id == txn.previous_id and expected.epoch >= LAST_EPOCH
    )


def _is_repeated_end(txn: Transaction, ids: Ids) -> bool:
    """Whether the producer that had these ids was given its next ones by an end."""
    return txn.bumped and ids == (txn.previous_id, txn.last_epoch)


def _end_again(txn: Transaction, *, commit: bool) -> Outcome:
    """The producer did not hear the answer to its end, or decides where there is nothing."""
    same = (
        (State.PREPARE_COMMIT, State.COMPLETE_COMMIT)
        if commit
        else (State.PREPARE_ABORT, State.COMPLETE_ABORT)
    )
    if txn.state not in same:
        return Outcome(code=ErrorCode.INVALID_TXN_STATE)
    return Outcome(Then.FINISH if txn.state in DECIDED else Then.ANSWER, ids=txn.ids)


def _as_producer_sees(code: ErrorCode) -> ErrorCode:
    """Produce and TxnOffsetCommit know fencing by its older name."""
    return ErrorCode.INVALID_PRODUCER_EPOCH if code == ErrorCode.PRODUCER_FENCED else code
