"""`penstock queue`: share groups, their settings, and their dead letters.

Everything is asked for, and changed, by the Kafka protocol, so it works on Apache Kafka as well.
"""

from __future__ import annotations

import sys
from collections import Counter, deque
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli import dead_letters_view as letters_view
from penstock.cli import output
from penstock.cli.kafka import (
    DEFAULT_BOOTSTRAP,
    REQUEST_TIMEOUT_S,
    AsJson,
    Bootstrap,
    BrokerError,
    ClientSettings,
    Connection,
    complete_topics,
    connect,
    tell_deleted,
    translated,
)
from penstock.cli.values import parse_pairs
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.cli.dead_letters import Letter, LetterKind
    from penstock.cli.queue_view import QueueView

app = typer.Typer(
    no_args_is_help=True,
    help="Look at queues, set them up, reset and delete them, and send dead letters back.",
    epilog="A queue is a topic that a share group takes record by record: each record goes to one "
    "consumer, which accepts, releases or rejects it. Many groups, of either kind, may read the "
    "same topic.",
)

_SHOWN_LETTERS: Final = 10

Group = Annotated[str, typer.Argument(metavar="GROUP", help="The share group.")]
DeadLetterTopic = Annotated[
    str,
    typer.Option(
        "--dead-letters",
        metavar="TOPIC",
        help="The topic of the dead letters; without it, the one that the group has.",
    ),
]


# ---- list --------------------------------------------------------------------------------


@app.command("list")
def list_command(
    json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006 - typer copies it
) -> None:
    """List the queues: share groups, and how many records each has not finished.

    \b
    Examples:
      penstock queue list
      penstock queue list --json | jq -r '.[] | select(.lag > 1000) | .group'
    """
    from penstock.cli.group_view import list_share_groups
    from penstock.cli.queue_view import partitions_of

    connection = connect(bootstrap, client)
    rows: list[dict[str, Any]] = []
    for group in sorted(list_share_groups(connection), key=lambda each: each.id):
        try:
            parts = partitions_of(connection, group.id)
        except BrokerError as error:
            if error.kafka_name != "GROUP_ID_NOT_FOUND":
                raise
            parts = ()
        topics = sorted({part.topic for part in parts})
        lag = sum(part.lag or 0 for part in parts)
        rows.append({"group": group.id, "state": group.state, "topics": topics, "lag": lag})
    if json:
        output.write_json(rows)
    elif rows:
        output.print_table(
            ("group", "state", "topics", ">unfinished"),
            (
                (row["group"], row["state"], ", ".join(row["topics"]) or "-", str(row["lag"]))
                for row in rows
            ),
        )
    else:
        output.say("there are no queues; a share consumer with a group.id makes one")


# ---- inspect -----------------------------------------------------------------------------


@app.command("inspect")
def inspect(
    group: Group,
    letters: Annotated[
        int,
        typer.Option("--letters", "-n", min=0, metavar="N",
                     help="Show the last N dead letters; 0 does not read them."),
    ] = _SHOWN_LETTERS,
    dead_letters: DeadLetterTopic = "",
    json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:  # fmt: skip
    """Show a queue: its consumers, how far it is, its settings and its dead letters.

    `start` is the first offset that is not finished, `unfinished` how many records from there on
    are not: waiting, or in the hands of a consumer. Which of the two, and how often they were
    delivered, the protocol does not tell. Dead letters are counted by where they came from and
    why: `rejected` by a consumer, or delivered up to the `limit`.

    \b
    Examples:
      penstock queue inspect emails
      penstock queue inspect emails --letters 100 --json | jq '.letters[].value'
    """
    from penstock.cli.dead_letters import Reader
    from penstock.cli.queue_view import DEAD_LETTER_TOPIC, look

    connection = connect(bootstrap, client)
    view = look(connection, group)
    topic = dead_letters or view.settings.get(DEAD_LETTER_TOPIC, "")
    counts: Counter[LetterKind] = Counter()
    last: deque[Letter] = deque(maxlen=letters)
    if topic and letters and letters_view.exists(connection, topic):
        reader = Reader(connection, topic)
        try:
            for letter in reader.letters():
                if letter.kind.group == group:
                    counts[letter.kind] += 1
                    last.append(letter)
        finally:
            reader.close()
    if json:
        output.write_json(_view_json(view, topic, counts, last))
        return
    _print_view(view)
    if counts:
        letters_view.print_counts(counts, "dead letters", f"dead letters in {topic}")
        letters_view.print_letters(last)
    elif letters:
        output.say(f"no dead letters in {topic}" if topic else "the group has no dead-letter topic")


def _view_json(
    view: QueueView, topic: str, counts: Counter[LetterKind], letters: deque[Letter]
) -> dict[str, Any]:
    return {
        "group": view.group,
        "state": view.state,
        "unfinished": view.lag,
        "settings": dict(view.settings),
        "members": [
            {"id": m.id, "client_id": m.client_id, "host": m.host, "partitions": m.partitions}
            for m in view.members
        ],
        "partitions": [
            {"topic": p.topic, "partition": p.partition, "start": p.start, "unfinished": p.lag}
            for p in view.partitions
        ],
        "dead_letter_topic": topic or None,
        "dead_letters": [
            {"topic": kind.topic, "reason": kind.reason, "count": count}
            for kind, count in sorted(counts.items())
        ],
        "letters": [letters_view.letter_json(letter) for letter in letters],
    }


def _print_view(view: QueueView) -> None:
    from penstock.cli.queue_view import NEW

    if view.state == NEW:
        output.say(f"{view.group}: no consumer has come yet; its settings wait for it")
        output.print_table(("setting", "value"), sorted(view.settings.items()))
        return
    output.print_table(
        ("topic", ">partition", ">start", ">unfinished"),
        ((p.topic, str(p.partition), _number(p.start), _number(p.lag)) for p in view.partitions),
        title=f"{view.group}: {view.state}, {output.count(len(view.members), 'consumer')}",
    )
    if view.members:
        output.print_table(
            ("consumer", "client", "host", ">partitions"),
            ((m.id, m.client_id, m.host, str(m.partitions)) for m in view.members),
        )
    if view.settings:
        output.print_table(("setting", "value"), sorted(view.settings.items()))


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


# ---- alter -------------------------------------------------------------------------------


@app.command("alter")
def alter(
    group: Group,
    config: Annotated[
        list[str],
        typer.Option("--config", "-c", metavar="NAME=VALUE",
                     help="A setting to set. May be repeated."),
    ] = [],  # noqa: B006
    unset: Annotated[
        list[str],
        typer.Option("--unset", metavar="NAME", help="A setting to take back. May be repeated."),
    ] = [],  # noqa: B006
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:  # fmt: skip
    """Change a queue's settings; the group need not exist yet.

    \b
    Examples:
      penstock queue alter emails -c share.auto.offset.reset=earliest
      penstock queue alter emails -c share.delivery.count.limit=3
      penstock queue alter emails -c errors.deadletterqueue.topic.name=dlq.emails
      penstock queue alter orders -c share.ordered.by.key=true
    """
    from penstock.cli.queue_view import change_settings, check_names, kind_of

    changes: dict[str, str | None] = dict(parse_pairs(config))
    changes |= dict.fromkeys(unset)
    if not changes:
        raise typer.BadParameter("nothing to change; give --config or --unset")
    connection = connect(bootstrap, client)
    check_names(connection, group, changes)
    change_settings(connection, group, changes)
    output.say(f"changed {group}: {', '.join(sorted(changes))}")
    kind = kind_of(connection, group)
    # A group of the newer protocol has settings of its own, that begin so.
    if kind not in (None, "share") and not (
        kind == "consumer" and all(name.startswith("consumer.") for name in changes)
    ):
        output.warn(f"{group} is a {kind} group, not a queue: it makes no use of such settings")


# ---- reset -------------------------------------------------------------------------------


@app.command("reset")
def reset(
    group: Group,
    to_earliest: Annotated[
        bool, typer.Option("--to-earliest", help="To the first record that is there.")
    ] = False,
    to_latest: Annotated[
        bool, typer.Option("--to-latest", help="To the end: only new records are delivered.")
    ] = False,
    to_offset: Annotated[
        int | None, typer.Option("--to-offset", min=0, metavar="N", help="To this offset.")
    ] = None,
    to_time: Annotated[
        str | None,
        typer.Option("--to-time", metavar="TIME", help="To the first record at or after a time: "
                     "ISO, milliseconds since 1970, or such as '10m ago'."),
    ] = None,
    topic: Annotated[
        list[str],
        typer.Option("--topic", "-t", metavar="TOPIC[:N,...]", help="Only this topic, or these "
                     "partitions of it. May be repeated; without it all that the group has "
                     "begun.", autocompletion=complete_topics),
    ] = [],  # noqa: B006
    execute: Annotated[
        bool, typer.Option("--execute", help="Do it. Without this the plan is only shown.")
    ] = False,
    json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:  # fmt: skip
    """Have a queue begin anew at an offset: deliver finished records again, or skip others.

    Shows the plan and changes nothing, until it is given --execute. The group's consumers must be
    stopped for that. What it had finished, and how often records were delivered, is forgotten.
    Where a group begins that nobody has used yet, its share.auto.offset.reset says.

    \b
    Examples:
      penstock queue reset emails --to-earliest
      penstock queue reset emails --to-time '1h ago' --topic outbox --execute
    """
    from penstock.cli.group_reset import parse_topics, plan
    from penstock.cli.groups import chosen_partitions, one_goal, places_of, show_plan
    from penstock.cli.queue_view import move, partitions_of

    goal = one_goal(to_earliest, to_latest, to_offset, to_time, None, None)
    wanted = parse_topics(topic)
    connection = connect(bootstrap, client)
    begun = {
        (part.topic, part.partition): part.start
        for part in partitions_of(connection, group)
        if part.start is not None
    }
    chosen = chosen_partitions(connection, wanted) if wanted else sorted(begun)
    if not chosen:
        raise PenstockError(
            f"{group} has not begun anywhere", advice="Name the topics with --topic."
        )
    steps = plan(goal, places_of(connection, chosen, begun, goal, named=bool(wanted)))
    if execute:
        move(connection, group, steps)
    show_plan(group, steps, executed=execute, json=json)
    if execute:
        output.say(f"{group}: begins anew in {output.count(len(steps), 'partition')}")
    else:
        output.say("nothing was changed; --execute does it")


# ---- delete ------------------------------------------------------------------------------


@app.command("delete")
def delete(
    group: Group,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Forget what a queue has finished, for good; records and dead letters are not touched.

    Asks first. A queue with consumers cannot be deleted. Its settings stay, for consumers that come
    later under the same name; `alter --unset` takes them back.

    \b
    Examples:
      penstock queue delete emails
      penstock queue delete emails --yes
    """
    from penstock.cli.queue_view import kind_of, partitions_of

    connection = connect(bootstrap, client)
    parts = partitions_of(connection, group)
    if kind_of(connection, group) not in (None, "share"):
        raise PenstockError(f"{group} is no queue", advice="`penstock groups delete` deletes it.")
    if not yes:
        if not sys.stdin.isatty():
            raise typer.BadParameter("there is no terminal to ask at: pass --yes to delete")
        output.say(f"{group}: a queue in {output.count(len(parts), 'partition')}")
        if not output.confirm("Delete it for good?"):
            output.say("nothing was deleted")
            raise typer.Exit(output.EXIT_FAILURE)
    with translated("deleting"):
        futures = connection.admin().delete_consumer_groups(
            [group], request_timeout=REQUEST_TIMEOUT_S
        )
    tell_deleted([group], futures)


# ---- redrive -----------------------------------------------------------------------------


@app.command("redrive")
def redrive(
    group: Group,
    execute: Annotated[
        bool, typer.Option("--execute", help="Do it. Without this, only say what would be done.")
    ] = False,
    reason: Annotated[
        list[str],
        typer.Option("--reason", metavar="REASON",
                     help="Only letters that died for this: rejected, limit or other. May be "
                     "repeated."),
    ] = [],  # noqa: B006
    source: Annotated[
        list[str],
        typer.Option("--from", metavar="TOPIC",
                     help="Only letters from this topic. May be repeated."),
    ] = [],  # noqa: B006
    to: Annotated[
        str | None,
        typer.Option("--to", metavar="TOPIC",
                     help="Send them there, instead of to where they came from."),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="N", help="Send at most N.")
    ] = None,
    dead_letters: DeadLetterTopic = "",
    json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:  # fmt: skip
    """Send dead letters back to the topics they came from.

    Without --execute nothing is sent. Each letter is sent back once: how far it has come is kept
    on the broker, and noted in the same transaction as the records are sent, so the command can
    be stopped and run again. A record is sent back with its key, value and headers, to the
    partition it was in; every group that reads the topic gets it.

    \b
    Examples:
      penstock queue redrive emails                            # what would be sent
      penstock queue redrive emails --reason limit --execute
    """
    from penstock.cli import dead_letters as dead

    unknown = sorted(set(reason) - set(dead.REASONS))
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is no reason; use {', '.join(dead.REASONS)}")
    connection = connect(bootstrap, client)
    topic = dead_letters or _topic_of_letters(connection, group)
    if not letters_view.exists(connection, topic):
        raise PenstockError(f"there is no topic {topic!r}", advice="No record has died yet.")

    def wanted(kind: LetterKind) -> bool:
        return (
            kind.group == group
            and (not reason or kind.reason in reason)
            and (not source or kind.topic in source)
        )

    outcome = dead.redrive(connection, topic, wanted, execute=execute, limit=limit, target=to)
    letters_view.tell(outcome, execute=execute, json=json)


def _topic_of_letters(connection: Connection, group: str) -> str:
    from penstock.cli.dead_letters import no_topic
    from penstock.cli.queue_view import DEAD_LETTER_TOPIC, kind_of, no_such_queue, settings_of

    settings = settings_of(connection, group)
    if not settings and kind_of(connection, group) is None:
        raise no_such_queue(group)
    topic = settings.get(DEAD_LETTER_TOPIC, "")
    if not topic:
        raise no_topic(group)
    return topic
