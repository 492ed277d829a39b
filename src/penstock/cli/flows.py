"""`penstock flows`: look at flows and command them, in the process that runs them.

Works on the data folder of `penstock run`, on the same machine. When nothing runs, it tells what
was written down when something last did.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

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
from penstock.cli.kafka import DEFAULT_BOOTSTRAP, AsJson, Bootstrap, ClientSettings, connect
from penstock.cli.run import DEFAULT_DATA, Data, need_spark
from penstock.cli.watch import Watch
from penstock.cli.watch import watch as repeat
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.cli.dead_letters import LetterKind
    from penstock.spark.flows.folder import Folder, Record
    from penstock.spark.state.layout import Layout

app = typer.Typer(
    no_args_is_help=True,
    help="List, describe, stop, restart and rebuild the flows of `penstock run`.",
    epilog="A flow is a function from inputs to outputs that `penstock run` keeps running; what "
    "it has written can be built anew from the log at any time, with `penstock flows reset`.",
)

_RESTING: Final = (
    "flow", "last state", "since", ">rows in", ">rows out", ">late", ">dead", "error",
)  # fmt: skip

Name = Annotated[str, typer.Argument(metavar="FLOW", help="The flow.")]


def _folder(data: Path) -> Folder:
    need_spark()
    from penstock.spark.flows.folder import Folder

    return Folder(data)


def _running(folder: Folder) -> list[dict[str, Any]] | None:
    """The flows as the process that runs them sees them; None if none does."""
    from penstock.spark.flows.control import ask
    from penstock.spark.flows.errors import NotRunningError

    try:
        found: list[dict[str, Any]] = ask(folder, {"do": "list"})
    except NotRunningError:
        return None
    return found


@app.command("list")
def list_command(data: Data = DEFAULT_DATA, watch: Watch = False, json: AsJson = False) -> None:
    """List the flows: those that run with how they get on, and others that have run before.

    \b
    Examples:
      penstock flows list
      penstock flows list --watch
      penstock flows list --json | jq -r '.[] | select(.state == "failed") | .name'
    """
    folder = _folder(data)
    nothing = f"no flows have run with {data}; `penstock run FILE` runs those of a file"
    if watch:
        repeat(lambda: _seen(folder), lambda seen: _rendered(seen, nothing), _listed, json=json)
    seen = _seen(folder)
    if json:
        output.write_json(_listed(seen))
    elif seen.running or seen.resting:
        output.print_rich(_rendered(seen, nothing))
    else:
        output.say(nothing)


class _Seen(NamedTuple):
    """The flows of a folder: those that run, and those that do not."""

    running: list[dict[str, Any]]
    resting: list[dict[str, Any]]
    # When the latter were last written down, and what is wrong with them, in words.
    since: list[str]
    errors: list[str]


def _seen(folder: Folder) -> _Seen:
    running = _running(folder) or []
    known = {each["name"] for each in running}
    resting = [each for each in folder.records() if each.name not in known]
    return _Seen(
        running,
        [_as_json(each, folder) for each in resting],
        [_when(each) for each in resting],
        [_error(folder, each) for each in resting],
    )


def _listed(seen: _Seen) -> list[dict[str, Any]]:
    return [*seen.running, *seen.resting]


def _rendered(seen: _Seen, nothing: str) -> RenderableType:
    from rich.console import Group
    from rich.text import Text

    from penstock.cli.run_view import coloured, rendered

    parts = [rendered(seen.running)] if seen.running else []
    if seen.resting:
        rows = (
            (each["name"], each["state"], since, *_counted(each), error)
            for each, since, error in zip(seen.resting, seen.since, seen.errors, strict=True)
        )
        parts.append(coloured(output.table(_RESTING, rows), seen.resting))
    return Group(*parts or [Text(nothing)])


@app.command("describe")
def describe(flow: Name, data: Data = DEFAULT_DATA, json: AsJson = False) -> None:
    """Show a flow: what it reads and writes, how it gets on, what it keeps, what went wrong.

    `generation` counts how often its outputs were built: the topics of the second have `.v2`
    behind their names, and so on. `operators` are the parts of Spark's plan that keep state.

    \b
    Examples:
      penstock flows describe enriched
      penstock flows describe enriched --json | jq .outputs
    """
    folder = _folder(data)
    record = folder.record(flow)
    running = [each for each in _running(folder) or () if each["name"] == flow]
    value = {**_as_json(record, folder), "running": running}
    if json:
        output.write_json(value)
        return
    from penstock.cli.run_view import rendered

    made_from = record.fingerprint(record.generation)
    lines: list[tuple[str, str]] = [
        ("flow", record.name),
        ("declared", record.where),
        ("reads", "\n".join(record.inputs)),
        ("writes", "\n".join(record.outputs)),
        ("broker", record.bootstrap),
        ("generation", str(record.generation)),
        ("checkpoint", folder.checkpoint(flow, record.generation)),
        ("operators", "\n".join(made_from.operators) if made_from is not None else ""),
        ("being rebuilt", "\n".join((f"as generation {record.rebuilding}", *_rebuilt(record)))
         if record.rebuilding else ""),
    ]  # fmt: skip
    if not running:
        lines += [("last state", f"{_state(record)}, {_when(record)}"), ("error", record.error),
                  ("remedy", record.advice)]  # fmt: skip
    output.print_table(("", ""), ((name, text) for name, text in lines if text))
    if running:
        output.print_rich(rendered(running))


@app.command("stop")
def stop(flow: Name, data: Data = DEFAULT_DATA) -> None:
    """Stop a flow after its micro-batch; the others go on.

    `penstock flows restart` starts it again, and so does the next `penstock run`.

    \b
    Examples:
      penstock flows stop enriched
    """
    _command(data, {"do": "stop", "flow": flow})
    output.say(f"{flow} stops after its micro-batch")


@app.command("restart")
def restart(flow: Name, data: Data = DEFAULT_DATA) -> None:
    """Start a flow anew: one that runs, that was stopped, or that has failed.

    It goes on where it was. The file is not read again: after a change of the code, stop
    `penstock run` and start it again.

    \b
    Examples:
      penstock flows restart enriched
    """
    _command(data, {"do": "restart", "flow": flow})
    output.say(f"{flow} is started anew, with the code that `penstock run` has read")


@app.command("reset")
def reset(
    flow: Name,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    data: Data = DEFAULT_DATA,
) -> None:
    """Build the outputs of a flow anew from the log, beside the old ones, then switch to the new.

    All inputs are read again from their start, by the flow as it is now, into topics of a new
    generation: NAME.v2 after NAME, then NAME.v3. Meanwhile the present generation goes on. When
    the new one has caught up it takes over. Flows, views and sinks that read the outputs are then
    rebuilt from the new ones, in the same way, by themselves. Programs of yours that read the old
    topic must be pointed at the new one: `penstock flows describe` names it. The old topics stay
    as they are then; `penstock flows cleanup` deletes them.

    Only what is still in the log can be read again: inputs with a short retention give a shorter
    output.

    \b
    Examples:
      penstock flows reset enriched
      penstock flows reset enriched --yes
    """
    folder = _folder(data)
    from penstock.spark.flows.control import ask
    from penstock.spark.flows.errors import NotRunningError

    record = folder.record(flow)
    followers = _followers(folder, flow)
    if followers:
        output.say(f"rebuilt after it, from its new outputs: {', '.join(followers)}")
    question = f"read all inputs of {flow} again, into generation {record.next_generation()}?"
    if not yes and not output.confirm(question):
        output.say("nothing was changed; --yes does it without asking")
        raise typer.Exit(output.EXIT_FAILURE)
    try:
        told = ask(folder, {"do": "reset", "flow": flow})
        output.say(f"{flow} is being rebuilt as generation {told['generation']}")
    except NotRunningError:
        generation = record.next_generation()
        folder.write(replace(record, rebuilding=generation))
        output.say(f"nothing runs now: the next `penstock run` rebuilds {flow}, as generation "
                   f"{generation}")  # fmt: skip


def _followers(folder: Folder, flow: str) -> list[str]:
    """Who reads what a flow writes, as people call it."""
    from penstock.cli.sinks_file import declared
    from penstock.spark.flows.cleanup import readers_of

    flows = readers_of(folder, flow)
    names = {topic for name in (flow, *flows) for topic in folder.record(name).topics}
    sinks = [each for each in declared(project.load()) if each.topic in names]
    return [*(f"flow {name}" for name in flows), *(f"sink {each.name}" for each in sinks)]


@app.command("cleanup")
def cleanup(
    flow: Annotated[
        str, typer.Argument(metavar="[FLOW]", help="Only what this flow has left.")
    ] = "",
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Delete it; without this it is only listed.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="Also topics that consumer groups of yours have read."),
    ] = False,
    data: Data = DEFAULT_DATA,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    json: AsJson = False,
    client: ClientSettings = [],  # noqa: B006 - typer copies it
) -> None:
    """List what rebuilt flows have left behind: topics of old versions, checkpoints. Delete it.

    After `penstock flows reset` the old output topics stay, with those for late records and dead
    letters beside them. What a flow or a sink still reads or writes is kept, and so is what a
    consumer group has read, unless --force is given.

    \b
    Examples:
      penstock flows cleanup
      penstock flows cleanup enriched --yes
      penstock flows cleanup --json | jq -r '.[] | select(.kept == "") | .name'
    """
    from penstock.cli import flows_cleanup

    folder = _folder(data)
    brokers = connect(bootstrap, client)
    found = flows_cleanup.found(folder, brokers, flow, force=force)
    gone = [each for each in found if not each.kept]
    if yes:
        flows_cleanup.delete(folder, brokers, gone)
    if json:
        output.write_json([asdict(each) for each in found])
        return
    if not found:
        output.say("there is nothing to clean up")
        return
    rows = ((each.flow, f"v{each.generation}", each.kind, each.name,
             f"kept: {each.kept}" if each.kept else "deleted" if yes else "")
            for each in found)  # fmt: skip
    output.print_table(("flow", "version", "what", "name", ""), rows)
    if not yes and gone:
        output.say(f"nothing was deleted; --yes deletes {output.count(len(gone), 'item')}")


@app.command("state")
def state(
    flow: Name,
    operator: Annotated[
        str, typer.Option("--operator", metavar="NAME", help="Show the rows of this operator.")
    ] = "",
    key: Annotated[
        list[str] | None,
        typer.Option("--key", metavar="COLUMN=VALUE", help="Only rows that have this value."),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", min=1, metavar="N", help="The most rows to show.")
    ] = 20,
    data: Data = DEFAULT_DATA,
    json: AsJson = False,
) -> None:
    """Show what a flow keeps: its operators by shard, or the rows of one operator.

    Works while the flow runs, too: what is shown is then the newest that was written.

    \b
    Examples:
      penstock flows state spending
      penstock flows state spending --operator window-1 --key customer=5
    """
    found = _layout(_folder(data), flow)
    from penstock.spark.state import inspecting

    if not operator:
        shards = [asdict(each) for each in inspecting.summary(found)]
        if json:
            output.write_json({"flow": flow, "shards": found.shards, "state": shards})
            return
        columns = ("operator", "shard", "version", "rows", "bytes")
        output.print_table(columns, ([str(each[name]) for name in columns] for each in shards))
        return
    wanted = {}
    for each in key or ():
        name, equals, value = each.partition("=")
        if not equals:
            raise ConfigError(f"--key {each} is not COLUMN=VALUE")
        wanted[name] = value
    rows = list(inspecting.chosen(inspecting.tables(found, operator), wanted, limit))
    if json:
        output.write_json([{name: _plain(value) for name, value in row.items()} for row in rows])
        return
    names = list(dict.fromkeys(name for row in rows for name in row))
    output.print_table(
        names,
        (["" if row.get(name) is None else str(row[name]) for name in names] for row in rows),
    )
    if len(rows) == limit:
        output.say(f"the first {limit} rows; --limit shows more")


@app.command("dead-letters")
def dead_letters(
    flow: Name,
    letters: Letters = SHOWN_LETTERS,
    data: Data = DEFAULT_DATA,
    json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Show the dead letters of a flow: records that it could not read, with position and reason.

    They stay in their topic when they were sent back.

    \b
    Examples:
      penstock flows dead-letters enriched
      penstock flows dead-letters enriched -n 100 --json | jq -r '.letters[].message'
    """
    folder = _folder(data)
    connection = connect(bootstrap, client)
    topics = _dead_letter_topics(folder, flow)
    show(connection, f"flow {flow}", topics, _is_of(flow), count=letters, json=json)


@app.command("redrive")
def redrive(
    flow: Name,
    execute: Execute = False,
    to: To = None,
    limit: Limit = None,
    data: Data = DEFAULT_DATA,
    json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Send the dead letters of a flow back to the topics that they came from.

    For when the flow reads them by now: its schema was mended. Without --execute nothing is sent.
    Each letter is sent back once, however often the command is stopped and run again. It stands at
    the end of its topic then, behind records that were written after it, and whoever else reads
    the topic gets it too; --to sends it elsewhere.

    \b
    Examples:
      penstock flows redrive enriched                       # what would be sent
      penstock flows redrive enriched --execute
    """
    folder = _folder(data)
    connection = connect(bootstrap, client)
    topics = _dead_letter_topics(folder, flow)
    send_back(connection, topics, _is_of(flow), execute=execute, limit=limit, to=to, json=json)


def _dead_letter_topics(folder: Folder, flow: str) -> tuple[str, ...]:
    topics = folder.record(flow).dead_letters
    if not topics:
        raise PenstockError(
            f"flow {flow!r} has no topic for dead letters",
            advice="One of a stream is TOPIC.dead, unless dead_letters= says otherwise; a flow "
            "that ran last with an older version of Penstock has to run once.",
        )
    return topics


def _is_of(flow: str) -> Callable[[LetterKind], bool]:
    # Letters of older versions do not say whose they are.
    owners = {f"flow:{flow}", ""}
    return lambda kind: kind.group in owners


@app.command("rescale")
def rescale(
    flow: Name,
    shards: Annotated[
        int, typer.Option("--shards", min=1, max=4096, metavar="N", help="How many; at most 4096.")
    ],
    data: Data = DEFAULT_DATA,
) -> None:
    """Divide what a flow keeps into another number of shards, while `penstock run` is stopped.

    A shard is the part of the keys that one task works on, so more of them use more cores. The
    state is written anew beside the old, and counts from the moment when all of it is there. Some
    operators keep things that only they can divide: this is said, and nothing is changed; then
    change shards= of the flow and rebuild it, with `penstock flows reset`.

    \b
    Examples:
      penstock flows rescale spending --shards 16
    """
    folder = _folder(data)
    with folder.locked():
        found = _layout(folder, flow)
        from penstock.spark import session
        from penstock.spark.state.rescaling import rescale as rewrite

        spark = session(name="penstock rescale", master="local[2]")
        try:
            done = rewrite(spark, found.checkpoint, shards)
        finally:
            spark.stop()
    output.say(f"{flow}: {done.rows:,} rows of {done.operators} operators are in {shards} shards, "
               f"they were in {found.shards}")  # fmt: skip


def _layout(folder: Folder, flow: str) -> Layout:
    from penstock.spark.state import layout
    from penstock.spark.state.files import StateError

    record = folder.record(flow)
    found = layout.find(folder.checkpoint(flow, record.generation))
    if found is None:
        raise StateError(
            f"flow {flow!r} keeps no state of Penstock's operators",
            advice="`penstock flows describe` shows what Spark keeps for it.",
        )
    return found


def _plain(value: Any) -> Any:
    """A value as JSON can say it."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return str(value)


def _command(data: Path, question: Mapping[str, Any]) -> None:
    folder = _folder(data)
    from penstock.spark.flows.control import ask

    # A wrong name is told before that nothing runs.
    folder.record(str(question["flow"]))
    ask(folder, dict(question))


def _state(record: Record) -> str:
    """What is known of a flow that does not run."""
    # Whoever wrote this was killed before it could write more.
    alive = {"starting", "running", "waiting", "stopping"}
    return "killed" if record.state in alive else record.state


def _error(folder: Folder, record: Record) -> str:
    """What is wrong with a flow that rests, or what the next run does to it."""
    if record.error:
        return record.error
    if record.rebuilding:
        return f"the next `penstock run` rebuilds it, as generation {record.rebuilding}"
    behind = ", ".join(map(str, folder.behind(record)))
    return f"it has read {behind}: the next `penstock run` rebuilds it from there" if behind else ""


def _when(record: Record) -> str:
    if not record.updated_ms:
        return "-"
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.updated_ms / 1000))


def _rebuilt(record: Record) -> list[str]:
    """The topics that are being built, which take the place of the present ones."""
    from penstock.spark.flows.versions import physical

    present = f".v{record.generation}" if record.generation > 1 else ""
    return [
        physical(each.removesuffix(present), record.rebuilding)
        for each in record.outputs
        if record.rebuilding and each.startswith("topic ")
    ]


def _counted(value: Mapping[str, Any]) -> tuple[str, ...]:
    counts = value["counts"]
    names = ("rows_in", "rows_out", "late_rows", "dead_letters")
    return tuple(f"{counts[name]:,}" if name in counts else "-" for name in names)


def _as_json(record: Record, folder: Folder) -> dict[str, Any]:
    made_from = record.fingerprint(record.generation)
    return {
        "name": record.name,
        "state": _state(record),
        "where": record.where,
        "file": record.file,
        "bootstrap": record.bootstrap,
        "inputs": list(record.inputs),
        "outputs": list(record.outputs),
        "generation": record.generation,
        "rebuilding": record.rebuilding,
        "rebuilding_outputs": _rebuilt(record),
        "operators": list(made_from.operators) if made_from is not None else [],
        "error": record.error,
        "advice": record.advice,
        "updated_ms": record.updated_ms,
        "counts": folder.counts(record.name, record.generation),
    }
