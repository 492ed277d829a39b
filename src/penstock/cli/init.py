"""`penstock init`: the files of a new project."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli import examples, output


class Example(StrEnum):
    """What the project is to begin with."""

    EMPTY = "empty"
    SHOP = "shop"


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where; made if it is not there.")
    ] = Path(),
    example: Annotated[
        Example, typer.Option("--example", "-e", help="What to begin with.")
    ] = Example.EMPTY,
) -> None:
    """Make a project: penstock.toml, flows.py, and for the shop its load, shop.py.

    Files that are there already are never overwritten.

    \b
    Examples:
      penstock init
      penstock init shop --example shop
    """
    for file in examples.write(example.value, folder):
        output.say(f"made {file}")
    inside = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    if example is Example.SHOP:
        steps = [
            ("penstock up", "the log, and the capture of the shop's database, once it is there"),
            ("python shop.py", "the shop: its tables, its topics, its customers"),
            ("penstock run flows.py", "the flows, and what is derived"),
            ("penstock sinks list", "how far the derived systems have come"),
        ]
    else:
        steps = [
            ("penstock up", "the log"),
            ("echo hello | penstock produce texts", "something to work on"),
            ("penstock run flows.py", "the flows, and what is derived"),
            ("penstock consume lengths", "the result; derived.db has it as a table"),
        ]
    output.say("\nnext, each in a terminal of its own:")
    width = max(len(command) for command, _ in steps) + len(inside)
    for command, what in steps:
        output.say(f"  {(inside + command).ljust(width)}   # {what}")
