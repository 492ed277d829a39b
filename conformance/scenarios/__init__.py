"""The scenarios, a module for each area; importing this brings them all.

Those here use clients; those in `protocol` send single requests.
"""

from __future__ import annotations

from conformance.scenarios import (
    admin,
    foreign,
    groups_classic,
    groups_consumer,
    offsets,
    produce,
    protocol,
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
    "protocol",
    "shares",
    "transactions",
]
