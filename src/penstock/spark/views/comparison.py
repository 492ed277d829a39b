"""Simple conditions on the rows of a view, and its values with their types."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any, Final

from penstock.errors import PenstockError

_TESTS: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<>": operator.ne, "!=": operator.ne, "<=": operator.le, ">=": operator.ge,
    "=": operator.eq, "<": operator.lt, ">": operator.gt,
}  # fmt: skip
_COMPARED: Final = re.compile(r"\s*(?P<column>`[^`]+`|[^\s<>=!`]+)\s*(?P<test><>|!=|<=|>=|=|<|>)"
                              r"\s*(?P<value>.*?)\s*", re.DOTALL)  # fmt: skip
_NULL: Final = re.compile(
    r"\s*(?P<column>`[^`]+`|[^\s<>=!`]+)\s+is\s+(?P<not>not\s+)?null\s*", re.IGNORECASE
)
_WHOLE: Final = frozenset({"tinyint", "smallint", "int", "bigint"})
_FLOATS: Final = frozenset({"float", "double"})
_TRUTHS: Final = {"true": True, "false": False}
IS_NULL, IS_NOT_NULL = "is null", "is not null"


class ConditionError(PenstockError):
    """A condition or a value of a key cannot be read."""


def loads(data: bytes) -> Any:
    """JSON, with numbers that are not whole as they were written."""
    try:
        return json.loads(data, parse_float=Decimal)
    except ValueError as error:
        raise ConditionError(
            f"a record of the topic is no row of a view: {data[:100]!r}",
            advice="The topic of a view is written by the view alone.",
        ) from error


@dataclass(frozen=True, slots=True)
class Types:
    """Columns and what Spark calls their types; empty if nobody knows."""

    columns: Mapping[str, str]

    def typed(self, row: Any) -> dict[str, Any]:
        """A row of JSON with Python's values."""
        if not isinstance(row, dict):
            raise ConditionError(f"{str(row)[:100]!r} is no row of a view")
        return {name: _value(value, self.columns.get(name, "")) for name, value in row.items()}

    def read(self, column: str, text: str) -> Any:
        """A value as somebody has written it; ConditionError if it is none of the column's."""
        kind = self.columns.get(column, "")
        try:
            return _read(text, kind)
        except (ValueError, InvalidOperation, KeyError):
            raise ConditionError(
                f"{text!r} is no {kind}, as column {column!r} is", advice=_example(column, kind)
            ) from None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A column compared with a value; nothing compares with null."""

    column: str
    test: str
    text: str = ""

    def check(self, types: Types) -> None:
        """ConditionError if the value does not fit the column."""
        if self.test not in {IS_NULL, IS_NOT_NULL} and self.column in types.columns:
            types.read(self.column, self.text)

    def holds(self, row: Mapping[str, Any], types: Types) -> bool:
        value = row[self.column]
        if self.test in {IS_NULL, IS_NOT_NULL}:
            return (value is None) == (self.test == IS_NULL)
        if value is None:
            return False
        if self.column in types.columns:
            return _compared(self.test, value, types.read(self.column, self.text))
        return _guessed(self.test, value, self.text)


def text_of(value: Any) -> str:
    """A value as it is written in conditions."""
    if isinstance(value, bool):
        return str(value).lower()
    return value.isoformat() if isinstance(value, date) else str(value)


def comparison(text: str) -> Comparison:
    """COLUMN TEST VALUE, or COLUMN IS [NOT] NULL."""
    found = _NULL.fullmatch(text)
    if found is not None:
        return Comparison(found["column"].strip("`"), IS_NOT_NULL if found["not"] else IS_NULL)
    found = _COMPARED.fullmatch(text)
    if found is None or not found["value"]:
        raise ConditionError(
            f"{text!r} is no condition",
            advice="Write COLUMN = VALUE, with =, <>, <, <=, > or >=; or COLUMN IS [NOT] NULL.",
        )
    value = found["value"]
    if len(value) > 1 and value[0] == value[-1] == "'":
        value = value[1:-1].replace("''", "'")
    return Comparison(found["column"].strip("`"), found["test"], value)


def _compared(test: str, one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        # NaN equals itself and is larger than anything, as in Spark.
        one, other = ((math.isnan(each), 0.0 if math.isnan(each) else each)
                      for each in (one, other))  # fmt: skip
    return _TESTS[test](one, other)


def _guessed(test: str, value: Any, text: str) -> bool:
    """Of a column whose type nobody knows: a number if both are, else as text."""
    if isinstance(value, bool):
        return _TESTS[test](str(value).lower(), text.lower())
    if isinstance(value, int | float | Decimal):
        try:
            return _TESTS[test](Decimal(str(value)), Decimal(text))
        except InvalidOperation:
            raise ConditionError(f"{text!r} is compared with a number, {value}") from None
    return _TESTS[test](value if isinstance(value, str) else json.dumps(value, default=str), text)


def _read(text: str, kind: str) -> Any:
    if kind in _WHOLE:
        return int(text)
    if kind in _FLOATS:
        return float(text)
    if kind.startswith("decimal"):
        number = Decimal(text)
        if not number.is_finite():
            raise ValueError(text)
        return number
    if kind == "boolean":
        return _TRUTHS[text.lower()]
    if kind == "date":
        return date.fromisoformat(text)
    if kind in {"timestamp", "timestamp_ntz"}:
        return _time(text, kind)
    return text


def _value(value: Any, kind: str) -> Any:
    """A value of JSON as Spark has written it."""
    if value is None:
        return None
    if kind in _FLOATS:
        return float(value)
    if kind.startswith("decimal"):
        return Decimal(value)
    if kind == "date":
        return date.fromisoformat(value)
    if kind in {"timestamp", "timestamp_ntz"}:
        return _time(value, kind)
    if not kind and isinstance(value, Decimal):
        return float(value)
    return value


def _time(text: str, kind: str) -> datetime:
    found = datetime.fromisoformat(text)
    if kind == "timestamp" and found.tzinfo is None:
        raise ValueError("no time zone")
    return found.replace(tzinfo=None) if kind == "timestamp_ntz" else found


def _example(column: str, kind: str) -> str:
    examples = {
        "timestamp": "2026-01-31T12:00:00Z", "timestamp_ntz": "2026-01-31T12:00:00",
        "date": "2026-01-31", "boolean": "true",
    }  # fmt: skip
    return f"Such as {column}={examples.get(kind, '12')}"
