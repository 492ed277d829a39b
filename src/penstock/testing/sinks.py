"""The tests that every kind of derived store passes: subclass `SinkKit`, say how it is reached.

    class TestSqlite(SinkKit):
        @pytest.fixture
        def store(self, tmp_path: Path) -> Store:
            return Store(f"sqlite:///{tmp_path}/shop.db?table=orders")

Random changes are compared with a dict; the rest goes for what the contract promises (see
`penstock.sinks`). `Store` says what a store cannot hold, which then must be refused, not lost.

Run as a program (`python -m penstock.testing.sinks URL SEED`) it writes changes until it is killed:
`test_killed_at_any_moment` does so, and looks at what is left.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import random
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Context, Decimal
from itertools import count
from typing import Any, Final, Literal

import pyarrow as pa
import pytest

from penstock.errors import PenstockError
from penstock.sinks import (
    MAX_REFUSED,
    Changes,
    FencedError,
    NotReachedError,
    OutOfStepError,
    Position,
    Refused,
    Schema,
    SchemaChangedError,
    Sink,
    TooManyRefusedError,
    open_sink,
)
from penstock.sinks.contract import ORIGIN
from penstock.sinks.schema import json_field

TOPIC: Final = "kit.changes"
PLACE: Final = (TOPIC, 0)
KEYS: Final = 40
KILLS: Final = 2
KILL_ROWS: Final = 200
Cannot = Literal["nul", "nan", "infinity", "switch", "widen"]
Row = dict[str, Any]
Model = dict[tuple[Any, ...], Row]

ALL: Final = Schema.of(
    [
        pa.field("id", pa.int64()),
        pa.field("part", pa.string()),
        pa.field("small", pa.int16()),
        pa.field("many", pa.int64()),
        pa.field("ratio", pa.float64()),
        pa.field("short_ratio", pa.float32()),
        pa.field("price", pa.decimal128(10, 2)),
        pa.field("exact", pa.decimal128(38, 10)),
        pa.field("name", pa.string()),
        pa.field("data", pa.binary()),
        pa.field("ok", pa.bool_()),
        pa.field("day", pa.date32()),
        pa.field("clock", pa.time64("us")),
        pa.field("local", pa.timestamp("us")),
        pa.field("at", pa.timestamp("us", "UTC")),
        json_field("more"),
    ],
    ["id", "part"],
)
SIMPLE: Final = Schema.of([pa.field("id", pa.int64()), pa.field("name", pa.string())], "id")
_WIDE: Final = Context(prec=60)
TEXTS: Final = (
    "",
    "a",
    "A",
    "a ",
    "ä",
    "🦆 duck",
    'it\'s "quoted" \\ and\ttabbed\nlines',
    "é" * 50,
)


@dataclass(frozen=True)
class Store:
    """A store to be tested: empty at first."""

    url: str
    options: Mapping[str, object] = field(default_factory=dict)
    # What it has no place for.
    cannot: frozenset[Cannot] = frozenset()

    def sink(self) -> Sink:
        return open_sink(self.url, self.options, name="kit")


def changes(
    schema: Schema,
    upserts: Sequence[Row],
    deletes: Sequence[tuple[Any, ...]],
    *,
    since: int,
    until: int,
) -> Changes:
    """Changes of one partition from offset to offset."""
    return Changes(
        pa.Table.from_pylist(list(upserts), schema=schema.arrow),
        pa.Table.from_pylist(
            [dict(zip(schema.key, key, strict=True)) for key in deletes], schema=schema.key_arrow
        ),
        Position({PLACE: until}),
        Position({PLACE: since} if since else {}),
        _origin(len(upserts), since),
        _origin(len(deletes), since + len(upserts)),
    )


def _origin(rows: int, first: int) -> pa.Table:
    moment = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    return pa.Table.from_pylist(
        [
            {"topic": TOPIC, "partition": 0, "offset": first + at, "timestamp": moment}
            for at in range(rows)
        ],
        schema=ORIGIN,
    )


def never(refused: Sequence[Refused]) -> None:
    """For rows that must all be taken."""
    raise AssertionError(f"refused: {refused[:3]}")


def read(sink: Sink, low: Any = None, high: Any = None) -> list[Row]:
    """All rows of a store, in its order."""
    return [row for batch in sink.scan(low, high, batch_rows=7) for row in batch.to_pylist()]


def ordered(model: Model) -> list[Row]:
    """The rows of a model as `scan` gives them."""

    def rank(key: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(part.encode() if isinstance(part, str) else part for part in key)

    return [model[key] for key in sorted(model, key=rank)]


def same(left: Sequence[Row], right: Sequence[Row]) -> bool:
    """Equal, NaN being equal to itself."""
    return list(map(_comparable, left)) == list(map(_comparable, right))


def _comparable(row: Row) -> Row:
    return {
        name: "NaN" if isinstance(value, float) and math.isnan(value) else value
        for name, value in row.items()
    }


class Load:
    """Random changes of the table `ALL`, and what the table is after them."""

    def __init__(self, seed: int, cannot: frozenset[Cannot] = frozenset()) -> None:
        self._random = random.Random(seed)
        self._cannot = cannot
        self.at = 0
        self.model: Model = {}

    def next(self, rows: int = 20) -> Changes:
        """Some changes; the model has them already."""
        chance = self._random
        wanted = chance.sample(range(KEYS), min(KEYS, chance.randint(0, rows)))
        keys = [(number % 20 - 5, TEXTS[number % 8]) for number in wanted]
        keys = list(dict.fromkeys(keys))
        upserts = [self.row(key) for key in keys if chance.random() < 0.7]
        put = {(row["id"], row["part"]) for row in upserts}
        deletes = [key for key in keys if key not in put]
        made = changes(ALL, upserts, deletes, since=self.at, until=self.at + len(keys) + 1)
        self.at += len(keys) + 1
        for row in upserts:
            self.model[row["id"], row["part"]] = row
        for key in deletes:
            self.model.pop(key, None)
        return made

    def row(self, key: tuple[int, str]) -> Row:
        """A row with anything in it that the store can hold."""
        chance = self._random
        ratios = [0.0, -1.5, 1e300, 5e-324, 0.1]
        if "nan" not in self._cannot:
            ratios.append(math.nan)
        if "infinity" not in self._cannot:
            ratios += [math.inf, -math.inf]
        texts = [*TEXTS, "x" * 3000] + ([] if "nul" in self._cannot else ["nul\0inside", "\0"])
        moment = dt.datetime(1970, 1, 1, tzinfo=dt.UTC) + dt.timedelta(
            microseconds=chance.randrange(2**51)
        )
        row: Row = {
            "id": key[0],
            "part": key[1],
            "small": chance.choice([-(2**15), 2**15 - 1, 0, 7]),
            "many": chance.choice([-(2**63), 2**63 - 1, 0, 123456789012345678]),
            "ratio": chance.choice(ratios),
            "short_ratio": chance.choice([0.0, 0.5, -3.25, 2.0**100]),
            "price": Decimal(chance.randrange(-(10**10) + 1, 10**10)).scaleb(-2),
            "exact": Decimal(chance.choice([-1, 1]) * chance.randrange(10**37)).scaleb(-10, _WIDE),
            "name": chance.choice(texts),
            "data": chance.choice([b"", b"\0\xff\x00", bytes(range(256)), "é".encode()]),
            "ok": chance.random() < 0.5,
            "day": dt.date(1, 1, 1) + dt.timedelta(chance.randrange(3_652_058)),
            "clock": moment.time(),
            "local": moment.replace(tzinfo=None),
            "at": moment,
            "more": chance.choice(['{"a":[1,2,{"b":null}]}', '"text"', "[]", '{"z":1,"a":"é"}']),
        }
        for name in ALL.names:
            if name not in ALL.key and chance.random() < 0.15:
                row[name] = None
        return row


class SinkKit:
    """The tests; subclasses have the fixture `store`."""

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    def test_random_changes_end_as_in_a_dict(self, store: Store, seed: int) -> None:
        load = Load(seed, store.cannot)
        with store.sink() as sink:
            assert sink.position() is None
            assert sink.stored_schema() is None
            assert sink.open(ALL) == Position()
            for _ in range(12):
                batch = load.next()
                assert sink.apply(batch, never).rows == batch.rows
                if load.at % 3 == 0:
                    # A repetition does nothing.
                    assert sink.apply(batch, never).rows == 0
            assert sink.position() == Position({PLACE: load.at})
            _check(sink, load.model)
        with store.sink() as reader:
            assert reader.position() == Position({PLACE: load.at})
            found = reader.stored_schema()
            assert found is not None
            assert (found.key, found.arrow) == (ALL.key, ALL.arrow)
            _check(reader, load.model)

    def test_ranges_of_keys(self, store: Store, seed: int) -> None:
        load = Load(seed, store.cannot)
        with store.sink() as sink:
            sink.open(ALL)
            for _ in range(6):
                sink.apply(load.next(40), never)
            if not sink.readable:
                return
            rows = ordered(load.model)
            keys = [(row["id"], row["part"]) for row in rows]
            for low, high in (
                (None, keys[5]),
                (keys[3], keys[9]),
                (keys[4], None),
                ((99, ""), None),
            ):
                first = 0 if low is None else sum(_rank(key) < _rank(low) for key in keys)
                last = len(keys) if high is None else sum(_rank(k) < _rank(high) for k in keys)
                assert same(read(sink, low, high), rows[first:last])

    def test_nothing_is_lost_between_opens(self, store: Store, seed: int) -> None:
        load = Load(seed, store.cannot)
        for _ in range(4):
            with store.sink() as sink:
                assert sink.open(ALL) == (Position({PLACE: load.at}) if load.at else Position())
                sink.apply(load.next(), never)
        with store.sink() as sink:
            _check(sink, load.model)

    def test_gaps_and_steps_back_are_refused(self, store: Store) -> None:
        with store.sink() as sink:
            sink.open(SIMPLE)
            sink.apply(changes(SIMPLE, [{"id": 1, "name": "a"}], [], since=0, until=10), never)
            with pytest.raises(OutOfStepError, match="gap"):
                sink.apply(changes(SIMPLE, [], [(1,)], since=11, until=12), never)
            back = changes(SIMPLE, [], [(1,)], since=0, until=5)
            other = {PLACE: 5, (TOPIC, 1): 3}
            odd = Changes(back.upserts, back.deletes, Position(other), Position(), back.upserted_at,
                          back.deleted_at)  # fmt: skip
            with pytest.raises(OutOfStepError, match="back"):
                sink.apply(odd, never)
            assert sink.apply(back, never).rows == 0
            # Begins before and ends after: rows are put in once more.
            sink.apply(changes(SIMPLE, [{"id": 2, "name": "b"}], [], since=7, until=12), never)
            assert sink.position() == Position({PLACE: 12})
            if sink.readable:
                assert read(sink) == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]

    def test_positions_of_several_partitions(self, store: Store) -> None:
        with store.sink() as sink:
            sink.open(SIMPLE)
            one = changes(SIMPLE, [{"id": 1, "name": "a"}], [], since=1000, until=1003)
            sink.apply(replace(one, since=Position()), never)
            # A key may move to another partition, where its offsets begin anew.
            rows = [{"id": 1, "name": "moved"}, {"id": 2, "name": "b"}]
            two = changes(SIMPLE, rows, [], since=0, until=5)
            other = Position({(TOPIC, 1): 5, ("kit.other", 7): 2**40})
            sink.apply(
                Changes(two.upserts, two.deletes, other, Position(), two.upserted_at,
                        two.deleted_at), never,
            )  # fmt: skip
            assert sink.position() == other.merged(Position({PLACE: 1003}))
            if sink.readable:
                assert read(sink) == rows

    def test_deletes_of_what_it_cannot_hold(self, store: Store) -> None:
        """A row that was put aside is deleted later: that must not be in the way either."""
        schema = Schema.of([pa.field("id", pa.string())], "id")
        keys = [("a\0b",), ("x" * 70_000,), ("gone",)]
        with store.sink() as sink:
            sink.open(schema)
            aside: list[Refused] = []
            sink.apply(changes(schema, [{"id": "gone"}], [], since=0, until=1), never)
            sink.apply(changes(schema, [], keys, since=1, until=4), aside.extend)
            assert sink.position() == Position({PLACE: 4})
            if sink.readable:
                assert read(sink) == []

    def test_an_older_writer_is_fenced(self, store: Store) -> None:
        first, second = store.sink(), store.sink()
        with first, second:
            first.open(SIMPLE)
            first.apply(changes(SIMPLE, [{"id": 1, "name": "a"}], [], since=0, until=1), never)
            assert second.open(SIMPLE) == Position({PLACE: 1})
            with pytest.raises(FencedError):
                first.apply(changes(SIMPLE, [], [(1,)], since=1, until=2), never)
            second.apply(changes(SIMPLE, [{"id": 2, "name": "b"}], [], since=1, until=2), never)
            with pytest.raises(FencedError):
                first.apply(changes(SIMPLE, [], [(2,)], since=2, until=3), never)
            if second.readable:
                assert read(second) == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]

    def test_columns_are_added(self, store: Store) -> None:
        wider = Schema.of([*SIMPLE.fields, pa.field("age", pa.int32())], "id")
        with store.sink() as sink:
            sink.open(SIMPLE)
            sink.apply(changes(SIMPLE, [{"id": 1, "name": "a"}], [], since=0, until=1), never)
        with store.sink() as sink:
            assert sink.open(wider) == Position({PLACE: 1})
            row = {"id": 2, "name": "b", "age": 40}
            sink.apply(changes(wider, [row], [], since=1, until=2), never)
            if sink.readable:
                assert read(sink) == [{"id": 1, "name": "a", "age": None}, row]
        with store.sink() as sink:
            # The older schema again: the column stays, and is empty in what is written now.
            sink.open(SIMPLE)
            rows = [{"id": 2, "name": "c"}, {"id": 3, "name": "d"}]
            sink.apply(changes(SIMPLE, rows, [], since=2, until=4), never)
            found = sink.stored_schema()
            assert found is not None
            assert found.names == ("id", "name", "age")
            if sink.readable:
                assert read(sink)[1:] == [{**row, "age": None} for row in rows]

    def test_numbers_grow_and_other_types_do_not(self, store: Store) -> None:
        narrow = Schema.of([pa.field("id", pa.int64()), pa.field("n", pa.int32())], "id")
        wide = Schema.of([pa.field("id", pa.int64()), pa.field("n", pa.int64())], "id")
        text = Schema.of([pa.field("id", pa.int64()), pa.field("n", pa.string())], "id")
        with store.sink() as sink:
            sink.open(narrow)
            sink.apply(changes(narrow, [{"id": 1, "n": 5}], [], since=0, until=1), never)
        with store.sink() as sink, pytest.raises(SchemaChangedError, match="'n'"):
            sink.open(text)
        with store.sink() as sink, pytest.raises(SchemaChangedError, match="key"):
            sink.open(Schema.of(narrow.fields, ["id", "n"]))
        if "widen" in store.cannot:
            return
        with store.sink() as sink:
            sink.open(wide)
            row = {"id": 2, "n": 2**40}
            sink.apply(changes(wide, [row], [], since=1, until=2), never)
            if sink.readable:
                assert read(sink) == [{"id": 1, "n": 5}, row]

    def test_what_does_not_fit_is_put_aside(self, store: Store) -> None:
        wrong = [
            row
            for trouble, row in (
                ("nul", {"id": 11, "part": "x", "name": "with\0nul"}),
                ("nan", {"id": 12, "part": "x", "ratio": math.nan}),
                ("infinity", {"id": 13, "part": "x", "ratio": math.inf}),
            )
            if trouble in store.cannot
        ]
        fine = [{"id": number, "part": "x", "name": "fine"} for number in range(10)]
        aside: list[Refused] = []
        with store.sink() as sink:
            sink.open(ALL)
            rows = [*fine[:5], *wrong, *fine[5:]]
            done = sink.apply(changes(ALL, rows, [], since=0, until=len(rows)), aside.extend)
            assert done.rows == len(fine)
            assert list(done.refused) == aside
            assert [each.key for each in aside] == [(row["id"], "x") for row in wrong]
            assert [each.offset for each in aside] == list(range(5, 5 + len(wrong)))
            assert all(each.reason and each.topic == TOPIC for each in aside)
            assert sink.position() == Position({PLACE: len(rows)})
            if sink.readable:
                assert [row["id"] for row in read(sink)] == list(range(10))
            if wrong:
                many = [{**wrong[0], "id": number} for number in range(MAX_REFUSED + 1)]
                over = changes(ALL, many, [], since=len(rows), until=5000)
                with pytest.raises(TooManyRefusedError):
                    sink.apply(over, aside.extend)
                assert sink.position() == Position({PLACE: len(rows)})

    def test_nothing_moves_if_putting_aside_fails(self, store: Store) -> None:
        row: Row = {"id": 1, "part": "x", "name": "with\0nul", "ratio": math.nan}
        if not {"nul", "nan"} & store.cannot:
            return

        def fails(_: Sequence[Refused]) -> None:
            raise PenstockError("no place to put them")

        with store.sink() as sink:
            sink.open(ALL)
            with pytest.raises(PenstockError, match="no place"):
                sink.apply(changes(ALL, [row], [], since=0, until=1), fails)
            assert sink.position() == Position()
            aside: list[Refused] = []
            sink.apply(changes(ALL, [row], [], since=0, until=1), aside.extend)
            assert len(aside) == 1

    def test_built_anew_beside_and_switched(self, store: Store, seed: int) -> None:
        if "switch" in store.cannot:
            return
        load, other = Load(seed, store.cannot), Load(seed + 1, store.cannot)
        with store.sink() as sink:
            sink.open(ALL)
            sink.apply(load.next(40), never)
            with sink.beside(fresh=True) as begun:
                assert begun.open(ALL) == Position()
                begun.apply(other.next(40), never)
            # The old one is as it was, and goes on.
            sink.apply(load.next(40), never)
            _check(sink, load.model)
            with sink.beside() as again:
                assert again.open(ALL) == Position({PLACE: other.at})
                again.apply(other.next(40), never)
                again.switch()
            with pytest.raises(FencedError):
                sink.apply(load.next(40), never)
        with store.sink() as sink:
            _check(sink, other.model)
            assert sink.open(ALL) == Position({PLACE: other.at})
            sink.apply(other.next(40), never)
            _check(sink, other.model)
            with sink.beside() as empty:
                assert empty.position() is None

    def test_a_fresh_one_beside_forgets_what_was_begun(self, store: Store) -> None:
        if "switch" in store.cannot:
            return
        row = {"id": 1, "name": "a"}
        with store.sink() as sink:
            sink.open(SIMPLE)
            with sink.beside() as begun:
                begun.open(SIMPLE)
                begun.apply(changes(SIMPLE, [row], [], since=0, until=9), never)
            with sink.beside(fresh=True) as begun:
                # Another key than before is welcome here.
                assert begun.open(Schema.of(SIMPLE.fields, "name")) == Position()
                begun.switch()
        with store.sink() as sink:
            found = sink.stored_schema()
            assert found is not None
            assert found.key == ("name",)
            if sink.readable:
                assert read(sink) == []

    def test_removed_without_a_trace(self, store: Store) -> None:
        with store.sink() as sink:
            sink.open(SIMPLE)
            sink.apply(changes(SIMPLE, [{"id": 1, "name": "a"}], [], since=0, until=1), never)
            sink.remove()
            sink.remove()
        with store.sink() as sink:
            assert sink.position() is None
            assert sink.open(ALL) == Position()
            if sink.readable:
                assert read(sink) == []

    def test_waiting_for_a_position(self, store: Store) -> None:
        with store.sink() as sink, store.sink() as reader:
            with pytest.raises(NotReachedError):
                reader.wait_for(Position({PLACE: 1}), 0.05)
            sink.open(SIMPLE)
            sink.apply(changes(SIMPLE, [], [], since=0, until=3), never)
            assert reader.wait_for(Position({PLACE: 2}), 30) == Position({PLACE: 3})
            with pytest.raises(NotReachedError, match="at 3"):
                reader.wait_for(Position({PLACE: 4}), 0.05)

    def test_killed_at_any_moment(self, store: Store, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(KILLS):
            _kill_a_writer(store, seed, chance.randint(1, 8))
        with store.sink() as sink:
            at = sink.open(ALL).offsets[PLACE]
            load = Load(seed, store.cannot)
            while load.at < at:
                load.next(KILL_ROWS)
            assert load.at == at
            _check(sink, load.model)
            sink.apply(load.next(KILL_ROWS), never)
            _check(sink, load.model)


def _rank(key: tuple[Any, ...]) -> tuple[Any, ...]:
    return (key[0], key[1].encode())


def _check(sink: Sink, model: Model) -> None:
    if sink.readable:
        assert same(read(sink), ordered(model))


def _kill_a_writer(store: Store, seed: int, after: int) -> None:
    """Let a process write, and end it at once some moment after it has told of so many batches."""
    told = json.dumps({"url": store.url, "options": dict(store.options), "seed": seed,
                       "cannot": sorted(store.cannot)})  # fmt: skip
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.testing.sinks", told], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        for _ in range(after):
            assert process.stdout.readline().strip() == "applied", "the writer has failed"
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()


def _write_for_ever(told: str) -> None:
    given = json.loads(told)
    load = Load(given["seed"], frozenset(given["cannot"]))
    with open_sink(given["url"], given["options"], name="kit") as sink:
        at = sink.open(ALL).offsets.get(PLACE, 0)
        while load.at < at:
            load.next(KILL_ROWS)
        for _ in count():
            sink.apply(load.next(KILL_ROWS), never)
            print("applied", flush=True)


if __name__ == "__main__":
    _write_for_ever(sys.argv[1])
