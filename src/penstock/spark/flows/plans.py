"""What a flow comes to when its function is asked for its DataFrames: the plan, and its checks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from penstock.spark.flows import planning
from penstock.spark.flows.declare import Flow, Stream, Topic
from penstock.spark.flows.errors import UserCodeError
from penstock.spark.flows.outputs import DELETED
from penstock.spark.flows.versions import physical
from penstock.spark.state.bounds import warn_unbounded
from penstock.spark.state.context import Planning, Read

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock.spark.flows.folder import Fingerprint
    from penstock.spark.flows.inputs import Place
    from penstock.spark.runtime.micro_batches import Source

# What rows have for the topic, and not in it.
_NO_COLUMNS: Final = frozenset({"_key", DELETED})


@dataclass(frozen=True, slots=True)
class Plan:
    """What a flow comes to: how it is run, and what its checkpoint depends on."""

    fingerprint: Fingerprint
    # What keeps state by operators of ours; None if nothing does.
    operated: Planning | None
    # The one plan of a flow that Spark runs as a stream; None if its micro-batches are run here.
    rows: DataFrame | None = None
    # What is read for these.
    sources: Sequence[Source] = ()
    # The folder where the source tells how far event time has come; None if it does not.
    watch: str | None = None
    # Whether each stream is read once in a micro-batch, and wholly.
    reads_each_once: bool = False
    # The columns of what goes to topics, with their types.
    columns: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    # The topics of change events whose old rows are used.
    old_rows: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class BatchOf:
    """What an output is told of a micro-batch."""

    flow: str
    batch_id: int
    checkpoint: str
    # Where the log is, for what an output puts aside.
    place: Place
    # Whether the output is being built anew, beside the one that counts.
    is_rebuild: bool = False


def reads_of(streams: Sequence[Stream], resolve: Callable[[str], str]) -> dict[str, Read]:
    """The streams by their topics; of one that is read twice what holds for both.

    Heartbeats stand in the log: it is enough if one of the two asks for them.
    """
    found: dict[str, Read] = {}
    for each in streams:
        name = resolve(each.topic)
        lateness = None if each.time is None else each.lateness_us
        read = Read(lateness, each.idle_us is not None)
        other = found.get(name, read)
        both = [late for late in (read.lateness_us, other.lateness_us) if late is not None]
        beats = read.has_heartbeats or other.has_heartbeats
        found[name] = Read(min(both, default=None), beats)
    return found


def check_streaming(flow: Flow, results: Mapping[str, DataFrame]) -> None:
    """UserCodeError for rows that are made from no stream."""
    for name, rows in results.items():
        if not rows.isStreaming:
            raise UserCodeError(
                f"{flow.where}: flow {flow.name!r} returns rows that come from no "
                f"stream{f', as {name!r}' if name else ''}",
                advice="Let what it returns be made from at least one of its streams.",
            )


def refuse_both(flow: Flow, by_us: Sequence[str], by_spark: Sequence[str]) -> None:
    """State is kept by operators of ours, or by Spark's, and not by both."""
    ours = ", ".join(each.split(":")[0] for each in by_us)
    theirs = ", ".join(sorted({each.split(" ")[0] for each in by_spark})) or "sorting or limits"
    raise UserCodeError(
        f"{flow.where}: flow {flow.name!r} keeps state by Penstock's operators "
        f"({ours}) and by Spark's own ({theirs}): the first are run on each micro-batch, where "
        "the second would begin anew each time",
        advice="Make two flows of it, with a topic between them, or use Penstock's windows, "
        "joins and views for both.",
    )


def warn_of_spark(flow: Flow, results: Iterable[DataFrame]) -> None:
    """Warn of operators of Spark's that keep all that they have seen."""
    names = sorted({name for rows in results for name in planning.unbounded(rows)})
    if names:
        warn_unbounded(
            f"flow {flow.name!r}: Spark's {', '.join(names)} keeps what it has seen for "
            "ever, since no watermark says until when",
            "Give the rows one, with withWatermark, or use Penstock's windows, joins or views.",
            where=flow.where,
        )


def columns_of(
    flow: Flow, generation: int, results: Mapping[str, DataFrame]
) -> dict[str, dict[str, str]]:
    """The columns of what goes to topics, with their types."""
    return {
        physical(output.name, generation): {
            each.name: each.dataType.simpleString()
            for each in results[name].schema
            if each.name not in _NO_COLUMNS
        }
        for name, output in flow.outputs.items()
        if isinstance(output, Topic) and output.format != "raw"
    }


def old_rows_of(flow: Flow, results: Iterable[DataFrame]) -> tuple[str, ...]:
    """The topics of change events, if what is computed needs the old rows."""
    topics = tuple(each.topic for each in flow.streams if each.reading.format == "debezium")
    return topics if topics and planning.uses_old_rows(results) else ()
