"""Rows of Arrow tables that belong together, by numbers: what merging is done with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.spark.state.numbering import numbered, whole

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


def integers(column: pa.ChunkedArray | pa.Array) -> Ints:
    """A column of integers or times, without nulls, as numbers."""
    array = whole(column)
    if pa.types.is_timestamp(array.type):
        array = array.cast(pa.timestamp("us", array.type.tz)).cast(pa.int64())
    elif array.type != pa.int64():
        array = array.cast(pa.int64())
    return np.asarray(array.to_numpy(zero_copy_only=False), dtype=np.int64)


def codes(columns: Sequence[pa.ChunkedArray | pa.Array], rows: int) -> Ints:
    """A number for each row, the same for two rows if and only if all columns are; null is one."""
    return numbered(columns, rows)[0]


@dataclass(frozen=True)
class Groups:
    """Which of `count` groups each row belongs to, and a row of each."""

    ids: Ints
    firsts: Ints

    @property
    def count(self) -> int:
        return len(self.firsts)

    @cached_property
    def order(self) -> Ints:
        """Rows group by group."""
        return np.argsort(self.ids, kind="stable")

    @cached_property
    def starts(self) -> Ints:
        """Where each group begins in `order`."""
        return np.searchsorted(self.ids[self.order], np.arange(self.count)).astype(np.int64)

    @cached_property
    def ends(self) -> Ints:
        return np.append(self.starts[1:], len(self.ids)).astype(np.int64)

    @property
    def are_single(self) -> bool:
        """Whether no two rows belong together."""
        return self.count == len(self.ids)

    def merged(self, columns: Sequence[tuple[pa.ChunkedArray | pa.Array, str]]) -> list[pa.Array]:
        """Columns brought together by Arrow's functions of these names."""
        if not columns:
            return []
        named = {f"c{at}": whole(column) for at, (column, _) in enumerate(columns)}
        rows = pa.table({"g": pa.array(self.ids), **named})
        wanted = [(f"c{at}", function) for at, (_, function) in enumerate(columns)]
        found = rows.group_by("g", use_threads=False).aggregate(wanted)
        order = pa.array(np.argsort(integers(found["g"]), kind="stable"))
        return [whole(found[f"c{at}_{function}"].take(order)) for at, (_, function) in
                enumerate(columns)]  # fmt: skip

    def best(self, rows: pa.Table, by: Sequence[str], *, last: bool) -> Ints:
        """The first or last row of each group in the order of some columns; nulls never win."""
        way = "descending" if last else "ascending"
        sorting = rows.select(list(by)).append_column("_g", pa.array(self.ids))
        order = pc.sort_indices(
            sorting,
            sort_keys=[("_g", "ascending"), *((each, way) for each in by)],
        )
        at = integers(order)
        return at[self.starts]


def by_codes(numbers: Ints) -> Groups:
    _, firsts, ids = np.unique(numbers, return_index=True, return_inverse=True)
    return Groups(ids.astype(np.int64).reshape(-1), firsts.astype(np.int64))


def lists(values: pa.Array, ends: Ints) -> pa.ListArray:
    """Lists of consecutive values, each ending where `ends` says."""
    offsets = np.concatenate([[0], ends]).astype(np.int32)
    return pa.ListArray.from_arrays(pa.array(offsets), values)


def placed_in(
    keys: Ints, at: Ints, wanted_keys: Ints, wanted_at: Ints, side: Literal["left", "right"]
) -> Ints:
    """Where pairs of key and time would stand in pairs that are sorted, as searchsorted has it.

    Keys are numbers of `codes`.
    """
    # Times are numbered in their order and keys are dense, so that a pair fits into one number.
    times = np.unique(at)
    ranks = np.searchsorted(times, at)
    wanted = np.searchsorted(times, wanted_at, side=side)
    size = len(times) + 1
    return np.searchsorted(keys * size + ranks, wanted_keys * size + wanted).astype(np.int64)
