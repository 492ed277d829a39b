"""One broker for the tests of a module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.testing import Broker


@pytest.fixture(scope="module")
def log() -> Iterator[str]:
    """The address of a log."""
    with Broker() as broker:
        yield broker.bootstrap
