"""Tests of derived stores in bad company: kills inside of `open`, keys and times of rare kinds.

`penstock.testing.sinks.SinkKit` has them among its own.

Processes that are killed are forked from one that has no threads: it has imported already what
`multiprocessing.set_forkserver_preload` names, so that each of them starts in milliseconds.
"""

from __future__ import annotations

import datetime as dt
import multiprocessing
import os
import random
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from types import FrameType
from typing import Any, ClassVar, Final

import pyarrow as pa
import pytest

from penstock.errors import PenstockError
from penstock.sinks import Changes, Position, Refused, Schema, Sink
from penstock.testing.sink_changes import PLACE, Row, Store, changes, never, read

FORKS: Final = multiprocessing.get_context("forkserver")
KILLS: Final = 2
KILLED_S: Final = 120
# At least as many as there are keys of any kind.
LIMITS: Final = 8
_DAY_US: Final = 86_400_000_000

KEYS: Final[dict[str, tuple[pa.DataType, Sequence[Any]]]] = {
    "large numbers": (
        pa.decimal128(20, 0),
        [Decimal(text) for text in ("-30", "-5", "2", "9", "10", "100", "18446744073709551615")],
    ),
    "small decimals": (
        pa.decimal128(10, 2),
        [Decimal(text) for text in ("-10.50", "-9.75", "0.10", "2.00", "10.00", "10.01")],
    ),
    "large decimals": (
        pa.decimal128(38, 10),
        [
            Decimal(text)
            for text in ("-2E+20", "-0.5", "-1E-10", "0", "1E-10", "9.75", "10", "1E+25")
        ],
    ),
    "days": (
        pa.date32(),
        [dt.date(1, 1, 1), dt.date(999, 12, 31), dt.date(1969, 12, 31), dt.date(9999, 12, 31)],
    ),
    "times of a day": (
        pa.time64("us"),
        [dt.time(0, 0), dt.time(0, 0, 0, 1), dt.time(9, 30), dt.time(23, 59, 59, 999_999)],
    ),
    "times without a zone": (
        pa.timestamp("us"),
        [
            dt.datetime(1, 1, 1),  # noqa: DTZ001
            dt.datetime(1969, 12, 31, 23, 59, 59, 1),  # noqa: DTZ001
            dt.datetime(1970, 1, 1),  # noqa: DTZ001
            dt.datetime(9999, 12, 31, 23, 59, 59, 999_999),  # noqa: DTZ001
        ],
    ),
    "moments": (
        pa.timestamp("us", "UTC"),
        [
            dt.datetime(1, 1, 1, tzinfo=dt.UTC),
            dt.datetime(1969, 12, 31, 23, 59, 59, 1, tzinfo=dt.UTC),
            dt.datetime(2026, 3, 29, 1, 30, tzinfo=dt.UTC),
            dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=dt.UTC),
        ],
    ),
}
# As capture tells infinity, from PostgreSQL, and what is around the ends of what others know.
_MOMENTS: Final = (
    9_223_372_036_825_200_000,
    -9_223_372_036_832_400_000,
    2**63 - 1,
    -(2**63),
    253_402_300_800_000_000,
    -62_135_596_800_000_001,
    -62_167_219_200_000_001,
)
_DAYS: Final = (2**31 - 1, -(2**31), 2_932_897, -719_163, -800_000)
ODD_TIMES: Final[dict[str, tuple[pa.DataType, Sequence[int]]]] = {
    "day": (pa.date32(), _DAYS),
    "clock": (pa.time64("us"), (-1, _DAY_US, 90_000_000_000)),
    "local": (pa.timestamp("us"), _MOMENTS),
    "at": (pa.timestamp("us", "UTC"), _MOMENTS),
}


class HazardKit:
    """The tests; subclasses have the fixture `store`."""

    # How many processes are killed, one after the other.
    kills: ClassVar[int] = KILLS
    # How many keys of each kind are limits of a range.
    limits: ClassVar[int] = LIMITS

    def test_killed_inside_of_open(self, store: Store, seed: int) -> None:
        """While the store is made, and while it gets more columns."""
        chance = random.Random(seed)
        first, wider = _growing(store)
        with store.sink() as sink:
            making = _calls(sink, first)
        with store.sink() as sink:
            growing = _calls(sink, wider)
            sink.remove()
        for _ in range(self.kills):
            _kill_an_opener(store, first, chance.randint(1, making))
        one, two = {"id": 1, "n": 1}, {"id": 2, "n": 2, "name": "b"}
        with store.sink() as sink:
            assert sink.open(first) == Position()
            sink.apply(changes(first, [one], [], since=0, until=1), never)
        for _ in range(self.kills):
            _kill_an_opener(store, wider, chance.randint(1, growing))
        with store.sink() as sink:
            assert sink.open(wider) == Position({PLACE: 1})
            sink.apply(changes(wider, [two], [], since=1, until=2), never)
            if sink.readable:
                assert read(sink) == [{**one, "name": None}, two]

    @pytest.mark.parametrize("kind", KEYS)
    def test_keys_are_ordered_by_their_value(self, store: Store, seed: int, kind: str) -> None:
        type_, values = KEYS[kind]
        schema = Schema.of([pa.field("id", type_), pa.field("name", pa.string())], "id")
        rows: list[Row] = [{"id": value, "name": f"n{at}"} for at, value in enumerate(values)]
        chance = random.Random(seed)
        mixed = chance.sample(rows, len(rows))
        with store.sink() as sink:
            sink.open(schema)
            sink.apply(changes(schema, mixed, [], since=0, until=9), never)
            if sink.readable:
                assert read(sink) == rows
                for low in chance.sample(range(len(values)), min(self.limits, len(values))):
                    assert read(sink, (values[low],)) == rows[low:]
                    assert read(sink, None, (values[low],)) == rows[:low]
                assert read(sink, (values[1],), (values[-1],)) == rows[1:-1]
            again = {**rows[0], "name": "again"}
            sink.apply(changes(schema, [again], [(values[1],)], since=9, until=11), never)
            if sink.readable:
                assert read(sink) == [again, *rows[2:]]

    @pytest.mark.parametrize("column", ODD_TIMES)
    def test_times_out_of_range_are_kept_or_put_aside(self, store: Store, column: str) -> None:
        type_, numbers = ODD_TIMES[column]
        schema = Schema.of([pa.field("id", pa.int64()), pa.field(column, type_)], "id")
        wanted = dict(enumerate([0, *numbers, 1]))
        with store.sink() as sink:
            sink.open(schema)
            aside: list[Refused] = []
            given = _odd(schema, list(wanted), list(wanted.values()))
            sink.apply(given, aside.extend)
            assert sink.position() == given.position
            assert all(each.reason for each in aside)
            for each in aside:
                assert wanted.pop(each.key[0]) in numbers
            if sink.readable:
                assert _numbers(sink, schema) == sorted(wanted.items())

    @pytest.mark.parametrize("column", ODD_TIMES)
    def test_keys_out_of_range_are_in_nobodys_way(self, store: Store, column: str) -> None:
        type_, numbers = ODD_TIMES[column]
        schema = Schema.of([pa.field("id", type_), pa.field("n", pa.int64())], "id")
        keys = [0, *numbers, 1]
        with store.sink() as sink:
            sink.open(schema)
            aside: list[Refused] = []
            sink.apply(_odd(schema, keys, range(len(keys))), aside.extend)
            assert {keys[each.offset] for each in aside} <= set(numbers)
            kept = {key: at for at, key in enumerate(keys)}
            for each in aside:
                assert each.reason
                del kept[keys[each.offset]]
            if sink.readable:
                assert _numbers(sink, schema) == sorted(kept.items())
            rows = _odd(schema, keys, range(len(keys)))
            gone = changes(schema, [], [], since=len(keys), until=2 * len(keys))
            gone = replace(gone, deletes=rows.upserts.select(["id"]), deleted_at=rows.upserted_at)
            sink.apply(gone, aside.extend)
            assert sink.position() == gone.position
            if sink.readable:
                assert _numbers(sink, schema) == []

    def test_columns_that_differ_in_case(self, store: Store) -> None:
        """They are two, or it is told what to do; also if one has taken the place of the other."""
        key, large, small = (pa.field(name, pa.int64()) for name in ("id", "Name", "name"))
        both = Schema.of([key, large, small], "id")
        with store.sink() as sink:
            if _taken_or_told(sink, both, "fields"):
                sink.apply(
                    changes(both, [{"id": 1, "Name": 2, "name": 3}], [], since=0, until=1), never
                )
                if sink.readable:
                    assert read(sink) == [{"id": 1, "Name": 2, "name": 3}]
            else:
                assert sink.position() is None
            sink.remove()
        with store.sink() as sink:
            sink.open(Schema.of([key, large], "id"))
            renamed = Schema.of([key, small], "id")
            if _taken_or_told(sink, renamed, "rebuild"):
                sink.apply(changes(renamed, [{"id": 1, "name": 3}], [], since=0, until=1), never)
                if sink.readable:
                    assert read(sink) == [{"id": 1, "Name": None, "name": 3}]


def _taken_or_told(sink: Sink, schema: Schema, remedy: str) -> bool:
    """Whether a store has opened a schema with two columns alike; if not, it must say why."""
    try:
        sink.open(schema)
    except PenstockError as caught:
        error = caught
    else:
        return True
    assert "'Name' and 'name'" in str(error)
    assert remedy in error.advice
    assert not error.retriable
    return False


def _growing(store: Store) -> tuple[Schema, Schema]:
    """A schema, and what it becomes: with one column more, and a wider one."""
    narrow = pa.field("n", pa.int32())
    wide = narrow if "widen" in store.cannot else pa.field("n", pa.int64())
    key = pa.field("id", pa.int64())
    more = pa.field("name", pa.string())
    return Schema.of([key, narrow], "id"), Schema.of([key, wide, more], "id")


def _odd(schema: Schema, first: Sequence[int], second: Sequence[int]) -> Changes:
    """Rows of two columns of numbers, or of what is one inside, which Python may have no name
    for."""
    columns = [
        pa.array(list(numbers), pa.int32() if pa.types.is_date32(each.type) else pa.int64())
        .cast(each.type)
        for numbers, each in zip((first, second), schema.fields, strict=True)
    ]  # fmt: skip
    rows = len(first)
    nothing = [dict.fromkeys(schema.names, None)] * rows
    blank = Schema(tuple(each.with_nullable(True) for each in schema.fields), schema.key)
    made = changes(blank, nothing, [], since=0, until=rows)
    return replace(
        made,
        upserts=pa.table(columns, schema=schema.arrow),
        deletes=schema.key_arrow.empty_table(),
    )


def _numbers(sink: Sink, schema: Schema) -> list[tuple[int, int]]:
    """Both columns as numbers."""
    found = pa.Table.from_batches(list(sink.scan()), schema=schema.arrow)
    columns = [
        column.cast(pa.int32() if pa.types.is_date32(column.type) else pa.int64()).to_pylist()
        for column in found.columns
    ]
    return list(zip(*columns, strict=True))


# ---- kills -----------------------------------------------------------------------------------


class _Calls:
    """Counts the calls out of Python, where all that changes a store is done; kills the process
    before one of them."""

    def __init__(self, last: int | None = None) -> None:
        self.made = 0
        self._last = last

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "c_call":
            self.made += 1
            if self.made == self._last:
                os.kill(os.getpid(), signal.SIGKILL)

    def watch(self, sink: Sink, schema: Schema) -> None:
        # What is done but once, such as imports, comes before.
        sink.position()
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            sink.open(schema)
        finally:
            sys.setprofile(before)


def _calls(sink: Sink, schema: Schema) -> int:
    """How many calls `open` makes."""
    calls = _Calls()
    calls.watch(sink, schema)
    return calls.made


def _kill_an_opener(store: Store, schema: Schema, at: int) -> None:
    process = FORKS.Process(target=_open_and_be_killed, args=(store, schema, at), daemon=True)
    process.start()
    try:
        process.join(KILLED_S)
        # It may make fewer calls than were counted here: then it has opened the store.
        assert process.exitcode in {-signal.SIGKILL, 0}, f"cannot be opened, before call {at}"
    finally:
        process.kill()
        process.join()


def _open_and_be_killed(store: Store, schema: Schema, at: int) -> None:
    with store.sink() as sink:
        _Calls(at).watch(sink, schema)
