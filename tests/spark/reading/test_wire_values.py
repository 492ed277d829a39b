"""Values as Debezium documents them become Arrow's, or are refused: nothing in between.

The judges are Python's own decimal, datetime and json, and for durations DuckDB.
"""

from __future__ import annotations

import base64
import datetime as dt
import json
import math
from collections.abc import Sequence
from decimal import Context, Decimal
from typing import Any

import duckdb
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client.table_schemas import UNSIGNED, ValueType
from penstock.spark.reading.wire_values import (
    conversion,
    flow_type,
    shown,
    stored_field,
    wire_type,
)
from tests.harness.profiles import examples

WIDE = Context(prec=200)
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC).replace(tzinfo=None)
FIRST, LAST = (dt.datetime(year, 6, 1, tzinfo=dt.UTC).replace(tzinfo=None) for year in (2, 9998))
US = dt.timedelta(microseconds=1)
# What a value becomes that its column cannot hold.
REFUSED = object()

VARIABLE = ValueType(
    "struct",
    "io.debezium.data.VariableScaleDecimal",
    fields=(("scale", ValueType("int32")), ("value", ValueType("bytes"))),
)


def decimal_kind(precision: int, scale: int) -> ValueType:
    shape = {"scale": str(scale), "connect.decimal.precision": str(precision)}
    return ValueType("bytes", "org.apache.kafka.connect.data.Decimal", parameters=shape)


def time_kind(name: str, of: str = "int64") -> ValueType:
    return ValueType(of, f"io.debezium.time.{name}")


def unscaled(number: int) -> str:
    """As java.math.BigInteger.toByteArray has it, the fewest bytes with a sign."""
    size = (number if number >= 0 else ~number).bit_length() // 8 + 1
    return base64.b64encode(number.to_bytes(size, "big", signed=True)).decode()


def converted(
    kind: ValueType,
    values: Sequence[Any],
    into: pa.DataType | None = None,
    *,
    as_json: bool = False,
) -> list[Any]:
    made = conversion(kind, into or flow_type(kind), json=as_json)
    assert made is not None
    # A slice of more, as readers have it.
    wire = pa.array([None, *values, None], wire_type(kind)).slice(1, len(values))
    found, unfit = made(wire)
    found.validate(full=True)
    assert found.type == (into or flow_type(kind))
    answers: list[Any] = found.to_pylist()
    for at, value in enumerate(answers):
        is_unfit = unfit is not None and bool(unfit[at])
        assert not is_unfit or (value is None and values[at] is not None)
        assert is_unfit or (value is None) == (values[at] is None)
        answers[at] = REFUSED if is_unfit else value
    return answers


# ---- decimals ----------------------------------------------------------------------------


@st.composite
def shapes(draw: st.DrawFn) -> tuple[int, int]:
    precision = draw(st.integers(1, 38))
    return precision, draw(st.integers(0, precision))


def held(value: Decimal, precision: int, scale: int) -> Any:
    """The value, if a column of this shape can hold it with all its digits."""
    number = WIDE.scaleb(value, scale)
    fits = number == number.to_integral_value(context=WIDE)
    return value if fits and WIDE.abs(number) < Decimal(10) ** precision else REFUSED


numbers = st.integers(0, 42).flatmap(lambda size: st.integers(-(10**size), 10**size))


@settings(max_examples=examples(50))
@given(st.lists(st.none() | numbers), st.integers(-6, 44), shapes())
def test_decimals_keep_every_digit_or_are_refused(
    given_: list[int | None], scale: int, shape: tuple[int, int]
) -> None:
    values = [None if each is None else WIDE.scaleb(Decimal(each), -scale) for each in given_]
    written = [None if each is None else unscaled(each) for each in given_]
    found = converted(decimal_kind(38, scale), written, pa.decimal128(*shape))
    for was, got in zip(values, found, strict=True):
        # Of more than 38 digits none is read, though there might be zeros among them.
        is_long = was is not None and len(was.as_tuple().digits) > 38
        assert got == (None if was is None else REFUSED if is_long else held(was, *shape))


@settings(max_examples=examples(33))
@given(st.lists(st.none() | st.tuples(numbers, st.integers(0, 30))))
def test_decimals_that_say_their_own_scale(given_: list[tuple[int, int] | None]) -> None:
    wire = [each and {"scale": each[1], "value": unscaled(each[0])} for each in given_]
    found = converted(VARIABLE, wire)
    for each, got in zip(given_, found, strict=True):
        if each is None:
            assert got is None
            continue
        value = WIDE.scaleb(Decimal(each[0]), -each[1])
        is_long = abs(each[0]) >= 10**38
        assert got == (REFUSED if is_long else held(value, 38, 18))
    texts = converted(VARIABLE, wire, pa.string())
    for each, got in zip(given_, texts, strict=True):
        if each is not None and abs(each[0]) < 10**38:
            assert got == f"{WIDE.scaleb(Decimal(each[0]), -each[1]):f}"


@pytest.mark.parametrize(
    "text", ["", "x", "bw=", "b!==", "bx==", "AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"]
)
def test_what_is_no_decimal_is_refused(text: str) -> None:
    assert converted(decimal_kind(10, 2), [text, "bw=="]) == [REFUSED, Decimal("1.11")]


def test_a_third_digit_of_a_cent_is_not_rounded() -> None:
    found = converted(decimal_kind(12, 3), [unscaled(1239), unscaled(1230)], pa.decimal128(10, 2))
    assert found == [REFUSED, Decimal("1.23")]
    assert shown(decimal_kind(12, 3), unscaled(1239)) == "1.239"


def test_types_of_decimals() -> None:
    assert flow_type(decimal_kind(10, 2)) == pa.decimal128(10, 2)
    assert flow_type(decimal_kind(60, 10)) == pa.decimal128(38, 10)
    assert flow_type(decimal_kind(3, -2)) == pa.decimal128(5, 0)
    assert flow_type(decimal_kind(2, 4)) == pa.decimal128(4, 4)
    assert flow_type(VARIABLE) == pa.decimal128(38, 18)
    assert converted(decimal_kind(3, -2), [unscaled(-12)]) == [Decimal(-1200)]


def test_unsigned_bigints_are_whole() -> None:
    kind = ValueType("int64", parameters={UNSIGNED: "true"})
    top = Decimal(2**64 - 1)
    assert flow_type(kind) == pa.decimal128(20, 0)
    assert converted(kind, [top, Decimal(0), None]) == [top, Decimal(0), None]
    assert converted(kind, [top, Decimal(7)], pa.int64()) == [REFUSED, 7]


# ---- numbers -----------------------------------------------------------------------------


@settings(max_examples=examples(25))
@given(st.lists(st.none() | st.integers(-(2**63), 2**63 - 1)))
def test_whole_numbers_never_wrap(given_: list[int | None]) -> None:
    kind = ValueType("int64")
    assert converted(kind, given_) == given_
    for bits, into in ((8, pa.int8()), (16, pa.int16()), (32, pa.int32())):
        fits = [each is None or -(2 ** (bits - 1)) <= each < 2 ** (bits - 1) for each in given_]
        wanted = [each if fit else REFUSED for each, fit in zip(given_, fits, strict=True)]
        assert converted(kind, given_, into) == wanted


def test_what_would_lose_digits_has_no_conversion() -> None:
    refused = [
        (decimal_kind(10, 2), pa.float64()),
        (decimal_kind(10, 2), pa.int64()),
        (ValueType("double"), pa.float32()),
        (ValueType("string"), pa.int64()),
        (ValueType("boolean"), pa.int8()),
        (time_kind("MicroTimestamp"), pa.date32()),
        (time_kind("MicroTimestamp"), pa.timestamp("us", "UTC")),
        (time_kind("ZonedTimestamp", "string"), pa.timestamp("us")),
        (ValueType("array", items=ValueType("string")), pa.list_(pa.int32())),
        (ValueType("int32"), pa.struct([("a", pa.int32())])),
    ]
    for kind, into in refused:
        assert conversion(kind, into) is None, (kind, into)


def test_whole_numbers_as_floats_and_seconds() -> None:
    values = [2**53, 2**53 + 1, -(2**53), None]
    assert converted(ValueType("int64"), values, pa.float64()) == [
        2.0**53,
        REFUSED,
        -(2.0**53),
        None,
    ]
    assert converted(ValueType("int32"), [2**24 + 1, 3], pa.float32()) == [REFUSED, 3.0]
    at = dt.datetime(2026, 1, 2, tzinfo=dt.UTC)
    instant = pa.timestamp("us", "UTC")
    assert converted(ValueType("int64"), [int(at.timestamp()), 2**62], instant) == [at, REFUSED]


@settings(max_examples=examples(50))
@given(
    st.lists(st.none() | st.floats() | st.integers(-(10**17), 10**17).map(lambda n: n / 100)),
    st.sampled_from([(10, 2), (38, 18), (38, 30), (5, 0)]),
)
def test_floats_become_the_decimals_that_they_show(
    given_: list[float | None], shape: tuple[int, int]
) -> None:
    found = converted(ValueType("double"), given_, pa.decimal128(*shape))
    for was, got in zip(given_, found, strict=True):
        if was is None or not math.isfinite(was):
            assert got == (None if was is None else REFUSED)
        else:
            assert got == held(Decimal(repr(was)), *shape)


def test_texts_become_what_they_spell_where_somebody_says_so() -> None:
    kind = ValueType("string")
    texts = ["1.10", "-1.239", "7", "", "1e3", None, "0.5" + "0" * 40]
    wanted: list[Any] = [Decimal("1.10"), REFUSED, Decimal(7), REFUSED, REFUSED, None, REFUSED]
    assert converted(kind, texts, pa.decimal128(10, 2)) == wanted
    texts = ["2026-01-02 03:04:05", "2026-01-02T03:04:05+01:00", "soon", None, "2026-1-2"]
    times = [dt.time(3, 4, 5), dt.time(2, 4, 5), dt.time()]
    day = dt.date(2026, 1, 2)
    first, second, third = (dt.datetime.combine(day, at, dt.UTC) for at in times)
    wanted = [first, second, REFUSED, None, third]
    assert converted(kind, texts, pa.timestamp("us", "UTC")) == wanted
    assert converted(kind, ["2026-01-02", "x"], pa.date32()) == [dt.date(2026, 1, 2), REFUSED]


# ---- times -------------------------------------------------------------------------------


def moment_of(us: int) -> Any:
    try:
        return EPOCH + us * US
    except OverflowError:
        return REFUSED


LIMITS = [-62_135_596_800_000_000, 253_402_300_799_999_999]
far_us = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.integers(*LIMITS),
    st.sampled_from(LIMITS).flatmap(lambda at: st.integers(at - 3, at + 3)),
    st.sampled_from([9_223_372_036_825_200_000, -9_223_372_036_832_400_000]),
)


@settings(max_examples=examples(33))
@given(st.lists(st.none() | far_us))
def test_moments_without_a_zone(given_: list[int | None]) -> None:
    wanted = [None if each is None else moment_of(each) for each in given_]
    assert converted(time_kind("MicroTimestamp"), given_) == wanted
    texts = converted(time_kind("MicroTimestamp"), given_, pa.string())
    wanted = [each if each in (None, REFUSED) else each.isoformat(timespec="microseconds")
              for each in wanted]  # fmt: skip
    assert texts == wanted
    millis = [None if each is None else each // 1000 for each in given_]
    found = converted(time_kind("Timestamp"), millis)
    assert found == [None if each is None else moment_of(each * 1000) for each in millis]
    nanos = [None if each is None else max(min(each, 2**53), -(2**53)) for each in given_]
    wanted = [None if each is None else REFUSED if each % 1000 else moment_of(each // 1000)
              for each in nanos]  # fmt: skip
    assert converted(time_kind("NanoTimestamp"), nanos) == wanted


@settings(max_examples=examples(25))
@given(st.lists(st.none() | st.integers(-(2**31), 2**31 - 1) | st.integers(-(10**6), 10**6)))
def test_dates(given_: list[int | None]) -> None:
    def date_of(days: int) -> Any:
        try:
            return EPOCH.date() + dt.timedelta(days)
        except OverflowError:
            return REFUSED

    wanted = [None if each is None else date_of(each) for each in given_]
    assert converted(time_kind("Date", "int32"), given_) == wanted


zones = (
    st.timezones()
    | st.just(dt.UTC)
    | st.integers(-1079, 1079).map(lambda minutes: dt.timezone(dt.timedelta(minutes=minutes)))
)


@settings(max_examples=examples(33))
@given(st.lists(st.none() | st.datetimes(FIRST, LAST, timezones=zones)))
def test_moments_with_a_zone(given_: list[dt.datetime | None]) -> None:
    kind = time_kind("ZonedTimestamp", "string")
    given_ = [None if each is None else each.replace(fold=0) for each in given_]
    texts = [None if each is None else each.isoformat().replace("+00:00", "Z") for each in given_]
    wanted = [None if each is None else each.astimezone(dt.UTC) for each in given_]
    assert converted(kind, texts) == wanted


@pytest.mark.parametrize(
    "text",
    ["+292278994-08-16T23:00:00Z", "-0043-03-15T00:00:00Z", "0000-06-01T00:00:00Z", "2026-01-02",
     "2026-01-02T03:04:05", "2026-01-02T03:04:05.1234567Z", "2026-02-30T00:00:00Z", "infinity",
     "9999-12-31T23:30:00-01:00", ""],
)  # fmt: skip
def test_what_is_no_moment_is_refused(text: str) -> None:
    kind = time_kind("ZonedTimestamp", "string")
    good = "2026-01-02T03:04:05.1234560Z"
    found = converted(kind, [text, good])
    assert found == [REFUSED, dt.datetime(2026, 1, 2, 3, 4, 5, 123456, dt.UTC)]


@settings(max_examples=examples(25))
@given(st.lists(st.none() | st.integers(0, 86_399_999_999) | st.integers(-(10**13), 10**13)))
def test_times_of_a_day(given_: list[int | None]) -> None:
    kind = time_kind("MicroTime")
    is_time = [each is not None and 0 <= each < 86_400_000_000 for each in given_]
    times = [(EPOCH + each * US).time() if fits and each is not None else each
             for each, fits in zip(given_, is_time, strict=True)]  # fmt: skip
    wanted = [REFUSED if isinstance(each, int) else each for each in times]
    assert converted(kind, given_, pa.time64("us")) == wanted
    for us, at, text in zip(given_, times, converted(kind, given_), strict=True):
        if isinstance(at, dt.time):
            assert text == at.isoformat(timespec="microseconds")
        elif us is not None:
            hours, minutes, seconds = text.lstrip("-").split(":")
            size = (int(hours) * 3600 + int(minutes) * 60) * 10**6 + int(Decimal(seconds) * 10**6)
            assert (-size if text[0] == "-" else size) == us


def test_decimals_that_are_not_numbers() -> None:
    """PostgreSQL's NaN and infinities are words: text and JSON say them, decimals refuse them."""
    numeric = decimal_kind(12, 2)
    words = [unscaled(111), "NaN", "Inf", "-Inf", None]
    assert converted(numeric, words) == [Decimal("1.11"), REFUSED, REFUSED, REFUSED, None]
    texts = ["1.11", "NaN", "Infinity", "-Infinity", None]
    assert converted(numeric, words, pa.string()) == texts
    quoted = ["1.11", '"NaN"', '"Infinity"', '"-Infinity"', None]
    assert converted(numeric, words, pa.string(), as_json=True) == quoted
    scaled = [each and {"scale": 2 if len(each) > 4 else 0, "value": each} for each in words]
    assert converted(VARIABLE, scaled)[1:] == [REFUSED, REFUSED, REFUSED, None]
    assert converted(VARIABLE, scaled, pa.string())[1:] == texts[1:]
    assert converted(VARIABLE, scaled, pa.string(), as_json=True)[1:] == quoted[1:]
    assert [shown(numeric, word) for word in words[1:4]] == texts[1:4]
    assert shown(VARIABLE, {"scale": 0, "value": "-Inf"}) == "-Infinity"
    lists = ValueType("array", items=numeric)
    assert converted(lists, [["NaN", unscaled(111)]], pa.string(), as_json=True) == ['["NaN",1.11]']
    # No decoder of base64 takes a word for a number.
    for word in ("NaN", "Inf", "-Inf"):
        with pytest.raises(ValueError, match="padding"):
            base64.b64decode(word)


def test_durations_are_iso_8601() -> None:
    values = [
        0,
        1,
        -1,
        -1_500_000,
        3_600_000_000,
        90_061_000_001,
        -7_200_000_000,
        2_629_800_000_000,
    ]
    texts = converted(time_kind("MicroDuration"), values)
    assert texts[:4] == ["PT0S", "PT0.000001S", "PT-0.000001S", "PT-1.5S"]
    judge = "SELECT (epoch(?::INTERVAL) * 1e6)::BIGINT"
    read = [duckdb.execute(judge, [_spelled(text)]).fetchall()[0][0] for text in texts]
    assert read == values
    ends = [2**63 - 1, -(2**63)]
    assert converted(time_kind("MicroDuration"), ends) == [REFUSED, REFUSED]


def _spelled(iso: str) -> str:
    """The same in words, which DuckDB reads."""
    words = iso.removeprefix("PT")
    for unit, word in (("H", " hours "), ("M", " minutes "), ("S", " seconds ")):
        words = words.replace(unit, word)
    return words


def test_what_does_not_fit_is_shown_as_the_database_shows_it() -> None:
    assert shown(time_kind("Date", "int32"), 2**31 - 1) == "infinity"
    assert shown(time_kind("Date", "int32"), -(2**31)) == "-infinity"
    assert shown(time_kind("Date", "int32"), 2_932_897) == "10000-01-01"
    assert shown(time_kind("MicroTimestamp"), -9_223_372_036_832_400_000) == "-infinity"
    assert shown(time_kind("MicroTimestamp"), 253_402_300_800_000_000).startswith("10000-01-01T")
    assert shown(time_kind("MicroTime"), 86_400_000_000) == "24:00:00.000000"
    assert shown(VARIABLE, {"scale": 20, "value": unscaled(1)}) == "0.00000000000000000001"
    assert shown(ValueType("bytes"), "x" * 100) == "x" * 60 + "..."
    assert shown(decimal_kind(10, 2), "?") == "'?'"
    marker = "__debezium_unavailable_value"
    written = base64.b64encode(marker.encode()).decode()
    assert converted(decimal_kind(10, 2), [written]) == [REFUSED]
    assert shown(decimal_kind(10, 2), written) == marker


# ---- arrays, structs, JSON ---------------------------------------------------------------

ELEMENTS: list[tuple[ValueType, st.SearchStrategy[Any]]] = [
    (ValueType("int32"), st.integers(-(2**31), 2**31 - 1)),
    (ValueType("string"), st.text()),
    (ValueType("boolean"), st.booleans()),
    (ValueType("double"), st.floats(allow_nan=False, allow_infinity=False)),
    (decimal_kind(38, 4), st.integers(-(10**37), 10**37).map(unscaled)),
    (time_kind("Date", "int32"), st.integers(-700_000, 2_000_000)),
]


@pytest.mark.parametrize(("kind", "values"), ELEMENTS, ids=lambda each: getattr(each, "name", ""))
@settings(max_examples=examples(25))
@given(data=st.data())
def test_arrays_hold_what_their_elements_become(
    kind: ValueType, values: st.SearchStrategy[Any], data: st.DataObject
) -> None:
    lists = data.draw(st.lists(st.none() | st.lists(st.none() | values)))
    flat = [each for one in lists if one is not None for each in one]
    alone = iter(converted(kind, flat))
    wanted = [None if one is None else [next(alone) for _ in one] for one in lists]
    assert converted(ValueType("array", items=kind), lists) == wanted
    texts = converted(ValueType("array", items=kind), lists, pa.string(), as_json=True)
    for was, text in zip(wanted, texts, strict=True):
        assert (text is None) == (was is None)
        if was is not None:
            read = json.loads(text, parse_float=Decimal if kind.name == "bytes" else None)
            assert read == [str(each) if isinstance(each, dt.date) else each for each in was]


def test_an_array_with_a_value_that_does_not_fit_is_refused_as_a_whole() -> None:
    kind = ValueType("array", items=decimal_kind(12, 3))
    lists = [[unscaled(1230)], [unscaled(1), unscaled(1239)], None, []]
    found = converted(kind, lists, pa.list_(pa.field("element", pa.decimal128(10, 2))))
    assert found == [[Decimal("1.23")], REFUSED, None, []]
    assert shown(kind, lists[1]) == "[0.001, 1.239]"


def test_structs() -> None:
    parts = {"x": "double", "wkb": "bytes", "srid": "int32"}
    fields = tuple((name, ValueType(kind)) for name, kind in parts.items())
    kind = ValueType("struct", "io.debezium.data.geometry.Point", fields=fields)
    values = [{"x": 1.5, "wkb": "AAE=", "srid": None}, None, {"x": math.inf, "wkb": "!", "srid": 1}]
    assert converted(kind, values) == [{"x": 1.5, "wkb": b"\0\1", "srid": None}, None, REFUSED]
    texts = converted(kind, values, pa.string(), as_json=True)
    assert json.loads(texts[0]) == values[0]
    assert json.loads(texts[2]) == {"x": "Infinity", "wkb": "!", "srid": 1}


def test_documents_must_be_json_where_a_store_takes_them_as_such() -> None:
    kind = ValueType("string", "io.debezium.data.Json")
    texts = ['{"a": 1.10}', None, "{", "1,2", " null "]
    assert converted(kind, texts) == texts
    refused = [texts[0], None, REFUSED, REFUSED, " null "]
    assert converted(kind, texts, pa.string(), as_json=True) == refused


def test_bytes() -> None:
    assert converted(ValueType("bytes"), ["AAE=", None, ""]) == [b"\0\1", None, b""]
    assert converted(ValueType("bytes"), ["AAE=", "AAE", "A*"]) == [b"\0\1", REFUSED, REFUSED]


def test_types_of_stores() -> None:
    assert stored_field("t", time_kind("MicroTime")).type == pa.time64("us")
    for kind in (
        ValueType("array", items=ValueType("int32")),
        ValueType("string", "io.debezium.data.Json"),
    ):
        field = stored_field("j", kind)
        assert field.type == pa.string()
        assert field.metadata == {b"penstock": b"json"}
    assert stored_field("u", ValueType("string", "io.debezium.data.Uuid")).metadata is None
