"""Changes for the tests of derived stores, and what a store holds after them.

`Store` says how a store is reached, and what it has no place for; `Load` makes random changes of a
table with all types (`ALL`), and keeps the table in a dict beside.
"""

from __future__ import annotations

import datetime as dt
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Context, Decimal
from typing import Any, Final, Literal

import pyarrow as pa

from penstock.sinks import Changes, Position, Refused, Schema, Sink, open_sink
from penstock.sinks.contract import ORIGIN
from penstock.sinks.schema import json_field

TOPIC: Final = "kit.changes"
PLACE: Final = (TOPIC, 0)
KEYS: Final = 40
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


def merged(one: Changes, two: Changes) -> Changes:
    """Two batches, the second of which follows the first, as one."""
    keys = two.deletes.column_names
    newer = {
        tuple(row[name] for name in keys)
        for row in (*two.upserts.select(keys).to_pylist(), *two.deletes.to_pylist())
    }

    def both(name: str, origin: str) -> tuple[pa.Table, pa.Table]:
        old: pa.Table = getattr(one, name)
        rows = old.select(keys).to_pylist()
        kept = [at for at, row in enumerate(rows) if tuple(row.values()) not in newer]
        chosen = pa.array(kept, pa.int64())
        return (
            pa.concat_tables([old.take(chosen), getattr(two, name)]),
            pa.concat_tables([getattr(one, origin).take(chosen), getattr(two, origin)]),
        )

    upserts, upserted_at = both("upserts", "upserted_at")
    deletes, deleted_at = both("deletes", "deleted_at")
    return Changes(upserts, deletes, two.position, one.since, upserted_at, deleted_at)


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


def rank(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """What keys are ordered by: text by its bytes."""
    return tuple(part.encode() if isinstance(part, str) else part for part in key)


def check(sink: Sink, model: Model) -> None:
    """A store holds what the model does, if it can be read."""
    if sink.readable:
        assert same(read(sink), ordered(model))
