"""How much proof each command asks for: one table of budgets, a column per profile.

`make check` has the profile `check`, `make test` and a plain `pytest` have `test`, `make proof` has
`proof`. A budget says how often: kills, crash points, frames, rounds, examples of hypothesis. What
is tested is the same in every profile; a test that belongs to one profile alone is marked `proof`.
"""

from __future__ import annotations

import os
from enum import StrEnum
from typing import Final, TypeVar

VARIABLE: Final = "PENSTOCK_PROFILE"
T = TypeVar("T")


class Profile(StrEnum):
    """The three commands."""

    CHECK = "check"
    TEST = "test"
    PROOF = "proof"


PROFILE: Final = Profile(os.environ.get(VARIABLE) or Profile.TEST)


def _of(check: T, test: T, proof: T) -> T:
    return {Profile.CHECK: check, Profile.TEST: test, Profile.PROOF: proof}[PROFILE]


def examples(test: int) -> int:
    """Examples of hypothesis: so many in `test`, a third of it in `check`, ten times in `proof`."""
    return _of(max(5, test // 3), test, test * 10)


def some(values: list[T], *, test: int, check: int | None = None) -> list[T]:
    """The first few of a list of cases, and all of them in `proof`."""
    return values[: _of(test if check is None else check, test, len(values))]


# ---- the log and the broker ------------------------------------------------------------------
#                                          check    test      proof
# Simulated crashes of a machine, for each of six tests.
LOG_CRASHES: Final = _of(20, 60, 700)
# Of a damaged data directory: bytes changed in each file.
DAMAGED_BYTES: Final = _of(10, 40, 1_000_000)
COMPACTION_LOGS: Final = _of(1, 1, 4)
# Hostile requests, one by one and as a stream.
FUZZ_FRAMES: Final = _of(1_000, 6_000, 92_000)
FUZZ_STREAMS: Final = _of(100, 600, 10_000)
FLIPPED_BITS: Final = _of(1, 2, 8)
BROKER_KILLS: Final = _of(1, 3, 10)
BROKER_STOPS: Final = _of(1, 2, 3)
CHAOS_STEPS: Final = _of(60, 150, 400)
CONSUMER_FAULTS: Final = _of(2, 4, 7)
QUEUE_RECORDS: Final = _of(200, 400, 1_000)
ORACLE_ROUNDS: Final = _of(2, 4, 8)
# Records written while a node of three dies and comes back.
FAILOVER_RECORDS: Final = _of(3_000, 3_000, 6_000)

# ---- Spark -----------------------------------------------------------------------------------
#                                          check    test      proof

# ---- capture, sinks, the command line --------------------------------------------------------
#                                          check    test      proof

# ---- examples, documentation, soaks ----------------------------------------------------------
#                                          check    test      proof
# The parts of the demo that are killed, one after the other.
DEMO_KILLS: Final = _of(1, 1, 4)
SOAK_MINUTES: Final = float(os.environ.get("PENSTOCK_SOAK_MINUTES") or _of(0.5, 1, 5))
