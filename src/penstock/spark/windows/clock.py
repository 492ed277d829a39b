"""How far event time has come, in this micro-batch and in the one before.

Whatever goes by event time asks here whether a row is a *stray*: one before the watermark of the
micro-batch before, when all before it was taken for complete. Records of the log never are (they
are late then, and put aside), but rows that come out of another operator may be, with a time of
long ago. What is said of them would depend on where micro-batches end, so they are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.spark.state import Shard, watermark_of
from penstock.spark.windows.errors import STRAY, WindowError
from penstock.spark.windows.grouping import Bools, Ints

# In batch: a constant column with the watermark at the end of the input.
WATERMARK: Final = "_watermark_end"
_NEVER: Final = -(1 << 62)
_ALWAYS: Final = 1 << 62
_CLOCK: Final = "clock"
_TIME: Final = pa.timestamp("us", "UTC")


def watermark_us(shard: Shard, inputs: Mapping[str, pa.Table], *, whole: bool) -> int:
    """Before it nothing more comes. `whole`: all rows are here, unless a column says otherwise."""
    found = watermark_of(inputs, shard)
    if found is not None:
        return found
    return _ALWAYS if whole else _NEVER


@dataclass(frozen=True)
class Clock:
    """The watermark, and up to when windows are due."""

    watermark_us: int
    watermark_before_us: int
    allowed_us: int

    @property
    def due_us(self) -> int:
        return self.watermark_us + self.allowed_us

    @property
    def due_before_us(self) -> int:
        return self.watermark_before_us + self.allowed_us

    @classmethod
    def of(
        cls, shard: Shard, inputs: Mapping[str, pa.Table], *, whole: bool, allowed_us: int = 0
    ) -> Clock:
        return cls.at(shard, watermark_us(shard, inputs, whole=whole), allowed_us=allowed_us)

    @classmethod
    def at(cls, shard: Shard, watermark_us: int, *, allowed_us: int = 0) -> Clock:
        """The same where the watermark is known."""
        kept = shard.state.value(_CLOCK)
        before = kept["watermark_us"][0].as_py() if kept is not None and len(kept) else _NEVER
        # Time never goes back, not even if a partition is added to a topic.
        return cls(max(before, watermark_us), before, allowed_us)

    def refuse_strays(self, at: Ints, of: Bools | None = None) -> None:
        """WindowError if the time of a row is before the watermark of the micro-batch before.

        `of` says which rows are strays where some that are before it do no harm.
        """
        strays = at[at < self.watermark_before_us if of is None else of]
        if len(strays):
            raise WindowError(
                f"an event of {_told(int(np.min(strays)))} came although the watermark says that "
                f"nothing before {_told(self.watermark_before_us)} would",
                advice=STRAY,
            )

    def keep(self, shard: Shard) -> None:
        if self.watermark_us != self.watermark_before_us:
            shard.state.keep(_CLOCK, pa.table({"watermark_us": [self.watermark_us]}))


def _told(at_us: int) -> str:
    return str(pa.scalar(at_us, _TIME).as_py())
