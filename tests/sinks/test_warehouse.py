"""Delta and Parquet pass the tests of all stores, and are read by others."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.testing.sinks import SinkKit, Store


class TestDelta(SinkKit):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return Store(f"delta:///{tmp_path}/orders", {"optimize_every": 3})


class TestParquet(SinkKit):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return Store(f"parquet:///{tmp_path}/orders", {"compact_files": 4})
