"""State that scales: columnar, in shards by key, one Spark task per shard and micro-batch.

Spark's own state is slow from Python (a row at a time), so what keeps state here does it by
columns. An **operator** is a plain object that is sent to the tasks. Its rows are brought together
by key (`apply`), each task has one **shard** of the keys, and is given all rows of the micro-batch
for it at once, as Arrow tables, together with what it kept of the micro-batches before.

**Versions.** State is written under the number of the micro-batch, beside Spark's checkpoint, and
never changed afterwards. Micro-batch *b* starts from the newest version before *b*, so running it
again, in whole or a single task of it, gives the same: the state is exactly as good as the
operator is deterministic. Output and state belong to the same number; the sink decides whether a
number was written. What an operator gives may depend on its rows, its state and the watermark, and
on nothing else: no clock, no randomness, no order of arrival (rows come sorted by their place in
the log).

**In batch.** Over an ordinary DataFrame, outside of a flow, the same operator sees all rows as one
micro-batch that starts from nothing, and nothing is kept.
"""

from __future__ import annotations

from penstock.spark.state.applying import apply
from penstock.spark.state.context import Batch, Planning, current, entered
from penstock.spark.state.operator import Operator, Shard
from penstock.spark.state.store import KeyedTable, State
from penstock.spark.state.time import corrected, marked, watermark_of

__all__ = [
    "Batch",
    "KeyedTable",
    "Operator",
    "Planning",
    "Shard",
    "State",
    "apply",
    "corrected",
    "current",
    "entered",
    "marked",
    "watermark_of",
]
