"""Errors that are because of what is in a row, and what helps to find the row."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# What Spark would compute before it is asked whether it may: it hoists common parts out of a try.
_HOISTING: Final = "spark.sql.subexpressionElimination.enabled"
# Kinds of errors that are about what is in a row: data, constraints, and what raise_error raises.
_STATES: Final = ("SQLSTATE: 22", "SQLSTATE: 23", "SQLSTATE: P0001")
_KINDS: Final = (
    *("SparkArithmeticException", "SparkNumberFormatException", "SparkDateTimeException"),
    *("SparkArrayIndexOutOfBoundsException", "SparkNoSuchElementException"),
    *("SparkIllegalArgumentException", "AggregateError"),
)


def is_of_row(error: BaseException | None) -> bool:
    """Whether an error may be because of what is in a row."""
    while error is not None:
        text = str(error)
        if any(each in text for each in (*_STATES, *_KINDS)):
            return True
        if type(error).__name__ in {each.removeprefix("Spark") for each in _KINDS}:
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def as_written(spark: SparkSession) -> Iterator[None]:
    """While Spark computes each expression where it stands."""
    before = spark.conf.get(_HOISTING, None)
    spark.conf.set(_HOISTING, "false")
    try:
        yield
    finally:
        if before is None:
            spark.conf.unset(_HOISTING)
        else:
            spark.conf.set(_HOISTING, before)
