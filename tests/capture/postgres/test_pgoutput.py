"""The decoder of pgoutput on bytes that nobody sent: an error of ours, never anything else."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from struct import pack

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capture.postgres import pgoutput
from penstock.capture.postgres.assembly import Assembler, SourceBlocks
from penstock.capture.postgres.catalog import Catalog
from penstock.capture.postgres.decoders import Relation, unescape
from penstock.capture.postgres.pgoutput import PAD, RelationMessage, TypeMessage
from penstock.capture.postgres.spool import Spool, SpoolFullError
from penstock.capture.postgres.types import NativeType, TypeModes, coding
from penstock.capture.source import CaptureError, Part, Table
from penstock.client.table_schemas import TableColumn

TYPES = {
    23: NativeType(23, "pg_catalog", "int4"),
    25: NativeType(25, "pg_catalog", "text"),
    1700: NativeType(1700, "pg_catalog", "numeric"),
    1114: NativeType(1114, "pg_catalog", "timestamp"),
    1007: NativeType(1007, "pg_catalog", "_int4", of=23, is_array=True),
    1186: NativeType(1186, "pg_catalog", "interval"),
    17: NativeType(17, "pg_catalog", "bytea"),
    600: NativeType(600, "pg_catalog", "point"),
    1266: NativeType(1266, "pg_catalog", "timetz"),
}


def describe(
    message: RelationMessage, types: Mapping[int, TypeMessage], before: Relation | None
) -> Relation | None:
    codings = [coding(c.type_oid, c.typmod, TYPES, TypeModes()) for c in message.columns]
    columns = tuple(
        TableColumn(f"{number}", made.type, not column.is_key)
        for number, (column, made) in enumerate(zip(message.columns, codings, strict=True))
    )
    return Relation(message.oid, Table("", "s", "t", columns, ()), codings, message.identity)


def assembler(start_lsn: int = 0, spool: Spool | None = None, part: int = 5000) -> Assembler:
    return Assembler(
        start_lsn,
        describe,
        Catalog.__new__(Catalog).mended,
        SourceBlocks("s", "d"),
        lambda lsn: {"lsn": lsn},
        spool=spool,
        part_changes=part,
    )


def frame(message: bytes, lsn: int = 1) -> bytes:
    return pack(">cQQQ", b"w", lsn, lsn, 0) + message + PAD


def begin(xid: int = 7) -> bytes:
    return frame(pack(">cQQI", b"B", 90, 0, xid))


def commit(end: int = 100) -> bytes:
    return frame(pack(">cBQQQ", b"C", 0, end - 10, end, 0))


def relation(oid: int = 5, xid: int | None = None, kinds: tuple[int, ...] = (23, 25)) -> bytes:
    columns = b"".join(
        pack(">B", number == 0) + b"c\0" + pack(">Ii", kind, -1)
        for number, kind in enumerate(kinds)
    )
    inside = pack(">I", xid) if xid is not None else b""
    body = pack(">I", oid) + b"s\0t\0d" + pack(">H", len(kinds)) + columns
    return frame(b"R" + inside + body)


def row(*cells: bytes | None) -> bytes:
    return pack(">H", len(cells)) + b"".join(
        b"n" if cell is None else b"t" + pack(">I", len(cell)) + cell for cell in cells
    )


def insert(*cells: bytes | None, oid: int = 5, xid: int | None = None) -> bytes:
    inside = pack(">I", xid) if xid is not None else b""
    return frame(b"I" + inside + pack(">I", oid) + b"N" + row(*cells))


VALID = [
    begin(),
    relation(),
    insert(b"1", b"a"),
    frame(b"U" + pack(">I", 5) + b"K" + row(b"1", None) + b"N" + row(b"2", b"b")),
    frame(b"D" + pack(">I", 5) + b"K" + row(b"2", None)),
    frame(b"T" + pack(">IBI", 1, 0, 5)),
    frame(b"M" + pack(">BQ", 1, 5) + b"app\0" + pack(">I", 2) + b"hi"),
    commit(),
    frame(pack(">cIB", b"S", 9, 1)),
    relation(xid=9),
    insert(b"3", b"c", xid=9),
    insert(b"4", b"d", xid=10),
    frame(b"E"),
    frame(pack(">cII", b"A", 9, 10)),
    frame(pack(">cIBQQQ", b"c", 9, 0, 190, 200, 0)),
    b"k" + pack(">QQB", 300, 0, 0) + PAD,
]


def test_a_whole_stream() -> None:
    made = assembler()
    first, second = made.feed(VALID)
    assert isinstance(first, Part)
    assert isinstance(second, Part)
    assert [change.op for change in first.changes] == ["c", "u", "d", "t"]
    assert first.messages == [("app", b"hi")]
    assert first.position == {"lsn": 100}
    assert [change.after for change in second.changes] == [(b"3", b'"c"')]
    assert (second.transaction, second.position) == ("9", {"lsn": 200})
    assert made.lsn == 300
    assert len(made.spool) == 0


def test_what_was_told_is_not_told_again() -> None:
    parts = list(assembler(start_lsn=100).feed(VALID))
    assert [part.transaction for part in parts if isinstance(part, Part)] == ["9"]


def test_large_transactions_come_in_parts() -> None:
    frames = [begin(), relation(), *[insert(b"%d" % n, None) for n in range(10)], commit()]
    parts = [part for part in assembler(part=4).feed(frames) if isinstance(part, Part)]
    assert [(len(p.changes), p.is_first, p.is_last) for p in parts] == [
        (4, True, False),
        (4, False, False),
        (2, False, True),
    ]


@given(st.lists(st.one_of(st.sampled_from(VALID), st.binary(max_size=80)), max_size=12))
def test_frames_in_any_order(frames: list[bytes]) -> None:
    made = assembler()
    try:
        for part in made.feed(each + PAD for each in frames):
            assert part is not None
    except CaptureError:
        pass
    finally:
        made.spool.close()


@given(st.data())
def test_damaged_frames(data: st.DataObject) -> None:
    frames = list(VALID)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(frames) - 1))
        damaged = bytearray(frames[place])
        at = data.draw(st.integers(25 if damaged[0] == 119 else 0, len(damaged) - 1))
        damaged[at] = data.draw(st.integers(0, 255))
        cut = data.draw(st.integers(26, len(damaged))) if data.draw(st.booleans()) else None
        frames[place] = bytes(damaged[:cut])
    made = assembler()
    try:
        list(made.feed(frames))
    except CaptureError:
        pass
    finally:
        made.spool.close()


@given(st.sampled_from(sorted(TYPES)), st.binary(max_size=30))
def test_values_that_no_server_prints(oid: int, value: bytes) -> None:
    made = assembler()
    with suppress(CaptureError):
        list(made.feed([begin(), relation(kinds=(oid,)), insert(value), commit()]))


@given(st.binary())
def test_copy_escapes_are_undone(value: bytes) -> None:
    table = {8: b"\\b", 9: b"\\t", 10: b"\\n", 11: b"\\v", 12: b"\\f", 13: b"\\r", 92: b"\\\\"}
    escaped = b"".join(table.get(byte, bytes([byte])) for byte in value)
    assert unescape(escaped) == value


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.binary(max_size=50))),
    st.integers(1, 2000),
)
def test_the_spool_gives_back_what_it_was_given(
    messages: list[tuple[int, int, bytes]], memory: int
) -> None:
    spool = Spool(memory)
    for xid, savepoint, message in messages:
        spool.add(xid, 10 * xid + savepoint, message)
    spool.abort(1, 11)
    spool.abort(2, 2)
    assert list(spool.take(1)) == [m for x, s, m in messages if x == 1 and s != 1]
    assert list(spool.take(2)) == []
    assert list(spool.take(3)) == [m for x, _, m in messages if x == 3]
    assert (len(spool), spool.memory_bytes, spool.disk_bytes) == (0, 0, 0)


def test_the_spool_has_a_bound() -> None:
    spool = Spool(100, 1000)
    for _ in range(9):
        spool.add(1, 1, b"x" * 100)
    with pytest.raises(SpoolFullError):
        spool.add(1, 1, b"x" * 100)
    spool.close()


@given(st.integers(0, 2**64 - 1))
def test_places_are_written_as_the_server_writes_them(lsn: int) -> None:
    assert pgoutput.parse_lsn(pgoutput.format_lsn(lsn)) == lsn
