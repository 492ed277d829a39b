"""Topics: made, described, counted, deleted; done on return, for whoever asks next."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

from penstock.client.connection import Cluster, Connection
from penstock.client.errors import ClientError, check, refused
from penstock.client.metadata import EARLIEST, Metadata, offsets
from penstock.client.retrying import Tries, until_answered
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsTopic,
)
from penstock.wire.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
)
from penstock.wire.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from penstock.wire.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
)
from penstock.wire.messages.metadata import MetadataRequest

Answer = TypeVar("Answer")

TIMEOUT_S: Final = 60.0
# The broker's default.
DEFAULT: Final = -1
_REQUEST_TIMEOUT_MS: Final = 10_000
_TOPIC_RESOURCE: Final = 2
_BY_STATE_FROM: Final = 6
_DEFAULTS_FROM: Final = 4


def create(
    cluster: Cluster,
    name: str,
    *,
    partitions: int = DEFAULT,
    replication: int = DEFAULT,
    config: Mapping[str, str] | None = None,
    exists_ok: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> bool:
    """Make a topic, and wait until each partition has a leader; False if it was there already.

    With `exists_ok` one that is there is left as it is, whatever its settings.
    """
    doing = f"making the topic {name!r}"
    request = CreateTopicsRequest(
        topics=[
            CreatableTopic(
                name=name,
                num_partitions=partitions,
                replication_factor=replication,
                configs=[
                    CreatableTopicConfig(name=key, value=value)
                    for key, value in (config or {}).items()
                ],
            )
        ],
        timeout_ms=_REQUEST_TIMEOUT_MS,
    )
    at_least = _DEFAULTS_FROM if DEFAULT in (partitions, replication) else 0
    asked_before = False

    def ask(connection: Connection) -> bool:
        nonlocal asked_before
        again, asked_before = asked_before, True
        told = connection.call(request, at_least=at_least).topics[0]
        if told.error_code == ErrorCode.TOPIC_ALREADY_EXISTS and (exists_ok or again):
            # Asked again after an answer was lost, we may have made it ourselves.
            return again and not exists_ok
        check(told.error_code, doing, told.error_message)
        return True

    made = _at_controller(cluster, ask, doing, timeout_s)
    _wait_for_leaders(cluster, name, timeout_s)
    return made


def delete(
    cluster: Cluster,
    names: Iterable[str],
    *,
    missing_ok: bool = False,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Delete topics."""
    for name in names:
        doing = f"deleting the topic {name!r}"

        def ask(connection: Connection, name: str = name, doing: str = doing) -> None:
            request = DeleteTopicsRequest(timeout_ms=_REQUEST_TIMEOUT_MS)
            if connection.version_of(DeleteTopicsRequest) >= _BY_STATE_FROM:
                request.topics = [DeleteTopicState(name=name)]
            else:
                request.topic_names = [name]
            told = connection.call(request).responses[0]
            if told.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION and missing_ok:
                return
            check(told.error_code, doing, told.error_message)

        _at_controller(cluster, ask, doing, timeout_s)


def add_partitions(
    cluster: Cluster, name: str, count: int, *, timeout_s: float = TIMEOUT_S
) -> None:
    """Let a topic have so many partitions from now on; keys move to others thereby."""
    doing = f"raising the partitions of {name!r} to {count}"
    request = CreatePartitionsRequest(
        topics=[CreatePartitionsTopic(name=name, count=count, assignments=None)],
        timeout_ms=_REQUEST_TIMEOUT_MS,
    )

    def ask(connection: Connection) -> None:
        told = connection.call(request).results[0]
        check(told.error_code, doing, told.error_message)

    _at_controller(cluster, ask, doing, timeout_s)
    _wait_for_leaders(cluster, name, timeout_s, at_least=count)


def configs(cluster: Cluster, name: str, *, timeout_s: float = TIMEOUT_S) -> dict[str, str | None]:
    """All settings of a topic, those that are defaults too."""
    doing = f"asking for the settings of {name!r}"
    request = DescribeConfigsRequest(
        resources=[
            DescribeConfigsResource(
                resource_type=_TOPIC_RESOURCE, resource_name=name, configuration_keys=None
            )
        ]
    )

    def ask() -> Any:
        told = cluster.any().call(request).results[0]
        check(told.error_code, doing, told.error_message)
        return told

    found = until_answered(ask, doing, timeout_s)
    return {item.name: item.value for item in found.configs}


def partition_counts(cluster: Cluster, names: Iterable[str]) -> dict[str, int]:
    """How many partitions those of the topics have that exist."""
    metadata = Metadata(cluster)
    return {name: len(metadata.partitions(name)) for name in metadata.topics(list(names))}


def _at_controller(
    cluster: Cluster, ask: Callable[[Connection], Answer], doing: str, timeout_s: float
) -> Answer:
    """Ask any broker, which in most clusters passes it on; else the controller itself."""
    tries = Tries(timeout_s)
    connect: Callable[[], Connection] = cluster.any
    while True:
        try:
            return ask(connect())
        except ClientError as error:
            tries.pause(error, doing)
            if getattr(error, "code", None) == ErrorCode.NOT_CONTROLLER:
                connect = lambda: _controller(cluster)  # noqa: E731
            else:
                connect = cluster.any


def _controller(cluster: Cluster) -> Connection:
    told = cluster.any().call(MetadataRequest(topics=[]), at_least=1)
    for broker in told.brokers:
        if broker.node_id == told.controller_id:
            return cluster.at((broker.host, broker.port))
    return cluster.any()


def _wait_for_leaders(cluster: Cluster, name: str, timeout_s: float, at_least: int = 1) -> None:
    metadata = Metadata(cluster, timeout_s=timeout_s)
    tries = Tries(timeout_s, unknown_topic_s=timeout_s)
    while True:
        metadata.forget([name])
        leaders = metadata.topic(name).leaders
        if len(leaders) >= at_least and all(node >= 0 for node in leaders.values()):
            # The leaders themselves may hear of it last; one that answers this one knows.
            places = {(name, number): EARLIEST for number in leaders}
            offsets(cluster, places, metadata=metadata, timeout_s=timeout_s)
            return
        doing = f"waiting for the leaders of {name!r}"
        tries.pause(refused(doing, ErrorCode.LEADER_NOT_AVAILABLE), doing)
