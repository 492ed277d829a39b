"""What runs in Spark's tasks: columns to batches, batches to partitions.

Exactly once takes two steps. `Pack` turns rows into finished, compressed record batches and writes
nothing, so Spark may run it as often as it likes. If there is little, the driver takes the batches
and sends them itself: one short job. Otherwise they, a few large rows now, are shuffled so that
each partition of the log comes to one task, in an order that is the same every time. `Write` gives
them their sequence numbers and sends them. It refuses to run a second time: then the driver aborts,
and writes the batch anew under a new epoch. `PackAndWrite` does both where the rows are in one task
anyway.

Spark may also run `Pack` again in the middle: an executor that dies takes its packed batches along,
and those writing tasks that have not read them yet read new ones, perhaps with other rows in other
partitions than the ones before. So each packing task heralds itself to each writing task, with the
number of its attempt; these pass it on, and the driver aborts where a task was heard of twice.

At least once takes one: `Send`, in each task with an idempotent producer of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from zlib import crc32

import pyarrow as pa
from crc32c import crc32c
from pyspark import TaskContext

from penstock.client.transacting import Ids
from penstock.errors import PenstockError
from penstock.records.batch import CRC_START, next_sequence
from penstock.spark.sink.errors import RepeatedTaskError, TaskError
from penstock.spark.sink.packing import Form, Packer, Piece
from penstock.spark.sink.target import Link, Target, drop, link
from penstock.spark.source.workers import settle

Place = tuple[str, int]

PACKED: Final = (
    "slot INT, topic STRING, partition INT, task INT, number BIGINT, count INT, data BINARY"
)
ORDER: Final = ("topic", "partition", "task", "number")
TOO_MUCH: Final = -1
# No topic has this name: such a row tells of a packing task and its attempt. It sorts first.
HERALD: Final = ""
WRITTEN: Final = "topic STRING, partition INT, records BIGINT, bytes BIGINT"
_PACKED_SCHEMA: Final = pa.schema(
    [
        ("slot", pa.int32()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("task", pa.int32()),
        ("number", pa.int64()),
        ("count", pa.int32()),
        ("data", pa.binary()),
    ]
)
_WRITTEN_SCHEMA: Final = pa.schema(
    [
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("records", pa.int64()),
        ("bytes", pa.int64()),
    ]
)
# Where the header of a batch has its producer with the sequence number, and its checksum.
_PRODUCER_AT: Final = 43
_PRODUCER: Final = struct.Struct(">qhi")
_CRC_AT: Final = CRC_START - 4
_UNSIGNED: Final = struct.Struct(">I")


@dataclass(frozen=True, slots=True)
class Job:
    """What every task of one micro-batch knows."""

    target: Target
    topic: str | None
    # Partitions of the topics that the driver knows of.
    counts: Mapping[str, int]
    transactional_id: str | None = None
    ids: Ids | None = None
    slots: int = 1
    # What a task may pack for the driver to send; None: as much as there is, for other tasks.
    limit_bytes: int | None = None

    def form(self, ids: Ids) -> Form:
        target = self.target
        return Form(
            target.codec,
            target.batch_bytes,
            (ids.producer_id, ids.epoch),
            transactional=self.transactional_id is not None,
        )

    def packer(self, to: Link, ids: Ids) -> Packer:
        def count(topic: str) -> int:
            known = self.counts.get(topic)
            return len(to.metadata.partitions(topic)) if known is None else known

        return Packer(self.form(ids), topic=self.topic, partition_count=count, task=_task())


class Pack:
    """Rows to packed batches; touches nothing.

    Where there is more than its limit, it gives up, and says so with a row of `TOO_MUCH` records.
    """

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        job = self._job
        assert job.ids is not None
        task, number = _task(), 0
        with _told(job):
            packer = job.packer(link(job.target, job.transactional_id), job.ids)
            if job.limit_bytes is None:
                yield _heralds(job.slots, task)
            size = 0
            for pieces in _pieces(packer, rows):
                size += sum(len(piece.packed.data) for piece in pieces)
                if job.limit_bytes is not None and size > job.limit_bytes:
                    yield _too_much(task)
                    return
                yield _table(pieces, job.slots, task, number)
                number += len(pieces)


class Write:
    """Packed batches, sorted, to their partitions within the driver's transaction."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        job = self._job
        assert job.ids is not None
        _refuse_repetition()
        with _told(job):
            writer = _Writer(link(job.target, job.transactional_id), job.ids)
            for batch in rows:
                topics = batch.column(1).to_pylist()
                partitions = batch.column(2).to_pylist()
                counts = batch.column(5).to_pylist()
                places = list(zip(topics, partitions, strict=True))
                writer.add(place for place in places if place[0] != HERALD)
                for at, (place, count) in enumerate(zip(places, counts, strict=True)):
                    if place[0] == HERALD:
                        writer.heard(batch.column(3)[at].as_py(), batch.column(4)[at].as_py())
                    else:
                        writer.write(place, count, batch.column(6)[at].as_buffer())
            yield writer.finish()


class PackAndWrite:
    """Both, for rows that are in one task."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        job = self._job
        assert job.ids is not None
        _refuse_repetition()
        with _told(job):
            to = link(job.target, job.transactional_id)
            writer, packer = _Writer(to, job.ids), job.packer(to, job.ids)
            for pieces in _pieces(packer, rows):
                writer.add((piece.topic, piece.partition) for piece in pieces)
                for piece in pieces:
                    packed = piece.packed
                    writer.write((piece.topic, piece.partition), packed.count, packed.data)
            yield writer.finish()


class Send:
    """Rows to their partitions at once: at least once, whatever Spark does."""

    def __init__(self, job: Job) -> None:
        self._job = job

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        job = self._job
        with _told(job):
            to = link(job.target)
            ids = to.own_ids()
            writer, packer = _Writer(to, ids, to.sequences), job.packer(to, ids)
            for pieces in _pieces(packer, rows):
                for piece in pieces:
                    packed = piece.packed
                    writer.write((piece.topic, piece.partition), packed.count, packed.data)
            yield writer.finish()


class Numbering:
    """Gives batches the sequence numbers of their producer, partition by partition.

    With `ids` also those of the producer, where they were packed for no producer yet.
    """

    def __init__(
        self, sequences: dict[Place, int] | None = None, *, ids: Ids | None = None
    ) -> None:
        self._sequences = {} if sequences is None else sequences
        self._ids = None if ids is None else (ids.producer_id, ids.epoch)

    def numbered(self, place: Place, count: int, data: Any) -> memoryview:
        """The batch with its number; as it is, if it was packed as the first."""
        sequence = self._sequences.get(place, 0)
        *ids, packed_as = _PRODUCER.unpack_from(data, _PRODUCER_AT)
        wanted = (*(ids if self._ids is None else self._ids), sequence)
        if (*ids, packed_as) != wanted:
            data = bytearray(data)
            _PRODUCER.pack_into(data, _PRODUCER_AT, *wanted)
            _UNSIGNED.pack_into(data, _CRC_AT, crc32c(memoryview(data)[CRC_START:]))
        self._sequences[place] = next_sequence(sequence, count)
        return memoryview(data)


class _Writer:
    """Numbers batches and sends them."""

    def __init__(self, to: Link, ids: Ids, sequences: dict[Place, int] | None = None) -> None:
        self._to = to
        if to.joined is not None:
            to.joined.join(ids)
        self._numbering = Numbering(sequences)
        self._mine: set[Place] = set()
        self._written: dict[Place, list[int]] = {}
        self._heralds: list[tuple[int, int]] = []

    def heard(self, task: int, attempt: int) -> None:
        """A packing task has told of itself."""
        self._heralds.append((task, attempt))

    def add(self, places: Iterable[Place]) -> None:
        """Make partitions part of the transaction, before they are written to.

        One that is part of it already was another's: Spark has run this stage before.
        """
        joined = self._to.joined
        new = set(places) - self._mine
        if joined is None or not new:
            return
        if joined.has_any(new):
            raise RepeatedTaskError("Spark ran a stage of writing tasks again")
        joined.add_partitions(new)
        self._mine |= new

    def write(self, place: Place, count: int, data: Any) -> None:
        self._to.sender.send(*place, self._numbering.numbered(place, count, data))
        told = self._written.setdefault(place, [0, 0])
        told[0] += count
        told[1] += len(data)

    def finish(self) -> pa.RecordBatch:
        """Wait until all is acknowledged; what was written."""
        self._to.sender.flush()
        rows = [(topic, part, *told) for (topic, part), told in sorted(self._written.items())]
        rows += [(HERALD, task, 0, attempt) for task, attempt in self._heralds]
        columns: list[Any] = [list(column) for column in zip(*rows, strict=True)] or [[]] * 4
        arrays = [
            pa.array(column, field.type)
            for column, field in zip(columns, _WRITTEN_SCHEMA, strict=True)
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=_WRITTEN_SCHEMA)


def _pieces(packer: Packer, rows: Iterator[pa.RecordBatch]) -> Iterator[list[Piece]]:
    for batch in rows:
        pieces = packer.add(batch)
        if pieces:
            yield pieces
    pieces = packer.finish()
    if pieces:
        yield pieces


def _heralds(slots: int, task: int) -> pa.RecordBatch:
    """A row for each writing task: this packing task, in this attempt."""
    row = {"topic": HERALD, "partition": 0, "task": task, "number": _attempt(), "count": 0}
    rows = [{**row, "slot": slot, "data": b""} for slot in range(slots)]
    return pa.RecordBatch.from_pylist(rows, _PACKED_SCHEMA)


def check_heralds(written: Iterable[tuple[int, int]]) -> None:
    """RepeatedTaskError if writing tasks have heard of two attempts of one packing task."""
    attempts: dict[int, int] = {}
    for task, attempt in written:
        if attempts.setdefault(task, attempt) != attempt:
            raise RepeatedTaskError(
                f"Spark ran packing task {task} again, after some of its batches were written"
            )


def _too_much(task: int) -> pa.RecordBatch:
    row = {"slot": 0, "topic": "", "partition": 0, "task": task, "number": 0}
    return pa.RecordBatch.from_pylist([{**row, "count": TOO_MUCH, "data": b""}], _PACKED_SCHEMA)


def _table(pieces: list[Piece], slots: int, task: int, first: int) -> pa.RecordBatch:
    columns: list[list[Any]] = [
        [slot_of(piece.topic, piece.partition, slots) for piece in pieces],
        [piece.topic for piece in pieces],
        [piece.partition for piece in pieces],
        [task] * len(pieces),
        list(range(first, first + len(pieces))),
        [piece.packed.count for piece in pieces],
        [piece.packed.data for piece in pieces],
    ]
    arrays = [
        pa.array(column, field.type) for column, field in zip(columns, _PACKED_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=_PACKED_SCHEMA)


def slot_of(topic: str, partition: int, slots: int) -> int:
    """Which task writes a partition: neighbours go to different ones."""
    return (crc32(topic.encode()) + partition) % slots


def _task() -> int:
    context = TaskContext.get()
    return 0 if context is None else context.partitionId()


def _attempt() -> int:
    context = TaskContext.get()
    return 0 if context is None else context.taskAttemptId()


def _refuse_repetition() -> None:
    context = TaskContext.get()
    if context is None:
        return
    attempt = context.attemptNumber()
    if attempt > 0:
        raise TaskError(
            RepeatedTaskError(
                f"Spark ran writing task {context.partitionId()} again (attempt {attempt}): what "
                "the first has written must be aborted"
            )
        )


@contextmanager
def _told(job: Job) -> Iterator[None]:
    """Errors leave in words for the driver, and nothing of a failed task is used again."""
    settle()
    try:
        yield
    except BaseException as error:
        drop(job.target, job.transactional_id)
        if isinstance(error, PenstockError):
            raise TaskError(error) from error
        raise


Task = Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
