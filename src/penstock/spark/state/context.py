"""Which micro-batch a flow's function is being called for.

A flow's function is called once for planning, on streams, and then for each micro-batch, on its
rows. In between operators have to find out where their state is: here. Outside of a flow there is
neither, and operators work over all rows at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock.spark.flows.shapes import Part
    from penstock.spark.state.packing import Packing

DEFAULT_SHARDS: Final = 4


@dataclass(slots=True)
class _Numbered:
    """Names for operators that have none: by kind, in the order in which they are called."""

    names: Counter[str] = field(default_factory=Counter)

    def name(self, kind: str) -> str:
        self.names[kind] += 1
        return f"{kind}-{self.names[kind]}"


@dataclass(frozen=True, slots=True)
class Read:
    """What operators have to know of a stream when its flow is planned."""

    # How late its records may be; None if it has no event time.
    lateness_us: int | None = None
    # Whether time passes in it when no records come.
    has_heartbeats: bool = False


@dataclass(slots=True)
class Planning(_Numbered):
    """The function is asked for its plan: what keeps state is noted down, and nothing is run."""

    # What each operator is, as text that changes if its state does.
    operators: list[str] = field(default_factory=list)
    # The names of those that keep rows until the watermark has passed them.
    waiting: list[str] = field(default_factory=list)
    # What its views are made of, as far as results depend on it.
    parts: list[Part] = field(default_factory=list)
    # Whether operators can set rows aside that cannot be computed.
    can_guard: bool = False
    # What the function is given of each stream, and which of them an operator takes as they are.
    streams: Sequence[DataFrame] = ()
    packed: set[int] = field(default_factory=set)
    # The streams by their topics.
    reads: Mapping[str, Read] = field(default_factory=dict)


@dataclass(slots=True)
class Batch(_Numbered):
    """The function is called for a micro-batch."""

    # Where states are: a path, or a URL of a store that all workers reach.
    folder: str = ""
    # Where the plan is prepared once: told when it runs.
    batch_id: int | Callable[[], int] = 0
    shards: int = DEFAULT_SHARDS
    # Before this event time nothing more is expected, microseconds; None if no input has a time.
    # What is known only while the micro-batch runs is asked for by its tasks.
    watermark_us: int | Callable[[], int] | None = None
    # Whether there is so little to do that operators that follow each other share a task.
    together: bool = False
    # Whether the plan is prepared once, so that nothing may be shuffled: a single task does it all.
    prepared: bool = False
    # Whether rows that cannot be computed are set aside.
    guarded: bool = False
    # What was applied, by the name of its state.
    made: dict[str, DataFrame] = field(default_factory=dict)
    # By which columns, of which types, their rows are spread.
    keys: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    # What the function is given of each stream; by their numbers what stands for those that the
    # source can pack, and how operators want them to be.
    streams: Sequence[DataFrame] = ()
    packable: Mapping[int, DataFrame] = field(default_factory=dict)
    packings: dict[int, Packing] = field(default_factory=dict)


_current: ContextVar[Planning | Batch | None] = ContextVar("_current", default=None)


def current() -> Planning | Batch | None:
    """What the function is called for; None outside of a flow."""
    return _current.get()


@contextmanager
def entered(context: Planning | Batch) -> Iterator[None]:
    """While a flow's function is called."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)
