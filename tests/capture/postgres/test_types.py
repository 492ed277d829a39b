"""Every type, with PostgreSQL itself as the judge of what each value means.

Values are written by PostgreSQL's own input functions, come by the snapshot (COPY) and by the
stream, and must be the same in both; then they are compared with what the server computes
from them.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable
from typing import Any, Final

import orjson
import psycopg
import pytest

from penstock.capture.source import NULL, Row, Table
from penstock.client.table_schemas import ValueType
from penstock.testing.postgres import PostgresServer
from tests.capture.postgres.rebuilding import Connection, catch_up, changes, opened, start

Judge = Callable[[Any], str]


def unscaled(value: str) -> int:
    return int.from_bytes(b64decode(value), "big", signed=True)


def hexed(value: str) -> str:
    return b64decode(value).hex()


def same(value: Any) -> str:
    return str(value)


def variable(value: dict[str, Any]) -> str:
    scale = value["scale"]
    number = unscaled(value["value"])
    digits = str(abs(number)).rjust(scale + 1, "0")
    text = digits if scale == 0 else f"{digits[:-scale]}.{digits[-scale:]}"
    return ("-" if number < 0 else "") + text


def listed(value: Any) -> str:
    return orjson.dumps(value).decode()


def bit_text(value: str) -> str:
    data = b64decode(value)
    return f"{int.from_bytes(data, 'little'):012b}"


_ISO_INTERVAL: Final = re.compile(
    r"P(-?\d+)Y(-?\d+)M(-?\d+)DT(-?\d+)H(-?\d+)M(-?)(\d+)(?:\.(\d+))?S"
)


def interval_parts(value: Any) -> str:
    """Months, days and microseconds of an interval in ISO 8601."""
    parsed = _ISO_INTERVAL.fullmatch(value)
    assert parsed is not None, value
    years, months, days, hours, minutes, sign, seconds, fraction = parsed.groups()
    us = int(seconds) * 1_000_000 + int((fraction or "").ljust(6, "0"))
    us = (int(hours) * 3600 + int(minutes) * 60) * 1_000_000 + (-us if sign else us)
    return f"{int(years) * 12 + int(months)} {days} {us}"


# The type, its values, the server's own word on a value v, what of ours must be equal to it, the
# name of the type in the schema and its meaning.
TYPES: list[tuple[str, list[str], str, Judge, str, str | None]] = [
    ("smallint", ["-32768", "0", "32767"], "v::text", same, "int16", None),
    ("integer", ["-2147483648", "7"], "v::text", same, "int32", None),
    ("bigint", ["-9223372036854775808", "9223372036854775807"], "v::text", same, "int64", None),
    ("oid", ["4294967295"], "v::text", same, "int64", None),
    ("boolean", ["t", "f"], "to_json(v)::text", listed, "boolean", None),
    ("text", ["", "a\tb\nc\\d\"e\u2028 \U0001f600 \x01"], "v", same, "string", None),
    ("varchar(20)", ["x y"], "v", same, "string", None),
    ("char(5)", ["ab"], "rpad(v, 5)", same, "string", None),
    ('"char"', ["x"], "v::text", same, "string", None),
    ("name", ["x"], "v::text", same, "string", None),
    ("bytea", ["\\x", "\\x00ff5c0a09"], "encode(v, 'hex')", hexed, "bytes", None),
    ("uuid", ["a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"], "v::text", same, "string", "Uuid"),
    ("json", ['{"a": [1, "\\u00e4"]}'], "v::text", same, "string", "Json"),
    ("jsonb", ['{"a": [1, 2.50]}'], "v::text", same, "string", "Json"),
    ("date", ["1970-01-01", "2024-02-29", "0044-03-15 BC", "12345-06-07", "1582-10-04"],
     "(v - date '1970-01-01')::text", same, "int32", "Date"),
    ("time", ["00:00:00", "23:59:59.999999", "24:00:00", "01:02:03.5"],
     "(extract(epoch from v) * 1000000)::bigint::text", same, "int64", "MicroTime"),
    ("time(3)", ["23:59:59.999"],
     "(extract(epoch from v) * 1000)::bigint::text", same, "int32", "Time"),
    ("timestamp", ["1970-01-01 00:00:00", "2024-02-29 12:34:56.789", "0044-03-15 00:00:01.5 BC",
                   "20000-01-01 00:00:00", "1969-12-31 23:59:59.999999"],
     "(extract(epoch from v) * 1000000)::bigint::text", same, "int64", "MicroTimestamp"),
    ("timestamp(3)", ["2024-02-29 12:34:56.789"],
     "(extract(epoch from v) * 1000)::bigint::text", same, "int64", "Timestamp"),
    ("timestamptz", ["2024-02-29 12:34:56.789+02", "1969-07-20 20:17:40+00"],
     ("to_char(v at time zone 'UTC', 'YYYY-MM-DD\"T\"HH24:MI:SS') || "
     "rtrim(to_char(v, '.US'), '.0') || 'Z'"), same, "string", "ZonedTimestamp"),
    ("timetz", ["12:34:56.5+02", "01:00:00+03:30", "10:00:00+00"],
     ("to_char('2000-01-01'::timestamp + (v at time zone 'UTC')::time, 'HH24:MI:SS') || "
     "rtrim(to_char((v at time zone 'UTC')::time, '.US'), '.0') || 'Z'"),
     same, "string", "ZonedTime"),
    ("interval", ["1 day", "-3 days 04:05:06.789", "00:00:00", "-00:00:00.5", "100:00:00",
                  "1 year 2 mons 3 days", "-14 mons 01:00:00"],
     ("concat_ws(' ', extract(year from v) * 12 + extract(month from v), extract(day from v), "
      "(extract(hour from v) * 3600 + extract(minute from v) * 60) * 1000000 + "
      "extract(microseconds from v))"), interval_parts, "string", "Interval"),
    ("numeric(20,4)", ["0", "-1.5", "1234567890123456.7891", "-0.0128"],
     "(v * 10000)::numeric(40,0)::text", lambda v: str(unscaled(v)), "bytes", "Decimal"),
    ("numeric", ["0", "1e40", "-1.50", "3.14159265358979323846", "0.00001"],
     "v::text", variable, "struct", "VariableScaleDecimal"),
    ("money", ["12345.67", "-0.05", "0"],
     "(v::numeric * 100)::bigint::text", lambda v: str(unscaled(v)), "bytes", "Decimal"),
    ("bit", ["1", "0"], "to_json(v = B'1')::text", listed, "boolean", None),
    ("bit(12)", ["101100001111"], "v::text", bit_text, "bytes", "Bits"),
    ("inet", ["10.0.0.1/8", "::1"], "trim('\"' from to_json(v)::text)", same, "string", None),
    ("cidr", ["10.0.0.0/8"], "v::text", same, "string", None),
    ("macaddr", ["08:00:2b:01:02:03"], "v::text", same, "string", None),
    ("int4range", ["[1,5)", "empty"], "v::text", same, "string", None),
    ("tsvector", ["'a':1 'b':2"], "v::text", same, "string", "Tsvector"),
    ("box", ["(1,1),(0,0)"], "v::text", same, "string", None),
    ("pg_lsn", ["16/B374D848"], "v::text", same, "string", None),
    ("mood", ["sad", "it's \"ok\""], "v::text", same, "string", "Enum"),
    ("pair", ['(1,"a b")'], "v::text", same, "string", None),
    ("positive", ["7"], "v::text", same, "int32", None),
    ("cents", ["1.25"], "(v * 100)::int::text", lambda v: str(unscaled(v)), "bytes", "Decimal"),
    ("int[]", ["{}", "{1,NULL,-3}", "{{1,2},{3,4}}", "[2:3]={5,6}"],
     "replace(to_json(v)::text, ' ', '')", listed, "array", None),
    ("text[]", ['{"a,b","c\\"d\\\\e",NULL,"NULL","",x y,"{}"}'],
     "to_json(v)::text", listed, "array", None),
    ("mood[]", ["{sad}"], "to_json(v)::text", listed, "array", None),
    ("bool[]", ["{t,f}"], "to_json(v)::text", listed, "array", None),
    ("box[]", ["{(1,1),(0,0);(2,2),(1,1)}"], "to_json(v)::text", listed, "array", None),
    ("date[]", ["{1970-01-02}"], "'[' || (v[1] - date '1970-01-01') || ']'", listed, "array", None),
]  # fmt: skip


def make_types(sql: Connection) -> None:
    sql.execute("CREATE TYPE mood AS ENUM ('sad', 'it''s \"ok\"')")
    sql.execute("CREATE TYPE pair AS (a int, b text)")
    sql.execute("CREATE DOMAIN positive AS int CHECK (value > 0)")
    sql.execute("CREATE DOMAIN cents AS numeric(10, 2)")


def told(
    sql: Connection, url: str, kind: str, literals: list[str], **options: Any
) -> tuple[Table, list[Row]]:
    """The rows as the snapshot tells them; the stream must tell the same."""
    sql.execute("DROP TABLE IF EXISTS t")
    sql.execute(f"CREATE TABLE t (id int PRIMARY KEY, v {kind})".encode())
    with sql.cursor() as cursor:
        cursor.executemany(
            f"INSERT INTO t VALUES (%s, %s::text::{kind})".encode(), list(enumerate(literals))
        )
    with opened(url, **options) as source:
        rows: list[Row] = []
        rebuilt = start(source)
        with source.snapshot() as snapshot:
            (table,) = snapshot.tables
            for batch in snapshot.rows(table):
                rows += batch
        sql.execute("UPDATE t SET id = id")
        streamed = changes(catch_up(source, rebuilt, sql))
    by_id = sorted(rows, key=lambda row: int(row[0]))
    assert sorted((c.after for c in streamed), key=lambda row: int(row[0])) == by_id
    assert all(change.table.columns == table.columns for change in streamed)
    return table, by_id


@pytest.mark.parametrize("release", ["system", "18"])
def test_every_type(postgres_of: Callable[[str], PostgresServer], release: str) -> None:
    url = postgres_of(release).create_database()
    with psycopg.connect(url, autocommit=True) as sql:
        make_types(sql)
        columns = ", ".join(f"v{number} {kind[0]}" for number, kind in enumerate(TYPES))
        sql.execute(f"CREATE TABLE t (id int PRIMARY KEY, {columns})".encode())
        for place in range(max(len(kind[1]) for kind in TYPES)):
            literals = [kind[1][place] if place < len(kind[1]) else None for kind in TYPES]
            casts = ", ".join(f"%s::text::{kind[0]}" for kind in TYPES)
            sql.execute(f"INSERT INTO t VALUES ({place}, {casts})".encode(), literals)
        with opened(url) as source:
            rebuilt = start(source)
            rows: list[Row] = []
            with source.snapshot() as snapshot:
                (table,) = snapshot.tables
                for batch in snapshot.rows(table):
                    rows += batch
            sql.execute("UPDATE t SET id = id")
            streamed = changes(catch_up(source, rebuilt, sql))
        rows.sort()
        assert sorted(change.after for change in streamed) == rows
        for number, (kind, literals_, word, judge, name, semantic) in enumerate(TYPES):
            query = f"SELECT ({word})::text FROM (SELECT id, v{number} AS v FROM t) t ORDER BY id"
            expected = [row[0] for row in sql.execute(query.encode())]
            fragments = [row[number + 1] for row in rows]
            for place, fragment in enumerate(fragments):
                if place >= len(literals_):
                    assert fragment is NULL or fragment == NULL, kind
                else:
                    ours = judge(orjson.loads(fragment))
                    assert ours == expected[place], (kind, literals_[place], fragment)
            column = table.columns[number + 1]
            assert column.native == _format_type(sql, f"v{number}"), kind
            assert column.type.name == name, kind
            assert (column.type.semantic or "").rpartition(".")[2] == (semantic or ""), kind


def _format_type(sql: Connection, column: str) -> str:
    """The server's own words for the type of a column of t."""
    (found,) = sql.execute(
        "SELECT format_type(atttypid, atttypmod) FROM pg_attribute"
        " WHERE attrelid = 't'::regclass AND attname = %s", (column,),
    )  # fmt: skip
    return str(found[0])


def test_floats_keep_every_bit(database: str, sql: Connection) -> None:
    numbers = ["0.1", "1e308", "5e-324", "1.7976931348623157e308", "123456789012345680"]
    table, rows = told(sql, database, "float8", numbers)
    assert table.columns[1].type == ValueType("double")
    for text, row in zip(numbers, rows, strict=True):
        assert float(orjson.loads(row[1])).hex() == float(text).hex()
    _, rows = told(sql, database, "float4", ["NaN", "Infinity", "-Infinity", "1.5", "3.4e38"])
    assert [row[1] for row in rows[:4]] == [b'"NaN"', b'"Infinity"', b'"-Infinity"', b"1.5"]


def test_what_has_no_number(database: str, sql: Connection) -> None:
    _, rows = told(sql, database, "date", ["infinity", "-infinity"])
    assert [row[1] for row in rows] == [b"2147483647", b"-2147483648"]
    _, rows = told(sql, database, "timestamp", ["infinity", "-infinity"])
    assert [row[1] for row in rows] == [b"9223372036825200000", b"-9223372036832400000"]
    _, rows = told(
        sql,
        database,
        "timestamptz",
        ["infinity", "0044-03-15 01:02:03+00 BC", "12345-01-01 00:00+00"],
    )
    assert [orjson.loads(row[1]) for row in rows] == [
        "+292278994-08-16T23:00:00Z",
        "-0043-03-15T01:02:03Z",
        "+12345-01-01T00:00:00Z",
    ]
    _, rows = told(sql, database, "numeric", ["NaN", "Infinity", "-Infinity"])
    assert [orjson.loads(row[1]) for row in rows] == [
        {"scale": 0, "value": word} for word in ("NaN", "Inf", "-Inf")
    ]
    _, rows = told(sql, database, "numeric(5,2)[]", ["{NaN,1.5,NULL}"])
    assert rows[0][1] == b'["NaN","AJY=",null]'


def test_decimals_as_the_user_asks(database: str, sql: Connection) -> None:
    for mode, expected in (
        ("string", [b'"NaN"', b'"1.50"']),
        ("double", [b'"NaN"', b"1.50"]),
    ):
        options = {"decimal.handling.mode": mode}
        _, rows = told(sql, database, "numeric(5,2)", ["NaN", "1.5"], options=options)
        assert [row[1] for row in rows] == expected
    _, rows = told(sql, database, "numeric(3,-2)", ["12300", "-99900"])
    assert [unscaled(orjson.loads(row[1])) for row in rows] == [123, -999]
    _, rows = told(
        sql,
        database,
        "interval",
        ["1 year 2 mons 3 days 04:05:06.789"],
    )
    assert orjson.loads(rows[0][1]) == "P1Y2M3DT4H5M6.789S"
    _, rows = told(
        sql, database, "interval", ["2 mons"], options={"interval.handling.mode": "numeric"}
    )
    assert int(rows[0][1]) == 2 * 30.4375 * 86_400_000_000


def test_points_and_extensions(database: str, sql: Connection) -> None:
    table, rows = told(sql, database, "point", ["(1.5,-2)"])
    value = orjson.loads(rows[0][1])
    assert (value["x"], value["y"], value["srid"]) == (1.5, -2, None)
    assert b64decode(value["wkb"])[:5] == b"\x01\x01\0\0\0"
    assert table.columns[1].type.semantic == "io.debezium.data.geometry.Point"
    sql.execute("CREATE EXTENSION hstore")
    sql.execute("CREATE EXTENSION ltree")
    sql.execute("CREATE EXTENSION citext")
    table, rows = told(sql, database, "hstore", ['"a"=>"1, \\"x\\"", b=>NULL', ""])
    assert [orjson.loads(orjson.loads(row[1])) for row in rows] == [{"a": '1, "x"', "b": None}, {}]
    table, rows = told(sql, database, "ltree", ["a.b.c"])
    assert (rows[0][1], table.columns[1].type.semantic) == (b'"a.b.c"', "io.debezium.data.Ltree")
    _, rows = told(sql, database, "citext", ["MiXed"])
    assert rows[0][1] == b'"MiXed"'


def test_text_of_a_database_without_an_encoding(postgres: PostgresServer) -> None:
    url = postgres.create_database(options="ENCODING 'SQL_ASCII' TEMPLATE template0")
    with psycopg.connect(url, autocommit=True, client_encoding="UTF8") as sql:
        sql.execute("CREATE TABLE t (id int PRIMARY KEY, v text)")
        sql.execute(b"INSERT INTO t VALUES (1, E'a\\xffb')")
        with opened(url) as source:
            rebuilt = start(source)
            assert rebuilt.rows("public.t")[1,]["v"] == "a\ufffdb"
            sql.execute("UPDATE t SET v = v || 'c'")
            catch_up(source, rebuilt, sql)
            assert rebuilt.rows("public.t")[1,]["v"] == "a\ufffdbc"


def test_what_is_not_a_number_is_a_word(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY, v numeric(5, 2) NOT NULL)")
    with opened(database) as source:
        rebuilt = start(source)
        sql.execute("INSERT INTO t VALUES (1, 1.5)")
        sql.execute("INSERT INTO t VALUES (2, 'NaN')")
        _, second = changes(catch_up(source, rebuilt, sql))
        assert not second.table.columns[1].optional
        assert second.after == (b"2", b'"NaN"')
        start(source)
        kept = rebuilt.rows("public.t")
        assert [kept[number,]["v"] for number in (1, 2)] == ["AJY=", "NaN"]
