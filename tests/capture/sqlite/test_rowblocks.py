"""Blocks of rows of a changelog, held against the decoder that makes one change at a time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.capture.blocks import Block
from penstock.capture.events.batch import Batch
from penstock.capture.events.changes import Events
from penstock.capture.events.registry import SchemaRegistry
from penstock.capture.events.settings import EventSettings
from penstock.capture.source import Change, Part
from penstock.capture.sqlite import rowblocks
from penstock.capture.sqlite.rowblocks import ROWS_MIN as ROWS_MIN_REALLY
from penstock.capture.sqlite.rowblocks import RowBlocks, Rows
from penstock.capture.sqlite.tables import Definition
from penstock.capture.sqlite.triggers import OP_DELETE, OP_INSERT, OP_REREAD, OP_UPDATE
from penstock.capture.sqlite.values import DAY_MS, EPOCH_DAY, Blocks, log_decoder
from tests.harness.profiles import BLOCK_SHARE, examples

COLUMNS = (
    ("id", "INTEGER", True),
    ("name", "TEXT", False),
    ("price", "DECIMAL(10,2)", False),
    ("made", "TIMESTAMP", False),
    ("ratio", "REAL", False),
    ("data", "BLOB", False),
    ("any", "", False),
)
DEFINITION = Definition("things", "", 1, 2, COLUMNS, ("id", "name"), "", False)
TABLE = DEFINITION.table
DECODE = log_decoder(DEFINITION, TABLE)
# Few enough to make blocks of what is easily looked at.
ROWS_MIN = 12
READER = RowBlocks(DEFINITION, TABLE, DECODE, rows_min=ROWS_MIN)
SOURCE = Blocks(TABLE, "shop", "shop.db")
NOW_DAY = EPOCH_DAY + 1_790_000_000_123 / DAY_MS

VALUES = st.one_of(
    st.none(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=12),
    st.binary(max_size=12),
)
ROWS = st.tuples(*[VALUES] * len(COLUMNS))
NOTHING = (None,) * len(COLUMNS)


@st.composite
def logged(draw: st.DrawFn) -> list[tuple[Any, ...]]:
    """Rows of a changelog: most updates keep the key, most moments are some."""
    rows = []
    for seq in range(draw(st.integers(0, 3 * ROWS_MIN))):
        op = draw(st.sampled_from([OP_INSERT, OP_UPDATE, OP_UPDATE, OP_DELETE, OP_REREAD]))
        old, new = draw(ROWS), draw(ROWS)
        if op == OP_UPDATE and draw(st.integers(0, 9)):
            new = (*old[:2], *new[2:])
        old = NOTHING if op == OP_INSERT else old
        new = NOTHING if op == OP_DELETE else new
        odd = draw(st.integers(0, 40)) == 0
        at = draw(st.sampled_from([None, 0.0, "soon"])) if odd else NOW_DAY + seq / DAY_MS
        rows.append((seq, op, at, *old, *new))
    return rows


def told(segments: list[list[Change] | Block]) -> list[Change]:
    return list(chain.from_iterable(segments))


def records(segments: list[list[Change] | Block]) -> list[Any]:
    """What the log would be given."""
    batch, registry = Batch(), SchemaRegistry()
    events = Events(
        EventSettings(prefix="p"),
        "sqlite",
        registry=registry,
        publish=registry.pending.clear,
        clock_ns=lambda: 10**18,
    )
    for changes in segments:
        events.part(Part("1", changes, {}, 0), batch)
    found: list[Any] = []
    for run in batch.take():
        keys, values = run.whole()
        if not isinstance(keys, list):
            keys, values = keys.to_pylist(), values.to_pylist()
        headers = run.header_list() or [()] * len(keys)
        found += zip(keys, values, headers, strict=True)
    return found


@settings(max_examples=examples(30))
@given(logged())
def test_blocks_say_what_the_decoder_says(rows: list[tuple[Any, ...]]) -> None:
    made = list(READER.changes(rows, SOURCE))
    wanted = DECODE(rows, SOURCE)
    # The moment of a block is that of its last change; what each event says is its own.
    assert [change[:-1] for change in told(made)] == [change[:-1] for change in wanted]
    assert records(made) == records([wanted])


def ordinary(count: int) -> list[tuple[Any, ...]]:
    pick = random.Random(1)
    rows = []
    for seq in range(count):
        old: tuple[Any, ...] = (seq, f"Größe {seq}\n", 1.5, "2026-11-01", -0.0, b"\0\xff", None)
        new = (*old[:2], pick.random(), None, float("inf"), b"", 7)
        op = pick.choice([OP_INSERT, OP_UPDATE, OP_DELETE, OP_REREAD])
        old = NOTHING if op in (OP_INSERT, OP_REREAD) else old
        rows.append((seq, op, NOW_DAY, *old, *(NOTHING if op == OP_DELETE else new)))
    return rows


@pytest.mark.parametrize("count", [ROWS_MIN, 999, 1_001, 2_500])
def test_ordinary_rows_are_in_blocks(count: int) -> None:
    rows = ordinary(count)
    made = list(READER.changes(rows, SOURCE))
    in_blocks = sum(len(changes) for changes in made if isinstance(changes, Block))
    assert in_blocks > count - ROWS_MIN
    assert [change[:-1] for change in told(made)] == [
        change[:-1] for change in DECODE(rows, SOURCE)
    ]
    source = orjson.loads(told(made)[0].source)
    assert source["ts_ms"] == 1_790_000_000_123
    assert (source["ts_us"], source["ts_ns"]) == (1_790_000_000_123_000, 1_790_000_000_123_000_000)


def test_a_change_of_the_key_is_alone_and_large_rows_go_the_other_way() -> None:
    rows = [row for row in ordinary(200) if row[1] == OP_INSERT] * 2
    odd = (5, OP_UPDATE, NOW_DAY, 1, "a", *NOTHING[2:], 2, "a", *NOTHING[2:])
    rows.insert(40, odd)
    large = (6, OP_INSERT, NOW_DAY, *NOTHING, 1, "x" * (5 << 20), *NOTHING[2:])
    rows.append(large)
    made = list(READER.changes(rows, SOURCE))
    assert [change[:-1] for change in told(made)] == [
        change[:-1] for change in DECODE(rows, SOURCE)
    ]
    assert records(made) == records([DECODE(rows, SOURCE)])
    assert isinstance(made[0], Block)
    assert len(made[0]) == 40


class Counted:
    """Makes blocks as they are made in earnest, and counts the rows that are flattened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reader = RowBlocks(DEFINITION, TABLE, DECODE)
        self.flattened = 0
        flatten = self.reader._flatten

        def counting(rows: Rows, add: Callable[[Iterable[str]], None]) -> None:
            self.flattened += len(rows)
            flatten(rows, add)

        monkeypatch.setattr(self.reader, "_flatten", counting)


def of_sizes(sizes: Iterable[int], letter: str = "x") -> list[tuple[Any, ...]]:
    texts = {size: letter * size for size in {*sizes}}
    return [
        (seq, OP_INSERT, NOW_DAY, *NOTHING, seq, texts[size], *NOTHING[2:])
        for seq, size in enumerate(sizes)
    ]


BYTES_MAX = (4 << 20) // BLOCK_SHARE
SIZES = {
    "small": [10] * 5_000,
    "a few hundred fit": [11_000] * 3_000,
    "too few fit": [30_000] * 1_000,
    "a few dozen fit": [100_000] * 310,
    "none fits": [5 << 20] + [10] * 400 + [5 << 20] + [10] * 400,
    "large after small": ([10] * 600 + [60_000] * 300) * 2,
    "by turns": [10, 10, 10, 40_000] * 1_000,
    "ever larger": [each * 20 for each in range(2_000)],
    "ever smaller": [each * 20 for each in range(2_000, 0, -1)],
}


@pytest.fixture
def smaller_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rowblocks, "_BYTES_MAX", BYTES_MAX)


@pytest.mark.usefixtures("smaller_blocks")
@pytest.mark.parametrize("letter", ["x", "€"])
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_few_rows_are_flattened_in_vain(
    sizes: list[int], letter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = of_sizes([size if size < 50 else size // BLOCK_SHARE for size in sizes], letter)
    counted = Counted(monkeypatch)
    at = 0
    for changes in counted.reader.changes(rows, SOURCE):
        assert [change[:-1] for change in changes] == [
            change[:-1] for change in DECODE(rows[at : at + len(changes)], SOURCE)
        ]
        at += len(changes)
        if isinstance(changes, Block):
            assert len(changes) >= ROWS_MIN_REALLY
            assert len(changes.fragments) <= BYTES_MAX
    assert at == len(rows)
    assert counted.flattened <= 2 * len(rows)


@pytest.mark.usefixtures("smaller_blocks")
def test_rows_of_which_enough_fit_are_in_blocks() -> None:
    reader = RowBlocks(DEFINITION, TABLE, DECODE)
    # Beside their texts, rows have some twenty bytes each.
    rows = of_sizes([BYTES_MAX // (ROWS_MIN_REALLY + 30)] * 2_000)
    made = list(reader.changes(rows, SOURCE))
    in_blocks = sum(len(changes) for changes in made if isinstance(changes, Block))
    assert in_blocks > len(rows) - ROWS_MIN_REALLY - 30
