"""How far a store is behind its topic: in records, and in seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Final

from penstock.client.metadata import LATEST, Metadata, offsets
from penstock.client.reading import read_batches
from penstock.errors import PenstockError
from penstock.sinks.contract import Position
from penstock.spark.flows.inputs import Place

log = logging.getLogger(__name__)

UNREAD_TIMEOUT_S: Final = 10.0


def ends_of(place: Place, topics: set[str]) -> dict[tuple[str, int], int]:
    """Where the logs of topics end now."""
    if not topics:
        return {}
    with place.cluster() as cluster:
        metadata = Metadata(cluster)
        there = metadata.topics(sorted(map(place.resolve, topics)))
        wanted = [(topic, number) for topic in there for number in metadata.partitions(topic)]
        return offsets(
            cluster, dict.fromkeys(wanted, LATEST), isolation="read_committed", metadata=metadata
        )


def unread_since(
    place: Place, topic: str, at: Position, ends: Mapping[tuple[str, int], int]
) -> float | None:
    """When the oldest record was written that a store lacks, in seconds since 1970."""
    behind = {
        number: at.offsets.get((name, number), 0)
        for (name, number), end in ends.items()
        if name == topic and at.offsets.get((name, number), 0) < end
    }
    oldest: list[float] = []
    if not behind:
        return None
    try:
        with place.cluster() as cluster:
            seen: set[int] = set()
            for number, batch in read_batches(
                cluster, topic, start={n: o for n, o in behind.items() if o},
                partitions=sorted(behind), timeout_s=UNREAD_TIMEOUT_S,
            ):  # fmt: skip
                if number not in seen:
                    seen.add(number)
                    oldest.append(batch.column("timestamp")[0].as_py().timestamp())
                if len(seen) == len(behind):
                    break
    except PenstockError as error:
        log.debug("the log does not say since when %s is behind: %s", topic, error)
    return min(oldest, default=None)


def lag_of(
    at: Position, ends: Mapping[tuple[str, int], int], topic: str, newest_s: float
) -> tuple[int, float | None]:
    """Records that a store lacks, and for how many seconds it has; None if nobody knows."""
    behind = sum(
        max(0, end - at.offsets.get(place, 0)) for place, end in ends.items() if place[0] == topic
    )
    if behind == 0:
        return 0, 0.0
    return behind, max(0.0, time.time() - newest_s) if newest_s else None
