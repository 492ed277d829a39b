"""Errors that are because of what is in a row, and what helps to find the row."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# Some functions let through what Java raises, such as a regular expression that is none.
_OF_JAVA: Final = re.compile(r"\bjava\.[\w.$]+(Exception|Error)\b")
_EXPRESSIONS: Final = "org.apache.spark.sql.catalyst.expressions."
_MOST_LINES: Final = 25
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
        if _is_in_expression(text):
            return True
        if type(error).__name__ in {each.removeprefix("Spark") for each in _KINDS}:
            return True
        error = error.__cause__ or error.__context__
    return False


def _is_in_expression(text: str) -> bool:
    """Whether a stack tells of an exception of Java's own, from within an expression of Spark's."""
    lines = text.split("\n")
    for at, line in enumerate(lines):
        if _OF_JAVA.search(line) is None:
            continue
        frames = 0
        for each in lines[at + 1 : at + _MOST_LINES]:
            if not each.lstrip().startswith("at "):
                if frames:
                    break
                continue
            frames += 1
            if _EXPRESSIONS in each:
                return True
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
