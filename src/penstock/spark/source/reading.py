"""What a task does: fetch ranges of offsets and hand them to Spark as Arrow columns.

A thread fetches ahead while the last answer is decoded and sent on; what is fetched and not yet
decoded is bounded by the queue between the two. Connections stay open in the worker process, which
Spark uses again for the next micro-batch.

Records that retention deleted since the micro-batch was planned are an error (`failOnDataLoss`) or
are counted in a warning and passed over.
"""

from __future__ import annotations

import logging
import pickle
import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.client.connection import Cluster
from penstock.client.errors import ClientError, OffsetGoneError, RefusedError
from penstock.client.fetching import Fetched, Fetcher
from penstock.client.metadata import Metadata
from penstock.errors import CorruptBatchError
from penstock.records.batch import LENGTH_BASE, MIN_BATCH_LENGTH, batch_size
from penstock.records.columns.decode import HEADER_TYPE, decode
from penstock.spark.source.errors import (
    DELETED,
    KEEP_LONGER,
    START_ANEW,
    UNKNOWN_TOPIC,
    DataLossError,
    SourceError,
    SourceUnavailableError,
    told,
)
from penstock.spark.source.options import Access, Place
from penstock.spark.source.planning import Range
from penstock.spark.source.positions import connect, isolation_of
from penstock.spark.source.task import Task

log: Final = logging.getLogger("penstock.spark.source")

# Answers that may wait to be decoded.
_AHEAD: Final = 2
_WAIT_MS: Final = 500
_LAST_DELTA_AT: Final = 23
_PAUSE_S: Final = 0.1
# A RecordBatch for Spark is held in memory by both sides.
_BATCH_BYTES: Final = 64 << 20
# Tiny records: the name of their topic, which each row repeats, must fit a column, too.
_BATCH_ROWS: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Manner:
    """How tasks read; the same for all tasks of a query."""

    access: Access
    headers: bool
    fail_on_data_loss: bool
    poll_timeout_s: float


@dataclass(slots=True)
class _Piece:
    """An answer about one partition: where it begins, and where the next one does."""

    place: Place
    offset: int
    end: int
    fetched: Fetched


def record_schema(headers: bool) -> pa.Schema:
    """Records as they are read, before they are typed."""
    columns = [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestampType", pa.int32()),
    ]
    return pa.schema([*columns, ("headers", HEADER_TYPE)] if headers else columns)


def read(manner: Manner, task: Task, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The records of a task, a RecordBatch per answer and partition."""
    with told():
        pieces = _Pieces(manner, task.ranges)
        try:
            for piece in pieces:
                yield from _columns(manner, piece, schema)
        except GeneratorExit:
            # Spark has seen enough (a limit, a task that was killed): nothing to be told.
            raise
        except BaseException:
            # Not under the hands of the thread that fetches ahead: it would connect again.
            pieces.close()
            _forget(manner.access)
            raise
        finally:
            pieces.close()


# ---- connections ---------------------------------------------------------------------------

_fetchers: Final[dict[bytes, tuple[Cluster, Fetcher]]] = {}
# A worker may serve many queries, one after the other: those of the oldest are closed.
_FETCHERS_MAX: Final = 8


def _fetcher(access: Access) -> Fetcher:
    """The one of this worker process for this cluster."""
    key = pickle.dumps(access)
    known = _fetchers.pop(key, None)
    if known is None:
        while len(_fetchers) >= _FETCHERS_MAX:
            _close(_fetchers.pop(next(iter(_fetchers))))
        cluster = connect(access)
        fetcher = Fetcher(
            cluster,
            isolation=isolation_of(access),
            max_bytes=access.fetch_bytes,
            partition_max_bytes=access.partition_bytes,
            timeout_s=access.timeout_s,
        )
        known = cluster, fetcher
    _fetchers[key] = known
    return known[1]


def _forget(access: Access) -> None:
    known = _fetchers.pop(pickle.dumps(access), None)
    if known is not None:
        _close(known)


def _close(known: tuple[Cluster, Fetcher]) -> None:
    cluster, fetcher = known
    fetcher.close()
    cluster.close()


# ---- fetching ------------------------------------------------------------------------------


class _Pieces:
    """Answers, one after the other, until all ranges are covered.

    The first fetch happens in the thread of the task: small micro-batches end with it.
    """

    def __init__(self, manner: Manner, ranges: tuple[Range, ...]) -> None:
        self._manner = manner
        self._ends = {item.place: item.end for item in ranges}
        self._at = {item.place: item.start for item in ranges}
        self._fetcher = _fetcher(manner.access)
        self._queue: queue.Queue[list[_Piece] | BaseException | None] = queue.Queue(_AHEAD)
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __iter__(self) -> Iterator[_Piece]:
        first = self._next()
        if self._at:
            self._thread = threading.Thread(target=self._run, name="fetch-ahead", daemon=True)
            self._thread.start()
        yield from first
        del first
        while self._thread is not None:
            item = self._queue.get()
            if item is None:
                return
            if isinstance(item, BaseException):
                raise item
            while item:
                yield item.pop(0)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._drain()
            self._thread.join()

    def _drain(self) -> None:
        while self._thread is not None and self._thread.is_alive():
            try:
                self._queue.get(timeout=0.05)
            except queue.Empty:
                continue

    def _run(self) -> None:
        try:
            while self._at and not self._stop.is_set():
                self._put(self._next())
            self._put(None)
        except BaseException as error:  # handed to the thread of the task
            self._put(error)

    def _put(self, item: list[_Piece] | BaseException | None) -> None:
        while not self._stop.is_set():
            try:
                self._queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return

    def _next(self) -> list[_Piece]:
        """The next answers that have records or move on; partitions that are done leave `_at`."""
        deadline = time.monotonic() + self._manner.poll_timeout_s
        while self._at:
            try:
                answers = self._fetcher.fetch(self._at, _WAIT_MS)
            except OffsetGoneError as error:
                if time.monotonic() > deadline or self._stop.is_set():
                    raise
                self._pass_over(error)
                continue
            except RefusedError as error:
                if error.name != UNKNOWN_TOPIC:
                    raise
                self._pass_deleted(error)
                continue
            pieces = [
                self._taken(place, fetched) for place, fetched in answers.items() if fetched.data
            ]
            if pieces:
                return pieces
            if time.monotonic() > deadline or self._stop.is_set():
                raise self._nothing_came()
        return []

    def _taken(self, place: Place, fetched: Fetched) -> _Piece:
        offset, end = self._at[place], self._ends[place]
        following = _offset_after(fetched.data, offset)
        if following >= end:
            del self._at[place]
        else:
            self._at[place] = following
        return _Piece(place, offset, end, fetched)

    def _pass_over(self, error: OffsetGoneError) -> None:
        """Records that are gone: an error, or a warning with their count."""
        place = (error.topic, error.partition)
        if place not in self._at:
            return
        at, end = self._at[place], self._ends[place]
        if error.log_start <= at <= error.log_end:
            # It is there by now: whoever refused it did not lead, or not for long.
            self._stop.wait(_PAUSE_S)
            return
        if at > error.log_end:
            text = (
                f"{error.topic}-{error.partition} was to be read from offset {at}, and its log "
                f"ends at {error.log_end}: the topic was deleted and made anew, or lost its end"
            )
            self._lost(text, START_ANEW, error)
            del self._at[place]
            return
        lost = min(error.log_start, end) - at
        text = (
            f"{lost} offsets of {error.topic}-{error.partition} are lost, from {at} on: "
            f"its log starts at {error.log_start} now"
        )
        self._lost(text, KEEP_LONGER, error)
        if error.log_start >= end:
            del self._at[place]
        else:
            self._at[place] = error.log_start

    def _pass_deleted(self, error: RefusedError) -> None:
        """Partitions that are not there any more: an error, or a warning."""
        gone = self._missing()
        if not gone:
            raise error
        for topic, number in gone:
            text = (
                f"{topic}-{number} was to be read from offset {self._at[topic, number]}, and is "
                f"not there any more ({error})"
            )
            self._lost(text, DELETED, error)
            del self._at[topic, number]

    def _missing(self) -> list[Place]:
        with connect(self._manner.access) as cluster:
            metadata = Metadata(cluster, timeout_s=self._manner.access.timeout_s)
            names = metadata.topics(sorted({topic for topic, _ in self._at}))
            there = {(name, number) for name in names for number in metadata.partitions(name)}
        return sorted(self._at.keys() - there)

    def _lost(self, text: str, advice: str, error: ClientError) -> None:
        if self._manner.fail_on_data_loss:
            raise DataLossError(text, advice=advice) from error
        log.warning("%s; going on, for failOnDataLoss is false", text)

    def _nothing_came(self) -> SourceError:
        topic, number = min(self._at)
        return SourceUnavailableError(
            f"no records of {topic}-{number} came from offset {self._at[topic, number]} on in "
            f"{self._manner.poll_timeout_s:.0f} s, and it should have some up to "
            f"{self._ends[topic, number]}",
            advice="Look at the broker; raise kafkaConsumer.pollTimeoutMs if it is only slow.",
        )


def _offset_after(data: memoryview, offset: int) -> int:
    """Where to fetch next, from the heads of the batches alone. Damage is found when decoding."""
    at, size = 0, len(data)
    following = offset
    while size - at > LENGTH_BASE:
        length = batch_size(data, at)
        if length < LENGTH_BASE + MIN_BATCH_LENGTH:
            # No batch at all: what decodes it will say so, and nothing is fetched any more.
            return 2**63 - 1
        if length > size - at:
            break
        base = int.from_bytes(data[at : at + 8], "big", signed=True)
        head = at + _LAST_DELTA_AT
        following = max(following, base + int.from_bytes(data[head : head + 4], "big") + 1)
        at += length
    return following


# ---- columns -------------------------------------------------------------------------------


def _columns(manner: Manner, piece: _Piece, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    topic, number = piece.place
    data, offset = piece.fetched.data, piece.offset
    aborted = piece.fetched.aborted if manner.access.read_committed else ()
    while data and offset < piece.end:
        try:
            decoded = decode(
                data,
                first_offset=offset,
                end_offset=piece.end,
                aborted=aborted,
                headers=manner.headers,
                limit_bytes=_BATCH_BYTES,
            )
        except CorruptBatchError as error:
            raise SourceError(f"{topic}-{number}: {error}", advice=error.advice) from error
        if not decoded.bytes_used:
            return
        for at in range(0, decoded.batch.num_rows, _BATCH_ROWS):
            yield _as_rows(decoded.batch.slice(at, _BATCH_ROWS), topic, number, schema)
        data, offset = data[decoded.bytes_used :], decoded.next_offset
        aborted = decoded.aborted


def _as_rows(batch: pa.RecordBatch, topic: str, number: int, schema: pa.Schema) -> pa.RecordBatch:
    """The columns of the connector, in its order."""
    key, value, offset, timestamp, kind, *headers = batch.columns
    count = batch.num_rows
    partition = pa.array(np.full(count, number, np.int32))
    arrays: list[Any] = [key, value, _repeated(topic, count), partition, offset, timestamp, kind]
    if headers:
        (column,) = headers
        wanted = schema.field("headers").type
        arrays.append(pa.ListArray.from_arrays(column.offsets, column.values, type=wanted))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


_names: Final[dict[str, pa.Array]] = {}
_NAMES_MAX: Final = 64


def _repeated(text: str, count: int) -> pa.Array:
    """A column of the same text, a slice of a longer one that is kept."""
    known = _names.get(text)
    if known is None or len(known) < count:
        length = 1 << (count - 1).bit_length()
        encoded = text.encode()
        ends = pa.py_buffer(np.arange(length + 1, dtype=np.int32) * len(encoded))
        known = pa.Array.from_buffers(
            pa.string(), length, [None, ends, pa.py_buffer(encoded * length)], 0
        )
        if len(_names) >= _NAMES_MAX:
            _names.clear()
        _names[text] = known
    return known.slice(0, count)
