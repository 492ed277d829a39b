"""Checksums of rows tell rows apart, and ranges of them lead to exactly the keys that differ."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.verifying.checksums import Digest, differing, keys_of, rows_of
from penstock.sinks.schema import Schema, json_field

SCHEMA = Schema.of(
    [
        pa.field("id", pa.int64()), pa.field("name", pa.string()), pa.field("data", pa.binary()),
        pa.field("price", pa.float64()), pa.field("small", pa.int16()),
        pa.field("total", pa.decimal128(12, 2)), pa.field("day", pa.date32()),
        pa.field("at", pa.timestamp("us", "UTC")), pa.field("clock", pa.time64("us")),
        pa.field("yes", pa.bool_()), json_field("more"),
    ],
    "id",
)  # fmt: skip
ROW: dict[str, Any] = {
    "id": -1, "name": "a", "data": b"\0", "price": 1.5, "small": -1, "total": Decimal("1.10"),
    "day": dt.date(2026, 1, 1), "at": dt.datetime(2026, 1, 1, tzinfo=dt.UTC),
    "clock": dt.time(1, 2), "yes": False, "more": '{"a":1,"b":[2]}',
}  # fmt: skip


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=SCHEMA.arrow)


@pytest.mark.parametrize(
    ("column", "other"),
    [
        ("id", -2), ("name", ""), ("name", None), ("name", "a\0"), ("data", b""), ("data", None),
        ("data", b"\0\0"), ("price", -1.5), ("price", None), ("price", float("nan")),
        ("small", -2), ("small", 0), ("total", Decimal("-1.10")), ("total", Decimal("11.00")),
        ("day", dt.date(2026, 1, 2)), ("at", dt.datetime(2026, 1, 1, 0, 0, 1, tzinfo=dt.UTC)),
        ("clock", dt.time(1, 2, 0, 1)), ("yes", True), ("yes", None), ("more", '{"a":1}'),
    ],
)  # fmt: skip
def test_another_value_is_another_checksum(column: str, other: Any) -> None:
    one, two = rows_of(table(ROW, {**ROW, column: other}), SCHEMA)
    assert one != two


def test_values_are_told_apart_by_their_column() -> None:
    swapped = {**ROW, "name": None, "data": b"a"}
    plain = {**ROW, "name": "a", "data": None}
    one, two = rows_of(table(swapped, plain), SCHEMA)
    assert one != two


def test_the_same_row_is_the_same_wherever_it_stands() -> None:
    other = {**dict.fromkeys(ROW), "id": 7}
    many = table(other, ROW, other, {**ROW, "more": '{ "b": [2], "a": 1 }', "price": 1.5})
    expected = rows_of(table(ROW), SCHEMA)[0]
    assert [expected == each for each in rows_of(many, SCHEMA)] == [False, True, False, True]
    cut = many.slice(1, 1)
    assert rows_of(cut, SCHEMA)[0] == expected
    assert keys_of(cut, SCHEMA)[0] == keys_of(table(ROW), SCHEMA)[0]
    zero = table({**ROW, "price": 0.0}, {**ROW, "price": -0.0})
    assert len(set(rows_of(zero, SCHEMA))) == 1


Side = st.dictionaries(st.integers(0, 2**63 - 1) | st.integers(0, 20), st.integers(0, 3))


def digest(rows: dict[int, int]) -> Digest:
    made = Digest()
    # In another order than that of the keys, and in two pieces.
    items = sorted(rows.items(), key=lambda item: item[0] % 7)
    for part in (items[: len(items) // 2], items[len(items) // 2 :]):
        keys = np.array([key for key, _ in part], np.uint64)
        made.put(keys, np.array([row for _, row in part], np.uint64))
    return made.sort(last_counts=False)


@given(Side, Side, Side)
def test_exactly_the_keys_that_differ(
    both: dict[int, int], one: dict[int, int], other: dict[int, int]
) -> None:
    left, right = {**both, **one}, {**both, **other}
    expected = {key for key in {*left, *right} if left.get(key) != right.get(key)}
    assert set(map(int, differing(digest(left), digest(right)))) == expected


@given(st.lists(st.tuples(st.integers(0, 5), st.none() | st.integers(0, 3))))
def test_of_a_log_the_last_counts(changes: list[tuple[int, int | None]]) -> None:
    made, model = Digest(), dict[int, int]()
    for key, row in changes:
        keys = np.array([key], np.uint64)
        if row is None:
            made.take_out(keys)
            model.pop(key, None)
        else:
            made.put(keys, np.array([row], np.uint64))
            model[key] = row
    made.sort(last_counts=True)
    assert dict(zip(map(int, made.keys), map(int, made.rows), strict=True)) == model


def test_a_row_that_is_there_twice_differs() -> None:
    once, twice = digest({1: 5, 2: 6}), Digest()
    twice.put(np.array([1, 2, 2], np.uint64), np.array([5, 6, 6], np.uint64))
    assert list(map(int, differing(once, twice.sort(last_counts=False)))) == [2]
