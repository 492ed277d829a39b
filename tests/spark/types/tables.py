"""Tables of each kind of database with a column of every type, and what is in them, as the database
itself shows it."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from typing import Any, Final

import numpy as np
import pyarrow as pa

from penstock.capture.delivery.capture import Capture
from penstock.client.connection import Cluster
from penstock.client.reading import read_batches
from penstock.sinks.contract import ORIGIN, Position, Sink
from penstock.sinks.schema import Schema
from penstock.sinks.spec import SinkSpec
from penstock.spark.sinking.findings import Findings
from penstock.spark.sinking.learning import parser_of
from penstock.spark.sinking.parsing import Parsed, Parser
from tests.capture.delivery.running import records
from tests.capture.delivery.test_end_to_end import config, running
from tests.waiting import eventually

POSTGRES: Final = """
CREATE TYPE mood AS ENUM ('sad', 'happy');
CREATE TABLE kinds (
    id bigint PRIMARY KEY, price numeric(10,2), free numeric, long numeric(50,10), cash money,
    day date, at timestamp, at3 timestamp(3), atz timestamptz, clock time, clock3 time(3),
    clockz timetz, span interval, doc jsonb, plain json, uid uuid, tags text[],
    amounts numeric(10,2)[], days date[], mood mood, data bytea, flag boolean, bits bit(10),
    addr inet, r real, d double precision, s smallint, i integer, name text, pt point);
CREATE TABLE grids (id int PRIMARY KEY, cells int[], amounts numeric(6,2)[]);
INSERT INTO grids VALUES (1, '{{1,2},{3,NULL}}', '{{1.25},{2.5}}');
INSERT INTO kinds VALUES (
    9007199254740993, 12345678.91, 1e-18, 1234567890123456789.0123456789, 1234.56,
    '2026-11-17', '2026-11-17 10:11:12.345678', '2026-11-17 10:11:12.345',
    '2026-11-17 12:11:12.345678+02', '10:11:12.345678', '10:11:12.345',
    '12:11:12+02', '1 day 02:03:04.5', '{"a": [1.50, null]}', '[1, "x"]',
    '0d1f4c3e-2a7b-4c5d-8e9f-001122334455', '{a,"b \\"c\\"",NULL}', '{1.10,-2.25}',
    '{2026-01-02,NULL}', 'happy', '\\x00ff10', true, B'1000000011',
    '10.0.0.0/8', 0.1, 0.1, -32768, 2147483647, 'Zoë', '(1.5,-2)');
INSERT INTO kinds (id) VALUES (2);
"""

MARIADB: Final = (
    """CREATE TABLE kinds (
    id bigint unsigned PRIMARY KEY, price decimal(10,2), wide decimal(60,10), tiny tinyint,
    utiny tinyint unsigned, ui int unsigned, big bigint, year_ year, day date, at datetime(6),
    at0 datetime, atz timestamp(6) NULL, clock time(6), long_clock time, r float, d double,
    flag bit(1), bits bit(10), mood enum('sad','happy'), tags set('a','b'), name varchar(20),
    data varbinary(10), doc json, uid uuid)""",
    """INSERT INTO kinds VALUES (
    18446744073709551615, 12345678.91, 1234567890123456789.0123456789, -128, 255, 4294967295,
    -9223372036854775808, 2026, '2026-11-17', '2026-11-17 10:11:12.345678', '2026-11-17 10:11:12',
    '2026-11-17 10:11:12.345678', '10:11:12.345678', '23:59:59', 0.1, 0.1, b'1', b'1000000011',
    'happy', 'a,b', 'Zoë', x'00ff10', '{"a": [1.50, null]}',
    '0d1f4c3e-2a7b-4c5d-8e9f-001122334455')""",
)
IN_MARIADB: Final = {
    "id": (pa.decimal128(20, 0), Decimal(18446744073709551615)),
    "price": (pa.decimal128(10, 2), Decimal("12345678.91")),
    "wide": (pa.decimal128(38, 10), Decimal("1234567890123456789.0123456789")),
    "tiny": (pa.int16(), -128),
    "utiny": (pa.int16(), 255),
    "ui": (pa.int64(), 4294967295),
    "big": (pa.int64(), -9223372036854775808),
    "year_": (pa.int32(), 2026),
    "day": (pa.date32(), dt.date(2026, 11, 17)),
    "at": (pa.timestamp("us"), dt.datetime.fromisoformat("2026-11-17T10:11:12.345678")),
    "at0": (pa.timestamp("us"), dt.datetime.fromisoformat("2026-11-17T10:11:12")),
    "atz": (
        pa.timestamp("us", "UTC"),
        dt.datetime.fromisoformat("2026-11-17T10:11:12.345678+00:00"),
    ),
    "clock": (pa.time64("us"), dt.time(10, 11, 12, 345678)),
    "long_clock": (pa.time64("us"), dt.time(23, 59, 59)),
    "r": (pa.float32(), float(np.float32(0.1))),
    "d": (pa.float64(), 0.1),
    "flag": (pa.bool_(), True),
    "bits": (pa.binary(), b"\x03\x02"),
    "mood": (pa.string(), "happy"),
    "tags": (pa.string(), "a,b"),
    "name": (pa.string(), "Zoë"),
    "data": (pa.binary(), b"\x00\xff\x10"),
    # MariaDB's JSON is a text with a check.
    "doc": (pa.string(), '{"a": [1.50, null]}'),
    "uid": (pa.string(), "0d1f4c3e-2a7b-4c5d-8e9f-001122334455"),
}
SQLITE: Final = """
CREATE TABLE kinds (id INTEGER PRIMARY KEY, n INT, price DECIMAL(10,2), r REAL, name TEXT,
    data BLOB, day DATE, flag BOOLEAN, loose);
INSERT INTO kinds VALUES (-9223372036854775808, 7, 12.5, 0.1, 'Zoë', x'00ff10', '2026-11-17', 1, 5);
"""
IN_SQLITE: Final = {
    "id": (pa.int64(), -9223372036854775808),
    "n": (pa.int64(), 7),
    "price": (pa.float64(), 12.5),
    "r": (pa.float64(), 0.1),
    "name": (pa.string(), "Zoë"),
    "data": (pa.binary(), b"\x00\xff\x10"),
    "day": (pa.string(), "2026-11-17"),
    "flag": (pa.int64(), 1),
    "loose": (pa.string(), "5"),
}


def local(text: str) -> dt.datetime:
    return dt.datetime.fromisoformat(text)


# What a store with types has of the first row; where flows have another type, see OF_FLOWS.
IN_STORES: Final[dict[str, tuple[pa.DataType, Any]]] = {
    "id": (pa.int64(), 9007199254740993),
    "price": (pa.decimal128(10, 2), Decimal("12345678.91")),
    "free": (pa.decimal128(38, 18), Decimal("1E-18")),
    "long": (pa.decimal128(38, 10), Decimal("1234567890123456789.0123456789")),
    "cash": (pa.decimal128(38, 2), Decimal("1234.56")),
    "day": (pa.date32(), dt.date(2026, 11, 17)),
    "at": (pa.timestamp("us"), local("2026-11-17T10:11:12.345678")),
    "at3": (pa.timestamp("us"), local("2026-11-17T10:11:12.345")),
    "atz": (pa.timestamp("us", "UTC"), local("2026-11-17T10:11:12.345678+00:00")),
    "clock": (pa.time64("us"), dt.time(10, 11, 12, 345678)),
    "clock3": (pa.time64("us"), dt.time(10, 11, 12, 345000)),
    "clockz": (pa.string(), "10:11:12Z"),
    "span": (pa.string(), "P0Y0M1DT2H3M4.5S"),
    "doc": (pa.string(), '{"a": [1.50, null]}'),
    "plain": (pa.string(), '[1, "x"]'),
    "uid": (pa.string(), "0d1f4c3e-2a7b-4c5d-8e9f-001122334455"),
    "tags": (pa.string(), '["a","b \\"c\\"",null]'),
    "amounts": (pa.string(), "[1.10,-2.25]"),
    "days": (pa.string(), '["2026-01-02",null]'),
    "mood": (pa.string(), "happy"),
    "data": (pa.binary(), b"\x00\xff\x10"),
    "flag": (pa.bool_(), True),
    "bits": (pa.binary(), b"\x03\x02"),
    "addr": (pa.string(), "10.0.0.0/8"),
    "r": (pa.float32(), float(np.float32(0.1))),
    "d": (pa.float64(), 0.1),
    "s": (pa.int16(), -32768),
    "i": (pa.int32(), 2147483647),
    "name": (pa.string(), "Zoë"),
    "pt": (pa.string(), '{"x":1.5,"y":-2,"wkb":"AQEAAAAAAAAAAAD4PwAAAAAAAADA","srid":null}'),
}
# JSON as PostgreSQL, which has types for it, gives it back.
JSON_COLUMNS: Final = ("doc", "plain", "tags", "amounts", "days", "pt")
OF_FLOWS: Final[dict[str, tuple[str, Any]]] = {
    "clock": ("string", "10:11:12.345678"),
    "clock3": ("string", "10:11:12.345000"),
    "tags": ("array<string>", ["a", 'b "c"', None]),
    "amounts": ("array<decimal(10,2)>", [Decimal("1.10"), Decimal("-2.25")]),
    "days": ("array<date>", [dt.date(2026, 1, 2), None]),
    "data": ("binary", bytearray(b"\x00\xff\x10")),
    "bits": ("binary", bytearray(b"\x03\x02")),
    "pt": (
        "struct<x:double,y:double,wkb:binary,srid:int>",
        (1.5, -2.0, bytearray.fromhex("0101000000000000000000f83f00000000000000c0"), None),
    ),
}


@contextmanager
def captured(log: str, url: str, table: str, rows: int, **settings: Any) -> Iterator[str]:
    """The topic of a captured table, with so many events; the capture runs on."""
    made = config(url, **settings)
    topic = f"{made.name}.{table}"

    def arrived() -> bool:
        return len(records(log, topic)) >= rows

    it: Capture
    with running(log, made) as it:
        assert it is not None
        eventually(arrived)
        yield topic


def parsed(
    log: str, topic: str, stored: Schema | None = None, **settings: Any
) -> tuple[Parser, Parsed]:
    """What a sink makes of a topic; `stored` is what its store has."""
    spec = SinkSpec("kinds", topic, "sqlite:///x.db", **settings)
    with Cluster(log) as cluster:
        parser = parser_of(spec, cluster, topic, stored)
        return parser, parser.parse(records_of(cluster, topic))


def records_of(cluster: Cluster, topic: str) -> pa.Table:
    names = ["key", "value", *ORIGIN.names]
    found = []
    for number, batch in read_batches(cluster, topic):
        table = pa.Table.from_batches([batch])
        count = table.num_rows
        table = table.append_column("topic", pa.array([topic] * count))
        table = table.append_column("partition", pa.array([number] * count, pa.int32()))
        found.append(table.select(names))
    return pa.concat_tables(found)


def stored(sink: Sink, topic: str, parser: Parser, what: Parsed) -> None:
    """Put what was parsed into a store, all of which fits."""

    def refused(rows: Any) -> None:
        raise AssertionError(rows)

    sink.open(parser.schema)
    found = Findings(parser.schema, [what])
    sink.apply(found.changes(Position(), Position({(topic, 0): what.records})), refused)
