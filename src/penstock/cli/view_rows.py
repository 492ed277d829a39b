"""`penstock view rows`: what a view is now, row by row."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from penstock.cli import output
from penstock.cli.kafka import DEFAULT_BOOTSTRAP, Bootstrap, ClientSettings, connect
from penstock.cli.project import ProjectFile
from penstock.cli.run import DEFAULT_DATA, Data, need_spark
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.spark.views.current import Found

Format = Literal["table", "json", "csv"]
# What a table shows at most, if nobody says: it has to be whole before it can be printed.
TABLE_ROWS: Final = 100


def rows(
    name: Annotated[str, typer.Argument(metavar="VIEW", help="The view.")],
    key: Annotated[
        list[str],
        typer.Option(
            "--key",
            "-k",
            metavar="COLUMN=VALUE",
            help="The row with this key; of a key of several columns some may be given. May be "
            "repeated.",
        ),
    ] = [],  # noqa: B006
    where: Annotated[
        list[str],
        typer.Option(
            "--where",
            "-w",
            metavar="CONDITION",
            help="COLUMN = VALUE, with =, <>, <, <=, > or >=, or COLUMN IS [NOT] NULL. May be "
            "repeated: all must hold.",
        ),
    ] = [],  # noqa: B006
    limit: Annotated[
        int | None,
        typer.Option(
            "--limit", "-n", min=1, metavar="N", help="The most rows to show; of a table else 100."
        ),
    ] = None,
    form: Annotated[
        Format,
        typer.Option("--format", "-f", help="A table, a JSON object on each line, or CSV."),
    ] = "table",
    data: Data = DEFAULT_DATA,
    file: ProjectFile = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Show the rows of a view as they are now, all or some, from its topic.

    What is shown is one moment, and only what is committed. Rows come in no order. JSON and CSV are
    written as they are read, however many there are. Values are compared by the types that the view
    had when it last ran with --data; where it never ran, numbers as numbers and all else as text.

    \b
    Examples:
      penstock view rows revenue
      penstock view rows revenue --key country=DE
      penstock view rows revenue --where 'n = 5' --where 'total is not null' --format csv
    """
    need_spark("views")
    from penstock.cli.protocol import cluster
    from penstock.cli.view import found_view
    from penstock.spark.flows.folder import Folder
    from penstock.spark.views import current

    topic, columns = current.stored(found_view(name, file), Folder(data))
    by_key = dict(_pair(each, name) for each in key)
    connection = connect(bootstrap, client)

    most = TABLE_ROWS if limit is None else limit
    # Of a table one more, to know whether there are more.
    shown = most + 1 if form == "table" else limit
    with cluster(connection.bootstrap, connection.settings) as brokers:
        found = current.find(brokers, topic, columns=columns, key=by_key, where=where, limit=shown)
        if form == "json":
            _as_json(found)
        elif form == "csv":
            _as_csv(found, columns)
        else:
            _as_table(found, columns, most)


def _pair(text: str, name: str) -> tuple[str, str]:
    column, equals, value = text.partition("=")
    if not equals or not column.strip():
        raise ConfigError(
            f"--key {text}: this is not COLUMN=VALUE",
            advice=f"`penstock view describe {name}` shows the columns of the key.",
        )
    return column.strip(), value


def _as_json(found: Iterator[Found]) -> None:
    """As the topic has them: nothing is lost on the way."""
    for each in found:
        sys.stdout.buffer.write(each.value + b"\n")


def _as_csv(found: Iterator[Found], columns: Mapping[str, str] | None) -> None:
    names, found = _names(found, columns)
    writer = csv.writer(sys.stdout, lineterminator="\n")
    if names:
        writer.writerow(names)
    for each in found:
        writer.writerow(_texts(each.row, names, null=""))


def _as_table(found: Iterator[Found], columns: Mapping[str, str] | None, most: int) -> None:
    names, found = _names(found, columns)
    shown = list(islice(found, most))
    if not shown:
        output.say("no rows")
        return
    numbers = [
        any(isinstance(each.row.get(name), int | float | Decimal) for each in shown)
        for name in names
    ]
    heads = [f">{name}" if is_number else name
             for name, is_number in zip(names, numbers, strict=True)]  # fmt: skip
    output.print_table(heads, (_texts(each.row, names, null="-") for each in shown))
    if next(found, None) is not None:
        output.say(f"more than {most} rows; --limit shows more, --format json or csv all of them")


def _names(
    found: Iterator[Found], columns: Mapping[str, str] | None
) -> tuple[Sequence[str], Iterator[Found]]:
    """The columns that are shown: as they are known, else those of the first row."""
    if columns is not None:
        return [name for name in columns if not name.startswith("_")], found
    first = next(found, None)
    return (list(first.row), chain([first], found)) if first is not None else ([], found)


def _texts(row: Mapping[str, Any], names: Sequence[str], *, null: str) -> list[str]:
    return [_text(row.get(name), null) for name in names]


def _text(value: Any, null: str) -> str:
    if value is None:
        return null
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict | list):
        import json

        return json.dumps(value, default=str, ensure_ascii=False)
    return value.isoformat() if hasattr(value, "isoformat") else str(value)
