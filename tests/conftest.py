"""What all tests share: the level of the log, and seeds."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from tests.harness import seeds


@pytest.fixture(autouse=True)
def _log_level() -> Iterator[None]:
    """Commands that are run in this process set the level of the log, which is everybody's."""
    level = logging.getLogger().level
    yield
    logging.getLogger().setLevel(level)


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for randomness of the test's own; pytest shows it when the test fails.

    It follows from the seed of the run, so a failed test that is run once more has the same one.
    """
    value = seeds.seed_of(request.node.nodeid)
    print(seeds.how_to_repeat(value))
    return value
