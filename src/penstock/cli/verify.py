"""`penstock verify`: whether a derived store holds what its source holds."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import output, project
from penstock.cli.kafka import BOOTSTRAP_VARIABLE, AsJson, ClientSettings, bootstrap_of, connect
from penstock.cli.project import ProjectFile
from penstock.cli.run import DEFAULT_DATA, Data, need_spark, seconds
from penstock.cli.values import parse_pairs
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.cli.verifying import Difference, Progress, Report

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A captured table, CAPTURE.TABLE; topic:NAME for the table that a topic tells; with "
        "--query the CAPTURE whose database is asked.",
    ),
]
SinkName = Annotated[
    str,
    typer.Argument(
        metavar="SINK",
        help="A sink of the project file, or a store's URL; with --query also topic:NAME.",
    ),
]
Query = Annotated[
    str | None,
    typer.Option(
        "--query", "-q", metavar="SQL",
        help="The SELECT whose rows the sink should have, with the sink's key among its columns.",
    ),
]  # fmt: skip
QueryFile = Annotated[
    Path | None,
    typer.Option(
        "--query-file", metavar="FILE", help="A file with that SELECT.",
    ),
]  # fmt: skip
FloatTolerance = Annotated[
    float | None,
    typer.Option(
        "--float-tolerance", metavar="FRACTION", min=0.0, max=1.0,
        help="With --query: floats that differ by no more than this part of the larger one are "
        "equal, such as 1e-9; otherwise floats are compared exactly.",
    ),
]  # fmt: skip
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
    query: Query = None,
    query_file: QueryFile = None,
    float_tolerance: FloatTolerance = None,
    timeout: Timeout = "10m",
    limit: Limit = 100,
    data: Data = DEFAULT_DATA,
    bootstrap: Broker = None,
    file: ProjectFile = None,
    json: AsJson = False,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Compare a table, or a query, with what is derived from it, row by row, while both change.

    Rows are compared as the store would have them, after the store has reached what the log held
    when the source was read; keys that change meanwhile are looked at again. Nothing is written.

    With --query the database of a capture is asked, read only, in its own SQL, and the answer is
    compared with what a view or another flow has made of the log: in a sink, or in its topic. The
    query's columns are named as the sink's, and have its key.

    The status is 0 if they are equal, 1 if they differ, 2 if they could not be compared.

    \b
    Examples:
      penstock verify shop.orders orders
      penstock verify shop.public.orders 'sqlite:///shop.db?table=orders' --json
      penstock verify topic:revenue revenue --timeout 60s
      penstock verify shop revenue -q 'SELECT country, count(*) AS orders FROM orders GROUP BY 1'
      penstock verify shop topic:revenue --query-file revenue.sql --float-tolerance 1e-9
    """
    try:
        sql = _sql(query, query_file, float_tolerance)
        report = _compared(
            source, sink, timeout, limit, data, bootstrap, file, client,
            query=sql, float_tolerance=float_tolerance or 0.0,
        )  # fmt: skip
    except PenstockError as error:
        output.fail(error)
        raise typer.Exit(output.EXIT_USAGE) from None
    if json:
        output.write_json(report.as_dict())
    else:
        _show(report)
    if not report.equal:
        raise typer.Exit(output.EXIT_FAILURE)


def _sql(query: str | None, file: Path | None, tolerance: float | None) -> str:
    """The query that is meant, "" if there is none."""
    if query is not None and file is not None:
        raise ConfigError("there are --query and --query-file", advice="Leave one of them out.")
    if query is None and file is None:
        if tolerance is not None:
            raise ConfigError(
                "--float-tolerance is for --query",
                advice="Rows of a table are the same in the store, to the last digit.",
            )
        return ""
    try:
        text = query if query is not None else Path(str(file)).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8: {error}") from error
    if not text.strip().rstrip(";"):
        raise ConfigError("the query is empty", advice="It is one SELECT statement.")
    return text


def _compared(
    source: str, sink: str, timeout: str, limit: int, data: Path, bootstrap: str | None,
    file: Path | None, client: list[str], **options: Any,
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
                           cluster=cluster, max_shown=limit, data=data, **options)  # fmt: skip
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
    if report.not_compared:
        output.say(
            f"not compared, for {report.source} does not have it: {', '.join(report.not_compared)}"
        )
    for each in report.dead_letters:
        if each.count:
            output.say(
                f"dead letters of {each.writer}: {each.count:,} in {each.topic}; {each.command}"
            )
    output.say(
        f"{report.source} and {report.sink}: {_verdict(report)} in {report.seconds:.1f} s, at "
        f"{report.position}"
    )


def _verdict(report: Report) -> str:
    if report.empty:
        return "both are empty, nothing was compared"
    found = "equal" if report.equal else f"DIFFERENT: {output.count(report.count, 'key')}"
    aside = f", {output.count(report.set_aside, 'key')} set aside" if report.set_aside else ""
    return f"{found}; {output.count(report.rows, 'row')} compared{aside}"


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
