"""`penstock view`: views over changing tables, kept in the project as files of SQL."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli import output, project, view_rows
from penstock.cli.kafka import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, ClientSettings, connect
from penstock.cli.project import ProjectFile
from penstock.cli.run import DEFAULT_DATA, Data, need_spark, quieten_spark
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from rich.text import Text

    from penstock.spark.views.definitions import Definition, TableSpec

app = typer.Typer(
    no_args_is_help=True,
    help="Views over changing tables, from SQL; `penstock run --views` keeps them up to date.",
    epilog="A view is a topic that follows its tables: at any time what the SELECT would give, as "
    "the last record of each key. What cannot be kept up to date by changes is refused.",
)

app.command("rows")(view_rows.rows)

Statement = Annotated[
    list[str],
    typer.Argument(metavar="STATEMENT", help="NAME AS SELECT ..., as one word in quotes."),
]
Name = Annotated[str, typer.Argument(metavar="VIEW", help="The view.")]
Tables = Annotated[
    list[str],
    typer.Option(
        "--table",
        "-t",
        metavar="SPEC",
        help="A table: 'orders=shop.public.orders(id bigint, amount double) key id', with "
        "'changelog' at the end if the topic holds rows and not change events. What is left out is "
        "read from the topic. May be repeated.",
    ),
]


@app.command("create")
def create(
    statement: Statement,
    tables: Tables = [],  # noqa: B006
    topic: Annotated[
        str | None, typer.Option("--topic", metavar="TOPIC", help="Its topic; else VIEW.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--replace", help="Write over a view of the same name.")
    ] = False,
    file: ProjectFile = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Check a view and write it into the project, as views/NAME.sql beside penstock.toml.

    A table of the SELECT is one that --table or [views.tables] of penstock.toml names, or else a
    topic of its name. Its columns and key are as given there, or as the topic's last records show
    them, which is told.

    \b
    Examples:
      penstock view create 'paid AS SELECT id, amount FROM orders WHERE paid' -t orders=shop.orders
      penstock view create 'n AS SELECT count(*) AS n FROM o' -t 'o=shop.orders(id bigint) key id'
    """
    made = _defined(" ".join(statement), tables, topic, file, bootstrap, client)
    from penstock.spark.views import definitions

    target = _folder(file) / definitions.FOLDER / f"{made.name}{definitions.SUFFIX}"
    if target.exists() and not overwrite:
        raise ConfigError(
            f"the project has a view {made.name!r} already: {target}",
            advice="Write over it with --replace, or give this one another name.",
        )
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(made.written(), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror or error}") from error
    output.say(f"{target} has the view {made.name}, by {', '.join(made.key)}")
    output.say("run it: penstock run --views")


@app.command("check")
def check(
    statement: Statement,
    tables: Tables = [],  # noqa: B006
    file: ProjectFile = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Say whether a view can be kept up to date, by which key, and in which stages.

    \b
    Examples:
      penstock view check 'n AS SELECT count(*) AS n FROM orders' -t orders=shop.public.orders
    """
    _show(_defined(" ".join(statement), tables, None, file, bootstrap, client))


@app.command("list")
def list_command(file: ProjectFile = None, data: Data = DEFAULT_DATA, json: AsJson = False) -> None:
    """List the views of the project, and how many rows of each cannot be computed.

    \b
    Examples:
      penstock view list
    """
    need_spark("views")
    from penstock.spark.views import definitions

    found = [definitions.read(each) for each in definitions.files(_folder(file))]
    counts = {each.name: _count_set_aside(each.name, data) for each in found}
    if json:
        output.write_json([_as_json(each, counts[each.name]) for each in found])
        return
    if not found:
        output.say("the project has no views; `penstock view create` makes one")
        return
    rows = (
        (e.name, e.topic, ", ".join(t.name for t in e.tables), ", ".join(e.key),
         _counted(counts[e.name]))
        for e in found
    )  # fmt: skip
    output.print_table(("view", "topic", "tables", "key", ">set aside"), rows)
    if any(counts.values()):
        output.say("rows that cannot be computed are set aside: `penstock view aside VIEW` shows "
                   "them")  # fmt: skip


@app.command("describe")
def describe(
    name: Name, file: ProjectFile = None, data: Data = DEFAULT_DATA, json: AsJson = False
) -> None:
    """Show a view: its SQL, its tables, its key, its stages, and what is set aside.

    \b
    Examples:
      penstock view describe revenue
    """
    found = found_view(name, file)
    count = _count_set_aside(name, data)
    if json:
        output.write_json(_as_json(found, count))
        return
    _show(found, count)
    if count:
        output.say(f"`penstock view aside {name}` shows what is set aside")


@app.command("aside")
def aside(
    name: Name,
    limit: Annotated[
        int, typer.Option("--limit", min=1, metavar="N", help="The most rows to show.")
    ] = 100,
    data: Data = DEFAULT_DATA,
    json: AsJson = False,
) -> None:
    """Show the rows of a view that cannot be computed: key, place in the log, reason.

    Such a row is left out of the view, and comes back with the change that mends it. What is shown
    is what the last micro-batch has left; the view may run meanwhile.

    \b
    Examples:
      penstock view aside revenue
    """
    rows = _set_aside(name, data)
    shown = rows[:limit]
    if json:
        output.write_json({"view": name, "set_aside": len(rows), "rows": shown})
        return
    if not rows:
        output.say(f"no row of {name} is set aside")
        return
    output.print_table(
        ("key", "place", "reason"),
        ((each["key"], each["place"] or "-", each["reason"]) for each in shown),
    )
    more = f", of which {limit:,} are shown; --limit shows more" if len(rows) > limit else ""
    counted = "1 row" if len(rows) == 1 else f"{len(rows):,} rows"
    output.say(f"{counted} of {name} cannot be computed{more}")


@app.command("drop")
def drop(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    file: ProjectFile = None,
) -> None:
    """Take a view out of the project. Its topic stays, and is not kept up to date any more.

    \b
    Examples:
      penstock view drop revenue --yes
    """
    found = found_view(name, file)
    from penstock.spark.views import definitions

    if not yes and not output.confirm(f"take the view {name} out of the project?"):
        output.say("nothing was changed; --yes does it without asking")
        raise typer.Exit(output.EXIT_FAILURE)
    (_folder(file) / definitions.FOLDER / f"{name}{definitions.SUFFIX}").unlink()
    output.say(f"the view {name} is gone; its topic {found.topic} stays: "
               f"`penstock topics delete {found.topic}` deletes it")  # fmt: skip


# ---- parts --------------------------------------------------------------------------------


def _set_aside(name: str, data: Path) -> list[dict[str, str]]:
    """The rows of a view that cannot be computed; UnknownFlowError if it has never run there."""
    need_spark()
    from penstock.spark.flows.folder import Folder
    from penstock.spark.state import inspecting, layout
    from penstock.spark.views.set_aside import AT, FAILED, ROW

    folder = Folder(data)
    record = folder.record(name)
    found = layout.find(folder.checkpoint(name, record.generation))
    rows = [
        {"key": row[ROW] or "", "place": row[AT] or "", "reason": row[FAILED]}
        for kept in (inspecting.set_aside(found) if found is not None else ())
        for row in kept.rows.select([ROW, AT, FAILED]).to_pylist()
    ]
    return sorted(rows, key=lambda row: (row["key"], row["reason"]))


def _count_set_aside(name: str, data: Path) -> int | None:
    """How many these are; None if the view has never run there."""
    from penstock.spark.flows.folder import Folder

    return len(_set_aside(name, data)) if Folder(data).find(name) is not None else None


def _counted(count: int | None) -> str | Text:
    if count is None:
        return "-"
    return output.alarm(f"{count:,}") if count else "0"


def _folder(file: Path | None) -> Path:
    path = file or project.find()
    return path.resolve().parent if path is not None else Path.cwd()


def found_view(name: str, file: Path | None) -> Definition:
    need_spark("views")
    from penstock.spark.views import definitions

    there = {each.stem: each for each in definitions.files(_folder(file))}
    if name not in there:
        raise ConfigError(
            f"the project has no view {name!r}",
            advice=f"It has {', '.join(there) or 'none'}; `penstock view create` makes one.",
        )
    return definitions.read(there[name])


def _defined(
    statement: str,
    given: list[str],
    topic: str | None,
    file: Path | None,
    bootstrap: str,
    client: list[str],
) -> Definition:
    """The view that a statement defines, with all that is known of its tables."""
    need_spark("views")
    from penstock.spark.views import definitions

    name, text = definitions.statement(statement)
    known = {each.name: each for each in _known(given, file)}
    specs = definitions.used(text, known)
    if missing := [each for each in specs if not each.is_whole]:
        from penstock.cli.view_inferring import inferred

        connection = connect(bootstrap, client)
        found = {each.name: inferred(connection, each) for each in missing}
        for each in found.values():
            output.say(f"as its records show: {each}")
        specs = [found.get(each.name, each) for each in specs]
    made = definitions.Definition(name, text, tuple(specs), topic or name)
    # Plans it, and checks the names.
    made.flow()
    _check_types(made)
    return made


def _check_types(view: Definition) -> None:
    """ViewError if Spark does not take an expression; only Spark knows its functions and types."""
    from pyspark import SparkContext

    from penstock.spark import session
    from penstock.spark.java import JavaError, find_java

    try:
        find_java()
    except JavaError as error:
        output.say(f"the types are checked when the view runs, and not now: {error}")
        return
    output.say("asking Spark whether the types fit")
    quieten_spark()
    ours = SparkContext._active_spark_context is None
    spark = session("penstock view", "local[1]", **{"spark.ui.enabled": "false"})
    try:
        spark.sparkContext.setLogLevel("FATAL")
        view.check_types(spark)
    finally:
        if ours:
            spark.stop()


def _known(given: list[str], file: Path | None) -> list[TableSpec]:
    from penstock.spark.views.definitions import TableSpec

    listed = declared_tables(project.load(file))
    return [*listed, *(TableSpec.parse(each) for each in given)]


def declared_tables(found: project.Project) -> list[TableSpec]:
    """`[views.tables]` of the project; ConfigError, with the line, if one is no table."""
    from penstock.spark.views.definitions import TableSpec
    from penstock.spark.views.refusing import ViewError

    listed = []
    found.need("views")
    tables = found.section("views").get("tables", {})
    for name, text in tables.items() if isinstance(tables, Mapping) else ():
        path = f"views.tables.{name}"
        try:
            listed.append(TableSpec.parse(f"{name}={text}"))
        except ViewError as error:
            raise found.error(path, f"{path}: {error}", error.advice) from error
    return listed


def _show(view: Definition, set_aside: int | None = None) -> None:
    from penstock.spark.views.plan import explained

    lines = [
        ("view", view.name),
        ("topic", view.topic),
        ("key", ", ".join(view.key)),
        ("columns", ", ".join(view.columns)),
        ("tables", "\n".join(map(str, view.tables))),
        ("stages", "\n".join(explained(view.plan))),
        ("sql", _sql(view)),
        ("set aside", _counted(set_aside)),
    ]
    output.print_table(("", ""), lines)


def _sql(view: Definition) -> str:
    lines = view.text.sql.strip().splitlines()
    return "\n".join(each for each in lines if not each.startswith("-- "))


def _as_json(view: Definition, set_aside: int | None = None) -> dict[str, object]:
    return {
        "name": view.name,
        "topic": view.topic,
        "key": list(view.key),
        "columns": list(view.columns),
        "tables": [
            {"name": e.name, "topic": e.topic, "columns": e.ddl, "key": list(e.key)}
            for e in view.tables
        ],
        "sql": _sql(view),
        "set_aside": set_aside,
    }
