"""Client metrics: subscriptions, pushes, and how often clients may send either."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from penstock.broker import client_metrics, telemetry
from penstock.broker.catalog import ApiError
from penstock.broker.telemetry import MAX_BYTES, PUSH_INTERVAL_MS, ClientTelemetry, Push
from penstock.records.compression import GZIP, LZ4, SNAPPY, ZSTD, compress
from penstock.testing.broker import Broker
from penstock.wire.errors import ErrorCode
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
from tests.broker.raw import RawClient
from tests.broker.requests import DELETE, SET, new_name
from tests.broker.waits import wait_until

THROTTLED = ErrorCode.THROTTLING_QUOTA_EXCEEDED
HERE = object()


def push(
    instance_id: UUID,
    metrics: bytes = b"metrics",
    *,
    codec: int = 0,
    subscription: int | None = None,
    last: bool = False,
) -> Push:
    own = telemetry.subscription_id(instance_id)
    return Push(own if subscription is None else subscription, last, codec, metrics)


def refusal(call: Callable[[], object]) -> ErrorCode:
    """With what a call is refused; NONE if it is not."""
    try:
        call()
    except ApiError as error:
        return error.code
    return ErrorCode.NONE


class Client:
    """One client instance, and what its requests are answered."""

    def __init__(self, clients: ClientTelemetry) -> None:
        self.clients = clients
        self.id = uuid4()
        self.now_ms = 1_000

    def ask(self) -> ErrorCode:
        return refusal(lambda: self.clients.subscribe(self.id, HERE, self.now_ms))

    def push(
        self,
        metrics: bytes = b"metrics",
        *,
        codec: int = 0,
        subscription: int | None = None,
        last: bool = False,
    ) -> ErrorCode:
        request = push(self.id, metrics, codec=codec, subscription=subscription, last=last)
        return refusal(lambda: self.clients.push(self.id, request, HERE, self.now_ms))

    def wait(self) -> None:
        self.now_ms += PUSH_INTERVAL_MS


@pytest.fixture
def client_instance() -> Client:
    return Client(ClientTelemetry())


# ---- how often -------------------------------------------------------------------------------


def test_a_subscription_may_be_asked_for_once_in_an_interval(client_instance: Client) -> None:
    assert client_instance.ask() == ErrorCode.NONE
    assert client_instance.ask() == THROTTLED
    client_instance.now_ms += PUSH_INTERVAL_MS - 1
    assert client_instance.ask() == THROTTLED
    client_instance.now_ms += 1
    assert client_instance.ask() == ErrorCode.NONE


def test_after_a_subscription_metrics_may_be_pushed_at_once(client_instance: Client) -> None:
    client_instance.ask()
    client_instance.now_ms += 1
    assert client_instance.push() == ErrorCode.NONE
    assert client_instance.push() == THROTTLED
    assert client_instance.ask() == THROTTLED
    client_instance.wait()
    assert client_instance.push() == ErrorCode.NONE


def test_a_client_that_names_another_subscription_may_ask_again(client_instance: Client) -> None:
    client_instance.ask()
    client_instance.now_ms += 1
    assert client_instance.push(subscription=7) == ErrorCode.UNKNOWN_SUBSCRIPTION_ID
    assert client_instance.ask() == ErrorCode.NONE
    assert client_instance.ask() == THROTTLED


def test_a_client_that_ends_may_push_once_more(client_instance: Client) -> None:
    client_instance.push()
    assert client_instance.push(last=True) == ErrorCode.NONE
    client_instance.wait()
    assert client_instance.push(last=True) == ErrorCode.INVALID_REQUEST


# ---- what is pushed --------------------------------------------------------------------------


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_metrics_may_be_compressed(client_instance: Client, codec: int) -> None:
    assert client_instance.push(compress(codec, b"metrics" * 100), codec=codec) == ErrorCode.NONE
    client_instance.wait()
    assert client_instance.push(b"junk", codec=codec) == ErrorCode.INVALID_RECORD
    client_instance.wait()
    bomb = compress(codec, bytes(MAX_BYTES + 1))
    assert client_instance.push(bomb, codec=codec) == ErrorCode.INVALID_RECORD


@pytest.mark.parametrize("codec", [-1, 5])
def test_unknown_codecs_are_refused(client_instance: Client, codec: int) -> None:
    client_instance.ask()
    client_instance.now_ms += 1
    assert client_instance.push(codec=codec) == ErrorCode.UNSUPPORTED_COMPRESSION_TYPE
    assert client_instance.ask() == ErrorCode.NONE


def test_metrics_have_a_limit(client_instance: Client) -> None:
    assert client_instance.push(bytes(MAX_BYTES)) == ErrorCode.NONE
    client_instance.wait()
    assert client_instance.push(bytes(MAX_BYTES + 1)) == ErrorCode.TELEMETRY_TOO_LARGE
    client_instance.wait()
    assert client_instance.push(b"") == ErrorCode.NONE


def test_reserved_ids_are_of_no_client() -> None:
    clients = ClientTelemetry()
    for reserved in (ZERO_UUID, UUID(int=1)):
        request = push(reserved)
        code = refusal(lambda id_=reserved, it=request: clients.push(id_, it, HERE, 0))  # type: ignore[misc]
        assert code == ErrorCode.INVALID_REQUEST
    assert len(clients) == 0


def test_ids_of_subscriptions_are_as_kafka_computes_them() -> None:
    """(int) CRC32C("[]300000") ^ Uuid.hashCode()."""
    zero = telemetry.subscription_id(ZERO_UUID)
    assert -(1 << 31) <= zero < 1 << 31
    assert telemetry.subscription_id(UUID(int=1)) == zero ^ 1
    assert telemetry.subscription_id(UUID(int=1 << 96)) == zero ^ 1
    assert telemetry.subscription_id(UUID(int=(1 << 64) + 1)) == zero
    assert telemetry.subscription_id(UUID(int=1 << 63)) == zero ^ -(1 << 31)


# ---- what is remembered ----------------------------------------------------------------------


def test_silent_clients_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(telemetry, "MAX_INSTANCES", 3)
    clients = ClientTelemetry()
    ids = [uuid4() for _ in range(5)]
    for at, instance_id in enumerate(ids):
        clients.subscribe(instance_id, HERE, at)
    assert len(clients) == 3
    # The longest silent had to go, and may ask again at once.
    clients.subscribe(ids[0], HERE, 10)
    assert refusal(lambda: clients.subscribe(ids[4], HERE, 11)) == THROTTLED
    clients.subscribe(uuid4(), HERE, 11 + telemetry.EXPIRATION_MS)
    assert len(clients) == 1


def test_who_disconnects_is_forgotten(
    broker: Broker, connect: Callable[[Broker], RawClient]
) -> None:
    request = GetTelemetrySubscriptionsRequest(client_instance_id=uuid4())
    first, other = connect(broker), connect(broker)
    assert first.call(request).error_code == 0
    assert other.call(request).error_code == THROTTLED
    first.close()
    wait_until(broker, lambda own: len(own.telemetry) == 0)
    assert other.call(request).error_code == 0


def test_a_client_without_an_id_gets_one(client: RawClient) -> None:
    told = client.call(GetTelemetrySubscriptionsRequest())
    assert told.error_code == 0
    assert told.client_instance_id not in (ZERO_UUID, None)
    assert (told.requested_metrics, told.push_interval_ms) == ([], PUSH_INTERVAL_MS)
    assert told.accepted_compression_types == [ZSTD, LZ4, GZIP, SNAPPY]
    assert (told.telemetry_max_bytes, told.delta_temporality) == (MAX_BYTES, True)
    pushed = PushTelemetryRequest(
        client_instance_id=told.client_instance_id,
        subscription_id=told.subscription_id,
        metrics=b"metrics",
    )
    assert client.call(pushed).error_code == 0
    assert client.call(pushed).error_code == THROTTLED


# ---- subscriptions, as admins set them -------------------------------------------------------


def resource_settings(client: RawClient, name: str) -> dict[str, str]:
    resource = DescribeConfigsResource(
        resource_type=16, resource_name=name, configuration_keys=None
    )
    (result,) = client.call(DescribeConfigsRequest(resources=[resource])).results
    assert not result.error_code
    return {item.name: item.value for item in result.configs}


def altered(client: RawClient, name: str, *changes: tuple[int, str, str | None]) -> ErrorCode:
    configs = [
        AlterableConfig(name=setting, config_operation=operation, value=value)
        for operation, setting, value in changes
    ]
    resource = AlterConfigsResource(resource_type=16, resource_name=name, configs=configs)
    answer = client.call(IncrementalAlterConfigsRequest(resources=[resource]))
    return ErrorCode(answer.responses[0].error_code)


def names_of_subscriptions(client: RawClient, version: int = 1) -> set[str]:
    request = ListConfigResourcesRequest(resource_types=[16] if version else [])
    answer = client.call(request, version)
    assert {item.resource_type for item in answer.config_resources} <= {16}
    return {item.resource_name for item in answer.config_resources}


def test_a_subscription_outlives_a_restart(tmp_path: Path) -> None:
    folder = str(tmp_path / "data")
    defaults = {"metrics": "", "interval.ms": "300000", "match": ""}
    wanted = {"metrics": "a.b,c", "interval.ms": "1000", "match": "client_id=x.*"}
    with Broker(folder) as broker, RawClient(broker.bootstrap) as client:
        assert resource_settings(client, "mine") == defaults
        changes = [(SET, name, value) for name, value in wanted.items()]
        assert altered(client, "mine", *changes) == ErrorCode.NONE
    with Broker(folder) as broker, RawClient(broker.bootstrap) as client:
        assert resource_settings(client, "mine") == wanted
        assert names_of_subscriptions(client) == names_of_subscriptions(client, 0) == {"mine"}
        # No metrics are requested all the same: nothing receives them.
        assert client.call(GetTelemetrySubscriptionsRequest()).requested_metrics == []
        removals = [(DELETE, name, None) for name in wanted]
        assert altered(client, "mine", *removals) == ErrorCode.NONE
        assert names_of_subscriptions(client) == set()
        assert resource_settings(client, "mine") == defaults


@pytest.mark.parametrize(
    ("setting", "value", "code"),
    [
        ("no.such.setting", "1", ErrorCode.INVALID_REQUEST),
        ("interval.ms", "99", ErrorCode.INVALID_REQUEST),
        ("interval.ms", "3600001", ErrorCode.INVALID_REQUEST),
        ("interval.ms", "often", ErrorCode.INVALID_CONFIG),
        ("metrics", "a,b,a", ErrorCode.INVALID_CONFIG),
        ("match", "planet=earth", ErrorCode.INVALID_CONFIG),
        ("match", "client_id", ErrorCode.INVALID_CONFIG),
        ("match", "client_id=[", ErrorCode.INVALID_CONFIG),
        ("match", "client_id=a=b", ErrorCode.INVALID_CONFIG),
    ],
)
def test_wrong_subscriptions_are_refused(
    client: RawClient, setting: str, value: str, code: ErrorCode
) -> None:
    name = new_name()
    assert altered(client, name, (SET, setting, value)) == code
    assert name not in names_of_subscriptions(client)


def test_subscriptions_have_a_limit(client: RawClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_metrics, "MAX_SUBSCRIPTIONS", 0)
    change = (SET, "metrics", "*")
    assert altered(client, new_name(), change) == ErrorCode.POLICY_VIOLATION
    assert altered(client, "", change) == ErrorCode.INVALID_REQUEST
