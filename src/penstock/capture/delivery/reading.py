"""The snapshot of all tables, read and handed over; by several threads where there are several."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from queue import Empty, SimpleQueue

from penstock.capture.blocks import Block, RowBlock, segments_of
from penstock.capture.delivery.deliverer import (
    SnapshotBegin,
    SnapshotEnd,
    SnapshotRows,
    TableEnd,
    Work,
)
from penstock.capture.delivery.handover import Handover
from penstock.capture.source import Change, Item, Part, Row, Snapshot, Table

# What an item takes at least, so that many empty ones count, too.
_ITEM_BYTES = 256


class Interrupted(Exception):  # noqa: N818
    """Somebody wants the reading to end."""


def weight_of(item: Item) -> int:
    """About how many bytes an item holds: as many as its first change, for each."""
    if isinstance(item, Part):
        return _ITEM_BYTES + sum(map(_changes_bytes, segments_of(item.changes)))
    return _ITEM_BYTES


def _changes_bytes(changes: Sequence[Change]) -> int:
    if isinstance(changes, Block):
        return changes.weight
    if not changes:
        return 0
    each = _row_bytes(changes[0].after) + _row_bytes(changes[0].before)
    return len(changes) * (each + _ITEM_BYTES)


def rows_weight(rows: Sequence[Row]) -> int:
    if isinstance(rows, RowBlock):
        return rows.weight + _ITEM_BYTES
    return len(rows) * (_row_bytes(rows[0]) + _ITEM_BYTES) if rows else _ITEM_BYTES


def _row_bytes(row: Row | None) -> int:
    return 0 if row is None else sum(map(len, row))


def read_snapshot(
    snapshot: Snapshot,
    handover: Handover[Work],
    *,
    workers: int,
    where: Mapping[str, str],
    is_over: Callable[[], bool],
) -> None:
    """Hand over all rows of a snapshot. Interrupted if `is_over` says so before the end."""
    tables = list(snapshot.tables)
    estimates = [snapshot.estimate(table) for table in tables]
    known = [number for number in estimates if number is not None]
    handover.put(SnapshotBegin(sum(known) if len(known) == len(tables) else None))
    left: SimpleQueue[Table] = SimpleQueue()
    # The largest first, so that no thread is left alone with it at the end.
    order = sorted(range(len(tables)), key=lambda at: -(estimates[at] or 0))
    for at in order:
        left.put(tables[at])
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not failures:
                _read_table(snapshot, left.get_nowait(), handover, where, is_over)
        except Empty:
            return
        except BaseException as error:
            failures.append(error)

    count = min(workers, len(tables))
    threads = [
        threading.Thread(target=work, name=f"penstock-snapshot-{number}", daemon=True)
        for number in range(1, count)
    ]
    for thread in threads:
        thread.start()
    work()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    names = [table.full_name for table in tables]
    handover.put(SnapshotEnd(snapshot.position, names))


def _read_table(
    snapshot: Snapshot,
    table: Table,
    handover: Handover[Work],
    where: Mapping[str, str],
    is_over: Callable[[], bool],
) -> None:
    source = snapshot.source(table)
    condition = next(
        (text for pattern, text in where.items() if fnmatchcase(table.full_name, pattern)), ""
    )
    for rows in snapshot.rows(table, where=condition):
        if is_over():
            raise Interrupted
        handover.put(SnapshotRows(table, rows, source), rows_weight(rows))
    handover.put(TableEnd(table, source))
