"""Rows of a table, in the order of its key, and reads that survive text which is not UTF-8."""

from __future__ import annotations

import base64
import binascii
import sqlite3
from collections.abc import Sequence
from typing import Any

import orjson

from penstock.capture.source import Row
from penstock.capture.sqlite.tables import BLOB, Definition, affinity, quoted
from penstock.capture.sqlite.values import DecodeRows, fragment, lenient, rows_decoder


def fetch(connection: sqlite3.Connection, sql: str, values: Sequence[Any] = ()) -> list[Any]:
    """All rows of a query. Text is decoded strictly, which is quick, and else leniently."""
    try:
        return connection.execute(sql, values).fetchall()
    except sqlite3.OperationalError as error:
        if "decode" not in str(error):
            raise
    before = connection.text_factory
    connection.text_factory = lenient
    try:
        return connection.execute(sql, values).fetchall()
    finally:
        connection.text_factory = before


class Pages:
    """Reads a table page by page, after any key.

    Keys are remembered as values, so that the next page begins exactly where the last one ended;
    a key that comes from elsewhere, as fragments, is translated back by the columns' types.
    """

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.decode: DecodeRows = rows_decoder(definition)
        names = [name for name, *_ in definition.columns]
        self._places = [names.index(name) for name in definition.key]
        self._columns = ", ".join(definition.expression(name) for name in names)
        self._key = ", ".join(definition.expression(name) for name in definition.key)
        self._last: tuple[Row, tuple[Any, ...]] | None = None

    def page(
        self, connection: sqlite3.Connection, after: Row | None, limit: int, where: str = ""
    ) -> tuple[list[Row], Row | None]:
        """Some rows, and the key of the last of them."""
        conditions: list[str] = []
        values: list[Any] = []
        if after is not None:
            marks = ", ".join("?" * len(self._places))
            conditions.append(f"({self._key}) > ({marks})")
            values += self._values(after)
        if where:
            conditions.append(f"({where})")
        condition = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        found = fetch(
            connection,
            f"SELECT {self._columns} FROM {quoted(self.definition.name)}{condition} "
            f"ORDER BY {self._key} LIMIT ?",
            (*values, limit),
        )
        if not found:
            return [], None
        key = tuple(found[-1][place] for place in self._places)
        last = tuple(fragment(value) for value in key)
        self._last = (last, key)
        return self.decode(found), last

    def everything(self, where: str = "") -> str:
        """The query for all rows, in any order."""
        condition = f" WHERE {where}" if where else ""
        return f"SELECT {self._columns} FROM {quoted(self.definition.name)}{condition}"

    def _values(self, key: Row) -> tuple[Any, ...]:
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        types = {name: declared for name, declared, _ in self.definition.columns}
        return tuple(
            _value(part, types[name]) for name, part in zip(self.definition.key, key, strict=True)
        )


def _value(part: bytes, declared: str) -> Any:
    """What a fragment was in the database."""
    value = orjson.loads(part)
    if not isinstance(value, str):
        return value
    if value in ("Infinity", "-Infinity") and affinity(declared) != BLOB:
        return float(value)
    if declared and affinity(declared) == BLOB:
        try:
            return base64.b64decode(value, validate=True)
        except binascii.Error:
            return value
    return value
