"""Who coordinates, and producer ids.

This broker coordinates everything there is. Producer ids come from blocks that are reserved in
the metadata log, so an id is never handed out twice, not even after a crash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.broker.apis.context import RequestContext
from penstock.broker.config import NODE_ID
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.find_coordinator import (
    Coordinator,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
)
from penstock.wire.messages.init_producer_id import (
    InitProducerIdRequest,
    InitProducerIdResponse,
)

if TYPE_CHECKING:
    from penstock.broker.server import Broker

BATCHED_FROM_VERSION: Final = 4
_MAX_EPOCH: Final = 0x7FFF


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


async def init_producer_id(
    broker: Broker, request: InitProducerIdRequest, context: RequestContext
) -> InitProducerIdResponse:
    """A new producer id, or the next epoch of one that the producer already has."""
    if request.transactional_id is not None:
        return InitProducerIdResponse(
            error_code=ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, producer_id=-1
        )
    if request.producer_id >= 0 and 0 <= request.producer_epoch < _MAX_EPOCH - 1:
        return InitProducerIdResponse(
            producer_id=request.producer_id, producer_epoch=request.producer_epoch + 1
        )
    return InitProducerIdResponse(producer_id=await broker.next_producer_id(), producer_epoch=0)
