"""Fixtures for pytest, there as soon as Penstock is installed.

`penstock_broker` is a broker of the test's own; `penstock_shared_broker` is one for the whole
run, for tests that use topics of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from penstock.testing.broker import Broker


@pytest.fixture
def penstock_broker() -> Iterator[Broker]:
    """A broker of this test's own, empty, gone afterwards."""
    # Imported here: the plugin is loaded in every pytest run of everyone who has Penstock.
    from penstock.testing.broker import Broker

    with Broker() as broker:
        yield broker


@pytest.fixture(scope="session")
def penstock_shared_broker() -> Iterator[Broker]:
    """One broker for the whole run; give your topics names of their own."""
    from penstock.testing.broker import Broker

    with Broker() as broker:
        yield broker
