"""Settings of brokers that are changed while they run: the defaults of topics.

They hold for everybody, so each scenario takes back what it has set.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any, Final

from conformance.scenario import scenario
from penstock.records.batch import headers
from penstock.wire.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
)
from penstock.wire.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from tests.broker.protocol_client import READY_TIMEOUT_S, ProtocolClient, error_name
from tests.broker.requests import DELETE, SET, batch, fetch, metadata, one, produce

TOPIC, BROKER = 2, 4
ALL: Final = ""
Change = tuple[int, str, str | None]


def own_name(client: ProtocolClient) -> str:
    """The name of the broker that is asked."""
    return str(client.call(metadata()).brokers[0].node_id)


def changed(client: ProtocolClient, broker: str, *changes: Change, validate: bool = False) -> str:
    configs = [
        AlterableConfig(name=name, config_operation=operation, value=value)
        for operation, name, value in changes
    ]
    resource = AlterConfigsResource(resource_type=BROKER, resource_name=broker, configs=configs)
    request = IncrementalAlterConfigsRequest(resources=[resource], validate_only=validate)
    return error_name(client.call(request).responses[0].error_code)


@contextmanager
def taken_back(client: ProtocolClient, *names: str) -> Iterator[str]:
    """The name of the broker; what is set of these settings is removed again."""
    own = own_name(client)
    try:
        yield own
    finally:
        for broker in (ALL, own):
            changed(client, broker, *((DELETE, name, None) for name in names))


def described(client: ProtocolClient, kind: int, name: str, *settings: str) -> Any:
    """Value and source of settings."""
    resource = DescribeConfigsResource(
        resource_type=kind, resource_name=name, configuration_keys=list(settings)
    )
    result = client.call(DescribeConfigsRequest(resources=[resource])).results[0]
    assert not result.error_code, result.error_message
    return sorted((item.name, item.value, item.config_source) for item in result.configs)


def becomes(client: ProtocolClient, topic: str, setting: str, value: str) -> Any:
    """The setting of a topic once it is as expected: Kafka shows a change a moment after it."""
    deadline = monotonic() + READY_TIMEOUT_S
    while True:
        (found,) = described(client, TOPIC, topic, setting)
        if found[1] == value or monotonic() > deadline:
            return found


@scenario()
def defaults_of_topics(client: ProtocolClient) -> Any:
    """What a topic does not say is said by its broker, then by all brokers, from where it shows."""
    name, topic = "log.retention.ms", client.topic()
    other = client.topic(retention_ms="7000")
    with taken_back(client, name) as own:
        seen = [becomes(client, topic, "retention.ms", "604800000")]
        for broker, value in ((ALL, "50000"), (own, "60000")):
            seen.append(changed(client, broker, (SET, name, value)))
            seen.append(becomes(client, topic, "retention.ms", value))
            seen.append(described(client, BROKER, broker, name))
        seen.append(becomes(client, other, "retention.ms", "7000"))
        for broker, value in ((own, "50000"), (ALL, "604800000")):
            seen.append(changed(client, broker, (DELETE, name, None)))
            seen.append(becomes(client, topic, "retention.ms", value))
        return seen


@scenario()
def a_default_codec(client: ProtocolClient) -> Any:
    """It holds for topics that are there, and for those that come."""
    name, before = "compression.type", client.topic()
    with taken_back(client, name):
        answer = changed(client, ALL, (SET, name, "gzip"))
        becomes(client, before, name, "gzip")
        codecs = []
        for topic in (before, client.topic(), client.topic(compression_type="zstd")):
            client.produced(produce(topic, batch(b"x")))
            data = bytes(one(client.call(fetch(topic, max_wait_ms=5_000), 12)).records)
            codecs.append([header.codec for _, header in headers(data)])
        return answer, codecs


@scenario()
def settings_that_cannot_be_changed(client: ProtocolClient) -> Any:
    """Those that are given at the start, wrong values, brokers that are not there."""
    with taken_back(client, "log.retention.ms") as own:
        return [
            changed(client, broker, *changes)
            for broker in (own, ALL)
            for changes in (
                [(SET, "num.partitions", "7")],
                [(SET, "log.dirs", "/nowhere")],
                [(SET, "log.retention.ms", "soon")],
                [(SET, "compression.type", "brotli")],
                [(SET, "log.retention.ms", "1000"), (SET, "num.partitions", "7")],
            )
        ] + [
            changed(client, "77", (SET, "log.retention.ms", "1000")),
            changed(client, own, (SET, "log.retention.ms", "1000"), validate=True),
            described(client, BROKER, ALL, "log.retention.ms"),
        ]
