"""One seed for each run, from which everything random in its tests follows.

`python -m tests.harness` draws it and hands it to both of its runs, so that a test that is run once
more has the seed of the first time, even if the first time ended its process. A plain pytest draws
one for itself. `PENSTOCK_RUN_SEED` sets it, and repeats a whole run; `PENSTOCK_SEED` sets the seed
of every test, and repeats one test.
"""

from __future__ import annotations

import hashlib
import os
import random
from typing import Final

from hypothesis import core

RUN_VARIABLE: Final = "PENSTOCK_RUN_SEED"
TEST_VARIABLE: Final = "PENSTOCK_SEED"


def run_seed() -> int:
    """The seed of this run; whoever asks first draws it, and child processes inherit it."""
    known = os.environ.get(RUN_VARIABLE)
    if not known:
        known = os.environ[RUN_VARIABLE] = str(random.SystemRandom().getrandbits(32))
    return int(known)


def seed_of(name: str) -> int:
    """The seed of a test, by its id, or of a module that draws before there are tests."""
    chosen = os.environ.get(TEST_VARIABLE)
    if chosen:
        return int(chosen)
    text = f"{run_seed()} {name}".encode(errors="backslashreplace")
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big")


def how_to_repeat(seed: int) -> str:
    return f"seed {seed}; to repeat: {TEST_VARIABLE}={seed}"


def seed_hypothesis(seed: int) -> None:
    """Let the examples of the next test follow from a seed.

    `--hypothesis-seed` would give all tests the same one, and turn off the database of failing
    examples.
    """
    core.threadlocal._hypothesis_global_random = random.Random(seed)
