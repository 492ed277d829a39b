"""Settings of topics, shown and changed; the broker's own, shown."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Final

from penstock.broker.apis.context import RequestContext
from penstock.broker.apis.topics import FROM_DEFAULT, FROM_TOPIC, error_of, repeated
from penstock.broker.catalog import ApiError, Topic, check_name
from penstock.broker.config import NODE_ID
from penstock.errors import LogError
from penstock.log.config import SETTINGS, Setting
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

if TYPE_CHECKING:
    from penstock.broker.server import Broker

TOPIC: Final = 2
BROKER: Final = 4
FROM_BROKER: Final = 4
SET, DELETE, APPEND, SUBTRACT = range(4)
_TYPES: Final = {"bool": 1, "string": 2, "int": 3, "long": 5, "double": 6, "list": 7}


def describe_configs(
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
    return DescribeConfigsResponse(results=results)


def _describe(
    broker: Broker, resource: DescribeConfigsResource, request: DescribeConfigsRequest
) -> list[DescribeConfigsResourceResult]:
    keys = resource.configuration_keys
    if resource.resource_type == TOPIC:
        topic = topic_named(broker, resource.resource_name)
        return [
            _describe_setting(broker, topic, setting, request)
            for name, setting in SETTINGS.items()
            if not keys or name in keys
        ]
    if resource.resource_type == BROKER:
        if resource.resource_name not in ("", str(NODE_ID)):
            raise ApiError(ErrorCode.INVALID_REQUEST, f"there is only broker {NODE_ID}")
        return [item for item in _describe_broker(broker) if not keys or item.name in keys]
    raise ApiError(
        ErrorCode.INVALID_REQUEST, f"resources of type {resource.resource_type} have no settings"
    )


def topic_named(broker: Broker, name: str) -> Topic:
    topic = broker.catalog.topics.get(name)
    if topic is None:
        check_name(name)
        raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no such topic")
    return topic


def _describe_setting(
    broker: Broker, topic: Topic, setting: Setting, request: DescribeConfigsRequest
) -> DescribeConfigsResourceResult:
    built_in = setting.render(setting.default)
    by_broker = broker.config.effective_defaults.get(setting.name)
    candidates = [
        (topic.settings.get(setting.name), FROM_TOPIC),
        (by_broker, FROM_BROKER),
        (built_in, FROM_DEFAULT),
    ]
    known = [(value, source) for value, source in candidates if value is not None]
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


def _describe_broker(broker: Broker) -> list[DescribeConfigsResourceResult]:
    config, limits = broker.config, broker.config.limits
    values = {
        "node.id": str(NODE_ID),
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


async def alter_configs(
    broker: Broker, request: AlterConfigsRequest, context: RequestContext
) -> AlterConfigsResponse:
    """The older form: the given settings replace all that the topic had."""
    twice = repeated((item.resource_type, item.resource_name) for item in request.resources)
    results: list[AlterConfigsResourceResponse] = []
    for resource in request.resources:
        result = AlterConfigsResourceResponse(
            resource_type=resource.resource_type,
            resource_name=resource.resource_name,
            error_message=None,
        )
        results.append(result)
        try:
            topic = _alterable(broker, resource, twice)
            settings = _values(resource)
            await _change(broker, topic, partial(_instead, settings), request.validate_only)
        except (ApiError, LogError) as error:
            result.error_code, result.error_message = error_of(error)
    return AlterConfigsResponse(responses=results)


async def incremental_alter_configs(
    broker: Broker, request: IncrementalAlterConfigsRequest, context: RequestContext
) -> IncrementalAlterConfigsResponse:
    """Set, unset, or change by item; what is not named stays."""
    twice = repeated((item.resource_type, item.resource_name) for item in request.resources)
    results: list[IncrementalResult] = []
    for resource in request.resources:
        result = IncrementalResult(
            resource_type=resource.resource_type,
            resource_name=resource.resource_name,
            error_message=None,
        )
        results.append(result)
        try:
            topic = _alterable(broker, resource, twice)
            if repeated(change.name for change in resource.configs):
                raise ApiError(ErrorCode.INVALID_REQUEST, "a setting is in the request twice")
            apply = partial(_applied, broker, resource.configs)
            await _change(broker, topic, apply, request.validate_only)
        except (ApiError, LogError) as error:
            result.error_code, result.error_message = error_of(error)
    return IncrementalAlterConfigsResponse(responses=results)


def _alterable(
    broker: Broker,
    resource: AlterConfigsResource | IncrementalResource,
    twice: set[tuple[int, str]],
) -> Topic:
    resource_type, name = resource.resource_type, resource.resource_name
    if (resource_type, name) in twice:
        raise ApiError(ErrorCode.INVALID_REQUEST, f"{name!r} is in the request twice")
    if resource_type == BROKER:
        raise ApiError(
            ErrorCode.INVALID_REQUEST, "the broker's settings are given when it is started"
        )
    if resource_type != TOPIC:
        raise ApiError(
            ErrorCode.INVALID_REQUEST, f"resources of type {resource_type} have no settings"
        )
    return topic_named(broker, name)


def _values(resource: AlterConfigsResource) -> dict[str, str]:
    settings: dict[str, str] = {}
    for item in resource.configs:
        if item.value is None:
            raise ApiError(ErrorCode.INVALID_REQUEST, f"{item.name} has no value")
        settings[item.name] = item.value
    return settings


def _instead(settings: Mapping[str, str], before: Mapping[str, str]) -> Mapping[str, str]:
    return settings


def _applied(
    broker: Broker, changes: list[AlterableConfig], before: Mapping[str, str]
) -> dict[str, str]:
    settings = dict(before)
    for change in changes:
        _apply(broker, settings, change)
    return settings


def _apply(broker: Broker, settings: dict[str, str], change: AlterableConfig) -> None:
    operation = change.config_operation
    if operation == DELETE:
        settings.pop(change.name, None)
        return
    setting = SETTINGS.get(change.name)
    if setting is None:
        raise ApiError(ErrorCode.INVALID_CONFIG, f"there is no topic setting {change.name!r}")
    if change.value is None:
        raise ApiError(ErrorCode.INVALID_REQUEST, f"{change.name} has no value")
    if operation == SET:
        settings[change.name] = change.value
        return
    if setting.kind != "list" or operation not in (APPEND, SUBTRACT):
        raise ApiError(
            ErrorCode.INVALID_CONFIG, f"{change.name} cannot be changed by operation {operation}"
        )
    default = broker.config.effective_defaults.get(change.name, setting.render(setting.default))
    items = [item for item in settings.get(change.name, default).split(",") if item]
    given = [item.strip() for item in change.value.split(",") if item.strip()]
    kept = [item for item in items if item not in given]
    settings[change.name] = ",".join(kept + given if operation == APPEND else kept)


async def _change(
    broker: Broker,
    topic: Topic,
    change: Callable[[Mapping[str, str]], Mapping[str, str]],
    validate_only: bool,
) -> None:
    if validate_only:
        broker.catalog.change_settings(topic, change(topic.settings))
    else:
        await broker.change_settings(topic.name, change)
