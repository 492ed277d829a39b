"""How far event time has come, in this micro-batch and in the one before."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from penstock.spark.state import Shard, watermark_of

# In batch: a constant column with the watermark at the end of the input.
WATERMARK: Final = "_watermark_end"
_NEVER: Final = -(1 << 62)
_ALWAYS: Final = 1 << 62
_CLOCK: Final = "clock"


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
        kept = shard.state.value(_CLOCK)
        before = kept["watermark_us"][0].as_py() if kept is not None and len(kept) else _NEVER
        # Time never goes back, not even if a partition is added to a topic.
        now = max(before, watermark_us(shard, inputs, whole=whole))
        return cls(now, before, allowed_us)

    def keep(self, shard: Shard) -> None:
        if self.watermark_us != self.watermark_before_us:
            shard.state.keep(_CLOCK, pa.table({"watermark_us": [self.watermark_us]}))
