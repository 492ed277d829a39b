"""Rows of the binlog into changes, by code that is made for each table map.

A row image is a bitmap of nulls and the values of the columns that are not null, one behind the
other. Made for a table, the code reads runs of values of fixed size with one `struct` call, along
with the length of the value of varying size that follows. Rows with nulls take a slower way that
reads one value at a time.

An image may lack columns (binlog_row_image other than FULL, set by a session). What an update does
not tell is null before, and UNAVAILABLE after.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from struct import Struct
from typing import Final

from penstock.capture.blocks import Block
from penstock.capture.mysql.binlog import (
    DELETES,
    INSERTS,
    BinlogError,
    RowsHead,
)
from penstock.capture.mysql.charsets import Charsets
from penstock.capture.mysql.codegen import Names, Recipe, binary_recipe
from penstock.capture.mysql.rowblocks import RowBlocks, row_blocks
from penstock.capture.mysql.tablemap import TableMap
from penstock.capture.mysql.types import Modes, column
from penstock.capture.source import NULL, UNAVAILABLE, Change, Table

# data, at, the source block before and after the row's number, ts_us, append -> where it ended
Decode = Callable[[bytes, int, bytes, bytes, int, Callable[[Change], None]], int]

_LENGTHS: Final = {1: "B", 2: "H", 4: "I"}


@dataclass(slots=True, eq=False)
class RowReader:
    """Reads the row events of one table as it was at one place of the binlog."""

    map: TableMap
    table: Table
    _charsets: Charsets
    _modes: Modes
    # For many rows at once; None where a column does not allow that.
    _blocks: RowBlocks | None = None
    _made: dict[tuple[str, bytes, bytes], Decode] = field(default_factory=dict)

    def block(
        self, kind: int, head: RowsHead, source: tuple[bytes, bytes], ts_us: int
    ) -> Block | None:
        """The changes of a row event in a block; None if they are for `read`."""
        return None if self._blocks is None else self._blocks.block(kind, head, source, ts_us)

    def read(
        self,
        kind: int,
        head: RowsHead,
        source: tuple[bytes, bytes],
        ts_us: int,
        changes: list[Change],
    ) -> None:
        """Append the changes of a row event."""
        op = "c" if kind in INSERTS else "d" if kind in DELETES else "u"
        shape = (op, head.before, head.after)
        decode = self._made.get(shape)
        if decode is None:
            decode = self._made[shape] = self._make(op, head)
        data, count = head.data, len(changes)
        try:
            ended = decode(data, head.at, *source, ts_us, changes.append)
        except (IndexError, struct.error, ValueError, TypeError, OverflowError) as error:
            del changes[count:]
            raise BinlogError(f"rows of {self.table.full_name} cannot be read: {error}") from error
        if ended != len(data):
            del changes[count:]
            raise BinlogError(f"rows of {self.table.full_name} end in the middle of a value")

    def _make(self, op: str, head: RowsHead) -> Decode:
        columns = len(self.map.columns)
        if head.columns != columns:
            raise BinlogError(
                f"rows of {self.table.full_name} have {head.columns} columns, its map {columns}"
            )
        names = Names({"Change": Change, "new": tuple.__new__, "T": self.table, "NULL": NULL})
        names.known["UNAVAILABLE"] = UNAVAILABLE
        recipes = [binary_recipe(c, self._modes, self._charsets, names) for c in self.map.columns]
        lines = ["def decode(d, p, begin, end, ts, add):", "    r = 0", "    n = len(d)"]
        lines += ["    while p < n:"]
        images = {"c": "a", "d": "b", "u": "ba"}[op]
        for image in images:
            bitmap = head.before if image == "b" or op == "c" else head.after
            lines += image_code(image, bitmap, recipes, names)
        before = _tuple("b", columns) if "b" in images else "None"
        after = _tuple("a", columns) if "a" in images else "None"
        row = f'(T, "{op}", {before}, {after}, begin + b"%d" % r + end, ts)'
        lines += [f"        add(new(Change, {row}))", "        r += 1", "    return p"]
        return names.compile("\n".join(lines), "decode")


def _tuple(image: str, count: int) -> str:
    return "(" + "".join(f"{image}{i}, " for i in range(count)) + ")"


def image_code(image: str, bitmap: bytes, recipes: list[Recipe], names: Names) -> list[str]:
    """The lines that read one row image into variables named after it: a0, a1, ..."""
    present = [i for i in range(len(recipes)) if bitmap[i >> 3] >> (i & 7) & 1]
    absent = [i for i in range(len(recipes)) if i not in present]
    missing = "NULL" if image == "b" else "UNAVAILABLE"
    lines = [f"        {image}{i} = {missing}" for i in absent]
    width = (len(present) + 7) // 8
    lines.append(f'        z = int.from_bytes(d[p:p + {width}], "little")')
    lines.append(f"        p += {width}")
    # Bits beyond the last column are set by some servers.
    lines.append(f"        if not z & {(1 << len(present)) - 1}:")
    lines += _indented(_run_code(image, present, recipes, names) or ["pass"], 12)
    lines.append("        else:")
    slow = []
    for bit, i in enumerate(present):
        slow += [f"if z & {1 << bit}:", f"    {image}{i} = NULL", "else:"]
        slow += _indented(_run_code(image, [i], recipes, names), 4)
    return lines + _indented(slow or ["pass"], 12)


def _indented(lines: list[str], by: int) -> list[str]:
    return [" " * by + line for line in lines]


def _run_code(image: str, columns: list[int], recipes: list[Recipe], names: Names) -> list[str]:
    """The lines that read these columns, none of which is null."""
    lines: list[str] = []
    codes, size = "", 0
    targets: list[str] = []

    def flush() -> None:
        nonlocal codes, targets, size
        if codes:
            unpack = names.bind(Struct("<" + codes).unpack_from, "S")
            lines.append(f"{', '.join(targets)}, = {unpack}(d, p)")
            lines.append(f"p += {size}")
        codes, targets, size = "", [], 0

    pending: list[int] = []
    for i in columns:
        recipe = recipes[i]
        if recipe.struct:
            codes += recipe.struct
            size += recipe.size
            targets.append(f"x{i}")
            pending.append(i)
            continue
        if recipe.prefix in _LENGTHS:
            codes += _LENGTHS[recipe.prefix]
            targets.append("q")
        else:
            codes += f"{recipe.prefix}s"
            targets.append("q")
        size += recipe.prefix
        flush()
        if recipe.prefix not in _LENGTHS:
            lines.append('q = int.from_bytes(q, "little")')
        lines += ["q += p", "if q > n: raise IndexError('a value is cut')"]
        lines.append(f"{image}{i} = {recipe.expression.format(x='d[p:q]')}")
        lines.append("p = q")
    flush()
    lines += [f"{image}{i} = {recipes[i].expression.format(x=f'x{i}')}" for i in pending]
    return lines


def reader_of(found: TableMap, charsets: Charsets, modes: Modes) -> RowReader:
    """The reader of a table map, with the table it describes."""
    table = Table(
        database=found.database,
        schema="",
        name=found.name,
        columns=tuple(column(native, modes) for native in found.columns),
        key=tuple(found.columns[i].name for i in found.key),
    )
    blocks = row_blocks(table, found.columns, found.key, modes)
    return RowReader(found, table, charsets, modes, blocks)
