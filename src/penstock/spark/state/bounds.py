"""What bounds what is kept: what is known of streams when a flow is planned, and a warning.

Most operators are bounded by what they must be given: a size, a gap, a time within which something
counts. Where a definition leaves it open, whoever declares it is told, with the place and what to
do, once for each place. In batch nothing is kept, and nobody is warned.
"""

from __future__ import annotations

import warnings
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


def reads_of(rows: DataFrame) -> dict[str, Read]:
    """The streams that rows come from, by topic; none if no flow is being planned."""
    context = current()
    if not isinstance(context, Planning):
        return {}
    return {each: context.reads[each] for each in topics_of(rows) if each in context.reads}
