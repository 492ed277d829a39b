"""Streams groups (KIP-1071) as brokers describe them: librdkafka knows nothing of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.cli.group_peek import Place
from penstock.cli.protocol import peer
from penstock.client.connection import ClientError

if TYPE_CHECKING:
    from penstock.cli.kafka import Connection
    from penstock.wire.messages.streams_group_describe import (
        DescribedGroup,
        Member,
        StreamsGroupDescribeResponse,
    )

# What broker assigns tasks by; the protocol does not say it.
ASSIGNOR: Final = "sticky"


def describe_streams_group(
    connection: Connection, group: str, brokers: list[tuple[str, int]]
) -> DescribedGroup | None:
    """A group as its coordinator, one of these brokers, describes it; None if none knows it."""
    from penstock.wire.messages.streams_group_describe import StreamsGroupDescribeRequest

    for broker in brokers:
        try:
            with peer(*broker, connection.settings) as asked:
                answer: StreamsGroupDescribeResponse = asked.call(
                    StreamsGroupDescribeRequest(group_ids=[group])
                )
        except ClientError:
            continue
        for told in answer.groups:
            if not told.error_code:
                return told
    return None


def partitions_of(group: DescribedGroup, member: Member) -> tuple[Place, ...]:
    """The partitions that a member reads: those of its active tasks."""
    parts = [] if group.topology is None else group.topology.subtopologies or []
    inputs = {
        part.subtopology_id: [
            *part.source_topics,
            *(topic.name for topic in part.repartition_source_topics),
        ]
        for part in parts
    }
    return tuple(
        sorted(
            (topic, number)
            for task in member.assignment.active_tasks
            for topic in inputs.get(task.subtopology_id, ())
            for number in task.partitions
        )
    )
