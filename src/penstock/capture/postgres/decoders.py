"""Row decoders, generated for each relation: the bytes of a row to a tuple of JSON fragments.

For each column stands a line or two of code that knows its type, so nothing is looked up for a
value. A relation has three decoders from one set of codings: `row` for the last tuple of a message
of the stream, `first` for a tuple that another follows (the old row of an UPDATE), and `line` for a
row of COPY's text format.

What is known of a table beyond its Relation message (NOT NULL, the labels of an enum) comes from
the catalog and may be older or newer than the stream. Where a value shows that it does not hold,
the decoder raises `StaleError`, and the relation is made anew with what the value says.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from struct import Struct
from struct import error as StructError  # noqa: N812
from typing import Any, Final, NoReturn

from penstock.capture.postgres import values
from penstock.capture.postgres.pgoutput import PAD, MalformedError
from penstock.capture.postgres.rows import row_blocks
from penstock.capture.postgres.types import Coding
from penstock.capture.source import NULL, UNAVAILABLE, Row, Table

_KIND_AND_LENGTH: Final = Struct(">BI")
_ESCAPES: Final = {b"b": b"\b", b"f": b"\f", b"n": b"\n", b"r": b"\r", b"t": b"\t", b"v": b"\v"}
_ESCAPE: Final = re.compile(rb"\\(.)", re.DOTALL)


class StaleError(Exception):
    """A value shows that a column is not as the catalog said: NULL, or of an unknown label."""

    def __init__(self, column: int, label: bytes | None = None) -> None:
        super().__init__(column, label)
        self.column = column
        self.label = label


def unescape(value: bytes) -> bytes:
    """COPY's text of a value without its backslashes."""
    return _ESCAPE.sub(lambda found: _ESCAPES.get(found[1], found[1]), value)


class Relation:
    """A table as it is at one place of the stream, with the code that reads its rows."""

    __slots__ = (
        "_first",
        "_line",
        "_row",
        "blocks",
        "codings",
        "head",
        "identity",
        "key_columns",
        "oid",
        "stamp",
        "table",
        "tail",
    )

    def __init__(self, oid: int, table: Table, codings: Sequence[Coding], identity: str) -> None:
        self.oid = oid
        self.table = table
        self.codings = tuple(codings)
        # d default, f full, i index, n nothing
        self.identity = identity
        names = [column.name for column in table.columns]
        self.key_columns = tuple(names.index(name) for name in table.key)
        # The source block of the present transaction, put together by whoever reads the stream.
        self.stamp: object = None
        self.head = b""
        self.tail = b""
        self._row, self._first, self._line = _generate(table, self.codings)
        # For many rows at once; None where a column does not allow that.
        self.blocks = row_blocks(table, self.codings, self.key_columns)

    def row(self, frame: bytes, at: int) -> Row:
        """The tuple from here to the end of the frame."""
        try:
            return self._row(frame, at)
        except (StructError, IndexError, ValueError) as error:
            raise self._malformed() from error

    def first(self, frame: bytes, at: int) -> tuple[Row, int]:
        """The tuple from here, and where it ends; any column may be NULL in it."""
        try:
            return self._first(frame, at)
        except (StructError, IndexError, ValueError) as error:
            raise self._malformed() from error

    def line(self, line: bytes) -> Row:
        """A row of COPY, without its newline."""
        try:
            return self._line(line)
        except (IndexError, ValueError) as error:
            raise self._malformed() from error

    def key_text(self, line: bytes, columns: Sequence[int]) -> list[str]:
        """The text of key columns in a row of COPY."""
        parts = line.split(b"\t")
        return [unescape(parts[column]).decode(errors="replace") for column in columns]

    def key_of(self, row: Row) -> Row:
        return tuple(row[column] for column in self.key_columns)

    def _malformed(self) -> MalformedError:
        return MalformedError(f"a row of {self.table.full_name} does not fit its columns")


def _stale(column: int) -> NoReturn:
    raise StaleError(column)


def _wrong(kind: int) -> NoReturn:
    raise MalformedError(f"a value of the unknown kind {kind} in the replication stream")


def _wrong_length() -> NoReturn:
    raise MalformedError("a row of the replication stream has another length than it says")


Decoders = tuple[
    Callable[[bytes, int], Row],
    Callable[[bytes, int], tuple[Row, int]],
    Callable[[bytes], Row],
]


def _generate(table: Table, codings: Sequence[Coding]) -> Decoders:
    names: dict[str, Any] = {
        "unpack": _KIND_AND_LENGTH.unpack_from,
        "NULL": NULL,
        "UNAVAILABLE": UNAVAILABLE,
        "TRUE": b"true",
        "FALSE": b"false",
        "BACKSLASH": b"\\",
        "COPY_NULL": b"\\N",
        "unescape": unescape,
        "text": values.text,
        "floating": values.floating,
        "stale": _stale,
        "wrong": _wrong,
        "wrong_length": _wrong_length,
        "StaleError": StaleError,
    }
    expressions: list[str] = []
    for index, coding in enumerate(codings):
        if coding.labels is not None:
            names[f"labels{index}"] = _Labels(index, coding.labels)
            expressions.append(f"labels{index}[{{v}}]")
        elif coding.inline:
            expressions.append(coding.inline)
        else:
            names[f"convert{index}"] = coding.convert
            expressions.append(f"convert{index}({{v}})")
    required = [not column.optional for column in table.columns]
    source = "\n".join(
        (
            *_tuple_code("row", expressions, required, last=True),
            *_tuple_code("first", expressions, [False] * len(required), last=False),
            *_line_code(expressions, required),
        )
    )
    exec(compile(source, f"<rows of {table.full_name}>", "exec"), names)
    return names["row"], names["first"], names["line"]


class _Labels(dict[bytes, bytes]):
    """The labels of an enum as JSON; a label that is not there means that the type has grown."""

    def __init__(self, column: int, labels: Any) -> None:
        super().__init__(labels)
        self._column = column

    def __missing__(self, label: bytes) -> bytes:
        raise StaleError(self._column, label)


def _tuple_code(
    name: str,
    expressions: Sequence[str],
    required: Sequence[bool],
    *,
    last: bool,
) -> list[str]:
    """A decoder of a tuple: the number of columns, then each with its kind."""
    high, low = divmod(len(expressions), 256)
    code = [
        f"def {name}(d, p):",
        f"    if d[p] != {high} or d[p + 1] != {low}: wrong_length()",
        "    p += 2",
    ]
    for index, expression in enumerate(expressions):
        null = f"stale({index})" if required[index] else "NULL"
        code += [
            "    k, n = unpack(d, p)",
            "    if k == 116:",
            "        q = p + 5",
            "        p = q + n",
            "        v = d[q:p]",
            f"        c{index} = {expression.format(v='v')}",
            "    elif k == 110:",
            f"        c{index} = {null}",
            "        p += 1",
            "    elif k == 117:",
            f"        c{index} = UNAVAILABLE",
            "        p += 1",
            "    else:",
            "        wrong(k)",
        ]
    row = "(" + "".join(f"c{index}, " for index in range(len(expressions))) + ")"
    if last:
        code += [f"    if p != len(d) - {len(PAD)}: wrong_length()", f"    return {row}"]
    else:
        code += [f"    if p > len(d) - {len(PAD)}: wrong_length()", f"    return {row}, p"]
    return code


def _line_code(expressions: Sequence[str], required: Sequence[bool]) -> list[str]:
    """A decoder of a line of COPY: without a backslash in it nothing is NULL or escaped."""
    if not expressions:
        return ["def line(s):", "    return ()"]
    targets = "".join(f"c{index}, " for index in range(len(expressions)))
    plain = "".join(
        f"{expression.format(v=f'c{index}')}, " for index, expression in enumerate(expressions)
    )
    code = [
        "def line(s):",
        f"    {targets}= s.split(b'\\t')",
        "    if BACKSLASH not in s:",
        f"        return ({plain})",
    ]
    for index, expression in enumerate(expressions):
        code += [
            f"    if c{index} == COPY_NULL:",
            f"        c{index} = {f'stale({index})' if required[index] else 'NULL'}",
            "    else:",
            f"        v = unescape(c{index}) if BACKSLASH in c{index} else c{index}",
            f"        c{index} = {expression.format(v='v')}",
        ]
    code.append(f"    return ({targets})")
    return code
