"""Arrow arrays as kernels see them: the addresses of their buffers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from penstock.errors import PenstockError
from penstock.records.columns import kernels


class ColumnsError(PenstockError):
    """Columns that cannot be written as records."""


def as_binary(array: Any, what: str) -> pa.Array:
    """A column of bytes, in one piece and with 32-bit offsets; text counts as its UTF-8 bytes."""
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    if not isinstance(array, pa.Array):
        raise ColumnsError(f"{what} must be an Arrow array, not {type(array).__name__}")
    kind = array.type
    if pa.types.is_binary(kind):
        return array
    if (
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
        or pa.types.is_fixed_size_binary(kind)
        or pa.types.is_null(kind)
    ):
        try:
            return array.cast(pa.binary())
        except pa.ArrowInvalid as error:
            raise ColumnsError(
                f"{what} are more than 2 GiB together: {error}", advice="Write them in parts."
            ) from error
    raise ColumnsError(f"{what} are of type {kind}, not bytes", advice="Cast them to binary first.")


def describe(array: pa.Array | None) -> list[int]:
    """A row of the table of columns that kernels take; None is a column of nulls."""
    row = [0] * kernels.COL_WIDTH
    if array is None:
        return row
    buffers = array.buffers()
    validity, ends = buffers[0], buffers[1]
    data = buffers[2] if len(buffers) == 3 else None
    if ends is None or ends.size == 0:
        # Nothing in it: Arrow need not have allocated offsets.
        return row
    row[kernels.COL_VALID] = validity.address if validity is not None and array.null_count else 0
    row[kernels.COL_FIRST] = array.offset
    row[kernels.COL_ENDS] = ends.address
    row[kernels.COL_DATA] = data.address if data is not None else 0
    row[kernels.COL_HERE] = 1
    return row


def table_of(*arrays: pa.Array | None) -> Any:
    """The table of columns; the arrays must live as long as it is used."""
    return np.array([describe(array) for array in arrays], dtype=np.int64)
