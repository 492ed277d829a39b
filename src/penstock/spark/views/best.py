"""The first values of each group, in order, so that the next one is known when the first goes.

    key -> whole, [values]

A list is the beginning of all different values of its group in their order, smallest or largest
first; if it is `whole`, it is all of them. A value that comes is put into it unless it is behind
the end of a list that is not whole: nobody knows what else is there. When a list has become empty
it is filled again from all values, which are kept elsewhere; as values come as well as go, that is
rare.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.state import KeyedTable, State
from penstock.spark.state.numbering import whole
from penstock.spark.views.columns import (
    Indices,
    Mask,
    key_fields,
    key_names,
    numbered,
    taken,
)
from penstock.spark.views.lists import CODE

VALUE: Final = "_value"
_WHOLE, _LIST, _NAN = "_whole", "_list", "_nan"
# So many are kept of a list that has become longer than twice as many.
SHORT: Final = 64

# From the codes of groups to all of their values: CODE and VALUE.
Everything = Callable[[Indices], pa.Table]


@dataclass(frozen=True, slots=True)
class _Lists:
    """Of some groups: values in order, group after group, and what is whole."""

    rows: pa.Table
    is_whole: Mask


class Best:
    """The lists of a shard."""

    def __init__(
        self,
        state: State,
        name: str,
        key: Sequence[pa.DataType],
        kind: pa.DataType,
        *,
        largest: bool,
    ) -> None:
        fields = [
            *key_fields(key),
            pa.field(_WHOLE, pa.bool_()),
            pa.field(_LIST, pa.list_(kind)),
        ]
        self._table: KeyedTable = state.table(name, pa.schema(fields), key_names(len(key)))
        self._kind = kind
        self._largest = largest

    def changed(
        self, keys: pa.Table, come: pa.Table, gone: pa.Table, everything: Everything
    ) -> pa.Array:
        """The first value of each key after some have come and gone; null where there is none.

        `come` and `gone` have CODE, a position in `keys`, and VALUE: those that were not there
        before, and those that are not any more.
        """
        count = len(keys)
        lists = self._without(self._with(self._read(keys), come), gone)
        sizes = np.bincount(lists.rows[CODE].to_numpy(), minlength=count)
        empty = np.flatnonzero((sizes == 0) & ~lists.is_whole)
        if len(empty):
            lists = self._filled(lists, empty, everything)
            sizes = np.bincount(lists.rows[CODE].to_numpy(), minlength=count)
        starts = np.cumsum(sizes) - sizes
        touched = np.zeros(count, np.bool_)
        touched[come[CODE].to_numpy()] = True
        touched[gone[CODE].to_numpy()] = True
        self._write(keys, lists, starts, sizes, touched)
        at = pa.array(np.where(sizes > 0, starts, 0), mask=sizes == 0)
        return whole(lists.rows[VALUE]).take(at)

    def _read(self, keys: pa.Table) -> _Lists:
        found = self._table.get(keys)
        column = whole(found[_LIST])
        code = pc.list_parent_indices(column).to_numpy().astype(np.int64)
        rows = pa.table([pa.array(code), pc.list_flatten(column)], names=[CODE, VALUE])
        # A group that is new has no values but those that come.
        is_whole = whole(found[_WHOLE]).fill_null(True).to_numpy(zero_copy_only=False)
        return _Lists(rows, is_whole.astype(np.bool_))

    def _with(self, lists: _Lists, come: pa.Table) -> _Lists:
        come = self._near(lists, come.select([CODE, VALUE]).cast(lists.rows.schema))
        if not len(come):
            return lists
        both = pa.concat_tables([lists.rows, come])
        order = self._order(both)
        code = both[CODE].to_numpy()[order]
        # Where each list ended: behind that nothing is known, unless it was whole.
        end = np.full(len(lists.is_whole), -1, np.int64)
        was = np.flatnonzero(order < len(lists.rows))
        np.maximum.at(end, code[was], was)
        known = lists.is_whole[code] | (np.arange(len(order)) <= end[code])
        return _Lists(taken(both, order[known]), lists.is_whole)

    def _near(self, lists: _Lists, come: pa.Table) -> pa.Table:
        """Without most of what comes after the end of its list: to sort it would be for nothing."""
        if not len(come) or not len(lists.rows) or not _is_plain(self._kind):
            return come
        last = np.full(len(lists.is_whole), -1, np.int64)
        # Groups stand together: of each the last assignment stays.
        last[lists.rows[CODE].to_numpy()] = np.arange(len(lists.rows))
        code = come[CODE].to_numpy()
        end = np.where(lists.is_whole[code], -1, last[code])
        ends = whole(lists.rows[VALUE]).take(pa.array(end, mask=end < 0))
        before = pc.greater if self._largest else pc.less
        return come.filter(pc.fill_null(before(whole(come[VALUE]), ends), True))

    def _without(self, lists: _Lists, gone: pa.Table) -> _Lists:
        if not len(gone):
            return lists
        both = pa.concat_tables([lists.rows, gone.select([CODE, VALUE]).cast(lists.rows.schema)])
        numbers, first = numbered(both, (CODE, VALUE))
        is_gone = np.zeros(len(first), np.bool_)
        is_gone[numbers[len(lists.rows) :]] = True
        left = ~is_gone[numbers[: len(lists.rows)]]
        return _Lists(lists.rows.filter(pa.array(left)), lists.is_whole)

    def _filled(self, lists: _Lists, empty: Indices, everything: Everything) -> _Lists:
        """Those that have become empty, from all values."""
        more = everything(empty).cast(lists.rows.schema)
        more = taken(more, self._order(more))
        is_whole = lists.is_whole.copy()
        is_whole[empty] = True
        both = pa.concat_tables([lists.rows, more])
        order = np.argsort(both[CODE].to_numpy(), kind="stable")
        return _Lists(taken(both, order), is_whole)

    def _write(
        self, keys: pa.Table, lists: _Lists, starts: Indices, sizes: Indices, touched: Mask
    ) -> None:
        over = touched & (sizes == 0)
        if over.any():
            self._table.delete(keys.filter(pa.array(over)))
        stay = np.flatnonzero(touched & (sizes > 0))
        if not len(stay):
            return
        long = sizes[stay] > 2 * SHORT
        wanted = np.where(long, SHORT, sizes[stay])
        offsets = np.concatenate([[0], np.cumsum(wanted)]).astype(np.int32)
        at = np.repeat(starts[stay] - offsets[:-1], wanted) + np.arange(offsets[-1])
        values = whole(lists.rows[VALUE]).take(pa.array(at))
        said = taken(keys, stay).append_column(_WHOLE, pa.array(lists.is_whole[stay] & ~long))
        self._table.put(
            said.append_column(_LIST, pa.ListArray.from_arrays(pa.array(offsets), values))
        )

    def _order(self, rows: pa.Table) -> Indices:
        """By group, then the best first. NaN is larger than anything, as in Spark."""
        way: Any = "descending" if self._largest else "ascending"
        by: list[tuple[str, Any]] = [(CODE, "ascending"), (VALUE, way)]
        if pa.types.is_floating(self._kind):
            is_nan = pc.is_nan(rows[VALUE])
            plain = pc.if_else(is_nan, pa.scalar(0.0, self._kind), rows[VALUE])
            rows = pa.table([rows[CODE], plain, is_nan.cast(pa.int8())], names=[CODE, VALUE, _NAN])
            by.insert(1, (_NAN, way))
        found: Indices = pc.sort_indices(rows, sort_keys=by).to_numpy().astype(np.int64)
        return found


def _is_plain(kind: pa.DataType) -> bool:
    """Whether Arrow compares such values as they are ordered here."""
    return bool(
        pa.types.is_integer(kind) or pa.types.is_decimal(kind) or pa.types.is_temporal(kind)
    )
