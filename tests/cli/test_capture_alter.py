"""`penstock capture alter`: a column that SQLite does not drop while triggers name it."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from penstock.capture.source import SourceSettings
from penstock.capture.sqlite.source import SqliteSource
from penstock.cli.capture_file import add_section
from tests.cli.runner import run


def test_a_column_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)
    add_section(tmp_path / "penstock.toml", "shop", {"url": "sqlite:///shop.db"})
    with closing(sqlite3.connect("shop.db", isolation_level=None)) as database:
        database.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, note TEXT)")
        early = run("capture", "alter", "shop", "ALTER TABLE orders DROP COLUMN note")
        assert early.status != 0
        assert "not set up" in early.err
        with SqliteSource(SourceSettings("shop", "sqlite:///shop.db")) as source:
            source.setup()
        with pytest.raises(sqlite3.OperationalError, match="error in trigger _penstock_shop"):
            database.execute("ALTER TABLE orders DROP COLUMN note")
        done = run("capture", "alter", "shop", "ALTER TABLE orders DROP COLUMN note")
        assert done.status == 0, done.err
        assert [row[1] for row in database.execute("PRAGMA table_info(orders)")] == ["id"]
        database.execute("INSERT INTO orders VALUES (1)")
        wrong = run("capture", "alter", "shop", "DROP TABLE orders")
        assert wrong.status != 0
        assert "only ALTER TABLE" in wrong.err
