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
_MUCH_BYTES: Final = 16 << 20
# Keys, with their values, that are handed out together.
_FEW: Final = 1_000
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
            "CREATE TABLE unseen (topic TEXT, key BLOB, value BLOB, PRIMARY KEY (topic, key)) "
            "WITHOUT ROWID"
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

    def load(
        self, topic: str, records: Iterable[tuple[bytes, bytes | None]], *, keep_bytes: int = 0
    ) -> None:
        """Read a topic; nothing of it was seen yet. Values up to a size can be kept, too."""
        self._topics.add(topic)
        last: dict[bytes, bytes | None] = {}
        size = 0
        for key, value in records:
            if value is None or _is_gone(value):
                last[key] = None
            else:
                kept = last[key] = value if len(value) <= keep_bytes else b""
                size += len(kept)
            if len(last) >= _MANY or size >= _MUCH_BYTES:
                self._note(topic, last)
                size = 0
        self._note(topic, last)
        found = self._db.execute("SELECT 1 FROM unseen WHERE topic = ? LIMIT 1", (topic,))
        if found.fetchone() is not None:
            self._haunted.add(topic)

    def _note(self, topic: str, last: dict[bytes, bytes | None]) -> None:
        """Keys, and the last value of each, None where the row is gone; in order: it is quicker."""
        there = [(topic, key, last[key]) for key in sorted(last) if last[key] is not None]
        gone = [(topic, key) for key in sorted(last) if last[key] is None]
        self._db.execute("BEGIN")
        self._db.executemany("INSERT OR REPLACE INTO unseen VALUES (?, ?, ?)", there)
        self._db.executemany("DELETE FROM unseen WHERE topic = ? AND key = ?", gone)
        self._db.execute("COMMIT")
        last.clear()

    def count(self, topic: str) -> int:
        """How many rows were not seen."""
        query = "SELECT count(*) FROM unseen WHERE topic = ?"
        (found,) = self._db.execute(query, (topic,)).fetchone()
        return int(found)

    def seen(self, topic: str, keys: Iterable[bytes]) -> None:
        """These rows are there."""
        self._db.execute("BEGIN")
        self._db.executemany(
            "DELETE FROM unseen WHERE topic = ? AND key = ?", ((topic, key) for key in keys)
        )
        self._db.execute("COMMIT")

    def unseen(self, topic: str) -> Iterator[bytes]:
        """The keys of rows that were not seen; they are forgotten on the way."""
        for key, _ in self.unseen_rows(topic):
            yield key

    def unseen_rows(self, topic: str) -> Iterator[tuple[bytes, bytes]]:
        """The same with their values, empty where they were not kept."""
        while True:
            query = "SELECT key, value FROM unseen WHERE topic = ? LIMIT ?"
            rows = self._db.execute(query, (topic, _FEW)).fetchall()
            if not rows:
                return
            yield from rows
            self.seen(topic, [key for key, _ in rows])


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
