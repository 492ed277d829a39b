"""SQLite passes the tests of all stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.testing.sinks import Store
from tests.sinks.sql_kit import SqlKit


class TestSqlite(SqlKit):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return Store(f"sqlite:///{tmp_path}/shop.db?table=orders")
