"""Rows of a result set into fragments, by code that is made for each table.

A row of the text protocol is one value behind the other, each with its length before it, or the
byte 251 for null. The SELECT asks for each column in the form whose text is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from penstock.capture.mysql import types
from penstock.capture.mysql.binlog import length_encoded
from penstock.capture.mysql.codegen import Names, text_recipe
from penstock.capture.mysql.types import Modes, Native
from penstock.capture.source import NULL, Row

# data, where the row begins -> the row
DecodeText = Callable[[bytes, int], Row]


def quoted(name: str) -> str:
    return "`" + name.replace("`", "``") + "`"


def selected(native: Native) -> str:
    """The expression that asks for a column."""
    name = quoted(native.name)
    if native.kind == types.FLOAT:
        # The text of a FLOAT has six digits; as a double it has all.
        return f"CAST({name} AS DOUBLE)"
    return name


def selected_mysql(native: Native) -> str:
    """As `selected`; CAST AS DOUBLE came to MySQL late."""
    name = quoted(native.name)
    return f"({name} + 0e0)" if native.kind == types.FLOAT else name


def row_decoder(columns: Sequence[Native], modes: Modes) -> DecodeText:
    """A function that reads one row of these columns."""
    names = Names({"NULL": NULL, "length": length_encoded})
    lines = ["def decode(d, p):"]
    for i, native in enumerate(columns):
        value = text_recipe(native, modes, names)
        lines += [
            "    n = d[p]",
            "    if n < 251:",
            "        p += 1",
            "        q = p + n",
            f"        v{i} = {value.format(x='d[p:q]')}",
            "        p = q",
            "    elif n == 251:",
            f"        v{i} = NULL",
            "        p += 1",
            "    else:",
            "        n, p = length(d, p)",
            "        q = p + n",
            f"        v{i} = {value.format(x='d[p:q]')}",
            "        p = q",
        ]
    lines.append("    return (" + "".join(f"v{i}, " for i in range(len(columns))) + ")")
    made: Callable[..., Any] = names.compile("\n".join(lines), "decode")
    return made
