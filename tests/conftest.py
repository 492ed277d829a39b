"""What all tests share: the level of the log, and seeds."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import failures

SEED_VARIABLE = "PENSTOCK_SEED"


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Commands that are run in this process set the level of the log, which is everybody's."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for randomness of the test's own; pytest shows it when the test fails.

    In the second run of a test that failed it is the seed of the first.
    """
    replay, test = os.environ.get(failures.REPLAY_VARIABLE), request.node.nodeid
    failed = failures.read(Path(replay)) if replay else []
    known = [outcome.seed for outcome in failed if outcome.nodeid == test]
    if known and known[-1] is not None:
        value = known[-1]
    else:
        value = int(os.environ.get(SEED_VARIABLE) or random.SystemRandom().getrandbits(32))
    request.node.user_properties.append((failures.SEED_PROPERTY, value))
    print(f"seed {value}; to repeat: {SEED_VARIABLE}={value}")
    return value
