"""Where the log stands, asked from the driver: partitions, their starts and ends.

Offsets are written as the JVM connector writes them: `{"orders": {"0": 23}}`.

One connection per broker is kept for the life of the query. Which partitions there are is asked
once a second at most (`partition.metadata.cache.ttl.ms`), their ends with one request per leader.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any, Final
from uuid import UUID

from penstock.client.connection import Cluster
from penstock.client.metadata import NO_OFFSET, Isolation, Metadata, offsets
from penstock.spark.source.errors import OptionError, SourceError
from penstock.spark.source.options import (
    EARLIEST,
    LATEST,
    Access,
    Limit,
    Options,
    Place,
    Positions,
)

# How long a topic that is not there may still appear: news of it need time to spread.
_APPEAR_S: Final = 2.0
_PAUSE_S: Final = 0.1
_SHOWN_MAX: Final = 5


def to_json(positions: Mapping[Place, int]) -> dict[str, dict[str, int]]:
    """The form in which Spark keeps positions in the checkpoint."""
    told: dict[str, dict[str, int]] = {}
    for (topic, number), offset in sorted(positions.items()):
        told.setdefault(topic, {})[str(number)] = offset
    return told


def from_json(told: Mapping[str, Mapping[str, Any]]) -> Positions:
    """What `to_json` wrote; SourceError if a checkpoint holds something else."""
    try:
        return {
            (topic, int(number)): int(offset)
            for topic, numbers in told.items()
            for number, offset in numbers.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise SourceError(
            f"the checkpoint holds {told!r} where offsets should be",
            advice="It was written by another source: use a checkpoint folder of this query's own.",
        ) from error


def connect(access: Access) -> Cluster:
    """A cluster as the options describe it."""
    return Cluster(
        access.bootstrap,
        client_id=access.client_id,
        timeout_s=access.timeout_s,
        security=access.security,
    )


def isolation_of(access: Access) -> Isolation:
    return "read_committed" if access.read_committed else "read_uncommitted"


def show(places: Iterable[Place]) -> str:
    """`orders-0, orders-1 and 7 more`."""
    names = [f"{topic}-{number}" for topic, number in sorted(places)]
    more = f" and {len(names) - _SHOWN_MAX} more" if len(names) > _SHOWN_MAX else ""
    return ", ".join(names[:_SHOWN_MAX]) + more


class Log:
    """The log as one query sees it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._cluster = connect(options.access)
        timeout_s = options.access.timeout_s
        self._metadata = Metadata(self._cluster, timeout_s=timeout_s)
        self._isolation = isolation_of(options.access)
        self._places: frozenset[Place] = frozenset()
        self._asked_at = float("-inf")
        self.topic_ids: dict[str, UUID] = {}

    def close(self) -> None:
        with suppress(OSError):
            self._cluster.close()

    # ---- partitions ----------------------------------------------------------------------

    def places(self, *, fresh: bool = False) -> frozenset[Place]:
        """The partitions that the options choose, of those that there are."""
        age_s = time.monotonic() - self._asked_at
        if fresh or age_s >= self._options.metadata_ttl_s:
            self._places = self._ask()
            self._asked_at = time.monotonic()
        return self._places

    def chosen(self) -> frozenset[Place]:
        """The same at the start of a query, where what is named must be there."""
        deadline = time.monotonic() + _APPEAR_S
        while True:
            found = self.places(fresh=True)
            missing = self._missing(found)
            if not missing:
                return found
            if time.monotonic() > deadline:
                raise SourceError(
                    f"{missing} at {self._options.access.bootstrap}",
                    advice="Create it (`penstock topics create`), or look at the name.",
                )
            time.sleep(_PAUSE_S)

    def _missing(self, found: frozenset[Place]) -> str | None:
        topics = self._options.topics
        there = {topic for topic, _ in found}
        for name in topics.names:
            if name not in there:
                return f"there is no topic {name!r}"
        gone = topics.assigned - found
        if gone:
            return f"there is no partition {show(gone)}"
        return None

    def _ask(self) -> frozenset[Place]:
        topics = self._options.topics
        if topics.pattern is not None:
            import re

            # Anywhere in the name, as the connector matches.
            search = re.compile(topics.pattern).search
            names = [name for name in self._metadata.topics() if search(name)]
        else:
            wanted = topics.names or {topic for topic, _ in topics.assigned}
            names = self._metadata.topics(sorted(wanted))
        self.topic_ids = {name: self._metadata.topic_id(name) for name in names}
        found = frozenset(
            (name, number) for name in names for number in self._metadata.partitions(name)
        )
        return found & topics.assigned if topics.assigned else found

    # ---- offsets -------------------------------------------------------------------------

    def offsets(self, wanted: Mapping[Place, int]) -> Positions:
        """Starts (EARLIEST), ends (LATEST) or the first offsets of a time, by one request each."""
        if not wanted:
            return {}
        return offsets(
            self._cluster,
            wanted,
            isolation=self._isolation,
            metadata=self._metadata,
            timeout_s=self._options.access.timeout_s,
        )

    def earliest(self, places: Iterable[Place]) -> Positions:
        return self.offsets(dict.fromkeys(places, EARLIEST))

    def latest(self, places: Iterable[Place]) -> Positions:
        return self.offsets(dict.fromkeys(places, LATEST))

    def resolve(self, limit: Limit, *, starting: bool) -> Positions:
        """The offsets that a limit stands for now."""
        places = self.chosen()
        if limit.everywhere is not None:
            wanted = dict.fromkeys(places, limit.everywhere)
        else:
            wanted = dict(limit.places)
            _check_named(limit, wanted.keys(), places)
        if limit.by_time:
            return self._at_times(limit, wanted, starting=starting)
        found = self.offsets({place: offset for place, offset in wanted.items() if offset < 0})
        exact = {place: offset for place, offset in wanted.items() if offset >= 0}
        ends = self.latest(exact)
        for (topic, number), offset in sorted(exact.items()):
            if offset > ends[topic, number]:
                raise OptionError(
                    f"{limit.option} of {topic}-{number} is {offset}, and its log ends at "
                    f"{ends[topic, number]}",
                    advice="Use an offset up to there, or -1 for latest.",
                )
        return found | exact

    def _at_times(self, limit: Limit, wanted: Mapping[Place, int], *, starting: bool) -> Positions:
        found = self.offsets(wanted)
        without = [place for place, offset in found.items() if offset == NO_OFFSET]
        if not without:
            return found
        if starting and not self._options.latest_without_match:
            topic, number = min(without)
            raise OptionError(
                f"{topic}-{number} has no record as new as {limit.option}, {wanted[topic, number]}",
                advice="Use an earlier time, or set startingOffsetsByTimestampStrategy to latest.",
            )
        return found | self.latest(without)


def _check_named(limit: Limit, named: Iterable[Place], places: frozenset[Place]) -> None:
    unnamed, unknown = places - set(named), set(named) - places
    if unnamed:
        raise OptionError(
            f"{limit.option} does not name {show(unnamed)}",
            advice="Name every partition; -1 is latest, -2 is earliest.",
        )
    if unknown:
        raise OptionError(
            f"{limit.option} names {show(unknown)}, which is not among the partitions to read"
        )
