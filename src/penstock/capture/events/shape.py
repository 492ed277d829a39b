"""The shape of a table's events: which columns, changed how, keyed by which, on which topic.

Made once for each Table object. Keys hold the key columns as they are, whatever is excluded or
masked in the row (as Debezium does it): a masked key would no longer tell rows apart.

A masked or hashed column is text, whatever it was before, so that nothing is ever shown because
its type did not fit; a cut one keeps its type, and only texts and bytes are cut.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import orjson

from penstock.capture.events.filters import Predicate, compiled, takes_deletes
from penstock.capture.events.naming import topic_of
from penstock.capture.events.settings import EventSettings, Hash, first_match, matches_any
from penstock.capture.source import (
    NULL,
    UNAVAILABLE,
    CaptureError,
    Fragment,
    Table,
)
from penstock.client.table_schemas import TableColumn, ValueType

Change = Callable[[Fragment], Fragment]

TEXT: Final = ValueType("string")


@dataclass(frozen=True, slots=True)
class Shape:
    """How rows of one table are written."""

    table: Table
    topic: str
    # Places in the table's rows: of the key, and of what the event shows.
    key: tuple[int, ...]
    shown: tuple[int, ...]
    # The columns as they are shown, one for each of `shown`.
    columns: tuple[TableColumn, ...]
    # What is done to the fragment at a place of `shown`.
    changes: tuple[tuple[int, Change], ...]
    passes: Predicate | None
    # The key is not what the database calls the key: an old row may not tell all of it.
    own_key: bool
    # Whether no two rows have the same key, as far as is known.
    tells_rows: bool
    # Whether deletes pass the filter, or may.
    takes_deletes: bool
    # Whether other tables may have the same topic.
    may_share: bool

    @property
    def is_plain(self) -> bool:
        """Rows are shown just as they come."""
        return not self.changes and self.shown == tuple(range(len(self.table.columns)))

    @property
    def key_columns(self) -> tuple[TableColumn, ...]:
        return tuple(self.table.columns[place] for place in self.key)


def shape_of(settings: EventSettings, table: Table) -> Shape:
    """The shape; CaptureError where a setting does not fit the table."""
    places = {column.name: place for place, column in enumerate(table.columns)}
    # A table that is gone has no columns: only its truncate may still come.
    is_gone = not table.columns
    chosen = None if is_gone else first_match(settings.keys, table.full_name)
    names = table.key if chosen is None else chosen
    missing = [name for name in names if name not in places]
    if missing:
        raise CaptureError(
            f"table {table.full_name} has no column {missing[0]!r} to be part of the key",
            advice=f"Mend keys; its columns are {', '.join(places)}.",
        )
    shown = tuple(
        place for name, place in places.items() if _is_shown(settings, f"{table.full_name}.{name}")
    )
    columns: list[TableColumn] = []
    changes: list[tuple[int, Change]] = []
    for at, place in enumerate(shown):
        column = table.columns[place]
        column, change = _changed(settings, f"{table.full_name}.{column.name}", column)
        columns.append(column)
        if change is not None:
            changes.append((at, change))
    text = None if is_gone else first_match(settings.filters, table.full_name)
    topic = topic_of(settings, table)
    return Shape(
        table,
        topic,
        tuple(places[name] for name in names),
        shown,
        tuple(columns),
        tuple(changes),
        compiled(text, table, f"filter of {table.full_name}") if text else None,
        not set(names) <= set(table.key),
        # The database vouches for its own key only.
        bool(table.key) and set(names) >= set(table.key) if names else is_gone,
        not text or takes_deletes(text, table),
        # What is set for others may lead here, and so may a name with a character that is replaced.
        bool(settings.routes or settings.topics) or topic != f"{settings.prefix}.{table.full_name}",
    )


def _is_shown(settings: EventSettings, name: str) -> bool:
    if settings.column_include and not matches_any(settings.column_include, name):
        return False
    return not matches_any(settings.column_exclude, name)


def _changed(
    settings: EventSettings, name: str, column: TableColumn
) -> tuple[TableColumn, Change | None]:
    """A column as it is shown, and what makes it so."""
    mask = first_match(settings.mask, name)
    if mask is not None:
        shown = replace(TEXT, parameters={"masked": "true"})
        return replace(column, type=shown), masking(mask)
    hashed = first_match(settings.hash, name)
    if hashed is not None:
        shown = replace(TEXT, parameters={"masked": "true"})
        return replace(column, type=shown), hashing(hashed)
    length = first_match(settings.truncate, name)
    if length is not None and column.type.name in {"string", "bytes"}:
        parameters = {**column.type.parameters, "truncateLength": str(length)}
        cut = cutting_bytes(length) if column.type.name == "bytes" else cutting(length)
        return replace(column, type=replace(column.type, parameters=parameters)), cut
    return column, None


def masking(mask: str | int) -> Change:
    """Whatever it is, null too, becomes the same text."""
    fragment = orjson.dumps("*" * mask if isinstance(mask, int) else mask)
    return lambda value: fragment


def hashing(choice: Hash) -> Change:
    """A digest of the salt and the value's text, in hexadecimal; null stays null."""
    salted = hashlib.new(choice.algorithm, choice.salt.encode())

    def change(value: Fragment) -> Fragment:
        if value in (NULL, UNAVAILABLE):
            return value
        digest = salted.copy()
        digest.update(orjson.loads(value).encode() if value[:1] == b'"' else value)
        return b'"%b"' % digest.hexdigest().encode()

    return change


def cutting(length: int) -> Change:
    """At most so many characters of a text."""

    def change(value: Fragment) -> Fragment:
        # A character has at least one byte, so short fragments need no look.
        if len(value) <= length + 2 or value in (NULL, UNAVAILABLE):
            return value
        text = orjson.loads(value)
        return orjson.dumps(text[:length]) if isinstance(text, str) else value

    return change


def cutting_bytes(length: int) -> Change:
    """At most so many bytes of what is written in base64."""

    def change(value: Fragment) -> Fragment:
        if value in (NULL, UNAVAILABLE):
            return value
        return b'"%b"' % base64.b64encode(base64.b64decode(orjson.loads(value))[:length])

    return change
