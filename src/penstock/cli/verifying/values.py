"""Values compared as the source means them, where the store has another type for them.

What a column of the source means decides how both sides are read: `111.00` in a text column is the
number 111 if the source has a number there, and a base64 text is none. Each value becomes a text
that is the same for equal values (its form); one that is not what the source means keeps its own
text, marked, so that it differs from every value.

- number: by value, never rounded: 1.10 is 1.1. A float is the shortest decimal number that is read
  back as the same float, so 0.1 is the decimal 0.1.
- real: a float of four bytes, whatever the other side keeps it in; float6: one of which the
  database shows six digits (MariaDB, MySQL).
- timestamp: as an instant; without a zone, as if in UTC.
- json: by value, whatever the order of keys and the way of writing numbers.
- bytes are only bytes: no text is taken for an encoding of them.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import Context, Decimal, InvalidOperation
from typing import Any, Final, Literal, NoReturn
from uuid import UUID

import numpy as np
import pyarrow as pa

from penstock.sinks.schema import Schema, is_json

Meaning = Literal[
    "boolean", "number", "real", "float6", "text", "bytes", "date", "time", "timestamp", "interval",
    "uuid", "json",
]  # fmt: skip

# Before the text of a value that is not what the source means.
UNREAD: Final = "\0"
# PostgreSQL's largest numbers have 131,072 digits before the point and 16,383 behind it.
_WIDE: Final = Context(prec=200_000, Emax=999_999, Emin=-999_999)
_NUMBER: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,6})?", re.ASCII)
_NO_NUMBER: Final = {
    "nan": "nan", "inf": "inf", "+inf": "inf", "infinity": "inf", "-inf": "-inf",
    "-infinity": "-inf",
}  # fmt: skip
_BOOLEANS: Final = {
    "true": "true", "t": "true", "1": "true", "false": "false", "f": "false", "0": "false",
}  # fmt: skip
_TOO_PRECISE: Final = re.compile(r"[.,]\d{6}\d*[1-9]", re.ASCII)
_INTERVAL: Final = re.compile(
    r"(?P<sign>-?)P(?:(?P<Y>-?\d+)Y)?(?:(?P<M>-?\d+)M)?(?:(?P<W>-?\d+)W)?(?:(?P<D>-?\d+)D)?"
    r"(?:T(?:(?P<h>-?\d+)H)?(?:(?P<m>-?\d+)M)?(?:(?P<s>-?\d+(?:\.\d+)?)S)?)?",
    re.ASCII,
)
_UNREADABLE: Final = (ValueError, TypeError, InvalidOperation, OverflowError, RecursionError)


def meaning_of(field: pa.Field) -> Meaning:
    """What a column holds, by its type."""
    kind, types = field.type, pa.types
    if is_json(field):
        return "json"
    for test, meaning in _MEANINGS:
        if test(kind):
            return meaning
    return "json" if types.is_nested(kind) else "text"


_MEANINGS: Final[tuple[tuple[Callable[[pa.DataType], bool], Meaning], ...]] = (
    (pa.types.is_boolean, "boolean"),
    (pa.types.is_integer, "number"),
    (pa.types.is_float32, "real"),
    (pa.types.is_floating, "number"),
    (pa.types.is_decimal, "number"),
    (pa.types.is_binary, "bytes"),
    (pa.types.is_date, "date"),
    (pa.types.is_time, "time"),
    (pa.types.is_timestamp, "timestamp"),
)


def compared_as(source: pa.Field, stored: pa.Field) -> Meaning | None:
    """What the values of both sides are to be read as; None if they are compared as they are.

    The rule of types: the source says what a value means, and the store's type counts only where it
    holds the same kind of value, such as a wider integer.
    """
    one, other = source.type, stored.type
    if is_json(source) or is_json(stored):
        return None if is_json(source) and is_json(stored) else "json"
    alike = (pa.types.is_integer, pa.types.is_floating, pa.types.is_timestamp)
    if one == other or any(test(one) and test(other) for test in alike):
        return None
    return meaning_of(source)


class Form:
    """Both sides' columns, brought to where equal values are equal."""

    def __init__(self, stored: Schema, meanings: Mapping[str, Meaning]) -> None:
        """`meanings` has the columns that are not compared as they are."""
        self._meanings = meanings
        self.schema = Schema(
            tuple(
                pa.field(each.name, pa.string()) if each.name in meanings else each
                for each in stored.fields
            ),
            stored.key,
        )

    def meaning(self, name: str) -> Meaning | None:
        """What a column is read as; None if it is compared as it is."""
        return self._meanings.get(name)

    def of(self, rows: pa.Table | pa.RecordBatch) -> pa.Table:
        """Rows of either side, or only columns of the key."""
        table = pa.Table.from_batches([rows]) if isinstance(rows, pa.RecordBatch) else rows
        if not self._meanings:
            return table
        columns, fields = [], []
        for field in self.schema.fields:
            if field.name in table.column_names:
                column, meaning = table.column(field.name), self._meanings.get(field.name)
                columns.append(column if meaning is None else formed(column, meaning))
                fields.append(field)
        return pa.table(columns, schema=pa.schema(fields))


def formed(column: pa.ChunkedArray | pa.Array, meaning: Meaning) -> pa.Array:
    """The forms of a column's values."""
    kind = column.type
    if meaning == "text" and pa.types.is_string(kind):
        return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    if meaning == "number" and pa.types.is_integer(kind):
        found = column.cast(pa.string())
        return found.combine_chunks() if isinstance(found, pa.ChunkedArray) else found
    if pa.types.is_float32(kind):
        # As the shortest text of such a number, which is another one as that of a double.
        values: Iterable[Any] = (
            None if each is None else Decimal(str(np.float32(each))) for each in column.to_pylist()
        )
    else:
        values = values_of(column)
    return pa.array([form_of(value, meaning) for value in values], pa.string())


def values_of(column: pa.ChunkedArray | pa.Array) -> list[Any]:
    """A column for people; times that Python does not have (`infinity`) as the number they are."""
    try:
        found: list[Any] = column.to_pylist()
    except (OverflowError, ValueError):
        found = [_value(each) for each in column]
    return found


def _value(value: pa.Scalar) -> Any:
    try:
        return value.as_py()
    except (OverflowError, ValueError):
        return f"{value.value} ({value.type})"


def form_of(value: Any, meaning: Meaning) -> str | None:
    """The form of one value; None for null."""
    if value is None:
        return None
    try:
        return _FORMS[meaning](value)
    except _UNREADABLE:
        return UNREAD + _text(value)


def shown(form: str | None, meaning: Meaning) -> Any:
    """A form for people and for JSON: whole numbers and booleans as such, else its text."""
    if form is None or form.startswith(UNREAD):
        return form and form.removeprefix(UNREAD)
    if meaning == "boolean":
        return form == "true"
    if meaning == "number" and form.lstrip("-").isdecimal():
        return int(form)
    return form


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode()
    if isinstance(value, dt.timedelta):
        return _clock_text(value)
    return value if isinstance(value, str) else str(value)


def _boolean(value: Any) -> str:
    if isinstance(value, bytes):
        # A column of bits.
        value = int.from_bytes(value, "big")
    found = _BOOLEANS.get(_text(value).lower())
    return _unread(value) if found is None else found


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "1" if value else "0"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float | np.floating):
        value = repr(float(value))
    if isinstance(value, str):
        text = value.strip()
        if text.lower() in _NO_NUMBER:
            return _NO_NUMBER[text.lower()]
        if not _NUMBER.fullmatch(text):
            raise ValueError(value)
        value = Decimal(text)
    if not isinstance(value, Decimal):
        raise TypeError(value)
    if not value.is_finite():
        return _NO_NUMBER[str(value).lower()]
    if not value:
        return "0"
    return format(value.normalize(_WIDE), "f")


def _real(value: Any) -> str:
    text = _number(value)
    with np.errstate(over="ignore"):
        return text if text in _NO_NUMBER else _number(str(np.float32(text)))


def _float6(value: Any) -> str:
    text = _number(value)
    return text if text in _NO_NUMBER else _number(f"{float(text):.6g}")


def _bytes(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).hex()
    return _unread(value)


def _date(value: Any) -> str:
    if isinstance(value, str):
        value = dt.datetime.fromisoformat(value.strip())
    if isinstance(value, dt.datetime):
        if value.time() != dt.time() or value.tzinfo is not None:
            return _unread(value)
        value = value.date()
    if not isinstance(value, dt.date):
        return _unread(value)
    return value.isoformat()


def _time(value: Any) -> str:
    if isinstance(value, dt.timedelta):
        if not dt.timedelta() <= value < dt.timedelta(days=1):
            return _unread(value)
        value = (dt.datetime.min.replace(tzinfo=dt.UTC) + value).time()
    if isinstance(value, str):
        _check_digits(value)
        value = dt.time.fromisoformat(value.strip())
    if not isinstance(value, dt.time):
        return _unread(value)
    if value.tzinfo is None:
        return value.isoformat("microseconds")
    moment = dt.datetime.combine(dt.date(2000, 1, 2), value).astimezone(dt.UTC)
    return f"{moment.time().isoformat('microseconds')}Z"


def _timestamp(value: Any) -> str:
    if isinstance(value, str):
        _check_digits(value)
        value = dt.datetime.fromisoformat(value.strip())
    if isinstance(value, dt.date) and not isinstance(value, dt.datetime):
        value = dt.datetime.combine(value, dt.time())
    if not isinstance(value, dt.datetime):
        return _unread(value)
    if value.tzinfo is not None:
        value = value.astimezone(dt.UTC).replace(tzinfo=None)
    text: str = value.isoformat(" ", "microseconds")
    return text


def _check_digits(text: str) -> None:
    """Python would cut what is beyond microseconds."""
    if _TOO_PRECISE.search(text):
        raise ValueError(text)


def _interval(value: Any) -> str:
    """Months, days and seconds: none of them is so many of another."""
    found = _INTERVAL.fullmatch(value) if isinstance(value, str) else None
    if found is None or len(value.lstrip("-")) < 3:
        return _unread(value)
    part = {name: Decimal(text or 0) for name, text in found.groupdict().items() if name != "sign"}
    sign = -1 if found["sign"] else 1
    months = sign * (part["Y"] * 12 + part["M"])
    days = sign * (part["W"] * 7 + part["D"])
    seconds = sign * (part["h"] * 3600 + part["m"] * 60 + part["s"])
    return f"P{_number(months)}M{_number(days)}DT{_number(seconds)}S"


def _uuid(value: Any) -> str:
    return str(value if isinstance(value, UUID) else UUID(str(value)))


def _json(value: Any) -> str:
    if isinstance(value, str | bytes):
        value = json.loads(value, parse_float=Decimal)
    return _json_text(value)


def _json_text(value: Any) -> str:
    if isinstance(value, Mapping):
        inner = ", ".join(
            f"{json.dumps(str(name))}: {_json_text(each)}" for name, each in sorted(value.items())
        )
        return f"{{{inner}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_json_text, value))}]"
    if value is None or isinstance(value, bool):
        return "null" if value is None else _text(value)
    if isinstance(value, int | float | Decimal):
        return _number(value)
    return json.dumps(_text(value), ensure_ascii=False)


def _clock_text(value: dt.timedelta) -> str:
    micros = value // dt.timedelta(microseconds=1)
    sign, micros = ("-", -micros) if micros < 0 else ("", micros)
    seconds, rest = divmod(micros, 1_000_000)
    fraction = f".{rest:06d}" if rest else ""
    return f"{sign}{seconds // 3600:02d}:{seconds // 60 % 60:02d}:{seconds % 60:02d}{fraction}"


def _unread(value: Any) -> NoReturn:
    raise TypeError(value)


_FORMS: Final[Mapping[Meaning, Callable[[Any], str]]] = {
    "boolean": _boolean, "number": _number, "real": _real, "float6": _float6,
    "text": _text, "bytes": _bytes, "date": _date, "time": _time, "timestamp": _timestamp,
    "interval": _interval, "uuid": _uuid, "json": _json,
}  # fmt: skip
