"""`penstock topics`: make, list, describe, change and delete topics.

All of it goes through the Kafka protocol's admin requests. The one thing that knows Penstock's
own settings is the sentence about durability, and it has one for Apache Kafka too.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli import output
from penstock.cli.kafka import (
    DEFAULT_BOOTSTRAP,
    REQUEST_TIMEOUT_S,
    AsJson,
    Bootstrap,
    BrokerError,
    ClientSettings,
    complete_settings,
    complete_topics,
    connect,
    result_of,
    tell_deleted,
    translated,
)
from penstock.cli.values import PROMISES, parse_pairs, show_bytes, show_duration

if TYPE_CHECKING:
    from confluent_kafka.admin import AdminClient, ConfigEntry

app = typer.Typer(
    no_args_is_help=True,
    help="Make, list, describe, change and delete topics.",
    epilog="A topic is a named log, split into partitions. Each partition keeps its records in "
    "order and numbers them: that number is the record's offset.",
)

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="The topic.", autocompletion=complete_topics)
]
Names = Annotated[
    list[str],
    typer.Argument(metavar="NAME", help="One or more topics.", autocompletion=complete_topics),
]
Settings = Annotated[
    list[str],
    typer.Option(
        "--config",
        "-c",
        metavar="NAME=VALUE",
        help="A setting of the topic, such as retention.ms=86400000 or durability=os. "
        "May be repeated.",
        autocompletion=complete_settings,
    ),
]


# ---- create ------------------------------------------------------------------------------


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The new topic.")],
    partitions: Annotated[
        int | None,
        typer.Option("--partitions", "-p", min=1, metavar="N", help="How many partitions; "
                     "without it the broker's default."),
    ] = None,
    config: Settings = [],  # noqa: B006 - typer copies it
    replication: Annotated[
        int | None,
        typer.Option("--replication", min=1, metavar="N", help="Copies of each partition, on a "
                     "cluster of Apache Kafka; Penstock's broker keeps one."),
    ] = None,
    if_not_exists: Annotated[
        bool, typer.Option("--if-not-exists", help="Succeed if the topic is already there.")
    ] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:  # fmt: skip
    """Make a topic.

    Partitions are what consumers share among themselves, so their number bounds how many can
    work side by side. It can grow later, but records that have a key then go to other
    partitions than before.

    \b
    Examples:
      penstock topics create orders
      penstock topics create orders --partitions 6 -c retention.ms=604800000
      penstock topics create users -c cleanup.policy=compact
      penstock topics create gauges -c durability=os -c retention.bytes=1073741824
    """
    from confluent_kafka.admin import NewTopic

    topic = NewTopic(
        name,
        num_partitions=-1 if partitions is None else partitions,
        replication_factor=-1 if replication is None else replication,
        config=parse_pairs(config),
    )
    admin = connect(bootstrap, client).admin()
    with translated(f"creating {name}"):
        futures = admin.create_topics([topic], request_timeout=REQUEST_TIMEOUT_S)
    try:
        result_of(futures[name], f"creating {name}")
    except BrokerError as error:
        if if_not_exists and error.kafka_name == "TOPIC_ALREADY_EXISTS":
            output.say(f"{name} is already there")
            return
        raise
    output.say(f"created {name}")


# ---- list --------------------------------------------------------------------------------


@app.command("list")
def list_topics(
    internal: Annotated[
        bool, typer.Option("--all", "-a", help="Also the broker's own topics.")
    ] = False,
    json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """List the topics, with how many partitions each has, and how many offsets they span.

    `offsets` is the distance between the first and the last offset. There are never more records,
    but there may be fewer: the end of each transaction takes an offset, and those of records that
    compaction has removed are not used again.

    \b
    Examples:
      penstock topics list
      penstock topics list --json | jq -r '.[].name'
    """
    admin = connect(bootstrap, client).admin()
    with translated("listing topics"):
        found = admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics
    names = sorted(name for name in found if internal or not name.startswith("__"))
    wanted = [(name, number) for name in names for number in found[name].partitions]
    bounds = _offset_bounds(admin, wanted)
    rows: list[dict[str, Any]] = []
    for name in names:
        spans = [bounds[name, number] for number in found[name].partitions]
        offsets = sum(span.latest - span.earliest for span in spans)
        rows.append({"name": name, "partitions": len(spans), "offsets": offsets})
    if json:
        output.write_json(rows)
    elif rows:
        cells = ((r["name"], str(r["partitions"]), f"{r['offsets']:,}") for r in rows)
        output.print_table(("topic", ">partitions", ">offsets"), cells)
    else:
        output.say("there are no topics; make one with `penstock topics create NAME`")


# ---- describe ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Bounds:
    """The first offset of a partition, and the one after the last."""

    earliest: int
    latest: int


def _offset_bounds(
    admin: AdminClient, partitions: Iterable[tuple[str, int]]
) -> dict[tuple[str, int], Bounds]:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import OffsetSpec

    wanted = list(partitions)
    ends: list[dict[tuple[str, int], int]] = []
    offset_spec: Any = OffsetSpec  # without types in some versions
    for spec in (offset_spec.earliest(), offset_spec.latest()):
        if not wanted:
            return {}
        with translated("asking for offsets"):
            futures = admin.list_offsets(
                {TopicPartition(topic, number): spec for topic, number in wanted},
                request_timeout=REQUEST_TIMEOUT_S,
            )
        ends.append({
            (at.topic, at.partition): result_of(future, "asking for offsets").offset
            for at, future in futures.items()
        })  # fmt: skip
    return {key: Bounds(ends[0][key], ends[1][key]) for key in wanted}


@app.command("describe")
def describe(
    names: Names,
    every: Annotated[
        bool, typer.Option("--all", "-a", help="Also the settings that are at their default.")
    ] = False,
    json: AsJson = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Show a topic: its partitions, its settings and what an acknowledgement promises.

    A partition holds the offsets from `earliest` up to but not including `latest`; not each has a
    record, see `penstock topics list`. Settings that the topic has of its own are always shown;
    those at the broker's default with --all.

    \b
    Examples:
      penstock topics describe orders
      penstock topics describe orders users --json
    """
    admin = connect(bootstrap, client).admin()
    described = [_describe_one(admin, name) for name in names]
    if json:
        output.write_json(described)
        return
    for topic in described:
        _print_topic(topic, every=every)


def _describe_one(admin: AdminClient, name: str) -> dict[str, Any]:
    from confluent_kafka import TopicCollection
    from confluent_kafka.admin import ConfigResource, ResourceType

    doing = f"describing {name}"
    with translated(doing):
        futures = admin.describe_topics(TopicCollection([name]), request_timeout=REQUEST_TIMEOUT_S)
        resource = ConfigResource(ResourceType.TOPIC, name)
        configs = admin.describe_configs([resource], request_timeout=REQUEST_TIMEOUT_S)
    topic = result_of(futures[name], doing)
    settings = result_of(next(iter(configs.values())), doing)
    bounds = _offset_bounds(admin, [(name, part.id) for part in topic.partitions])
    return {
        "name": name,
        "id": str(topic.topic_id),
        "internal": topic.is_internal,
        "durability": promise(settings),
        "partitions": [
            {
                "partition": part.id,
                "leader": None if part.leader is None else part.leader.id,
                "replicas": [node.id for node in part.replicas],
                "in_sync": [node.id for node in part.isr],
                "earliest": bounds[name, part.id].earliest,
                "latest": bounds[name, part.id].latest,
            }
            for part in sorted(topic.partitions, key=lambda part: part.id)
        ],
        "settings": [
            {
                "name": entry.name,
                "value": entry.value,
                "source": _source_of(entry),
            }
            for entry in sorted(settings.values(), key=lambda entry: entry.name)
        ],
    }


def promise(settings: dict[str, ConfigEntry]) -> str:
    """What an acknowledgement of this topic's broker means, in words."""
    own = settings.get("durability")
    if own is not None:
        return PROMISES.get(str(own.value), f"durability={own.value}")
    replicas = settings.get("min.insync.replicas")
    count = int(replicas.value or 1) if replicas is not None else 1
    return (
        f"A record acknowledged with acks=all is with the operating system of at least {count} "
        f"{'broker' if count == 1 else 'brokers'} (min.insync.replicas): it is on disk when the "
        "system writes it there."
    )


def _source_of(entry: ConfigEntry) -> str:
    """Whose value it is: the topic's own, the broker's, or built in."""
    from confluent_kafka.admin import ConfigSource

    names = {
        ConfigSource.DYNAMIC_TOPIC_CONFIG: "topic",
        ConfigSource.DEFAULT_CONFIG: "default",
    }
    return names.get(ConfigSource(entry.source), "broker")


def _print_topic(topic: dict[str, Any], *, every: bool) -> None:
    partitions = topic["partitions"]
    print(f"{topic['name']}: {_extent(partitions)}")
    print(f"  id          {topic['id']}")
    print(f"  durability  {topic['durability']}")
    if full := _when_full({s["name"]: str(s["value"]) for s in topic["settings"]}):
        print(f"  when full   {full}")
    replicated = any(len(part["replicas"]) > 1 for part in partitions)
    columns = ["partition", ">earliest", ">latest", ">offsets"]
    if replicated:
        columns += [">leader", "replicas", "in sync"]
    rows = []
    for part in partitions:
        row = [str(part["partition"]), str(part["earliest"]), str(part["latest"]),
               f"{part['latest'] - part['earliest']:,}"]  # fmt: skip
        if replicated:
            row += [str(part["leader"]), *(",".join(map(str, part[k])) for k in
                                           ("replicas", "in_sync"))]  # fmt: skip
        rows.append(row)
    output.flush()
    output.print_table(columns, rows)
    shown = [s for s in topic["settings"] if every or s["source"] == "topic"]
    if shown:
        cells = (
            (("* " if s["source"] == "topic" else "  ") + s["name"], str(s["value"]),
             _in_words(s["name"], str(s["value"])))
            for s in shown
        )  # fmt: skip
        output.print_table(("  setting", "value", ""), cells)
    hint = "* set on this topic" if every and any(s["source"] == "topic" for s in shown) else ""
    if not every:
        hint = "all other settings are at their default; --all shows them"
    output.say(f"  {hint}" if hint else "")


def _when_full(settings: Mapping[str, str]) -> str:
    """Whom a topic waits for once its bound is reached; empty if it waits for nobody."""
    overflow = settings.get("overflow", "")
    producers = {"block": "producers wait", "reject": "producers are refused"}.get(overflow)
    if producers is None:
        return ""
    groups = settings.get("overflow.groups", "")
    return f"overflow={overflow}: {producers} until the slowest of {groups} has read on"


def _extent(partitions: list[dict[str, Any]]) -> str:
    offsets = sum(part["latest"] - part["earliest"] for part in partitions)
    return f"{output.count(len(partitions), 'partition')}, {output.count(offsets, 'offset')}"


def _in_words(name: str, value: str) -> str:
    """Long numbers of milliseconds and bytes as people say them."""
    if not value.lstrip("-").isdecimal():
        return ""
    number = int(value)
    if number >= 0x7FFFFFFFFFFFFFFF or (number == -1 and name.startswith("retention.")):
        return "no limit"
    if name.endswith(".ms") and number >= 1000:
        return show_duration(number)
    if name.endswith(".bytes") and number >= 1024:
        return show_bytes(number)
    return ""


# ---- alter -------------------------------------------------------------------------------


@app.command("alter")
def alter(
    name: Name,
    config: Settings = [],  # noqa: B006
    reset: Annotated[
        list[str],
        typer.Option("--reset", "-r", metavar="NAME", help="A setting to put back to the "
                     "broker's default. May be repeated."),
    ] = [],  # noqa: B006
    partitions: Annotated[
        int | None,
        typer.Option("--partitions", "-p", min=1, metavar="N", help="The new number of "
                     "partitions, larger than now."),
    ] = None,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:  # fmt: skip
    """Change a topic's settings or add partitions.

    Settings that are not named stay as they are, and all changes of settings happen together or
    not at all. Records stay where they are when partitions are added; only new records are
    spread over all of them.

    \b
    Examples:
      penstock topics alter orders -c retention.ms=86400000
      penstock topics alter orders --reset retention.ms --partitions 12
    """
    changes = parse_pairs(config)
    both = sorted(set(changes) & set(reset))
    if both:
        raise typer.BadParameter(f"{both[0]} is both set and reset")
    if not changes and not reset and partitions is None:
        raise typer.BadParameter("nothing to change: give --config, --reset or --partitions")
    admin = connect(bootstrap, client).admin()
    if changes or reset:
        _alter_settings(admin, name, changes, reset)
        for setting, value in changes.items():
            output.say(f"{name}: {setting} is now {value}")
        for setting in reset:
            output.say(f"{name}: {setting} is back at its default")
    if partitions is not None:
        from confluent_kafka.admin import NewPartitions

        doing = f"adding partitions to {name}"
        with translated(doing):
            futures = admin.create_partitions(
                [NewPartitions(name, partitions)], request_timeout=REQUEST_TIMEOUT_S
            )
        result_of(futures[name], doing)
        output.say(f"{name}: has {output.count(partitions, 'partition')} now")


def _alter_settings(
    admin: AdminClient, name: str, changes: dict[str, str], reset: list[str]
) -> None:
    from confluent_kafka.admin import (
        AlterConfigOpType,
        ConfigEntry,
        ConfigResource,
        ResourceType,
    )

    entries = [
        ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
        for setting, value in changes.items()
    ] + [
        ConfigEntry(setting, None, incremental_operation=AlterConfigOpType.DELETE)
        for setting in reset
    ]
    resource = ConfigResource(ResourceType.TOPIC, name, incremental_configs=entries)
    doing = f"changing {name}"
    with translated(doing):
        futures = admin.incremental_alter_configs([resource], request_timeout=REQUEST_TIMEOUT_S)
    result_of(next(iter(futures.values())), doing)


# ---- delete ------------------------------------------------------------------------------


@app.command("delete")
def delete(
    names: Names,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    bootstrap: Bootstrap = DEFAULT_BOOTSTRAP,
    client: ClientSettings = [],  # noqa: B006
) -> None:
    """Delete topics with all their records, for good.

    Asks first, and says how many records would go. A topic of the same name that is made later
    is a new one and starts at offset 0.

    \b
    Examples:
      penstock topics delete orders
      penstock topics delete test-1 test-2 --yes
    """
    names = list(dict.fromkeys(names))
    admin = connect(bootstrap, client).admin()
    if not yes:
        _confirm(admin, names)
    with translated("deleting topics"):
        futures = admin.delete_topics(names, request_timeout=REQUEST_TIMEOUT_S)
    tell_deleted(names, futures)


def _confirm(admin: AdminClient, names: list[str]) -> None:
    if not sys.stdin.isatty():
        raise typer.BadParameter("there is no terminal to ask at: pass --yes to delete")
    for name in names:
        output.say(f"{name}: {_extent(_describe_one(admin, name)['partitions'])}")
    if not output.confirm(f"Delete {output.count(len(names), 'topic')} for good?"):
        output.say("nothing was deleted")
        raise typer.Exit(output.EXIT_FAILURE)
