"""The parsers by themselves: damaged bytes, statements, GTIDs, values."""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from decimal import Decimal
from random import Random

import cramjam
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capture.mysql import binlog, ddl, jsonb, values
from penstock.capture.mysql.charsets import Charsets
from penstock.capture.mysql.groups import Assembler, Context
from penstock.capture.mysql.gtid import MariadbPosition, MysqlSet
from penstock.capture.mysql.history import Disguised
from penstock.capture.source import CaptureError, Change
from penstock.testing.mariadb import MariaDB

# -- damaged binlogs -------------------------------------------------------------------------------

TABLE = """
CREATE TABLE t (id INT PRIMARY KEY, a VARCHAR(30), b DECIMAL(10,2), c DATETIME(6), d BLOB,
    e ENUM('x', 'y'), f SET('p', 'q'), g POINT, h BIT(9), i TIMESTAMP(3) NULL, j DOUBLE, k TIME(2),
    l YEAR, m CHAR(5) CHARACTER SET ucs2, n BINARY(16), o VARCHAR(50) COMPRESSED, p BIGINT UNSIGNED)
"""
ROW = """
INSERT INTO t VALUES ({}, 'abc', 1.25, NOW(6), 'blob', 'x', 'p,q', POINT(1, 2), 5, NOW(3), 0.1,
    '1:2:3', 2000, 'ch', 'bin', REPEAT('o', 40), 7), ({} + 1000{})
"""


@pytest.fixture(scope="module")
def events(mariadb: MariaDB) -> list[bytes]:
    """The events of a binlog with a bit of everything."""
    database = mariadb.create_database()
    mariadb.query("FLUSH BINARY LOGS")
    file = mariadb.query("SHOW MASTER STATUS")[0][0]
    mariadb.query(TABLE, database)
    for i in range(5):
        mariadb.query(ROW.format(i, i, ", NULL" * 16), database)
    mariadb.query("UPDATE t SET a = CONCAT(a, 'd'), j = NULL", database)
    mariadb.query("TRUNCATE TABLE t", database)
    data = (mariadb.folder / "data" / str(file)).read_bytes()
    mariadb.query(f"DROP DATABASE {database}")
    return list(split(data))


def split(data: bytes) -> Iterator[bytes]:
    at = 4
    while at < len(data):
        size = int.from_bytes(data[at + 9 : at + 13], "little")
        yield data[at : at + size]
        at += size


def assembler() -> Assembler:
    tables = {i: chr(i) for i in range(256)}
    collations = {45: "utf8mb4", 46: "utf8mb4", 63: "binary", 35: "ucs2", 8: "latin1"}
    context = Context("x", "mysql", lambda _d, _n: True, Charsets(collations, lambda _: tables))
    return Assembler(context, {"file": "binlog.000001", "pos": 4})


WARM = assembler()


def feed(events: list[bytes]) -> list[Change]:
    mine = assembler()
    # What was made for a table map is made once for all.
    mine._readers = WARM._readers
    changes: list[Change] = []
    for raw in events:
        for part in mine.feed(raw) or ():
            changes += part.changes
    return changes


def test_a_binlog_file_is_read_without_a_server(events: list[bytes]) -> None:
    changes = feed(events)
    assert [c.op for c in changes] == ["c"] * 10 + ["u"] * 5 + ["t"]
    assert changes[0].after is not None
    assert changes[0].after[:3] == (b"0", b'"abc"', b'"fQ=="')


def test_every_flipped_bit_is_found_by_the_checksum(events: list[bytes]) -> None:
    random = Random(5)
    for raw in events[1:]:
        for _ in range(20):
            damaged = bytearray(raw)
            damaged[random.randrange(len(raw))] ^= 1 << random.randrange(8)
            with pytest.raises(binlog.BinlogError):
                binlog.parse(bytes(damaged), checksum=True)


def rechecked(raw: bytes) -> bytes:
    body = raw[:9] + struct.pack("<I", len(raw)) + raw[13:-4]
    return body + struct.pack("<I", zlib.crc32(body))


def test_events_with_damage_inside_never_do_worse_than_an_error(events: list[bytes]) -> None:
    """The checksum is right, the content is not: cut, changed, or filled up."""
    random = Random(7)
    errors = 0
    for _ in range(400):
        i = random.randrange(1, len(events))
        damaged = bytearray(events[i])
        kind = random.random()
        if kind < 0.4:
            for _ in range(random.randint(1, 4)):
                damaged[random.randrange(19, len(damaged))] = random.randrange(256)
        elif kind < 0.8:
            del damaged[random.randrange(19, len(damaged) - 4) : -4]
        else:
            damaged[-4:-4] = random.randbytes(random.randint(1, 50))
        try:
            feed([*events[:i], rechecked(bytes(damaged)), *events[i + 1 :]])
        except CaptureError:
            errors += 1
    assert errors > 100


@given(st.binary(max_size=200), st.booleans())
def test_no_bytes_at_all_break_the_parser(data: bytes, checksum: bool) -> None:
    mine = assembler()
    mine._checksum = checksum
    with suppress(CaptureError):
        for _ in mine.feed(data) or ():
            pass


# -- groups that no server here makes --------------------------------------------------------------


def event(kind: int, body: bytes, end: int) -> bytes:
    head = binlog.HEADER.pack(1_700_000_000, kind, 1, len(body) + 23, end, 0)
    return head + body + struct.pack("<I", zlib.crc32(head + body))


def statement(sql: str, end: int) -> bytes:
    return event(binlog.QUERY, struct.pack("<IIBHH", 7, 0, 2, 0, 0) + b"db\0" + sql.encode(), end)


def transaction(events: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    """What is before the first transaction with rows, and its events."""
    first = next(i for i, raw in enumerate(events) if raw[4] == binlog.TABLE_MAP)
    begin = max(i for i in range(first) if events[i][4] == binlog.MARIADB_GTID)
    end = next(i for i in range(first, len(events)) if events[i][4] == binlog.XID)
    return events[:begin], [e for e in events[begin : end + 1] if e[4] != binlog.ANNOTATE]


def test_a_group_that_ends_with_a_rollback_is_not_told(events: list[bytes]) -> None:
    before, (gtid, *rows, xid) = transaction(events)
    end = int.from_bytes(xid[13:17], "little")
    assert feed([*before, gtid, *rows, statement("ROLLBACK", end)]) == []
    told = feed([*before, gtid, *rows, statement("COMMIT", end)])
    assert [c.op for c in told] == ["c", "c"]
    undone = [statement("SAVEPOINT `a`", end), *rows, statement("ROLLBACK TO `a`", end)]
    again = feed([*before, gtid, *rows, *undone, statement("COMMIT", end)])
    assert [c.after for c in again] == [c.after for c in told]


def test_a_rollback_of_what_was_handed_on_stops_the_capture(events: list[bytes]) -> None:
    before, (gtid, *rows, xid) = transaction(events)
    mine = assembler()
    mine._context.held_max_bytes = 10
    parts = [part for raw in [*before, gtid, *rows] for part in mine.feed(raw) or ()]
    assert [part.is_last for part in parts] == [False]
    with pytest.raises(CaptureError, match="rolled back"):
        mine.feed(statement("ROLLBACK", int.from_bytes(xid[13:17], "little")))


@pytest.mark.parametrize("held", [1 << 20, 10])
@pytest.mark.parametrize("packed", [True, False])
def test_transactions_that_mysql_compressed(events: list[bytes], packed: bool, held: int) -> None:
    before, (gtid, *rows, xid) = transaction(events)
    inner = b"".join(
        raw[:9] + struct.pack("<I", len(raw) - 4) + raw[13:-4]
        for raw in (statement("BEGIN", 0), *rows, xid)
    )
    body = bytes(cramjam.zstd.compress(inner)) if packed else inner
    fields = b"\x02\x01\x00" if packed else b"\x02\x03\xfc\xff\x00"
    size = b"\xfd" + len(inner).to_bytes(3, "little")
    head = fields + b"\x03\x04" + size + b"\x01\x04" + b"\xfd" + len(body).to_bytes(3, "little")
    whole = event(binlog.PAYLOAD, head + b"\x00" + body, int.from_bytes(xid[13:17], "little"))
    expected = feed([*before, gtid, *rows, xid])
    mine = assembler()
    mine._context.held_max_bytes = held
    parts = [part for raw in [*before, gtid, whole] for part in mine.feed(raw) or ()]
    assert [c.after for part in parts for c in part.changes] == [c.after for c in expected]
    assert [part.is_last for part in parts].count(True) == 1
    assert parts[-1].position["pos"] == int.from_bytes(xid[13:17], "little")
    damaged = event(binlog.PAYLOAD, head + b"\x00" + body[:-5], 0)
    with pytest.raises(CaptureError):
        for _ in assembler_after([*before, gtid]).feed(damaged) or ():
            pass


def assembler_after(events: list[bytes]) -> Assembler:
    mine = assembler()
    for raw in events:
        assert mine.feed(raw) is None
    return mine


@pytest.mark.parametrize(
    ("kind", "match"),
    [
        (binlog.INCIDENT, "lost changes"),
        (binlog.PARTIAL_UPDATE, "part of its JSON"),
        (binlog.GTID_TAGGED, "tagged GTID"),
        (binlog.BEGIN_LOAD, "LOAD DATA"),
    ],
)
def test_what_cannot_be_told_stops_the_capture(events: list[bytes], kind: int, match: str) -> None:
    with pytest.raises(CaptureError, match=match):
        assembler_after(events[:1]).feed(event(kind, bytes(50), 500))


def test_positions_beyond_four_gigabytes(events: list[bytes]) -> None:
    before, (gtid, *rows, xid) = transaction(events)
    mine = assembler_after(before)
    mine.at = (1 << 32) - 100
    for raw in (gtid, *rows):
        # Their ends are small numbers: the counter has turned over.
        mine.feed(raw)
    parts = list(mine.feed(xid) or ())
    assert parts[-1].position["pos"] == (1 << 32) + int.from_bytes(xid[13:17], "little")


# -- statements ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sql", "kind", "table"),
    [
        ("TRUNCATE t", ddl.TRUNCATE, ("db", "t")),
        ("truncate table `o``dd`.`t x`", ddl.TRUNCATE, ("o`dd", "t x")),
        ("/* hi */ TRUNCATE /*!50000 TABLE */ x.t", ddl.TRUNCATE, ("x", "t")),
        ("DELETE FROM `db`.`mem`", ddl.TRUNCATE, ("db", "mem")),
        ("DELETE FROM t WHERE id = 1", ddl.CHANGES, ("db", "t")),
        ("insert ignore into x.t values (1)", ddl.CHANGES, ("x", "t")),
        ("UPDATE LOW_PRIORITY t SET a = 1", ddl.CHANGES, ("db", "t")),
        ("WITH c AS (SELECT 1) UPDATE t SET a = 1", ddl.CHANGES, None),
        ("-- note\nALTER TABLE t ADD c INT", ddl.SCHEMA, None),
        ("BEGIN", ddl.BEGIN, None),
        ("COMMIT", ddl.COMMIT, None),
        ("ROLLBACK", ddl.ROLLBACK, None),
        ("FLUSH TABLES", ddl.OTHER, None),
        ("GRANT SELECT ON t TO u", ddl.OTHER, None),
        ("", ddl.OTHER, None),
    ],
)
def test_statements_are_told_apart(sql: str, kind: str, table: tuple[str, str] | None) -> None:
    said = ddl.classify(sql, "db")
    assert (said.kind, said.table) == (kind, table)


def test_savepoints_and_xa_are_named() -> None:
    assert ddl.classify("SAVEPOINT `A b`", "").name == "a b"
    assert ddl.classify("ROLLBACK TO SAVEPOINT `A b`", "") == ddl.Statement(
        ddl.ROLLBACK_TO, name="a b"
    )
    for spelled in ("XA COMMIT X'6162',X'',1", "xa commit 'ab'", "XA COMMIT x'6162' , '' , 0x1"):
        assert ddl.classify(spelled, "") == ddl.Statement(ddl.XA_COMMIT, name="6162,,1")


@given(st.text())
def test_any_text_is_some_statement(sql: str) -> None:
    ddl.classify(sql, "db")
    Disguised({"db.t": {"u": "uuid"}}).apply(sql, "db")


def test_disguised_columns_follow_their_tables() -> None:
    known = Disguised({"db.t": {"u": "uuid"}})
    for sql in (
        "CREATE TABLE IF NOT EXISTS `n` (id INT, `a` UUID NOT NULL DEFAULT uuid(), i INET6)",
        "ALTER TABLE db.t ADD COLUMN w INET4 AFTER u, ADD x BINARY(16)",
        "ALTER TABLE t CHANGE COLUMN u v UUID",
        "CREATE TABLE l LIKE t",
        "ALTER TABLE l MODIFY v BINARY(16)",
        "RENAME TABLE n TO o.n, l TO m",
        "ALTER TABLE m RENAME COLUMN w TO ww",
        "ALTER TABLE m RENAME TO mm",
    ):
        known.apply(sql, "db")
    assert known.known() == {
        "db.t": {"v": "uuid", "w": "inet4"},
        "o.n": {"a": "uuid", "i": "inet6"},
        "db.mm": {"ww": "inet4"},
    }


# -- GTIDs -----------------------------------------------------------------------------------------

UUIDS = [f"{i}e11fa47-71ca-11e1-9e33-c80aa9429562" for i in range(3)]


@given(st.lists(st.tuples(st.sampled_from(UUIDS), st.integers(1, 40))))
def test_sets_of_gtids_are_sets(added: list[tuple[str, int]]) -> None:
    mine, plain = MysqlSet(), set()
    for server, number in added:
        mine.add(server, number)
        plain.add((server, number))
    for server in UUIDS:
        for number in range(1, 41):
            inside = mine.contains(MysqlSet(f"{server}:{number}"))
            assert inside == ((server, number) in plain)
    again = MysqlSet(str(mine))
    assert str(again) == str(mine)
    assert again.encoded() == mine.encoded()


def test_positions_of_mariadb() -> None:
    position = MariadbPosition("0-1-5,2-3-9")
    position.add(0, "0-2-6")
    assert str(position) == "0-2-6,2-3-9"
    for wrong in ("0-1", "x-1-2", UUIDS[0] + ":1"):
        with pytest.raises(CaptureError):
            MariadbPosition(wrong)
    with pytest.raises(CaptureError):
        MysqlSet("0-1-5")


# -- values ----------------------------------------------------------------------------------------


@given(st.integers(-(2**200), 2**200))
def test_decimals_are_the_shortest_two_s_complement(value: int) -> None:
    raw = base64.b64decode(orjson.loads(values.unscaled(value)))
    assert int.from_bytes(raw, "big", signed=True) == value
    if len(raw) > 1:
        assert int.from_bytes(raw[1:], "big", signed=True) != value


@given(st.decimals(min_value=-(10**9), max_value=10**9, places=4))
def test_decimals_as_text(value: Decimal) -> None:
    scaled = int(value.scaleb(4))
    assert Decimal(orjson.loads(values.decimal_string(scaled, 4))) == value


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_singles_are_short_and_exact(value: float) -> None:
    text = values.float32(value)
    assert struct.unpack("f", struct.pack("f", float(text)))[0] == value
    assert len(text) <= 24


@given(st.binary(max_size=60))
def test_no_bytes_break_the_reader_of_json(data: bytes) -> None:
    with suppress(CaptureError):
        orjson.loads(jsonb.render(data))
