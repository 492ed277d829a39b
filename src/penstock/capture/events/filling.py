"""Last values of large columns, for updates in which the database did not send them.

The log has them: the last event of the row, in its compacted topic. When a table's first event is
made, the topic is read once into a file of this machine (an SQLite database, thrown away at the
end); from then on it is kept up with every event made. Only columns whose values can be large are
kept. A value that the log does not have either stays marked as unavailable, and is counted; so does
one of a column that had another type when it was written.

Nothing here outlives a session: whoever begins anew reads the log anew, so what was written into a
log transaction that was never committed is forgotten with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import orjson

from penstock.capture.events.json import marker
from penstock.capture.events.shape import Shape
from penstock.capture.scratch import Scratch
from penstock.capture.source import UNAVAILABLE, Row
from penstock.client.table_schemas import (
    SchemaError,
    TableColumn,
    TableSchema,
    UnknownSchemaError,
    ValueType,
    event_schema_id,
)

# What can be too large to be sent each time.
_LARGE: Final = frozenset(("string", "bytes", "array", "struct"))
_PENDING_MAX: Final = 2_000

# What a column of a type may hold at most, or one of which: no matter of form.
_LIMITS: Final = frozenset(("allowed", "length"))
_SAME_MAX: Final = 10_000

# The schema of an id; SchemaError if there is none.
SchemaOf = Callable[[int], TableSchema]
# The records of a topic: (key, value), in order; value None where the row is gone.
Read = Callable[[str], Iterable[tuple[bytes, bytes | None]]]


def _unknown(schema_id: int) -> TableSchema:
    raise UnknownSchemaError(f"schema {schema_id} is unknown")


class LastValues:
    """A file of last values. One thread uses it; close it to have the file gone."""

    def __init__(
        self, read: Read, folder: str | Path | None = None, schema: SchemaOf = _unknown
    ) -> None:
        self._read = read
        self._schema = schema
        self._scratch = Scratch(
            "last (topic TEXT, key BLOB, columns BLOB, schema INTEGER, PRIMARY KEY (topic, key)) "
            "WITHOUT ROWID",
            folder,
        )
        self._db = self._scratch.db
        self._pending: dict[tuple[str, bytes], tuple[bytes | None, int | None]] = {}
        self._loaded: set[str] = set()
        # Values that nobody had.
        self.missed = 0

    def close(self) -> None:
        self._scratch.close()

    def prepare(self, shape: Shape, schema_id: int | None = None) -> ShapeValues:
        """The values for rows of this shape; reads the topic if it was not read yet. A table that
        was altered has several shapes at once for a while, with the same topic."""
        key = set(shape.key)
        columns = {
            at: shape.columns[at]
            for at, place in enumerate(shape.shown)
            if place not in key and shape.columns[at].type.name in _LARGE
        }
        if shape.topic not in self._loaded:
            self._load(shape)
        return ShapeValues(self, columns, schema_id)

    def is_same(self, column: TableColumn, schema_id: int) -> bool:
        """Whether a column has had the same form under another schema."""
        try:
            schema = self._schema(schema_id)
        except SchemaError:
            return False
        known = [past for past in schema.columns if past.name == column.name]
        return bool(known) and _form(known[0].type) == _form(column.type)

    def _load(self, shape: Shape) -> None:
        self._loaded.add(shape.topic)
        names = {
            column.name: orjson.loads(marker(column.type))
            for column in shape.columns
            if column.type.name in _LARGE
        }
        for record_key, value in self._read(shape.topic):
            self.put(shape.topic, record_key, *_kept(value, names))

    def forget_all(self, topic: str) -> None:
        self._flush()
        with self._scratch.kept():
            self._db.execute("DELETE FROM last WHERE topic = ?", (topic,))

    def get(self, topic: str, key: bytes) -> tuple[dict[str, Any], int | None]:
        """What is known of a row, and the schema that it was written with."""
        at = (topic, key)
        found: tuple[bytes | None, int | None]
        if at in self._pending:
            found = self._pending[at]
        else:
            query = "SELECT columns, schema FROM last WHERE topic = ? AND key = ?"
            with self._scratch.kept():
                found = self._db.execute(query, at).fetchone() or (None, None)
        return orjson.loads(found[0]) if found[0] else {}, found[1]

    def put(self, topic: str, key: bytes, columns: bytes | None, schema: int | None = None) -> None:
        self._pending[topic, key] = columns, schema
        if len(self._pending) >= _PENDING_MAX:
            self._flush()

    def _flush(self) -> None:
        kept = [(*at, *row) for at, row in self._pending.items() if row[0] is not None]
        gone = [at for at, row in self._pending.items() if row[0] is None]
        with self._scratch.kept():
            self._db.execute("BEGIN")
            self._db.executemany("INSERT OR REPLACE INTO last VALUES (?, ?, ?, ?)", kept)
            self._db.executemany("DELETE FROM last WHERE topic = ? AND key = ?", gone)
            self._db.execute("COMMIT")
        self._pending.clear()


class ShapeValues:
    """The last values of rows of one shape: what a composer fills with."""

    def __init__(
        self, values: LastValues, columns: dict[int, TableColumn], schema_id: int | None
    ) -> None:
        self._values = values
        self._columns = columns
        self._schema_id = schema_id
        # Whether a column has the form that it had under another schema.
        self._same: dict[tuple[str, int], bool] = {}

    def fill(self, topic: str, key: bytes, shown: Row) -> Row:
        known, schema_id = self._values.get(topic, key)
        parts = list(shown)
        for at, column in self._columns.items():
            if parts[at] == UNAVAILABLE:
                if column.name in known and self._is_same(column, schema_id):
                    parts[at] = orjson.dumps(known[column.name])
                else:
                    self._values.missed += 1
        return tuple(parts)

    def _is_same(self, column: TableColumn, schema_id: int | None) -> bool:
        # What was written without a schema is taken for what it looks like.
        if schema_id is None or schema_id == self._schema_id:
            return True
        at = column.name, schema_id
        if at not in self._same:
            if len(self._same) > _SAME_MAX:
                self._same.clear()
            self._same[at] = self._values.is_same(column, schema_id)
        return self._same[at]

    def keep(self, topic: str, key: bytes, shown: Row) -> None:
        parts = (
            b"%b:%b" % (orjson.dumps(column.name), shown[at])
            for at, column in self._columns.items()
            if shown[at] != UNAVAILABLE
        )
        self._values.put(topic, key, b"{" + b",".join(parts) + b"}", self._schema_id)

    def forget(self, topic: str, key: bytes) -> None:
        self._values.put(topic, key, None)

    def forget_all(self, topic: str) -> None:
        self._values.forget_all(topic)


def _form(kind: ValueType) -> ValueType:
    """A type without what may change while its values are written in the same way."""
    parameters = {name: text for name, text in kind.parameters.items() if name not in _LIMITS}
    return replace(kind, parameters=parameters)


def _kept(value: bytes | None, names: dict[str, Any]) -> tuple[bytes | None, int | None]:
    """What is kept of an event: its large columns, or None if the row is gone by it; its schema."""
    event = orjson.loads(value) if value else None
    if isinstance(event, dict) and "payload" in event and "schema" in event:
        event = event["payload"]
    after = event.get("after") if isinstance(event, dict) else None
    if not isinstance(after, dict):
        return None, None
    known = {
        name: after[name]
        for name, unavailable in names.items()
        if name in after and after[name] != unavailable
    }
    return orjson.dumps(known), event_schema_id(value) if value else None
