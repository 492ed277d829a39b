"""Values of SQLite as fragments of JSON, by code that is generated for each table.

Any column may hold a value of any kind, so what is written depends on the value alone. The code
for a column only begins with the kind that its affinity makes most likely.

Not by `orjson.dumps` for each value: it makes each result in a kilobyte of memory of its own, which
is quick when it is thrown away and twenty times slower when it is kept.
"""

from __future__ import annotations

from binascii import b2a_base64
from collections.abc import Callable, Iterable
from json.encoder import encode_basestring
from math import isinf
from sys import float_info
from typing import Any, Final

import orjson

import penstock
from penstock.capture.source import CREATE, DELETE, NULL, UPDATE, Change, Fragment, Row, Table
from penstock.capture.sqlite.tables import (
    BLOB,
    NUMERIC,
    REAL,
    TEXT,
    Definition,
    affinity,
    column_type,
)
from penstock.capture.sqlite.triggers import OP_DELETE, OP_INSERT, OP_UPDATE

# The julian day on which Unix time begins.
EPOCH_DAY: Final = 2440587.5
DAY_MS: Final = 86_400_000

# Text as a JSON string; in C, and letters beyond ASCII stay what they are.
text_of: Final[Callable[[str], str]] = encode_basestring

DecodeLog = Callable[[Iterable[tuple[Any, ...]], "Blocks"], list[Change]]
FlattenLog = Callable[[Iterable[tuple[Any, ...]], Callable[[Iterable[str]], None]], None]
DecodeRows = Callable[[Iterable[tuple[Any, ...]]], list[Row]]


def real(value: float) -> Fragment:
    """A real with all its digits; the infinities as Debezium writes them."""
    if isinf(value):
        return b'"Infinity"' if value > 0 else b'"-Infinity"'
    return repr(value).encode()


def fragment(value: Any) -> Fragment:
    """Any value."""
    if value is None:
        return NULL
    if isinstance(value, int):
        return b"%d" % value
    if isinstance(value, str):
        return text_of(value).encode()
    if isinstance(value, float):
        return real(value)
    return b'"%b"' % b2a_base64(value, newline=False)


def lenient(text: bytes) -> str:
    """Text in which not all bytes are UTF-8."""
    return text.decode("utf-8", "replace")


def ts_us_of(day: Any) -> int:
    """The moment of a julian day, to the millisecond."""
    if not isinstance(day, float):
        return 0
    return round((day - EPOCH_DAY) * DAY_MS) * 1000


class Blocks:
    """Source blocks of one table."""

    def __init__(self, table: Table, server: str, database: str) -> None:
        begin = {"version": penstock.__version__, "connector": "sqlite", "name": server}
        self._begin = orjson.dumps(begin)[:-1]
        place = {"db": database, "sequence": None, "table": table.name}
        self._end = orjson.dumps(place)[1:]
        # A block of a change is these, with its moment in milliseconds between each two.
        self.pieces = (
            self._begin + b',"ts_ms":',
            b',"ts_us":',
            b'000,"ts_ns":',
            b'000000,"snapshot":"false",' + self._end,
        )

    def at(self, ts_us: int, snapshot: str = "false") -> bytes:
        return b'%b,"ts_ms":%d,"ts_us":%d,"ts_ns":%d000,"snapshot":"%b",%b' % (
            *(self._begin, ts_us // 1000, ts_us, ts_us),
            *(snapshot.encode(), self._end),
        )


# How values are written in generated code: as bytes, or as text that is made bytes later.
_AS_BYTES: Final = ("s({v}).encode()", "p({v}).encode()", "b'%d' % {v}", "z", "g({v})")
_AS_TEXT: Final = ("s({v})", "p({v})", "f'{{{v}}}'", "'null'", "g({v}).decode()")


def _expression(name: str, declared: str, forms: tuple[str, ...]) -> str:
    """Code for one value: the kind that the column is made for first, then null, then any."""
    kind = affinity(declared)
    text, number, whole, null, other = (form.format(v=name) for form in forms)
    as_text = f"{text} if {name}.__class__ is str"
    as_real = f"{number} if {name}.__class__ is float and -m <= {name} <= m"
    as_whole = f"{whole} if {name}.__class__ is int"
    if kind == TEXT:
        quick = as_text
    elif kind == REAL:
        quick = as_real
    elif kind not in (NUMERIC, BLOB) or "BLOB" in declared.upper():
        quick = as_whole
    elif column_type(declared).name == "string":
        # Times, which are texts as a rule.
        quick = f"{as_text} else {as_whole} else {as_real}"
    else:
        # Decimals are reals here unless they are whole.
        quick = f"{as_real} else {as_whole} else {as_text}"
    return f"({quick} else {null} if {name} is None else {other})"


def _tuple(names: list[str], definition: Definition, forms: tuple[str, ...] = _AS_BYTES) -> str:
    parts = [
        _expression(name, declared, forms)
        for name, (_, declared, _) in zip(names, definition.columns, strict=True)
    ]
    return f"({', '.join(parts)},)"


def _compiled(source: str, extra: dict[str, Any]) -> Any:
    scope: dict[str, Any] = {
        "s": text_of,
        "p": repr,
        "m": float_info.max,
        "z": NULL,
        "g": fragment,
        **extra,
    }
    exec(compile(source, "<penstock sqlite decoder>", "exec"), scope)
    return scope["decode"]


def rows_decoder(definition: Definition) -> DecodeRows:
    """Code that makes rows of the table out of what a SELECT of its columns gives."""
    names = [f"v{at}" for at in range(len(definition.columns))]
    made: DecodeRows = _compiled(
        f"def decode(rows):\n"
        f"    return [{_tuple(names, definition)} for {', '.join(names)}, in rows]\n",
        {},
    )
    return made


def log_decoder(definition: Definition, table: Table) -> DecodeLog:
    """Code that makes changes out of rows of the changelog: seq, op, at, old and new values."""
    count = len(definition.columns)
    old, new = [f"o{at}" for at in range(count)], [f"n{at}" for at in range(count)]
    before, after = _tuple(old, definition), _tuple(new, definition)
    source = f"""
def decode(rows, blocks):
    made = []
    add = made.append
    last = block = None
    us = 0
    for _, op, at, {", ".join(old + new)} in rows:
        if at != last or block is None:
            last = at
            us = moment(at)
            block = blocks.at(us)
        if op == {OP_INSERT}:
            add(build(Change, (table, {CREATE!r}, None, {after}, block, us)))
        elif op == {OP_UPDATE}:
            add(build(Change, (table, {UPDATE!r}, {before}, {after}, block, us)))
        elif op == {OP_DELETE}:
            add(build(Change, (table, {DELETE!r}, {before}, None, block, us)))
        else:
            add(build(Change, (table, {UPDATE!r}, None, {after}, block, us)))
    return made
"""
    made: DecodeLog = _compiled(
        source, {"Change": Change, "build": tuple.__new__, "table": table, "moment": ts_us_of}
    )
    return made


def log_flattener(definition: Definition) -> FlattenLog:
    """Code that makes the fragments of rows of the changelog, as text, row by row: those of what
    was and then those of what is, as far as the operation has them."""
    count = len(definition.columns)
    old, new = [f"o{at}" for at in range(count)], [f"n{at}" for at in range(count)]
    before, after = _tuple(old, definition, _AS_TEXT), _tuple(new, definition, _AS_TEXT)
    made: FlattenLog = _compiled(
        f"""
def decode(rows, add):
    for _, op, _, {", ".join(old + new)} in rows:
        if op == {OP_UPDATE}:
            add({before[:-1]} {after[1:]})
        elif op == {OP_DELETE}:
            add({before})
        else:
            add({after})
""",
        {},
    )
    return made
