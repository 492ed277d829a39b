"""What all tests share: settings of hypothesis, and seeds."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator

import pytest
from hypothesis import settings

SEED_VARIABLE = "PENSTOCK_SEED"

# A loaded machine is slow, not wrong: time is bounded per test, not per example.
settings.register_profile("penstock", deadline=None, print_blob=True)
settings.load_profile("penstock")


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Commands that are run in this process set the level of the log, which is everybody's."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture
def seed() -> int:
    """A seed for randomness of the test's own; pytest shows it when the test fails."""
    value = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().getrandbits(32))
    print(f"seed {value}; to repeat: {SEED_VARIABLE}={value}")
    return value
