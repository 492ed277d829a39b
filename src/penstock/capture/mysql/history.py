"""Columns that are more than the binlog shows: UUID, INET6 and INET4 of MariaDB.

A table map shows them as BINARY(16) or BINARY(4). What they are is learned when the capture begins,
goes along in the position, and is kept up by the DDL statements of the stream; so a column is read
by what it was at its place in the stream, not by what it is now. Nothing else is learned from DDL.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Final

from penstock.capture.mysql.types import DISGUISED

_TOKEN: Final = re.compile(
    r"`(?P<tick>(?:[^`]|``)*)`|(?P<text>'(?:[^'\\]|''|\\.)*'|\"(?:[^\"\\]|\"\"|\\.)*\")"
    r"|(?P<skip>\s+|/\*(?!M?!).*?\*/|/\*M?!\d*|\*/|--\s[^\n]*|\#[^\n]*)"
    r"|(?P<word>[\w$\u0080-\uffff]+)|(?P<mark>.)",
    re.DOTALL,
)
_NOISE: Final = frozenset({"IF", "NOT", "EXISTS", "OR", "REPLACE", "TEMPORARY", "ONLINE", "IGNORE",
                           "TABLE", "WAIT", "NOWAIT"})  # fmt: skip


class Disguised:
    """By table the columns that are more than BINARY(n), and what they are."""

    def __init__(self, known: Mapping[str, Mapping[str, str]]) -> None:
        self._tables = {table: dict(columns) for table, columns in known.items() if columns}
        self._known: dict[str, dict[str, str]] | None = None

    def of(self, database: str, name: str) -> Mapping[str, str]:
        return self._tables.get(f"{database}.{name}", {})

    def known(self) -> dict[str, dict[str, str]]:
        """For the position."""
        if self._known is None:
            self._known = {table: dict(columns) for table, columns in self._tables.items()}
        return self._known

    def apply(self, sql: str, database: str) -> None:
        """Take in a DDL statement."""
        self._known = None
        upper = sql.upper()
        if not self._tables and not any(kind.upper() in upper for kind in DISGUISED):
            return
        tokens = list(_tokens(sql))
        if not tokens:
            return
        verb = tokens[0][1].upper()
        if verb == "RENAME":
            self._rename_tables(tokens, database)
        elif verb in ("CREATE", "ALTER"):
            self._define(tokens, database, verb)
        elif verb == "DROP" and len(tokens) > 1 and tokens[1][1].upper() == "DATABASE":
            gone = tokens[-1][1] + "."
            self._tables = {t: c for t, c in self._tables.items() if not t.startswith(gone)}

    def _define(self, tokens: list[tuple[str, str]], database: str, verb: str) -> None:
        if not any(word.upper() == "TABLE" and kind == "word" for kind, word in tokens[:5]):
            return
        at = 1
        while at < len(tokens) and tokens[at][0] == "word" and tokens[at][1].upper() in _NOISE:
            at += 1
        table, at = _place(tokens, at, database)
        rest = tokens[at:]
        words = [word.upper() if kind == "word" else "" for kind, word in rest]
        if verb == "CREATE":
            self._tables.pop(table, None)
            if "LIKE" in words[:2]:
                other, _ = _place(tokens, at + words.index("LIKE") + 1, database)
                self._tables[table] = dict(self._tables.get(other, {}))
        columns = dict(self._tables.get(table, {}))
        for i, word in enumerate(words[:-1]):
            after = words[i + 1]
            if word == "CHANGE" or (word == "RENAME" and after == "COLUMN"):
                _rename_column(columns, rest, words, i)
            # uuid() is a function, not a type.
            call = rest[i + 2 : i + 3] == [("mark", "(")]
            if rest[i][0] in ("tick", "word") and after.lower() in DISGUISED and not call:
                columns[rest[i][1]] = after.lower()
            elif rest[i][1] in columns and after == "BINARY":
                del columns[rest[i][1]]
        self._keep(table, columns)
        if verb == "ALTER" and "RENAME" in words:
            i = words.index("RENAME") + 1
            if i < len(words) and words[i] not in ("COLUMN", "INDEX", "KEY"):
                i += words[i] in ("TO", "AS")
                self._move(table, _place(tokens, at + i, database)[0])

    def _keep(self, table: str, columns: dict[str, str]) -> None:
        if columns:
            self._tables[table] = columns
        else:
            self._tables.pop(table, None)

    def _move(self, table: str, to: str) -> None:
        self._keep(to, self._tables.pop(table, {}))

    def _rename_tables(self, tokens: list[tuple[str, str]], database: str) -> None:
        at = 1
        while at < len(tokens):
            kind, text = tokens[at]
            if text == "," or (kind == "word" and text.upper() in _NOISE):
                at += 1
                continue
            old, at = _place(tokens, at, database)
            while at < len(tokens) and tokens[at][1].upper() != "TO":
                at += 1
            new, at = _place(tokens, at + 1, database)
            self._move(old, new)


def _rename_column(
    columns: dict[str, str], rest: list[tuple[str, str]], words: list[str], i: int
) -> None:
    """CHANGE [COLUMN] old new TYPE, RENAME COLUMN old TO new."""
    i += 1
    while i < len(words) and words[i] in ("COLUMN", "IF", "EXISTS"):
        i += 1
    new = i + 1 + (i + 1 < len(words) and words[i + 1] == "TO")
    if new < len(rest):
        kind = columns.pop(rest[i][1], None)
        if kind is not None:
            columns[rest[new][1]] = kind


def _tokens(sql: str) -> Iterator[tuple[str, str]]:
    for found in _TOKEN.finditer(sql):
        kind = found.lastgroup or ""
        if kind == "tick":
            yield kind, found.group("tick").replace("``", "`")
        elif kind != "skip":
            yield kind, found.group()


def _place(tokens: list[tuple[str, str]], at: int, database: str) -> tuple[str, int]:
    """The table named here, and where its name ends."""
    if at >= len(tokens):
        return "", at
    if at + 2 < len(tokens) and tokens[at + 1][1] == ".":
        return f"{tokens[at][1]}.{tokens[at + 2][1]}", at + 3
    return f"{database}.{tokens[at][1]}", at + 1
