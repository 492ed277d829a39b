"""Where share groups are, as administrators see and change it; and the groups' settings."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.broker.groups.settings import GROUP_SETTINGS, duration_ms, group_settings
from penstock.errors import ConfigError
from penstock.testing.broker import Broker
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.alter_configs import (
    AlterableConfig,
    AlterConfigsRequest,
    AlterConfigsResource,
)
from penstock.wire.messages.alter_share_group_offsets import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsRequestPartition,
    AlterShareGroupOffsetsRequestTopic,
)
from penstock.wire.messages.delete_groups import DeleteGroupsRequest
from penstock.wire.messages.delete_share_group_offsets import (
    DeleteShareGroupOffsetsRequest,
    DeleteShareGroupOffsetsRequestTopic,
)
from penstock.wire.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
)
from penstock.wire.messages.describe_share_group_offsets import (
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsRequestGroup,
    DescribeShareGroupOffsetsRequestTopic,
)
from penstock.wire.messages.incremental_alter_configs import (
    AlterableConfig as Step,
)
from penstock.wire.messages.incremental_alter_configs import (
    AlterConfigsResource as Resource,
)
from penstock.wire.messages.incremental_alter_configs import IncrementalAlterConfigsRequest
from penstock.wire.messages.list_config_resources import ListConfigResourcesRequest
from penstock.wire.messages.list_groups import ListGroupsRequest
from penstock.wire.messages.share_group_heartbeat import ShareGroupHeartbeatRequest
from tests.broker.raw import RawClient
from tests.broker.requests import new_name
from tests.broker.shares.members import ACCEPT, Taker, fill, lag_of, new_queue, numbered

GROUP = 32


def name_of(code: int) -> str:
    return ErrorCode(code).name


def described(client: RawClient, group: str, **topics: list[int]) -> Any:
    wanted = [
        DescribeShareGroupOffsetsRequestTopic(topic_name=name, partitions=numbers)
        for name, numbers in topics.items()
    ]
    request = DescribeShareGroupOffsetsRequestGroup(group_id=group, topics=wanted or None)
    return client.call(DescribeShareGroupOffsetsRequest(groups=[request])).groups[0]


def moved(client: RawClient, group: str, topic: str, offset: int, partition: int = 0) -> str:
    part = AlterShareGroupOffsetsRequestPartition(partition_index=partition, start_offset=offset)
    answer = client.call(
        AlterShareGroupOffsetsRequest(
            group_id=group,
            topics=[AlterShareGroupOffsetsRequestTopic(topic_name=topic, partitions=[part])],
        )
    )
    if answer.error_code:
        return name_of(answer.error_code)
    return name_of(answer.responses[0].partitions[0].error_code)


def forgotten(client: RawClient, group: str, topic: str) -> str:
    answer = client.call(
        DeleteShareGroupOffsetsRequest(
            group_id=group, topics=[DeleteShareGroupOffsetsRequestTopic(topic_name=topic)]
        )
    )
    if answer.error_code:
        return name_of(answer.error_code)
    return name_of(answer.responses[0].error_code)


def taken(broker: Broker, group: str, topic: str) -> None:
    """Let the group finish half of ten records."""
    fill(broker, topic, *numbered(10))
    with Taker(broker, group, topic) as taker:
        taker.fetch()
        assert taker.acknowledge((0, 2, ACCEPT), (5, 6, ACCEPT)) == "NONE"


def test_offsets_are_shown(shared: Broker, client: RawClient) -> None:
    topic, group = new_queue(shared, partitions=2)
    taken(shared, group, topic)
    (shown,) = described(client, group).topics
    assert shown.topic_name == topic
    assert [(p.partition_index, p.start_offset, p.lag) for p in shown.partitions] == [(0, 3, 5)]
    parts = described(client, group, **{topic: [0, 1, 9]}).topics[0].partitions
    assert [(p.start_offset, name_of(p.error_code)) for p in parts] == [
        (3, "NONE"),
        (-1, "NONE"),
        (-1, "UNKNOWN_TOPIC_OR_PARTITION"),
    ]
    assert name_of(described(client, new_name()).error_code) == "GROUP_ID_NOT_FOUND"


def test_offsets_are_moved_and_forgotten(shared: Broker, client: RawClient) -> None:
    topic, group = new_queue(shared)
    taken(shared, group, topic)
    for offset in (7, 1):
        assert moved(client, group, topic, offset) == "NONE"
        assert lag_of(shared, group) == 10 - offset
    assert moved(client, group, topic, 11) == "OFFSET_OUT_OF_RANGE"
    assert moved(client, group, topic, -1) == "OFFSET_OUT_OF_RANGE"
    assert moved(client, group, "none", 1) == "UNKNOWN_TOPIC_OR_PARTITION"
    with Taker(shared, group, topic) as taker:
        assert taker.fetch().offsets == list(range(1, 10))
    assert forgotten(client, group, "none") == "UNKNOWN_TOPIC_OR_PARTITION"
    assert forgotten(client, group, topic) == "NONE"
    assert forgotten(client, new_name(), topic) == "GROUP_ID_NOT_FOUND"
    with Taker(shared, group, topic) as taker:
        assert taker.fetch().offsets == list(range(10))


def test_a_group_that_is_moved_before_it_has_members_is_there(broker: Broker) -> None:
    topic, group = new_queue(broker)
    fill(broker, topic, *numbered(10))
    with RawClient(broker.bootstrap) as client:
        assert moved(client, group, "none", 1) == "UNKNOWN_TOPIC_OR_PARTITION"
        assert not described(client, group).topics
        assert moved(client, group, topic, 7) == "NONE"
        assert lag_of(broker, group) == 3
    broker.crash()
    broker.start()
    with RawClient(broker.bootstrap) as client, Taker(broker, group, topic) as taker:
        listed = client.call(ListGroupsRequest(types_filter=["share"])).groups
        assert [(item.group_id, item.group_state) for item in listed] == [(group, "Empty")]
        assert taker.fetch().offsets == [7, 8, 9]


def test_a_move_survives_a_restart(broker: Broker) -> None:
    topic, group = new_queue(broker)
    taken(broker, group, topic)
    with RawClient(broker.bootstrap) as client:
        assert moved(client, group, topic, 4) == "NONE"
    broker.crash()
    broker.start()
    assert lag_of(broker, group) == 6


def test_a_group_with_members_is_not_moved(shared: Broker, client: RawClient) -> None:
    topic, group = new_queue(shared)
    taken(shared, group, topic)
    joined = client.call(
        ShareGroupHeartbeatRequest(
            group_id=group, member_id="m" * 22, member_epoch=0, subscribed_topic_names=[topic]
        )
    )
    assert not joined.error_code, joined.error_message
    assert moved(client, group, topic, 1) == "NON_EMPTY_GROUP"
    assert forgotten(client, group, topic) == "NON_EMPTY_GROUP"


def test_what_a_member_has_is_its_own_until_its_session_ends(
    shared: Broker, client: RawClient
) -> None:
    topic, group = new_queue(shared)
    fill(shared, topic, *numbered(4))
    with Taker(shared, group, topic) as one, Taker(shared, group, topic) as other:

        def beat(epoch: int) -> None:
            answer = client.call(
                ShareGroupHeartbeatRequest(
                    group_id=group,
                    member_id=one.member,
                    member_epoch=epoch,
                    subscribed_topic_names=[topic] if epoch == 0 else None,
                )
            )
            assert not answer.error_code, answer.error_message

        beat(0)
        assert one.fetch().offsets == [0, 1, 2, 3]
        beat(-1)
        assert other.fetch().offsets == []
        assert one.acknowledge((0, 1, ACCEPT), epoch=-1) == "NONE"
        assert other.fetch(wait_ms=10_000).offsets == [2, 3]


def test_a_deleted_group_begins_anew(shared: Broker, client: RawClient) -> None:
    topic, group = new_queue(shared)
    taken(shared, group, topic)
    for _ in range(2):
        answer = client.call(DeleteGroupsRequest(groups_names=[group])).results[0]
    assert name_of(answer.error_code) == "GROUP_ID_NOT_FOUND"
    with Taker(shared, group, topic) as taker:
        assert taker.fetch().offsets == list(range(10))


# ---- settings ----------------------------------------------------------------------------------


def shown_settings(client: RawClient, group: str) -> dict[str, tuple[str, int]]:
    resource = DescribeConfigsResource(
        resource_type=GROUP, resource_name=group, configuration_keys=None
    )
    result = client.call(DescribeConfigsRequest(resources=[resource])).results[0]
    assert not result.error_code, result.error_message
    return {item.name: (item.value, item.config_source) for item in result.configs}


def stepped(client: RawClient, group: str, *steps: tuple[int, str, str | None]) -> str:
    configs = [Step(name=n, config_operation=o, value=v) for o, n, v in steps]
    resource = Resource(resource_type=GROUP, resource_name=group, configs=configs)
    answer = client.call(IncrementalAlterConfigsRequest(resources=[resource]))
    return name_of(answer.responses[0].error_code)


def test_settings_are_set_shown_and_unset(shared: Broker, client: RawClient) -> None:
    group = new_name("g")
    assert set(shown_settings(client, group)) == set(GROUP_SETTINGS)
    limit = "share.delivery.count.limit"
    assert stepped(client, group, (0, limit, "9")) == "NONE"
    assert shown_settings(client, group)[limit] == ("9", 8)
    listed = client.call(ListConfigResourcesRequest(resource_types=[GROUP])).config_resources
    assert (group, GROUP) in [(item.resource_name, item.resource_type) for item in listed]
    assert stepped(client, group, (1, limit, None)) == "NONE"
    assert shown_settings(client, group)[limit] == ("5", 5)


def test_the_older_form_replaces_all(shared: Broker, client: RawClient) -> None:
    group = new_name("g")
    stepped(client, group, (0, "share.delivery.count.limit", "9"))
    resource = AlterConfigsResource(
        resource_type=GROUP,
        resource_name=group,
        configs=[AlterableConfig(name="share.isolation.level", value="read_committed")],
    )
    answer = client.call(AlterConfigsRequest(resources=[resource])).responses[0]
    assert not answer.error_code
    shown = shown_settings(client, group)
    assert shown["share.delivery.count.limit"] == ("5", 5)
    assert shown["share.isolation.level"] == ("read_committed", 8)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("share.delivery.count.limit", "0", "INVALID_CONFIG"),
        ("share.delivery.count.limit", "many", "INVALID_CONFIG"),
        ("share.auto.offset.reset", "none", "INVALID_CONFIG"),
        ("share.auto.offset.reset", "by_duration:4h", "INVALID_CONFIG"),
        ("share.isolation.level", "read", "INVALID_CONFIG"),
        ("share.session.timeout.ms", "4000", "INVALID_CONFIG"),
        ("no.such.setting", "1", "INVALID_CONFIG"),
        ("share.delivery.count.limit", None, "INVALID_REQUEST"),
    ],
)
def test_wrong_settings_are_refused(
    shared: Broker, client: RawClient, name: str, value: str | None, error: str
) -> None:
    group = new_name("g")
    assert stepped(client, group, (0, name, value)) == error
    assert all(source == 5 for _, source in shown_settings(client, group).values())


def test_a_group_needs_a_name(client: RawClient) -> None:
    assert stepped(client, "", (0, "share.delivery.count.limit", "9")) == "INVALID_REQUEST"


def test_settings_of_a_group_are_what_its_table_says() -> None:
    defaults = group_settings({})
    for setting in GROUP_SETTINGS.values():
        assert getattr(defaults, setting.name.replace(".", "_")) == setting.default
    with pytest.raises(ConfigError, match="did you mean"):
        group_settings({"share.delivery.count": "1"})


@pytest.mark.parametrize(
    ("text", "ms"),
    [("PT1H", 3_600_000), ("P1DT0.5S", 86_400_500), ("pt90m", 5_400_000), ("P", None),
     ("PT", None), ("-PT1H", None), ("1h", None), ("PT1.5H", None)],
)  # fmt: skip
def test_durations(text: str, ms: int | None) -> None:
    assert duration_ms(text) == ms
