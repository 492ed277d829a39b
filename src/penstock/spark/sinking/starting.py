"""Where a sink begins to read, and whether the log still has all that its store lacks.

What is not there any more can never come into the store: then it is better to stop, and to say so,
than to go on with a store that differs from its source. These are looked for:
- the topic is another one than the store was filled from: deleted and made again, or of the same
  name in another cluster, where offsets are other ones. It has another id than the store or, of old
  stores, the sink's folder knows; or it ends before the store's position;
- the store was filled from another topic;
- records after the position were deleted (retention);
- deletions after the position may have been compacted away: a compacted topic keeps a tombstone for
  `delete.retention.ms` only, and the store has not been fed for longer than that.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NoReturn

from penstock.client.connection import Cluster
from penstock.client.metadata import EARLIEST, LATEST, NO_OFFSET, Metadata, offsets
from penstock.client.migration_map import find
from penstock.client.topics import configs
from penstock.sinks.contract import Position
from penstock.spark.sinking.errors import RecordsGoneError, TopicReplacedError


@dataclass(frozen=True, slots=True)
class Store:
    """A store that is to be fed further."""

    sink: str
    target: str
    position: Position
    # The id of the topic that it was filled from, if it does not know that itself.
    topic_id: str = ""
    # The cluster that it was fed from last, if that is known.
    cluster: str = ""
    # When it was brought to this position, in seconds since 1970, or later; 0 if nobody knows.
    fed_s: float = 0.0


def starting(
    cluster: Cluster, metadata: Metadata, topic: str, store: Store
) -> dict[str, dict[str, int]]:
    """Where to begin in each partition: where the store is, or at the log's start."""
    places = [(topic, number) for number in metadata.partitions(topic)]
    first, ends = (
        offsets(
            cluster, dict.fromkeys(places, which), isolation="read_committed", metadata=metadata
        )
        for which in (EARLIEST, LATEST)
    )
    at = store.position.offsets
    others = {name for name, _ in at} - {topic}
    if others:
        told = f"{store.target} was filled from {', '.join(sorted(others))}"
        _replaced(store, f"{told}, and is now to be fed from {topic}")
    if at and is_other(metadata, topic, store):
        told = f"{topic} is not the topic that {store.target} was filled from: "
        if store.cluster and store.cluster != metadata.cluster_id():
            told += f"this is another cluster than the one it was fed from ({store.cluster})"
        else:
            told += "it was deleted and made again, or this is another cluster"
        _replaced(store, told)
    for place, offset in at.items():
        if offset > ends.get(place, 0):
            _replaced(
                store,
                f"{store.target} is at offset {offset} of {place[0]}-{place[1]}, whose log ends at "
                f"{ends.get(place, 0)}: the topic was deleted and made again, or has lost its end",
            )
        if offset < first.get(place, 0):
            raise RecordsGoneError(
                f"{store.target} is at offset {offset} of {place[0]}-{place[1]}, whose log begins "
                f"at {first[place]} now: the changes between were deleted before they were read",
                advice=f"`penstock sinks rebuild {store.sink}` builds it from what is there. A "
                "topic that is compacted, or keeps its records for longer, does not lose them.",
            )
    _check_tombstones(cluster, metadata, topic, store, ends)
    return {topic: {str(number): at.get((name, number), EARLIEST) for name, number in places}}


def is_other(metadata: Metadata, topic: str, store: Store) -> bool:
    """Whether a topic is another one than a store was filled from, as far as ids tell."""
    known_id = store.position.ids.get(topic) or store.topic_id
    return bool(known_id) and known_id != str(metadata.topic_id(topic))


def carried(cluster: Cluster, metadata: Metadata, topic: str, store: Store) -> Position | None:
    """The position of a store in the cluster to which its topic was moved; None if it was not.

    A position that the move has not reached is an error: records are still to come.
    """
    if not store.position.offsets or not is_other(metadata, topic, store):
        return None
    move = find(cluster, {topic: store.position.ids.get(topic) or store.topic_id}).get(topic)
    if move is None:
        return None
    offsets = {number: at for (name, number), at in store.position.offsets.items() if name == topic}
    missing = move.missing(offsets)
    if missing:
        part, at = next(iter(missing.items()))
        raise TopicReplacedError(
            f"{store.target} has {topic}-{part} up to offset {at} of the cluster before, of which "
            f"{move.positions.get(part, 0)} were moved here",
            advice="Run `penstock migrate` once more, and start again.",
        )
    there = move.translated(cluster, offsets)
    return Position(
        {(topic, part): at for part, at in there.items()}, {topic: str(metadata.topic_id(topic))}
    )


def _replaced(store: Store, told: str) -> NoReturn:
    raise TopicReplacedError(
        told, advice=f"`penstock sinks rebuild {store.sink}` builds it from the topic."
    )


def _check_tombstones(
    cluster: Cluster,
    metadata: Metadata,
    topic: str,
    store: Store,
    ends: Mapping[tuple[str, int], int],
) -> None:
    behind = {p: at for p, at in store.position.offsets.items() if 0 < at < ends.get(p, 0)}
    if not behind:
        return
    settings = configs(cluster, topic)
    if "compact" not in (settings.get("cleanup.policy") or ""):
        return
    kept_s = int(settings.get("delete.retention.ms") or 86_400_000) / 1000
    oldest_s = time.time() - kept_s
    if store.fed_s > oldest_s:
        return
    # The first record that is young enough for its tombstone to be there, if it was one.
    young = offsets(
        cluster, dict.fromkeys(behind, int(oldest_s * 1000)), isolation="read_committed",
        metadata=metadata,
    )  # fmt: skip
    for place, at in behind.items():
        if young[place] == NO_OFFSET or young[place] > at:
            raise RecordsGoneError(
                f"{store.target} was not fed for longer than {topic} keeps tombstones "
                f"(delete.retention.ms, {kept_s:.0f} s): rows may have been deleted after offset "
                f"{at} of {place[0]}-{place[1]} without a trace",
                advice=f"`penstock sinks rebuild {store.sink}` builds it from the topic.",
            )
