"""Where the embedded broker differs from Apache Kafka on purpose, and why.

A scenario that is listed here must give Apache Kafka's observation there and ours here; one that
gives the same on both may not be listed. Everything else must be the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Difference:
    """What the embedded broker is expected to show in a scenario, and the reason in a sentence."""

    penstock: Any
    reason: str


DIFFERENCES: Final[dict[str, Difference]] = {
    "protocol.internal_topics.topics_of_the_coordinators": Difference(
        penstock=[("UNKNOWN_TOPIC_OR_PARTITION", False, False)] * 2,
        reason="The coordinators keep their state elsewhere, in a format of their own; "
        "[protocol.md](protocol.md#kafkas-internal-topics) says what to use instead.",
    ),
}
