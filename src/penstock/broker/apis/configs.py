"""Settings of topics, groups and client metrics, shown and changed; the broker's own, shown.

Of the broker's settings those can be changed that are defaults of topics, under the names that
Kafka has for them: for this broker, or, with no name, for all. The others are given at its start.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from penstock.broker.apis.context import RequestContext
from penstock.broker.apis.topics import FROM_DEFAULT, FROM_TOPIC, error_of, repeated
from penstock.broker.catalog import ALL_BROKERS, ApiError, Topic, check_name
from penstock.broker.client_metrics import SUBSCRIPTION_SETTINGS
from penstock.broker.config import NODE_ID
from penstock.broker.groups.settings import DEAD_LETTER_TOPIC, GROUP_SETTINGS
from penstock.broker.groups.share import ShareGroup
from penstock.broker.shares.dead_letters import READS_ITSELF
from penstock.errors import LogError
from penstock.log.config import SETTINGS, TOPIC_SETTING_OF, Setting
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.alter_configs import (
    AlterConfigsRequest,
    AlterConfigsResource,
    AlterConfigsResourceResponse,
    AlterConfigsResponse,
)
from penstock.wire.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
)
from penstock.wire.messages.incremental_alter_configs import (
    AlterableConfig,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from penstock.wire.messages.incremental_alter_configs import (
    AlterConfigsResource as IncrementalResource,
)
from penstock.wire.messages.incremental_alter_configs import (
    AlterConfigsResourceResponse as IncrementalResult,
)
from penstock.wire.messages.list_config_resources import (
    ConfigResource,
    ListConfigResourcesRequest,
    ListConfigResourcesResponse,
)

if TYPE_CHECKING:
    from penstock.broker.server import Broker

TOPIC: Final = 2
BROKER: Final = 4
CLIENT_METRICS: Final = 16
GROUP: Final = 32
FROM_DYNAMIC_BROKER: Final = 2
FROM_ALL_BROKERS: Final = 3
FROM_BROKER: Final = 4
FROM_CLIENT_METRICS: Final = 7
FROM_GROUP: Final = 8
SET, DELETE, APPEND, SUBTRACT = range(4)
# Throttles of replication: Kafka's tool for reassignments removes them after each, set or not.
_THROTTLES: Final = frozenset(
    {
        "leader.replication.throttled.rate",
        "follower.replication.throttled.rate",
        "replica.alter.log.dirs.io.max.bytes.per.second",
    }
)
_DYNAMIC: Final[dict[str, Setting]] = {
    name: replace(SETTINGS[topic_name], name=name) for name, topic_name in TOPIC_SETTING_OF.items()
}
_BROKER_NAME_OF: Final = {topic_name: name for name, topic_name in TOPIC_SETTING_OF.items()}
_TYPES: Final = {"bool": 1, "string": 2, "int": 3, "long": 5, "double": 6, "list": 7}

# What a resource's settings are to become, from what they are.
Change = Callable[[Mapping[str, str]], Mapping[str, str]]
Resource = TypeVar("Resource", AlterConfigsResource, IncrementalResource)


@dataclass(frozen=True, slots=True)
class Configured:
    """A topic, group or subscription to client metrics: which settings there are, which it has."""

    kind: int
    name: str
    table: Mapping[str, Setting]
    own: Mapping[str, str]
    # The defaults that it has from elsewhere, and from where, the first that counts first.
    defaults: Sequence[tuple[Mapping[str, str], int]]
    source: int


def configured(broker: Broker, kind: int, name: str) -> Configured:
    """What is known of a resource's settings; ApiError if it has none."""
    if kind == TOPIC:
        topic = topic_named(broker, name)
        return Configured(kind, name, SETTINGS, topic.settings, _topic_defaults(broker), FROM_TOPIC)
    if kind == BROKER:
        if name not in (ALL_BROKERS, str(NODE_ID)):
            raise ApiError(ErrorCode.INVALID_REQUEST, f"there is only broker {NODE_ID}")
        own = broker.catalog.broker_settings.get(name, {})
        source = FROM_DYNAMIC_BROKER if name else FROM_ALL_BROKERS
        return Configured(kind, name, _DYNAMIC, own, (), source)
    if kind == GROUP:
        if not name:
            raise ApiError(ErrorCode.INVALID_REQUEST, "a group's id is empty")
        own = broker.coordination.groups.configs.get(name, {})
        return Configured(kind, name, GROUP_SETTINGS, own, (), FROM_GROUP)
    if kind == CLIENT_METRICS:
        if not name:
            raise ApiError(ErrorCode.INVALID_REQUEST, "Subscription name can't be empty")
        own = broker.coordination.client_metrics.subscriptions.get(name, {})
        return Configured(kind, name, SUBSCRIPTION_SETTINGS, own, (), FROM_CLIENT_METRICS)
    raise ApiError(ErrorCode.INVALID_REQUEST, f"resources of type {kind} have no settings")


def _topic_defaults(broker: Broker) -> list[tuple[Mapping[str, str], int]]:
    """Where a topic's settings come from that are not its own, by the topic's names for them."""
    known = broker.catalog.broker_settings
    dynamic = [
        ({TOPIC_SETTING_OF[key]: text for key, text in known.get(name, {}).items()}, source)
        for name, source in ((str(NODE_ID), FROM_DYNAMIC_BROKER), (ALL_BROKERS, FROM_ALL_BROKERS))
    ]
    return [*dynamic, (broker.config.effective_defaults, FROM_BROKER)]


def topic_named(broker: Broker, name: str) -> Topic:
    topic = broker.catalog.topics.get(name)
    if topic is None:
        check_name(name)
        raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no such topic")
    return topic


# ---- showing -----------------------------------------------------------------------------------


async def describe_configs(
    broker: Broker, request: DescribeConfigsRequest, context: RequestContext
) -> DescribeConfigsResponse:
    results: list[DescribeConfigsResult] = []
    for resource in request.resources:
        result = DescribeConfigsResult(
            resource_type=resource.resource_type,
            resource_name=resource.resource_name,
            error_message=None,
        )
        results.append(result)
        try:
            result.configs = _describe(broker, resource, request)
        except ApiError as error:
            result.error_code, result.error_message = error_of(error)
    if any(item.resource_type in (GROUP, CLIENT_METRICS) for item in request.resources):
        await broker.coordination.commit()
    return DescribeConfigsResponse(results=results)


def _describe(
    broker: Broker, resource: DescribeConfigsResource, request: DescribeConfigsRequest
) -> list[DescribeConfigsResourceResult]:
    keys = resource.configuration_keys
    if resource.resource_type == BROKER:
        of = configured(broker, BROKER, resource.resource_name)
        found = _describe_defaults(broker, of, request)
        if of.name != ALL_BROKERS:
            found += _describe_broker(broker)
        return [item for item in found if not keys or item.name in keys]
    of = configured(broker, resource.resource_type, resource.resource_name)
    return [
        _describe_setting(of, setting, request)
        for name, setting in of.table.items()
        if not keys or name in keys
    ]


def _describe_setting(
    of: Configured, setting: Setting, request: DescribeConfigsRequest
) -> DescribeConfigsResourceResult:
    known = _candidates(of, setting)
    value, source = known[0]
    return DescribeConfigsResourceResult(
        name=setting.name,
        value=value,
        config_source=source,
        config_type=_TYPES[setting.kind],
        documentation=setting.doc if request.include_documentation else None,
        synonyms=[
            DescribeConfigsSynonym(name=setting.name, value=text, source=where)
            for text, where in known
            if request.include_synonyms
        ],
    )


def _candidates(of: Configured, setting: Setting) -> list[tuple[str, int]]:
    """The values of a setting, and where each is from; the first counts."""
    given = [(of.own, of.source), *of.defaults]
    found = [(known[setting.name], source) for known, source in given if setting.name in known]
    return [*found, (setting.render(setting.default), FROM_DEFAULT)]


def _describe_defaults(
    broker: Broker, of: Configured, request: DescribeConfigsRequest
) -> list[DescribeConfigsResourceResult]:
    """The defaults of topics: of a broker all, of all brokers those that were set."""
    if of.name == ALL_BROKERS:
        return [_describe_setting(of, _DYNAMIC[name], request) for name in of.own]
    levels = [
        ({_BROKER_NAME_OF[key]: text for key, text in known.items() if key in _BROKER_NAME_OF}, at)
        for known, at in _topic_defaults(broker)
    ]
    (own, source), *others = levels
    of = replace(of, own=own, source=source, defaults=others)
    return [_describe_setting(of, setting, request) for setting in of.table.values()]


def _describe_broker(broker: Broker) -> list[DescribeConfigsResourceResult]:
    config, limits = broker.config, broker.config.limits
    values = {
        "node.id": str(NODE_ID),
        "transaction.max.timeout.ms": str(config.transaction_max_timeout_ms),
        "transaction.two.phase.commit.enable": str(config.two_phase_commit).lower(),
        "transactional.id.expiration.ms": str(config.transactional_id_expiration_ms),
        "log.dirs": broker.store.folder,
        "listeners": f"PLAINTEXT://{config.host}:{config.port}",
        "advertised.listeners": "PLAINTEXT://{}:{}".format(*broker.advertised),
        "auto.create.topics.enable": str(config.auto_create_topics).lower(),
        "num.partitions": str(config.default_partitions),
        "default.replication.factor": "1",
        "durability": config.durability,
        **{f"penstock.{f.name.replace('_', '.')}": str(getattr(limits, f.name))
           for f in fields(limits)},
    }  # fmt: skip
    return [
        DescribeConfigsResourceResult(
            name=name, value=value, read_only=True, config_source=FROM_BROKER, config_type=2
        )
        for name, value in values.items()
    ]


async def list_config_resources(
    broker: Broker, request: ListConfigResourcesRequest, context: RequestContext
) -> ListConfigResourcesResponse:
    """Everything that has settings, or all of some kinds."""
    names: dict[int, list[str]] = {
        TOPIC: list(broker.catalog.topics),
        BROKER: [str(NODE_ID)],
        CLIENT_METRICS: list(broker.coordination.client_metrics.subscriptions),
        GROUP: list(broker.coordination.groups.configs),
    }
    # Version 0 asks for subscriptions to client metrics only.
    kinds = (request.resource_types or list(names)) if context.version else [CLIENT_METRICS]
    await broker.coordination.commit()
    return ListConfigResourcesResponse(
        config_resources=[
            ConfigResource(resource_name=name, resource_type=kind)
            for kind in kinds
            for name in names.get(kind, ())
        ]
    )


# ---- changing ----------------------------------------------------------------------------------


async def alter_configs(
    broker: Broker, request: AlterConfigsRequest, context: RequestContext
) -> AlterConfigsResponse:
    """The older form: the given settings replace all that the resource had."""

    def plan(resource: AlterConfigsResource, of: Configured) -> Change:
        settings = _values(resource)
        return lambda before: settings

    results = await _alter(
        broker,
        request.resources,
        plan,
        AlterConfigsResourceResponse,
        validate_only=request.validate_only,
    )
    return AlterConfigsResponse(responses=results)


async def incremental_alter_configs(
    broker: Broker, request: IncrementalAlterConfigsRequest, context: RequestContext
) -> IncrementalAlterConfigsResponse:
    """Set, unset, or change by item; what is not named stays."""

    def plan(resource: IncrementalResource, of: Configured) -> Change:
        if repeated(change.name for change in resource.configs):
            raise ApiError(ErrorCode.INVALID_REQUEST, "a setting is in the request twice")
        return partial(_applied, of, resource.configs)

    results = await _alter(
        broker, request.resources, plan, IncrementalResult, validate_only=request.validate_only
    )
    return IncrementalAlterConfigsResponse(responses=results)


async def _alter(
    broker: Broker,
    resources: Sequence[Resource],
    plan: Callable[[Resource, Configured], Change],
    result_type: Any,
    *,
    validate_only: bool,
) -> list[Any]:
    """Change each resource as planned, or say why not."""
    twice = repeated((item.resource_type, item.resource_name) for item in resources)
    results: list[Any] = []
    for resource in resources:
        kind, name = resource.resource_type, resource.resource_name
        result = result_type(resource_type=kind, resource_name=name, error_message=None)
        results.append(result)
        try:
            if (kind, name) in twice:
                raise ApiError(ErrorCode.INVALID_REQUEST, f"{name!r} is in the request twice")
            if kind == BROKER and _removes_throttles(resource):
                continue
            of = configured(broker, kind, name)
            await _change(broker, of, plan(resource, of), validate_only=validate_only)
        except (ApiError, LogError) as error:
            result.error_code, result.error_message = error_of(error)
    return results


def _removes_throttles(resource: AlterConfigsResource | IncrementalResource) -> bool:
    """Whether throttles of replication are removed, and nothing else: there are none."""
    removals = [
        isinstance(change, AlterableConfig)
        and change.config_operation == DELETE
        and change.name in _THROTTLES
        for change in resource.configs
    ]
    return (
        resource.resource_name in (ALL_BROKERS, str(NODE_ID)) and bool(removals) and all(removals)
    )


def _values(resource: AlterConfigsResource) -> dict[str, str]:
    settings: dict[str, str] = {}
    for item in resource.configs:
        if item.value is None:
            raise ApiError(ErrorCode.INVALID_REQUEST, f"{item.name} has no value")
        settings[item.name] = item.value
    return settings


def _applied(
    of: Configured, changes: list[AlterableConfig], before: Mapping[str, str]
) -> dict[str, str]:
    settings = dict(before)
    for change in changes:
        _apply(of, settings, change)
    return settings


def _apply(of: Configured, settings: dict[str, str], change: AlterableConfig) -> None:
    operation = change.config_operation
    if of.kind == BROKER and change.name not in of.table:
        raise ApiError(
            ErrorCode.INVALID_REQUEST,
            f"Cannot update these configs dynamically: Set({change.name})",
        )
    if operation == DELETE:
        settings.pop(change.name, None)
        return
    setting = of.table.get(change.name)
    if setting is None and of.kind == CLIENT_METRICS:
        raise ApiError(
            ErrorCode.INVALID_REQUEST, f"Unknown client metrics configuration: {change.name}"
        )
    if setting is None:
        what = "topic" if of.kind == TOPIC else "group"
        close = get_close_matches(change.name, of.table, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ApiError(
            ErrorCode.INVALID_CONFIG, f"there is no {what} setting {change.name!r}{hint}"
        )
    if change.value is None:
        raise ApiError(ErrorCode.INVALID_REQUEST, f"{change.name} has no value")
    if operation == SET:
        settings[change.name] = change.value
        return
    if setting.kind != "list" or operation not in (APPEND, SUBTRACT):
        raise ApiError(
            ErrorCode.INVALID_CONFIG, f"{change.name} cannot be changed by operation {operation}"
        )
    default, _ = _candidates(replace(of, own=settings), setting)[0]
    items = [item for item in default.split(",") if item]
    given = [item.strip() for item in change.value.split(",") if item.strip()]
    kept = [item for item in items if item not in given]
    settings[change.name] = ",".join(kept + given if operation == APPEND else kept)


async def _change(broker: Broker, of: Configured, change: Change, *, validate_only: bool) -> None:
    if of.kind == GROUP:
        settings = change(of.own)
        entries = broker.coordination.groups.change_settings(of.name, settings)
        _check_dead_letter_topic(broker, of, settings)
        if not validate_only:
            await broker.coordination.commit(entries)
    elif of.kind == CLIENT_METRICS:
        entries = broker.coordination.client_metrics.change_settings(of.name, change(of.own))
        if not validate_only:
            await broker.coordination.commit(entries)
    elif of.kind == BROKER:
        if validate_only:
            broker.catalog.change_broker_settings(of.name, change(of.own))
        else:
            await broker.topics.change_defaults(of.name, change)
    elif validate_only:
        broker.catalog.change_settings(topic_named(broker, of.name), change(of.own))
    else:
        await broker.topics.change_settings(of.name, change)


def _check_dead_letter_topic(broker: Broker, of: Configured, settings: Mapping[str, str]) -> None:
    """ApiError if a group is given a topic for its dead letters that it reads itself."""
    name = settings.get(DEAD_LETTER_TOPIC, "")
    if not name or name == of.own.get(DEAD_LETTER_TOPIC):
        return
    read = {queue.topic for queue in broker.coordination.shares.queues_of(of.name)}
    group = broker.coordination.groups.get(of.name)
    if isinstance(group, ShareGroup):
        read.update(*(member.profile.names for member in group.members.values()))
    if name in read:
        raise ApiError(ErrorCode.INVALID_CONFIG, READS_ITSELF.format(name=name))
