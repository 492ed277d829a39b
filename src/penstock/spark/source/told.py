"""What tasks of a plan that is prepared once are told when a micro-batch runs.

A plan that is used again cannot contain what changes from one micro-batch to the next. So the
driver says it in a local property of Spark's, which travels with each job to all of its tasks, on
one machine and on a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import orjson

from penstock.errors import PenstockError
from penstock.spark.source.planning import Range

if TYPE_CHECKING:
    from pyspark import SparkContext

PROPERTY: Final = "penstock.batch"


class NotToldError(PenstockError):
    """A task of a prepared plan runs outside of a micro-batch."""

    advice = "This is a fault of Penstock: prepared plans are run by flows alone."


class ToldTooMuchError(PenstockError):
    """What a task was told to read is too large for one task."""

    advice = "The micro-batch is run by stages instead: nothing needs to be done."


@dataclass(frozen=True, slots=True)
class Told:
    """The micro-batch that a job is for."""

    batch_id: int
    # What is read of each stream, by its number in the flow.
    ranges: Mapping[int, Sequence[Range]] = field(default_factory=dict)
    # How many tasks tell of event time.
    timed: int = 0
    # That of the flow.
    checkpoint: str = ""

    def tell(self, context: SparkContext) -> None:
        """Say it to all jobs that this thread starts from now on."""
        ranges = {
            str(number): [[each.topic, each.partition, each.start, each.end] for each in some]
            for number, some in self.ranges.items()
        }
        said = {
            "batch_id": self.batch_id,
            "ranges": ranges,
            "timed": self.timed,
            "checkpoint": self.checkpoint,
        }
        context.setLocalProperty(PROPERTY, orjson.dumps(said).decode())


def told(checkpoint: str = "") -> Told:
    """What the task was told in which this is called; NotToldError if another flow said it."""
    from pyspark import TaskContext

    context: Any = TaskContext.get()
    text = None if context is None else context.getLocalProperty(PROPERTY)
    if text is None:
        raise NotToldError("a task of a prepared plan was not told which micro-batch it is for")
    said = orjson.loads(text)
    if said["checkpoint"] != checkpoint:
        raise NotToldError(
            f"a task of the flow with the checkpoint {checkpoint} was told what the one with "
            f"{said['checkpoint']} is to do"
        )
    ranges = {
        int(number): [Range(*each) for each in some] for number, some in said["ranges"].items()
    }
    return Told(said["batch_id"], ranges, said["timed"], checkpoint)


@dataclass(frozen=True, slots=True)
class ToldVersion:
    """The version of state that operators write: the number of the micro-batch."""

    checkpoint: str = ""

    def __call__(self) -> int:
        return told(self.checkpoint).batch_id
