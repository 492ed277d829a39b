"""Values of rows as numbers for the kernel: doubles, or ranks where doubles would not be exact."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

_EXACT: Final = 2**53
Doubles = npt.NDArray[np.float64]


def numbers_of(
    rows: pa.Table, columns: Sequence[tuple[str, str]], constants: Sequence[float | str]
) -> tuple[Doubles, npt.NDArray[np.uint8], dict[str, Any]]:
    """A row of numbers for each column, which of them are there, and the values behind ranks."""
    values = np.zeros((max(len(columns), 1), len(rows)), np.float64)
    valid = np.zeros(values.shape, np.uint8)
    domains = _domains(rows, columns, constants)
    for number, (name, encoding) in enumerate(columns):
        column = rows[name].combine_chunks()
        valid[number] = column.is_valid().to_numpy(zero_copy_only=False)
        domain = domains.get(encoding)
        made = pc.index_in(column, value_set=domain) if domain is not None else _plain(column)
        values[number] = made.fill_null(0).to_numpy(zero_copy_only=False)
    return values, valid, domains


def ranked_constants(constants: Sequence[float | str], domains: dict[str, Any]) -> Doubles:
    """Numbers as they are, and text by its rank."""
    made = np.zeros(max(len(constants), 1), np.float64)
    for number, each in enumerate(constants):
        if isinstance(each, str):
            made[number] = domains["string"].index(each).as_py()
        else:
            made[number] = each
    return made


def _domains(
    rows: pa.Table, columns: Sequence[tuple[str, str]], constants: Sequence[float | str]
) -> dict[str, Any]:
    """For each type that is compared by rank its values in order."""
    found: dict[str, list[Any]] = {}
    for name, encoding in columns:
        if encoding != "raw":
            found.setdefault(encoding, []).append(rows[name].combine_chunks())
    texts = [each for each in constants if isinstance(each, str)]
    if texts and "string" in found:
        found["string"].append(pa.array(texts, found["string"][0].type))
    return {
        encoding: _distinct(arrays)
        for encoding, arrays in found.items()
        if encoding != "bigint" or _is_large(arrays)
    }


def _is_large(arrays: Sequence[Any]) -> bool:
    extremes = [value.as_py() for each in arrays for value in pc.min_max(each).values()]
    return any(each is not None and abs(each) > _EXACT for each in extremes)


def _distinct(arrays: Sequence[Any]) -> Any:
    whole = pa.chunked_array(arrays).unique().drop_null()
    return whole.take(pc.array_sort_indices(whole))


def _plain(column: Any) -> Any:
    if pa.types.is_timestamp(column.type):
        return column.cast(pa.timestamp("us", column.type.tz)).cast(pa.int64())
    if pa.types.is_date32(column.type):
        return column.cast(pa.int32())
    if pa.types.is_null(column.type):
        return pa.nulls(len(column), pa.float64())
    return column.cast(pa.float64(), safe=False)
