"""SQLite passes the tests of all stores."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.testing.sinks import SinkKit, Store


class TestSqlite(SinkKit):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return Store(f"sqlite:///{tmp_path}/shop.db?table=orders")
