"""Blocks of rows: the compiled way says, byte for byte, what the interpreted way says.

Frames that come one by one are too few for a block, so they go the interpreted way; the same frames
in one piece go the compiled way wherever they can. So it is with lines of COPY.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from struct import pack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.capture.blocks import ROWS_MIN, Block, RowBlock, Several, segments_of
from penstock.capture.delivery.marks import Marks
from penstock.capture.delivery.reading import rows_weight, weight_of
from penstock.capture.events.batch import Batch
from penstock.capture.events.changes import Events
from penstock.capture.events.settings import EventSettings
from penstock.capture.postgres.assembly import Assembler, SourceBlocks
from penstock.capture.postgres.catalog import Catalog
from penstock.capture.postgres.decoders import Relation
from penstock.capture.postgres.pgoutput import (
    PAD,
    MalformedError,
    RelationMessage,
    TypeMessage,
)
from penstock.capture.postgres.rows import BYTES_MAX
from penstock.capture.postgres.snapshot import decode_blocks, decode_lines
from penstock.capture.postgres.types import NativeType, TypeModes, coding
from penstock.capture.source import Part, Row, Table
from penstock.client.table_schemas import TableColumn
from tests.harness.profiles import examples

NUMERIC_12_2 = (12 << 16 | 2) + 4
# By name: oid, modifier, and values of which some are out of the ordinary.
KINDS: dict[str, tuple[int, int, list[bytes]]] = {
    "int8": (20, -1, [b"0", b"-9223372036854775808", b"42"]),
    "text": (
        25,
        -1,
        [
            b"",
            b"plain",
            b'a "quoted" \\ one',
            "Füße 🦆 中".encode(),
            b"\x01\n\t\r\x08\x0c\x1f\x7f",
            b"\xff\xfe",
            b"\xed\xa0\x80",
            b"\xc0\x80",
            b"\xf4\x90\x80\x80",
            b"\xe4\xb8",
        ],
    ),
    "bool": (16, -1, [b"t", b"f"]),
    "numeric": (
        1700,
        NUMERIC_12_2,
        [
            b"0.00",
            b"-1.28",
            b"-1.29",
            b"1.27",
            b"327.68",
            b"-327.68",
            b"-327.69",
            b"9999999999.99",
            b"NaN",
        ],
    ),
    "timestamp": (
        1114,
        -1,
        [
            b"2026-11-01 12:34:56",
            b"1969-12-31 23:59:59.999999",
            b"2000-02-29 00:00:00.5",
            b"infinity",
            b"-infinity",
            b"0044-03-15 12:00:00 BC",
            b"10000-01-01 00:00:00",
            b"0001-01-01 00:00:00",
            b"9999-12-31 23:59:59.12345",
        ],
    ),
    "timestamptz": (
        1184,
        -1,
        [
            b"2026-11-01 12:34:56+00",
            b"2026-11-01 12:34:56.7+00",
            b"infinity",
            b"0044-03-15 12:00:00+00 BC",
            b"10000-01-01 00:00:00+00",
        ],
    ),
    "date": (1082, -1, [b"1970-01-01", b"2024-02-29", b"infinity", b"0044-03-15 BC"]),
    "float8": (701, -1, [b"1.5", b"-0", b"1e-300", b"NaN", b"Infinity"]),
    "uuid": (2950, -1, [b"a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11"]),
    "jsonb": (3802, -1, [b'{"a": [1, "b"]}']),
}
TYPES = {oid: NativeType(oid, "pg_catalog", name) for name, (oid, _, _) in KINDS.items()}
NAMES = list(KINDS)


def describe(
    message: RelationMessage, types: Mapping[int, TypeMessage], before: Relation | None
) -> Relation | None:
    codings = [coding(c.type_oid, c.typmod, TYPES, TypeModes()) for c in message.columns]
    columns = tuple(
        TableColumn(column.name, made.type, not column.is_key)
        for column, made in zip(message.columns, codings, strict=True)
    )
    key = tuple(column.name for column in message.columns if column.is_key)
    table = TABLES.setdefault(message.oid, Table("", "s", f"t{message.oid}", columns, key))
    return Relation(message.oid, table, codings, message.identity)


TABLES: dict[int, Table] = {}


def frame(message: bytes, lsn: int = 1) -> bytes:
    return pack(">cQQQ", b"w", lsn, lsn, 0) + message + PAD


def tuple_of(cells: list[bytes | None]) -> bytes:
    """None is NULL; the single byte 0 is a value that was not sent."""
    made = pack(">H", len(cells))
    for cell in cells:
        if cell is None:
            made += b"n"
        elif cell == b"\0":
            made += b"u"
        else:
            made += b"t" + pack(">I", len(cell)) + cell
    return made


def relation_frame(oid: int, names: list[str]) -> bytes:
    body = pack(">I", oid) + b"s\0t\0d" + pack(">H", len(names))
    for number, name in enumerate(names):
        kind, modifier, _ = KINDS[name]
        body += pack(">B", number == 0) + f"%{number}\0".encode() + pack(">Ii", kind, modifier)
    return frame(b"R" + body)


class Making:
    """Transactions at random."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.lsn = 1000

    def cells(self, names: list[str], odd: float) -> list[bytes | None]:
        made: list[bytes | None] = []
        for number, name in enumerate(names):
            values = KINDS[name][2]
            value = values[0] if self.random.random() > odd else self.random.choice(values)
            # Keys are never NULL, others sometimes; now and then one was not sent.
            if number and self.random.random() < 0.1:
                made.append(None)
            elif number and self.random.random() < 0.02 * odd:
                made.append(b"\0")
            else:
                made.append(value)
        return made

    def change(self, oid: int, names: list[str], odd: float) -> bytes:
        after = self.cells(names, odd)
        before = [
            after[0],
            *[cell if cell != b"\0" else None for cell in self.cells(names, odd)][1:],
        ]
        if self.random.random() < 0.1 * odd:
            before[0] = self.random.choice(KINDS[names[0]][2])
        key = [before[0], *[None] * (len(names) - 1)]
        kind = self.random.choice("IIUUOKDd")
        told = {
            "I": b"I" + pack(">I", oid) + b"N" + tuple_of(after),
            "U": b"U" + pack(">I", oid) + b"N" + tuple_of(after),
            "O": b"U" + pack(">I", oid) + b"O" + tuple_of(before) + b"N" + tuple_of(after),
            "K": b"U" + pack(">I", oid) + b"K" + tuple_of(key) + b"N" + tuple_of(after),
            "D": b"D" + pack(">I", oid) + b"K" + tuple_of(key),
            "d": b"D" + pack(">I", oid) + b"O" + tuple_of(before),
        }
        if kind == "K" and self.random.random() > odd:
            kind = "U"
        self.lsn += 50
        return frame(told[kind], self.lsn)

    def stream(self, odd: float) -> list[bytes]:
        tables = {
            number: [self.random.choice(("int8", "text", "uuid")), *self.random.choices(NAMES, k=6)]
            for number in range(1, 4)
        }
        frames = [relation_frame(oid, names) for oid, names in tables.items()]
        for xid in range(1, 6):
            self.lsn += 50
            frames.append(frame(pack(">cQQI", b"B", self.lsn, 0, xid)))
            for _ in range(self.random.randrange(4)):
                oid = self.random.choice(list(tables))
                count = self.random.choice((1, 5, ROWS_MIN, 40, 200))
                frames += [self.change(oid, tables[oid], odd) for _ in range(count)]
            self.lsn += 50
            frames.append(frame(pack(">cBQQQ", b"C", 0, self.lsn - 10, self.lsn, 0)))
        return frames


def assembler() -> Assembler:
    return Assembler(
        0,
        describe,
        Catalog.__new__(Catalog).mended,
        SourceBlocks("s", "d"),
        lambda lsn: {"lsn": lsn},
        part_changes=150,
    )


def fed(pieces: list[list[bytes]]) -> list[Part]:
    TABLES.clear()
    made = assembler()
    return [item for piece in pieces for item in made.feed(piece) if isinstance(item, Part)]


Records = dict[str, list[tuple[bytes | None, bytes | None]]]


def records(parts: list[Part], **settings: object) -> Records:
    events = Events(EventSettings("p", **settings), "postgresql", clock_ns=lambda: 1_700_000_000)  # type: ignore[arg-type]
    made: Records = {}
    for part in parts:
        batch = Batch()
        events.part(part, batch)
        for run in batch.take():
            keys, values = run.whole()
            listed = zip(list_of(keys), list_of(values), strict=True)
            made.setdefault(run.topic, []).extend(listed)
    events.close()
    return made


def list_of(column: object) -> list[bytes | None]:
    return column if isinstance(column, list) else column.to_pylist()  # type: ignore[attr-defined]


def plain(parts: list[Part]) -> list[tuple[object, ...]]:
    """All that parts say, with tables by their names: mending makes new ones."""
    return [
        (
            part.transaction,
            part.is_first,
            part.is_last,
            part.position,
            [(change.table.full_name, *change[1:]) for change in part.changes],
        )
        for part in parts
    ]


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32), st.sampled_from((0.0, 0.05, 1.0)))
def test_blocks_say_what_single_rows_say(seed: int, odd: float) -> None:
    frames = Making(seed).stream(odd)
    single, together = fed([[one] for one in frames]), fed([frames])
    assert plain(together) == plain(single)
    assert records(together) == records(single)
    assert records(together, schemas=True, tombstones=False) == records(
        single, schemas=True, tombstones=False
    )
    assert all(len(part.changes) <= 150 for part in together)


def test_ordinary_rows_come_in_blocks() -> None:
    names = ["int8", "text", "numeric", "timestamp", "timestamptz", "date", "bool", "float8"]
    frames = [relation_frame(1, names), frame(pack(">cQQI", b"B", 90, 0, 7))]
    frames += [
        frame(
            b"I" + pack(">I", 1) + b"N" + tuple_of([KINDS[name][2][0] for name in names]), 10 + at
        )
        for at in range(100)
    ]
    frames.append(frame(pack(">cBQQQ", b"C", 0, 990, 1000, 0)))
    (part,) = fed([frames])
    assert isinstance(part.changes, Several)
    (block,) = segments_of(part.changes)
    assert isinstance(block, Block)
    assert len(block) == len(part.changes) == 100
    assert part.changes[-1] == block[-1] == list(block)[99]
    assert part.changes[3:5] == block[3:5]
    assert weight_of(part) > sum(
        len(fragment) for change in block for fragment in change.after or ()
    )
    with pytest.raises(IndexError):
        block[100]


@settings(max_examples=examples(30))
@given(st.integers(0, 2**32), st.data())
def test_damage_is_told_of_whichever_way_it_is_read(seed: int, data: st.DataObject) -> None:
    names = ["int8", "text", "numeric"]
    making = Making(seed)
    frames = [making.change(1, names, 0.0) for _ in range(30)]
    at = data.draw(st.integers(0, 29))
    hurt = bytearray(frames[at][: -len(PAD)])
    place = data.draw(st.integers(30, len(hurt) - 1))
    if data.draw(st.booleans()):
        hurt = hurt[:place]
    else:
        hurt[place] = data.draw(st.integers(0, 255))
    frames[at] = bytes(hurt) + PAD
    start = [relation_frame(1, names), frame(pack(">cQQI", b"B", 90, 0, 7))]
    end = [frame(pack(">cBQQQ", b"C", 0, 990, 1000, 0))]

    def outcome(pieces: list[list[bytes]]) -> object:
        try:
            return plain(fed(pieces))
        except MalformedError as error:
            return str(error)

    whole = [*start, *frames, *end]
    assert outcome([whole]) == outcome([[one] for one in whole])


# ---- lines of COPY -----------------------------------------------------------------------

ESCAPED = {9: b"\\t", 10: b"\\n", 13: b"\\r", 8: b"\\b", 12: b"\\f", 11: b"\\v", 92: b"\\\\"}


def line_of(cells: list[bytes | None]) -> bytes:
    """As COPY writes a row."""
    return b"\t".join(
        b"\\N" if cell is None else b"".join(ESCAPED.get(byte, bytes([byte])) for byte in cell)
        for cell in cells
    )


def relation_of(names: list[str]) -> Relation:
    TABLES.clear()
    codings = [coding(*KINDS[name][:2], TYPES, TypeModes()) for name in names]
    columns = tuple(TableColumn(f"%{at}", made.type, at > 0) for at, made in enumerate(codings))
    return Relation(1, Table("", "s", "t", columns, ("%0",)), codings, "d")


def rows_of(relation: Relation, pieces: list[list[Row] | RowBlock], **settings: object) -> Records:
    events = Events(EventSettings("p", **settings), "postgresql", clock_ns=lambda: 1_700_000_000)  # type: ignore[arg-type]
    made: Records = {}
    for piece in pieces:
        batch = Batch()
        assert events.rows(relation.table, piece, b'{"lsn":1}', batch) == len(piece)
        for run in batch.take():
            keys, values = run.whole()
            listed = zip(list_of(keys), list_of(values), strict=True)
            made.setdefault(run.topic, []).extend(listed)
    events.close()
    return made


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32), st.sampled_from((0.0, 0.05, 1.0)))
def test_blocks_of_lines_say_what_single_lines_say(seed: int, odd: float) -> None:
    making = Making(seed)
    names = [making.random.choice(("int8", "text", "uuid")), *making.random.choices(NAMES, k=6)]
    lines = [
        line_of([None if cell == b"\0" else cell for cell in making.cells(names, odd)])
        for _ in range(making.random.choice((1, ROWS_MIN, 60, 300)))
    ]
    relation = relation_of(names)
    single = decode_lines(relation, lines)
    together: list[list[Row] | RowBlock] = list(decode_blocks(relation, lines))  # type: ignore[arg-type]
    assert [row for piece in together for row in piece] == single
    for more in ({}, {"schemas": True}, {"keys": {"s.t": ("%1",)}}, {"skip": frozenset("c")}):
        assert rows_of(relation, together, **more) == rows_of(relation, [single], **more)


def test_ordinary_lines_come_in_blocks() -> None:
    names = ["int8", "text", "numeric", "timestamp", "timestamptz", "date", "bool", "float8"]
    cells: list[bytes | None] = [KINDS[name][2][0] for name in names]
    cells[1] = "a\\b\tc\n ü".encode()
    cells[3] = None
    relation = relation_of(names)
    lines = [line_of([b"%d" % at, *cells[1:]]) for at in range(1000)]
    blocks = list(decode_blocks(relation, lines))
    assert all(isinstance(block, RowBlock) for block in blocks)
    (block,) = blocks
    assert isinstance(block, RowBlock)
    rows = decode_lines(relation, lines)
    assert list(block) == rows
    assert (block[-1], list(block[3:5]), list(block[:-1])) == (rows[-1], rows[3:5], rows[:-1])
    assert rows_weight(block) > sum(len(fragment) for row in rows for fragment in row)
    with pytest.raises(IndexError):
        block[1000]


def test_marks_of_blocks_are_those_of_lists() -> None:
    relation = relation_of(["int8", "text"])
    lines = [line_of([b"%d" % at, b"x"]) for at in range(100)]
    rows = decode_lines(relation, lines)

    def marked(in_blocks: bool) -> list[tuple[Row, str]]:
        marks, made = Marks(), []
        for some in (lines[:50], lines[50:]):
            listed = [decode_lines(relation, some)]
            for piece in decode_blocks(relation, some) if in_blocks else listed:
                made += marks.add(relation.table, piece)
        made += [*marks.end(relation.table), *marks.finish()]
        return [(row, one.mark) for one in made for row in one.rows]

    assert marked(True) == marked(False)
    assert [row for row, _ in marked(True)] == rows


def test_a_line_that_is_too_long_for_a_block_is_a_row_all_the_same() -> None:
    relation = relation_of(["int8", "text"])
    lines = [line_of([b"%d" % at, b"x" * (BYTES_MAX if at == 20 else 9)]) for at in range(60)]
    pieces = list(decode_blocks(relation, lines))
    assert [row for piece in pieces for row in piece] == decode_lines(relation, lines)
    assert any(isinstance(piece, RowBlock) for piece in pieces)
    assert list(decode_blocks(relation, [])) == []


@settings(max_examples=examples(25))
@given(st.lists(st.binary(max_size=12), min_size=ROWS_MIN, max_size=30))
def test_lines_that_are_none_are_told_of_whichever_way_they_are_read(lines: list[bytes]) -> None:
    relation = relation_of(["text", "text"])

    def outcome(read: object) -> object:
        try:
            return [row for piece in read() for row in piece]  # type: ignore[operator]
        except MalformedError as error:
            return str(error)

    together = outcome(lambda: decode_blocks(relation, lines))
    assert together == outcome(lambda: [decode_lines(relation, lines)])
