"""One JSON record by a schema, by the rules of Spark's parser as `json_values` uses it.

This is the careful way: any record, one at a time. It says what a record means or why it cannot
be read. Columns are read in bulk elsewhere; what is odd there comes here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from decimal import Context, Decimal
from typing import Any, Final, NamedTuple

import orjson
from pyspark.sql import types as T  # noqa: N812

from penstock.spark.reading.json_times import SECOND, days_of, micros_of, micros_of_number

# Deeper than any real record, and not so deep that a parser runs out of stack.
DEPTH_MAX: Final = 500
# The longest number that Spark's parser takes.
NUMBER_MAX: Final = 1000
# Of a value that does not fit so much is shown.
SHOWN_MAX: Final = 60
# Shorter records can be neither too deep nor have too long a number.
SHORT: Final = 1000

# What numbers count that are times: so many microseconds, or parts of one.
UNITS: Final = {"s": (SECOND, 1), "ms": (1000, 1), "us": (1, 1), "ns": (1, 1000)}
SECONDS: Final = "s"

_INTEGERS: Final[dict[type[T.DataType], int]] = {
    T.ByteType: 15,
    T.ShortType: 15,
    T.IntegerType: 31,
    T.LongType: 63,
}
_FLOAT_MAX: Final = float(2**128 - 2**103)
_INFINITE: Final = float("inf")
_LONG: Final = 1 << 63
# Escapes one after the other, pairs as one: what matches the group is half a pair.
_ESCAPE: Final = re.compile(
    rb"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F])|.)",
    re.DOTALL,
)
_LONG_NUMBER: Final = re.compile(rb"[0-9.eE+-]{%d}" % NUMBER_MAX)
# So much of it is in every hundredth byte; to look there first is far quicker.
_SAMPLE, _LONG_SAMPLE = 100, re.compile(rb"[0-9.eE+-]{9}")
_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_CLOSED_LIST: Final = re.compile(r"\}\s*\]\s*,")
_BEYOND: Final = re.compile("[\U00010000-\U0010ffff]")
_ESCAPES: Final = {
    **{code: f"\\u{code:04X}" for code in range(32)},
    **{ord(char): f"\\{name}" for char, name in zip("\b\t\n\f\r", "btnfr", strict=True)},
    ord('"'): '\\"',
    ord("\\"): "\\\\",
}

Convert = Callable[[Any, "State"], Any]
Test = Callable[[Any], bool]
Answer = tuple[dict[str, Any] | None, str | None]


class State:
    """Whether something inside a record did not fit."""

    __slots__ = ("bad",)

    def __init__(self) -> None:
        self.bad = False


class Manner(NamedTuple):
    """How values are read: with all that Spark's parser keeps of a text, whether as a capture
    writes them, and what timestamps that are numbers count."""

    exact: bool
    captured: bool
    unit: str


class _Unfit(Exception):  # noqa: N818 - control flow, nobody sees it
    """A value is not of its type."""


class _Inexact(Exception):  # noqa: N818
    """The text of a value is wanted, and the quick parser did not keep enough of it."""


class _Spelled(float):
    """A number with a fraction or an exponent, and its text."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> _Spelled:
        made = super().__new__(cls, text)
        made.text = text
        return made


class _Object(dict[str, Any]):
    """An object that remembers its fields as they were, doubles too."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.pairs = pairs


def is_long_or_deep(value: bytes) -> bool:
    """Whether a value is nested so deep, or may have so long a number, that parsers differ."""
    if len(value) <= SHORT:
        return False
    if _LONG_SAMPLE.search(value[::_SAMPLE]) and _LONG_NUMBER.search(value):
        return True
    return _is_deep(value)


def has_half_pair(value: bytes) -> bool:
    """Whether there is half a surrogate pair, as an escape: it is no character."""
    if rb"\ud" not in value and rb"\uD" not in value:
        return False
    return any(escape[1] for escape in _ESCAPE.finditer(value))


def _is_deep(value: bytes) -> bool:
    if value.count(b"[") + value.count(b"{") <= DEPTH_MAX:
        return False
    depth = 0
    for char in _STRING.sub(b"", value):
        if char in b"[{":
            depth += 1
            if depth > DEPTH_MAX:
                return True
        elif char in b"]}":
            depth -= 1
    return False


class Records:
    """Reads records of one schema."""

    def __init__(
        self, schema: T.StructType, unit: str = SECONDS, *, captured: bool = False
    ) -> None:
        """`unit` is what timestamps that are numbers count."""
        self._schema = schema
        self._captured = captured
        self._fields = [(f.name, f"field {f.name} is not {f.dataType.simpleString()}")
                        for f in schema.fields]  # fmt: skip
        self._quick = _struct(schema, Manner(exact=False, captured=captured, unit=unit))
        self._exact = _struct(schema, Manner(exact=True, captured=captured, unit=unit))
        self._tests = [
            (test, message)
            for field in schema.fields
            # Of what a capture writes a number that is infinite is refused before, and no word is.
            for test, message in _tests_of_field(field, field.name, finite=not captured)
        ]
        self._decode = json.JSONDecoder(
            object_pairs_hook=_Object,
            parse_constant=_refuse,
            parse_int=_whole,
            parse_float=_broken,
        ).decode

    def read(self, value: bytes) -> Answer:
        """The fields of a record, or None and why it cannot be read."""
        if is_long_or_deep(value):
            if _is_deep(value):
                return None, _why_deep(value)
            return self._read_exactly(value)
        try:
            found = orjson.loads(value)
        except ValueError:
            return self._read_exactly(value)
        if type(found) is not dict:
            return None, "the JSON value is not an object"
        state = State()
        try:
            row = self._quick(found, state)
        except _Inexact:
            return self._read_exactly(value)
        if state.bad:
            return None, self._why_unfit(found, row)
        return self._checked(row)

    def _read_exactly(self, value: bytes) -> Answer:
        try:
            text = value.decode("utf-8")
        except UnicodeDecodeError:
            return None, "the value is not UTF-8"
        if not text.strip(" "):
            return None, "the value is empty"
        try:
            values = self._decode(f"[{text}]")
        except ValueError:
            return None, self._why_broken(text)
        if len(values) != 1:
            return None, "the value is not one JSON object"
        found = values[0]
        if not isinstance(found, dict):
            return None, "the JSON value is not an object"
        state = State()
        row = self._exact(found, state)
        if state.bad:
            return None, self._why_unfit(found, row)
        if has_half_pair(value):
            return None, "the value has half a surrogate pair"
        return self._checked(row)

    def _checked(self, row: dict[str, Any]) -> Answer:
        for test, message in self._tests:
            if test(row):
                return None, message
        return row, None

    def _why_unfit(self, found: dict[str, Any], row: dict[str, Any]) -> str:
        """The first field that is there and could not be read as a whole."""
        if self._captured and (path := _unread(self._schema, found, row)):
            name, kind, value = path
            if not isinstance(value, str):
                value = shown(value)
            elif len(value) > SHOWN_MAX:
                value = f"{value[:SHOWN_MAX]}..."
            return f"field {name} is not {kind.simpleString()}: {value}"
        for name, message in self._fields:
            if "'" in name or "]" in name:
                continue  # Spark has no path that leads there
            if row[name] is None and found.get(name) is not None:
                return f"{message}: {shown(found[name])}"
        return "the value does not fit the schema"

    def _why_broken(self, text: str) -> str:
        """Text that closes the list it stands in and opens another is several values."""
        if _CLOSED_LIST.search(text):
            try:
                self._decode(f'{{"_":[{text}],"end":1}}')
            except ValueError:
                pass
            else:
                return "the value is not one JSON object"
        return "the value is not valid JSON"


def _unread(
    kind: T.StructType, found: dict[str, Any], row: dict[str, Any], above: str = ""
) -> tuple[str, T.DataType, Any] | None:
    """The field of a struct, at any depth, that is there and could not be read."""
    for field in kind.fields:
        value, made = found.get(field.name), row[field.name]
        if value is None:
            continue
        name = f"{above}{field.name}"
        if made is None:
            return name, field.dataType, value
        if isinstance(field.dataType, T.StructType):
            inner = _unread(field.dataType, value, made, f"{name}.")
            if inner is not None:
                return inner
    return None


def _why_deep(value: bytes) -> str:
    try:
        value.decode("utf-8")
    except UnicodeDecodeError:
        return "the value is not UTF-8"
    return "the value is nested too deep"


def _refuse(word: str) -> Any:
    raise ValueError(word)


def _whole(digits: str) -> int:
    if len(digits) > NUMBER_MAX:
        raise ValueError("a number is too long")
    return int(digits)


def _broken(digits: str) -> float:
    if len(digits) > NUMBER_MAX:
        raise ValueError("a number is too long")
    return _Spelled(digits)


def _converter(kind: T.DataType, manner: Manner) -> Convert:
    """What makes a value, which is not null, one of its type."""
    if isinstance(kind, T.StructType):
        return _struct(kind, manner)
    if isinstance(kind, T.ArrayType):
        return _array(kind, manner)
    if isinstance(kind, T.StringType):
        return _exact_text if manner.exact else _quick_text
    if isinstance(kind, T.BooleanType):
        return _boolean
    if isinstance(kind, T.FloatType):
        return _in_range(_float) if manner.captured else _float
    if isinstance(kind, T.DoubleType):
        return _in_range(_double) if manner.captured else _double
    if isinstance(kind, T.TimestampType):
        return _timestamp(*UNITS[manner.unit])
    if isinstance(kind, T.DateType):
        return _date
    if isinstance(kind, T.DecimalType):
        if manner.captured:
            return _whole_decimal(kind.precision, exact=manner.exact)
        return _decimal(kind, exact=manner.exact)
    return _integer(_INTEGERS[type(kind)])


def _struct(kind: T.StructType, manner: Manner) -> Convert:
    fields = [(f.name, _converter(f.dataType, manner)) for f in kind.fields]

    def convert(value: Any, state: State) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _Unfit
        row: dict[str, Any] = {}
        for name, inner in fields:
            found = value.get(name)
            if found is not None:
                try:
                    found = inner(found, state)
                except _Unfit:
                    # The rest of the record is read all the same: it tells which field it was.
                    found = None
                    state.bad = True
            row[name] = found
        return row

    return convert


def _array(kind: T.ArrayType, manner: Manner) -> Convert:
    inner = _converter(kind.elementType, manner)

    def convert(value: Any, state: State) -> list[Any]:
        if type(value) is not list:
            raise _Unfit
        return [None if each is None else inner(each, state) for each in value]

    return convert


def _quick_text(value: Any, _: State) -> str:
    if type(value) is str:
        return value
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is int:
        return str(value)
    raise _Inexact


def _exact_text(value: Any, _: State) -> str:
    return value if type(value) is str else text_of(value)


def _boolean(value: Any, _: State) -> bool:
    if type(value) is not bool:
        raise _Unfit
    return value


def _integer(bits: int) -> Convert:
    low, high = -(1 << bits), 1 << bits

    def convert(value: Any, _: State) -> int:
        if type(value) is not int or not low <= value < high:
            raise _Unfit
        return value

    return convert


class _Said(float):
    """An infinity that is meant, and not a number beyond the range."""


# As Spark writes doubles that are no numbers; it reads these and no others.
_WORDS: Final = {
    "NaN": float("nan"),
    **dict.fromkeys(("Infinity", "+Infinity", "INF", "+INF"), _Said(_INFINITE)),
    **dict.fromkeys(("-Infinity", "-INF"), _Said(-_INFINITE)),
}


def _double(value: Any, _: State) -> float:
    if isinstance(value, float):
        return float(value)
    if type(value) is str and value in _WORDS:
        return _WORDS[value]
    if type(value) is not int:
        raise _Unfit
    try:
        return float(value)
    except OverflowError:
        return _INFINITE


def _float(value: Any, state: State) -> float:
    wide = _double(value, state)
    if type(wide) is _Said or wide != wide:  # noqa: PLR0124 - NaN
        return wide
    return wide if -_FLOAT_MAX < wide < _FLOAT_MAX else _INFINITE


def _in_range(number: Convert) -> Convert:
    """Floats of a capture: a number beyond the range does not fit, whatever the schema says."""

    def convert(value: Any, state: State) -> float:
        found: float = number(value, state)
        if _is_infinite(found):
            raise _Unfit
        return found

    return convert


def _whole_decimal(digits: int, *, exact: bool) -> Convert:
    limit = 10**digits

    def convert(value: Any, _: State) -> Decimal:
        # The quick parser makes floats of whole numbers of more than 64 bits.
        if isinstance(value, float) and not exact:
            raise _Inexact
        if type(value) is not int or not -limit < value < limit:
            raise _Unfit
        return Decimal(value)

    return convert


_DECIMAL: Final = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,9})?")
_WIDE: Final = Context(prec=2 * NUMBER_MAX, Emax=10**9 + NUMBER_MAX, Emin=-(10**9) - NUMBER_MAX)


def _decimal(kind: T.DecimalType, *, exact: bool) -> Convert:
    """A number, or its text in quotes, with all of its digits."""
    whole, scale = kind.precision - kind.scale, kind.scale
    unit = Decimal(1).scaleb(-scale)

    def convert(value: Any, _: State) -> Decimal:
        if isinstance(value, float):
            if not isinstance(value, _Spelled):
                raise _Inexact
            value = value.text
        elif type(value) is int:
            value = str(value)
        if type(value) is not str or len(value) > NUMBER_MAX or not _DECIMAL.fullmatch(value):
            raise _Unfit
        found = Decimal(value).normalize(_WIDE)
        if not found:
            return Decimal(0).quantize(unit)
        # Neither rounded nor cut: 1.239 is no decimal(10,2).
        if found.adjusted() >= whole or int(found.as_tuple().exponent) < -scale:
            raise _Unfit
        return found.quantize(unit, context=_WIDE)

    return convert


def _timestamp(times: int, parts: int) -> Convert:
    def convert(value: Any, _: State) -> int:
        if type(value) is str:
            found = micros_of(value)
        elif isinstance(value, float):
            found = micros_of_number(value, times, parts)
        elif type(value) is int and -_LONG <= value * times // parts < _LONG:
            found = value * times // parts
        else:
            found = None
        if found is None:
            raise _Unfit
        return found

    return convert


def _date(value: Any, _: State) -> int:
    found = days_of(value) if type(value) is str else None
    if found is None:
        raise _Unfit
    return found


def shown(value: Any) -> str:
    """What was found in the place of something else; texts in quotes, as in JSON."""
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, _Spelled):
        text = value.text
    elif isinstance(value, str):
        # Half a surrogate pair is no character.
        text = orjson.dumps(value.encode("utf-8", "replace").decode()).decode()
    else:
        text = text_of(value)
    return text if len(text) <= SHOWN_MAX else f"{text[:SHOWN_MAX]}..."


def text_of(value: Any) -> str:
    """A parsed value as compact JSON, as Spark's parser writes it for a field of text."""
    out: list[str] = []
    rest: list[Any] = [value]
    while rest:
        each = rest.pop()
        if type(each) is _Raw:
            out.append(each.text)
        elif isinstance(each, _Object):
            rest.append(_CLOSE_OBJECT)
            for number in range(len(each.pairs) - 1, -1, -1):
                name, inner = each.pairs[number]
                rest.append(inner)
                rest.append(_Raw(f"{',' if number else ''}{_quoted(name)}:"))
            rest.append(_OPEN_OBJECT)
        elif type(each) is list:
            rest.append(_CLOSE_LIST)
            for number in range(len(each) - 1, -1, -1):
                rest.append(each[number])
                if number:
                    rest.append(_COMMA)
            rest.append(_OPEN_LIST)
        else:
            out.append(_scalar(each))
    return "".join(out)


class _Raw:
    """Text to write as it is."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


_OPEN_OBJECT, _CLOSE_OBJECT, _OPEN_LIST, _CLOSE_LIST, _COMMA = map(_Raw, "{}[],")


def _scalar(value: Any) -> str:
    if value is None:
        return "null"
    if type(value) is bool:
        return "true" if value else "false"
    if type(value) is str:
        return _quoted(value)
    return _java_double(value) if isinstance(value, float) else str(value)


def _quoted(text: str) -> str:
    """A string in quotes; Spark's parser writes what is beyond 16 bits as two escapes."""
    plain = text.translate(_ESCAPES)
    return f'"{_BEYOND.sub(_surrogates, plain)}"'


def _surrogates(char: re.Match[str]) -> str:
    code = ord(char[0]) - 0x10000
    return f"\\u{0xD800 + (code >> 10):04X}\\u{0xDC00 + (code & 0x3FF):04X}"


def _java_double(value: float) -> str:
    """A double as Java writes it: with a point, and an E where it is large or small."""
    if value in (_INFINITE, -_INFINITE):
        return '"Infinity"' if value > 0 else '"-Infinity"'
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        return repr(value)
    mantissa, _, exponent = repr(value).partition("e")
    sign = "-" if mantissa.startswith("-") else ""
    whole, _, part = mantissa.lstrip("-").partition(".")
    part = "" if part == "0" and not exponent else part
    power = int(exponent or 0) + len(whole) - 1
    digits = whole + part
    leading = len(digits) - len(digits.lstrip("0"))
    digits = digits.lstrip("0").rstrip("0") or "0"
    return f"{sign}{digits[0]}.{digits[1:] or '0'}E{power - leading}"


def _tests_of_field(field: T.StructField, path: str, *, finite: bool) -> list[tuple[Test, str]]:
    name = field.name
    found = _tests(field.dataType, path, required=not field.nullable, finite=finite)
    return [(_of_field(name, test), message) for test, message in found]


def _tests(kind: T.DataType, path: str, *, required: bool, finite: bool) -> list[tuple[Test, str]]:
    """What a parsed value must not be, each with the reason; `json_values.problems` in Python."""
    found: list[tuple[Test, str]] = []
    if required:
        found.append((_is_none, f"field {path} is missing or null"))
    if isinstance(kind, T.ByteType):
        found.append((_is_no_byte, f"field {path} is out of range"))
    elif isinstance(kind, T.FloatType | T.DoubleType) and finite:
        found.append((_is_infinite, f"field {path} is out of range"))
    elif isinstance(kind, T.StructType):
        for field in kind.fields:
            found += [
                (_if_there(test), message)
                for test, message in _tests_of_field(field, f"{path}.{field.name}", finite=finite)
            ]
    elif isinstance(kind, T.ArrayType):
        needed = not kind.containsNull
        inner = _tests(kind.elementType, f"{path}[]", required=needed, finite=finite)
        found += [(_of_any(test), message) for test, message in inner]
    return found


def _is_none(value: Any) -> bool:
    return value is None


def _is_no_byte(value: Any) -> bool:
    return value is not None and not -128 <= value <= 127


def _is_infinite(value: Any) -> bool:
    return value is not None and type(value) is not _Said and abs(value) == _INFINITE


def _of_field(name: str, test: Test) -> Test:
    return lambda row: test(row[name])


def _if_there(test: Test) -> Test:
    return lambda value: value is not None and test(value)


def _of_any(test: Test) -> Test:
    return lambda values: values is not None and any(map(test, values))
