"""The `penstock` command: its parts put together, and errors turned into messages.

Status 0 is success, 1 a failure that is explained on stderr, 2 a wrong use of the command, 130
an interruption by Ctrl-C.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from penstock.cli import consume, log, output, produce, topics, up
from penstock.errors import PenstockError

app = typer.Typer(
    name="penstock",
    no_args_is_help=True,
    # Plain text: rich's own help takes longer to load than all the rest.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["--help", "-h"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from penstock import __version__

        print(f"penstock {__version__}")
        raise typer.Exit


@app.callback()
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
      penstock log verify penstock-data         # check the files, with the broker stopped
    """


app.command("up")(up.up)
app.add_typer(topics.app, name="topics")
app.command("produce")(produce.produce)
app.command("consume")(consume.consume)
app.add_typer(log.app, name="log")


def main() -> None:
    """The entry of the `penstock` script."""
    try:
        app(prog_name="penstock")
    except PenstockError as error:
        output.fail(error)
        sys.exit(output.EXIT_FAILURE)
    except KeyboardInterrupt:
        sys.exit(output.EXIT_INTERRUPTED)
