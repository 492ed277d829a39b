"""`penstock groups`: who reads what, how far behind, and where to go on reading.

Everything is asked for, and changed, by the Kafka protocol, so it works on Apache Kafka as well.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Final

import typer

from penstock.cli import output
from penstock.cli.group_reset import Goal, Place, Step, Wanted, parse_topics, plan
from penstock.cli.kafka import (
    DEFAULT_BOOTSTRAP,
    REQUEST_TIMEOUT_S,
    AsJson,
    Bootstrap,
    BrokerError,
    ClientSettings,
    Connection,
    broker_error,
    complete_groups,
    complete_topics,
    connect,
    result_of,
    tell_deleted,
    translated,
)
from penstock.cli.values import parse_duration_ms, parse_timestamp
from penstock.cli.watch import PAUSE_S
from penstock.cli.watch import watch as repeat

if TYPE_CHECKING:
    from penstock.cli.group_view import Collector, GroupView

app = typer.Typer(
    no_args_is_help=True,
    help="List, describe, reset and delete groups of consumers.",
    epilog="A group is consumers that share the work under one name: each partition is read by "
    "one of them. The broker keeps how far the group has come as its committed offset: the next "
    "record that it will read.",
)

EMPTY_STATES: Final = ("empty", "dead")
_MEMBERS_TOLD: Final = 5
# What a client is told that knows only the broker of before a restart; and what it says itself
# if it goes on waiting for the connection of before.
OUTDATED: Final = ("FENCED_LEADER_EPOCH", "UNKNOWN_LEADER_EPOCH", "_TIMED_OUT")

Group = Annotated[
    str, typer.Argument(metavar="GROUP", help="The group.", autocompletion=complete_groups)
]
Groups = Annotated[
    list[str],
    typer.Argument(metavar="GROUP", help="One or more groups.", autocompletion=complete_groups),
]


# ---- list --------------------------------------------------------------------------------


@app.command("list")
def list_command(
    every: Annotated[
        bool,
        typer.Option("--all", "-a", help="Also groups in which commands keep their progress."),
    ] = False,
    json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006 - typer copies it
) -> None:
    """List the groups, with their kind and state.

    `classic` and `consumer` groups read a topic as a log, by the older and the newer protocol;
    `streams` groups are Kafka Streams applications; `share` groups take a topic as a queue (see
    `penstock queue`). An `empty` group has no members but still has its offsets: its consumers go
    on there when they come back.

    `penstock queue redrive` and `penstock migrate` keep how far they have come as offsets of groups
    of their own. Nobody reads with those, and they are shown only with --all.

    \b
    Examples:
      penstock groups list
      penstock groups list --json | jq -r '.[].group'
    """
    from penstock.broker.lag.names import keeps_progress
    from penstock.cli.group_view import list_groups

    groups = [
        group
        for group in list_groups(connect(bootstrap, client))
        if every or not keeps_progress(group.id)
    ]
    if json:
        rows = [{"group": each.id, "kind": each.kind, "state": each.state} for each in groups]
        output.write_json(rows)
    elif groups:
        output.print_table(
            ("group", "kind", "state"), ((each.id, each.kind, each.state) for each in groups)
        )
    else:
        output.say("there are no groups; a consumer with a group.id makes one")


# ---- describe ----------------------------------------------------------------------------


@app.command("describe")
def describe(
    groups: Groups,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show it live, until Ctrl-C.")
    ] = False,
    sample: Annotated[
        str,
        typer.Option("--sample", "-s", metavar="DURATION", help="Measure rates over this long, "
                     "such as 500ms or 10s; with --watch, the pause between looks. 0 measures "
                     "none."),
    ] = "2s",
    json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:  # fmt: skip
    """Show a group: its members, and how far behind it is in each partition.

    `committed` is the next offset that the group will read, `end` the offset of the next record
    that is written. Behind by: the records still to be read, about how many bytes they are, and
    how old the first of them is. `loss in` is how long it takes, at the present rates of writing
    and reading, until retention may remove records that the group has not read: a dash means that
    this does not happen, a question mark that it could not be found out. `missed`, where there are
    any, counts records that are gone already: the committed offset lies before the start of the
    log.

    Rates are measured while the command runs. A group that commits more rarely than --sample
    seems to stand still, so `loss in` is rather too short than too long.

    \b
    Examples:
      penstock groups describe billing
      penstock groups describe billing --watch
      penstock groups describe billing --json --sample 10s | jq '.[].partitions[].records'
    """
    from penstock.cli.group_show import as_json, rendered
    from penstock.cli.group_view import Collector

    pause_s = _pause_s(sample)
    collector = Collector(connect(bootstrap, client))
    try:
        if watch:
            eye = _Eye(collector, groups, lambda: connect(bootstrap, client))
            repeat(
                eye.look,
                rendered,
                lambda views: [as_json(view) for view in views],
                json=json,
                pause_s=pause_s or PAUSE_S,
            )
        else:
            if pause_s:
                collector.sample(groups)
                time.sleep(pause_s)
            views = [collector.collect(group) for group in groups]
            if json:
                output.write_json([as_json(view) for view in views])
            else:
                output.print_rich(rendered(views))
    except BrokenPipeError:
        output.silence_stdout()
    finally:
        collector.close()


def _pause_s(text: str) -> float:
    duration_ms = 0 if text.strip() == "0" else parse_duration_ms(text)
    if duration_ms is None:
        raise typer.BadParameter(f"{text!r} is not a duration such as 2s or 500ms")
    return duration_ms / 1000


class _Eye:
    """Looks at groups again and again, whatever happens to the broker meanwhile."""

    def __init__(
        self, collector: Collector, groups: Sequence[str], connect_: Callable[[], Connection]
    ) -> None:
        self._collector = collector
        self._groups = groups
        self._connect = connect_
        # After an error: a client that was there before may not get over a restart.
        self._wants_new = False

    def look(self) -> list[GroupView]:
        """The groups now; PenstockError if they cannot be asked about."""
        wants_new, self._wants_new = self._wants_new, True
        # Says at once if nothing listens: a client would wait for that in silence.
        fresh = self._connect()
        if wants_new:
            self._collector.renew(fresh)
        try:
            views = self._collect()
        except BrokerError as error:
            if error.kafka_name not in OUTDATED:
                raise
            self._collector.renew(self._connect())
            views = self._collect()
        self._wants_new = False
        return views

    def _collect(self) -> list[GroupView]:
        return [self._collector.collect(group) for group in self._groups]


# ---- reset -------------------------------------------------------------------------------


@app.command("reset")
def reset(
    group: Group,
    to_earliest: Annotated[
        bool, typer.Option("--to-earliest", help="To the first record that is there.")
    ] = False,
    to_latest: Annotated[
        bool, typer.Option("--to-latest", help="To the end: only new records are read.")
    ] = False,
    to_offset: Annotated[
        int | None, typer.Option("--to-offset", min=0, metavar="N", help="To this offset.")
    ] = None,
    to_time: Annotated[
        str | None,
        typer.Option("--to-time", metavar="TIME", help="To the first record at or after a time: "
                     "ISO, milliseconds since 1970, or such as '10m ago'."),
    ] = None,
    by_duration: Annotated[
        str | None,
        typer.Option("--by-duration", metavar="DURATION", help="To what was written this long "
                     "ago, such as 2h30m."),
    ] = None,
    shift_by: Annotated[
        int | None,
        typer.Option("--shift-by", metavar="N", help="Forward by N records, or back with -N."),
    ] = None,
    topic: Annotated[
        list[str],
        typer.Option("--topic", "-t", metavar="TOPIC[:N,...]", help="Only this topic, or these "
                     "partitions of it. May be repeated; without it all that the group has "
                     "offsets for.", autocompletion=complete_topics),
    ] = [],  # noqa: B006
    execute: Annotated[
        bool, typer.Option("--execute", help="Do it. Without this the plan is only shown.")
    ] = False,
    json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:  # fmt: skip
    """Have a group go on reading elsewhere: replay what it has read, or skip what it has not.

    Shows the plan and changes nothing, until it is given --execute. The group's consumers must be
    stopped for that, or they would go on where they are and overwrite it. An offset that is not in
    the log becomes the nearest one that is. A group that does not exist yet is made, if topics are
    named.

    \b
    Examples:
      penstock groups reset billing --to-earliest
      penstock groups reset billing --to-time 2026-03-01T12:00:00Z --topic orders --execute
      penstock groups reset billing --by-duration 2h --topic orders:0,2
      penstock groups reset billing --shift-by -100 --execute
    """
    goal = one_goal(to_earliest, to_latest, to_offset, to_time, by_duration, shift_by)
    wanted = parse_topics(topic)
    connection = connect(bootstrap, client)
    view = _group_to_reset(connection, group, wanted)
    busy = view is not None and view.state not in EMPTY_STATES
    if busy and execute:
        assert view is not None
        raise _has_members(view)
    steps = plan(goal, _places(connection, group, wanted, goal))
    if execute:
        _apply(connection, group, steps)
    show_plan(group, steps, executed=execute, json=json)
    if not execute:
        if busy:
            output.warn(f"{group} has members: they must be stopped before it can be done")
        output.say("nothing was changed; --execute does it")
    else:
        output.say(f"{group}: {output.count(len(steps), 'offset')} set")


def one_goal(
    to_earliest: bool,
    to_latest: bool,
    to_offset: int | None,
    to_time: str | None,
    by_duration: str | None,
    shift_by: int | None,
) -> Goal:
    """The one goal that was given; it is a wrong use to give none or several."""
    now_ms = int(time.time() * 1000)
    goals: list[Goal] = []
    if to_earliest:
        goals.append(Goal("earliest"))
    if to_latest:
        goals.append(Goal("latest"))
    if to_offset is not None:
        goals.append(Goal("offset", to_offset))
    if to_time is not None:
        goals.append(Goal("time", parse_timestamp(to_time, now_ms)))
    if by_duration is not None:
        duration_ms = parse_duration_ms(by_duration)
        if duration_ms is None:
            raise typer.BadParameter(f"{by_duration!r} is not a duration such as 2h30m")
        goals.append(Goal("time", max(0, now_ms - duration_ms)))
    if shift_by is not None:
        goals.append(Goal("shift", shift_by))
    if len(goals) != 1:
        raise typer.BadParameter(
            "say where to, once: --to-earliest, --to-latest, --to-offset, --to-time, "
            "--by-duration or --shift-by"
        )
    return goals[0]


def _group_to_reset(
    connection: Connection, group: str, wanted: Sequence[Wanted]
) -> GroupView | None:
    """The group; None if it is new, which makes sense only for topics that are named."""
    from penstock.cli.group_view import describe_group

    try:
        return describe_group(connection, group)
    except BrokerError as error:
        if error.kafka_name == "GROUP_ID_NOT_FOUND" and wanted:
            output.say(f"{group} is a new group")
            return None
        raise


def _has_members(view: GroupView) -> BrokerError:
    clients = sorted({member.client_id or member.id for member in view.members})
    told = ", ".join(clients[:_MEMBERS_TOLD]) + (", ..." if len(clients) > _MEMBERS_TOLD else "")
    return BrokerError(
        f"{view.id} has {output.count(len(view.members), 'member')} ({told}): they would go on "
        "where they are",
        advice="Stop its consumers first; a dead one is forgotten after its session timeout.",
    )


def _places(
    connection: Connection, group: str, wanted: Sequence[Wanted], goal: Goal
) -> list[Place]:
    """The partitions that are meant, with all that the plan needs."""
    from penstock.cli.group_view import committed_offsets

    committed = committed_offsets(connection, group)
    chosen = sorted(committed) if not wanted else chosen_partitions(connection, wanted)
    if not chosen:
        raise BrokerError(
            f"{group} has no offsets", advice="Name the topics with --topic to give it some."
        )
    return places_of(connection, chosen, committed, goal, named=bool(wanted))


def places_of(
    connection: Connection,
    chosen: Sequence[tuple[str, int]],
    committed: Mapping[tuple[str, int], int],
    goal: Goal,
    *,
    named: bool,
) -> list[Place]:
    """Partitions with all that a plan needs; one that is gone is an error if it was named."""
    from penstock.cli.group_view import offset_bounds, offsets_at

    starts, ends = offset_bounds(connection, chosen)
    missing = [place for place in chosen if place not in starts or place not in ends]
    for name, number in missing:
        if named:
            raise BrokerError(f"{name} has no partition {number}")
        output.warn(f"{name}, partition {number}: is gone, and left out")
    at_time = {}
    there = [place for place in chosen if place not in missing]
    if goal.kind == "time":
        at_time = offsets_at(connection, there, goal.value)
    return [
        Place(*place, committed.get(place), starts[place], ends[place], at_time.get(place))
        for place in there
    ]


def chosen_partitions(connection: Connection, wanted: Sequence[Wanted]) -> list[tuple[str, int]]:
    """What was named; BrokerError for what is not there."""
    with translated("looking for the topics"):
        topics = connection.admin().list_topics(timeout=REQUEST_TIMEOUT_S).topics
    chosen = []
    for name, numbers in wanted:
        there = sorted(topics[name].partitions) if name in topics else []
        if not there:
            raise BrokerError(
                f"there is no topic {name}", advice="`penstock topics list` shows what there is."
            )
        for number in there if numbers is None else numbers:
            if number not in there:
                raise BrokerError(
                    f"{name} has no partition {number}",
                    advice=f"It has {len(there)}, numbered from 0.",
                )
            chosen.append((name, number))
    return chosen


def _apply(connection: Connection, group: str, steps: Sequence[Step]) -> None:
    from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition

    doing = f"setting the offsets of {group}"
    new = [TopicPartition(step.topic, step.partition, step.new) for step in steps]
    with translated(doing):
        futures = connection.admin().alter_consumer_group_offsets(
            [ConsumerGroupTopicPartitions(group, new)], request_timeout=REQUEST_TIMEOUT_S
        )
    for at in result_of(futures[group], doing).topic_partitions:
        if at.error is not None:
            raise broker_error(at.error, f"{doing} for {at.topic}, partition {at.partition}")


def show_plan(group: str, steps: Sequence[Step], *, executed: bool, json: bool) -> None:
    if json:
        rows = [
            {
                "topic": step.topic,
                "partition": step.partition,
                "old": step.old,
                "new": step.new,
                "change": step.change,
                "note": step.note,
            }
            for step in steps
        ]
        output.write_json({"group": group, "executed": executed, "partitions": rows})
        return
    cells = (
        (
            step.topic,
            str(step.partition),
            "-" if step.old is None else str(step.old),
            str(step.new),
            "-" if step.change is None else f"{step.change:+,}" if step.change else "0",
            step.note,
        )
        for step in steps
    )
    output.print_table(("topic", ">partition", ">old", ">new", ">change", ""), cells)


# ---- delete ------------------------------------------------------------------------------


@app.command("delete")
def delete(
    groups: Groups,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Delete groups with their offsets, for good; records are not touched.

    Asks first. A group with members cannot be deleted. Consumers that come later under the same
    name begin as a new group does, by their auto.offset.reset.

    \b
    Examples:
      penstock groups delete billing
      penstock groups delete test-1 test-2 --yes
    """
    groups = list(dict.fromkeys(groups))
    connection = connect(bootstrap, client)
    if not yes:
        _confirm(connection, groups)
    with translated("deleting groups"):
        futures = connection.admin().delete_consumer_groups(
            groups, request_timeout=REQUEST_TIMEOUT_S
        )
    tell_deleted(groups, futures)


def _confirm(connection: Connection, groups: Sequence[str]) -> None:
    from penstock.cli.group_view import committed_offsets, describe_group, list_share_groups

    if not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask at: pass --yes to delete")
    shares = {share.id for share in list_share_groups(connection)}
    for group in groups:
        if group in shares:
            output.say(f"{group}: a share group")
            continue
        offsets = committed_offsets(connection, group)
        if not offsets:
            # Only one that is there can have none.
            describe_group(connection, group)
        output.say(f"{group}: {output.count(len(offsets), 'offset')}")
    if not output.confirm(f"Delete {output.count(len(groups), 'group')} for good?"):
        output.say("nothing was deleted")
        raise typer.Exit(output.EXIT_FAILURE)
