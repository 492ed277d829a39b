"""Writing records to the log: many at a time, batched by partition, idempotent or in transactions.

Theory: records pass three stages. A topic's stage collects what `write` is given, until it is worth
looking at columns; then keys are hashed all at once and records sorted by partition, each
partition's order kept. A partition's buffer collects these pieces until they fill a batch; then
they are packed, numbered and handed to the `Sender`, which has several requests on their way. Each
stage has a limit; when too much is not yet acknowledged, `write` waits.

    with LogWriter(cluster, transactional_id="inventory") as writer:
        writer.begin()
        writer.write("orders", keys, values)
        writer.commit()

Without a transactional id every record is written once, in order, for as long as the writer lives:
`flush` returns when all are acknowledged. With one, everything between `begin` and `commit` becomes
visible together or, after `abort` or a crash, not at all; another writer of the same id fences this
one. One thread.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, Self, TypeAlias

import numpy as np
import pyarrow as pa

from penstock.client.connection import Cluster
from penstock.client.errors import ClientError
from penstock.client.metadata import Metadata, Place
from penstock.client.producing import Sender
from penstock.client.transacting import Ids, Transaction, init_producer
from penstock.records.batch import next_sequence
from penstock.records.columns.decode import HEADER_TYPE
from penstock.records.columns.encode import encode, headers_array
from penstock.records.columns.partition import partitions_of
from penstock.records.compression import CODES
from penstock.records.record import BatchOptions, Record
from penstock.records.record import encode as encode_records

Header = tuple[str, bytes | None]
# A list, or an Arrow array of binary.
Column: TypeAlias = Sequence[bytes | None] | Any
Headers: TypeAlias = Sequence[Sequence[Header]]

CODEC: Final = "lz4"
# A partition's records are packed when there are so many bytes of them,
BATCH_BYTES: Final = 512 << 10
# into batches of at most twice as many, and never more than Kafka's default limit lets pass,
# compressed or not.
_MAX_BATCH_BYTES: Final = 1_000_000
# What all partitions together may collect; and again as much may be on its way.
BUFFER_BYTES: Final = 16 << 20
LINGER_MS: Final = 100
TIMEOUT_S: Final = 120.0
# When a topic's stage is looked at.
_STAGE_RECORDS: Final = 16_384
_STAGE_BYTES: Final = 1 << 20
# So few records are not worth columns: they cost more to make than the records to write.
_FEW_RECORDS: Final = 4
_FEW_BYTES: Final = 16 << 10
# What a record takes apart from its key and value, about.
_RECORD_BYTES: Final = 12
# How long an abort is tried after an error.
_LAST_TRY_S: Final = 5.0
# Records without a key: so many go to one partition, then to the next.
_RUN_RECORDS: Final = 1_000


@dataclass(slots=True)
class _Stage:
    """What was given for one topic, as it was given."""

    keys: list[bytes | None] = field(default_factory=list)
    values: list[bytes | None] = field(default_factory=list)
    times: list[int] = field(default_factory=list)
    # None: no record has any.
    headers: list[Sequence[Header]] | None = None
    # Numbers of records, and the partition that they shall go to, if it was said.
    runs: list[tuple[int, int | None]] = field(default_factory=list)
    size: int = 0


@dataclass(slots=True)
class _Piece:
    """Records of one partition, in order."""

    keys: pa.Array
    values: pa.Array
    times: Any
    headers: pa.Array | None


@dataclass(slots=True)
class _Buffer:
    pieces: list[_Piece] = field(default_factory=list)
    size: int = 0


class LogWriter:
    """Writes records; a context manager, which flushes at its end, or aborts after an error."""

    def __init__(
        self,
        cluster: Cluster,
        *,
        transactional_id: str | None = None,
        codec: str = CODEC,
        batch_bytes: int = BATCH_BYTES,
        buffer_bytes: int = BUFFER_BYTES,
        linger_ms: int = LINGER_MS,
        transaction_timeout_ms: int = 60_000,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        if codec not in CODES:
            known = ", ".join(CODES)
            raise ClientError(f"unknown codec {codec!r}", advice=f"Choose one of {known}.")
        self._cluster = cluster
        self._codec = codec
        self._batch_bytes = min(batch_bytes, _MAX_BATCH_BYTES)
        self._buffer_bytes = buffer_bytes
        self._linger_s = linger_ms / 1000
        self._timeout_s = timeout_s
        self._metadata = Metadata(cluster, timeout_s=timeout_s)
        self._transaction: Transaction | None = None
        if transactional_id is not None:
            self._transaction = Transaction(
                cluster,
                transactional_id,
                timeout_ms=transaction_timeout_ms,
                retry_s=timeout_s,
                metadata=self._metadata,
            )
        self._sender = self._new_sender()
        self._ids: Ids | None = None
        self._sequences: dict[Place, int] = {}
        self._stages: dict[str, _Stage] = {}
        self._buffers: dict[Place, _Buffer] = {}
        self._buffered_bytes = 0
        self._oldest = 0.0
        self._next_run: dict[str, int] = {}
        self._is_begun = False
        self._is_closed = False
        # Where records were lost on the way: only `abort` can go on from there.
        self._failure: BaseException | None = None

    def _new_sender(self) -> Sender:
        id_ = None if self._transaction is None else self._transaction.transactional_id
        return Sender(
            self._cluster,
            transactional_id=id_,
            max_bytes=self._buffer_bytes,
            timeout_s=self._timeout_s,
            metadata=self._metadata,
        )

    # ---- life ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(drop=kind is not None)

    def close(self, *, drop: bool = False) -> None:
        """Flush, and end; a transaction that is open is aborted. With `drop` nothing is sent."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._transaction is not None:
                if self._is_begun and drop:
                    # Whoever takes the id next aborts it, or its timeout does.
                    with suppress(ClientError):
                        self._abort_transaction(self._transaction, retry_s=_LAST_TRY_S)
                elif self._is_begun:
                    self._abort_transaction(self._transaction)
            elif not drop and self._failure is None:
                self._push(everything=True)
                self._sender.flush()
        finally:
            self._forget()
            self._sender.close()

    @property
    def ids(self) -> Ids:
        """The producer id and epoch that records carry now."""
        if self._transaction is not None:
            return self._transaction.ids
        if self._ids is None:
            self._ids = init_producer(self._cluster, timeout_s=self._timeout_s)
        return self._ids

    @property
    def transaction(self) -> Transaction:
        """The transaction, to send a group's offsets with it."""
        if self._transaction is None:
            raise ClientError("this writer has no transactional id")
        return self._transaction

    @property
    def ends(self) -> dict[Place, int]:
        """Where the next record goes, after the last acknowledged one of a partition."""
        return self._sender.ends

    @property
    def held_bytes(self) -> int:
        """About what is in memory here and not yet acknowledged."""
        staged = sum(stage.size for stage in self._stages.values())
        return staged + self._buffered_bytes + self._sender.held_bytes

    # ---- transactions --------------------------------------------------------------------

    def begin(self) -> None:
        """Begin a transaction; the first time the transactional id is taken from its last user.

        Without a transactional id there is nothing to begin.
        """
        self._check_usable()
        if self._transaction is None:
            return
        if self._is_begun:
            raise ClientError(f"a transaction of {self._name} is open already")
        self._take_id(self._transaction)
        self._is_begun = True

    def init(self) -> None:
        """Take the transactional id now: what its last user left open is aborted, and it is fenced.

        To be called before looking at what has been written last. `begin` does it where it has not
        been done.
        """
        if self._transaction is not None:
            self._take_id(self._transaction)

    def _take_id(self, transaction: Transaction) -> None:
        if not transaction.is_ours:
            transaction.init()
            self._sequences.clear()

    def commit(self) -> None:
        """Everything that was written since `begin` is there for readers, together.

        FencedError: another writer has taken the id, nothing was committed, and to `begin` again
        would take it back. OutcomeUnknownError: it may have been; after the next `begin`, what is
        committed is there for readers. Without a transactional id this is `flush`.
        """
        self.flush()
        transaction = self._transaction
        if transaction is None:
            return
        self._check_begun()
        self._is_begun = False
        self._sequences.clear()
        transaction.end(commit=True)

    def abort(self) -> None:
        """Nothing of what was written since `begin` is ever there for readers of committed records.

        Without a transactional id, what has not been sent is dropped; the rest may be there or not.
        """
        self._forget()
        self._sender.close()
        self._sender = self._new_sender()
        self._failure = None
        transaction = self._transaction
        if transaction is None:
            # Sequence numbers were lost with the records; so another id.
            self._ids = None
            return
        if self._is_begun:
            self._abort_transaction(transaction)

    def _abort_transaction(self, transaction: Transaction, retry_s: float | None = None) -> None:
        self._is_begun = False
        if transaction.is_ours:
            transaction.end(commit=False, retry_s=retry_s)

    def _check_begun(self) -> None:
        if self._transaction is not None and not self._is_begun:
            raise ClientError(
                f"no transaction of {self._name} is open", advice="Call begin() first."
            )

    @property
    def _name(self) -> str:
        return "" if self._transaction is None else repr(self._transaction.transactional_id)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise ClientError("the writer is closed")
        if self._failure is not None:
            raise ClientError(
                f"the writer has failed before: {self._failure}",
                advice="Call abort(), and write again what was not committed.",
            ) from self._failure

    def _forget(self) -> None:
        self._stages.clear()
        self._buffers.clear()
        self._sequences.clear()
        self._buffered_bytes = 0

    # ---- writing -------------------------------------------------------------------------

    def write(
        self,
        topic: str,
        keys: Column | None,
        values: Column | None,
        *,
        headers: Headers | None = None,
        timestamps_ms: int | Sequence[int] | None = None,
        partition: int | None = None,
    ) -> None:
        """Write records, each with the key, value and headers at the same place of the lists.

        Keys or values that are None are null for all. The partition is that of the key, as every
        Kafka client chooses it, unless it is given; records without a key are spread. The time is
        now unless it is given, for all or for each. Lists and Arrow columns will do.
        """
        self._check_usable()
        self._check_begun()
        count = _count(topic, keys, values, headers, timestamps_ms)
        if not count:
            return
        is_columnar = isinstance(keys, pa.Array) or isinstance(values, pa.Array)
        size = 0 if is_columnar else _size(topic, keys) + _size(topic, values)
        now_ms = time.time_ns() // 1_000_000 if timestamps_ms is None else timestamps_ms
        if not self._stages and not self._buffers:
            self._oldest = time.monotonic()
        try:
            if is_columnar:
                self._take_columns(topic, count, keys, values, headers, now_ms, partition)
            else:
                self._stage(topic, count, size, keys, values, headers, now_ms, partition)
            if time.monotonic() - self._oldest > self._linger_s:
                self._push(everything=True)
        except BaseException as error:
            self._failure = error
            raise

    def flush(self) -> None:
        """Wait until everything that was written is acknowledged."""
        self._check_usable()
        try:
            self._push(everything=True, hold=True)
            self._sender.flush()
        except BaseException as error:
            self._failure = error
            raise

    def _stage(
        self,
        topic: str,
        count: int,
        size: int,
        keys: Column | None,
        values: Column | None,
        headers: Headers | None,
        timestamps_ms: int | Sequence[int],
        partition: int | None,
    ) -> None:
        stage = self._stages.get(topic)
        if stage is None:
            stage = self._stages[topic] = _Stage()
        stage.size += size + _RECORD_BYTES * count
        stage.keys += [None] * count if keys is None else keys
        stage.values += [None] * count if values is None else values
        if isinstance(timestamps_ms, int):
            stage.times += [timestamps_ms] * count
        else:
            stage.times.extend(timestamps_ms)
        if headers is not None:
            if stage.headers is None:
                stage.headers = [()] * (len(stage.keys) - count)
            stage.headers.extend(headers)
            stage.size += sum(
                len(name) + len(value or b"") for items in headers for name, value in items
            )
        elif stage.headers is not None:
            stage.headers += [()] * count
        stage.runs.append((count, partition))
        if stage.size >= _STAGE_BYTES or len(stage.keys) >= _STAGE_RECORDS:
            self._drain(topic)

    def _take_columns(
        self,
        topic: str,
        count: int,
        keys: Column | None,
        values: Column | None,
        headers: Headers | None,
        timestamps_ms: int | Sequence[int],
        partition: int | None,
    ) -> None:
        """Columns go past the stage, after what is in it."""
        if topic in self._stages:
            self._drain(topic)
        key_column, value_column = _binary(keys, count), _binary(values, count)
        times = np.broadcast_to(np.asarray(timestamps_ms, np.int64), (count,))
        size = key_column.nbytes + value_column.nbytes + _RECORD_BYTES * count
        listed = None if headers is None else headers_array(headers)
        self._sort(topic, key_column, value_column, times, listed, [(count, partition)], size)

    def _push(self, *, everything: bool, hold: bool = False) -> None:
        """Send what fills a batch, or everything there is; acknowledged later."""
        if everything:
            for topic in list(self._stages):
                if not self._send_few(topic, hold=hold):
                    self._drain(topic)
        limit = 0 if everything else self._batch_bytes
        for place in [place for place, it in self._buffers.items() if it.size >= limit]:
            # The last pieces of all partitions go in one request: `flush` sends them.
            self._pack(place, hold=hold)
        self._oldest = time.monotonic()

    def _send_few(self, topic: str, *, hold: bool) -> bool:
        """Pack and send a topic's records one by one, if they are few and none is before them."""
        stage, place = self._stages[topic], (topic, 0)
        if len(stage.keys) > _FEW_RECORDS or stage.size > _FEW_BYTES or place in self._buffers:
            return False
        if not self._has_only_one(topic, stage.runs):
            return False
        del self._stages[topic]
        if self._transaction is not None and not self._transaction.holds(place):
            self._add(self._transaction, place)
        sequence = self._sequences.get(place, 0)
        headers = stage.headers or [()] * len(stage.keys)
        columns = zip(stage.times, stage.keys, stage.values, map(tuple, headers), strict=True)
        batch = encode_records(
            [Record(at, *rest) for at, rest in enumerate(columns)],
            BatchOptions(
                CODES[self._codec], *self.ids, sequence, transactional=self._transaction is not None
            ),
        )
        self._sequences[place] = next_sequence(sequence, len(stage.keys))
        self._sender.send(*place, batch, hold=hold)
        return True

    def _has_only_one(self, topic: str, runs: list[tuple[int, int | None]]) -> bool:
        """Whether a topic has one partition, and nobody asked for another."""
        if len(self._metadata.partitions(topic)) != 1:
            return False
        return all(partition in {None, 0} for _, partition in runs)

    # ---- sorting -------------------------------------------------------------------------

    def _drain(self, topic: str) -> None:
        """Sort a topic's records by partition, and pack what has become enough for a batch."""
        stage = self._stages.pop(topic)
        keys, values = pa.array(stage.keys, pa.binary()), pa.array(stage.values, pa.binary())
        times = np.array(stage.times, np.int64)
        headers = None if stage.headers is None else headers_array(stage.headers)
        self._sort(topic, keys, values, times, headers, stage.runs, stage.size)

    def _sort(
        self,
        topic: str,
        keys: pa.Array,
        values: pa.Array,
        times: Any,
        headers: pa.Array | None,
        runs: list[tuple[int, int | None]],
        size: int,
    ) -> None:
        if self._has_only_one(topic, runs):
            self._collect((topic, 0), _Piece(keys, values, times, headers), size + 1)
            return
        numbers = self._numbers(topic, keys, runs)
        order = np.argsort(numbers, kind="stable")
        found, counts = np.unique(numbers, return_counts=True)
        places: list[Place] = [(topic, int(number)) for number in found]
        if len(places) > 1:
            indices = pa.array(order)
            keys, values, times = keys.take(indices), values.take(indices), times[order]
            headers = None if headers is None else headers.take(indices)
        mean = size / len(times)
        start = 0
        for place, count in zip(places, counts.tolist(), strict=True):
            piece = _Piece(
                keys.slice(start, count),
                values.slice(start, count),
                times[start : start + count],
                None if headers is None else headers.slice(start, count),
            )
            start += count
            self._collect(place, piece, int(mean * count) + 1)

    def _numbers(self, topic: str, keys: pa.Array, runs: list[tuple[int, int | None]]) -> Any:
        """The partition of each record."""
        count = len(self._metadata.partitions(topic))
        numbers = partitions_of(keys, count)
        if any(partition is not None for _, partition in runs):
            given = np.array([-1 if number is None else number for _, number in runs], np.int32)
            said = np.repeat(given, [length for length, _ in runs])
            numbers = np.where(said >= 0, said, numbers)
        if keys.null_count:
            missing = np.flatnonzero(numbers < 0)
            run = self._next_run.get(topic, 0)
            numbers[missing] = (run + np.arange(len(missing)) // _RUN_RECORDS) % count
            self._next_run[topic] = (run + 1 + len(missing) // _RUN_RECORDS) % count
        highest = int(numbers.max())
        if highest >= count:
            raise ClientError(f"{topic} has {count} partitions, so no partition {highest}")
        return numbers

    def _collect(self, place: Place, piece: _Piece, size: int) -> None:
        buffer = self._buffers.get(place)
        if buffer is None:
            buffer = self._buffers[place] = _Buffer()
        buffer.pieces.append(piece)
        buffer.size += size
        self._buffered_bytes += size
        if buffer.size >= self._batch_bytes:
            self._pack(place)
        while self._buffered_bytes > self._buffer_bytes:
            self._pack(max(self._buffers, key=lambda it: self._buffers[it].size))

    def _add(self, transaction: Transaction, place: Place) -> None:
        """A partition is about to be written to for the first time in the transaction."""
        self._sender.adds_partitions = transaction.adds_by_writing
        if transaction.adds_by_writing:
            transaction.will_write([place])
        else:
            # All that will be needed soon, at once.
            transaction.add_partitions([place, *self._buffers])

    def _pack(self, place: Place, *, hold: bool = False) -> None:
        """Number, pack and send what a partition has collected."""
        if self._transaction is not None and not self._transaction.holds(place):
            self._add(self._transaction, place)
        buffer = self._buffers.pop(place)
        self._buffered_bytes -= buffer.size
        pieces = buffer.pieces
        sequence = self._sequences.get(place, 0)
        packed = encode(
            _joined([piece.keys for piece in pieces]),
            _joined([piece.values for piece in pieces]),
            headers=_joined_headers(pieces),
            timestamps_ms=np.concatenate([piece.times for piece in pieces]),
            codec=self._codec,
            max_batch_bytes=min(2 * self._batch_bytes, _MAX_BATCH_BYTES),
            producer=(*self.ids, sequence),
            transactional=self._transaction is not None,
        )
        count = sum(batch.count for batch in packed)
        self._sequences[place] = next_sequence(sequence, count)
        for batch in packed:
            self._sender.send(*place, batch.data, hold=hold)


def _count(
    topic: str,
    keys: Column | None,
    values: Column | None,
    headers: Headers | None,
    timestamps_ms: int | Sequence[int] | None,
) -> int:
    times = None if isinstance(timestamps_ms, int) else timestamps_ms
    columns: list[Any] = [keys, values, headers, times]
    lengths = {len(column) for column in columns if column is not None}
    if keys is None and values is None:
        raise ClientError(f"records for {topic} have neither keys nor values")
    if len(lengths) != 1:
        raise ClientError(f"columns for {topic} have different lengths: {sorted(lengths)}")
    return lengths.pop()


def _size(topic: str, column: Sequence[bytes | None] | None) -> int:
    """The bytes in a list; ClientError if something else is in it."""
    if column is None:
        return 0
    try:
        return sum(map(len, column))  # type: ignore[arg-type]
    except TypeError:
        pass
    try:
        return sum(len(item) for item in column if item is not None)
    except TypeError as error:
        raise ClientError(f"keys and values for {topic} must be bytes: {error}") from error


def _binary(column: Column | None, count: int) -> pa.Array:
    if column is None:
        return pa.nulls(count, pa.binary())
    return column if isinstance(column, pa.Array) else pa.array(column, pa.binary())


def _joined(arrays: list[pa.Array]) -> pa.Array:
    return arrays[0] if len(arrays) == 1 else pa.concat_arrays(arrays)


def _joined_headers(pieces: list[_Piece]) -> pa.Array | None:
    if all(piece.headers is None for piece in pieces):
        return None
    empty = [
        pa.array([[]] * len(piece.keys), HEADER_TYPE) if piece.headers is None else piece.headers
        for piece in pieces
    ]
    return _joined(empty)
