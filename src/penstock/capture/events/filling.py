"""Last values of large columns, for updates in which the database did not send them.

The log has them: the last event of the row, in its compacted topic. When a table's first event is
made, the topic is read once into a file of this machine (an SQLite database, thrown away at the
end); from then on it is kept up with every event made. Only columns whose values can be large are
kept. A value that the log does not have either stays marked as unavailable, and is counted.

Nothing here outlives a session: whoever begins anew reads the log anew, so what was written into a
log transaction that was never committed is forgotten with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.capture.events.json import marker
from penstock.capture.events.shape import Shape
from penstock.capture.scratch import Scratch
from penstock.capture.source import UNAVAILABLE, Row

# What can be too large to be sent each time.
_LARGE: Final = frozenset(("string", "bytes", "array", "struct"))
_PENDING_MAX: Final = 2_000

# The records of a topic: (key, value), in order; value None where the row is gone.
Read = Callable[[str], Iterable[tuple[bytes, bytes | None]]]


class LastValues:
    """A file of last values. One thread uses it; close it to have the file gone."""

    def __init__(self, read: Read, folder: str | Path | None = None) -> None:
        self._read = read
        self._scratch = Scratch(
            "last (topic TEXT, key BLOB, columns BLOB, PRIMARY KEY (topic, key)) WITHOUT ROWID",
            folder,
        )
        self._db = self._scratch.db
        self._pending: dict[tuple[str, bytes], bytes | None] = {}
        self._loaded: set[str] = set()
        # Values that nobody had.
        self.missed = 0

    def close(self) -> None:
        self._scratch.close()

    def prepare(self, shape: Shape) -> ShapeValues:
        """The values for rows of this shape; reads the topic if it was not read yet. A table that
        was altered has several shapes at once for a while, with the same topic."""
        key = set(shape.key)
        places = [
            (at, shape.columns[at].name)
            for at, place in enumerate(shape.shown)
            if place not in key and shape.columns[at].type.name in _LARGE
        ]
        if shape.topic not in self._loaded:
            self._load(shape)
        return ShapeValues(self, places)

    def _load(self, shape: Shape) -> None:
        self._loaded.add(shape.topic)
        names = {
            column.name: orjson.loads(marker(column.type))
            for column in shape.columns
            if column.type.name in _LARGE
        }
        for record_key, value in self._read(shape.topic):
            self.put(shape.topic, record_key, _kept(value, names))

    def forget_all(self, topic: str) -> None:
        self._flush()
        with self._scratch.kept():
            self._db.execute("DELETE FROM last WHERE topic = ?", (topic,))

    def get(self, topic: str, key: bytes) -> dict[str, Any]:
        at = (topic, key)
        if at in self._pending:
            found = self._pending[at]
        else:
            query = "SELECT columns FROM last WHERE topic = ? AND key = ?"
            with self._scratch.kept():
                row = self._db.execute(query, at).fetchone()
            found = row[0] if row else None
        return orjson.loads(found) if found else {}

    def put(self, topic: str, key: bytes, columns: bytes | None) -> None:
        self._pending[topic, key] = columns
        if len(self._pending) >= _PENDING_MAX:
            self._flush()

    def _flush(self) -> None:
        kept = [(*at, columns) for at, columns in self._pending.items() if columns is not None]
        gone = [at for at, columns in self._pending.items() if columns is None]
        with self._scratch.kept():
            self._db.execute("BEGIN")
            self._db.executemany("INSERT OR REPLACE INTO last VALUES (?, ?, ?)", kept)
            self._db.executemany("DELETE FROM last WHERE topic = ? AND key = ?", gone)
            self._db.execute("COMMIT")
        self._pending.clear()


class ShapeValues:
    """The last values of rows of one shape: what a composer fills with."""

    def __init__(self, values: LastValues, places: list[tuple[int, str]]) -> None:
        self._values = values
        self._places = places

    def fill(self, topic: str, key: bytes, shown: Row) -> Row:
        known = self._values.get(topic, key)
        parts = list(shown)
        for at, name in self._places:
            if parts[at] == UNAVAILABLE:
                if name in known:
                    parts[at] = orjson.dumps(known[name])
                else:
                    self._values.missed += 1
        return tuple(parts)

    def keep(self, topic: str, key: bytes, shown: Row) -> None:
        parts = (
            b"%b:%b" % (orjson.dumps(name), shown[at])
            for at, name in self._places
            if shown[at] != UNAVAILABLE
        )
        self._values.put(topic, key, b"{" + b",".join(parts) + b"}")

    def forget(self, topic: str, key: bytes) -> None:
        self._values.put(topic, key, None)

    def forget_all(self, topic: str) -> None:
        self._values.forget_all(topic)


def _kept(value: bytes | None, names: dict[str, Any]) -> bytes | None:
    """What is kept of an event: its large columns, or None if the row is gone by it."""
    event = orjson.loads(value) if value else None
    if isinstance(event, dict) and "payload" in event and "schema" in event:
        event = event["payload"]
    after = event.get("after") if isinstance(event, dict) else None
    if not isinstance(after, dict):
        return None
    return orjson.dumps(
        {
            name: after[name]
            for name, unavailable in names.items()
            if name in after and after[name] != unavailable
        }
    )
