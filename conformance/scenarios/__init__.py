"""The scenarios, one module for each area; importing this brings them all."""

from __future__ import annotations

from conformance.scenarios import (
    admin,
    foreign,
    groups_classic,
    groups_consumer,
    offsets,
    produce,
    shares,
    transactions,
)

__all__ = [
    "admin",
    "foreign",
    "groups_classic",
    "groups_consumer",
    "offsets",
    "produce",
    "shares",
    "transactions",
]
