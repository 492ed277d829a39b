"""Columns as SQL text. To Spark it is the same, and each `Column` costs several calls to Java.

For what is done in every micro-batch: there the calls took longer than the planning.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


def quoted(name: str) -> str:
    """A name as SQL takes any."""
    return f"`{name.replace('`', '``')}`"


def struct(names: Iterable[str]) -> str:
    """Columns as one."""
    return f"struct({', '.join(map(quoted, names))})"


def select(rows: DataFrame, wanted: Mapping[str, str], *more: str) -> DataFrame:
    """Columns by their names, each with the expression that it is; and more, as they are."""
    named = (f"{text} AS {quoted(name)}" for name, text in wanted.items())
    return rows.selectExpr(*more, *named)
