"""What a statement in the binlog means for a capture: the little that must be known of SQL.

Tables are never learned from statements, so none is parsed beyond its first words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_SPACE: Final = re.compile(
    r"(?:\s+|/\*(?!M?!).*?\*/|/\*M?!\d*|\*/|--[ \t\n][^\n]*\n?|#[^\n]*\n?)+", re.DOTALL
)
_WORD: Final = re.compile(r"[A-Za-z_]+")
_NAME: Final = r"(?:`((?:[^`]|``)+)`|\"((?:[^\"]|\"\")+)\"|([\w$\u0080-\uffff]+))"
_TABLE: Final = re.compile(rf"{_NAME}(?:\s*\.\s*{_NAME})?")
_XID: Final = re.compile(r"(?:COMMIT|ROLLBACK)\s+(.*?)\s*$", re.IGNORECASE | re.DOTALL)
_CHANGES: Final = frozenset({"INSERT", "UPDATE", "DELETE", "REPLACE", "LOAD", "WITH", "CALL", "DO"})
_SCHEMA: Final = frozenset({"CREATE", "ALTER", "DROP", "RENAME"})

BEGIN, COMMIT, ROLLBACK, SAVEPOINT, ROLLBACK_TO = "begin", "commit", "rollback", "savepoint", "undo"
XA_COMMIT, XA_ROLLBACK, XA_OTHER = "xa commit", "xa rollback", "xa"
TRUNCATE, SCHEMA, CHANGES, OTHER = "truncate", "schema", "changes", "other"


@dataclass(frozen=True, slots=True)
class Statement:
    """What kind it is, and of what: a table as (database, name), a savepoint's or XA's id."""

    kind: str
    table: tuple[str, str] | None = None
    name: str = ""


def _skip(sql: str, at: int = 0) -> int:
    found = _SPACE.match(sql, at)
    return found.end() if found else at


def _unquoted(groups: tuple[str | None, ...]) -> str:
    tick, double, bare = groups
    if tick is not None:
        return tick.replace("``", "`")
    return double.replace('""', '"') if double is not None else (bare or "")


def _table(sql: str, at: int, database: str) -> tuple[str, str] | None:
    found = _TABLE.match(sql, _skip(sql, at))
    if found is None:
        return None
    groups = found.groups()
    first = _unquoted(groups[:3])
    if any(part is not None for part in groups[3:]):
        return first, _unquoted(groups[3:])
    return database, first


def _words(sql: str, at: int, skip: frozenset[str]) -> int:
    """Past these words."""
    while True:
        at = _skip(sql, at)
        found = _WORD.match(sql, at)
        if found is None or found.group().upper() not in skip:
            return at
        at = found.end()


_FILLERS: Final = frozenset({"TABLE", "LOW_PRIORITY", "QUICK", "IGNORE", "DELAYED", "HIGH_PRIORITY",
                             "INTO", "FROM", "ONLY", "IF", "EXISTS"})  # fmt: skip


def classify(sql: str, database: str) -> Statement:
    """The kind of a statement that stands in the binlog."""
    at = _skip(sql)
    found = _WORD.match(sql, at)
    word = found.group().upper() if found else ""
    after = found.end() if found else at
    if word == "TRUNCATE":
        return Statement(TRUNCATE, _table(sql, _words(sql, after, _FILLERS), database))
    if word in _SCHEMA:
        return Statement(SCHEMA)
    if word in ("BEGIN", "START"):
        return Statement(BEGIN)
    if word == "COMMIT":
        return Statement(COMMIT)
    if word == "SAVEPOINT":
        return Statement(SAVEPOINT, name=_savepoint(sql, after))
    if word == "ROLLBACK":
        return _rollback(sql, after)
    if word == "XA":
        return _xa(sql, after)
    if word in _CHANGES:
        return _change(sql, word, after, database)
    return Statement(OTHER)


def _savepoint(sql: str, at: int) -> str:
    table = _table(sql, at, "")
    return table[1].lower() if table else ""


def _rollback(sql: str, at: int) -> Statement:
    start = _skip(sql, at)
    found = _WORD.match(sql, start)
    if found is None or found.group().upper() != "TO":
        return Statement(ROLLBACK)
    return Statement(
        ROLLBACK_TO, name=_savepoint(sql, _words(sql, found.end(), frozenset({"SAVEPOINT"})))
    )


def _xa(sql: str, at: int) -> Statement:
    rest = sql[_skip(sql, at) :]
    found = _XID.match(rest)
    if found is None:
        return Statement(XA_OTHER)
    kind = XA_COMMIT if rest[:6].upper() == "COMMIT" else XA_ROLLBACK
    return Statement(kind, name=xid_text(found.group(1)))


def xid_text(written: str) -> str:
    """An XA id in one spelling: X'67',X'62',1 and x'67' , x'62' ,1 are the same."""
    parts = [p.strip() for p in written.split(",")]
    out = []
    for part in parts[:2]:
        if part[:2].lower() == "x'":
            out.append(part[2:-1].lower())
        else:
            out.append(part.strip("'").encode().hex())
    out += [""] * (2 - len(out))
    number = parts[2] if len(parts) > 2 else "1"
    return f"{out[0]},{out[1]},{int(number, 0)}"


def _change(sql: str, word: str, at: int, database: str) -> Statement:
    """A change written as a statement. The server itself writes DELETE FROM `db`.`t` when it finds
    a MEMORY table empty after a restart: that is a truncate."""
    place = _words(sql, at, _FILLERS)
    table = None if word in ("WITH", "CALL", "DO", "LOAD") else _table(sql, place, database)
    found = _TABLE.match(sql, _skip(sql, place))
    if word == "DELETE" and found is not None and _skip(sql, found.end()) == len(sql.rstrip("; ")):
        return Statement(TRUNCATE, table)
    return Statement(CHANGES, table)
