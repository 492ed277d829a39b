"""The seam: what an operator is, and what it is given.

**What is kept** is divided anew when a flow gets another number of shards, by people who know
nothing of the operator. So a table or value either has the columns by which the operator's rows are
spread, under the names that they have in its first input or as `_k0`, `_k1` and so on (then a
column `_nulls` may have a bit for each that is null, and anything in its place); or it is a value
that is the same in all shards; or one that may be lost, the name of which begins with `HINT`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from penstock.errors import PenstockError

if TYPE_CHECKING:
    import pyarrow as pa

    from penstock.spark.state.store import State

# With what the names of values begin that may be lost: they only spare work.
HINT: Final = "hint "
# With what the names of tables begin that hold rows which could not be worked on, and why.
SET_ASIDE: Final = "set aside"
# Which columns of a key are null, a bit for each.
NULLS: Final = "_nulls"
# An error of a task comes back as the text of its traceback: before the advice that it had.
ADVICE: Final = "advice: "


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


def processed(operator: Operator, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
    """What an operator gives, in a task."""
    try:
        return operator.process(shard, inputs)
    except PenstockError as error:
        if error.advice:
            error.add_note(ADVICE + error.advice)
        raise
