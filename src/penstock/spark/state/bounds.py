"""What bounds what is kept: what is known of streams when a flow is planned, and a warning.

Most operators are bounded by what they must be given: a size, a gap, a time within which something
counts. Where a definition leaves it open, whoever declares it is told, with the place and what to
do, once for each place. In batch nothing is kept, and nobody is warned.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final

from penstock.spark.flows.planning import topics_of
from penstock.spark.places import caller
from penstock.spark.state.context import Planning, Read, current

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


class UnboundedStateWarning(UserWarning):
    """Something whose definition does not bound what has to be kept."""


# What was told where, as Python keeps it for each module: a flow that starts again says nothing.
_registry: Final[dict[str | tuple[str, type[Warning], int], int]] = {}


def warn_unbounded(what: str, advice: str, *, where: str = "") -> None:
    """Tell of state without a bound, at the line that declares it, if a flow is being planned."""
    if not isinstance(current(), Planning):
        return
    filename, _, line = (where or caller()).rpartition(":")
    warnings.warn_explicit(
        f"{what}. {advice}",
        UnboundedStateWarning,
        filename or "<flow>",
        int(line or 0),
        registry=_registry,
    )


def warn_of_rest(
    planned: Planning, flow: str, where: str, partitions: Callable[[str], int]
) -> None:
    """Tell of a flow whose operators keep all that comes while the watermark stands still.

    It does so while one partition of one timed stream rests, and rows go on coming in another:
    where there is one partition in all, nothing comes meanwhile. `partitions` asks how many a topic
    has now. There is always an answer, since a flow is not planned before its topics are there, and
    one that is given more later is told of when the flow starts again.
    """
    if not planned.waiting:
        return
    who = f"flow {flow!r}: {_listed(planned.waiting)} keep{'' if planned.waiting[1:] else 's'}"
    timed = {each: read for each, read in planned.reads.items() if read.lateness_us is not None}
    resting = sorted(each for each, read in timed.items() if not read.has_heartbeats)
    if not timed:
        warn_unbounded(
            f"{who} all that comes for ever, since no stream of the flow has an event time",
            'Give one to the stream, as in stream(..., time="at", idle="30 seconds").',
            where=where,
        )
    elif resting and (len(timed) > 1 or partitions(resting[0]) > 1):
        warn_unbounded(
            f"{who} all that comes while a partition of {_listed(map(repr, resting), 'or')} rests "
            "and others go on, since the watermark waits for it",
            f"Give the stream{'s' if resting[1:] else ''} heartbeats, as in "
            'stream(..., idle="30 seconds").',
            where=where,
        )


def _listed(names: Iterable[str], last: str = "and") -> str:
    *others, end = names
    return f"{', '.join(others)} {last} {end}" if others else end


def reads_of(rows: DataFrame) -> dict[str, Read]:
    """The streams that rows come from, by topic; none if no flow is being planned."""
    context = current()
    if not isinstance(context, Planning):
        return {}
    return {each: context.reads[each] for each in topics_of(rows) if each in context.reads}
