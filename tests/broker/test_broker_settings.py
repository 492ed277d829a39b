"""Settings of the broker that are changed while it runs: the defaults of topics."""

from __future__ import annotations

from typing import Any

from penstock.broker.server import Broker as Server
from penstock.log.config import SETTINGS, TOPIC_SETTING_OF
from penstock.testing.broker import Broker
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.alter_configs import AlterableConfig as WholeConfig
from penstock.wire.messages.alter_configs import AlterConfigsRequest
from penstock.wire.messages.alter_configs import AlterConfigsResource as WholeResource
from penstock.wire.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from tests.broker.raw import RawClient
from tests.broker.requests import APPEND, DELETE, SET, create

BROKER = 4


def change(client: RawClient, *steps: tuple[int, str, str | None], broker: str = "") -> Any:
    configs = [
        AlterableConfig(name=name, config_operation=operation, value=value)
        for operation, name, value in steps
    ]
    resource = AlterConfigsResource(resource_type=BROKER, resource_name=broker, configs=configs)
    return client.call(IncrementalAlterConfigsRequest(resources=[resource])).responses[0]


def retention_ms(broker: Broker, topic: str) -> int:
    def look(server: Server) -> int:
        partition = server.partition(topic, 0)
        assert partition is not None
        assert partition.config == server.catalog.topics[topic].config
        return partition.config.retention_ms

    return broker.call(look)


def made(client: RawClient, name: str, **configs: str) -> str:
    result = client.call(create(name, configs=configs)).topics[0]
    assert not result.error_code, result.error_message
    return name


def test_every_setting_of_kafka_is_a_default_of_a_topic() -> None:
    assert set(TOPIC_SETTING_OF.values()) <= set(SETTINGS)
    assert len(set(TOPIC_SETTING_OF.values())) == len(TOPIC_SETTING_OF)


def test_partitions_follow_at_once_and_over_restarts(broker: Broker) -> None:
    with RawClient(broker.bootstrap) as client:
        made(client, "before")
        made(client, "own", retention_ms="7000")
        assert not change(client, (SET, "log.retention.ms", "50000")).error_code
        assert not change(client, (SET, "log.retention.ms", "60000"), broker="1").error_code
        made(client, "after")
    for _ in range(2):
        assert [retention_ms(broker, name) for name in ("before", "own", "after")] == [
            60_000, 7_000, 60_000,
        ]  # fmt: skip
        broker.crash()
        broker.start()
    with RawClient(broker.bootstrap) as client:
        assert not change(client, (DELETE, "log.retention.ms", None), broker="1").error_code
    assert retention_ms(broker, "before") == 50_000


def test_the_older_form_replaces_all(broker: Broker) -> None:
    with RawClient(broker.bootstrap) as client:
        made(client, "t")
        change(client, (SET, "log.retention.ms", "50000"))
        config = WholeConfig(name="log.segment.bytes", value="5000")
        resource = WholeResource(resource_type=BROKER, resource_name="", configs=[config])
        result = client.call(AlterConfigsRequest(resources=[resource])).responses[0]
        assert not result.error_code, result.error_message
    assert retention_ms(broker, "t") == 7 * 86_400_000
    assert broker.call(lambda server: server.catalog.topics["t"].config.segment_bytes) == 5_000


def test_lists_are_appended_to(broker: Broker) -> None:
    with RawClient(broker.bootstrap) as client:
        made(client, "t")
        assert not change(client, (APPEND, "log.cleanup.policy", "compact")).error_code
    policy = broker.call(lambda server: server.catalog.topics["t"].config.cleanup_policy)
    assert policy == ("delete", "compact")


def test_what_no_topic_could_bear_is_refused(broker: Broker) -> None:
    """A topic in memory cannot be compacted: the default is refused, and the topic named."""
    with RawClient(broker.bootstrap) as client:
        made(client, "fleeting", durability="memory")
        result = change(client, (SET, "log.cleanup.policy", "compact"))
        assert ErrorCode(result.error_code) == ErrorCode.INVALID_REQUEST
        assert "'fleeting'" in (result.error_message or "")
        assert not change(client, (SET, "log.retention.ms", "50000")).error_code
    assert retention_ms(broker, "fleeting") == 50_000
