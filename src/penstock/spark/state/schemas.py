"""Spark's types as Arrow's, as operators see them: anything may be null."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import pyarrow as pa
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.pandas.types import to_arrow_schema

# What to do about a key that has parts.
PLAIN_KEY: Final = (
    "Make a text of it before, such as withColumn(NAME, to_json(NAME)), or take its parts as "
    "columns of their own."
)


def arrow_schema(kind: T.StructType) -> pa.Schema:
    """The schema of rows, in UTC; what Spark knows never to be null may be, like the rest.

    Rows of a micro-batch meet those of a state, and Arrow does not unite columns that differ in
    this only.
    """
    found = to_arrow_schema(kind, timezone="UTC")
    return pa.schema([each.with_nullable(True) for each in found])


def shown(columns: Iterable[pa.Field]) -> str:
    """Columns as text: their names and types, which is what state depends on."""
    return ", ".join(f"{each.name} {each.type}" for each in columns)


def is_nested(kind: T.DataType) -> bool:
    """Whether values have parts, so that rows cannot be told apart by them here."""
    return isinstance(kind, T.ArrayType | T.MapType | T.StructType | T.VariantType)
