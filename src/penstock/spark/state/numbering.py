"""Keys as small numbers among the rows at hand: two rows have one number if their keys are equal.

Equal is what Spark's joins and groups hold for equal: there is one zero and one NaN, whatever their
bits are. Numbers are dense, so below the number of rows: a number and a place in some order, or two
numbers, always fit into one integer of 64 bits. They mean nothing beyond these rows (what stands in
files is hashed, see `hashing`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

Numbers = NDArray[np.int64]


def whole(column: pa.ChunkedArray | pa.Array) -> pa.Array:
    """The column in one piece."""
    if isinstance(column, pa.Array):
        return column
    if column.num_chunks == 1:
        return column.chunk(0)
    joined = column.combine_chunks()
    return joined if isinstance(joined, pa.Array) else pa.concat_arrays(joined.chunks)


def one_of_equals(column: pa.Array) -> pa.Array:
    """There is one zero and one NaN, whatever their bits are."""
    kind = column.type
    if not pa.types.is_floating(kind):
        return column
    column = pc.add(column, pa.scalar(0.0, kind))
    odd = pc.is_nan(column)
    return pc.if_else(odd, pa.scalar(float("nan"), kind), column) if pc.any(odd).as_py() else column


def numbered(
    columns: Sequence[pa.ChunkedArray | pa.Array], rows: int, *, null_is_value: bool = True
) -> tuple[Numbers, int]:
    """A number for each row, and how many there are: in the order in which keys first occur.

    Null is a value like others; or, as in joins, a row that has one equals nothing, and has -1.
    Without columns all rows are one.
    """
    numbers, different = np.zeros(rows, np.int64), min(rows, 1)
    parts = [whole(each) for each in columns]
    for each in parts:
        more, size = _encoded(one_of_equals(each))
        if different <= 1:
            numbers, different = more, size
        elif size > 1:
            numbers, different = _encoded(pa.array(numbers * np.int64(size) + more))
    if not null_is_value:
        for each in parts:
            if each.null_count:
                numbers[np.asarray(each.is_null().to_numpy(zero_copy_only=False))] = -1
    return numbers, different


def _encoded(column: pa.Array) -> tuple[Numbers, int]:
    found = pc.dictionary_encode(column, null_encoding="encode")
    # A copy, so that it can be written to.
    return found.indices.to_numpy(zero_copy_only=False).astype(np.int64), len(found.dictionary)
