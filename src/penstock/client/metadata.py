"""What a cluster has: topics, partitions, who leads them, and from where to where they reach.

`Metadata` keeps what it was told and asks again when somebody finds it stale (`refresh`), when a
topic is asked for that it does not know, and after a while. One thread.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal
from uuid import UUID

from penstock.client.connection import Address, Cluster
from penstock.client.errors import ClientError, GaveUpError, check, refused
from penstock.client.retrying import Tries, until_answered
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
)
from penstock.wire.messages.metadata import MetadataRequest, MetadataRequestTopic

Place = tuple[str, int]
Isolation = Literal["read_committed", "read_uncommitted"]
ISOLATION: Final = {"read_uncommitted": 0, "read_committed": 1}

# Instead of a time: where the log starts, and where it ends.
EARLIEST: Final = -2
LATEST: Final = -1
# What `offsets` says where no record is as new as the time that was asked for.
NO_OFFSET: Final = -1

TIMEOUT_S: Final = 60.0
_MAX_AGE_S: Final = 300.0
_NO_TOPIC: Final = ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


@dataclass(frozen=True, slots=True)
class Topic:
    """A topic as the cluster describes it. A leader of -1: nobody leads the partition now."""

    name: str
    id: UUID
    is_internal: bool
    leaders: Mapping[int, int]
    told_at: float = field(compare=False)

    @property
    def partitions(self) -> list[int]:
        return sorted(self.leaders)


class Metadata:
    """Topics, partitions and leaders, as far as they were asked for."""

    def __init__(
        self, cluster: Cluster, *, timeout_s: float = TIMEOUT_S, max_age_s: float = _MAX_AGE_S
    ) -> None:
        self._cluster = cluster
        self._timeout_s = timeout_s
        self._max_age_s = max_age_s
        self._brokers: dict[int, Address] = {}
        self._topics: dict[str, Topic] = {}
        self._cluster_id = ""

    # ---- questions -----------------------------------------------------------------------

    def topics(
        self, names: Iterable[str] | None = None, *, pattern: str | None = None
    ) -> list[str]:
        """Those of the topics that exist; or all whose whole name matches a regular expression.

        Always asks. Internal topics are found by name only.
        """
        wanted = None if names is None else list(names)
        told = self._ask(wanted)
        if pattern is not None:
            try:
                matches = re.compile(pattern).fullmatch
            except re.error as error:
                raise ClientError(f"{pattern!r} is not a regular expression: {error}") from error
            return sorted(name for name, it in told.items() if not it.is_internal and matches(name))
        return sorted(name for name, it in told.items() if wanted is not None or not it.is_internal)

    def topic(self, name: str) -> Topic:
        """RefusedError if it is still unknown after a few seconds."""
        tries = Tries(self._timeout_s)
        doing = f"looking for the topic {name!r}"
        while True:
            try:
                return self._topic_now(name)
            except ClientError as error:
                tries.pause(error, doing)

    def _topic_now(self, name: str) -> Topic:
        known = self._topics.get(name)
        if known is not None and time.monotonic() - known.told_at < self._max_age_s:
            return known
        doing = f"looking for the topic {name!r}"
        found = self._ask_once([name], doing).get(name)
        if found is None:
            raise refused(doing, _NO_TOPIC)
        return found

    def partitions(self, topic: str) -> list[int]:
        """The numbers of its partitions."""
        return self.topic(topic).partitions

    def topic_id(self, topic: str) -> UUID:
        """What tells a topic from one of the same name before or after it."""
        return self.topic(topic).id

    def cluster_id(self) -> str:
        """What tells the cluster from others; empty if it does not say."""
        if not self._cluster_id:
            self._ask([])
        return self._cluster_id

    def leader(self, topic: str, partition: int) -> Address:
        """Where the leader of a partition is; waits for one where there is none."""
        tries = Tries(self._timeout_s)
        while True:
            try:
                return self.leader_now(topic, partition)
            except ClientError as error:
                tries.pause(error, f"looking for the leader of {topic}-{partition}")
                self.forget([topic])

    def leader_now(self, topic: str, partition: int) -> Address:
        """The same without waiting: a retriable error where there is no leader known."""
        doing = f"looking for the leader of {topic}-{partition}"
        node = self._topic_now(topic).leaders.get(partition)
        if node is None:
            self.forget([topic])
            node = self._topic_now(topic).leaders.get(partition)
        if node is None:
            # It may be new, and the broker that was asked may not have heard of it.
            raise refused(doing, _NO_TOPIC, "the topic has no such partition")
        address = self._brokers.get(node)
        if address is None:
            raise refused(doing, ErrorCode.LEADER_NOT_AVAILABLE)
        return address

    def refresh(self, topics: Iterable[str]) -> None:
        """Ask again about these; one that is gone is forgotten."""
        names = set(topics)
        told = self._ask(sorted(names))
        for name in names - told.keys():
            self._topics.pop(name, None)

    def forget(self, topics: Iterable[str]) -> None:
        """Ask again about these when they are needed next."""
        for name in topics:
            self._topics.pop(name, None)

    # ---- asking --------------------------------------------------------------------------

    def _ask(self, names: list[str] | None) -> dict[str, Topic]:
        """The topics that exist, of these or of all; kept."""
        doing = "asking for " + (f"the topics {', '.join(names)}" if names else "the topics")
        return until_answered(lambda: self._ask_once(names, doing), doing, self._timeout_s)

    def _ask_once(self, names: list[str] | None, doing: str) -> dict[str, Topic]:
        request = MetadataRequest(allow_auto_topic_creation=False)
        request.topics = (
            None if names is None else [MetadataRequestTopic(name=name) for name in names]
        )
        told = self._cluster.any().call(request, at_least=4)
        check(told.error_code, doing)
        self._brokers = {item.node_id: (item.host, item.port) for item in told.brokers}
        self._cluster_id = told.cluster_id or ""
        self._cluster.heard_of(self._brokers.values())
        now = time.monotonic()
        found: dict[str, Topic] = {}
        for item in told.topics:
            if item.error_code == _NO_TOPIC:
                continue
            if item.error_code != ErrorCode.LEADER_NOT_AVAILABLE:
                check(item.error_code, f"asking for the topic {item.name!r}")
            leaders = {part.partition_index: _leader_of(part) for part in item.partitions}
            found[item.name] = Topic(item.name, item.topic_id, item.is_internal, leaders, now)
        self._topics.update(found)
        return found


def _leader_of(part: Any) -> int:
    leaderless = part.error_code == ErrorCode.LEADER_NOT_AVAILABLE
    return -1 if leaderless else int(part.leader_id)


# ---- offsets -------------------------------------------------------------------------------


def offsets(
    cluster: Cluster,
    wanted: Mapping[Place, int],
    *,
    isolation: Isolation = "read_committed",
    metadata: Metadata | None = None,
    timeout_s: float = TIMEOUT_S,
) -> dict[Place, int]:
    """Where logs start (EARLIEST), end (LATEST), or have the first record of a time in ms on.

    With read_committed the end is that of what has been decided. NO_OFFSET where no record is as
    new as the time.
    """
    known = metadata or Metadata(cluster, timeout_s=timeout_s)
    found: dict[Place, int] = {}
    tries = Tries(timeout_s)
    while len(found) < len(wanted):
        left = {place: when for place, when in wanted.items() if place not in found}
        failure = _ask_leaders(cluster, known, left, ISOLATION[isolation], found)
        if failure is not None:
            doing = f"asking for the offsets of {len(wanted) - len(found)} partitions"
            tries.pause(failure, doing)
            known.forget({topic for topic, _ in left})
    return found


def _ask_leaders(
    cluster: Cluster,
    metadata: Metadata,
    wanted: Mapping[Place, int],
    isolation: int,
    found: dict[Place, int],
) -> ClientError | None:
    """Fill in what leaders say, each asked once; an error that may pass, if there was one."""
    failure: ClientError | None = None
    by_leader: dict[Address, list[Place]] = {}
    for place in wanted:
        try:
            by_leader.setdefault(metadata.leader_now(*place), []).append(place)
        except ClientError as error:
            if not error.retriable or isinstance(error, GaveUpError):
                raise
            failure = error
    for address, places in by_leader.items():
        try:
            request = _request({place: wanted[place] for place in places}, isolation)
            needed = 2 if isolation else 1
            told = cluster.at(address).call(request, at_least=needed)
        except ClientError as error:
            if not error.retriable:
                raise
            failure = error
            continue
        for topic in told.topics:
            for part in topic.partitions:
                place = (topic.name, part.partition_index)
                if not part.error_code:
                    found[place] = part.offset
                    continue
                doing = f"asking for an offset of {topic.name}-{part.partition_index}"
                failure = refused(doing, part.error_code)
                if not failure.retriable:
                    raise failure
    return failure


def _request(wanted: Mapping[Place, int], isolation: int) -> ListOffsetsRequest:
    topics: dict[str, list[ListOffsetsPartition]] = {}
    for (topic, number), when in wanted.items():
        item = ListOffsetsPartition(partition_index=number, timestamp=when)
        topics.setdefault(topic, []).append(item)
    return ListOffsetsRequest(
        replica_id=-1,
        isolation_level=isolation,
        topics=[
            ListOffsetsTopic(name=name, partitions=partitions)
            for name, partitions in topics.items()
        ],
        timeout_ms=10_000,
    )
