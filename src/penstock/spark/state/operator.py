"""The seam: what an operator is, and what it is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.spark.state.store import State


@dataclass(frozen=True, slots=True)
class Shard:
    """What one task works on in one micro-batch."""

    number: int
    count: int
    # Of the micro-batch; 0 in batch.
    version: int
    # Nothing before this event time is expected any more, microseconds; None if there is no time.
    watermark_us: int | None
    state: State


class Operator(Protocol):
    """Something that keeps state by key. Sent to the tasks, so it must be picklable and small."""

    @property
    def kind(self) -> str:
        """One word for people, such as "pattern"; also the name of its folder."""
        ...

    @property
    def describes(self) -> str:
        """What it does, in words that change whenever its state would not fit any more."""
        ...

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        """All rows of a micro-batch for one shard, by the names of the inputs: what comes out.

        Called for each shard in each micro-batch, also without rows: time may have passed.
        """
        ...
