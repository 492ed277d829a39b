"""Row events in blocks: the compiled way says, byte for byte, what the interpreted way says."""

from __future__ import annotations

from random import Random

import pytest

from penstock.capture.blocks import Block, segments_of
from penstock.capture.events.batch import Batch
from penstock.capture.events.changes import Events
from penstock.capture.events.settings import EventSettings
from penstock.capture.mysql import rowblocks
from penstock.capture.mysql.binlog import (
    ROWS,
    TABLE_MAP,
    BinlogError,
    Event,
    RowsHead,
    rows_head,
)
from penstock.capture.mysql.groups import _Reader
from penstock.capture.source import Change, Part
from penstock.testing.mariadb import MariaDB
from tests.capture.mysql.test_parsing import assembler, split

TABLE = """
CREATE TABLE t (id INT PRIMARY KEY, a TINYINT, b SMALLINT UNSIGNED, c MEDIUMINT, d INT UNSIGNED,
    e BIGINT, f BIGINT UNSIGNED, g VARCHAR(20), h VARCHAR(300), i TEXT, j CHAR(5),
    k DECIMAL(18,9), l DECIMAL(2,2), m DECIMAL(7,0), n DECIMAL(12,2), o DATE, p DATETIME,
    q DATETIME(1), r DATETIME(3), s DATETIME(6), u TIMESTAMP NULL, v TIMESTAMP(2) NULL,
    w TIMESTAMP(5) NULL, x DECIMAL(18,3)) CHARACTER SET utf8mb4
"""
VALUES: list[list[object]] = [
    [-128, 127, 0],
    [65535, 0],
    [-8388608, 8388607, -1],
    [4294967295, 0],
    [9223372036854775807, -1, 0, -9223372036854775808],
    [9223372036854775807, 0, 18446744073709551615],
    ["", "Füße 🦆", 'a "b" \\'],
    ["x" * 300, "\n\t\x01"],
    ["", "y" * 70],
    ["ab", ""],
    ["123456789.987654321", "-1.28", "-0.000000128", "0", "-999999999.999999999"],
    ["0.99", "-0.99", "0"],
    ["9999999", "-32768", "-32769", "128"],
    ["1234567890.12", "-0.01"],
    ["2024-02-29", "1969-12-31", "0000-00-00", "0000-01-01", "9999-12-31"],
    ["2026-11-01 12:34:56", "0000-00-00 00:00:00", "1000-01-01 00:00:00"],
    ["2026-11-01 12:34:56.7"],
    ["1969-12-31 23:59:59.999", "2026-11-01 12:34:56.001"],
    ["2026-11-01 12:34:56.000001", "1969-12-31 23:59:59.999999"],
    ["2026-11-01 12:34:56", "1970-01-02 00:00:01", "2000-02-29 23:59:59"],
    ["2026-12-31 12:34:56.07", "0000-00-00 00:00:00"],
    ["2026-03-01 00:00:00.00009", "2038-01-01 00:00:00.5"],
    ["123456789012345.678", "-999999999999999.999"],
]
Records = list[tuple[object, object]]


@pytest.fixture(scope="module")
def raw(mariadb: MariaDB) -> list[bytes]:
    """The events of a binlog with rows of each kind."""
    database = mariadb.create_database()
    mariadb.query("FLUSH BINARY LOGS")
    file = mariadb.query("SHOW MASTER STATUS")[0][0]
    random = Random(1)
    with mariadb.connect(database) as connection, connection.cursor() as cursor:
        cursor.execute("SET sql_mode = '', time_zone = '+00:00'")
        cursor.execute(TABLE)
        # At first only what is ordinary, then anything; always with nulls.
        for first, odd in ((0, 0.0), (200, 0.02), (400, 1.0)):
            rows = [
                (
                    number,
                    *(
                        None
                        if random.random() < 0.1
                        else random.choice(some)
                        if random.random() < odd
                        else some[0]
                        for some in VALUES
                    ),
                )
                for number in range(first, first + 200)
            ]
            cursor.executemany(
                f"INSERT INTO t VALUES ({', '.join(['%s'] * (1 + len(VALUES)))})", rows
            )
        cursor.execute("UPDATE t SET a = 1, i = CONCAT(i, 'z') WHERE id < 300")
        cursor.execute("UPDATE t SET id = id + 10000 WHERE id BETWEEN 50 AND 80")
        cursor.execute("SET binlog_row_image = MINIMAL")
        cursor.execute("UPDATE t SET a = 2 WHERE id < 300")
        cursor.execute("SET binlog_row_image = FULL")
        cursor.execute("DELETE FROM t")
    data = (mariadb.folder / "data" / str(file)).read_bytes()
    mariadb.query(f"DROP DATABASE {database}")
    return list(split(data))


def parts_of(raw: list[bytes]) -> list[Part]:
    made = assembler()
    return [part for one in raw for part in made.feed(one) or ()]


def interpreted(raw: list[bytes], monkeypatch: pytest.MonkeyPatch) -> list[Part]:
    with monkeypatch.context() as patch:
        patch.setattr(rowblocks, "_BYTES_MIN", 1 << 40)
        return parts_of(raw)


def plain(parts: list[Part]) -> list[object]:
    return [
        (
            part.transaction,
            part.is_last,
            part.position,
            [(change.table.full_name, *change[1:]) for change in part.changes],
        )
        for part in parts
    ]


def records(parts: list[Part]) -> Records:
    events = Events(EventSettings("p"), "mysql", clock_ns=lambda: 1_700_000_000)
    made: Records = []
    for part in parts:
        batch = Batch()
        events.part(part, batch)
        for run in batch.take():
            for column in zip(*map(list_of, run.whole()), strict=True):
                made.append(column)
    events.close()
    return made


def list_of(column: object) -> list[object]:
    return column if isinstance(column, list) else column.to_pylist()  # type: ignore[attr-defined]


def test_blocks_say_what_single_rows_say(raw: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    together, single = parts_of(raw), interpreted(raw, monkeypatch)
    segments = [segment for part in together for segment in segments_of(part.changes)]
    blocks = [segment for segment in segments if isinstance(segment, Block)]
    # Of each operation; and what is odd goes the other way.
    assert {op for block in blocks for op in block.ops.tolist()} == {0, 2, 3}
    assert sum(map(len, blocks)) > 200
    assert any(isinstance(segment, list) and segment for segment in segments)
    assert not any(
        isinstance(segment, Block) for part in single for segment in segments_of(part.changes)
    )
    assert plain(together) == plain(single)
    assert records(together) == records(single)


@pytest.mark.parametrize("stored", [(2, 0xFF), (1, 0x40)])
def test_a_year_that_no_date_can_have_is_read_the_same_way(
    raw: list[bytes], stored: tuple[int, int]
) -> None:
    """DATE has room for years up to 32767."""
    reader, events = _large(raw)
    head = rows_head(events[0])
    whole = (2024 << 9 | 2 << 5 | 29).to_bytes(3, "little")
    at = head.data.index(whole, head.at)
    hurt = bytearray(head.data)
    hurt[at + stored[0]] = stored[1]
    _compare(reader, events[0], head._replace(data=bytes(hurt)))


def test_damage_is_told_of_whichever_way_it_is_read(raw: list[bytes], seed: int) -> None:
    """What compiled code takes, the interpreted way takes, and says the same."""
    random = Random(seed)
    reader, events = _large(raw)
    taken = 0
    for _ in range(300):
        event = random.choice(events)
        head = rows_head(event)
        hurt = bytearray(head.data)
        for _ in range(random.randrange(4)):
            hurt[random.randrange(head.at, len(hurt))] = random.randrange(256)
        if random.random() < 0.5:
            del hurt[random.randrange(head.at + 1_500, len(hurt)) :]
        taken += _compare(reader, event, head._replace(data=bytes(hurt)))
    assert taken


def _large(raw: list[bytes]) -> tuple[_Reader, list[Event]]:
    """The reader of the table, and its events that are large enough for blocks."""
    made = assembler()
    reader = None
    events = []
    for one in raw:
        event = made._event(one)
        if event.kind == TABLE_MAP:
            made._take_table(event)
            reader = reader or next(iter(made._readers.values()))
        elif event.kind in ROWS and len(one) > 2_000:
            events.append(event)
    assert reader is not None
    return reader, events


def _compare(reader: _Reader, event: Event, damaged: RowsHead) -> bool:
    """Both ways say the same, if the compiled one takes it; whether it does."""
    block = reader.rows.block(event.kind, damaged, (b"<", b">"), 1)
    changes: list[Change] = []
    try:
        reader.rows.read(event.kind, damaged, (b"<", b">"), 1, changes)
    except BinlogError:
        assert block is None
    else:
        assert block is None or list(block) == changes
    return block is not None
