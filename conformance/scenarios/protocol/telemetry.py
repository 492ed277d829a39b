"""What is answered about client metrics: subscriptions and pushes (KIP-714)."""

from __future__ import annotations

from time import monotonic
from typing import Any, Final
from uuid import UUID, uuid4

from conformance.scenario import scenario
from penstock.records.compression import GZIP, LZ4, NONE, SNAPPY, ZSTD, compress
from penstock.wire.messages.api_versions import ApiVersionsRequest
from penstock.wire.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
)
from penstock.wire.messages.get_telemetry_subscriptions import GetTelemetrySubscriptionsRequest
from penstock.wire.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from penstock.wire.messages.list_config_resources import ListConfigResourcesRequest
from penstock.wire.messages.push_telemetry import PushTelemetryRequest
from penstock.wire.zero import ZERO_UUID
from tests.broker.protocol_client import READY_TIMEOUT_S, ProtocolClient, error_name
from tests.broker.requests import DELETE, SET, new_name

MAX_BYTES: Final = 1 << 20
CLIENT_METRICS: Final = 16
# Of a kind of client that there is not: other scenarios run on the same broker.
NOBODY: Final = "client_id=nobody-at-all"


def subscribed(client: ProtocolClient, instance_id: UUID) -> Any:
    return client.call(GetTelemetrySubscriptionsRequest(client_instance_id=instance_id))


def pushed(
    client: ProtocolClient,
    instance_id: UUID,
    subscription_id: int,
    metrics: bytes = b"metrics",
    codec: int = NONE,
    *,
    terminating: bool = False,
) -> str:
    request = PushTelemetryRequest(
        client_instance_id=instance_id,
        subscription_id=subscription_id,
        terminating=terminating,
        compression_type=codec,
        metrics=metrics,
    )
    return error_name(client.call(request).error_code)


def new_instance(client: ProtocolClient) -> tuple[UUID, int]:
    """A client that has just asked for its subscription."""
    told = subscribed(client, ZERO_UUID)
    return told.client_instance_id, told.subscription_id


@scenario()
def client_metrics_are_not_offered(client: ProtocolClient) -> Any:
    """Nobody receives them, so ApiVersions does not name them; they are answered all the same."""
    request = ApiVersionsRequest(client_software_name="test", client_software_version="1")
    return [item.api_key for item in client.call(request).api_keys if item.api_key in (71, 72)]


@scenario()
def subscriptions_to_client_metrics(client: ProtocolClient) -> Any:
    """No metrics are requested; a client without an id gets one, and asks once in an interval."""
    own, given = uuid4(), subscribed(client, ZERO_UUID)
    outcomes: list[Any] = [given.client_instance_id.version]
    for instance_id in (own, own, given.client_instance_id):
        told = subscribed(client, instance_id)
        outcomes.append(
            (error_name(told.error_code), told.client_instance_id == instance_id,
             told.accepted_compression_types, told.push_interval_ms, told.telemetry_max_bytes,
             told.delta_temporality, told.requested_metrics)
        )  # fmt: skip
    # Of an id that is always the same, so is the subscription.
    outcomes.append(
        subscribed(client, UUID("a6b1f0c2-7d43-4e19-8f25-9c0d3b7e5a64")).subscription_id
    )
    return outcomes


@scenario()
def pushes_of_client_metrics(client: ProtocolClient) -> Any:
    """One at once after each subscription, in any codec; then one in an interval."""
    outcomes = []
    for codec in (NONE, GZIP, SNAPPY, LZ4, ZSTD):
        instance_id, subscription_id = new_instance(client)
        metrics = compress(codec, b"metrics") if codec else b"metrics"
        outcomes += [
            pushed(client, instance_id, subscription_id, metrics, codec),
            pushed(client, instance_id, subscription_id, metrics, codec),
            error_name(subscribed(client, instance_id).error_code),
        ]
    return outcomes


@scenario()
def pushes_that_are_refused(client: ProtocolClient) -> Any:
    """Unknown subscriptions and codecs, metrics that are damaged or too large, reserved ids."""
    outcomes = [pushed(client, UUID(int=number), 0) for number in (0, 1)]
    for changed, metrics, codec in (
        (1, b"metrics", NONE), (0, b"metrics", 5), (0, b"metrics", -1), (0, b"junk", GZIP),
        (0, b"junk", ZSTD), (0, b"", GZIP), (0, bytes(MAX_BYTES), NONE),
        (0, bytes(MAX_BYTES + 1), NONE),
    ):  # fmt: skip
        instance_id, subscription_id = new_instance(client)
        outcomes += [
            pushed(client, instance_id, subscription_id ^ changed, metrics, codec),
            error_name(subscribed(client, instance_id).error_code),
        ]
    return outcomes


@scenario()
def the_last_push_of_a_client(client: ProtocolClient) -> Any:
    """It need not wait for the interval, and nothing is taken after it."""
    instance_id, subscription_id = new_instance(client)
    return [
        pushed(client, instance_id, subscription_id, terminating=terminating)
        for terminating in (False, True, True, False)
    ]


# ---- subscriptions, as admins set them -------------------------------------------------------


def altered(client: ProtocolClient, name: str, *changes: tuple[int, str, str | None]) -> str:
    configs = [
        AlterableConfig(name=setting, config_operation=operation, value=value)
        for operation, setting, value in changes
    ]
    resource = AlterConfigsResource(
        resource_type=CLIENT_METRICS, resource_name=name, configs=configs
    )
    answer = client.call(IncrementalAlterConfigsRequest(resources=[resource]))
    return error_name(answer.responses[0].error_code)


def described(client: ProtocolClient, name: str) -> Any:
    resource = DescribeConfigsResource(
        resource_type=CLIENT_METRICS, resource_name=name, configuration_keys=None
    )
    (result,) = client.call(DescribeConfigsRequest(resources=[resource])).results
    settings = sorted(
        (item.name, item.value, item.config_source, item.config_type) for item in result.configs
    )
    return error_name(result.error_code), settings


def listed(client: ProtocolClient, name: str) -> list[bool]:
    """Whether there is such a subscription, in both versions."""
    answers = [
        client.call(ListConfigResourcesRequest(), 0),
        client.call(ListConfigResourcesRequest(resource_types=[CLIENT_METRICS]), 1),
    ]
    return [
        name in {resource.resource_name for resource in answer.config_resources}
        for answer in answers
    ]


def wait_listed(client: ProtocolClient, name: str, *, there: bool) -> None:
    """Kafka's broker learns of a change a moment after its controller has answered."""
    deadline = monotonic() + READY_TIMEOUT_S
    while listed(client, name) != [there, there]:
        assert monotonic() < deadline


@scenario()
def subscriptions_are_set_shown_and_removed(client: ProtocolClient) -> Any:
    """Described and listed like other settings; without any setting there is no subscription."""
    name = new_name()
    outcomes = [described(client, name), listed(client, name)]
    changes = ((SET, "metrics", "org.apache.a,org.apache.b"), (SET, "interval.ms", "1000"))
    outcomes.append(altered(client, name, *changes, (SET, "match", NOBODY)))
    wait_listed(client, name, there=True)
    outcomes.append(described(client, name))
    removals = ((DELETE, setting, None) for setting in ("metrics", "interval.ms", "match"))
    outcomes.append(altered(client, name, *removals))
    wait_listed(client, name, there=False)
    outcomes.append(described(client, name))
    return outcomes


@scenario()
def subscriptions_that_are_refused(client: ProtocolClient) -> Any:
    """Unknown settings, intervals out of bounds, patterns of unknown attributes or bad syntax."""
    name = new_name()
    outcomes = [altered(client, "", (SET, "match", NOBODY)), described(client, "")[0]]
    outcomes += [
        altered(client, name, (SET, setting, value))
        for setting, value in (
            ("no.such.setting", "1"), ("interval.ms", "99"), ("interval.ms", "3600001"),
            ("interval.ms", "often"), ("match", "planet=earth"), ("match", "client_id"),
            ("match", "client_id="), ("match", "client_id=["), ("match", "client_id=a=b"),
        )
    ]  # fmt: skip
    return [*outcomes, listed(client, name)]
