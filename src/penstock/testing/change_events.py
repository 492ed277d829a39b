"""Change events for tests: rows of a table become what capture writes of them.

    events = ChangeEvents("shop.orders", key=["id"])
    events.upsert({"id": 1, "total": 5}, at_ms=0)     # op c: an insert
    events.upsert({"id": 1, "total": 6}, at_ms=1)     # op u, with the old row in `before`
    events.delete({"id": 1}, at_ms=2)                 # op d, and then a tombstone

The table is remembered, so `op` and `before` are those of a database. Without `full_identity` they
are those of PostgreSQL's default replica identity: an update has no old row, and a delete has the
key of it alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

import penstock

Event = dict[str, Any]
CONNECTOR: Final = "postgresql"
DEFAULT_SCHEMA: Final = "public"


@dataclass(slots=True)
class ChangeEvents:
    """A table, and the events of its changes."""

    topic: str
    key: Sequence[str]
    full_identity: bool = True
    # By key, as it stands in the record.
    rows: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    # Counts changes: the place of each in the database's log.
    lsn: int = 0

    def key_of(self, row: Mapping[str, Any]) -> str:
        """The record's key."""
        wanted = {name: row[name] for name in self.key}
        return json.dumps(wanted, default=_plain, separators=(",", ":"))

    def altered(self, columns: Sequence[str]) -> None:
        """The table has these columns from now on; rows that lack one have null there."""
        self.rows = {
            key: {name: row.get(name) for name in columns} for key, row in self.rows.items()
        }

    def upsert(self, row: Mapping[str, Any], at_ms: int, *, snapshot: bool = False) -> Event:
        """An insert, or an update of the row with the same key; or one that a snapshot reads."""
        key = self.key_of(row)
        old = self.rows.get(key)
        self.rows[key] = dict(row)
        op = "r" if snapshot else "c" if old is None else "u"
        before = old if op == "u" and self.full_identity else None
        return self._event(op, before, row, at_ms)

    def delete(self, row: Mapping[str, Any], at_ms: int) -> Event:
        """A delete of the row with the same key; one that was never written has what is given."""
        old = self.rows.pop(self.key_of(row), row)
        if not self.full_identity:
            old = {name: value if name in self.key else None for name, value in old.items()}
        return self._event("d", old, None, at_ms)

    def _event(
        self, op: str, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None, at_ms: int
    ) -> Event:
        self.lsn += 1
        return {
            "before": before,
            "after": after,
            "source": self._source(at_ms, snapshot=op == "r"),
            "transaction": None,
            "op": op,
            "ts_ms": at_ms,
            "ts_us": at_ms * 1000,
            "ts_ns": at_ms * 1_000_000,
        }

    def _source(self, at_ms: int, *, snapshot: bool) -> Event:
        """Where the change stood: Debezium's block for PostgreSQL."""
        names = self.topic.split(".")
        return {
            "version": penstock.__version__,
            "connector": CONNECTOR,
            "name": names[0],
            "ts_ms": at_ms,
            "snapshot": "true" if snapshot else "false",
            "db": names[0],
            "sequence": f'[null,"{self.lsn}"]',
            "ts_us": at_ms * 1000,
            "ts_ns": at_ms * 1_000_000,
            "schema": names[1] if len(names) > 2 else DEFAULT_SCHEMA,
            "table": names[-1],
            "txId": None if snapshot else self.lsn,
            "lsn": self.lsn,
            "xmin": None,
        }


def _plain(value: Any) -> Any:
    if isinstance(value, datetime):
        return value.isoformat()
    raise TypeError(f"{value!r} cannot be written as JSON")
