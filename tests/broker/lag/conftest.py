"""A receiver of alerts for the tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.broker.lag.receiver import Receiver


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    running = Receiver()
    yield running
    running.close()
