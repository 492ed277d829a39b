"""Arrow columns to record batches, one partition of the log at a time.

Rows are gathered until there is enough for batches of a good size, sorted by the partition they go
to (stably: what was in order stays so), and packed. Memory is bounded by `GATHERED_BYTES` and one
more batch of Spark's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.records.columns.encode import Packed, encode
from penstock.records.columns.partition import partitions_of
from penstock.spark.sink.errors import SinkError

GATHERED_BYTES: Final = 16 << 20


class Piece(NamedTuple):
    """One batch and where it goes."""

    topic: str
    partition: int
    packed: Packed


@dataclass(frozen=True, slots=True)
class Form:
    """What batches look like."""

    codec: str
    batch_bytes: int
    # Producer id and epoch; sequence numbers count from 0 in each call, for the writer to correct.
    producer: tuple[int, int] | None = None
    transactional: bool = False


class Packer:
    """Packs the rows of one task."""

    def __init__(
        self,
        form: Form,
        *,
        topic: str | None,
        partition_count: Callable[[str], int],
        task: int = 0,
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        self._form = form
        self._topic = topic
        self._partition_count = partition_count
        self._clock_ms = clock_ms
        self._gathered: list[pa.RecordBatch] = []
        self._gathered_bytes = 0
        # Where the next records without a key go: tasks begin at different partitions.
        self._next = task

    def add(self, batch: pa.RecordBatch) -> list[Piece]:
        """Take rows; what is ready to be written, if enough have come together."""
        if batch.num_rows:
            self._gathered.append(batch)
            self._gathered_bytes += batch.nbytes
        return self.finish() if self._gathered_bytes >= GATHERED_BYTES else []

    def finish(self) -> list[Piece]:
        """What is left, packed."""
        gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if not gathered:
            return []
        if len(gathered) > 1:
            # One, unless a column would have more than 2 GiB then.
            gathered = pa.Table.from_batches(gathered).combine_chunks().to_batches()
        pieces: list[Piece] = []
        for rows in gathered:
            for topic, of_topic in self._by_topic(rows):
                pieces += self._pack(topic, of_topic)
        return pieces

    def _by_topic(self, rows: pa.RecordBatch) -> Iterator[tuple[str, pa.RecordBatch]]:
        if self._topic is not None:
            yield self._topic, rows
            return
        topics = rows.column(rows.schema.get_field_index("topic"))
        if topics.null_count:
            raise SinkError(
                f"{topics.null_count} rows have no topic",
                advice="Fill the column topic, or give the sink one.",
            )
        coded = pc.dictionary_encode(topics)
        names = coded.dictionary.to_pylist()
        if len(names) == 1:
            yield names[0], rows
            return
        codes = coded.indices.to_numpy(zero_copy_only=False)
        for number in sorted(range(len(names)), key=lambda at: str(names[at])):
            yield names[number], rows.take(pa.array(np.nonzero(codes == number)[0]))

    def _pack(self, topic: str, rows: pa.RecordBatch) -> Iterator[Piece]:
        places = self._places(topic, rows)
        partitions = np.unique(places)
        if len(partitions) == 1:
            for packed in self._encode(topic, rows):
                yield Piece(topic, int(partitions[0]), packed)
            return
        rows = rows.take(pa.array(np.argsort(places, kind="stable")))
        bounds = np.searchsorted(np.sort(places), [*partitions, partitions[-1] + 1])
        for at, partition in enumerate(partitions.tolist()):
            first, last = int(bounds[at]), int(bounds[at + 1])
            for packed in self._encode(topic, rows.slice(first, last - first)):
                yield Piece(topic, partition, packed)

    def _places(self, topic: str, rows: pa.RecordBatch) -> Any:
        """The partition of each row: as given, by its key, or spread in stretches."""
        count = self._partition_count(topic)
        keys = _column(rows, "key")
        if keys is None or keys.null_count == len(keys):
            places = np.full(rows.num_rows, -1, np.int32)
        else:
            places = partitions_of(keys, count)
        given = _column(rows, "partition")
        if given is not None and given.null_count < len(given):
            chosen = pc.fill_null(given, -1).to_numpy(zero_copy_only=False)
            wrong = chosen[(chosen >= count) | ((chosen < 0) & given.is_valid().to_numpy(False))]
            if len(wrong):
                raise SinkError(
                    f"the column partition says {int(wrong[0])}, and {topic!r} has partitions 0 to "
                    f"{count - 1}"
                )
            places = np.where(chosen >= 0, chosen, places)
        loose = np.nonzero(places < 0)[0]
        if len(loose):
            # Whole batches to one partition after the other, not a few records to each.
            stretch = max(1, rows.num_rows * self._form.batch_bytes // max(1, rows.nbytes))
            stretches = np.arange(len(loose)) // stretch
            places[loose] = (self._next + stretches) % count
            self._next = (self._next + int(stretches[-1]) + 1) % count
        return places

    def _encode(self, topic: str, rows: pa.RecordBatch) -> list[Packed]:
        now_ms = self._clock_ms()
        times: Any = now_ms
        stamps = _column(rows, "timestamp")
        if stamps is not None:
            millis = stamps.cast(pa.timestamp("ms", stamps.type.tz), safe=False).cast(pa.int64())
            times = pc.fill_null(millis, now_ms)
            low = pc.min(times).as_py()
            if low < 0:
                raise SinkError(
                    f"a record for {topic!r} is from before 1970 ({low} ms)",
                    advice="The log has no such times: correct the column timestamp.",
                )
        producer = self._form.producer
        return encode(
            _column(rows, "key"),
            _column(rows, "value"),
            headers=_unless_null(_column(rows, "headers")),
            timestamps_ms=times,
            codec=self._form.codec,
            max_batch_bytes=self._form.batch_bytes,
            producer=None if producer is None else (*producer, 0),
            transactional=self._form.transactional,
        )


def _column(rows: pa.RecordBatch, name: str) -> pa.Array | None:
    at = rows.schema.get_field_index(name)
    return rows.column(at) if at >= 0 else None


def _unless_null(column: pa.Array | None) -> pa.Array | None:
    return None if column is None or column.null_count == len(column) else column
