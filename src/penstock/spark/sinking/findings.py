"""Puts the parsed records of several partitions together: what one transaction changes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.sinks.contract import ORIGIN, Changes, Position
from penstock.sinks.fields import Column
from penstock.sinks.schema import Schema, is_json, json_field
from penstock.spark.sinking.parsing import BAD, Parsed

_PREFIX: Final = "_penstock_"


def _with_origin(rows: pa.Table, origin: pa.Table) -> pa.Table:
    for name in origin.column_names:
        rows = rows.append_column(f"{_PREFIX}{name}", origin.column(name))
    return rows


class Findings:
    """The parsed records of some partitions, each partition in the order of the log."""

    def __init__(self, schema: Schema, parsed: Sequence[Parsed]) -> None:
        self._schema = schema
        self._upserts = [_with_origin(each.upserts, each.upserted_at) for each in parsed]
        self._deletes = [_with_origin(each.deletes, each.deleted_at) for each in parsed]
        self.letters = pa.concat_tables([each.bad for each in parsed] or [BAD.empty_table()])
        self.new: dict[str, Column] = {}
        for column in (column for each in parsed for column in each.new.values()):
            self.new[column.name] = _of_both(self.new.get(column.name), column)
        self.by_row = any(each.by_row for each in parsed)
        self.records = sum(each.records for each in parsed)
        # Ids of schemas that the parser must know to read these records.
        self.fractions = {k: v for each in parsed for k, v in each.fractions.items()}
        self.unknown = sorted({id_ for each in parsed for id_ in each.unknown})

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


def _of_both(one: Column | None, other: Column) -> Column:
    """A new column in which two partitions have different values."""
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
