"""What comes out for matches: what was measured, and the events, as columns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.patterns import kernel
from penstock.spark.patterns.leaves import Agg, Classifier, MatchNumber, Nav
from penstock.spark.patterns.plan import Measured

if TYPE_CHECKING:
    from penstock.spark.patterns.operator import Matcher

Ints = npt.NDArray[np.int64]
START: Final = "match_start"
END: Final = "match_end"
EVENTS: Final = "events"
VARIABLE: Final = "variable"


@dataclass(frozen=True, slots=True)
class Found:
    """What the kernel found, by match; paths one after the other."""

    group: Ints
    # Where each match's part of the path ends.
    end: Ints
    row: Ints
    variable: npt.NDArray[np.uint8]
    # For each key the first start that is not decided, and its first row.
    next: Ints
    first: Ints


@dataclass(slots=True)
class _Rows:
    """The rows that come out: for each its match, and the part of the path up to it."""

    match: Ints
    low: Ints
    running: Ints
    final: Ints


def given(matcher: Matcher, rows: pa.Table, found: Found, numbers: Ints) -> pa.Table:
    """The rows that come out, as the schema of the matcher says."""
    lows = np.concatenate([[0], found.end[:-1]]) if len(found.end) else found.end
    if matcher.all_rows:
        shown = np.flatnonzero(found.variable < kernel.EXCLUDED)
        match = np.repeat(np.arange(len(found.end)), found.end - lows)[shown]
        out = _Rows(match, lows[match], shown + 1, found.end[match])
    else:
        out = _Rows(np.arange(len(found.end)), lows, found.end, found.end)
    keys = [rows.schema.get_field_index(f"_p_key{n}") for n in range(matcher.keys)]
    firsts = pa.array(found.row[out.low])
    columns: list[Any] = [rows.column(each).take(firsts) for each in keys]
    if matcher.has_time:
        ends = pa.array(found.row[out.final - 1])
        for at in (firsts, ends):
            columns.append(_time(rows["_p_time"].take(at), matcher.schema.field(len(columns)).type))
    columns += [
        _measured(matcher, each, rows, found, out, numbers) for each in matcher.plan.measured
    ]
    if matcher.all_rows:
        current = pa.array(found.row[out.running - 1])
        columns.append(rows["_p_row"].take(current))
    elif matcher.events:
        columns.append(_events(matcher, rows, found, lows))
    types = [field.type for field in matcher.schema]
    made = [
        column if column.type == kind else column.cast(kind)
        for column, kind in zip(columns, types, strict=True)
    ]
    return pa.table(made, schema=matcher.schema)


def _time(values: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    return values.cast(kind) if pa.types.is_timestamp(kind) else values


def _names(matcher: Matcher, variables: Any) -> pa.Array:
    names = pa.array(matcher.plan.names, pa.string())
    return names.take(pa.array(variables))


def _events(matcher: Matcher, rows: pa.Table, found: Found, lows: Ints) -> pa.Array:
    """The rows of each match with the name of their variable, those excluded left out."""
    shown = found.variable < kernel.EXCLUDED
    before = np.concatenate([[0], np.cumsum(shown)])
    offsets = before[np.append(lows, len(found.row))] if len(lows) else np.zeros(1, np.int64)
    whole = rows["_p_row"].take(pa.array(found.row[shown])).combine_chunks()
    if isinstance(whole, pa.ChunkedArray):
        whole = pa.concat_arrays(whole.chunks) if whole.num_chunks else pa.array([], whole.type)
    kind = matcher.schema.field(EVENTS).type
    inner = pa.StructArray.from_arrays(
        [_names(matcher, found.variable[shown]), *whole.flatten()], fields=list(kind.value_type)
    )
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), inner, type=kind)


def _measured(
    matcher: Matcher, each: Measured, rows: pa.Table, found: Found, out: _Rows, numbers: Ints
) -> Any:
    leaf = each.leaf
    if isinstance(leaf, MatchNumber):
        return pa.array(numbers[out.match])
    highs = out.final if _is_final(leaf) else out.running
    if isinstance(leaf, Agg):
        values = rows[matcher.measure_columns[leaf.sql]] if leaf.sql else None
        return _aggregate(leaf, values, found, out.low, highs)
    nav = leaf.at if isinstance(leaf, Classifier) else leaf
    first_rows = found.first[found.group[out.match]]
    back = -1 if isinstance(leaf, Classifier) else nav.back
    at = kernel.navigated(
        found.row, found.variable, np.ascontiguousarray(out.low), np.ascontiguousarray(highs),
        nav.mask, kernel.FIRST if nav.first else kernel.LAST, nav.offset, back, first_rows,
    )  # fmt: skip
    taken = pa.array(np.maximum(at, 0), mask=at < 0)
    if not isinstance(leaf, Classifier):
        return rows[matcher.measure_columns[leaf.sql]].take(taken)
    if not len(found.variable):
        return pa.array([], pa.string())
    return _names(matcher, found.variable & 127).take(taken)


def _is_final(leaf: Nav | Agg | Classifier) -> bool:
    return leaf.at.final if isinstance(leaf, Classifier) else leaf.final


def _aggregate(leaf: Agg, values: Any, found: Found, lows: Ints, highs: Ints) -> Any:
    """An aggregate over the path's rows of variables, for each part of the path."""
    sizes = highs - lows
    out = np.repeat(np.arange(len(lows)), sizes)
    place = (
        np.arange(len(out)) - np.repeat(np.cumsum(sizes) - sizes, sizes) + np.repeat(lows, sizes)
    )
    mine = (np.uint64(leaf.mask) >> (found.variable[place] & 127).astype(np.uint64)) & np.uint64(1)
    out, place = out[mine == 1], place[mine == 1]
    if values is None:
        return pa.array(np.bincount(out, minlength=len(lows)).astype(np.int64))
    taken = values.take(pa.array(found.row[place]))
    if leaf.kind == "avg" and pa.types.is_decimal(taken.type):
        taken = taken.cast(pa.float64())
    if leaf.kind in {"sum", "avg"} and pa.types.is_integer(taken.type):
        taken = taken.cast(pa.int64())
    kind = "mean" if leaf.kind == "avg" else leaf.kind
    grouped = pa.table({"at": pa.array(out), "value": taken})
    # Without threads: a sum of doubles depends on the order.
    found_values = grouped.group_by("at", use_threads=False).aggregate([("value", kind)])
    places = pc.index_in(pa.array(np.arange(len(lows))), value_set=found_values["at"])
    made = found_values[f"value_{kind}"].take(places)
    return pc.fill_null(made, 0) if leaf.kind == "count" else made
