"""`penstock capture`: databases into the log, by the captures that stand in the project file."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli import output, project
from penstock.cli.capture_file import add_section, drop_section
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
from penstock.cli.stopping import stopped_by_signals
from penstock.cli.up import LogLevel, LogLevelOption
from penstock.cli.values import parse_pairs
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.capture.delivery.config import CaptureConfig
    from penstock.capture.delivery.metering import CaptureStatus
    from penstock.capture.source import Check, Source
    from penstock.client.connection import Cluster

app = typer.Typer(
    no_args_is_help=True, help="Databases into the log: every committed change, in order."
)

STOP_TIMEOUT_S: Final = 60.0

Name = Annotated[str, typer.Argument(metavar="NAME", help="The capture.")]
ProjectFile = Annotated[
    Path | None,
    typer.Option(
        "--project", "-p", metavar="FILE", envvar=project.VARIABLE,
        help="The project file; else the nearest penstock.toml here or above.",
    ),
]  # fmt: skip
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
    config = _config_of("check", {"url": url, "include": include, "exclude": exclude})
    with _open(config) as source:
        checks = source.check()
        tables = [table.full_name for table in source.tables()] if _passed(checks) else []
    if json:
        output.write_json(
            {
                "ok": _passed(checks),
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
        _show_checks(checks)
        if tables:
            output.say(f"{output.count(len(tables), 'table')}: {', '.join(tables)}")
    if not _passed(checks):
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
    config = _config_of(name, project.filled(written, f"capture.{name}"), path.parent)
    with _open(config) as source:
        checks = source.check()
        if not _passed(checks):
            _show_checks(checks)
            raise PenstockError(
                f"{_safe(config)} cannot be captured yet, so nothing was changed",
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
    crash. While the database or the broker is away it waits and tries again. `penstock up` runs
    the captures of its project file by itself; one that runs already is not run a second time.

    \b
    Examples:
      penstock capture run
      penstock capture run shop --bootstrap kafka-1:9092
    """
    from penstock.capture.delivery.capture import Capture
    from penstock.capture.delivery.process import settle

    found = project.load(file)
    config = configured(found, _the_one(found, name))
    bootstrap = _bootstrap(found, bootstrap)
    connect(bootstrap, client)
    live = sys.stderr.isatty() and not plain
    level = LogLevel.WARNING if live and log_level is LogLevel.INFO else log_level
    logging.basicConfig(level=level.value.upper(), stream=sys.stderr, force=True,
                        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s")  # fmt: skip
    capture = Capture(config, lambda: _cluster(bootstrap, client, config.transactional_id))
    stop = threading.Event()
    with stopped_by_signals(stop):
        if beside:
            stop_at_end_of_input(stop)
        if not take_over:
            with _cluster(bootstrap, client) as cluster:
                _let_nobody_run(cluster, config.name, stop, patient=beside)
        if stop.is_set():
            return
        output.say(f"{config.name} connects to {_safe(config)} and {bootstrap}")
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

    \b
    Examples:
      penstock capture status
      penstock capture status shop --watch
    """
    found = project.load(file)
    bootstrap = _bootstrap(found, bootstrap)
    connect(bootstrap, client)
    with _cluster(bootstrap, client) as cluster:

        def look() -> list[dict[str, Any]]:
            return status_rows(_statuses(cluster, found, name), _database_status(found))

        show(look, watch=watch, json=json)


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
    name = _the_one(found, name, option="--capture NAME")
    bootstrap = _bootstrap(found, bootstrap)
    connect(bootstrap, client)
    signal = snapshot_all_signal() if all_tables else snapshot_signal(*chosen, where=where)
    _must_have(found, name, chosen)
    with _cluster(bootstrap, client) as cluster:
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
        f"Remove the capture {name} from {_safe(config)}? Its slot and publication, or its "
        "triggers, go, and its position; its topics stay."
    )
    if not yes and not output.confirm(question):
        output.say("nothing was removed; --yes removes without asking")
        raise typer.Exit(output.EXIT_FAILURE)
    bootstrap = _bootstrap(found, bootstrap)
    connect(bootstrap, client)
    with _cluster(bootstrap, client) as cluster:
        status = _status_of(cluster, name)
        if status is not None and is_running(status):
            send(cluster, name, Signal("stop"))
            _wait_stopped(cluster, name)
        removed = _remove_from_database(config, force=force)
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
    with _open(config) as source:
        if not isinstance(source, SqliteSource):
            raise ConfigError(
                f"{name} captures {source.kind}, where ALTER TABLE needs no help",
                advice="Run the statement in the database itself.",
            )
        source.alter(statement)
    output.say(f"{name} goes on with the table as it is now")


# ---- parts -----------------------------------------------------------------------------------


def _config_of(name: str, data: dict[str, Any], folder: Path | None = None) -> CaptureConfig:
    from penstock.capture.delivery.config import CaptureConfig

    url = str(data.get("url", ""))
    relative = url.removeprefix("sqlite:///")
    if url.startswith("sqlite:///") and not relative.startswith("/") and folder is not None:
        # A file is meant from where the project file is.
        data = {**data, "url": f"sqlite:///{folder.resolve() / relative}"}
    return CaptureConfig.from_mapping(name, data)


def configured(found: project.Project, name: str) -> CaptureConfig:
    """The settings of a capture of the project file."""
    captures = found.named("capture")
    if name not in captures:
        where = found.path.name if found.path is not None else "no penstock.toml was found, which"
        raise ConfigError(
            f"{where} has no capture {name!r}",
            advice=f"It has: {', '.join(captures)}." if captures
            else f"Add one: penstock capture add {name} URL",
        )  # fmt: skip
    settings: Any = captures[name]
    path = f"capture.{name}"
    if not isinstance(settings, Mapping):
        raise found.error(path, f"{path} must be a table of settings, not {settings!r}")
    with found.explained(path):
        return _config_of(name, dict(settings), found.folder)


def _must_have(found: project.Project, name: str, patterns: list[str]) -> None:
    """ConfigError if a capture has no table of these names.

    Only if the database can be asked from here; else the capture itself will complain.
    """
    if not patterns or name not in found.named("capture"):
        return
    config = configured(found, name)
    try:
        with _open(config) as source:
            names = [table.full_name for table in source.tables()]
    except PenstockError:
        return
    for pattern in patterns:
        if not any(fnmatchcase(table, pattern) for table in names):
            raise ConfigError(
                f"the capture {name} has no table {pattern!r}, so no snapshot was asked for",
                advice=f"It has: {_some(names)}.",
            )


def _some(names: list[str]) -> str:
    """Names for a message, not too many."""
    shown = ", ".join(names[:20]) or "none"
    return f"{shown}, and {len(names) - 20} more" if len(names) > 20 else shown


def _the_one(found: project.Project, name: str, option: str = "NAME") -> str:
    """The capture that is meant if none is named."""
    captures = list(found.named("capture"))
    if name or len(captures) == 1:
        return name or captures[0]
    if not captures:
        raise ConfigError(
            "there is no capture in the project file",
            advice="Add one: penstock capture add NAME URL",
        )
    raise ConfigError(
        "there are several captures",
        advice=f"Say which by {option}, one of {', '.join(captures)}.",
    )


def _bootstrap(found: project.Project, given: str) -> str:
    """What the command line says, else the project file."""
    told = found.section("broker").get("bootstrap")
    return str(told) if told and given == DEFAULT_BOOTSTRAP else given


def _cluster(bootstrap: str, client: list[str], client_id: str = "penstock-cli") -> Cluster:
    from penstock.client.connection import Cluster
    from penstock.client.security import Security

    return Cluster(
        bootstrap, client_id=client_id, security=Security.from_options(parse_pairs(client))
    )


def _open(config: CaptureConfig) -> Source:
    from penstock.capture.sources import open_source

    return open_source(config.source)


def _remove_from_database(config: CaptureConfig, *, force: bool) -> list[str]:
    """Take what a capture has made out of its database; what that was."""
    try:
        with _open(config) as source:
            return source.remove()
    except PenstockError as error:
        if not force:
            advice = f"{error.advice} " if error.advice else ""
            raise PenstockError(
                str(error),
                advice=f"{advice}If the database is gone for good: "
                f"penstock capture remove {config.name} --force",
            ) from error
        output.warn(f"{_safe(config)} was left as it is: {error}")
        for line in _left_in_database(config):
            output.warn(line)
        return []


def _left_in_database(config: CaptureConfig) -> list[str]:
    """What may be in a database that nobody has asked, and how to remove it."""
    scheme = config.source.url.partition("://")[0].lower()
    if scheme in {"postgresql", "postgres"}:
        from penstock.capture.postgres.options import PostgresOptions

        options = PostgresOptions.of(config.source)
        return [
            (
                f"the slot {options.slot} may be left, for which the server keeps its WAL: "
                f"SELECT pg_drop_replication_slot('{options.slot}')"
            ),
            (
                f"the publication {options.publication} may be left: "
                f"DROP PUBLICATION {options.publication}"
            ),
        ]
    if scheme == "sqlite":
        from penstock.capture.sqlite.catalog import names_of

        prefix = names_of(config.name).prefix
        return [f"triggers and tables named {prefix}* may be left"]
    return []


def _safe(config: CaptureConfig) -> str:
    """The URL without the password."""
    scheme, _, rest = config.source.url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _passed(checks: list[Check]) -> bool:
    return all(item.ok or not item.required for item in checks)


def _show_checks(checks: list[Check]) -> None:
    def word(item: Check) -> str:
        return "ok" if item.ok else ("missing" if item.required else "warning")

    rows = [(word(item), item.name, item.found) for item in checks]
    output.print_table(("", "check", "found"), rows)
    for item in checks:
        if not item.ok and item.remedy:
            print(f"{item.name}: {item.remedy}")


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


def _database_status(found: project.Project) -> Any:
    """A way to ask the databases of the project what they keep."""

    def ask(name: str) -> dict[str, Any]:
        if name not in found.named("capture"):
            return {}
        try:
            with _open(configured(found, name)) as source:
                told = source.status()
        except PenstockError as error:
            return {"problem": str(error)}
        return {
            "retained_bytes": told.retained_bytes,
            "retained_limit_bytes": told.retained_limit_bytes,
            "lag_bytes": told.lag_bytes,
            "time_left_s": told.time_left_s,
            **told.details,
        }

    return ask


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
    bootstrap = _bootstrap(found, bootstrap)
    connect(bootstrap, client)
    with _cluster(bootstrap, client) as cluster:
        if name not in found.named("capture") and _status_of(cluster, name) is None:
            raise ConfigError(
                f"there is no capture {name!r}", advice="penstock capture status lists them."
            )
        send(cluster, name, Signal(kind))
