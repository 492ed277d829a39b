"""`penstock verify`: whether a derived store holds what its source holds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import output, project
from penstock.cli.kafka import BOOTSTRAP_VARIABLE, AsJson, ClientSettings, bootstrap_of, connect
from penstock.cli.project import ProjectFile
from penstock.cli.run import need_spark, seconds
from penstock.cli.values import parse_pairs
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.cli.verifying import Difference, Progress, Report

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A captured table, CAPTURE.TABLE, or topic:NAME for the table that a topic tells.",
    ),
]
SinkName = Annotated[
    str, typer.Argument(metavar="SINK", help="A sink of the project file, or a store's URL.")
]
Timeout = Annotated[
    str,
    typer.Option(
        "--timeout", "-t", metavar="DURATION", help="How long it may take, such as 30s or 2h."
    ),
]
Limit = Annotated[
    int,
    typer.Option(
        "--limit", "-l", min=1, max=100_000, metavar="N", help="How many differences are shown."
    ),
]
# As `Bootstrap`, but looked up by the command itself: what goes wrong thereby has its own status.
Broker = Annotated[
    str | None,
    typer.Option(
        "--bootstrap", "-b", envvar=BOOTSTRAP_VARIABLE, metavar="HOST:PORT,...",
        help="Broker to connect to; else bootstrap in [broker] of penstock.toml.",
    ),
]  # fmt: skip
_PHASES = {
    "source": "reading the source",
    "log": "waiting for the log and the store",
    "sink": "reading the store",
    "changes": "reading what has changed meanwhile",
}


def verify(
    source: Source,
    sink: SinkName,
    timeout: Timeout = "10m",
    limit: Limit = 100,
    bootstrap: Broker = None,
    file: ProjectFile = None,
    json: AsJson = False,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Compare a table with a store that is derived from it, row by row, while both change.

    Rows are compared as the store would have them, after the store has reached what the log held
    when the source was read; keys that change meanwhile are looked at again. Nothing is written.

    The status is 0 if they are equal, 1 if they differ, 2 if they could not be compared.

    \b
    Examples:
      penstock verify shop.orders orders
      penstock verify shop.public.orders 'sqlite:///shop.db?table=orders' --json
      penstock verify topic:revenue revenue --timeout 60s
    """
    try:
        report = _compared(source, sink, timeout, limit, bootstrap, file, client)
    except PenstockError as error:
        output.fail(error)
        raise typer.Exit(output.EXIT_USAGE) from None
    if json:
        output.write_json(report.as_dict())
    else:
        _show(report)
    if not report.equal:
        raise typer.Exit(output.EXIT_FAILURE)


def _compared(
    source: str, sink: str, timeout: str, limit: int, bootstrap: str | None, file: Path | None,
    client: list[str],
) -> Report:  # fmt: skip
    need_spark("comparisons")
    timeout_s = seconds(timeout, "--timeout")
    found = project.load(file)
    at = bootstrap_of(bootstrap, found)
    connect(at, client)
    from penstock.cli.verifying import verify as compare
    from penstock.client.connection import Cluster
    from penstock.client.security import Security

    security = Security.from_options(parse_pairs(client))
    with Cluster(at, client_id="penstock-verify", security=security) as cluster:
        telling = _Line()
        try:
            return compare(found, source, sink, timeout_s=timeout_s, on_progress=telling.show,
                           cluster=cluster, max_shown=limit)  # fmt: skip
        finally:
            telling.end()


class _Line:
    """Progress on the last line of a terminal; elsewhere a line for each phase."""

    def __init__(self) -> None:
        self._live = sys.stderr.isatty()
        self._last = ("", 0)

    def show(self, told: Progress) -> None:
        text = _PHASES[told.phase]
        if told.round > 1:
            text = f"look {told.round}: {text}"
        if told.rows:
            text += f": {told.rows:,} rows, {told.rows_per_s:,.0f}/s"
        if told.share is not None and told.rows:
            text += f", {told.share:.0%}"
        if self._live:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif (told.phase, told.round) != self._last:
            output.say(text)
        self._last = (told.phase, told.round)

    def end(self) -> None:
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _show(report: Report) -> None:
    if report.differences:
        output.print_table(
            ("key", "difference", "in the source", "in the store"),
            [row for each in report.differences for row in _rows(each)],
        )
    more = report.count - len(report.differences)
    if more > 0:
        output.say(f"... and {output.count(more, 'key')} more; --limit shows more of them")
    found = "equal" if report.equal else f"DIFFERENT: {output.count(report.count, 'key')}"
    output.say(
        f"{report.source} and {report.sink}: {found}; {output.count(report.rows, 'row')} in "
        f"{report.seconds:.1f} s, at {report.position}"
    )


def _rows(each: Difference) -> list[tuple[str, str, str, str]]:
    key = ", ".join(str(value) for value in each.key.values())
    if not each.columns:
        said = {"missing": ("there", "missing"), "extra": ("missing", "there")}
        source, sink = said.get(each.kind, ("", each.reason))
        return [(key, each.kind, source, sink)]
    return [
        (key, f"{each.kind} {name}", _shown(source), _shown(sink))
        for name, (source, sink) in each.columns.items()
    ]


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
