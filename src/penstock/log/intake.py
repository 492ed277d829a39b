"""Why a batch is not taken: what `Partition.stage` asks once it has seen that something is odd.

The quick checks are in `stage` itself; here are the slow ones, and the reasons, which are those
that Apache Kafka gives. Everything here raises or returns without having changed anything.
"""

from __future__ import annotations

from typing import Final

from penstock.errors import (
    CorruptBatchError,
    InvalidRecordError,
    InvalidTimestampError,
    InvalidTxnStateError,
    RecordTooLargeError,
)
from penstock.records import record
from penstock.records.batch import (
    CONTROL,
    HEADER_SIZE,
    LENGTH_BASE,
    MAGIC,
    NO_PRODUCER_ID,
    TRANSACTIONAL,
    batch_size,
)

_MAGIC_AT: Final = 16
# How much a compressed batch may unfold to where the log itself must look into it.
MAX_UNFOLDED_BYTES: Final = 32 << 20


def explain_shape(view: memoryview) -> None:
    """Raise what Kafka answers to bytes that are not exactly one batch."""
    size = len(view)
    stated = batch_size(view) if size >= LENGTH_BASE else size + 1
    magic = view[_MAGIC_AT] if size > _MAGIC_AT else MAGIC
    if magic < MAGIC:
        raise InvalidRecordError(f"record format {magic} is not supported, only {MAGIC} is")
    if stated > size:
        raise InvalidRecordError(f"{size} bytes are not a whole record batch")
    if magic != MAGIC or stated < HEADER_SIZE:
        raise CorruptBatchError(f"{stated} bytes of format {magic} are no record batch")
    raise InvalidRecordError("a produce request carries one batch per partition")


def too_large(size: int, most: int) -> RecordTooLargeError:
    return RecordTooLargeError(f"a batch of {size} bytes exceeds max.message.bytes={most}")


def explain_counts(
    count: int, last_delta: int, attributes: int, producer_id: int, in_transaction: bool
) -> None:
    if attributes & CONTROL:
        raise InvalidRecordError("control batches are written by the broker only")
    if attributes & TRANSACTIONAL and producer_id == NO_PRODUCER_ID:
        raise InvalidRecordError("a transactional batch without a producer id")
    if attributes & TRANSACTIONAL and not in_transaction:
        raise InvalidTxnStateError("the batch belongs to a transaction that is not open")
    if count < 1 or last_delta != count - 1:
        raise InvalidRecordError(f"{count} records with a last offset delta of {last_delta}")


def explain_timestamp(max_ts: int, now_ms: int) -> None:
    # -1: the producer has no time. Kafka takes such records, and so do we.
    if max_ts != -1:
        raise InvalidTimestampError(
            f"timestamp {max_ts} lies {max_ts - now_ms} ms from now, outside of "
            "message.timestamp.before.max.ms and message.timestamp.after.max.ms"
        )


def require_recent(view: memoryview, count: int, base_ts: int, oldest_ms: int) -> None:
    """Of a batch whose newest record is recent enough, all must be."""
    spans = record.spans(record.payload(view, MAX_UNFOLDED_BYTES), count)
    stamps = [base_ts + span.timestamp_delta for span in spans]
    old = tuple(at for at, stamp in enumerate(stamps) if stamp < oldest_ms and stamp != -1)
    if old:
        raise InvalidTimestampError(
            f"timestamp {stamps[old[0]]} is older than message.timestamp.before.max.ms allows"
        )


def require_keys(view: memoryview, count: int) -> None:
    """A compacted topic keeps the latest record per key: a record without one has no place."""
    data = bytes(record.payload(view, MAX_UNFOLDED_BYTES))
    if record.surely_keyed(data, count):
        return
    spans = record.spans(data, count)
    keyless = tuple(at for at, span in enumerate(spans) if span.key is None)
    if keyless:
        raise InvalidRecordError("a compacted topic takes only records with a key", records=keyless)
