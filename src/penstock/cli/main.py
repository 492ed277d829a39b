"""The `penstock` command: its parts put together, and errors turned into messages.

Status 0 is success, 1 a failure that is explained on stderr, 2 a wrong use of the command, 130
an interruption by Ctrl-C.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from typing import Annotated, Final

import typer

from penstock.cli import output
from penstock.errors import PenstockError

# The commands in the order of --help, each in the module of its name: one with commands below it
# has an `app` there, another is a function.
COMMANDS: Final = (
    "demo",
    "init",
    "up",
    "topics",
    "produce",
    "consume",
    "groups",
    "queue",
    "transactions",
    "quotas",
    "run",
    "flows",
    "sinks",
    "verify",
    "view",
    "capture",
    "doctor",
    "migrate",
    "log",
)
_COMPLETION: Final = "_PENSTOCK_COMPLETE"


def _show_version(wanted: bool) -> None:
    if wanted:
        from penstock import __version__

        print(f"penstock {__version__}")
        raise typer.Exit


def penstock(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """A durable, replayable log that speaks the Kafka protocol.

    `penstock up` starts a broker; any Kafka client can use it. The other commands work on it as
    on Apache Kafka. Each command explains itself with --help.

    \b
    The first steps:
      penstock up                               # start a broker, in one terminal
      echo hello | penstock produce greetings   # write a record, in another
      penstock consume greetings                # read it
      penstock topics describe greetings        # see where it is
      penstock groups list                      # see who reads
      penstock log verify penstock-data         # check the files, with the broker stopped
    """


def make_app(only: str | None = None) -> typer.Typer:
    """The whole command, or with just one of its parts: so that it starts without the others."""
    app = typer.Typer(
        name="penstock",
        no_args_is_help=True,
        epilog="The exit status is 0 if it is done, 1 if it failed (standard error says why, and "
        "what to do), 2 if the command was used wrongly, 130 after Ctrl-C. Durations are such as "
        "500ms, 30s, 10m, 2h30m or 7d.",
        # Plain text: rich's own help takes longer to load than all the rest.
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    app.callback()(penstock)
    for name in COMMANDS if only is None else (only,):
        module = import_module(f"penstock.cli.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name))
    return app


def _asked_for() -> str | None:
    """The part that this call is for; None if it takes all of them to tell."""
    first = sys.argv[1] if len(sys.argv) > 1 else ""
    return first if first in COMMANDS and _COMPLETION not in os.environ else None


def main() -> None:
    """The entry of the `penstock` script."""
    try:
        make_app(_asked_for())(prog_name="penstock")
    except PenstockError as error:
        output.fail(error)
        sys.exit(output.EXIT_FAILURE)
    except ModuleNotFoundError as error:
        # One that the command itself did not ask for beforehand.
        from penstock.extras import explain

        missing = explain(error)
        if missing is None:
            raise
        output.fail(missing)
        sys.exit(output.EXIT_FAILURE)
    except KeyboardInterrupt:
        sys.exit(output.EXIT_INTERRUPTED)
