"""Produce of batches that belong to a transaction: the coordinator is asked before each is staged.

Between the question and the staging nothing else happens, so who is fenced by then writes nothing
more. In a transaction that endures (KIP-939) an acknowledgement also says that the journal knows
of the partition: whoever decides later relies on it.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from crc32c import crc32c

from penstock.broker.transactions.state import Ids
from penstock.errors import StorageError
from penstock.log.partition import Partition
from penstock.records.batch import CRC_START, HEADER_SIZE, TRANSACTIONAL
from penstock.wire.errors import ErrorCode

if TYPE_CHECKING:
    from penstock.broker.apis.produce import PendingProduce
    from penstock.broker.server import Broker

# Older clients do not know that a transaction can only be aborted.
ABORTABLE_FROM_VERSION: Final = 11
# From here on a partition becomes part of a transaction by the first write to it: KIP-890.
IMPLICIT_FROM_VERSION: Final = 12

# Producer id and epoch in the header of a batch.
_IDS: Final = struct.Struct(">qh")
_IDS_AT: Final = 43
_ATTRIBUTES_LOW_BYTE: Final = 22
_CRC: Final = struct.Struct(">I")
_CRC_AT: Final = 17


class JournalWait:
    """A request that is answered only once the journal is safe."""

    __slots__ = ("_request",)

    def __init__(self, broker: Broker, request: PendingProduce) -> None:
        self._request = request
        request.waiting += 1
        journal = broker.coordination.journal.partition
        broker.sync_waiters.add(journal, journal.log_end, self.synced)
        broker.committer.request(journal)

    def synced(self, error: StorageError | None) -> None:
        if error is not None:
            self._request.fail_all(error)
        self._request.done()


def is_transactional(batch: memoryview) -> bool:
    """Whether a batch says that it belongs to a transaction; it may be damaged otherwise."""
    return len(batch) >= HEADER_SIZE and bool(batch[_ATTRIBUTES_LOW_BYTE] & TRANSACTIONAL)


def admit(
    broker: Broker,
    request: PendingProduce,
    transactional_id: str,
    partition: Partition,
    batch: memoryview,
) -> ErrorCode:
    """Whether a transactional batch may be staged; StorageError if the journal refuses."""
    code = _admit(broker, request, transactional_id, partition, batch)
    if code:
        (checksum,) = _CRC.unpack_from(batch, _CRC_AT)
        if crc32c(batch[CRC_START:]) != checksum:
            # Then the ids in it may be wrong, too.
            return ErrorCode.CORRUPT_MESSAGE
    return code


def _admit(
    broker: Broker,
    request: PendingProduce,
    transactional_id: str,
    partition: Partition,
    batch: memoryview,
) -> ErrorCode:
    version = request.context.version
    topic = broker.catalog.topics.get(partition.id.topic)
    if topic is None:
        return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
    coordination = broker.coordination
    ids = Ids(*_IDS.unpack_from(batch, _IDS_AT))
    code, entries = coordination.transactions.admit_write(
        transactional_id,
        ids,
        topic,
        partition.id.number,
        implicit=version >= IMPLICIT_FROM_VERSION,
        now_ms=broker.now_ms,
        elapsed_ms=broker.clock.elapsed_ms(),
        others=request.partitions,
    )
    if not code and coordination.markers.has_left_over(partition, ids):
        code = ErrorCode.CONCURRENT_TRANSACTIONS
    if code == ErrorCode.TRANSACTION_ABORTABLE and version < ABORTABLE_FROM_VERSION:
        return ErrorCode.INVALID_TXN_STATE
    if code == ErrorCode.CONCURRENT_TRANSACTIONS and version < IMPLICIT_FROM_VERSION:
        # These do not expect that one here; this makes them try again.
        return ErrorCode.NOT_ENOUGH_REPLICAS
    if code:
        return code
    if entries:
        # Covered by the sync of the decision, or, where it endures, of what follows here.
        coordination.write(entries, hurry=False)
    if coordination.transactions.endures(transactional_id):
        journal = coordination.journal.partition
        if journal.visible < journal.log_end:
            JournalWait(broker, request)
    return ErrorCode.NONE
