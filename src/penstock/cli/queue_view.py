"""Share groups as any Kafka broker tells of them: members, settings, how far they are.

The protocol tells where a group starts in a partition and how many records it has not finished.
It does not tell which records are in whose hands, or how often they were delivered: that is known
to the broker alone, and shows when a record is delivered, or dies.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.kafka import BrokerError, Connection
from penstock.cli.protocol import cluster, reachable
from penstock.client.connection import GROUP, ClientError
from penstock.errors import PenstockError
from penstock.wire import Message
from penstock.wire.errors import ErrorCode

if TYPE_CHECKING:
    from penstock.cli.group_reset import Step

GROUP_RESOURCE: Final = 32
# The state of a group that has settings, and to which no consumer has come yet.
NEW: Final = "new"
DEAD_LETTER_TOPIC: Final = "errors.deadletterqueue.topic.name"
_SET: Final = 0
_UNSET: Final = 1


@dataclass(frozen=True, slots=True)
class QueueMember:
    """One consumer and how many partitions it takes from."""

    id: str
    client_id: str
    host: str
    partitions: int


@dataclass(frozen=True, slots=True)
class QueuePartition:
    """A group in one partition; None where it has not begun, or the broker does not say."""

    topic: str
    partition: int
    start: int | None
    lag: int | None


@dataclass(frozen=True, slots=True)
class QueueView:
    """A share group as it is now."""

    group: str
    state: str
    members: tuple[QueueMember, ...]
    partitions: tuple[QueuePartition, ...]
    # Those that were set for it; the others have the broker's defaults.
    settings: Mapping[str, str]

    @property
    def lag(self) -> int | None:
        known = [part.lag for part in self.partitions if part.lag is not None]
        return sum(known) if known or not self.partitions else None


def _refused(code: int, message: str | None, doing: str) -> BrokerError:
    name = ErrorCode(code).name
    text = message or name.lower().replace("_", " ")
    error = BrokerError(f"{doing}: {text}" if doing else text)
    error.kafka_name = name
    if name == "GROUP_ID_NOT_FOUND":
        error.advice = "`penstock queue list` shows the share groups there are."
    elif name == "NON_EMPTY_GROUP":
        error.advice = (
            "Stop its consumers first; a dead one is forgotten after its session timeout."
        )
    return error


def _ask(connection: Connection, group: str | None, request: Message, doing: str) -> Any:
    """Ask the group's coordinator, or any broker."""
    if not reachable(connection.settings):
        raise PenstockError(
            "queues cannot be asked for with these settings of security",
            advice="librdkafka has no admin requests for share groups yet.",
        )
    try:
        with cluster(connection.bootstrap, connection.settings) as brokers:
            asked = brokers.any() if group is None else brokers.coordinator(GROUP, group)
            return asked.call(request)
    except ClientError as error:
        raise PenstockError(f"{doing}: {error}", advice=error.advice) from error


# ---- looking -----------------------------------------------------------------------------------


def look(connection: Connection, group: str) -> QueueView:
    """Everything that is told of one share group."""
    from penstock.wire.messages.share_group_describe import ShareGroupDescribeRequest

    doing = f"describing {group!r}"
    request = ShareGroupDescribeRequest(group_ids=[group])
    told = _ask(connection, group, request, doing).groups[0]
    missing = told.error_code == ErrorCode.GROUP_ID_NOT_FOUND
    if told.error_code and not missing:
        raise _refused(told.error_code, told.error_message, doing)
    members = tuple(
        QueueMember(
            member.member_id,
            member.client_id,
            member.client_host.removeprefix("/"),
            sum(len(part.partitions) for part in member.assignment.topic_partitions),
        )
        for member in (() if missing else told.members)
    )
    settings = settings_of(connection, group)
    try:
        partitions = partitions_of(connection, group)
    except BrokerError as error:
        waits = error.kafka_name == "GROUP_ID_NOT_FOUND" and settings
        if not waits or kind_of(connection, group) is not None:
            raise
        return QueueView(group, NEW, (), (), settings)
    state = "empty" if missing else told.group_state.lower()
    return QueueView(group, state, members, partitions, settings)


def no_such_queue(group: str) -> BrokerError:
    return _refused(ErrorCode.GROUP_ID_NOT_FOUND, f"there is no share group {group!r}", "")


def kind_of(connection: Connection, group: str) -> str | None:
    """Of which kind a group is; None if there is none of this name."""
    from penstock.cli.group_view import list_groups

    return next((each.kind for each in list_groups(connection) if each.id == group), None)


def partitions_of(connection: Connection, group: str) -> tuple[QueuePartition, ...]:
    """How far a group is, in every partition that it has begun."""
    from penstock.wire.messages.describe_share_group_offsets import (
        DescribeShareGroupOffsetsRequest,
        DescribeShareGroupOffsetsRequestGroup,
    )

    doing = f"asking how far {group!r} is"
    wanted = DescribeShareGroupOffsetsRequestGroup(group_id=group, topics=None)
    told = _ask(connection, group, DescribeShareGroupOffsetsRequest(groups=[wanted]), doing)
    answer = told.groups[0]
    if answer.error_code:
        raise _refused(answer.error_code, answer.error_message, doing)
    return tuple(
        QueuePartition(
            topic.topic_name,
            part.partition_index,
            part.start_offset if part.start_offset >= 0 else None,
            part.lag if part.lag >= 0 else None,
        )
        for topic in answer.topics
        for part in topic.partitions
    )


def settings_of(connection: Connection, group: str) -> dict[str, str]:
    """What was set for a group."""
    group_source = 8
    return {
        item.name: item.value or ""
        for item in _described_settings(connection, group)
        if item.config_source == group_source
    }


def check_names(connection: Connection, group: str, names: Iterable[str]) -> None:
    """PenstockError if the broker knows no group setting of one of the names."""
    known = sorted(item.name for item in _described_settings(connection, group))
    for name in names:
        if known and name not in known:
            close = get_close_matches(name, known, n=1)
            raise PenstockError(
                f"there is no group setting {name!r}",
                advice=f"Did you mean {close[0]!r}?" if close else f"There are {', '.join(known)}.",
            )


def _described_settings(connection: Connection, group: str) -> list[Any]:
    """Every setting that a group can have, with its value and where that comes from."""
    from penstock.wire.messages.describe_configs import (
        DescribeConfigsRequest,
        DescribeConfigsResource,
    )

    doing = f"asking for the settings of {group!r}"
    resource = DescribeConfigsResource(
        resource_type=GROUP_RESOURCE, resource_name=group, configuration_keys=None
    )
    told = _ask(connection, None, DescribeConfigsRequest(resources=[resource]), doing).results[0]
    if told.error_code:
        raise _refused(told.error_code, told.error_message, doing)
    return list(told.configs)


def change_settings(connection: Connection, group: str, settings: Mapping[str, str | None]) -> None:
    """Set some settings of a group, and take back those that are None."""
    from penstock.wire.messages.incremental_alter_configs import (
        AlterableConfig,
        AlterConfigsResource,
        IncrementalAlterConfigsRequest,
    )

    doing = f"changing the settings of {group!r}"
    configs = [
        AlterableConfig(name=name, config_operation=_UNSET if value is None else _SET, value=value)
        for name, value in settings.items()
    ]
    resource = AlterConfigsResource(
        resource_type=GROUP_RESOURCE, resource_name=group, configs=configs
    )
    request = IncrementalAlterConfigsRequest(resources=[resource])
    told = _ask(connection, None, request, doing).responses[0]
    if told.error_code:
        raise _refused(told.error_code, told.error_message, doing)


def move(connection: Connection, group: str, steps: Iterable[Step]) -> None:
    """Have a group without consumers begin anew, at an offset in each partition."""
    from penstock.wire.messages.alter_share_group_offsets import (
        AlterShareGroupOffsetsRequest,
        AlterShareGroupOffsetsRequestPartition,
        AlterShareGroupOffsetsRequestTopic,
    )

    doing = f"setting where {group!r} begins"
    topics: dict[str, list[AlterShareGroupOffsetsRequestPartition]] = {}
    for step in steps:
        topics.setdefault(step.topic, []).append(
            AlterShareGroupOffsetsRequestPartition(
                partition_index=step.partition, start_offset=step.new
            )
        )
    request = AlterShareGroupOffsetsRequest(
        group_id=group,
        topics=[
            AlterShareGroupOffsetsRequestTopic(topic_name=name, partitions=parts)
            for name, parts in topics.items()
        ],
    )
    told = _ask(connection, group, request, doing)
    if told.error_code:
        raise _refused(told.error_code, told.error_message, doing)
    for topic in told.responses:
        for part in topic.partitions:
            if part.error_code:
                where = f"{doing} in {topic.topic_name}, partition {part.partition_index}"
                raise _refused(part.error_code, part.error_message, where)
