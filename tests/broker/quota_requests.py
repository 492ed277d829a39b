"""Requests about client quotas, as tests write them. Touches nothing."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.wire.messages.alter_client_quotas import (
    AlterClientQuotasRequest,
    OpData,
    RequestEntityData,
    RequestEntryData,
)
from penstock.wire.messages.describe_client_quotas import (
    ComponentData,
    DescribeClientQuotasRequest,
)

EXACT, DEFAULT, ANY = range(3)
USER, CLIENT = "user", "client-id"


def change(who: Sequence[tuple[str, str | None]], **quotas: float | None) -> RequestEntryData:
    """Quotas of an entity, by name; None removes one."""
    return RequestEntryData(
        entity=[RequestEntityData(entity_type=kind, entity_name=name) for kind, name in who],
        ops=[
            OpData(key=key, value=value or 0.0, remove=value is None)
            for key, value in quotas.items()
        ],
    )


def alter(*entries: RequestEntryData, validate_only: bool = False) -> AlterClientQuotasRequest:
    return AlterClientQuotasRequest(entries=list(entries), validate_only=validate_only)


def describe(
    *parts: tuple[str, int, str | None], strict: bool = False
) -> DescribeClientQuotasRequest:
    components = [
        ComponentData(entity_type=kind, match_type=how, match=name) for kind, how, name in parts
    ]
    return DescribeClientQuotasRequest(components=components, strict=strict)
