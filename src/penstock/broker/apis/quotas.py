"""Quotas, shown and changed: DescribeClientQuotas and AlterClientQuotas."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.broker.apis.context import RequestContext
from penstock.broker.catalog import ApiError
from penstock.broker.journal import Entry
from penstock.broker.quotas import CLIENT_ID, IP, USER, Change, Entity
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.alter_client_quotas import (
    AlterClientQuotasRequest,
    AlterClientQuotasResponse,
    RequestEntryData,
    ResponseEntityData,
    ResponseEntryData,
)
from penstock.wire.messages.describe_client_quotas import (
    ComponentData,
    DescribeClientQuotasRequest,
    DescribeClientQuotasResponse,
    EntityData,
    EntryData,
    ValueData,
)

if TYPE_CHECKING:
    from penstock.broker.server import Broker

EXACT, DEFAULT, ANY = range(3)
_TYPES: Final = (USER, CLIENT_ID, IP)


async def describe_client_quotas(
    broker: Broker, request: DescribeClientQuotasRequest, context: RequestContext
) -> DescribeClientQuotasResponse:
    """Every entity that fits the filter, with its quotas."""
    try:
        wanted = _wanted(request.components)
    except ApiError as error:
        return DescribeClientQuotasResponse(
            error_code=error.code, error_message=str(error), entries=None
        )
    entries = [
        EntryData(
            entity=[EntityData(entity_type=kind, entity_name=name) for kind, name in entity],
            values=[ValueData(key=kind, value=value) for kind, value in values.items()],
        )
        for entity, values in broker.coordination.quotas.quotas.items()
        if _fits(entity, wanted, strict=request.strict)
    ]
    await broker.coordination.commit()
    return DescribeClientQuotasResponse(error_message=None, entries=entries)


def _wanted(components: list[ComponentData]) -> dict[str, tuple[int, str | None]]:
    """What a filter asks of each type of entity; ApiError if it makes no sense."""
    wanted: dict[str, tuple[int, str | None]] = {}
    for item in components:
        kind = item.entity_type
        if not kind:
            raise _invalid("a filter has no entity type")
        if kind in wanted:
            raise _invalid(f"{kind} is named twice in the filter")
        if kind not in _TYPES:
            raise ApiError(ErrorCode.UNSUPPORTED_VERSION, f"there is no entity type {kind!r}")
        if item.match_type not in (EXACT, DEFAULT, ANY):
            raise _invalid(f"there is no way {item.match_type} to match {kind}")
        if (item.match_type == EXACT) != (item.match is not None):
            raise _invalid(f"a name is given for {kind} if and only if it is to be matched")
        wanted[kind] = (item.match_type, item.match)
    if IP in wanted and len(wanted) > 1:
        raise _invalid("ip cannot be combined with user and client-id")
    return wanted


def _fits(entity: Entity, wanted: dict[str, tuple[int, str | None]], *, strict: bool) -> bool:
    named = dict(entity)
    if strict and set(named) != set(wanted):
        return False
    return all(
        kind in named and (how == ANY or named[kind] == name)
        for kind, (how, name) in wanted.items()
    )


async def alter_client_quotas(
    broker: Broker, request: AlterClientQuotasRequest, context: RequestContext
) -> AlterClientQuotasResponse:
    """Set and remove quotas; each entity for itself."""
    results: list[ResponseEntryData] = []
    entries: list[Entry] = []
    seen: set[frozenset[tuple[str, str | None]]] = set()
    for item in request.entries:
        result = ResponseEntryData(
            error_message=None,
            entity=[
                ResponseEntityData(entity_type=part.entity_type, entity_name=part.entity_name)
                for part in item.entity
            ],
        )
        results.append(result)
        who = frozenset((part.entity_type, part.entity_name) for part in item.entity)
        try:
            if who in seen:
                raise _invalid("the entity is named twice")
            seen.add(who)
            entries += _change(broker, item)
        except ApiError as error:
            result.error_code, result.error_message = error.code, str(error)
    await broker.coordination.commit([] if request.validate_only else entries)
    return AlterClientQuotasResponse(entries=results)


def _change(broker: Broker, item: RequestEntryData) -> list[Entry]:
    parts = [(part.entity_type, part.entity_name) for part in item.entity]
    changes = [Change(op.key, None if op.remove else op.value) for op in item.ops]
    return broker.coordination.quotas.alter(parts, changes)


def _invalid(message: str) -> ApiError:
    return ApiError(ErrorCode.INVALID_REQUEST, message)
