"""Whose an event is: the table that it tells of, as its source block names it.

A table is the same one as long as its topic is. So what counts is the server's name, which topics
begin with, and what else is in the table's full name. A database that is not in it (PostgreSQL,
SQLite) may be renamed or moved, and its rows are what they were.

In JSON, that is. Avro events are not looked into: there, all are of the same owner.
"""

from __future__ import annotations

from typing import Any, Final

import orjson

from penstock.capture.events.settings import JSON, EventSettings
from penstock.capture.source import Fragment, Table

_BLOCK: Final = b',"source":'


class Owners:
    """Tells the owners of events apart, for tables of one database."""

    def __init__(self, settings: EventSettings, table: Table) -> None:
        self._looks = settings.format == JSON
        is_database_told = not table.schema and bool(table.database)
        self._fields = ("name", *(["db"] if is_database_told else []), "schema", "table")

    def named(self, source: Fragment) -> str:
        """The owner that a source block names."""
        return self._name(orjson.loads(source)) if self._looks else ""

    def of(self, value: bytes) -> str:
        """The owner of an event; empty where nothing names it."""
        if not self._looks:
            return ""
        block = _quick_block(value)
        if block is None:
            block = _block(value)
        return "" if block is None else self._name(block)

    def _name(self, block: dict[str, Any]) -> str:
        return orjson.dumps([block.get(field) for field in self._fields]).decode()


def _quick_block(value: bytes) -> dict[str, Any] | None:
    """The source block of an event of our layout, which stands behind the rows; None if it is not
    one, or cannot be cut out by looking."""
    at = value.rfind(_BLOCK)
    if at < 0:
        return None
    try:
        found = orjson.loads(value[at + len(_BLOCK) : value.find(b"}", at) + 1])
    except orjson.JSONDecodeError:
        return None
    # A column may be called so, too.
    return found if isinstance(found, dict) and {"name", "table", "version"} <= set(found) else None


def _block(value: bytes) -> dict[str, Any] | None:
    try:
        event = orjson.loads(value)
    except orjson.JSONDecodeError:
        return None
    if isinstance(event, dict) and isinstance(event.get("payload"), dict):
        event = event["payload"]
    block = event.get("source") if isinstance(event, dict) else None
    return block if isinstance(block, dict) else None
