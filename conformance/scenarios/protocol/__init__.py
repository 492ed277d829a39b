"""Scenarios of the raw protocol, one module for each area; importing this brings them all."""

from __future__ import annotations

from conformance.scenarios.protocol import (
    authorized_operations,
    broker_settings,
    features,
    fetch,
    groups_classic,
    groups_consumer,
    groups_streams,
    groups_streams_offsets,
    internal_topics,
    offsets,
    produce,
    quotas,
    read_committed,
    replicas,
    shares,
    telemetry,
    topics,
    transactions,
)

__all__ = [
    "authorized_operations",
    "broker_settings",
    "features",
    "fetch",
    "groups_classic",
    "groups_consumer",
    "groups_streams",
    "groups_streams_offsets",
    "internal_topics",
    "offsets",
    "produce",
    "quotas",
    "read_committed",
    "replicas",
    "shares",
    "telemetry",
    "topics",
    "transactions",
]
