"""Rows of which an expression cannot be computed: set aside by key, and back when mended.

A row that divides by zero, or holds no number where one is cast, is no reason to stop a view: it is
left out, noted with its key, its place in the log and the reason, and comes back with the change
that mends it. What is left is what the query gives without such rows.

A micro-batch is first tried as if there were none, which costs nothing. If it fails because of what
is in its rows, or if rows are set aside already, it is **guarded**: Spark tries each expression
(`penstock.spark.views.trying`), and a row travels on with columns that say what was wrong with it:
FAILED, the reason, and ROW, its key as JSON; AT is the place of the change that brought the row.
The next operator takes such rows out and notes them in its state, in tables that begin with
`penstock.spark.state.operator.SET_ASIDE`. An expression gives the same for a row that goes as it
gave when the row came, so that it is taken out of the note when it goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.state import KeyedTable, State
from penstock.spark.state.applying import ORDER
from penstock.spark.state.numbering import whole
from penstock.spark.state.operator import SET_ASIDE
from penstock.spark.views.columns import (
    PRESENT,
    SIGN,
    Mask,
    kept,
    key_fields,
    key_names,
    keys_of,
    mask,
    numbered,
    taken,
)

AT: Final = "_penstock_at"
FAILED: Final = "_penstock_failed"
ROW: Final = "_penstock_row"
COLUMNS: Final = (AT, FAILED, ROW)
_TEXT: Final = pa.string()
_FOUND: Final = "_found"


def places(rows: pa.Table) -> pa.Array:
    """Where changes stand in the log, as text; null if they do not say."""
    if any(name not in rows.column_names for name in ORDER):
        return pa.nulls(len(rows), _TEXT)
    topic, partition, offset = (whole(rows[name]).cast(_TEXT) for name in ORDER)
    part = pc.binary_join_element_wise(topic, partition, "-")
    return pc.binary_join_element_wise(part, offset, " offset ")


def at_of(rows: pa.Table) -> pa.Array:
    """The places that rows carry."""
    return whole(rows[AT]) if AT in rows.column_names else pa.nulls(len(rows), _TEXT)


def with_field(schema: pa.Schema) -> pa.Schema:
    """A schema of rows that say where they come from."""
    return schema.append(pa.field(AT, _TEXT))


def failed(rows: pa.Table) -> Mask:
    """Which rows could not be computed."""
    if FAILED not in rows.column_names:
        return np.zeros(len(rows), np.bool_)
    found: Mask = whole(rows[FAILED]).is_valid().to_numpy(zero_copy_only=False)
    return found


def of_changelog(
    state: State, name: str, kinds: Sequence[pa.DataType], keys: pa.Table, rows: pa.Table
) -> pa.Table:
    """The newest rows of a table, those that failed as if they were deleted, with their places.

    `keys` are their primary keys, of which each is there once.
    """
    rows = rows.append_column(AT, places(rows))
    bad = failed(rows)
    note(_table(state, name, kinds), keys, bad, rows)
    if bad.any():
        present = pa.array(mask(rows[PRESENT]) & ~bad)
        rows = rows.set_column(rows.schema.get_field_index(PRESENT), PRESENT, present)
    return rows


def of_signed(
    state: State, name: str, rows: pa.Table, key: Sequence[str], kinds: Sequence[pa.DataType]
) -> pa.Table:
    """Rows with signs, without those that failed: these are noted when they come."""
    bad = failed(rows)
    if not bad.any():
        return rows
    those = kept(rows, bad)
    keys = keys_of(those, key).append_column(ROW, whole(those[ROW]))
    # Of a row that goes and comes what comes counts.
    numbers, first = numbered(keys, keys.column_names)
    plus = mask(those[SIGN])
    last = first.copy()
    last[numbers[plus]] = np.flatnonzero(plus)
    comes = np.zeros(len(first), np.bool_)
    comes[numbers[plus]] = True
    note(_table(state, name, kinds, ROW), taken(keys, first), comes, taken(those, last))
    return kept(rows, ~bad)


def of_groups(
    state: State, kinds: Sequence[pa.DataType], keys: pa.Table, bad: Mask, rows: pa.Table
) -> None:
    """Note groups of which a result cannot be told; `rows` are FAILED, ROW and AT."""
    note(_table(state, "groups", kinds), keys, bad, rows)


def note(table: KeyedTable, keys: pa.Table, bad: Mask, rows: pa.Table) -> None:
    """Note the rows that are bad under their keys, and forget the others."""
    gone = kept(keys, ~bad)
    is_there = len(gone) > 0 and len(table.runs) > 0
    gone = kept(gone, mask(table.get(gone)[_FOUND])) if is_there else gone.slice(0, 0)
    fresh = None
    if bad.any():
        fresh, those = kept(keys, bad), kept(rows, bad)
        for name in table.schema.names:
            if name not in fresh.column_names:
                fresh = fresh.append_column(name, whole(those[name]).cast(_TEXT))
    if fresh is not None or len(gone):
        table.change(fresh, gone)


def told(row: dict[str, Any]) -> str:
    """A key as JSON, of what is no row of Spark's."""
    return orjson.dumps(row, default=str).decode()


def _table(state: State, name: str, kinds: Sequence[pa.DataType], *more: str) -> KeyedTable:
    key = [*key_names(len(kinds)), *more]
    texts = [each for each in (ROW, FAILED, AT) if each not in more]
    fields = [*key_fields(kinds), *(pa.field(each, _TEXT) for each in (*more, *texts))]
    return state.table(f"{SET_ASIDE} {name}", pa.schema(fields), key)
