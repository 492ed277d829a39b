"""`penstock capture`: databases into the log, by the captures that stand in the project file."""

from __future__ import annotations

import logging
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli import output, project
from penstock.cli.capture_database import (
    database_status,
    must_have,
    open_database,
    passed,
    remove_from_database,
    show_checks,
)
from penstock.cli.capture_file import add_section, drop_section
from penstock.cli.capture_project import (
    cluster_of,
    config_of,
    configured,
    safe_url,
    the_one,
)
from penstock.cli.capture_view import (
    follow,
    follow_snapshot,
    is_running,
    show,
    status_rows,
    stop_at_end_of_input,
    wait_ended,
)
from penstock.cli.kafka import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, ClientSettings, connect
from penstock.cli.project import ProjectFile
from penstock.cli.stopping import stopped_by_signals
from penstock.cli.up import LogLevel, LogLevelOption
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.capture.delivery.metering import CaptureStatus
    from penstock.client.connection import Cluster

app = typer.Typer(
    no_args_is_help=True, help="Databases into the log: every committed change, in order."
)

STOP_TIMEOUT_S: Final = 60.0

Name = Annotated[str, typer.Argument(metavar="NAME", help="The capture.")]
Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help="postgresql://USER:PASSWORD@HOST/DATABASE, mysql://..., or sqlite:///FILE.",
    ),
]
Include = Annotated[
    list[str],
    typer.Option("--include", "-i", metavar="PATTERN",
                 help="Tables by full name, with * and ?: 'public.*'. May be repeated."),
]  # fmt: skip
Exclude = Annotated[
    list[str],
    typer.Option("--exclude", "-e", metavar="PATTERN", help="Tables to leave out."),
]
Statement = Annotated[
    str, typer.Argument(metavar="SQL", help="'ALTER TABLE orders DROP COLUMN note'")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


# ---- before anything is captured ------------------------------------------------------------


@app.command()
def check(
    url: Url,
    include: Include = ["*"],  # noqa: B006
    exclude: Exclude = [],  # noqa: B006
    json: AsJson = False,
) -> None:
    """Say whether a database can be captured, and how to mend what is missing.

    Nothing is changed in it. The status is 1 if something that is required is missing.

    \b
    Examples:
      penstock capture check postgresql://capture:secret@localhost/shop
      penstock capture check sqlite:///shop.db --include 'order*'
    """
    config = config_of("check", {"url": url, "include": include, "exclude": exclude})
    with open_database(config) as source:
        checks = source.check()
        tables = [table.full_name for table in source.tables()] if passed(checks) else []
    if json:
        output.write_json(
            {
                "ok": passed(checks),
                "tables": tables,
                "checks": [
                    {
                        "name": item.name,
                        "ok": item.ok,
                        "required": item.required,
                        "found": item.found,
                        "remedy": item.remedy,
                    }
                    for item in checks
                ],
            }
        )
    else:
        show_checks(checks)
        if tables:
            output.say(f"{output.count(len(tables), 'table')}: {', '.join(tables)}")
    if not passed(checks):
        raise typer.Exit(output.EXIT_FAILURE)


@app.command()
def add(
    name: Name,
    url: Url,
    include: Include = ["*"],  # noqa: B006
    exclude: Exclude = [],  # noqa: B006
    prefix: Annotated[
        str | None,
        typer.Option("--prefix", metavar="TEXT", help="Topics are PREFIX.TABLE; else NAME.TABLE."),
    ] = None,
    file: ProjectFile = None,
) -> None:
    """Check a database and write a capture of it into the project file.

    Everything else about it can be set there: docs/capture.md has all settings. A password is
    better kept in the environment: write ${NAME} for it, in single quotes.

    \b
    Examples:
      penstock capture add shop sqlite:///shop.db
      penstock capture add shop 'postgresql://capture:${SHOP_PASSWORD}@localhost/shop' -i 'public.*'
    """
    path = file or project.find() or Path(project.FILE_NAME)
    if path.exists() and name in project.load(path).named("capture"):
        raise ConfigError(
            f"{path.name} has a capture {name!r} already",
            advice=f"Change it there, or remove it first: penstock capture remove {name}",
        )
    written: dict[str, Any] = {"url": url}
    if include != ["*"]:
        written["include"] = include
    if exclude:
        written["exclude"] = exclude
    if prefix:
        written["prefix"] = prefix
    config = config_of(name, project.filled(written, f"capture.{name}"), path.parent)
    with open_database(config) as source:
        checks = source.check()
        if not passed(checks):
            show_checks(checks)
            raise PenstockError(
                f"{safe_url(config)} cannot be captured yet, so nothing was changed",
                advice="Mend what is marked above, and add it again.",
            )
        tables = source.tables()
    for item in checks:
        # Without tables this is said below.
        if not item.ok and item.name != "tables":
            output.warn(f"{item.name}: {item.found}. {item.remedy}".rstrip(" ."))
    add_section(path, name, written)
    output.say(f"{path.name} has the capture {name} of {output.count(len(tables), 'table')}")
    if not tables:
        output.warn(
            f"no table fits include = {include} and exclude = {exclude}: nothing is captured "
            f"until there is one, or until the patterns in {path.name} are changed"
        )
    output.say(f"run it: penstock capture run {name}, or with the broker: penstock up")


# ---- running ---------------------------------------------------------------------------------


@app.command()
def run(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="The capture, if several.")] = "",
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    file: ProjectFile = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Log lines instead of the live view.")
    ] = False,
    take_over: Annotated[
        bool, typer.Option("--take-over", help="Take the place of one that runs already.")
    ] = False,
    beside: Annotated[
        bool,
        typer.Option("--beside", hidden=True, help="As penstock up runs it: end with its input."),
    ] = False,
    log_level: LogLevelOption = LogLevel.INFO,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Run a capture until Ctrl-C or SIGTERM.

    The first time it takes a snapshot; after that it goes on where the log says, also after a
    crash. A database that cannot be reached at the start is an error; once it was reached, a
    database or a broker that goes away is waited for. `penstock up` runs the captures of its
    project file by itself; one that runs already is not run a second time.

    \b
    Examples:
      penstock capture run
      penstock capture run shop --bootstrap kafka-1:9092
    """
    from penstock.capture.delivery.capture import Capture
    from penstock.capture.delivery.process import settle

    # Whoever runs it beside the broker has had all of the file checked.
    found = project.load(file, whole=not beside)
    config = configured(found, the_one(found, name))
    connect(bootstrap, client)
    live = sys.stderr.isatty() and not plain
    level = LogLevel.WARNING if live and log_level is LogLevel.INFO else log_level
    logging.basicConfig(level=level.value.upper(), stream=sys.stderr, force=True,
                        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")  # fmt: skip
    # Beside a broker, at the start of a machine, the database may come up later than we do.
    capture = Capture(
        config, lambda: cluster_of(bootstrap, client, config.transactional_id), waits=beside
    )
    stop = threading.Event()
    with stopped_by_signals(stop):
        if beside:
            stop_at_end_of_input(stop)
        if not take_over:
            with cluster_of(bootstrap, client) as cluster:
                _let_nobody_run(cluster, config.name, stop, patient=beside)
        if stop.is_set():
            return
        output.say(f"{config.name} connects to {safe_url(config)} and {bootstrap}")
        settle()
        with follow(capture, live=live):
            capture.run(stop)
    status = capture.status()
    output.say(f"{config.name} stopped: {output.count(status.changes, 'change')} in this run; "
               "it goes on from here when it is run again")  # fmt: skip


@app.command()
def status(
    name: Annotated[str, typer.Argument(metavar="[NAME]", help="One capture.")] = "",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it live, until Ctrl-C.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    file: ProjectFile = None,
    json: AsJson = False,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Show how captures are getting on: state, lag, rates, snapshots, what the database keeps.

    With a NAME also the schema of each table: its version goes up when the table is altered.

    \b
    Examples:
      penstock capture status
      penstock capture status shop --watch
    """
    found = project.load(file)
    connect(bootstrap, client)
    with cluster_of(bootstrap, client) as cluster:

        def look() -> list[dict[str, Any]]:
            return status_rows(_statuses(cluster, found, name), database_status(found))

        show(look, watch=watch, json=json, schemas=bool(name))


@app.command()
def pause(
    name: Name,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    file: ProjectFile = None,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Have a capture wait, also over restarts, until it is resumed.

    The database keeps what is not captured meanwhile: do not forget it.

    \b
    Examples:
      penstock capture pause shop
    """
    _send(name, "pause", bootstrap, file, client)
    output.say(f"{name} is told to wait; the database keeps its changes until it is resumed")


@app.command()
def resume(
    name: Name,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    file: ProjectFile = None,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Have a capture that waits go on.

    \b
    Examples:
      penstock capture resume shop
    """
    _send(name, "resume", bootstrap, file, client)
    output.say(f"{name} is told to go on")


@app.command()
def snapshot(
    tables: Annotated[
        list[str] | None, typer.Argument(metavar="TABLE...", help="Tables by full name.")
    ] = None,
    all_tables: Annotated[
        bool,
        typer.Option("--all", help="All tables at one position, the stream waits meanwhile."),
    ] = False,
    name: Annotated[
        str, typer.Option("--capture", metavar="NAME", help="The capture, if there are several.")
    ] = "",
    where: Annotated[
        str, typer.Option("--where", metavar="SQL", help="Only rows of which this is true.")
    ] = "",
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Show it until it is done.")
    ] = True,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    file: ProjectFile = None,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Read tables again while their changes go on, in pieces, and resumed after a crash.

    \b
    Examples:
      penstock capture snapshot public.orders
      penstock capture snapshot public.orders --where "id > 1000"
      penstock capture snapshot --all
    """
    from penstock.capture.delivery.control import send, snapshot_all_signal, snapshot_signal

    chosen = tables or []
    if bool(chosen) == all_tables:
        raise typer.BadParameter("name the tables, or say --all")
    found = project.load(file)
    name = the_one(found, name, option="--capture NAME")
    connect(bootstrap, client)
    signal = snapshot_all_signal() if all_tables else snapshot_signal(*chosen, where=where)
    must_have(found, name, chosen)
    with cluster_of(bootstrap, client) as cluster:
        status = _status_of(cluster, name)
        send(cluster, name, signal)
        if status is None or not is_running(status):
            output.say(f"{name} does not run now; it takes the snapshot when it does")
        elif status.state == "paused":
            output.say(f"{name} is paused; it takes the snapshot when it is resumed: "
                       f"penstock capture resume {name}")  # fmt: skip
        elif wait:
            follow_snapshot(cluster, name, chosen, status)
        else:
            output.say(f"{name} is told; penstock capture status shows how far it is")


@app.command()
def remove(
    name: Name,
    yes: Yes = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also if the database is out of reach; what is left in it is told."
        ),
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    file: ProjectFile = None,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Stop a capture and take away what it needs in the database: slot, publication, triggers.

    Its topics stay, with all events. Its section is taken out of the project file.

    \b
    Examples:
      penstock capture remove shop
      penstock capture remove shop --force
    """
    from penstock.capture.delivery.control import Signal, forget, send

    found = project.load(file)
    config = configured(found, name)
    question = (
        f"Remove the capture {name} from {safe_url(config)}? Its slot and publication, or its "
        "triggers, go, and its position; its topics stay."
    )
    if not yes and not output.confirm(question):
        output.say("nothing was removed; --yes removes without asking")
        raise typer.Exit(output.EXIT_FAILURE)
    connect(bootstrap, client)
    with cluster_of(bootstrap, client) as cluster:
        status = _status_of(cluster, name)
        if status is not None and is_running(status):
            send(cluster, name, Signal("stop"))
            _wait_stopped(cluster, name)
        removed = remove_from_database(config, force=force)
        forget(cluster, name)
    for item in removed:
        output.say(f"removed {item}")
    if found.path is not None:
        drop_section(found.path, name)
        output.say(f"{found.path.name} has the capture {name} no more")


@app.command()
def alter(name: Name, statement: Statement, file: ProjectFile = None) -> None:
    """Run an ALTER TABLE that SQLite refuses while triggers name the column: DROP COLUMN.

    In one transaction the capture's triggers are taken away, the statement is run, and the
    triggers are made anew; no change is missed, and the capture may run meanwhile. Other databases
    need nothing of the kind.

    \b
    Examples:
      penstock capture alter shop "ALTER TABLE orders DROP COLUMN note"
    """
    from penstock.capture.sqlite.source import SqliteSource

    config = configured(project.load(file), name)
    with open_database(config) as source:
        if not isinstance(source, SqliteSource):
            raise ConfigError(
                f"{name} captures {source.kind}, where ALTER TABLE needs no help",
                advice="Run the statement in the database itself.",
            )
        source.alter(statement)
    output.say(f"{name} goes on with the table as it is now")


# ---- parts -----------------------------------------------------------------------------------


def _status_of(cluster: Cluster, name: str) -> CaptureStatus | None:
    from penstock.capture.delivery.control import status_of

    return status_of(cluster, name)


def _statuses(cluster: Cluster, found: project.Project, name: str) -> list[CaptureStatus]:
    """What captures told last, and the names of those that never ran."""
    from penstock.capture.delivery.control import statuses
    from penstock.capture.delivery.metering import CaptureStatus

    told = {item.name: item for item in statuses(cluster)}
    for known in found.named("capture"):
        told.setdefault(known, CaptureStatus(known, "never run"))
    if name and name not in told:
        raise ConfigError(
            f"there is no capture {name!r}", advice=f"There are: {', '.join(told) or 'none'}."
        )
    return [item for key, item in sorted(told.items()) if not name or key == name]


def _let_nobody_run(cluster: Cluster, name: str, stop: threading.Event, *, patient: bool) -> None:
    """PenstockError if the capture runs elsewhere: the two would throw each other out.

    Patiently, one that ended without a word just now is waited for until it counts as silent.
    """
    if not wait_ended(cluster, name, STOP_TIMEOUT_S if patient else 0, stop):
        raise PenstockError(
            f"the capture {name} runs already, in another process",
            advice=f"penstock capture status {name} shows it. Stop that one first, or take its "
            f"place: penstock capture run {name} --take-over. One that was killed counts as "
            "running for some seconds more.",
        )


def _wait_stopped(cluster: Cluster, name: str) -> None:
    if not wait_ended(cluster, name, STOP_TIMEOUT_S, threading.Event()):
        raise PenstockError(
            f"the capture {name} does not stop", advice="End its process, and try again."
        )


def _send(name: str, kind: str, bootstrap: str, file: Path | None, client: list[str]) -> None:
    from penstock.capture.delivery.control import Signal, send

    found = project.load(file)
    connect(bootstrap, client)
    with cluster_of(bootstrap, client) as cluster:
        if name not in found.named("capture") and _status_of(cluster, name) is None:
            raise ConfigError(
                f"there is no capture {name!r}", advice="penstock capture status lists them."
            )
        send(cluster, name, Signal(kind))
