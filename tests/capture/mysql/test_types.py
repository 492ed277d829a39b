"""Every type, against the database's own rendering, from the snapshot and from the stream."""

from __future__ import annotations

import base64
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from struct import pack, unpack
from typing import Any

import orjson
import pytest

from penstock.capture.source import Table
from penstock.client.table_schemas import TableColumn
from penstock.testing.mariadb import MariaDB
from tests.capture.mysql.kit import changes_of, read_to_end, source_of

Canon = Callable[[Any, TableColumn], object]


def plain(value: Any, _: TableColumn) -> object:
    return str(value)


def as_decimal(value: Any, column: TableColumn) -> object:
    scale = int(column.type.parameters["scale"])
    number = int.from_bytes(base64.b64decode(value), "big", signed=True)
    digits = tuple(map(int, str(abs(number))))
    return f"{Decimal((int(number < 0), digits, -scale)):f}"


def as_hex(value: Any, _: TableColumn) -> object:
    return base64.b64decode(value).hex().upper()


def text_hex(value: Any, _: TableColumn) -> object:
    return str(value).encode("utf-8").hex().upper()


def as_double(value: Any, _: TableColumn) -> object:
    return float(value)


def as_float(value: Any, _: TableColumn) -> object:
    return unpack("f", pack("f", value))[0]


def as_bits(value: Any, _: TableColumn) -> object:
    if isinstance(value, bool):
        return str(int(value))
    return str(int.from_bytes(base64.b64decode(value), "little"))


def as_wkb(value: Any, _: TableColumn) -> object:
    return f"{value['srid'] or 0}:{base64.b64decode(value['wkb']).hex().upper()}"


@dataclass(frozen=True)
class Case:
    """A column's type, values as SQL, how the database renders them, and what ours must equal."""

    type: str
    values: tuple[str, ...]
    oracle: str = "CAST({c} AS CHAR)"
    canon: Canon = plain
    read: Callable[[Any], object] = str
    connect: str = ""


TEXT = "HEX(CONVERT({c} USING utf8mb4))"
MICROS = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {c})"
MILLIS = "TIMESTAMPDIFF(MICROSECOND, '1970-01-01', {c}) DIV 1000"
DAYS = "TO_DAYS({c}) - TO_DAYS('1970-01-01')"
TIMES = "TIMESTAMPDIFF(MICROSECOND, '2000-02-02', ADDTIME('2000-02-02 00:00:00.000000', {c}))"
WORDS = ("'abc'", "''", "'quote\" back\\\\slash'", "'line\\nbreak\\ttab\\0nul'", "NULL")
LATIN = ("'na\u00efve \u20ac \u00fc'", "'\u0178'", *WORDS)

CASES = [
    Case("TINYINT", ("-128", "127", "0", "NULL"), connect="int16"),
    Case("TINYINT UNSIGNED", ("255", "0"), connect="int16"),
    Case("BOOLEAN", ("TRUE", "FALSE"), connect="int16"),
    Case("SMALLINT", ("-32768", "32767"), connect="int16"),
    Case("SMALLINT UNSIGNED", ("65535",), connect="int32"),
    Case("MEDIUMINT", ("-8388608", "8388607", "NULL", "-1"), connect="int32"),
    Case("MEDIUMINT UNSIGNED", ("16777215",), connect="int32"),
    Case("INT", ("-2147483648", "2147483647"), connect="int32"),
    Case("INT UNSIGNED ZEROFILL", ("4294967295", "42", "0"), "{c} + 0", connect="int64"),
    Case("BIGINT UNSIGNED ZEROFILL", ("18446744073709551615", "7"), "{c} + 0", connect="int64"),
    Case("BIGINT", ("-9223372036854775808", "9223372036854775807"), connect="int64"),
    Case("BIGINT UNSIGNED", ("18446744073709551615", "0"), connect="int64"),
    Case(
        "FLOAT",
        ("0.1", "-3.4e38", "1.17e-38", "16777216", "0", "NULL"),
        "CAST({c} AS DOUBLE)",
        as_float,
        float,
        "float",
    ),
    Case("FLOAT(7,3)", ("1234.567",), "CAST({c} AS DOUBLE)", as_float, float, "float"),
    Case(
        "DOUBLE",
        ("0.1", "1e300", "-2.5e-300", "123456789.123456789", "1e20", "NULL"),
        "{c}",
        as_double,
        float,
        "double",
    ),
    Case("DECIMAL(10,2)", ("-12345678.90", "99999999.99", "0", "-0.01", "NULL"), canon=as_decimal),
    Case("DECIMAL(65,30)", ("1.5", "-" + "9" * 35 + "." + "9" * 30), canon=as_decimal),
    Case("DECIMAL(1,1)", ("0.9", "-0.9"), canon=as_decimal),
    Case("DECIMAL(38,0) UNSIGNED", ("9" * 38, "256", "128", "127"), canon=as_decimal),
    Case("DECIMAL(19,9)", ("-1234567890.123456789", "1.000000001"), canon=as_decimal),
    Case("BIT(1)", ("b'1'", "b'0'", "NULL"), "CAST({c} + 0 AS CHAR)", as_bits, connect="boolean"),
    Case("BIT(10)", ("b'1000000001'", "0"), "CAST({c} + 0 AS CHAR)", as_bits, connect="bytes"),
    Case("BIT(64)", (f"b'{'1' * 64}'", "1"), "CAST({c} + 0 AS CHAR)", as_bits),
    Case("YEAR", ("1901", "2155", "2026", "NULL", "0"), "CAST({c} + 0 AS CHAR)"),
    Case("DATE", ("'1000-01-01'", "'9999-12-31'", "'1969-12-31'", "NULL", "'2024-02-29'"), DAYS),
    Case("DATETIME", ("'1000-01-01 00:00:00'", "'9999-12-31 23:59:59'", "NULL"), MILLIS),
    Case("DATETIME(1)", ("'2024-02-29 23:59:59.9'", "'1969-12-31 23:59:59.1'"), MILLIS),
    Case("DATETIME(3)", ("'2024-02-29 23:59:59.987'",), MILLIS),
    Case("DATETIME(4)", ("'2024-02-29 23:59:59.9876'",), MICROS),
    Case("DATETIME(6)", ("'2024-02-29 23:59:59.987654'", "'1969-12-31 23:59:59.000001'"), MICROS),
    Case("TIME", ("'-838:59:59'", "'838:59:59'", "'00:00:00'", "NULL"), TIMES),
    Case("TIME(1)", ("'-00:00:00.1'", "'12:34:56.7'"), TIMES),
    Case("TIME(3)", ("'-00:00:00.001'", "'12:34:56.789'", "'-12:34:56.789'"), TIMES),
    Case("TIME(6)", ("'-00:00:00.000001'", "'-01:00:00.999999'", "'838:59:59.000000'"), TIMES),
    Case(
        "TIMESTAMP NULL",
        ("'1970-01-01 00:00:01'", "'2038-01-19 03:14:07'", "NULL"),
        "DATE_FORMAT({c}, '%Y-%m-%dT%H:%i:%sZ')",
        connect="string",
    ),
    Case("TIMESTAMP(3) NULL", ("'2024-02-29 12:00:00.120'",), "CONCAT(REPLACE({c},' ','T'),'Z')"),
    Case(
        "TIMESTAMP(6) NULL", ("'2024-02-29 12:00:00.000001'",), "CONCAT(REPLACE({c},' ','T'),'Z')"
    ),
    Case("CHAR(20)", ("'abc'", "'  lead'", "'trail  '", "'\U0001f600'", "NULL"), TEXT, text_hex),
    Case("CHAR(255) CHARACTER SET utf8mb4", ("REPEAT('\u20ac', 255)", "'x'"), TEXT, text_hex),
    Case("VARCHAR(20)", WORDS, TEXT, text_hex, connect="string"),
    Case("VARCHAR(3000)", ("REPEAT('\u20ac', 3000)", "'short'"), TEXT, text_hex),
    Case("TINYTEXT", WORDS, TEXT, text_hex),
    Case("TEXT", (*WORDS, "REPEAT('x', 65535)"), TEXT, text_hex),
    Case("MEDIUMTEXT", (*WORDS, "REPEAT('y', 70000)"), TEXT, text_hex),
    Case("LONGTEXT", WORDS, TEXT, text_hex),
    Case("JSON", ('\'{"a": [1, 2.50, null, "\u00fc"]}\'', "NULL"), TEXT, text_hex),
    *(
        Case(f"VARCHAR(50) CHARACTER SET {charset}", LATIN, TEXT, text_hex)
        for charset in ("latin1", "utf8mb3", "ucs2", "utf16", "utf16le", "utf32", "cp1250")
    ),
    *(
        Case(f"CHAR(30) CHARACTER SET {charset}", (words, "''", "NULL"), TEXT, text_hex)
        for charset, words in (
            ("latin2", "'\u0105\u0119'"),
            ("cp1251", "'\u041f\u0440\u0438'"),
            ("koi8r", "'\u041f\u0440\u0438'"),
            ("koi8u", "'\u0404\u0456'"),
            ("greek", "'\u03b1\u03b2'"),
            ("hebrew", "'\u05d0\u05d1'"),
            ("cp850", "'\u00fc\u2593'"),
            ("cp852", "'\u0105'"),
            ("cp866", "'\u041f'"),
            ("cp1256", "'\u0633'"),
            ("cp1257", "'\u0173'"),
            ("macroman", "'\u00fc\u2020'"),
            ("macce", "'\u010d'"),
            ("latin5", "'\u011f'"),
            ("latin7", "'\u0173'"),
            ("hp8", "'\u00fc'"),
            ("dec8", "'\u00fc'"),
            ("keybcs2", "'\u010d'"),
            ("armscii8", "'\u0531'"),
            ("geostd8", "'\u10d0'"),
            ("swe7", "'\u00e5'"),
            ("tis620", "'\u0e01'"),
            ("ascii", "'abc'"),
            ("gbk", "'\u4e2d\u6587'"),
            ("gb2312", "'\u4e2d'"),
            ("big5", "'\u4e2d'"),
            ("sjis", "'\u65e5\u672c'"),
            ("cp932", "'\u65e5\uff71'"),
            ("ujis", "'\u65e5\u672c'"),
            ("eucjpms", "'\u65e5'"),
            ("euckr", "'\ud55c\uad6d'"),
        )
    ),
    Case("BINARY(5)", ("'ab'", "X'0100000000'", "X'0000000000'", "NULL"), "HEX({c})", as_hex),
    Case("BINARY(255)", ("'ab'",), "HEX({c})", as_hex),
    Case("VARBINARY(300)", ("X'00FF00'", "''", "NULL"), "HEX({c})", as_hex, connect="bytes"),
    Case("BLOB", ("X'00FF00'", "REPEAT('a', 300)"), "HEX({c})", as_hex),
    Case("LONGBLOB", ("X'00FF00'", "REPEAT('a', 70000)"), "HEX({c})", as_hex),
    Case("ENUM('a','b''c','\u00fc')", ("'a'", "'b''c'", "'\u00fc'", "NULL", "''"), TEXT, text_hex),
    Case("ENUM('x','\u00fc') CHARACTER SET latin1", ("'\u00fc'", "'x'"), TEXT, text_hex),
    Case("SET('a','b','\u00fc')", ("'a,\u00fc'", "''", "'b'", "NULL"), TEXT, text_hex),
    Case(f"SET({','.join(chr(39) + 'm' + str(i) + chr(39) for i in range(64))})", ("'m63,m0'",)),
    Case(
        "POINT",
        ("POINT(1.5, -2)", "ST_GeomFromText('POINT(3 4)', 4326)", "NULL"),
        "CONCAT(ST_SRID({c}), ':', HEX(ST_AsWKB({c})))",
        as_wkb,
    ),
    Case(
        "GEOMETRY",
        ("ST_GeomFromText('LINESTRING(0 0,1 1)')", "ST_GeomFromText('POLYGON((0 0,0 1,1 1,0 0))')"),
        "CONCAT(ST_SRID({c}), ':', HEX(ST_AsWKB({c})))",
        as_wkb,
    ),
    Case(
        "UUID", ("'123e4567-e89b-12d3-a456-426655440000'", "UUID()", "'" + "0" * 32 + "'", "NULL")
    ),
    Case(
        "UUID", ("'ffffffff-ffff-7fff-bfff-ffffffffff00'", "'00112233-4455-4677-8899-000000000000'")
    ),
    Case("INET6", ("'::1'", "'2001:db8::ff00:42:8329'", "'::ffff:1.2.3.4'", "'::'", "'::1.2.3.4'")),
    Case("INET4", ("'192.168.0.1'", "'0.0.0.0'", "'255.255.255.0'", "NULL")),
    Case("VARCHAR(100) COMPRESSED", ("REPEAT('ab', 50)", "''", "NULL", "'\u00fc'"), TEXT, text_hex),
    Case("BLOB COMPRESSED", ("REPEAT('ab', 5000)", "''"), "HEX({c})", as_hex),
    Case("LONGTEXT COMPRESSED", ("REPEAT('\u00fcb', 5000)",), TEXT, text_hex),
]


def same(row: dict[str, bytes], table: Table, cases: dict[str, Case], oracle: Any) -> None:
    columns = {column.name: column for column in table.columns}
    for (name, case), expected in zip(cases.items(), oracle, strict=True):
        value = orjson.loads(row[name])
        if expected is None:
            assert value is None, (case.type, value)
            continue
        assert value is not None, (case.type, expected)
        said = case.read(expected.decode() if isinstance(expected, bytes) else expected)
        assert case.canon(value, columns[name]) == said, (case.type, row[name])
        if case.connect:
            assert columns[name].type.name == case.connect


@pytest.mark.parametrize("nullable", [True, False], ids=["null", "not null"])
def test_every_type_is_as_the_database_renders_it(
    mariadb: MariaDB, database: str, nullable: bool
) -> None:
    """Several tables, because a row may not be too wide; values of all columns vary together."""
    source = source_of(mariadb, database)
    groups = [CASES[i : i + 12] for i in range(0, len(CASES), 12)]
    positions = []
    with mariadb.connect(database) as connection, connection.cursor() as cursor:
        cursor.execute("SET time_zone = '+00:00', sql_mode = 'NO_ENGINE_SUBSTITUTION'")
        with source.snapshot() as snapshot:
            positions.append(snapshot.position)
        for number, group in enumerate(groups):
            extra = "" if nullable else " NOT NULL"
            columns = ", ".join(
                f"c{i} {case.type.replace(' NULL', '')}"
                + (" DEFAULT '2000-01-01'" if "TIMESTAMP" in case.type and not nullable else "")
                + (" NULL" if nullable else extra)
                for i, case in enumerate(group)
            )
            cursor.execute(f"CREATE TABLE t{number} (id INT PRIMARY KEY, {columns})")
            for at in range(max(len(case.values) for case in group)):
                given = [case.values[at % len(case.values)] for case in group]
                if not nullable:
                    given = [
                        next(v for v in case.values if v != "NULL") if value == "NULL" else value
                        for case, value in zip(group, given, strict=True)
                    ]
                cursor.execute(f"INSERT INTO t{number} VALUES ({at}, {', '.join(given)})")
                cursor.execute(f"UPDATE t{number} SET id = id + 1000 WHERE id = {at}")
        oracles: dict[str, dict[int, Any]] = {}
        for number, group in enumerate(groups):
            what = ", ".join(case.oracle.format(c=f"c{i}") for i, case in enumerate(group))
            cursor.execute(f"SELECT id, {what} FROM t{number}")
            oracles[f"t{number}"] = {found[0]: found[1:] for found in cursor.fetchall()}
    named = {
        f"t{n}": {f"c{i}": case for i, case in enumerate(group)} for n, group in enumerate(groups)
    }
    seen = 0
    items, _ = read_to_end(mariadb, source, positions[0])
    streamed: dict[str, Table] = {}
    for change in changes_of(items):
        streamed[change.table.name] = change.table
        for values in filter(None, (change.before, change.after)):
            row = dict(zip((c.name for c in change.table.columns), values, strict=True))
            number = int(row["id"]) % 1000 + 1000
            name = change.table.name
            same(row, change.table, named[name], oracles[name][number])
            seen += 1
    assert seen == 3 * sum(len(rows) for rows in oracles.values())
    with source.snapshot() as snapshot:
        assert {table.name for table in snapshot.tables} == set(named)
        for table in snapshot.tables:
            known = streamed[table.name]
            # All of it is in the published schema, which must not depend on who tells it.
            assert (table.columns, table.key) == (known.columns, known.key)
            rows = [row for some in snapshot.rows(table) for row in some]
            assert len(rows) == len(oracles[table.name])
            for values in rows:
                row = dict(zip((c.name for c in table.columns), values, strict=True))
                same(row, table, named[table.name], oracles[table.name][int(row["id"])])


def test_zero_dates_are_null_or_the_epoch(mariadb: MariaDB, database: str) -> None:
    source = source_of(mariadb, database)
    with mariadb.connect(database) as connection, connection.cursor() as cursor:
        cursor.execute("SET sql_mode = 'ALLOW_INVALID_DATES', time_zone = '+00:00'")
        columns = "DATE {0}, {1}b DATETIME {0}, {1}c DATETIME(6) {0}, {1}d TIMESTAMP {0} DEFAULT 0"
        cursor.execute(
            f"CREATE TABLE t (id INT PRIMARY KEY, a {columns.format('NULL', '')},"
            f" na {columns.format('NOT NULL', 'n')})"
        )
        with source.snapshot() as snapshot:
            position = snapshot.position
        for number, day in enumerate(("0000-00-00", "2020-00-10", "2020-02-31", "0000-01-01")):
            moment = f"'{day}', '{day}', '{day}', 0"
            cursor.execute(f"INSERT INTO t VALUES ({number}, {moment}, {moment})")
    items, _ = read_to_end(mariadb, source, position)
    rows = [change.after for change in changes_of(items)]
    epoch = b'"1970-01-01T00:00:00Z"'
    for row in rows[:3]:
        assert row is not None
        assert row[1:5] == (b"null",) * 4
        assert row[5:] == (b"0", b"0", b"0", epoch)
    year0 = -719528
    assert rows[3] is not None
    day_ms = 86_400_000
    assert rows[3][1:4] == (
        b"%d" % year0,
        b"%d" % (year0 * day_ms),
        b"%d" % (year0 * day_ms * 1000),
    )
    with source.snapshot() as snapshot:
        assert [row for some in snapshot.rows(snapshot.tables[0]) for row in some] == rows


@pytest.mark.parametrize("mode", ["string", "double"])
def test_decimals_and_unsigned_numbers_by_choice(
    mariadb: MariaDB, database: str, mode: str
) -> None:
    options = {"decimal": mode, "unsigned_bigint": "precise"}
    source = source_of(mariadb, database, options=options)
    mariadb.query("CREATE TABLE t (a DECIMAL(12,3) PRIMARY KEY, b BIGINT UNSIGNED)", database)
    with source.snapshot() as snapshot:
        position = snapshot.position
    mariadb.query("INSERT INTO t VALUES (-1234.5, 18446744073709551615)", database)
    items, _ = read_to_end(mariadb, source, position)
    (change,) = changes_of(items)
    assert change.after is not None
    assert change.after[0] == (b'"-1234.500"' if mode == "string" else b"-1234.5")
    assert change.table.columns[0].type.name == mode
    assert base64.b64decode(orjson.loads(change.after[1])) == b"\x00" + b"\xff" * 8
    with source.snapshot() as snapshot:
        assert next(snapshot.rows(snapshot.tables[0])) == [change.after]


@pytest.mark.databases
@pytest.mark.parametrize("name", ["shared_mariadb", "shared_mysql"])
def test_the_server_and_the_binlog_describe_a_table_alike(
    name: str, request: pytest.FixtureRequest
) -> None:
    """What the two say is published: where they differed, a table would change its schema whenever
    a snapshot is taken."""
    server: MariaDB = request.getfixturevalue(name)
    database = server.create_database()
    source = source_of(server, database)
    wanted = {
        "a": ("x INT NOT NULL UNIQUE, y INT", "(x) VALUES (1)"),
        "b": ("x INT, y INT, z INT, PRIMARY KEY (z, x)", "(z, x) VALUES (1, 2)"),
        "c": ("n VARCHAR(50), y INT, PRIMARY KEY (n(10))", "(n) VALUES ('n')"),
        "d": (
            "n VARCHAR(50) NOT NULL, y INT NOT NULL, UNIQUE (y, n), UNIQUE (n)",
            "VALUES ('n', 1)",
        ),
        "e": (
            "n CHAR(9) CHARACTER SET latin1, j JSON, f FLOAT(7,3), g DOUBLE UNSIGNED, l LONGTEXT",
            "(n) VALUES ('n')",
        ),
        "f": (
            "u BIGINT UNSIGNED ZEROFILL, s DECIMAL(9,2) UNSIGNED, t TIMESTAMP(3) NULL, y YEAR",
            "(u) VALUES (1)",
        ),
    }
    for table, (columns, _) in wanted.items():
        server.query(f"CREATE TABLE {table} ({columns})", database)
    with source.snapshot() as snapshot:
        position = snapshot.position
        known = {table.name: (table.columns, table.key) for table in snapshot.tables}
    for table, (_, values) in wanted.items():
        server.query(f"INSERT INTO {table} {values}", database)
    items, _ = read_to_end(server, source, position)
    streamed = {each.table.name: (each.table.columns, each.table.key) for each in changes_of(items)}
    assert streamed == known
    assert set(known) == set(wanted)
