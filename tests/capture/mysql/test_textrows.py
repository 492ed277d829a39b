"""Rows of result sets: the compiled way says, byte for byte, what the interpreted way says."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.capture.blocks import RowBlock, in_blocks
from penstock.capture.mysql import types
from penstock.capture.mysql.binlog import BinlogError
from penstock.capture.mysql.textrows import row_decoder, text_blocks
from penstock.capture.mysql.types import Modes, Native
from penstock.capture.source import Row
from tests.harness.profiles import examples

# Columns, and values of which some are out of the ordinary; the first is not.
KINDS: list[tuple[Native, list[bytes]]] = [
    (Native("i", types.LONGLONG), [b"42", b"0", b"-9223372036854775808"]),
    (
        Native("s", types.STRING),
        [
            b"plain",
            b"",
            b'a "quoted" \\ one\n\t\x01\x7f',
            "Füße 🦆".encode(),
            b"\xff",
            b"\xed\xa0\x80",
            b"x" * 250,
            b"x" * 251,
            b"x" * 70_000,
        ],
    ),
    (Native("e", types.ENUM, values=("x",)), [b"x", b""]),
    (Native("j", types.JSON), [b'{"a": [1, "b"]}']),
    (
        Native("d", types.DECIMAL, size=30, scale=2),
        [
            b"1.25",
            b"0.00",
            b"-0.01",
            b"-1.28",
            b"-1.29",
            b"-327.68",
            b"-327.69",
            b"9999999999999999999999999999.99",
        ],
    ),
    (Native("y", types.DATE), [b"2024-02-29", b"0000-00-00", b"2023-02-00", b"0000-03-01"]),
    (
        Native("t", types.DATETIME, scale=3),
        [b"2026-11-01 12:34:56.789", b"1969-12-31 23:59:59.001", b"0000-00-00 00:00:00.000"],
    ),
    (Native("u", types.DATETIME), [b"2026-11-01 12:34:56", b"0000-00-00 00:00:00"]),
    (
        Native("v", types.DATETIME, optional=False, scale=6),
        [b"2026-11-01 12:34:56.000001", b"0000-00-00 00:00:00.000000"],
    ),
    (
        Native("z", types.TIMESTAMP, scale=2),
        [b"2026-11-01 12:34:56.78", b"0000-00-00 00:00:00.00"],
    ),
]


def message(cells: list[bytes | None]) -> bytes:
    """A row as the server sends it."""
    made = b""
    for cell in cells:
        if cell is None:
            made += b"\xfb"
        elif len(cell) < 251:
            made += bytes([len(cell)]) + cell
        elif len(cell) < 1 << 16:
            made += b"\xfc" + len(cell).to_bytes(2, "little") + cell
        else:
            made += b"\xfd" + len(cell).to_bytes(3, "little") + cell
    return made


def both(columns: list[Native], messages: list[bytes]) -> tuple[list[Row], list[object]]:
    """The rows, and the pieces in which they come in blocks."""
    decode, blocks = row_decoder(columns, Modes()), text_blocks(columns, Modes())
    assert blocks is not None

    def rows_of(some: object) -> list[Row]:
        return [decode(one, 0) for one in some]  # type: ignore[attr-defined]

    return rows_of(messages), list(in_blocks(messages, blocks.block, rows_of))


@settings(max_examples=examples(20))
@given(st.integers(0, 2**32), st.sampled_from((0.0, 0.05, 1.0)))
def test_blocks_say_what_single_rows_say(seed: int, odd: float) -> None:
    random = Random(seed)
    chosen = random.choices(KINDS, k=5)
    messages = [
        message(
            [
                None
                if random.random() < 0.1
                else values[0]
                if random.random() > odd
                else random.choice(values)
                for _, values in chosen
            ]
        )
        for _ in range(random.choice((0, 1, 12, 60, 300)))
    ]
    rows, pieces = both([native for native, _ in chosen], messages)
    assert [row for piece in pieces for row in piece] == rows  # type: ignore[attr-defined]


def test_ordinary_rows_come_in_blocks() -> None:
    cells: list[bytes | None] = [values[0] for _, values in KINDS]
    messages = [message([*cells[:3], None, *cells[4:]])] * 500
    rows, pieces = both([native for native, _ in KINDS], messages)
    (block,) = pieces
    assert isinstance(block, RowBlock)
    assert list(block) == rows


@pytest.mark.parametrize(
    "native",
    [
        Native("f", types.DOUBLE),
        Native("b", types.BINARY),
        Native("t", types.TIME),
        Native("y", types.YEAR),
    ],
)
def test_other_columns_are_left_to_the_interpreter(native: Native) -> None:
    assert text_blocks([KINDS[0][0], native], Modes()) is None
    assert text_blocks([], Modes()) is None
    assert text_blocks([Native("d", types.DECIMAL, size=5)], Modes("string")) is None
    big = Native("u", types.LONGLONG, unsigned=True)
    assert text_blocks([big], Modes(unsigned_bigint="precise")) is None


@settings(max_examples=examples(25))
@given(st.lists(st.binary(max_size=12), min_size=12, max_size=30))
def test_nothing_is_read_beyond_a_row(messages: list[bytes]) -> None:
    columns = [KINDS[1][0]] * 2
    blocks = text_blocks(columns, Modes())
    assert blocks is not None
    block = blocks.block(messages)
    decode = row_decoder(columns, Modes())
    try:
        expected = [decode(one, 0) for one in messages[: len(block)]]
    except (IndexError, BinlogError):
        pytest.fail("a row that is none was taken")
    assert list(block) == expected
