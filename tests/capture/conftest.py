"""Real databases for tests that are the same for every source: one server of each kind a worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.capture.kit.databases import KINDS, Database, Servers


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    made = Servers()
    yield made
    made.close()


@pytest.fixture(params=KINDS)
def each(request: pytest.FixtureRequest, servers: Servers, tmp_path: Path) -> Iterator[Database]:
    """An empty database of each kind in turn."""
    database = servers.database(request.param, tmp_path)
    yield database
    database.close()
