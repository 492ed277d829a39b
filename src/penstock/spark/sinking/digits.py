"""Numbers with more digits than a double has: a decimal, or JSON, keeps what stands in the text.

The parser of records makes doubles of all numbers with a point, and of whole ones beyond 64 bits.
Most have few digits and lose nothing; the others are read once more, here.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.sinks.fields import Column
from penstock.sinks.schema import is_json

# What may be a number that a double does not hold.
_LONG: Final = "[0-9][0-9.]{15}"
_INT_MAX: Final = 1 << 63
# Stands around a number that is written as it was read; no text of others has it.
_MARK: Final = secrets.token_hex(16)
_MARKED: Final = re.compile(rf'"{_MARK}([^"]+)"')


class Digits(str):
    """The text of a number."""

    __slots__ = ()


class JsonText(str):
    """A value that is kept as JSON, as it is to be written."""

    __slots__ = ()


class TooManyDigitsError(ValueError):
    """A number for a column of doubles that nobody has asked for, and which it would change."""


def long(values: pa.ChunkedArray, numbers: Sequence[int]) -> frozenset[int]:
    """Which records may have such a number; `numbers` are theirs."""
    found = pc.fill_null(pc.match_substring_regex(values, _LONG), False)
    if not pc.any(found).as_py():
        return frozenset()
    return frozenset(numbers[at] for at in pc.indices_nonzero(found).to_pylist())


def kept(row: Mapping[str, Any], own: Any, columns: Sequence[Column]) -> Mapping[str, Any]:
    """A row whose numbers have all their digits where a column can hold them; `own` is the same
    row as `read` gives it."""
    if not isinstance(own, dict):
        return row
    found: dict[str, Any] = {}
    for column in columns:
        value, kind = own.get(column.name), column.field.type
        if isinstance(value, Digits) and pa.types.is_decimal(kind):
            found[column.name] = Decimal(value)
        elif is_json(column.field) and (isinstance(value, dict | list | Digits)):
            found[column.name] = JsonText(_written(value))
    return {**row, **found} if found else row


def check(own: Any, columns: Sequence[Column]) -> None:
    """TooManyDigitsError if a double would be another number than the one that is written."""
    for column in columns:
        value = own.get(column.name) if isinstance(own, dict) else None
        if isinstance(value, Digits) and pa.types.is_float64(column.field.type):
            held = float(value)
            digits = len(Decimal(value).normalize().as_tuple().digits)
            if digits > 17 or (digits > 15 and Decimal(repr(held)) != Decimal(value)):
                raise TooManyDigitsError(
                    f"field {column.name} has more digits than a double, which it was taken for: "
                    f"{value}; say its type in fields, as decimal(38,10)"
                )


def read(value: bytes) -> Any:
    """JSON whose numbers are `Digits`, but for whole ones of 64 bits."""
    return json.loads(value, parse_float=Digits, parse_int=_whole)


def _whole(text: str) -> Any:
    # Longer ones are not looked at by Python.
    if len(text) < 20 and -_INT_MAX <= int(text) < _INT_MAX:
        return int(text)
    return Digits(text)


def _written(value: Any) -> str:
    return _MARKED.sub(r"\1", json.dumps(_marked(value), ensure_ascii=False, separators=(",", ":")))


def _marked(value: Any) -> Any:
    if isinstance(value, Digits):
        return f"{_MARK}{value}"
    if isinstance(value, dict):
        return {name: _marked(each) for name, each in value.items()}
    return [_marked(each) for each in value] if isinstance(value, list) else value
