"""Heartbeats as requests: what is too large, and what a member is told of its group.

What both brokers answer to bad heartbeats is in `conformance/scenarios/protocol`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from penstock.broker.config import Limits
from penstock.testing.broker import Broker
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    RequestTopicPartitions,
)
from penstock.wire.messages.list_groups import ListGroupsRequest
from penstock.wire.messages.share_group_heartbeat import ShareGroupHeartbeatRequest
from tests.broker.raw import RawClient
from tests.broker.requests import create, new_name

LIMITS = Limits(max_topics=20, max_partitions=40, max_group_size=2, max_member_bytes=1_000)


@pytest.fixture(scope="module")
def client() -> Iterator[RawClient]:
    with Broker(limits=LIMITS) as broker, RawClient(broker.bootstrap) as client:
        client.call(create("t", 2))
        yield client


def join(group: str, member: str = "m", **fields: Any) -> ConsumerGroupHeartbeatRequest:
    request = ConsumerGroupHeartbeatRequest(
        group_id=group,
        member_id=member,
        rebalance_timeout_ms=1_000,
        subscribed_topic_names=["t"],
        topic_partitions=[],
    )
    for name, value in fields.items():
        setattr(request, name, value)
    return request


def test_what_is_too_large_is_refused_and_leaves_nothing(client: RawClient) -> None:
    group = new_name("g")
    many = [f"t{n}" for n in range(21)]
    for request in (
        join(group, subscribed_topic_names=many),
        join(group, subscribed_topic_names=["x" * 600, "y" * 600]),
        join(group, member_epoch=1, topic_partitions=[RequestTopicPartitions(partitions=[1] * 41)]),
        join("x" * 2_000),
        ShareGroupHeartbeatRequest(group_id=group, member_id="m", subscribed_topic_names=many),
    ):
        answer = client.call(request)
        assert answer.error_code == ErrorCode.INVALID_REQUEST
        assert answer.error_message
    assert group not in listed(client)


def listed(client: RawClient) -> dict[str, tuple[str, str, str]]:
    answer = client.call(ListGroupsRequest())
    return {
        item.group_id: (item.protocol_type, item.group_type, item.group_state)
        for item in answer.groups
    }


def test_a_full_group_takes_no_more(client: RawClient) -> None:
    group = new_name("g")
    codes = [client.call(join(group, f"m{n}")).error_code for n in range(3)]
    assert codes == [0, 0, ErrorCode.GROUP_MAX_SIZE_REACHED]


def test_groups_are_listed_with_their_kinds(client: RawClient) -> None:
    consumers, sharers = new_name("g"), new_name("s")
    assert not client.call(join(consumers)).error_code
    request = ShareGroupHeartbeatRequest(
        group_id=sharers, member_id="m", subscribed_topic_names=["t"]
    )
    assert not client.call(request).error_code
    found = listed(client)
    assert found[consumers] == ("consumer", "consumer", "Stable")
    assert found[sharers] == ("share", "share", "Stable")


def test_the_interval_is_short_while_the_group_changes(client: RawClient) -> None:
    assert client.call(join(new_name("g"))).heartbeat_interval_ms == 100
