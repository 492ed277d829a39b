"""Transactions in their parts, so that several processes can write into one.

Whoever leads begins: `init` makes the transactional id ours, ends what a predecessor has left open
and fences it. Then, for each transaction, the leader adds the partitions that will be written to
and hands `ids` to the others. They pack batches with these ids, each partition's sequence numbers
from 0 on, and send them (`producing.Sender` with the transactional id); each partition has one
writer. When all have flushed, the leader ends the transaction, and has new ids for the next one.

    transaction = Transaction(cluster, "orders-job", timeout_ms=60_000)
    transaction.init()
    transaction.add_partitions([("orders", 0), ("orders", 1)])
    ...                                   # others write with transaction.ids
    transaction.put("orders.marks", 0, b"batch", b"17")
    transaction.end(commit=True)

Every transaction has an epoch of its own (KIP-890: the broker raises it with the end; where it does
not, we do): a writer that comes too late for its transaction is refused, it cannot write into the
next. Partitions are always added explicitly, which works on every broker. One thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

from penstock.client.connection import GROUP, TRANSACTION, Cluster, Connection
from penstock.client.errors import (
    ClientError,
    FencedError,
    OutcomeUnknownError,
    check,
    refused,
)
from penstock.client.metadata import Metadata, Place
from penstock.client.producing import Sender
from penstock.client.retrying import Tries
from penstock.client.transactions import Ids
from penstock.records.batch import next_sequence
from penstock.records.record import BatchOptions, Record, encode
from penstock.wire import Message
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from penstock.wire.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
)
from penstock.wire.messages.end_txn import EndTxnRequest
from penstock.wire.messages.init_producer_id import InitProducerIdRequest
from penstock.wire.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)

__all__ = ["GroupMember", "Ids", "Transaction", "init_producer"]

TRANSACTION_TIMEOUT_MS: Final = 60_000
# How long a request is repeated.
TIMEOUT_S: Final = 60.0
# From here on several transactions are in one request, for brokers among themselves.
_ADD_PARTITIONS_UP_TO: Final = 3
# From here on offsets are added to the transaction by themselves.
_OFFSETS_UP_TO: Final = 4
# From here on an end raises the epoch.
_BUMPS_FROM: Final = 5
# From this level of the feature on, the first write to a partition adds it: KIP-890.
_FEATURE: Final = "transaction.version"
_ADDED_BY_WRITING_FROM: Final = 2
_NAMED_IDS_FROM: Final = 3
# Answers to an end that do not say whether it has been written.
_UNSETTLED: Final = frozenset(
    (
        ErrorCode.REQUEST_TIMED_OUT,
        ErrorCode.COORDINATOR_NOT_AVAILABLE,
        ErrorCode.CONCURRENT_TRANSACTIONS,
        ErrorCode.UNKNOWN_SERVER_ERROR,
    )
)


@dataclass(frozen=True, slots=True)
class GroupMember:
    """Which member of a group commits offsets; the group refuses one that is not its own."""

    member_id: str = ""
    generation: int = -1
    instance_id: str | None = None


def init_producer(cluster: Cluster, *, timeout_s: float = TIMEOUT_S) -> Ids:
    """Ids for an idempotent producer without transactions."""
    doing = "asking for a producer id"
    request = InitProducerIdRequest(transactional_id=None, transaction_timeout_ms=0x7FFFFFFF)
    tries = Tries(timeout_s)
    while True:
        try:
            told = cluster.any().call(request)
            check(told.error_code, doing)
            return Ids(told.producer_id, told.producer_epoch)
        except ClientError as error:
            tries.pause(error, doing)


class Transaction:
    """A transactional id, and the transaction that is open on it, if one is."""

    def __init__(
        self,
        cluster: Cluster,
        transactional_id: str,
        *,
        timeout_ms: int = TRANSACTION_TIMEOUT_MS,
        retry_s: float = TIMEOUT_S,
        metadata: Metadata | None = None,
    ) -> None:
        self.transactional_id = transactional_id
        self._cluster = cluster
        self._timeout_ms = timeout_ms
        self._retry_s = retry_s
        self._metadata = metadata or Metadata(cluster, timeout_s=retry_s)
        self._ids: Ids | None = None
        # Those of the last transaction, where the epoch is still to be raised.
        self._ended: Ids | None = None
        self._coordinators: dict[int, Connection] = {}
        self._added: set[Place] = set()
        self._adds_by_writing = False
        self._groups: set[str] = set()
        self._sequences: dict[Place, int] = {}

    @property
    def ids(self) -> Ids:
        """What the records of the transaction carry; new ones after each end."""
        if self._ids is None and self._ended is not None:
            self._ids = self._init(self._ended)
            self._ended = None
        if self._ids is None:
            raise ClientError(
                f"the transactional id {self.transactional_id!r} is not ours yet",
                advice="Call init() first, and again after an error at the end of a transaction.",
            )
        return self._ids

    @property
    def is_ours(self) -> bool:
        """Whether there are ids: `init` has been called, and no end has failed since."""
        return self._ids is not None or self._ended is not None

    @property
    def is_open(self) -> bool:
        """Whether something is part of it that must be committed or aborted."""
        return bool(self._added or self._groups)

    def holds(self, place: Place) -> bool:
        """Whether a partition has been added since the last end."""
        return place in self._added

    @property
    def adds_by_writing(self) -> bool:
        """Whether a write makes its partition part of the transaction: nobody need ask before.

        Only where each end raises the epoch, too: so what comes late is refused, and never begins
        a transaction.
        """
        return self._adds_by_writing

    def will_write(self, places: Iterable[Place]) -> None:
        """Partitions that are part of it as soon as a write arrives (`adds_by_writing`).

        To be called before the write is sent: whatever becomes of it, there is something to end.
        """
        self._added.update(places)

    @property
    def partitions(self) -> frozenset[Place]:
        """What has been added since the last end."""
        return frozenset(self._added)

    # ---- beginning -----------------------------------------------------------------------

    def init(self) -> Ids:
        """Take the transactional id: what is open on it is aborted, whoever had it is fenced."""
        self._reset(None)
        self._ids = self._init(Ids(-1, -1))
        self._adds_by_writing = self._is_newest()
        return self._ids

    def _is_newest(self) -> bool:
        """Whether the brokers have agreed on the newer form; if they cannot be asked, the older."""
        with suppress(ClientError):
            coordinator = self._coordinator(TRANSACTION, self.transactional_id)
            raises = coordinator.version_of(EndTxnRequest) >= _BUMPS_FROM
            return raises and coordinator.feature(_FEATURE) >= _ADDED_BY_WRITING_FROM
        return False

    def _init(self, known: Ids) -> Ids:
        request = InitProducerIdRequest(
            transactional_id=self.transactional_id,
            transaction_timeout_ms=self._timeout_ms,
            producer_id=known.producer_id,
            producer_epoch=known.epoch,
        )
        at_least = _NAMED_IDS_FROM if known.producer_id >= 0 else 0
        told = self._ask(
            request, f"taking the transactional id {self.transactional_id!r}", at_least=at_least
        )
        return Ids(told.producer_id, told.producer_epoch)

    def _reset(self, ids: Ids | None) -> None:
        self._ids = ids
        self._ended = None
        self._added.clear()
        self._groups.clear()
        self._sequences.clear()

    # ---- what belongs to it --------------------------------------------------------------

    def add_partitions(self, places: Iterable[Place]) -> None:
        """Make partitions part of the transaction, before anything is written to them."""
        new = sorted(set(places) - self._added)
        if not new:
            return
        topics: dict[str, list[int]] = {}
        for topic, number in new:
            topics.setdefault(topic, []).append(number)
        ids = self.ids
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=self.transactional_id,
            v3_and_below_producer_id=ids.producer_id,
            v3_and_below_producer_epoch=ids.epoch,
            v3_and_below_topics=[
                AddPartitionsToTxnTopic(name=name, partitions=numbers)
                for name, numbers in topics.items()
            ],
        )
        doing = f"adding {_list(new)} to the transaction of {self.transactional_id!r}"

        def code_of(told: Any) -> int:
            codes = {
                part.partition_error_code
                for topic in told.results_by_topic_v3_and_below
                for part in topic.results_by_partition
            }
            # This one only says that another partition is at fault.
            real = codes - {0, ErrorCode.OPERATION_NOT_ATTEMPTED}
            return next(iter(real), max(codes, default=0))

        self._ask(request, doing, at_most=_ADD_PARTITIONS_UP_TO, code_of=code_of)
        self._added.update(new)

    def send_offsets(
        self, group: str, offsets: Mapping[Place, int], member: GroupMember | None = None
    ) -> None:
        """Offsets that become the group's when the transaction is committed, and never else."""
        who = member or GroupMember()
        ids = self.ids
        doing = f"adding offsets of {group!r} to the transaction of {self.transactional_id!r}"
        if group not in self._groups:
            add = AddOffsetsToTxnRequest(
                transactional_id=self.transactional_id,
                producer_id=ids.producer_id,
                producer_epoch=ids.epoch,
                group_id=group,
            )
            self._ask(add, doing)
            self._groups.add(group)
        topics: dict[str, list[TxnOffsetCommitRequestPartition]] = {}
        for (topic, number), offset in offsets.items():
            item = TxnOffsetCommitRequestPartition(
                partition_index=number, committed_offset=offset, committed_metadata=""
            )
            topics.setdefault(topic, []).append(item)
        request = TxnOffsetCommitRequest(
            transactional_id=self.transactional_id,
            group_id=group,
            producer_id=ids.producer_id,
            producer_epoch=ids.epoch,
            generation_id=who.generation,
            member_id=who.member_id,
            group_instance_id=who.instance_id,
            topics=[
                TxnOffsetCommitRequestTopic(name=name, partitions=items)
                for name, items in topics.items()
            ],
        )

        def code_of(told: Any) -> int:
            codes = (part.error_code for topic in told.topics for part in topic.partitions)
            return next(filter(None, codes), 0)

        self._ask(request, doing, kind=GROUP, key=group, at_most=_OFFSETS_UP_TO, code_of=code_of)

    def put(
        self,
        topic: str,
        partition: int,
        key: bytes | None,
        value: bytes | None,
        *,
        headers: Sequence[tuple[str, bytes | None]] = (),
        timestamp_ms: int | None = None,
    ) -> None:
        """Write one record into the transaction, such as a marker of what it contains.

        Only to partitions to which nobody else writes in this transaction.
        """
        place = (topic, partition)
        self.add_partitions([place])
        ids, sequence = self.ids, self._sequences.get(place, 0)
        now_ms = time.time_ns() // 1_000_000
        record = Record(0, now_ms if timestamp_ms is None else timestamp_ms, key, value)
        batch = encode(
            [record._replace(headers=tuple(headers))],
            BatchOptions(
                producer_id=ids.producer_id,
                producer_epoch=ids.epoch,
                base_sequence=sequence,
                transactional=True,
            ),
        )
        with Sender(
            self._cluster,
            transactional_id=self.transactional_id,
            timeout_s=self._retry_s,
            metadata=self._metadata,
        ) as sender:
            sender.send(topic, partition, batch)
        self._sequences[place] = next_sequence(sequence, 1)

    # ---- ending --------------------------------------------------------------------------

    def end(self, *, commit: bool, retry_s: float | None = None) -> Ids:
        """Commit or abort; on return it is decided for good. The ids for the next transaction.

        FencedError, or another RefusedError: it was not committed. OutcomeUnknownError: nobody
        answered, and it may or may not have been. After any of these, `init` begins anew.
        """
        ids = self.ids
        if not self.is_open:
            return ids
        word = "committing" if commit else "aborting"
        doing = f"{word} the transaction of {self.transactional_id!r}"
        request = EndTxnRequest(
            transactional_id=self.transactional_id,
            producer_id=ids.producer_id,
            producer_epoch=ids.epoch,
            committed=commit,
        )
        try:
            limit_s = self._retry_s if retry_s is None else retry_s
            told, version = self._end(request, doing, limit_s, commit=commit)
        except ClientError:
            self._reset(None)
            raise
        if version >= _BUMPS_FROM:
            self._reset(Ids(told.producer_id, told.producer_epoch))
            return self.ids
        self._reset(None)
        self._ended = ids
        # It is decided already: if this fails, whoever needs the ids next tries again.
        with suppress(ClientError):
            return self.ids
        return ids

    def _end(
        self, request: EndTxnRequest, doing: str, limit_s: float, *, commit: bool
    ) -> tuple[Any, int]:
        """Ask until there is an answer that says what has become of it."""
        tries = Tries(limit_s)
        may_have_happened = False
        while True:
            try:
                coordinator = self._coordinator(TRANSACTION, self.transactional_id)
                version = coordinator.version_of(EndTxnRequest)
                try:
                    told = coordinator.call(request)
                except ClientError:
                    may_have_happened = True
                    raise
                may_have_happened |= told.error_code in _UNSETTLED
                if commit and told.error_code == ErrorCode.INVALID_TXN_STATE:
                    # A commit that had been written before would be confirmed.
                    may_have_happened = False
                    raise FencedError(doing, told.error_code, "it was aborted by its timeout")
                check(told.error_code, doing)
                return told, version
            except ClientError as error:
                self._coordinators.clear()
                unknown = may_have_happened and commit
                try:
                    tries.pause(error, doing)
                except ClientError as final:
                    if unknown:
                        raise OutcomeUnknownError(
                            f"{doing}: whether it was committed is not known; {final}"
                        ) from final
                    raise

    # ---- asking --------------------------------------------------------------------------

    def _coordinator(self, kind: int, key: str) -> Connection:
        known = self._coordinators.get(kind)
        if known is None or not known.is_open or kind == GROUP:
            known = self._coordinators[kind] = self._cluster.coordinator(kind, key)
        return known

    def _ask(
        self,
        request: Message,
        doing: str,
        *,
        kind: int = TRANSACTION,
        key: str | None = None,
        at_least: int = 0,
        at_most: int | None = None,
        code_of: Callable[[Any], int] = lambda told: int(told.error_code),
    ) -> Any:
        """Ask the coordinator until it answers, wherever it moves."""
        tries = Tries(self._retry_s)
        while True:
            try:
                coordinator = self._coordinator(kind, key or self.transactional_id)
                told = coordinator.call(request, at_least=at_least, at_most=at_most)
                code = code_of(told)
                if code == ErrorCode.INVALID_PRODUCER_ID_MAPPING:
                    raise FencedError(doing, code, "the id has expired, or is another's now")
                if code:
                    raise refused(doing, code)
                return told
            except ClientError as error:
                if getattr(error, "code", None) != ErrorCode.CONCURRENT_TRANSACTIONS:
                    self._coordinators.clear()
                tries.pause(error, doing)


def _list(places: Sequence[Place]) -> str:
    shown = ", ".join(f"{topic}-{number}" for topic, number in places[:3])
    return shown + (f" and {len(places) - 3} more" if len(places) > 3 else "")
