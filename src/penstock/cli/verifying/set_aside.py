"""Keys of a source whose last record cannot be read: no store can hold what it says.

The last record of a key counts: one that can be read makes good the bad ones before it. Where
records are keyed otherwise than the rows (or not at all) their keys say nothing about that, so each
bad record counts for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.cli.verifying.checksums import Digest, Numbers, checksums
from penstock.spark.sinking.parsing import Parsed

# Reasons that are kept for people; all keys are counted.
MAX_REASONS: Final = 1000
_KEY: Final = [pa.field("key", pa.binary())]
_PLACE: Final = [pa.field("partition", pa.int32()), pa.field("offset", pa.int64())]


@dataclass(frozen=True, slots=True)
class SetAside:
    """A key, and why its last record cannot be read."""

    key: str
    reason: str
    partition: int
    offset: int


class AsideKeys:
    """Of one pass over the records of a source, in the order of the log."""

    def __init__(self) -> None:
        self._digest = Digest()
        self._reasons: dict[int, SetAside] = {}
        self._any = False

    def note(self, records: pa.Table, parsed: Parsed) -> None:
        """Take in records, of one partition, with what became of them."""
        bad = parsed.bad
        if bad.num_rows:
            self._any = True
        elif not self._any:
            return
        if parsed.by_row:
            numbers = _numbers(bad, _PLACE)
            self._digest.put(numbers, numbers)
        else:
            is_bad = np.isin(_offsets(records), _offsets(bad))
            keys = _numbers(records, _KEY)
            self._digest.add(keys, keys, gone=~is_bad)
            for key in np.intersect1d(keys[~is_bad], list(self._reasons)):
                del self._reasons[int(key)]
            numbers = _numbers(bad, _KEY)
        for key, row in zip(map(int, numbers), _rows(bad), strict=True):
            if key in self._reasons or len(self._reasons) < MAX_REASONS:
                self._reasons[key] = row

    def found(self) -> tuple[int, list[SetAside]]:
        """How many keys there are, and the first of them by their place in the log."""
        count = len(self._digest.sort(last_counts=True).keys)
        return count, sorted(self._reasons.values(), key=lambda each: (each.partition, each.offset))


def _numbers(rows: pa.Table, fields: list[pa.Field]) -> Numbers:
    parts = [
        checksums(batch, fields)
        for batch in rows.select([field.name for field in fields]).combine_chunks().to_batches()
    ]
    return np.concatenate(parts) if parts else np.zeros(0, np.uint64)


def _offsets(rows: pa.Table) -> NDArray[np.int64]:
    found: NDArray[np.int64] = pc.cast(rows.column("offset"), pa.int64()).to_numpy()
    return found


def _rows(bad: pa.Table) -> list[SetAside]:
    return [
        SetAside((row["key"] or b"").decode(errors="replace"), row["reason"], row["partition"],
                 row["offset"])
        for row in bad.to_pylist()
    ]  # fmt: skip
