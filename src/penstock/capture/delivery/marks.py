"""Which row of a snapshot is the first and which the last, as source blocks tell it.

Debezium marks rows `first`, `first_in_data_collection`, `true`, `last_in_data_collection` and
`last`. That a row was the last is known only afterwards, so the last row of what was read is kept
back until more of its table comes, or the end.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from penstock.capture.source import Fragment, Row, Table

FIRST, FIRST_OF_TABLE, PLAIN = "first", "first_in_data_collection", "true"
LAST_OF_TABLE, LAST, INCREMENTAL = "last_in_data_collection", "last", "incremental"

_SNAPSHOT: Final = re.compile(rb'"snapshot":\s*(?:"[a-z_]*"|true|false)')


class Marked(NamedTuple):
    """Rows that have one mark."""

    table: Table
    rows: Sequence[Row]
    mark: str


class Marks:
    """Gives marks to the rows of one snapshot."""

    def __init__(self) -> None:
        self._began = False
        self._held: dict[Table, Row] = {}
        self._begun: set[Table] = set()
        # The last row of the table that ended last: it may be the last of all.
        self._final: tuple[Table, Row] | None = None

    def add(self, table: Table, rows: Sequence[Row]) -> list[Marked]:
        if not rows:
            return []
        held = self._held.get(table)
        self._held[table] = rows[-1]
        made = [] if held is None else self._marked(table, [held])
        return [*made, *self._marked(table, rows[:-1])]

    def end(self, table: Table) -> list[Marked]:
        """No more rows of a table will come."""
        held = self._held.pop(table, None)
        if held is None:
            return []
        made = (
            [] if self._final is None else [Marked(self._final[0], [self._final[1]], LAST_OF_TABLE)]
        )
        self._final = (table, held)
        return made

    def finish(self) -> list[Marked]:
        """No more rows at all."""
        if self._final is None:
            return []
        table, row = self._final
        self._final = None
        return [Marked(table, [row], LAST)]

    def _marked(self, table: Table, rows: Sequence[Row]) -> list[Marked]:
        if not rows or table in self._begun:
            return [Marked(table, rows, PLAIN)] if rows else []
        self._begun.add(table)
        mark = FIRST_OF_TABLE if self._began else FIRST
        self._began = True
        made = [Marked(table, rows[:1], mark)]
        return [*made, Marked(table, rows[1:], PLAIN)] if rows[1:] else made


def with_mark(source: Fragment, mark: str) -> Fragment:
    """A source block that says so of its rows."""
    return _SNAPSHOT.sub(b'"snapshot":"%b"' % mark.encode(), source, count=1)
