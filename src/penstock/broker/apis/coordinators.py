"""Who coordinates, and producer ids.

This broker coordinates everything there is. Producer ids come from blocks that are reserved in
the metadata log, so an id is never handed out twice, not even after a crash.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from penstock.broker.apis.context import RequestContext
from penstock.broker.config import NODE_ID
from penstock.errors import LogError
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
    """A new producer id, as in Kafka also for a producer that has one already."""
    if request.transactional_id == "" or (request.producer_id < 0) != (request.producer_epoch < 0):
        return InitProducerIdResponse(error_code=ErrorCode.INVALID_REQUEST, producer_id=-1)
    if request.transactional_id is not None:
        return InitProducerIdResponse(
            error_code=ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, producer_id=-1
        )
    # Nobody proves that an id is theirs, so one that a producer names is not handed out again.
    try:
        producer_id = await broker.next_producer_id()
    except LogError:
        return InitProducerIdResponse(error_code=ErrorCode.KAFKA_STORAGE_ERROR, producer_id=-1)
    return InitProducerIdResponse(producer_id=producer_id, producer_epoch=0)
