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

# ---- Spark -----------------------------------------------------------------------------------
#                                          check    test      proof

# ---- capture, sinks, the command line --------------------------------------------------------
#                                          check    test      proof

# ---- examples, documentation, soaks ----------------------------------------------------------
#                                          check    test      proof
