"""A group as any Kafka broker tells of it, and how far behind it is.

The formulas are the broker's own (`penstock.broker.lag.formulas`); here their numbers are asked
for from outside, so that they can be had from Apache Kafka too:

- committed offsets, starts and ends of logs, retention settings: by admin requests;
- the time of the first unread record: by reading that one record (`penstock.cli.group_peek`);
- bytes: a share of the partition's size (DescribeLogDirs), by the number of records; an estimate;
- rates: from the offsets at two moments or more.

What could not be asked is not known, and never taken for good news: a time to loss is known only
if everything is that retention goes by.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.lag.formulas import (
    Lag,
    Rates,
    Reading,
    Retention,
    Window,
    lag_of,
    retention_of,
)
from penstock.cli.group_peek import Place, Unread, ask_leaders, read_singly
from penstock.cli.kafka import (
    REQUEST_TIMEOUT_S,
    BrokerError,
    Connection,
    broker_error,
    result_of,
    translated,
)
from penstock.cli.protocol import peer, reachable
from penstock.client.connection import ClientError

if TYPE_CHECKING:
    from confluent_kafka import Consumer
    from confluent_kafka.admin import ClusterMetadata

# How long the first unread records are waited for, and of how many partitions.
PEEK_TIMEOUT_S: Final = 5.0
MAX_PEEKED: Final = 1_000
# Settings and sizes change slowly: asked for again after so long.
_KEEP_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Member:
    """One member and what it reads."""

    id: str
    client_id: str
    host: str
    instance_id: str | None
    partitions: tuple[Place, ...]


@dataclass(frozen=True, slots=True)
class PartitionView:
    """A group in a partition; `lag` is None where it has no offset or the partition is gone."""

    topic: str
    partition: int
    committed: int | None
    log_start: int | None
    log_end: int | None
    lag: Lag | None
    member: Member | None = None
    # Whether it is known how old the first unread record is, and when records will be lost.
    age_known: bool = True
    loss_known: bool = True


@dataclass(frozen=True, slots=True)
class GroupView:
    """A group as it is now."""

    id: str
    kind: str
    state: str
    # How partitions are shared out: the assignor.
    protocol: str
    coordinator: str
    members: tuple[Member, ...]
    partitions: tuple[PartitionView, ...] = ()


@dataclass(frozen=True, slots=True)
class Listed:
    """One line of the list of groups."""

    id: str
    kind: str
    state: str


@dataclass(frozen=True, slots=True)
class Keeping:
    """How long a topic keeps records, and the groups for which it keeps all."""

    retention: Retention = field(default_factory=Retention)
    waits_for: frozenset[str] = frozenset()

    def retention_for(self, group: str) -> Retention:
        return Retention() if group in self.waits_for else self.retention


# ---- groups ------------------------------------------------------------------------------


def list_groups(connection: Connection) -> list[Listed]:
    """All groups, by name: those of consumers, and share groups where they can be asked for."""
    admin = connection.admin()
    with translated("listing groups"):
        future = admin.list_consumer_groups(request_timeout=REQUEST_TIMEOUT_S)
    result = result_of(future, "listing groups")
    if result.errors:
        # In some versions of the library it is the exception, in others what that is made of.
        first: Any = result.errors[0]
        raise broker_error(getattr(first, "args", (first,))[0], "listing groups")
    groups = {
        group.group_id: Listed(group.group_id, _kind(group.type), _state(group.state))
        for group in result.valid
    }
    for other in _list_others(connection, ("share", "streams")):
        groups.setdefault(other.id, other)
    return [groups[name] for name in sorted(groups)]


def list_share_groups(connection: Connection) -> list[Listed]:
    """Share groups of all brokers; none where brokers cannot be asked, or know of none."""
    return _list_others(connection, ("share",))


def list_streams_groups(connection: Connection) -> list[Listed]:
    """Groups of Kafka Streams applications; none where brokers cannot be asked, or know of none."""
    return _list_others(connection, ("streams",))


def _list_others(connection: Connection, kinds: tuple[str, ...]) -> list[Listed]:
    """Groups that librdkafka does not list."""
    from penstock.wire.messages.list_groups import ListGroupsRequest

    if not reachable(connection.settings):
        return []
    found = []
    for broker in _brokers(connection):
        try:
            with peer(*broker, connection.settings) as asked:
                answer = asked.call(ListGroupsRequest(types_filter=list(kinds)))
        except ClientError:
            continue
        found += [
            Listed(group.group_id, group.group_type.lower(), _spaced(group.group_state))
            for group in answer.groups
            # An older broker does not know the filter.
            if group.group_type.lower() in kinds
        ]
    return found


def _brokers(connection: Connection) -> list[tuple[str, int]]:
    with translated("asking for the brokers"):
        metadata = connection.admin().list_topics(timeout=REQUEST_TIMEOUT_S)
    return [(str(broker.host), broker.port) for broker in metadata.brokers.values()]


def describe_group(connection: Connection, group: str) -> GroupView:
    """State and members of a group; BrokerError if there is none of this name."""
    doing = f"describing {group}"
    with translated(doing):
        futures = connection.admin().describe_consumer_groups(
            [group], request_timeout=REQUEST_TIMEOUT_S
        )
    try:
        found = result_of(futures[group], doing)
        state = _state(found.state)
    except BrokerError as error:
        if error.kafka_name != "GROUP_ID_NOT_FOUND":
            raise
        found, state = None, "dead"
    if found is None or (state == "dead" and not found.members):
        return _describe_other(connection, group)
    node = found.coordinator
    return GroupView(
        id=group,
        kind=_kind(found.type),
        state=state,
        protocol=found.partition_assignor or "",
        coordinator="" if node is None else f"{node.host}:{node.port}",
        members=tuple(_member(member) for member in found.members),
    )


def _describe_other(connection: Connection, group: str) -> GroupView:
    """A streams group; BrokerError if it is of another kind, or of none."""
    from penstock.cli.streams_groups import ASSIGNOR, describe_streams_group, partitions_of

    kinds = {item.id: item.kind for item in _list_others(connection, ("share", "streams"))}
    if kinds.get(group) == "share":
        raise BrokerError(
            f"{group} is a share group", advice="`penstock queue` shows and changes queues."
        )
    told = None
    if kinds.get(group) == "streams":
        told = describe_streams_group(connection, group, _brokers(connection))
    if told is None:
        raise no_such_group(group)
    members = tuple(
        Member(
            id=member.member_id,
            client_id=member.client_id,
            host=member.client_host.removeprefix("/"),
            instance_id=member.instance_id,
            partitions=partitions_of(told, member),
        )
        for member in told.members
    )
    return GroupView(
        id=group,
        kind="streams",
        state=_spaced(told.group_state),
        protocol=ASSIGNOR,
        coordinator="",
        members=members,
    )


def no_such_group(group: str) -> BrokerError:
    error = BrokerError(
        f"there is no group {group}", advice="`penstock groups list` shows what there is."
    )
    error.kafka_name = "GROUP_ID_NOT_FOUND"
    return error


def committed_offsets(connection: Connection, group: str) -> dict[Place, int]:
    """What the group has committed, for all partitions for which it has."""
    from confluent_kafka import ConsumerGroupTopicPartitions

    doing = f"asking for the offsets of {group}"
    with translated(doing):
        futures = connection.admin().list_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(group)], request_timeout=REQUEST_TIMEOUT_S
        )
    try:
        told = result_of(futures[group], doing).topic_partitions
    except BrokerError as error:
        if error.kafka_name == "GROUP_ID_NOT_FOUND":
            return {}
        raise
    return {(at.topic, at.partition): at.offset for at in told if at.offset >= 0}


def offset_bounds(
    connection: Connection, places: Iterable[Place]
) -> tuple[dict[Place, int], dict[Place, int]]:
    """The start and the end of each partition that is there."""
    from confluent_kafka.admin import OffsetSpec

    specs: Any = OffsetSpec  # without types in some versions
    wanted = list(places)
    return (
        _list_offsets(connection, wanted, specs.earliest()),
        _list_offsets(connection, wanted, specs.latest()),
    )


def offsets_at(connection: Connection, places: Iterable[Place], time_ms: int) -> dict[Place, int]:
    """The first record at or after a time, for the partitions that have one."""
    from confluent_kafka.admin import OffsetSpec

    specs: Any = OffsetSpec
    found = _list_offsets(connection, list(places), specs.for_timestamp(time_ms))
    return {place: offset for place, offset in found.items() if offset >= 0}


def _list_offsets(connection: Connection, wanted: Sequence[Place], spec: Any) -> dict[Place, int]:
    from confluent_kafka import TopicPartition

    if not wanted:
        return {}
    with translated("asking for offsets"):
        futures = connection.admin().list_offsets(
            {TopicPartition(topic, number): spec for topic, number in wanted},
            request_timeout=REQUEST_TIMEOUT_S,
        )
    found: dict[Place, int] = {}
    for at, future in futures.items():
        try:
            found[at.topic, at.partition] = result_of(future, "asking for offsets").offset
        except BrokerError as error:
            # The topic was deleted; the group's offset outlives it.
            if error.kafka_name not in ("UNKNOWN_TOPIC_OR_PART", "_UNKNOWN_PARTITION"):
                raise
    return found


def _member(found: Any) -> Member:
    assigned = found.assignment.topic_partitions if found.assignment is not None else []
    return Member(
        id=found.member_id,
        client_id=found.client_id,
        host=found.host.removeprefix("/"),
        instance_id=found.group_instance_id or None,
        partitions=tuple(sorted((at.topic, at.partition) for at in assigned)),
    )


def _kind(value: Any) -> str:
    return str(value.name).lower()


def _state(value: Any) -> str:
    return str(value.name).lower().replace("_", " ")


def _spaced(text: str) -> str:
    """`PreparingRebalance` as librdkafka's names are shown."""
    return "".join(
        f" {c.lower()}" if c.isupper() and at else c.lower() for at, c in enumerate(text)
    )


# ---- lag ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Look:
    """What was asked about a group at one moment."""

    group: str
    committed: Mapping[Place, int]
    starts: Mapping[Place, int]
    ends: Mapping[Place, int]
    # Of the first unread records; see `group_peek`.
    times: Mapping[Place, int | None]
    owner: Mapping[Place, Member]


class Collector:
    """Measures groups again and again; what it saw before gives the rates."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._read: dict[tuple[str, str, int], Window] = {}
        self._written: dict[Place, Window] = {}
        self._topics: dict[str, Keeping] = {}
        self._sizes: dict[Place, int] = {}
        self._asked_at: float | None = None
        # The time of a record, by where it is.
        self._times: dict[tuple[str, int, int], int | None] = {}
        self._consumer: Consumer | None = None

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None

    def renew(self, connection: Connection) -> None:
        """Go on with new clients: old ones may not get over what befell the broker."""
        self.close()
        self._connection = connection
        self._asked_at = None

    def sample(self, groups: Iterable[str]) -> None:
        """Note where groups and logs are, for the rates; BrokerError if a group is not there."""
        for group in groups:
            describe_group(self._connection, group)
            committed = committed_offsets(self._connection, group)
            self._note(group, committed, offset_bounds(self._connection, committed)[1])

    def collect(self, group: str) -> GroupView:
        """The group with its lag; BrokerError if there is none of this name."""
        view = describe_group(self._connection, group)
        committed = committed_offsets(self._connection, group)
        owner = {place: member for member in view.members for place in member.partitions}
        places = sorted({*committed, *owner})
        starts, ends = offset_bounds(self._connection, places)
        self._note(group, committed, ends)
        self._ask_about({topic for topic, _ in places}, places)
        unread = {
            place: Unread(max(committed[place], starts[place]), ends[place])
            for place in places
            if place in committed and place in ends and place in starts
            and max(committed[place], starts[place]) < ends[place]
        }  # fmt: skip
        look = _Look(group, committed, starts, ends, self._times_at(unread), owner)
        partitions = tuple(self._partition(look, place) for place in places)
        return replace(view, partitions=partitions)

    def _note(self, group: str, committed: Mapping[Place, int], ends: Mapping[Place, int]) -> None:
        now = time.monotonic()
        for place, end in ends.items():
            self._written.setdefault(place, Window()).add(now, end)
            if place in committed:
                window = self._read.setdefault((group, *place), Window())
                window.add(now, committed[place])

    def _partition(self, look: _Look, place: Place) -> PartitionView:
        lag = self._lag(look, place)
        age_known = loss_known = True
        if lag is not None and lag.records:
            time_ms = look.times.get(place)
            age_known = place in look.times and (time_ms is None or time_ms >= 0)
            retention = self._retention(look.group, place)
            loss_known = (age_known or retention.seconds is None) and (
                lag.bytes is not None or retention.bytes is None
            )
        return PartitionView(
            topic=place[0],
            partition=place[1],
            committed=look.committed.get(place),
            log_start=look.starts.get(place),
            log_end=look.ends.get(place),
            lag=lag,
            member=look.owner.get(place),
            age_known=age_known,
            loss_known=loss_known,
        )

    def _retention(self, group: str, place: Place) -> Retention:
        return self._topics.get(place[0], Keeping()).retention_for(group)

    def _lag(self, look: _Look, place: Place) -> Lag | None:
        if place not in look.committed or place not in look.starts or place not in look.ends:
            return None
        start, end, committed = look.starts[place], look.ends[place], look.committed[place]
        behind = max(0, end - max(committed, start))
        size = self._sizes.get(place)
        record_bytes = size / (end - start) if size is not None and end > start else None
        (written,), (read,) = self._written[place].rates(), self._read[look.group, *place].rates()
        each = record_bytes or 0.0
        return lag_of(
            Reading(
                committed,
                start,
                end,
                None if record_bytes is None else round(record_bytes * behind),
                look.times.get(place),
                int(time.time() * 1000),
            ),
            Rates(written, written * each, read, read * each),
            self._retention(look.group, place),
        )

    # ---- what topics are like ------------------------------------------------------------

    def _ask_about(self, topics: set[str], places: Sequence[Place]) -> None:
        now = time.monotonic()
        fresh = self._asked_at is not None and now - self._asked_at < _KEEP_S
        if fresh and topics <= self._topics.keys():
            return
        self._asked_at = now
        with translated("asking for the topics"):
            metadata = self._connection.admin().list_topics(timeout=REQUEST_TIMEOUT_S)
        there = sorted(topics & metadata.topics.keys())
        self._topics = dict.fromkeys(topics, Keeping()) | _keepings(self._connection, there)
        self._sizes = _sizes(self._connection, metadata, places)

    # ---- the first unread records --------------------------------------------------------

    def _times_at(self, unread: Mapping[Place, Unread]) -> dict[Place, int | None]:
        """The times that are known, some of them from before."""
        there = {(*place, span.front) for place, span in unread.items()}
        self._times = {at: ms for at, ms in self._times.items() if at in there}
        wanted = {
            place: span
            for place, span in list(unread.items())[:MAX_PEEKED]
            if (*place, span.front) not in self._times
        }
        if wanted:
            deadline_s = time.monotonic() + PEEK_TIMEOUT_S
            times, left = ask_leaders(self._connection, wanted, deadline_s)
            if left:
                if self._consumer is None:
                    self._consumer = self._connection.consumer(
                        {"queued.min.messages": 1, "fetch.message.max.bytes": 1024}
                    )
                rest = {place: wanted[place] for place in left}
                times |= read_singly(self._consumer, rest, deadline_s)
            for place, time_ms in times.items():
                self._times[*place, wanted[place].front] = time_ms
        return {
            place: self._times[*place, span.front]
            for place, span in unread.items()
            if (*place, span.front) in self._times
        }


def _keepings(connection: Connection, topics: Sequence[str]) -> dict[str, Keeping]:
    from confluent_kafka.admin import ConfigResource, ResourceType

    if not topics:
        return {}
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
    with translated("asking for the topics' settings"):
        futures = connection.admin().describe_configs(resources, request_timeout=REQUEST_TIMEOUT_S)
    found: dict[str, Keeping] = {}
    for resource, future in futures.items():
        settings = result_of(future, f"asking for the settings of {resource.name}")
        values = {name: str(entry.value) for name, entry in settings.items()}
        retention = retention_of(
            values.get("cleanup.policy", "delete").split(","),
            int(values.get("retention.ms", "-1")),
            int(values.get("retention.bytes", "-1")),
        )
        # Penstock's own: at its bound a topic may wait for these groups.
        waits = values.get("overflow", "discard-oldest") != "discard-oldest"
        names = values.get("overflow.groups", "").split(",") if waits else []
        found[resource.name] = Keeping(retention, frozenset(names))
    return found


def _sizes(
    connection: Connection, metadata: ClusterMetadata, places: Sequence[Place]
) -> dict[Place, int]:
    """Bytes of partitions at their leaders; without those that cannot be had."""
    from penstock.wire.messages.describe_log_dirs import (
        DescribableLogDirTopic,
        DescribeLogDirsRequest,
    )

    if not reachable(connection.settings):
        return {}
    by_leader: dict[int, dict[str, list[int]]] = {}
    for topic, number in places:
        partition = (
            metadata.topics[topic].partitions.get(number) if topic in metadata.topics else None
        )
        if partition is not None and partition.leader in metadata.brokers:
            by_leader.setdefault(partition.leader, {}).setdefault(topic, []).append(number)
    sizes: dict[Place, int] = {}
    for leader, topics in by_leader.items():
        broker = metadata.brokers[leader]
        request = DescribeLogDirsRequest(
            topics=[DescribableLogDirTopic(topic=t, partitions=n) for t, n in topics.items()]
        )
        try:
            with peer(str(broker.host), broker.port, connection.settings) as asked:
                answer = asked.call(request)
        except ClientError:
            # Bytes are the one thing that is not needed to know the rest.
            continue
        for folder in answer.results:
            for item in folder.topics:
                for partition_size in item.partitions:
                    if not partition_size.is_future_key:
                        place = (item.name, partition_size.partition_index)
                        sizes[place] = partition_size.partition_size
    return sizes
