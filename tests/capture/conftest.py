"""Real databases for tests that are the same for every source, on the servers of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.capture.kit.databases import KINDS, MARKS, Database, new_database


@pytest.fixture(params=[pytest.param(kind, marks=MARKS[kind]) for kind in KINDS])
def each(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Database]:
    """An empty database of each kind in turn."""
    database = new_database(request, request.param, tmp_path)
    yield database
    database.close()
