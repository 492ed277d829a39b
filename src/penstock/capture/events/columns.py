"""The shortest way: blocks of plain tables to columns of keys and envelopes, by compiled code.

It writes what `quick` writes, byte for byte, for many changes at once. The envelope of each
operation is cut into literals, one before each fragment; those at its end hold the source block,
whose pieces stand around the row's number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import pyarrow as pa

from penstock.capture import kernels
from penstock.capture.blocks import Block, RowBlock
from penstock.capture.events.batch import Batch
from penstock.capture.events.encoding import Moment
from penstock.capture.events.quick import envelope
from penstock.capture.source import Fragment

AddBlock = Callable[[Block, Batch], int]
AddRows = Callable[[RowBlock, Fragment, Batch], None]

_OPS = 4


def quick_blocks(
    topic: str,
    templates: tuple[bytes, bytes, bytes],
    key: bytes,
    key_columns: Sequence[int],
    moment: Moment,
    *,
    tombstones: bool,
) -> AddBlock:
    """A function that adds blocks of one keyed table to a batch."""
    head, row, tail = templates
    null = b"null"
    envelopes = [
        _cut(envelope(head, *rows, op, tail))
        for rows, op in (
            ((null, row), b"c"),
            ((null, row), b"u"),
            ((row, row), b"u"),
            ((row, null), b"d"),
        )
    ]
    key_literals = _cut(key)
    keys = np.array(key_columns, np.int64)
    key_bytes = sum(map(len, key_literals))

    width = len(envelopes[2]) + 4
    # An operation's literals but for the last three, which the source block and the time stand
    # between.
    firsts = [parts[:-3] for parts in envelopes]
    lasts = [parts[-3:] for parts in envelopes]

    def add(block: Block, batch: Batch) -> int:
        pieces, stamp = block.pieces, moment.json
        literals: list[bytes] = []
        # Of each operation where its literals begin; and whether tombstones are written.
        at = np.zeros((_OPS + 1, width + len(pieces)), np.int64)
        place = longest = 0
        for op in set(block.ops.tolist()):
            before, between, behind = lasts[op]
            whole = [
                *firsts[op],
                before + pieces[0],
                *pieces[1:-1],
                pieces[-1] + between + stamp + behind,
            ]
            ends = list(accumulate(map(len, whole), initial=place))
            at[op, : len(ends)] = ends
            longest = max(longest, ends[-1] - place)
            place = ends[-1]
            literals += whole
        at[_OPS, 0] = tombstones
        key_at = np.array(list(accumulate(map(len, key_literals), initial=place)), np.int64)
        table = b"".join((*literals, *key_literals))
        arrays = (block.places, block.ops, block.numbers)
        mentions = len(pieces) - 1
        room = longest + mentions * kernels.NUMBER_BYTES, key_bytes
        made = _composed(block.fragments, arrays, mentions, table, (at, key_at, keys), room)
        batch.add_columns(topic, *made)
        return len(block)

    return add


def quick_row_blocks(
    topic: str,
    templates: tuple[bytes, bytes, bytes],
    key: bytes,
    key_columns: Sequence[int],
    op: bytes,
    moment: Moment,
) -> AddRows:
    """A function that adds rows of a snapshot of one keyed table to a batch."""
    head, row, tail = templates
    *firsts, before, between, behind = _cut(envelope(head, b"null", row, op, tail))
    key_literals = _cut(key)
    keys = np.array(key_columns, np.int64)
    key_bytes = sum(map(len, key_literals))

    def add(block: RowBlock, source: Fragment, batch: Batch) -> None:
        count = len(block)
        whole = [*firsts, before + source + between + moment.json + behind]
        ends = list(accumulate(map(len, whole), initial=0))
        at = np.zeros((_OPS + 1, len(ends)), np.int64)
        at[kernels.CREATED] = ends
        key_at = np.array(list(accumulate(map(len, key_literals), initial=ends[-1])), np.int64)
        table = b"".join((*whole, *key_literals))
        arrays = (block.places, np.full(count, kernels.CREATED, np.int64), np.zeros(0, np.int64))
        room = ends[-1], key_bytes
        made = _composed(block.fragments, arrays, 0, table, (at, key_at, keys), room)
        batch.add_columns(topic, *made)

    return add


def _composed(
    fragments: bytes,
    arrays: tuple[Any, Any, Any],
    mentions: int,
    table: bytes,
    literals: tuple[Any, Any, Any],
    room: tuple[int, int],
) -> tuple[pa.Array, pa.Array]:
    """Columns of keys and values. `literals` say where those in `table` begin, of the operations
    and of the key; `room` is what a value and a key take beside their fragments, at most."""
    places, ops, numbers = arrays
    count = len(ops)
    size = int(places[-1, -1] - places[0, 0])
    value_bytes, key_bytes = room
    records = 2 * count
    key_out = np.empty(2 * (size + count * key_bytes), np.uint8)
    value_out = np.empty(size + count * value_bytes, np.uint8)
    key_ends, value_ends = np.zeros(records + 1, np.int64), np.zeros(records + 1, np.int64)
    valid = np.empty(records, np.uint8)
    made = kernels.compose_rows(
        _address(fragments),
        places,
        ops,
        numbers,
        mentions,
        _address(table),
        *literals,
        key_out.ctypes.data,
        value_out.ctypes.data,
        key_ends,
        value_ends,
        valid,
    )
    return (
        _column(key_out, key_ends[: made + 1], None),
        _column(value_out, value_ends[: made + 1], valid[:made] if made > count else None),
    )


def _cut(template: bytes) -> list[bytes]:
    """The literals of a template, around its places."""
    parts = [b""]
    at = 0
    while (found := template.find(b"%", at)) >= 0:
        parts[-1] += template[at:found]
        if template[found + 1 : found + 2] == b"%":
            parts[-1] += b"%"
        else:
            parts.append(b"")
        at = found + 2
    parts[-1] += template[at:]
    return parts


def _address(data: bytes) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data) if data else 0


def _column(data: Any, ends: Any, valid: Any) -> pa.Array:
    """An Arrow column over what a kernel wrote, of the size that it has."""
    used = int(ends[-1])
    mask = None
    if valid is not None:
        mask = pa.py_buffer(np.packbits(valid, bitorder="little"))
    buffers = [mask, pa.py_buffer(ends.astype(np.int32)), pa.py_buffer(data[:used].tobytes())]
    return pa.Array.from_buffers(pa.binary(), len(ends) - 1, buffers)
