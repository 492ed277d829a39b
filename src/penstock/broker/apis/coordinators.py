"""Who coordinates: this broker coordinates everything there is."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.broker.apis.context import RequestContext
from penstock.broker.config import NODE_ID
from penstock.wire.messages.find_coordinator import (
    Coordinator,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)

if TYPE_CHECKING:
    from penstock.broker.server import Broker

BATCHED_FROM_VERSION: Final = 4


def find_coordinator(
    broker: Broker, request: FindCoordinatorRequest, context: RequestContext
) -> FindCoordinatorResponse:
    host, port = broker.advertised
    if context.version < BATCHED_FROM_VERSION:
        return FindCoordinatorResponse(node_id=NODE_ID, host=host, port=port)
    return FindCoordinatorResponse(
        coordinators=[
            Coordinator(key=key, node_id=NODE_ID, host=host, port=port, error_message=None)
            for key in request.coordinator_keys
        ]
    )
