"""A broker that the tests of the command line share, and topics of their own on it."""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest

from penstock.testing.broker import Broker


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    with Broker() as running:
        yield running


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own environment must not decide what a test sees."""
    for name in ("BOOTSTRAP", "DATA", "LISTEN", "METRICS", "ALERT_WEBHOOK"):
        monkeypatch.delenv(f"PENSTOCK_{name}", raising=False)


@pytest.fixture
def at(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> str:
    """Point the commands at the shared broker; its address."""
    monkeypatch.setenv("PENSTOCK_BOOTSTRAP", broker.bootstrap)
    return broker.bootstrap


@pytest.fixture
def topic() -> str:
    return f"t-{uuid4().hex[:8]}"
