"""To which partition a key goes: the same one that every other Kafka client chooses.

The hash is murmur2 as Kafka's Java client computes it, and librdkafka's `murmur2_random`, so that
records of a key stay together, whoever writes them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from penstock.records.columns import kernels
from penstock.records.columns.layout import ColumnsError, as_binary, table_of


def partitions_of(keys: pa.Array, count: int) -> Any:
    """The partition of each key among `count`, as an int32 array; -1 where a key is null, for the
    caller to place as it likes."""
    if count < 1:
        raise ColumnsError(f"keys cannot be placed in {count} partitions")
    column = as_binary(keys, "keys")
    placed = np.empty(len(column), np.int32)
    kernels.place(len(column), table_of(column)[0], count, placed)
    return placed
