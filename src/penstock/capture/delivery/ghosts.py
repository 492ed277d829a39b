"""Rows that a topic still has although the database has them no longer.

A snapshot that is taken again (it was interrupted, or the position was lost, or the user wants it)
shows which rows there are. Rows of the topic that it does not show were deleted meanwhile, and
nobody has told: their deletes are what comes out of here. The keys are kept in a file, with whose
rows they are: several tables may share a topic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

import orjson

from penstock.capture.scratch import Scratch
from penstock.client.table_schemas import SCHEMA_ID, event_schema_id

_MANY: Final = 10_000
_MUCH_BYTES: Final = 16 << 20
# Keys, with their values, that are handed out together.
_FEW: Final = 1_000
_FEW_BYTES: Final = 4 << 20
_PERHAPS_GONE: Final = b'"after":null'

# Whose an event is; None: it is not to be kept.
OwnerOf = Callable[[bytes], str | None]


class Ghosts:
    """The keys of topics that were not seen yet; close it to have the file gone."""

    def __init__(self, folder: str | Path | None = None) -> None:
        self._scratch = Scratch(
            "unseen (topic TEXT, key BLOB, owner TEXT, value BLOB, PRIMARY KEY (topic, key)) "
            "WITHOUT ROWID",
            folder,
        )
        self._db = self._scratch.db
        self._topics: set[str] = set()
        self._haunted: set[str] = set()

    def close(self) -> None:
        self._scratch.close()

    def knows(self, topic: str) -> bool:
        """Whether a topic was read."""
        return topic in self._topics

    def has_any(self, topic: str) -> bool:
        """Whether a topic had rows when it was read."""
        return topic in self._haunted

    def load(
        self,
        topic: str,
        records: Iterable[tuple[bytes, bytes | None]],
        *,
        keep_bytes: int = 0,
        owner_of: OwnerOf = lambda value: "",
    ) -> None:
        """Read a topic; nothing of it was seen yet. Values up to a size can be kept, too; of others
        only the schema that they name is."""
        self._topics.add(topic)
        last: dict[bytes, tuple[str, bytes] | None] = {}
        size = 0
        for key, value in records:
            last[key] = None
            size += len(key)
            if value is not None and not _is_gone(value):
                owner = owner_of(value)
                if owner is not None:
                    kept = value if len(value) <= keep_bytes else _beginning(value)
                    last[key] = owner, kept
                    size += len(kept)
            if len(last) >= _MANY or size >= _MUCH_BYTES:
                self._note(topic, last)
                size = 0
        self._note(topic, last)
        with self._scratch.kept():
            found = self._db.execute("SELECT 1 FROM unseen WHERE topic = ? LIMIT 1", (topic,))
            if found.fetchone() is not None:
                self._haunted.add(topic)

    def _note(self, topic: str, last: dict[bytes, tuple[str, bytes] | None]) -> None:
        """Keys, and the last value of each, None where the row is gone; in order: it is quicker."""
        there = [(topic, key, *row) for key in sorted(last) if (row := last[key]) is not None]
        gone = [(topic, key) for key in sorted(last) if last[key] is None]
        with self._scratch.kept():
            self._db.execute("BEGIN")
            self._db.executemany("INSERT OR REPLACE INTO unseen VALUES (?, ?, ?, ?)", there)
            self._db.executemany("DELETE FROM unseen WHERE topic = ? AND key = ?", gone)
            self._db.execute("COMMIT")
        last.clear()

    def measure(self, topic: str, owner: str = "") -> tuple[int, int]:
        """How many rows of an owner were not seen, and the bytes of what is kept of them."""
        query = (
            "SELECT count(*), coalesce(sum(length(key) + length(value)), 0) FROM unseen "
            "WHERE topic = ? AND owner = ?"
        )
        with self._scratch.kept():
            count, size = self._db.execute(query, (topic, owner)).fetchone()
        return int(count), int(size)

    def count_others(self, topic: str, owner: str) -> int:
        """How many rows that were not seen are somebody else's."""
        query = "SELECT count(*) FROM unseen WHERE topic = ? AND owner <> ?"
        with self._scratch.kept():
            (found,) = self._db.execute(query, (topic, owner)).fetchone()
        return int(found)

    def seen(self, topic: str, keys: Iterable[bytes]) -> None:
        """These rows are there."""
        with self._scratch.kept():
            self._db.execute("BEGIN")
            self._db.executemany(
                "DELETE FROM unseen WHERE topic = ? AND key = ?", ((topic, key) for key in keys)
            )
            self._db.execute("COMMIT")

    def unseen_rows(self, topic: str, owner: str = "") -> Iterator[tuple[bytes, bytes]]:
        """The keys of an owner's rows that were not seen, with what was kept of their values; they
        are forgotten on the way."""
        after = b""
        while rows := self._some(topic, owner, after):
            yield from rows
            after = rows[-1][0]
            self.seen(topic, [key for key, _ in rows])

    def _some(self, topic: str, owner: str, after: bytes) -> list[tuple[bytes, bytes]]:
        """The next rows in the order of their keys: a limited number of limited size."""
        query = (
            "SELECT key, value FROM unseen WHERE topic = ? AND owner = ? AND key >= ? "
            "ORDER BY key LIMIT ?"
        )
        rows: list[tuple[bytes, bytes]] = []
        size = 0
        with self._scratch.kept():
            cursor = self._db.execute(query, (topic, owner, after, _FEW))
            for key, value in cursor:
                rows.append((key, value))
                size += len(key) + len(value)
                if size >= _FEW_BYTES:
                    break
            cursor.close()
        return rows


def _beginning(value: bytes) -> bytes:
    """An event without all but the schema that it names."""
    id_ = event_schema_id(value)
    return b"" if id_ is None else b'{"%b":%d}' % (SCHEMA_ID.encode(), id_)


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
