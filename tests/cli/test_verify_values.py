"""Values as the source means them: equal ones have the same form, and nothing else has."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from typing import Any
from uuid import UUID

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.verifying.values import (
    UNREAD,
    Form,
    Meaning,
    compared_as,
    form_of,
    formed,
    shown,
)
from penstock.sinks.schema import Schema, json_field

UTC = dt.UTC
NAIVE = dt.datetime.fromisoformat
HOUR_EAST = dt.timezone(dt.timedelta(hours=1))

EQUAL: list[tuple[Meaning, list[Any]]] = [
    ("number", [Decimal("111.00"), "111.00", "111", 111, 111.0, "1.11e2", " +111 "]),
    ("number", [Decimal("0.1"), 0.1, "0.10", ".1"]),
    ("number", [0, -0.0, Decimal("0E+5"), "-0.00", False]),
    ("number", [2**63, Decimal(2**63), "9223372036854775808"]),
    ("number", [float("nan"), Decimal("NaN"), "NaN"]),
    ("number", [float("-inf"), "-Infinity"]),
    ("real", [0.1, 0.10000000149011612, Decimal("0.1"), "0.1", np.float32(0.1)]),
    ("real", [16777216, 16777217.0, "1.6777216e7"]),
    ("float6", [16777216.0, 16777200, "16777200"]),
    ("boolean", [True, 1, "t", "true", b"\1", Decimal(1)]),
    ("bytes", [b"ab", bytearray(b"ab"), memoryview(b"ab")]),
    ("date", [dt.date(2026, 11, 17), "2026-11-17", NAIVE("2026-11-17")]),
    ("time", [dt.time(1, 2, 3, 400_000), dt.timedelta(seconds=3723.4), "01:02:03.4",
              "01:02:03.400000"]),
    ("time", [dt.time(1, tzinfo=HOUR_EAST), "00:00:00Z", "02:00:00+02"]),
    ("timestamp", [dt.datetime(2026, 1, 1, 0, 0, 0, 500_000, UTC),
                   dt.datetime(2026, 1, 1, 1, 0, 0, 500_000, HOUR_EAST),
                   NAIVE("2026-01-01T00:00:00.5"), "2026-01-01 00:00:00.5+00",
                   "2026-01-01T01:00:00.500000000+01:00", "2026-01-01T00:00:00.5Z"]),
    ("interval", ["P1Y2M3DT4H5M6.5S", "P14M3DT14706.500S"]),
    ("interval", ["PT0S", "-PT0S", "P0D"]),
    ("uuid", [UUID(int=255), "000000000000000000000000000000FF",
              "00000000-0000-0000-0000-0000000000ff"]),
    ("json", ['{"a": 1.10, "b": [null, true]}', '{"b":[null,true],"a":1.1}',
              {"b": [None, True], "a": Decimal("1.100")}]),
    ("json", ["[1.0, 2]", [1, Decimal("2.00")]]),
    ("text", ["5", 5]),
    # What neither side can read is still the same text.
    ("date", ["infinity", "infinity"]),
]  # fmt: skip
DIFFERENT: list[tuple[Meaning, list[Any]]] = [
    ("number", [Decimal("111.00"), "bw==", Decimal("111.001"), None, "", "1_11", "0x6f", b"111"]),
    ("number", [12345678901234567, 12345678901234567.0]),
    ("number", [Decimal("12345678901234567.89"), 12345678901234567.89]),
    ("number", [Decimal(1).scaleb(-30), 0]),
    ("real", [16777216, 16777218, "NaN", 1e39, "x", None]),
    ("boolean", [True, False, None, 2, "yes"]),
    ("bytes", [b"ab", "YWI=", "6162", "ab"]),
    ("date", [dt.date(2026, 11, 17), 20774, "bw==", NAIVE("2026-11-17T01:00:00")]),
    ("time", [dt.time(1), dt.timedelta(hours=25), -dt.timedelta(hours=1), "01:00", 3_600_000_000]),
    ("timestamp", [NAIVE("2026-01-01"), 1767225600000000, "2026-01-01 00:00:00.0000001"]),
    ("interval", ["P1M", "P30D", "PT720H", "P", "1 mon", 2592000000000]),
    ("json", ["1", "true", '"1"', "null", None, "{", "{}", "[]"]),
    ("text", ["1.10", "1.1", 1.1 + 1e-15, None, ""]),
    ("uuid", [UUID(int=1), "nothing"]),
]


@pytest.mark.parametrize(("meaning", "values"), EQUAL)
def test_equal_values_have_one_form(meaning: Meaning, values: list[Any]) -> None:
    # 01:00 is no time of a database, but Python's.
    assert len({form_of(each, meaning) for each in values}) == 1, [
        form_of(each, meaning) for each in values
    ]


@pytest.mark.parametrize(("meaning", "values"), DIFFERENT)
def test_others_have_others(meaning: Meaning, values: list[Any]) -> None:
    forms = [form_of(each, meaning) for each in values]
    if meaning == "time":
        # A time may be written without its seconds.
        assert forms[0] == forms.pop(3)
    assert len(set(forms)) == len(forms), forms


@given(st.lists(st.decimals(allow_nan=False, allow_infinity=False), min_size=2, max_size=2))
def test_decimals_are_equal_by_value(pair: list[Decimal]) -> None:
    one, other = pair
    assert (form_of(one, "number") == form_of(other, "number")) == (one == other)
    again = form_of(one, "number")
    assert again is not None
    assert Decimal(again) == one


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_a_float_is_its_shortest_text(value: float) -> None:
    found = form_of(value, "number")
    assert found is not None
    assert float(found) == value
    assert found == form_of(json.dumps(value), "number")


@given(st.datetimes(timezones=st.timezones(), min_value=NAIVE("1000-01-01")))
def test_moments_are_equal_as_instants(value: dt.datetime) -> None:
    text = value.astimezone(UTC).isoformat()
    assert form_of(value, "timestamp") == form_of(text, "timestamp")


def field(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind)


@pytest.mark.parametrize(
    ("source", "stored", "meaning"),
    [
        (pa.decimal128(10, 2), pa.string(), "number"),
        (pa.decimal128(10, 2), pa.decimal128(38, 18), "number"),
        (pa.decimal128(10, 2), pa.float64(), "number"),
        (pa.int32(), pa.int64(), None),
        (pa.int64(), pa.string(), "number"),
        (pa.date32(), pa.int32(), "date"),
        (pa.timestamp("us"), pa.timestamp("us", "UTC"), None),
        (pa.timestamp("us"), pa.int64(), "timestamp"),
        (pa.binary(), pa.string(), "bytes"),
        (pa.string(), pa.string(), None),
        (pa.time64("us"), pa.string(), "time"),
        (pa.bool_(), pa.int64(), "boolean"),
        (pa.float32(), pa.string(), "real"),
    ],
)
def test_the_source_says_what_a_value_means(
    source: pa.DataType, stored: pa.DataType, meaning: Meaning | None
) -> None:
    assert compared_as(field("x", source), field("x", stored)) == meaning


def test_json_is_compared_as_json_on_either_side() -> None:
    assert compared_as(json_field("x"), field("x", pa.string())) == "json"
    assert compared_as(field("x", pa.string()), json_field("x")) == "json"
    assert compared_as(json_field("x"), json_field("x")) is None


def test_a_text_column_that_holds_connects_bytes_of_a_number_differs() -> None:
    source = pa.array([Decimal("111.00"), Decimal("-0.50"), None], pa.decimal128(10, 2))
    good = pa.array(["111.00", "-0.5", None])
    bad = pa.array(["bw==", "zg==", ""])
    assert formed(source, "number").equals(formed(good, "number"))
    assert not any(
        one == other
        for one, other in zip(
            formed(source, "number").to_pylist(), formed(bad, "number").to_pylist(), strict=True
        )
    )
    assert shown(form_of("bw==", "number"), "number") == "bw=="
    told = [shown(form_of(each, "number"), "number") for each in (5.0, "-1.50", None)]
    assert told == [5, "-1.5", None]
    assert shown(form_of(1, "boolean"), "boolean") is True
    assert formed(bad, "number").to_pylist()[0] == f"{UNREAD}bw=="


def test_both_sides_of_a_table() -> None:
    stored = Schema.of([field("id", pa.int64()), field("n", pa.string())], "id")
    form = Form(stored, {"n": "number"})
    rows = pa.table({"id": [1, 2], "n": pa.array([1.5, 0.1], pa.float32())})
    assert form.of(rows).to_pylist() == [{"id": 1, "n": "1.5"}, {"id": 2, "n": "0.1"}]
    assert form.of(rows.select(["id"])).column_names == ["id"]
    assert form.schema.field("n").type == pa.string()
    plain = Form(stored, {})
    assert plain.of(rows) is rows
