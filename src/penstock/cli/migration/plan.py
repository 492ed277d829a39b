"""What is to be moved, what the target can take of it, and the topics of the target.

A setting that the target does not know, or whose value it refuses, is found by asking it to make a
topic without making it; such settings are reported and left out. Broker-wide defaults are not
moved: each cluster has its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final
from uuid import uuid4

from penstock.cli.kafka import REQUEST_TIMEOUT_S, BrokerError, result_of, translated
from penstock.cli.migration.ends import End
from penstock.client.migration_map import Place

_MAX_LONG: Final = str(0x7FFFFFFFFFFFFFFF)
# While a topic is being filled it keeps everything and takes every timestamp, so that what was
# copied can be counted and compared, however old it is. The largest record is what one request
# can carry: the client packs records into batches of its own.
HOLD: Final = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "message.timestamp.type": "CreateTime",
    "message.timestamp.before.max.ms": _MAX_LONG,
    "message.timestamp.after.max.ms": _MAX_LONG,
    "max.message.bytes": "100000000",
}
# The same where the target knows it: block and reject need a bound.
HOLD_OVERFLOW: Final = {"overflow": "discard-oldest"}
# In force from the beginning: these cannot be changed later, or not to every value.
_FROM_THE_BEGINNING: Final = ("durability",)
MAPPING_SETTINGS: Final = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
}


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A setting that the target does not take."""

    name: str
    value: str
    reason: str


@dataclass(frozen=True, slots=True)
class TopicPlan:
    """One topic: what it has in the source, and what becomes of it in the target."""

    name: str
    topic_id: str
    partitions: int
    # How many partitions the target's topic of this name has; 0 if there is none.
    target_partitions: int
    settings: Mapping[str, str] = field(default_factory=dict)
    left_out: Sequence[LeftOut] = ()
    # Whether the target knows the setting `overflow`, which is Penstock's own.
    knows_overflow: bool = False

    def places(self) -> list[Place]:
        return [Place(self.name, number) for number in range(self.partitions)]

    def held(self) -> dict[str, str]:
        """The settings while records are being copied."""
        held = dict(HOLD)
        if self.settings.get("durability") == "memory":
            # In memory there must be a bound.
            del held["retention.bytes"]
        if self.knows_overflow:
            held |= HOLD_OVERFLOW
        kept = {name: self.settings[name] for name in _FROM_THE_BEGINNING if name in self.settings}
        return {**kept, **held}

    def released(self) -> dict[str, str | None]:
        """The changes that put the topic's own settings into force; None puts one back."""
        changes: dict[str, str | None] = dict.fromkeys(self.held())
        changes.update(self.settings)
        for name in _FROM_THE_BEGINNING:
            changes.pop(name, None)
        return changes


def make_plan(
    source: End, target: End, wanted: Sequence[str], excluded: Sequence[str]
) -> list[TopicPlan]:
    """The topics to move, by names or patterns; all of them where none is named."""
    here = source.topics()
    for pattern in wanted:
        if not any(fnmatchcase(name, pattern) for name in here):
            raise BrokerError(
                f"the source has no topic {pattern}",
                advice="`penstock topics list` shows what there is.",
            )
    names = chosen(here, wanted, excluded)
    there = target.topics()
    ids = source.topic_ids(names)
    knows_overflow = refusal(target, HOLD_OVERFLOW) is None
    plans = []
    for name in names:
        settings, left_out = takeable(target, settings_of(source, name))
        plan = TopicPlan(
            name, ids[name], here[name], there.get(name, 0), settings, left_out, knows_overflow
        )
        if plan.target_partitions > plan.partitions:
            raise BrokerError(
                f"{name} has {plan.target_partitions} partitions in the target and only "
                f"{plan.partitions} in the source",
                advice="Records of a key would go to other partitions than before. Delete the "
                "target's topic, add partitions to the source's, or leave it out with --exclude.",
            )
        plans.append(plan)
    return plans


def chosen(names: Iterable[str], wanted: Sequence[str], excluded: Sequence[str]) -> list[str]:
    """The names that match one of the wanted patterns, if there are any, and none excluded."""
    return [
        name
        for name in names
        if any(fnmatchcase(name, pattern) for pattern in wanted or ("*",))
        and not any(fnmatchcase(name, pattern) for pattern in excluded)
    ]


def settings_of(end: End, topic: str) -> dict[str, str]:
    """The settings that a topic has of its own."""
    from confluent_kafka.admin import ConfigResource, ConfigSource, ResourceType

    doing = f"asking the {end.what} for the settings of {topic}"
    resource = ConfigResource(ResourceType.TOPIC, topic)
    with translated(doing):
        futures = end.admin.describe_configs([resource], request_timeout=REQUEST_TIMEOUT_S)
    entries = result_of(futures[resource], doing)
    return {
        name: str(entry.value)
        for name, entry in sorted(entries.items())
        if ConfigSource(entry.source) == ConfigSource.DYNAMIC_TOPIC_CONFIG
    }


def takeable(target: End, settings: dict[str, str]) -> tuple[dict[str, str], list[LeftOut]]:
    """The settings that the target takes, and the others with its reasons."""
    if not settings or refusal(target, settings) is None:
        return settings, []
    taken: dict[str, str] = {}
    left_out = []
    for name, value in settings.items():
        # Together with those already taken: some only make sense beside others.
        reason = refusal(target, {**taken, name: value})
        if reason is None:
            taken[name] = value
        else:
            left_out.append(LeftOut(name, value, reason))
    return taken, left_out


def refusal(target: End, settings: dict[str, str]) -> str | None:
    """Why the target would not make a topic with these settings; None if it would."""
    from confluent_kafka.admin import NewTopic

    probe = f"penstock-migrate-probe-{uuid4().hex}"
    with translated("asking the target which settings it takes"):
        futures = target.admin.create_topics(
            [NewTopic(probe, num_partitions=1, config=settings)],
            validate_only=True,
            request_timeout=REQUEST_TIMEOUT_S,
        )
    try:
        result_of(futures[probe], "")
    except BrokerError as error:
        if error.kafka_name != "INVALID_CONFIG":
            raise
        return str(error)
    return None


# ---- the target's topics -----------------------------------------------------------------


def prepare(target: End, plan: TopicPlan, replication: int | None) -> None:
    """Make the topic, or the partitions that it lacks, and hold it still."""
    from confluent_kafka.admin import NewPartitions

    if plan.target_partitions == 0:
        create(target, plan.name, plan.partitions, plan.held(), replication)
        return
    if plan.target_partitions < plan.partitions:
        doing = f"adding partitions to {plan.name} of the target"
        with translated(doing):
            futures = target.admin.create_partitions(
                [NewPartitions(plan.name, plan.partitions)], request_timeout=REQUEST_TIMEOUT_S
            )
        result_of(futures[plan.name], doing)
    held: dict[str, str | None] = {**plan.held()}
    for name in _FROM_THE_BEGINNING:
        held.pop(name, None)
    change_settings(target, plan.name, held)


def create(
    target: End, name: str, partitions: int, settings: Mapping[str, str], replication: int | None
) -> None:
    from confluent_kafka.admin import NewTopic

    topic = NewTopic(
        name,
        num_partitions=partitions,
        replication_factor=-1 if replication is None else replication,
        config=dict(settings),
    )
    doing = f"making {name} in the target"
    with translated(doing):
        futures = target.admin.create_topics([topic], request_timeout=REQUEST_TIMEOUT_S)
    try:
        result_of(futures[name], doing)
    except BrokerError as error:
        if error.kafka_name != "TOPIC_ALREADY_EXISTS":
            raise


def change_settings(target: End, topic: str, changes: Mapping[str, str | None]) -> None:
    """Set these, and put back those that are None, all together."""
    from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, ResourceType

    op: Any = AlterConfigOpType
    entries = [
        ConfigEntry(name, value, incremental_operation=op.DELETE if value is None else op.SET)
        for name, value in changes.items()
    ]
    resource = ConfigResource(ResourceType.TOPIC, topic, incremental_configs=entries)
    doing = f"changing the settings of {topic} in the target"
    with translated(doing):
        futures = target.admin.incremental_alter_configs(
            [resource], request_timeout=REQUEST_TIMEOUT_S
        )
    result_of(next(iter(futures.values())), doing)
