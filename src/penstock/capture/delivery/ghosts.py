"""Rows that a topic still has although the database has them no longer.

A snapshot that is taken again (it was interrupted, or the position was lost, or the user wants it)
shows which rows there are. Rows of the topic that it does not show were deleted meanwhile, and
nobody has told: their deletes are what comes out of here. The keys are kept in a file.
"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import orjson

_MANY: Final = 10_000
_PERHAPS_GONE: Final = b'"after":null'


class Ghosts:
    """The keys of topics that were not seen yet; close it to have the file gone."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-capture-", dir=folder)
        path = Path(self._folder.name) / "keys.sqlite"
        self._db = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        for pragma in ("journal_mode=OFF", "synchronous=OFF", "locking_mode=EXCLUSIVE"):
            self._db.execute(f"PRAGMA {pragma}")
        self._db.execute(
            "CREATE TABLE unseen (topic TEXT, key BLOB, PRIMARY KEY (topic, key)) WITHOUT ROWID"
        )
        self._topics: set[str] = set()
        self._haunted: set[str] = set()

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._db.close()
        self._folder.cleanup()

    def knows(self, topic: str) -> bool:
        """Whether a topic was read."""
        return topic in self._topics

    def has_any(self, topic: str) -> bool:
        """Whether a topic had rows when it was read."""
        return topic in self._haunted

    def load(self, topic: str, records: Iterable[tuple[bytes, bytes | None]]) -> None:
        """Read a topic; nothing of it was seen yet."""
        self._topics.add(topic)
        self._db.execute("BEGIN")
        for key, value in records:
            sql = (
                "DELETE FROM unseen WHERE topic = ? AND key = ?"
                if value is None or _is_gone(value)
                else "INSERT OR IGNORE INTO unseen VALUES (?, ?)"
            )
            self._db.execute(sql, (topic, key))
        self._db.execute("COMMIT")
        found = self._db.execute("SELECT 1 FROM unseen WHERE topic = ? LIMIT 1", (topic,))
        if found.fetchone() is not None:
            self._haunted.add(topic)

    def seen(self, topic: str, keys: Iterable[bytes]) -> None:
        """These rows are there."""
        self._db.execute("BEGIN")
        self._db.executemany(
            "DELETE FROM unseen WHERE topic = ? AND key = ?", ((topic, key) for key in keys)
        )
        self._db.execute("COMMIT")

    def unseen(self, topic: str) -> Iterator[bytes]:
        """The keys of rows that were not seen; they are forgotten on the way."""
        while True:
            query = "SELECT key FROM unseen WHERE topic = ? LIMIT ?"
            keys = [row[0] for row in self._db.execute(query, (topic, _MANY))]
            if not keys:
                return
            yield from keys
            self.seen(topic, keys)


def _is_gone(value: bytes) -> bool:
    """Whether an event in JSON says that its row was deleted."""
    if _PERHAPS_GONE not in value:
        return False
    try:
        event = orjson.loads(value)
    except orjson.JSONDecodeError:
        return False
    if isinstance(event, dict) and "payload" in event:
        event = event["payload"]
    return isinstance(event, dict) and event.get("op") in {"d", "t"}
