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

from penstock.errors import PenstockError, SeveralMistakesError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_INTERRUPTED: Final = 130
# Of a file; whoever has mended so many looks again.
MOST_MISTAKES: Final = 10
_PIPE_WIDTH: Final = 250
# What is kept whole in narrow tables, if that is possible: words up to so long, and numbers with
# what belongs to them. Else the next.
_KEPT_WHOLE: Final = ((14, True), (8, True), (8, False), (1, False))


def say(text: str) -> None:
    """A line for the person at the terminal, never part of the result."""
    print(text, file=sys.stderr, flush=True)


def warn(text: str) -> None:
    say(f"{_paint('warning:', '33')} {text}")


def fail(error: PenstockError) -> None:
    """An expected error: what happened and what to do; several, one after the other."""
    if isinstance(error, SeveralMistakesError):
        for each in error.each[:MOST_MISTAKES]:
            fail(each)
        if len(error.each) > MOST_MISTAKES:
            say(f"       and {len(error.each) - MOST_MISTAKES} more")
        return
    say(f"{_paint('error:', '1;31')} {error}")
    # Some put their remedy into their text.
    if error.advice and error.advice not in str(error):
        say(f"       {error.advice}")


def _paint(text: str, code: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if is_colourful(sys.stderr) else text


def confirm(question: str) -> bool:
    """Ask at the terminal. Ctrl-C there is what it is everywhere; where nobody can answer, a script
    must not believe that it was done."""
    import typer

    from penstock.errors import ConfigError

    try:
        return typer.confirm(question, err=True)
    except typer.Abort as ended:
        say("")
        if isinstance(ended.__context__, EOFError):
            raise ConfigError(
                "nobody has answered, so nothing was changed", advice="--yes answers beforehand."
            ) from None
        raise KeyboardInterrupt from None


def is_colourful(stream: Any) -> bool:
    """Whether to use colours there: a terminal, and nobody asked for none."""
    return bool(stream.isatty()) and not os.environ.get("NO_COLOR")


def write_json(value: object) -> None:
    """One JSON value on a line of its own."""
    import orjson

    sys.stdout.buffer.write(orjson.dumps(value) + b"\n")


def flush() -> None:
    sys.stdout.flush()


def alarm(text: str) -> Text:
    """A cell of a table that somebody should look at."""
    from rich.text import Text

    return Text(text, style="bold red")


def print_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, title: str = ""
) -> None:
    """A table; columns whose name begins with `>` are numbers and stand to the right."""
    print_rich(table(columns, rows, title=title))


def table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], *, title: str = ""
) -> Table:
    """The same as something that rich can print."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    names = [name.removeprefix(">") for name in columns]
    right = [name.startswith(">") for name in columns]
    cells = [tuple(row) for row in rows]
    widths = column_widths(names, [[str(cell) for cell in row] for row in cells], right, _width())
    # Closer together where there is little room.
    padding = (0, 1) if widths is None else (0, 1, 0, 0)
    table = Table(box=SIMPLE_HEAD, title=title or None, title_justify="left", show_edge=False,
                  padding=padding)  # fmt: skip
    for at, name in enumerate(names):
        table.add_column(name, justify="right" if right[at] else "left", overflow="fold",
                         width=None if widths is None else widths[at])  # fmt: skip
    for row in cells:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def column_widths(
    names: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[bool], room: int
) -> list[int] | None:
    """How wide columns are where not all fit side by side; None if they do, or never will.

    The widest give way first, but none so much that a word of its name breaks, nor, where there is
    room for it, numbers and words that are not very long.
    """
    from rich.cells import cell_len

    columns = [[row[at] for row in rows] for at in range(len(names))]
    widths = [
        max(map(cell_len, (name, *column))) for name, column in zip(names, columns, strict=True)
    ]
    # Two columns are three apart, or two if need be; the last has its margin too.
    if sum(widths) + 3 * len(widths) - 1 <= room:
        return None
    room -= 2 * len(widths) - 1
    for most, numbers_whole in _KEPT_WHOLE:
        least = [
            max(
                _longest_word([names[at]]),
                max(map(cell_len, columns[at]), default=1)
                if right[at] and numbers_whole
                else min(_longest_word(columns[at]), most),
            )
            for at in range(len(names))
        ]
        if sum(least) <= room:
            break
    else:
        return None
    while sum(widths) > room:
        wider = (at for at in range(len(widths)) if widths[at] > least[at])
        widths[max(wider, key=widths.__getitem__)] -= 1
    return widths


def _longest_word(texts: Iterable[str]) -> int:
    from rich.cells import cell_len

    return max((cell_len(word) for text in texts for word in text.split()), default=1)


def _width() -> int:
    """How wide a table may be: in a file or a pipe, as wide as it needs to be."""
    from rich.console import Console

    return Console().width if sys.stdout.isatty() else _PIPE_WIDTH


def print_rich(renderable: RenderableType) -> None:
    from rich.console import Console

    Console(width=_width(), highlight=False, soft_wrap=False).print(renderable)


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
