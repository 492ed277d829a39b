"""`penstock sinks`: keep derived stores in step with topics, look at them and command them.

The sinks stand in the project file, as `[sinks.NAME]`. `penstock run` feeds them beside its flows,
`penstock sinks run` feeds them alone. The commands here ask the process that does, on the same
machine; if none does they ask the stores and the broker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli import output, project
from penstock.cli.dead_letters_view import (
    SHOWN_LETTERS,
    Execute,
    Letters,
    Limit,
    To,
    send_back,
    show,
)
from penstock.cli.kafka import (
    DEFAULT_BOOTSTRAP,
    AsJson,
    Bootstrap,
    BrokerError,
    ClientSettings,
    connect,
)
from penstock.cli.needs import need_sinks
from penstock.cli.project import ProjectFile
from penstock.cli.run import (
    SINKS_DATA,
    Master,
    MetricsAt,
    Once,
    Plain,
    Report,
    SparkConf,
    StopTimeout,
    Tries,
    chosen_data,
    flows_folder,
    run_sinks,
    seconds,
)
from penstock.cli.sinks_file import declared, named, read
from penstock.cli.sinks_reach import answer_of, must_answer
from penstock.cli.up import LogLevel, LogLevelOption
from penstock.cli.values import parse_pairs
from penstock.cli.watch import Watch
from penstock.cli.watch import watch as repeat
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.cli.dead_letters import LetterKind
    from penstock.sinks import Position
    from penstock.sinks.spec import SinkSpec
    from penstock.spark.flows.inputs import Place
    from penstock.spark.sinking.folder import SinkFolder

ASKED_AT_ONCE: Final = 16
_POLL_S: Final = 0.2
_STOP_S: Final = 120.0

app = typer.Typer(
    no_args_is_help=True,
    help="Keep derived stores (tables, indexes, caches) in step with topics.",
    epilog="A sink stands in penstock.toml: [sinks.NAME] with topic = and url =. Its position is "
    "in its store, in the same transaction as its rows.",
)

Name = Annotated[str, typer.Argument(metavar="SINK", help="The sink.")]
Data = Annotated[
    Path,
    typer.Option(
        "--data",
        "-d",
        metavar="DIR",
        envvar="PENSTOCK_SINKS",
        file_okay=False,
        callback=chosen_data,
        help="Where it is kept which sinks are paused, and who runs them; in the folder of the "
        "project file, unless given.",
    ),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
Only = Annotated[
    list[str],
    typer.Option("--only", "-o", metavar="NAME", help="Feed only this sink. May be repeated."),
]
Records = Annotated[
    list[str],
    typer.Option(
        "--record",
        "-r",
        metavar="PARTITION:OFFSET",
        help="A record that must be in the store, as a producer was told of it. May be repeated.",
    ),
]
Timeout = Annotated[
    str,
    typer.Option(
        "--timeout", "-t", metavar="DURATION", help="How long to wait, such as 10s or 5m."
    ),
]


def _folder(data: Path, found: project.Project) -> SinkFolder:
    need_sinks(found, drivers=False)
    from penstock.spark.sinking.folder import SinkFolder

    return SinkFolder(data)


def _running(folder: SinkFolder) -> list[dict[str, Any]] | None:
    """The sinks as the process that feeds them sees them; None if none does."""
    from penstock.spark.flows.control import ask
    from penstock.spark.flows.errors import NotRunningError

    try:
        found: list[dict[str, Any]] = ask(folder, {"do": "list"})
    except NotRunningError:
        return None
    return found


def _place(bootstrap: str, client: list[str]) -> Place:
    from penstock.spark.flows.inputs import Place

    options = {f"kafka.{name}": value for name, value in parse_pairs(client).items()}
    return Place(bootstrap, options, flows_folder().resolve)


def _place_if_there(
    bootstrap: str, client: list[str], told: set[str] | None = None
) -> Place | None:
    """The broker; None, having said so, if it does not answer: the stores may know enough. What is
    in `told` is not said again."""
    try:
        connect(bootstrap, client)
    except BrokerError as error:
        text = f"{error}: how far sinks are behind is not known"
        if told is None or text not in told:
            output.warn(text)
        if told is not None:
            told.add(text)
        return None
    return _place(bootstrap, client)


@app.command("list")
def list_command(
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    data: Data = SINKS_DATA,
    file: ProjectFile = None,
    watch: Watch = False,
    json: AsJson = False,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """List the sinks: how they get on, how far they are behind, and what went wrong.

    `lag` is the number of records in the topic that are not in the store, `behind` the age of the
    newest record in the store if there are newer ones (of the oldest that is not in the store, if
    nothing feeds it). An exclamation mark says that it is above
    the sink's `max_lag`.

    \b
    Examples:
      penstock sinks list
      penstock sinks list --watch
      penstock sinks list --json | jq -r '.[] | select(.lag > 1000) | .name'
    """
    from penstock.cli.sinks_view import rendered

    found = project.load(file)
    folder = _folder(data, found)
    specs = _known(found)
    told = set[str]()

    def look() -> list[dict[str, Any]]:
        running = _running(folder) or []
        known = {each["name"] for each in running}
        at_rest = [spec for spec in specs if spec.name not in known]
        place = _place_if_there(bootstrap, client, told) if at_rest else None
        # Stores that do not answer are waited for at the same time.
        with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
            resting = pool.map(lambda spec: _at_rest(spec, folder, place), at_rest)
            return [*running, *resting]

    if watch:
        repeat(look, rendered, lambda seen: seen, json=json)
    seen = look()
    if json:
        output.write_json(seen)
    elif seen:
        output.print_rich(rendered(seen))
    else:
        output.say(f"there are no sinks; declare one in {project.FILE_NAME}, as [sinks.NAME]")


def _known(found: project.Project) -> list[SinkSpec]:
    """The sinks of the project, without those that need variables which are not set: this is told,
    and the others are shown."""
    known = []
    for name in found.named("sinks"):
        if unset := found.unset_in("sinks", name):
            output.warn(f"{unset[0]}: the sink {name} is not shown")
        else:
            known.append(read(found, name))
    return known


def _at_rest(spec: SinkSpec, folder: SinkFolder, place: Place | None) -> dict[str, Any]:
    """A sink that nobody feeds, as its store, the broker and the last who fed it tell."""
    from penstock.spark.flows.progress import Progress
    from penstock.spark.sinking.lag import ends_of, lag_of, unread_since
    from penstock.spark.sinking.manager import SinkStatus
    from penstock.spark.sinking.opening import anew_advice

    record = folder.sink(spec.name)
    alive = {"starting", "running", "waiting", "stopping"}
    state = "paused" if record.paused else record.state
    if state in alive:
        # Whoever wrote this has ended before it could write more.
        state = "killed"
    error, advice, position = record.error, record.advice, None
    lag: int | None = None
    lag_s: float | None = None
    old: list[str] = []
    try:
        position, rebuildable = answer_of(spec, lambda sink: (sink.position(), sink.rebuildable))
        if position is not None and place is not None:
            present = place.resolve(spec.topic)
            ends = ends_of(place, {spec.topic})
            lag, lag_s = lag_of(position, ends, present, 0.0)
            since = unread_since(place, present, position, ends) if lag else None
            lag_s = lag_s if since is None else max(0.0, time.time() - since)
            old = sorted({topic for topic, _ in position.offsets} - {present})
            if old and not error:
                error = f"it was filled from {', '.join(old)}, whose place {present} has taken"
                advice = (
                    "The next `penstock run` or `penstock sinks run` rebuilds it from there."
                    if rebuildable
                    else anew_advice(spec.name, present)
                )
    except PenstockError as trouble:
        error, advice = error or str(trouble), advice or trouble.advice
    counts = folder.counts(spec.name)
    found = SinkStatus(
        name=spec.name, state=state, rebuilding=False, restarts=0, error=error, advice=advice,
        retry_in_s=None, progress=Progress.restored(counts), topic=spec.topic, store=spec.shown,
        position={} if position is None else position.as_json(), lag=lag, lag_s=lag_s,
        alarming=state == "failed" or (lag_s or 0.0) > spec.max_lag_s or old != [],
        put=counts.get("put", 0), deleted=counts.get("deleted", 0),
    )  # fmt: skip
    # Only who feeds it counts them.
    return found.as_dict() if counts else {**found.as_dict(), "put": None, "deleted": None}


@app.command("describe")
def describe(
    sink: Name,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    data: Data = SINKS_DATA,
    file: ProjectFile = None,
    json: AsJson = False,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Show a sink: topic, store, columns, position, lag, what went wrong.

    \b
    Examples:
      penstock sinks describe orders
      penstock sinks describe orders --json | jq .position
    """
    found = project.load(file)
    folder = _folder(data, found)
    spec = named(found, sink)
    running = [each for each in _running(folder) or () if each["name"] == sink]
    status = running or [_at_rest(spec, folder, _place_if_there(bootstrap, client))]
    columns: list[tuple[str, str]] = []
    key: tuple[str, ...] = spec.key
    try:
        schema = answer_of(spec, lambda store: store.stored_schema())
        if schema is not None:
            columns = [(each.name, str(each.type)) for each in schema.fields]
            key = schema.key
    except PenstockError as trouble:
        output.warn(f"the store does not tell its columns: {trouble}")
    value = {**status[0], "key": list(key), "columns": dict(columns),
             "dead_letters": spec.letters, "beside": status[1:]}  # fmt: skip
    if json:
        output.write_json(value)
        return
    now = status[0]
    position = [
        f"{topic}-{number} at {at}"
        for topic, places in now["position"].items()
        for number, at in places.items()
    ]
    lines = [
        ("sink", spec.name),
        ("state", now["state"]),
        ("topic", spec.topic),
        ("store", spec.shown),
        ("key", ", ".join(key)),
        ("columns", "\n".join(f"{name} {kind}" for name, kind in columns)),
        ("position", "\n".join(position)),
        ("lag", "" if now["lag"] is None else output.count(now["lag"], "record")),
        ("dead letters", spec.letters),
        ("being rebuilt", "yes" if len(status) > 1 else ""),
        ("error", now["error"]),
        ("remedy", now["advice"]),
    ]
    output.print_table(("", ""), ((name, text) for name, text in lines if text))


@app.command("run")
def run(
    only: Only = [],  # noqa: B006
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    master: Master = "local[*]",
    data: Data = SINKS_DATA,
    file: ProjectFile = None,
    once: Once = False,
    conf: SparkConf = [],  # noqa: B006
    metrics: MetricsAt = None,
    tries: Tries = 10,
    stop_timeout: StopTimeout = "60s",
    report: Report = "10s",
    plain: Plain = False,
    log_level: LogLevelOption = LogLevel.WARNING,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Feed the sinks of the project on Spark, until Ctrl-C or SIGTERM, without any flows.

    Each sink begins where its store says that it is. One that fails is started again after a
    pause, unless trying again cannot help; then it stops, says why, and the others go on. If no
    store answers at the start, nothing is begun.

    The status is 0 if no sink has failed for good, else 1.

    \b
    Examples:
      penstock sinks run
      penstock sinks run --only orders --once
      penstock sinks run --metrics 9646 --master spark://spark:7077
    """
    found = project.load(file)
    need_sinks(found, only)
    for name in only:
        named(found, name)
    chosen = declared(found, only)
    if not chosen:
        raise ConfigError(
            "there are no sinks to feed",
            advice=f"Declare one in {project.FILE_NAME}: [sinks.NAME] with topic = and url =.",
        )
    run_sinks(
        chosen, data, bootstrap=bootstrap, master=master, once=once,
        conf=conf, metrics=metrics, tries=tries, stop_timeout=stop_timeout, report=report,
        plain=plain, log_level=log_level, client=client,
    )  # fmt: skip


@app.command("pause")
def pause(sink: Name, data: Data = SINKS_DATA, file: ProjectFile = None) -> None:
    """Stop feeding a sink after its micro-batch, until it is resumed.

    \b
    Examples:
      penstock sinks pause orders
    """
    _tell(sink, "pause", data, file, paused=True)
    output.say(f"{sink} is paused")


@app.command("resume")
def resume(sink: Name, data: Data = SINKS_DATA, file: ProjectFile = None) -> None:
    """Feed a sink again that was paused, or that has failed, from where its store is.

    \b
    Examples:
      penstock sinks resume orders
    """
    _tell(sink, "resume", data, file, paused=False)
    output.say(f"{sink} goes on")


def _tell(
    sink: str, do: str, data: Path, file: Path | None, begin: str = "", **changed: Any
) -> bool:
    """Command the process that feeds it, or note it for the next; whether one does."""
    found = project.load(file)
    folder = _folder(data, found)
    from penstock.spark.flows.control import ask
    from penstock.spark.flows.errors import NotRunningError

    spec = named(found, sink)
    try:
        ask(folder, {"do": do, "sink": sink, "from": begin})
    except NotRunningError:
        known = replace(folder.sink(sink), topic=spec.topic, store=spec.shown, **changed)
        folder.write_sink(known)
        return False
    return True


@app.command("rebuild")
def rebuild(
    sink: Name,
    begin: Annotated[
        str,
        typer.Option(
            "--from",
            metavar="beginning|end",
            help="Of a webhook, which cannot be built beside itself: send everything again, or "
            "only what comes from now on.",
        ),
    ] = "",
    yes: Yes = False,
    data: Data = SINKS_DATA,
    file: ProjectFile = None,
) -> None:
    """Build a store anew from the start of its topic, beside the old one, then switch to the new.

    Meanwhile the old one is kept in step and can be read. Only what is still in the topic can be
    read again: it should be compacted, or keep everything. A sink whose topic a flow has rebuilt
    is rebuilt by itself; a webhook waits for this command, with --from.

    \b
    Examples:
      penstock sinks rebuild orders
      penstock sinks rebuild orders --yes
      penstock sinks rebuild hook --from end
    """
    found = project.load(file)
    folder = _folder(data, found)
    spec = named(found, sink)
    present = flows_folder().resolve(spec.topic)
    with spec.sink() as store:
        rebuildable = store.rebuildable
    if not rebuildable:
        _begin_anew(spec, begin, present, yes=yes, data=data, file=file)
        return
    if begin:
        raise ConfigError(
            f"sink {sink} is rebuilt from the beginning, always", advice="Leave out --from."
        )
    if not yes and not output.confirm(f"read {present} again, into a new {spec.shown}?"):
        output.say("nothing was changed; --yes does it without asking")
        raise typer.Exit(output.EXIT_FAILURE)
    if _running(folder) is None:
        # First what an earlier one has left: it must not be taken for what is begun now.
        must_answer(spec)
        with spec.sink() as live:
            live.beside(fresh=True).close()
    if _tell(sink, "rebuild", data, file, rebuilding=True):
        output.say(f"{sink} is being rebuilt beside the old one")
        return
    output.say(f"nothing runs now: the next `penstock run` or `penstock sinks run` rebuilds {sink}")


def _begin_anew(
    spec: SinkSpec, begin: str, present: str, *, yes: bool, data: Path, file: Path | None
) -> None:
    """Let a sink that cannot be rebuilt begin at another place."""
    from penstock.spark.sinking.manager import check_anew

    check_anew(spec.name, begin)
    what = f"all of {present}" if begin == "beginning" else f"only what comes to {present} from now"
    if not yes and not output.confirm(f"send {what} to {spec.shown}?"):
        output.say("nothing was changed")
        return
    if _tell(spec.name, "rebuild", data, file, begin=begin, anew=begin, paused=False):
        output.say(f"{spec.name} gets {what}")
        return
    output.say(f"nothing runs now: from the next `penstock run` or `penstock sinks run` on "
               f"{spec.name} gets {what}")  # fmt: skip


@app.command("remove")
def remove(
    sink: Name,
    keep_store: Annotated[
        bool, typer.Option("--keep-store", help="Leave the rows in the store.")
    ] = False,
    yes: Yes = False,
    data: Data = SINKS_DATA,
    file: ProjectFile = None,
) -> None:
    """Stop feeding a sink, and take out of its store what it has put there.

    The topic stays. Take its section out of penstock.toml too, or it begins anew at the next start.

    \b
    Examples:
      penstock sinks remove orders
      penstock sinks remove orders --keep-store --yes
    """
    found = project.load(file)
    folder = _folder(data, found)
    spec = named(found, sink)
    what = "stop feeding" if keep_store else "stop feeding, and remove all rows of,"
    if not yes and not output.confirm(f"{what} {spec.shown}?"):
        output.say("nothing was changed; --yes does it without asking")
        raise typer.Exit(output.EXIT_FAILURE)
    if not keep_store:
        must_answer(spec)
    if _tell(sink, "remove", data, file, paused=True):
        _until_stopped(folder, sink)
    if not keep_store:
        from penstock.sinks.webhook import NotForWebhooksError

        with spec.sink() as store:
            with suppress(NotForWebhooksError):
                store.beside(fresh=True).close()
            store.remove()
    if _running(folder) is None:
        folder.forget_sink(sink)
    output.say(f"{sink} is removed; take [sinks.{sink}] out of the project file")


def _until_stopped(folder: SinkFolder, sink: str) -> None:
    deadline = time.monotonic() + _STOP_S
    while time.monotonic() < deadline:
        alive = [
            each
            for each in _running(folder) or ()
            if each["name"] == sink and each["state"] not in {"paused", "stopped", "failed"}
        ]
        if not alive:
            return
        time.sleep(_POLL_S)
    raise PenstockError(f"sink {sink} has not stopped in {_STOP_S:.0f} s", advice="Try again.")


@app.command("dead-letters")
def dead_letters(
    sink: Name,
    letters: Letters = SHOWN_LETTERS,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    file: ProjectFile = None,
    json: AsJson = False,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Show the dead letters of a sink: what it could not read or take, with position and reason.

    They stay in their topic when they were sent back.

    \b
    Examples:
      penstock sinks dead-letters orders
      penstock sinks dead-letters orders -n 100 --json | jq -r '.letters[].message'
    """
    spec = named(project.load(file), sink)
    connection = connect(bootstrap, client)
    show(connection, f"sink {sink}", [spec.letters], _is_of(sink), count=letters, json=json)


@app.command("redrive")
def redrive(
    sink: Name,
    execute: Execute = False,
    to: To = None,
    limit: Limit = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    file: ProjectFile = None,
    json: AsJson = False,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Send the dead letters of a sink back to its topic.

    For when the sink takes them by now: its fields were mended. Without --execute nothing is sent.
    Each letter is sent back once, however often the command is stopped and run again. It stands at
    the end of the topic then: where a later record of the same key has come meanwhile, the older
    row would take its place. `penstock sinks rebuild` keeps the order, if the topic has all.

    \b
    Examples:
      penstock sinks redrive orders                         # what would be sent
      penstock sinks redrive orders --execute
    """
    spec = named(project.load(file), sink)
    connection = connect(bootstrap, client)
    send_back(
        connection, [spec.letters], _is_of(sink), execute=execute, limit=limit, to=to, json=json
    )


def _is_of(sink: str) -> Callable[[LetterKind], bool]:
    return lambda kind: kind.group == f"sink:{sink}"


@app.command("wait")
def wait(
    sink: Name,
    record: Records = [],  # noqa: B006
    timeout: Timeout = "60s",
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    file: ProjectFile = None,
    json: AsJson = False,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Wait until a store has what was written: all that is in the topic now, or certain records.

    So that a program reads what it has written. The status is 1 if it takes too long.

    \b
    Examples:
      penstock sinks wait orders
      penstock sinks wait orders --record 0:1234 --timeout 10s
    """
    found = project.load(file)
    need_sinks(found, [sink])
    spec = named(found, sink)
    wanted = _wanted(spec, record, bootstrap, client)
    must_answer(spec)
    began = time.monotonic()
    with spec.sink() as store:
        reached = store.wait_for(wanted, seconds(timeout, "--timeout"))
    if json:
        output.write_json({"sink": sink, "position": reached.as_json()})
    else:
        output.say(f"{sink} has it, after {time.monotonic() - began:.1f} s: {reached}")


def _wanted(spec: SinkSpec, record: list[str], bootstrap: str, client: list[str]) -> Position:
    from penstock.sinks import Position

    place = _place(bootstrap, client)
    if record:
        return Position(dict(_places(place.resolve(spec.topic), record)))
    connect(bootstrap, client)
    from penstock.spark.sinking.lag import ends_of

    ends = ends_of(place, {spec.topic})
    if not ends:
        raise PenstockError(
            f"topic {spec.topic} does not exist at {place.bootstrap}: there is nothing to wait for",
            advice="`penstock topics list` lists them; --record waits for what is still to come.",
        )
    return Position(ends)


def _places(topic: str, record: list[str]) -> Iterator[tuple[tuple[str, int], int]]:
    for text in record:
        partition, _, offset = text.partition(":")
        if not partition.isdecimal() or not offset.isdecimal():
            raise typer.BadParameter(f"--record: {text!r} is not PARTITION:OFFSET, such as 0:1234")
        # The store is past a record once the next one is to be read.
        yield (topic, int(partition)), int(offset) + 1
