"""Rows that wait in the state until the watermark has passed their time.

Two streams have no common order but time. Who wants to know what was valid in one of them at the
time of a row of the other lets both wait: what has a time before the watermark is complete, and is
*released*, in the order of the log; the rest stays. A row that has no time was always there, and
waits for nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from penstock.spark.state.applying import in_order
from penstock.spark.state.numbering import whole

if TYPE_CHECKING:
    from penstock.spark.state.operator import Shard


def released(
    shard: Shard, name: str, fresh: pa.Table | None, time: str, passed_us: int | None
) -> pa.Table | None:
    """The rows that the watermark has passed; the others wait in the state. None: it passed all.

    What waited came first, but may stand behind the others in the log.
    """
    waiting = shard.state.value(name)
    if waiting is not None and not len(waiting):
        waiting = None
    given = [plain(each) for each in (waiting, fresh) if each is not None]
    if not given:
        return None
    rows = pa.concat_tables(given) if len(given) > 1 else given[0]
    is_sorted = waiting is None
    if passed_us is None:
        return rows
    ready = micros(rows[time]) < passed_us
    if ready.all():
        if waiting is not None:
            shard.state.keep(name, rows.slice(0, 0))
        return rows if is_sorted else in_order(rows)
    if fresh is not None or ready.any():
        shard.state.keep(name, rows.filter(pa.array(~ready)).combine_chunks())
    there = rows.filter(pa.array(ready))
    return there if is_sorted else in_order(there)


def micros(column: pa.ChunkedArray) -> Any:
    """Times as numbers; what has none was always there."""
    times = whole(column)
    found = times.cast(pa.timestamp("us", times.type.tz)).cast(pa.int64())
    return writable(found, np.iinfo(np.int64).min)


def writable(column: pa.Array, missing: int) -> Any:
    """Numbers as kernels take them, which is writable."""
    filled = column.fill_null(missing).to_numpy(zero_copy_only=False)
    return np.require(filled, requirements=["W"])


def plain(rows: pa.Table) -> pa.Table:
    """All columns may be null: whether they are is of no use here, and tables have to fit."""
    return pa.table(rows.columns, names=rows.column_names)
