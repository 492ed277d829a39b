"""Decisions carried out: markers into the partitions, then the completion into the journal.

For each decided transaction, in this order and again from the start wherever it fails:

1. the decision is durable. Before that no marker may be anywhere: a crash would leave a
   transaction that is committed in one partition and aborted in the next;
2. every partition of it gets a marker, and all of them are synced. That goes for a partition that
   was named and not written to as well: what its producer sent there before, and which comes only
   now, must not be taken any more. One whose disk refuses keeps no other from getting its marker,
   and those that have it get no second one when this is tried again;
3. one batch of the journal completes it: the transaction, and the offsets that it carried.

A transaction is carried out by one task at a time, whoever waits for it. It begins by itself when
something was decided: by a producer, by a deadline, by a replay of the journal.

At a start there may also be transactions open in partitions of which the journal does not know:
the entry was lost with the power. They belong to a transaction that is still open there, and are
made part of it, or to nobody, and are aborted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from penstock.broker.journal import Entry
from penstock.broker.transactions.state import Ids, State, Transaction
from penstock.errors import LogError, StorageError
from penstock.log.partition import Partition
from penstock.log.producers import ProducerStates

if TYPE_CHECKING:
    from penstock.broker.server import Broker

log = logging.getLogger(__name__)

# How long a client waits for an end before it is told to ask again.
PATIENCE_S: Final = 10.0
# How long a start waits for what cannot be carried out now, before it goes on in the background.
START_PATIENCE_S: Final = 30.0
_PAUSE_AFTER_FAILURE_S: Final = 1.0
# After so many partitions others have their turn.
_PARTITIONS_AT_ONCE: Final = 100


@dataclass(slots=True)
class _Marked:
    """The partitions that have the marker of a transaction."""

    txn: Transaction
    # How often each had been repaired by then.
    repairs: dict[Partition, int] = field(default_factory=dict)

    def has(self, partition: Partition) -> bool:
        return self.repairs.get(partition) == partition.repairs


class Markers:
    """Carries out what the transaction coordinator has decided."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._tasks: set[str] = set()
        # Of those that are being carried out.
        self._marked: dict[str, _Marked] = {}
        # Whether what is left over is to be looked for once more.
        self._again = False
        self._recovering = False
        self._waiting: dict[str, list[asyncio.Future[StorageError | None]]] = {}

    # ---- decided transactions ------------------------------------------------------------

    def start(self) -> None:
        """Carry out everything that is decided and not under way yet."""
        for name in self._broker.coordination.transactions.undone - self._tasks:
            self._tasks.add(name)
            self._broker.spawn(self._carry_out(name))

    async def finished(self, name: str, patience_s: float = PATIENCE_S) -> None:
        """Wait until nothing of this transactional id is decided and not carried out.

        StorageError if a disk refuses for now, TimeoutError if it takes too long; it goes on.
        """
        transactions = self._broker.coordination.transactions
        if name not in transactions.undone:
            return
        self.start()
        outcome: asyncio.Future[StorageError | None] = self._broker.loop.create_future()
        self._waiting.setdefault(name, []).append(outcome)
        async with asyncio.timeout(patience_s):
            error = await outcome
        if error is not None:
            raise error

    async def _carry_out(self, name: str) -> None:
        transactions = self._broker.coordination.transactions
        try:
            while name in transactions.undone:
                try:
                    await self._attempt(name)
                except StorageError as error:
                    self._broker.warn_now_and_then(f"ending a transaction of {name!r}", error)
                    self._tell(name, error)
                    await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
        finally:
            self._tasks.discard(name)
            self._marked.pop(name, None)
            # Left is who waited for a decision that was lost with the journal's disk.
            self._tell(name, StorageError("the state was read again from the journal"))

    def _tell(self, name: str, error: StorageError | None) -> None:
        for outcome in self._waiting.pop(name, ()):
            # Whoever waited may have lost patience.
            if not outcome.done():
                outcome.set_result(error)

    async def _attempt(self, name: str) -> None:
        coordination = self._broker.coordination
        await self._decision_durable()
        txn = coordination.transactions.transactions.get(name)
        if txn is None or name not in coordination.transactions.undone:
            return
        await self._end_in_partitions(txn)
        self._complete(txn)
        self._tell(name, None)

    async def _decision_durable(self) -> None:
        await self._broker.coordination.journal.durable()

    async def _end_in_partitions(self, txn: Transaction) -> None:
        assert txn.marker is not None
        marked = self._marked.get(txn.name)
        if marked is None or marked.txn != txn:
            marked = self._marked[txn.name] = _Marked(txn)
        commit = txn.state == State.PREPARE_COMMIT
        partitions = (one for one in self._unended(txn) if not marked.has(one))
        await self.write(partitions, txn.marker, commit=commit, marked=marked)

    def _unended(self, txn: Transaction) -> Iterable[Partition]:
        """Its partitions that may still be without its marker."""
        broker = self._broker
        for topic_id, parts in txn.partitions.items():
            for number in sorted(parts.numbers):
                if topic_id not in broker.catalog.by_id:
                    break
                partition = broker.partition(parts.topic, number)
                if partition is not None and not has_ended(txn, partition.producers):
                    yield partition

    def _complete(self, txn: Transaction) -> None:
        assert txn.marker is not None
        coordination = self._broker.coordination
        now_ms = self._broker.clock.now_ms()
        entries: list[Entry] = []
        if txn.groups:
            commit = txn.state == State.PREPARE_COMMIT
            entries += coordination.groups.finish_transaction(
                txn.marker.producer_id, commit, now_ms
            )
        # Last: if all this is more than a batch holds, what is missing after a crash is done again.
        entries += coordination.transactions.complete(txn.name, now_ms)
        coordination.put_off(entries)

    async def write(
        self,
        partitions: Iterable[Partition],
        ids: Ids,
        *,
        commit: bool,
        marked: _Marked | None = None,
    ) -> None:
        """Put a marker into each partition; all are synced on return.

        StorageError if a disk refused; all others have their marker then, too.
        """
        written: dict[Partition, int] = {}
        failure: StorageError | None = None
        for count, partition in enumerate(partitions, 1):
            try:
                if self._write_one(partition, ids, commit=commit):
                    written[partition] = partition.repairs
            except StorageError as error:
                failure = failure or (None if partition.gone else error)
            if not count % _PARTITIONS_AT_ONCE:
                await asyncio.sleep(0)
        for partition, repairs in written.items():
            try:
                await self._broker.sync_waiters.synced(partition)
            except StorageError as error:
                failure = failure or (None if partition.gone else error)
            else:
                if marked is not None:
                    marked.repairs[partition] = repairs
        if failure is not None:
            raise failure

    async def write_as_told(
        self, partition: Partition, ids: Ids, *, commit: bool, coordinator_epoch: int
    ) -> None:
        """A marker that somebody asked for, whatever is known here; LogError if it cannot be."""
        self._put(partition, ids, commit, coordinator_epoch)
        await self._broker.sync_waiters.synced(partition)

    def _write_one(self, partition: Partition, ids: Ids, *, commit: bool) -> bool:
        if partition.damaged:
            # It refuses writes for good, and nobody else may wait for it.
            if ids.producer_id in partition.producers.open:
                log.error("%s is damaged: a transaction stays open there", partition.id)
            return False
        # Nobody else coordinates: whatever epoch a marker that was asked for claimed, ours count.
        known = partition.producers.by_id.get(ids.producer_id)
        seen_epoch = known.txn.coordinator_epoch if known is not None else -1
        try:
            self._put(partition, ids, commit, max(self._broker.leader_epoch, seen_epoch))
        except StorageError:
            raise
        except LogError as error:
            # Somebody with a higher epoch has ended it there.
            log.warning("%s: a marker of producer %d: %s", partition.id, ids.producer_id, error)
            return False
        return True

    def _put(self, partition: Partition, ids: Ids, commit: bool, coordinator_epoch: int) -> None:
        broker = self._broker
        now_ms = broker.clock.now_ms()
        partition.stage_marker(ids.producer_id, ids.epoch, commit, coordinator_epoch, now_ms)
        partition.flush()
        if not partition.syncs:
            broker.read_waiters.wake(partition)
        broker.committer.request(partition)

    # ---- what is left in partitions ------------------------------------------------------

    async def recover(self) -> None:
        """Carry out what was decided, and end what nobody will: before anyone is served."""
        names = sorted(self._broker.coordination.transactions.undone)
        outcomes = await asyncio.gather(
            *(self.finished(name, START_PATIENCE_S) for name in names), return_exceptions=True
        )
        for name, outcome in zip(names, outcomes, strict=True):
            if isinstance(outcome, Exception):
                log.error("a transaction of %r cannot be ended for now: %r", name, outcome)
        await self._settle_unknown()

    def recover_soon(self) -> None:
        """The same in the background: the journal was read again, or there is a left-over."""
        if not self._recovering:
            self._recovering = True
            self._broker.spawn(self._recover_once())

    async def _recover_once(self) -> None:
        try:
            await self.recover()
        finally:
            self._recovering = False

    def has_left_over(self, partition: Partition, ids: Ids) -> bool:
        """Whether an older transaction of the producer is still open in the partition.

        Only after the journal's disk has failed, and for a moment: it is aborted first.
        """
        producers = partition.producers
        if ids.producer_id not in producers.open:
            return False
        if producers.by_id[ids.producer_id].epoch == ids.epoch:
            return False
        self.recover_soon()
        return True

    async def _settle_unknown(self) -> None:
        broker = self._broker
        coordination = broker.coordination
        now_ms = broker.clock.now_ms()
        unknown: list[tuple[Partition, Ids]] = []
        for topic in list(broker.catalog.topics.values()):
            for number in range(topic.partitions):
                partition = broker.partition(topic.name, number)
                if partition is None:
                    continue
                for producer_id, (epoch, _) in partition.open_transactions().items():
                    ids = Ids(producer_id, epoch)
                    ours, entries = coordination.transactions.adopt(topic, number, ids, now_ms)
                    coordination.write(entries)
                    if not ours:
                        unknown.append((partition, ids))
        await self._abort_unknown(unknown)

    async def _abort_unknown(self, unknown: list[tuple[Partition, Ids]]) -> None:
        written: list[Partition] = []
        failed: list[tuple[Partition, StorageError]] = []
        # All are written before anything is waited for: nobody comes between.
        for partition, ids in unknown:
            log.warning("%s: aborting a transaction that nobody knows of", partition.id)
            try:
                if self._write_one(partition, ids, commit=False):
                    written.append(partition)
            except StorageError as error:
                failed.append((partition, error))
        for partition in written:
            try:
                await self._broker.sync_waiters.synced(partition)
            except StorageError as error:
                failed.append((partition, error))
        for partition, reason in failed:
            self._broker.warn_now_and_then(f"ending what was left open in {partition.id}", reason)
        if failed and not self._again:
            self._again = True
            self._broker.spawn(self._recover_later())

    async def _recover_later(self) -> None:
        try:
            await asyncio.sleep(_PAUSE_AFTER_FAILURE_S)
        finally:
            self._again = False
        self.recover_soon()


def has_ended(txn: Transaction, producers: ProducerStates) -> bool:
    """Whether a marker of this transaction would do nothing in a partition, or harm.

    It may be carried out once more when its markers have long been written and its producer goes
    on: what is open with another epoch is the next transaction, and must not be ended as this one
    was. In the older form the next has the same epoch, but begins only when it is safe that this
    one is complete, and so is not carried out again: there a second marker does no harm.
    """
    assert txn.marker is not None
    written, marker = txn.txn_ids, txn.marker
    known = producers.by_id.get(written.producer_id)
    if known is None:
        return False
    if written.producer_id in producers.open:
        return known.epoch != written.epoch
    if marker.epoch == written.epoch:
        return known.epoch > marker.epoch
    return known.epoch >= marker.epoch
