"""How commands speak: results on stdout, everything else on stderr, errors in one place.

Rich is imported only for tables and bars. What a program reads (`--json`) is written plainly,
and a reader that stops listening (`| head`) ends the command without a complaint.
"""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130


def say(text: str) -> None:
    """A line for the person at the terminal, never part of the result."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    say(f"{_paint('warning:', '33')} {text}")


def fail(error: PenstockError) -> None:
    """An expected error: what happened and what to do."""
    say(f"{_paint('error:', '1;31')} {error}")
    if error.advice:
        say(f"       {error.advice}")


def _paint(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if is_colourful(sys.stderr) else text


def is_colourful(stream: Any) -> bool:
    """Whether to use colours there: a terminal, and nobody asked for none."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR")


def write_json(value: object) -> None:
    """One JSON value on a line of its own."""
    import orjson

    sys.stdout.buffer.write(orjson.dumps(value) + b"\n")


def flush() -> None:
    sys.stdout.flush()


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> None:
    """A table; columns whose name begins with `>` are numbers and stand to the right."""
    print_rich(table(columns, rows, title=title))


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, title: str = "") -> Table:
    """The same as something that rich can print."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", show_edge=False)
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.removeprefix(">"), justify="right" if right else "left",
                         overflow="fold")  # fmt: skip
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def print_rich(renderable: RenderableType) -> None:
    from rich.console import Console

    # In a file or a pipe a table is as wide as it needs to be.
    width = None if sys.stdout.isatty() else 250
    Console(width=width, highlight=False, soft_wrap=False).print(renderable)


def json_bytes(data: bytes | None) -> str | dict[str, str] | None:
    """Bytes in JSON: text where they are UTF-8, otherwise `{"base64": ...}`."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def text_bytes(data: bytes | None) -> str:
    """Bytes for people: text, with what cannot be shown as `\\xff`."""
    if data is None:
        return "null"
    text = data.decode(errors="backslashreplace")
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def count(number: int, noun: str) -> str:
    """`1 record`, `2 records`, `3 batches`."""
    if number == 1:
        return f"1 {noun}"
    return f"{number:,} {noun}{'es' if noun.endswith('ch') else 's'}"


def silence_stdout() -> None:
    """Whoever read our output has gone: let the interpreter end without a complaint."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)
