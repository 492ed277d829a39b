"""Client metrics: GetTelemetrySubscriptions and PushTelemetry.

Answered but not offered by ApiVersions, as by an Apache Kafka that has no plugin for them: clients
that push metrics by default need not ask for a subscription that is empty.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.broker.apis.context import RequestContext
from penstock.broker.telemetry import (
    COMPRESSION_TYPES,
    MAX_BYTES,
    PUSH_INTERVAL_MS,
    Push,
    subscription_id,
)
from penstock.wire.messages.get_telemetry_subscriptions import (
    GetTelemetrySubscriptionsRequest,
    GetTelemetrySubscriptionsResponse,
)
from penstock.wire.messages.push_telemetry import PushTelemetryRequest, PushTelemetryResponse

if TYPE_CHECKING:
    from penstock.broker.server import Broker


def get_telemetry_subscriptions(
    broker: Broker, request: GetTelemetrySubscriptionsRequest, context: RequestContext
) -> GetTelemetrySubscriptionsResponse:
    """A subscription without metrics, and the limits of what may be pushed."""
    instance_id = broker.telemetry.subscribe(
        request.client_instance_id, context.connection, broker.clock.elapsed_ms()
    )
    return GetTelemetrySubscriptionsResponse(
        client_instance_id=instance_id,
        subscription_id=subscription_id(instance_id),
        accepted_compression_types=list(COMPRESSION_TYPES),
        push_interval_ms=PUSH_INTERVAL_MS,
        telemetry_max_bytes=MAX_BYTES,
        delta_temporality=True,
    )


def push_telemetry(
    broker: Broker, request: PushTelemetryRequest, context: RequestContext
) -> PushTelemetryResponse:
    """Metrics of a client are checked and dropped."""
    push = Push(
        subscription_id=request.subscription_id,
        is_terminating=request.terminating,
        compression_type=request.compression_type,
        metrics=request.metrics,
    )
    broker.telemetry.push(
        request.client_instance_id, push, context.connection, broker.clock.elapsed_ms()
    )
    return PushTelemetryResponse()
