"""Arrow columns as text, and text as Arrow columns: exact both ways."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


def to_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Any column but bytes as text: times without a zone are as SQL writes them, UTC has +00:00."""
    kind = column.type
    if pa.types.is_string(kind):
        return column
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        plain = column.cast(pa.timestamp("us")).cast(pa.string())
        return pc.binary_join_element_wise(plain, "+00:00", "")
    return column.cast(pa.string())


def from_text(values: list[Any], kind: pa.DataType) -> pa.Array:
    """A column from its text: what `to_text` wrote, or what a database writes."""
    if pa.types.is_binary(kind) or pa.types.is_string(kind):
        return pa.array(values, kind)
    if pa.types.is_boolean(kind):
        return pa.array([None if v is None else str(v) in {"1", "true", "t"} for v in values], kind)
    texts = pa.array([None if v is None else str(v) for v in values], pa.string())
    if pa.types.is_timestamp(kind):
        # Without the zone, which is UTC where there is one.
        plain = pc.replace_substring_regex(texts, r"(\+00(:00)?|Z)$", "")
        return plain.cast(pa.timestamp("us")).cast(kind)
    if pa.types.is_time(kind):
        # Arrow reads no times of day, but those of a day.
        moments = pc.binary_join_element_wise("1970-01-01", texts, " ")
        return moments.cast(pa.timestamp("us")).cast(kind)
    return texts.cast(kind)
