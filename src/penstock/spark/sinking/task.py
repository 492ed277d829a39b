"""What Spark's tasks do for a sink, and how their findings come to the driver.

Each task gives a few rows of two columns: what it is, and an Arrow stream of it. So the tables pass
through Java as bytes, with types that Spark does not have to know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.sinks.contract import ORIGIN, Changes, Position
from penstock.sinks.fields import Column
from penstock.sinks.schema import Schema, is_json, json_field
from penstock.spark.sinking.parsing import BAD, Parsed, Parser

RESULT: Final = "kind string, data binary"
_OUT: Final = pa.schema([pa.field("kind", pa.string()), pa.field("data", pa.binary())])
_RECORDS: Final = ["key", "value", "topic", "partition", "offset", "timestamp"]
_PREFIX: Final = "_penstock_"
# Rows of one message: below the size that one value may have in Java.
_PIECE_ROWS: Final = 20_000
UPSERTS, DELETES, LETTERS, NEW, COUNT = "upserts", "deletes", "bad", "new", "count"
BY_ROW: Final = "by row"
UNKNOWN: Final = "unknown schemas"
_HOW: Final = b"how"


class Task:
    """For `mapInArrow`: the records of some partitions, in their order, to findings."""

    def __init__(self, parser: Parser) -> None:
        self._parser = parser

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        parts = [batch.select(_RECORDS) for batch in batches if batch.num_rows]
        if parts:
            yield from packed(self._parser.parse(pa.Table.from_batches(parts)))


def packed(parsed: Parsed) -> Iterator[pa.RecordBatch]:
    """Findings as rows for Spark."""
    tables = [
        (UPSERTS, _with_origin(parsed.upserts, parsed.upserted_at)),
        (DELETES, _with_origin(parsed.deletes, parsed.deleted_at)),
        (LETTERS, parsed.bad),
    ]
    for kind, table in tables:
        for at in range(0, table.num_rows, _PIECE_ROWS):
            yield _row(kind, table.slice(at, _PIECE_ROWS))
    if parsed.new:
        yield _row(NEW, pa.schema([_marked(each) for each in parsed.new.values()]).empty_table())
    if parsed.unknown:
        ids = pa.array(sorted(parsed.unknown), pa.int64())
        yield _row(UNKNOWN, pa.table({"ids": ids}))
    if parsed.by_row:
        yield _row(BY_ROW, pa.table({"by_row": [True]}))
    yield _row(COUNT, pa.table({"records": [parsed.records]}))


def _row(kind: str, table: pa.Table) -> pa.RecordBatch:
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    data = pa.array([out.getvalue().to_pybytes()], pa.binary())
    return pa.record_batch([pa.array([kind]), data], schema=_OUT)


def _with_origin(rows: pa.Table, origin: pa.Table) -> pa.Table:
    for name in origin.column_names:
        rows = rows.append_column(f"{_PREFIX}{name}", origin.column(name))
    return rows


class Findings:
    """What the tasks of a micro-batch have found, put together."""

    def __init__(self, schema: Schema, rows: Iterable[tuple[str, bytes]]) -> None:
        self._schema = schema
        tables: dict[str, list[pa.Table]] = {}
        for kind, data in rows:
            with pa.ipc.open_stream(data) as reader:
                tables.setdefault(kind, []).append(reader.read_all())
        self._upserts = tables.get(UPSERTS, [])
        self._deletes = tables.get(DELETES, [])
        self.letters = pa.concat_tables(tables.get(LETTERS) or [BAD.empty_table()])
        self.new: dict[str, Column] = {}
        for table in tables.get(NEW, ()):
            for column in map(_unmarked, table.schema):
                self.new[column.name] = _of_both(self.new.get(column.name), column)
        self.by_row = BY_ROW in tables
        # Ids of schemas that the parser must know to read these records.
        self.unknown = sorted({each for table in tables.get(UNKNOWN, ())
                               for each in table["ids"].to_pylist()})  # fmt: skip
        self.records = sum(int(table["records"][0].as_py()) for table in tables.get(COUNT, ()))

    def changes(self, since: Position, position: Position) -> Changes:
        """The changes, each key once.

        Of the same key in two records the last in the log counts; if they stand in different
        partitions, the one that was written later.
        """
        schema = self._schema
        keys = list(schema.key)
        upserts = _joined(self._upserts, schema.arrow)
        deletes = _joined(self._deletes, schema.key_arrow)
        every = pa.concat_tables(
            [
                _ranked(upserts.select(_columns(keys)), 0),
                _ranked(deletes.select(_columns(keys)), upserts.num_rows),
            ]
        )
        if every.group_by(keys).aggregate([]).num_rows < every.num_rows:
            part, moment, at = (f"{_PREFIX}{n}" for n in ("partition", "timestamp", "offset"))
            of_part = _last(every.sort_by([(part, "ascending"), (at, "ascending")]), [*keys, part])
            order = [(moment, "ascending"), (part, "ascending"), (at, "ascending")]
            chosen = _last(every.take(of_part).sort_by(order), keys)
            count = upserts.num_rows
            put = chosen.filter(pc.less(chosen, count))
            gone = pc.subtract(chosen.filter(pc.greater_equal(chosen, count)), count)
            upserts, deletes = upserts.take(put), deletes.take(gone)
        return Changes(
            upserts.select(list(schema.names)),
            deletes.select(keys),
            position,
            since,
            _origin(upserts),
            _origin(deletes),
        )


def _last(table: pa.Table, keys: list[str]) -> pa.ChunkedArray:
    """The numbers of the last row of each group."""
    grouped = table.group_by(keys, use_threads=False)
    return grouped.aggregate([("_number", "last")]).column("_number_last")


def _marked(column: Column) -> pa.Field:
    """A column as a field that says how its values stand in JSON."""
    return column.field.with_metadata({**(column.field.metadata or {}), _HOW: column.how})


def _unmarked(field: pa.Field) -> Column:
    rest = dict(field.metadata or {})
    how = rest.pop(_HOW, b"").decode()
    return Column(field.with_metadata(rest) if rest else field.remove_metadata(), how)


def _of_both(one: Column | None, other: Column) -> Column:
    """A new column in which two tasks have seen different values."""
    if one is None:
        return other
    kinds = one.field.type, other.field.type
    if one.how == other.how and is_json(one.field) == is_json(other.field):
        if kinds[0] == kinds[1]:
            return other
        if all(map(pa.types.is_integer, kinds)):
            return max(one, other, key=lambda each: int(each.field.type.bit_width))
    if set(kinds) == {pa.int64(), pa.float64()}:
        return Column(pa.field(other.name, pa.float64()))
    return Column(json_field(other.name))


def _columns(keys: list[str]) -> list[str]:
    return [*keys, *(f"{_PREFIX}{name}" for name in ORIGIN.names)]


def _joined(parts: list[pa.Table], rows: pa.Schema) -> pa.Table:
    fields = [*rows, *(pa.field(f"{_PREFIX}{each.name}", each.type) for each in ORIGIN)]
    return pa.concat_tables(parts).combine_chunks() if parts else pa.schema(fields).empty_table()


def _ranked(table: pa.Table, first: int) -> pa.Table:
    numbers = pa.array(range(first, first + table.num_rows), pa.int64())
    return table.append_column("_number", numbers)


def _origin(table: pa.Table) -> pa.Table:
    return pa.table([table.column(f"{_PREFIX}{name}") for name in ORIGIN.names], schema=ORIGIN)
