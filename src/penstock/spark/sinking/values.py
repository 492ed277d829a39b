"""Values of JSON to Arrow columns: all at once where they are as they should be, else one by one
to find those that are not."""

from __future__ import annotations

import base64
import binascii
import datetime as dt
import math
from collections.abc import Callable
from decimal import Context, Decimal, InvalidOperation
from functools import lru_cache
from typing import Any, Final

import orjson
import pyarrow as pa

from penstock.sinks.fields import JSON_TEXT, PRECISE, UNITS, Column
from penstock.sinks.schema import is_json
from penstock.spark.reading.json_times import micros_of, micros_of_number
from penstock.spark.sinking.digits import JsonText
from penstock.spark.sinking.nested import Fault, fault_of, shown

# What Debezium writes for a large value that an update did not touch.
UNAVAILABLE: Final = "__debezium_unavailable_value"
_WIDE: Final = Context(prec=80)
# Up to here doubles are all whole numbers.
_EXACT: Final = 1 << 53
_EPOCH: Final = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)
_FAULTS: Final = (
    pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError, ValueError,
    TypeError, InvalidOperation, binascii.Error,
)  # fmt: skip

Bad = dict[int, str]


def column_of(values: list[Any], column: Column) -> tuple[pa.Array, Bad]:
    """A column of these values, and which of them are not what it holds, with the reason."""
    convert = _converter(column)
    kind = column.field.type
    try:
        if convert is None and set(map(type, values)) <= _expected(kind):
            return pa.array(values, kind), {}
        if pa.types.is_timestamp(kind) and column.how in UNITS:
            return _times(values, UNITS[column.how], kind), {}
    except _FAULTS:
        pass
    single = convert or _plain(kind)
    found: list[Any] = []
    bad: Bad = {}
    for at, value in enumerate(values):
        made = None
        if value is not None:
            try:
                made = pa.scalar(single(value), kind).as_py() if convert is None else single(value)
            except _UnfitInsideError as error:
                bad[at] = f"field {column.name}{error}"
            except _FAULTS:
                bad[at] = f"field {column.name} is not {kind}: {shown(value)}"
        found.append(made)
    try:
        return pa.array(found, kind), bad
    except _FAULTS:
        return _one_by_one(values, found, kind, column, bad)


def _one_by_one(
    values: list[Any], found: list[Any], kind: pa.DataType, column: Column, bad: Bad
) -> tuple[pa.Array, Bad]:
    """Values that were converted, and yet do not fit: too large, or with too many digits."""
    for at, value in enumerate(found):
        try:
            pa.scalar(value, kind)
        except _FAULTS:
            bad[at] = f"field {column.name} does not fit {kind}: {shown(values[at])}"
            found[at] = None
    return pa.array(found, kind), bad


def _times(values: list[Any], factor: int, kind: pa.DataType) -> pa.Array:
    """Times as whole numbers of a unit; fails if any is something else."""
    numbers = pa.array(values, pa.int64())
    if factor != 1:
        numbers = pa.compute.multiply_checked(numbers, factor)
    return numbers.cast(pa.timestamp("us")).cast(kind)


def _converter(column: Column) -> Callable[[Any], Any] | None:
    """For one value; None if Arrow takes JSON's own values."""
    kind, how = column.field.type, column.how
    if is_json(column.field):
        plain = _json_text if how == JSON_TEXT else _json
        return _checked(column.nested, plain) if column.nested else plain
    if pa.types.is_timestamp(kind):
        factor, zoned = UNITS.get(how, 1), kind.tz is not None
        return lambda value: _time(value, factor, zoned=zoned)
    if pa.types.is_time(kind):
        factor = UNITS.get(how, 1)
        return lambda value: _clock(value, factor)
    if pa.types.is_date(kind):
        return _date
    if pa.types.is_decimal(kind):
        scale = int(kind.scale)
        return (lambda value: _precise(value, scale)) if how == PRECISE else _decimal
    return _bytes if pa.types.is_binary(kind) else None


class _UnfitInsideError(ValueError):
    """What is wrong inside of a struct, an array or a map."""


def _checked(nested: str, plain: Callable[[Any], str]) -> Callable[[Any], str]:
    """JSON of values that are what was said of their column."""
    fault = _fault_of(nested)

    def convert(value: Any) -> str:
        text = plain(value)
        # Of a database's JSON there is only text.
        found = fault(orjson.loads(text) if isinstance(value, str) else value)
        if found is not None:
            raise _UnfitInsideError(found)
        return text

    return convert


@lru_cache(maxsize=1000)
def _fault_of(nested: str) -> Fault:
    return fault_of(nested, _check)


def _check(value: Any, kind: pa.DataType) -> None:
    """Fails where a value is none of a type."""
    convert = _converter(Column(pa.field("v", kind))) or _plain(kind)
    pa.scalar(convert(value), kind)


def _plain(kind: pa.DataType) -> Callable[[Any], Any]:
    if pa.types.is_string(kind):
        return _text
    if pa.types.is_boolean(kind):
        return _bool
    if pa.types.is_floating(kind):
        return _float
    return _int


def _expected(kind: pa.DataType) -> set[type]:
    """The Python types whose values Arrow takes without changing them."""
    if pa.types.is_string(kind):
        return {str, type(None)}
    if pa.types.is_boolean(kind):
        return {bool, type(None)}
    # Of a number with a fraction Arrow would make a whole one in silence.
    return {int, type(None), float} if pa.types.is_floating(kind) else {int, type(None)}


def _text(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()


def _bool(value: Any) -> bool:
    if value in (0, 1):
        return bool(value)
    raise ValueError(value)


def _float(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError(value)
    found = float(value)
    if math.isinf(found) and not isinstance(value, str):
        raise ValueError(value)
    return found


def _int(value: Any) -> int:
    if isinstance(value, bool):
        raise TypeError(value)
    # Of a larger one nobody knows which number was written.
    if isinstance(value, float) and not (value.is_integer() and abs(value) <= _EXACT):
        raise ValueError(value)
    return int(value)


def _json(value: Any) -> str:
    if isinstance(value, JsonText):
        return str(value)
    return orjson.dumps(value).decode()


def _json_text(value: Any) -> str:
    if isinstance(value, str):
        orjson.loads(value)
        return value
    return _json(value)


def _time(value: Any, factor: int, *, zoned: bool) -> dt.datetime:
    if isinstance(value, str):
        found = _moment(value)
    elif isinstance(value, float):
        micros = micros_of_number(value, factor, 1)
        if micros is None:
            raise ValueError(value)
        found = _EPOCH + dt.timedelta(microseconds=micros)
    else:
        found = _EPOCH + dt.timedelta(microseconds=_int(value) * factor)
    return found if zoned else found.replace(tzinfo=None)


def _moment(text: str) -> dt.datetime:
    """A time as flows and views read it; other forms of ISO 8601, too."""
    micros = micros_of(text)
    if micros is not None:
        return _EPOCH + dt.timedelta(microseconds=micros)
    found = dt.datetime.fromisoformat(text)
    return found.replace(tzinfo=dt.UTC) if found.tzinfo is None else found.astimezone(dt.UTC)


def _clock(value: Any, factor: int) -> dt.time:
    if isinstance(value, str):
        return dt.time.fromisoformat(value.removesuffix("Z"))
    micros = _int(value) * factor
    if not 0 <= micros < 86_400_000_000:
        raise ValueError(value)
    return (_EPOCH + dt.timedelta(microseconds=micros)).time()


def _date(value: Any) -> dt.date:
    if isinstance(value, str):
        return dt.date.fromisoformat(value[:10])
    return _EPOCH.date() + dt.timedelta(_int(value))


def _decimal(value: Any) -> Decimal:
    found = Decimal(repr(value) if isinstance(value, float | bool) else value)
    if not found.is_finite():
        raise ValueError(value)
    return found


def _precise(value: Any, scale: int) -> Decimal:
    if not isinstance(value, str):
        return _decimal(value)
    digits = int.from_bytes(base64.b64decode(value, validate=True), "big", signed=True)
    return Decimal(digits).scaleb(-scale, _WIDE)


def _bytes(value: Any) -> bytes:
    if not isinstance(value, str):
        raise TypeError(value)
    return base64.b64decode(value, validate=True)
