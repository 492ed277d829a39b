"""Brokers and connections for the tests of the broker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from penstock.testing.broker import Broker
from tests.broker.disks import HastyDisk, temporary_files_in_memory
from tests.broker.raw import RawClient
from tests.broker.requests import create, new_name

# Old records stay for as long as a test needs them: nothing is looked after meanwhile.
NEVER_MS = 3_600_000


@pytest.fixture(scope="module", autouse=True)
def _files_in_memory() -> Iterator[None]:
    """Brokers that make their own folder have it in memory."""
    with temporary_files_in_memory():
        yield


@pytest.fixture(scope="module")
def shared() -> Iterator[Broker]:
    """One broker for the tests of a module, with topics of their own."""
    with Broker(disk=HastyDisk(), housekeeping_interval_ms=NEVER_MS) as broker:
        yield broker


@pytest.fixture
def broker() -> Iterator[Broker]:
    """A broker of the test's own."""
    with Broker(disk=HastyDisk(), housekeeping_interval_ms=NEVER_MS) as own:
        yield own


@pytest.fixture
def connect() -> Iterator[Callable[[Broker], RawClient]]:
    """Connections that are closed at the end of the test."""
    with ExitStack() as stack:
        yield lambda broker: stack.enter_context(RawClient(broker.bootstrap))


@pytest.fixture
def client(shared: Broker) -> Iterator[RawClient]:
    """A connection to the shared broker."""
    with RawClient(shared.bootstrap) as raw:
        yield raw


@pytest.fixture
def topic(client: RawClient) -> str:
    """A topic on the shared broker, for this test only."""
    name = new_name()
    result = client.call(create(name)).topics[0]
    assert not result.error_code, result.error_message
    return name
