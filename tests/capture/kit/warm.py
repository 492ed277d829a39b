"""Imported by the process that captures are forked from: what is slow the first time is done here.

pyarrow looks for pandas when it makes its first array, and compiled kernels are read from their
cache when they are first called; a process that lives for half a second need not do either.
"""

from __future__ import annotations

import pyarrow as pa

import penstock.capture.kernels  # noqa: F401
from penstock.records.columns.decode import decode
from penstock.records.columns.encode import encode
from penstock.records.columns.partition import partitions_of


def warm_up() -> None:
    column = pa.array([b"a", b"b"], pa.binary())
    partitions_of(column, 2)
    for producer in (None, (1, 0, 0)):
        for packed in encode(
            column,
            column,
            timestamps_ms=0,
            codec="lz4",
            producer=producer,
            transactional=producer is not None,
        ):
            decode(packed.data, first_offset=0, headers=True)


warm_up()
