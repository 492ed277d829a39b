"""`--watch`: a look again and again, until Ctrl-C, for people, files and programs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Final, NoReturn, TypeVar

import typer

from penstock.cli import output
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from rich.console import RenderableType

T = TypeVar("T")

PAUSE_S: Final = 1.0

Watch = Annotated[
    bool,
    typer.Option(
        "--watch",
        "-w",
        help="Show it again every second, until Ctrl-C: in place at a terminal, elsewhere one "
        "after the other; with --json a line each time.",
    ),
]


def watch(
    look: Callable[[], T],
    show: Callable[[T], RenderableType],
    value: Callable[[T], object],
    *,
    json: bool,
    pause_s: float = PAUSE_S,
) -> NoReturn:
    """Look, and show what there is, again and again. What cannot be asked at the first look is an
    error; what goes away later is waited for, and what was seen last is shown as such."""
    # A wrong name is an error; later what it names may well go and come back.
    seen = look()
    if json or not sys.stdout.isatty():
        try:
            _watch_plainly(look, seen, show, value, pause_s, json=json)
        except BrokenPipeError:
            # Whoever read has seen enough.
            output.silence_stdout()
            raise typer.Exit from None
    pause = threading.Event()
    from rich.console import Console
    from rich.console import Group as Stack
    from rich.live import Live
    from rich.text import Text

    with Live(console=Console(highlight=False), auto_refresh=False) as live:
        when = time.strftime("%H:%M:%S")
        note = Text(f"as of {when}", style="dim")
        while True:
            # Above, since what is too long for the terminal is cut off below.
            live.update(Stack(note, show(seen)), refresh=True)
            pause.wait(pause_s)
            try:
                seen, when = look(), time.strftime("%H:%M:%S")
                note = Text(f"as of {when}", style="dim")
            except PenstockError as error:
                note = Text(f"out of date, as of {when}: {error}; trying again", style="yellow")


def _watch_plainly(
    look: Callable[[], T],
    seen: T,
    show: Callable[[T], RenderableType],
    value: Callable[[T], object],
    pause_s: float,
    *,
    json: bool,
) -> NoReturn:
    """One look after the other, for a file or a program."""
    pause = threading.Event()
    told = ""
    while True:
        if not told:
            if json:
                output.write_json(value(seen))
            else:
                output.print_rich(show(seen))
            output.flush()
        pause.wait(pause_s)
        try:
            seen, told = look(), ""
        except PenstockError as error:
            if str(error) != told:
                told = str(error)
                output.warn(f"{told}; trying again")
