"""Which store a sink writes to when it is started, and in which version of its topic it stands.

A flow that is rebuilt writes its topic anew, as another version. A store that was filled from the
one before is fed from there until it was rebuilt; `behind` says so. One that cannot be rebuilt may
begin anew, at the beginning or at the end. And in a captured table that is altered other columns
may come: what is done then is the sink's choice.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from penstock.client.connection import Cluster
from penstock.client.metadata import LATEST, Metadata, offsets
from penstock.client.table_schemas import TableSchema
from penstock.sinks.contract import ORIGIN, Changes, Position, Sink
from penstock.sinks.schema import Schema
from penstock.sinks.spec import SinkSpec
from penstock.spark.flows.errors import UnknownTopicError
from penstock.spark.flows.schema_changes import compare
from penstock.spark.flows.versions import Behind, is_version
from penstock.spark.sinking.errors import TableAlteredError

log = logging.getLogger(__name__)

BEGINNING: Final = "beginning"
END: Final = "end"


@dataclass(frozen=True, slots=True)
class Opening:
    """A store, and the topic to feed it from."""

    sink: Sink
    topic: str
    # If that is an older version than the one that counts.
    behind: Behind | None = None


def anew_advice(sink: str, present: str) -> str:
    """What to do about a sink that cannot be built anew beside itself."""
    return (
        f"`penstock sinks rebuild {sink} --from {BEGINNING}` sends all of {present} to it, "
        f"`--from {END}` only what comes from then on."
    )


def opening(spec: SinkSpec, present: str, *, rebuild: bool = False, anew: str = "") -> Opening:
    """The store to write to; `present` is the version of the topic that counts.

    With `anew` a sink that cannot be rebuilt forgets what it has sent: see `skip`.
    """
    sink = spec.sink()
    if anew:
        sink.remove()
    if rebuild:
        with sink as live:
            beside = live.beside()
            if _older(beside, spec.topic, present) is not None:
                # It was begun from a version that was itself rebuilt since.
                beside.close()
                beside = live.beside(fresh=True)
        beside.max_refused = spec.max_dead_letters
        return Opening(beside, present)
    behind = _older(sink, spec.topic, present)
    return Opening(sink, present if behind is None else behind.reads, behind)


def check_there(opened: Opening, sink: str, metadata: Metadata) -> None:
    """UnknownTopicError if the older version that a store is fed from is gone."""
    behind = opened.behind
    if behind is None or behind.reads in metadata.topics([behind.reads]):
        return
    raise UnknownTopicError(
        f"{opened.sink.target} was filled from {behind}, and it is gone",
        advice="It goes on with the new one when it is rebuilt from there, which has begun by "
        "itself."
        if opened.sink.rebuildable
        else anew_advice(sink, behind.present),
    )


def _older(sink: Sink, topic: str, present: str) -> Behind | None:
    """Whether a store was filled from an older version of the topic."""
    at = sink.position()
    topics = {name for name, _ in at.offsets} if at is not None else set()
    if len(topics) != 1:
        return None
    [read] = topics
    return Behind(topic, read, present) if read != present and is_version(read, topic) else None


def skip(sink: Sink, schema: Schema, cluster: Cluster, metadata: Metadata, topic: str) -> Position:
    """Take all that is in the topic for done, of a store that was just opened; where that is."""
    places = dict.fromkeys(((topic, number) for number in metadata.partitions(topic)), LATEST)
    ends = offsets(cluster, places, isolation="read_committed", metadata=metadata)
    position = Position(ends, {topic: str(metadata.topic_id(topic))})
    nothing = ORIGIN.empty_table()
    changes = Changes(
        schema.arrow.empty_table(), schema.key_arrow.empty_table(), position, Position(),
        nothing, nothing,
    )  # fmt: skip
    sink.apply(changes, lambda refused: None)
    return position


def tell_altered(
    spec: SinkSpec, known: Mapping[int, TableSchema | None], schema: TableSchema
) -> None:
    """Say what has changed in a captured table; TableAlteredError if the sink is to stop then."""
    before = [each for each in known.values() if each is not None and each.table == schema.table]
    change = compare(before[-1], schema) if before else None
    if change is None:
        return
    told = f"sink {spec.name!r}: {change}"
    if spec.on_schema_change == "stop":
        raise TableAlteredError(
            told,
            advice=f"`penstock sinks resume {spec.name}`, or the next start, goes on and follows "
            f"it. {change.snapshot_advice}".strip(),
        )
    log.warning("%s", " ".join(filter(None, (f"{told}.", change.snapshot_advice))))
