"""Rows packed by shard where they are read, so that Java only passes them on.

An operator whose input is a stream as it is, or columns of it under other names, needs nothing that
Spark could do with the rows but to bring them to their shards. So the tasks that read them pack
those of each shard as Arrow, some thousands at a time, and what goes through Java and the shuffle
is a handful of rows with bytes in them, where it was each row by itself, twice between Python and
Java. Which shard a row belongs to is told by the hash that Spark has for it: the state of a flow
that was kept before, and rows that come another way, have their shards by that.

Rows that go aside (late, or not to be read) are not packed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.reading.decoding import ASIDE, PACKED, PACKED_TYPE, TIME, VALUE, child
from penstock.spark.reading.frame import ERROR
from penstock.spark.state import spreading

# As many bytes at once: thousands of rows, and still far from what a column of Java's may have.
BLOB_BYTES: Final = 1 << 20
# Among more shards than this so few rows of a span are of the same that packing is no gain.
MOST_SHARDS: Final = 64
_ALIGNMENT: Final = 8
# Where a record stood, and what that is called beside its value.
_POSITIONS: Final = {f"_{name}": name for name in ("key", "topic", "partition", "offset",
                                                  "timestamp")}  # fmt: skip
# All rows of a span have the same.
_SAME: Final = frozenset({"_topic", "_partition"})
# As Spark calls them: keys whose hashes are known here, and what a row may consist of.
KEYS: Final = frozenset({"bigint", "string"})
PLAIN: Final = KEYS | {
    "boolean", "tinyint", "smallint", "int", "float", "double", "date", "timestamp", "binary",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Packing:
    """What is sent of the rows of a stream."""

    # New names, and what they are called in the stream.
    columns: Sequence[tuple[str, str]]
    # Of the new names.
    key: Sequence[str]
    # Those which become long integers.
    longs: Sequence[str] = ()

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Packing:
        columns = tuple((new, old) for new, old in told["columns"])
        return cls(columns, tuple(told["key"]), tuple(told["longs"]))

    def packed(self, rows: pa.RecordBatch, shards: int) -> pa.RecordBatch:
        """A typed frame of one span with its good rows packed."""
        assert PACKED in rows.schema.names, "a stream that is not meant to be packed"
        value = rows.column(VALUE)
        good = value.is_valid()
        beside = pc.or_(rows.column(ERROR).is_valid(), rows.column(ASIDE).is_valid())
        blobs = list(self._blobs(rows, good, shards)) if good.true_count else []
        told = pa.array([{"shard": shard, "rows": blob} for shard, blob in blobs], PACKED_TYPE)
        others = rows.filter(beside)
        arrays = [
            pa.concat_arrays([pa.nulls(len(others), PACKED_TYPE), told])
            if field.name == PACKED
            else pa.concat_arrays([others.column(field.name), pa.nulls(len(told), field.type)])
            for field in rows.schema
        ]
        return pa.RecordBatch.from_arrays(arrays, schema=rows.schema)

    def _blobs(
        self, rows: pa.RecordBatch, good: pa.BooleanArray, shards: int
    ) -> Iterator[tuple[int, bytes]]:
        if good.true_count < len(rows):
            rows = rows.filter(good)
        columns = {new: self._column(rows, new, old) for new, old in self.columns}
        shard = spreading.shards_of_columns([columns[name] for name in self.key], shards)
        order = pa.array(np.argsort(shard.astype(np.int16), kind="stable"))
        olds = dict(self.columns)
        arrays = [
            each if olds[new] in _SAME or each.null_count == len(each) else each.take(order)
            for new, each in columns.items()
        ]
        whole = pa.RecordBatch.from_arrays(arrays, names=list(columns))
        step = max(1, len(whole) * BLOB_BYTES // max(1, whole.nbytes))
        ends = np.cumsum(np.bincount(shard, minlength=shards)).tolist()
        begin = 0
        for number, end in enumerate(ends):
            for at in range(begin, end, step):
                yield number, _written(whole.slice(at, min(step, end - at)))
            begin = end

    def _column(self, rows: pa.RecordBatch, new: str, old: str) -> pa.Array:
        if old in _POSITIONS:
            found = rows.column(_POSITIONS[old])
        elif old == TIME:
            found = rows.column(TIME)
        else:
            found = child(rows.column(VALUE), old)
        return found.cast(pa.int64()) if new in self.longs else found


def unpacked(blobs: pa.ChunkedArray) -> pa.Table:
    """The rows of a shard."""
    tables = []
    for each in blobs:
        data = each.as_buffer()
        if data.address % _ALIGNMENT:
            data = pa.py_buffer(data.to_pybytes())
        with pa.ipc.open_stream(data) as reader:
            tables.append(reader.read_all())
    return pa.concat_tables(tables).combine_chunks()


def _written(rows: pa.RecordBatch) -> bytes:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, rows.schema) as writer:
        writer.write_batch(rows)
    # Else those after it would not be where numbers may be.
    out.write(bytes(-out.tell() % _ALIGNMENT))
    return bytes(out.getvalue())
