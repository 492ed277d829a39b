"""What the broker knows of its topics, as a pure state machine.

A command (`create_topic`, `delete_topic`, …) looks at the state and returns the records that
would change it, or raises ApiError; it changes nothing itself. `replay` applies a record. So the
state is exactly what the records say, and recovery is replay. No clock, no disk, no sockets.

Records are JSON. The key says what the record is about, the value is its new state, and no value
means that it is gone, so the topic that holds them can be compacted:

    {"topic": NAME}   {"id": UUID, "partitions": N, "settings": {…}, "in_memory": BOOL}
    {"broker": "…"}   {"value": N}        leader-epoch, producer-id
    {"broker-settings": NAME}   {…}       defaults of topics: of a broker, or without a name of all
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import orjson

from penstock.broker.config import NODE_ID, BrokerConfig
from penstock.errors import ConfigError, PenstockError
from penstock.log.config import SETTINGS, TOPIC_SETTING_OF, TopicConfig
from penstock.wire.errors import ErrorCode

KeyValue = tuple[bytes, bytes | None]

METADATA_TOPIC: Final = "__penstock_metadata"
JOURNAL_TOPIC: Final = "__penstock_journal"
MAX_NAME_LENGTH: Final = 249
# As which broker's settings those are known that hold for all brokers.
ALL_BROKERS: Final = ""
_LEGAL_NAME: Final = re.compile(r"[a-zA-Z0-9._-]+")
# Producer ids are handed out from blocks, so that not each of them costs a synced record.
PRODUCER_ID_BLOCK: Final = 1_000


class ApiError(PenstockError):
    """A request, or a part of it, that is answered with an error code."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Topic:
    """One topic."""

    name: str
    id: uuid.UUID
    partitions: int
    settings: Mapping[str, str] = field(default_factory=dict)
    config: TopicConfig = field(default_factory=TopicConfig)
    # The id as entries hold it.
    id_text: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "id_text", str(self.id))

    @property
    def in_memory(self) -> bool:
        return self.config.durability == "memory"


class Catalog:
    """Topics by name and id, and the broker's counters."""

    def __init__(self, config: BrokerConfig) -> None:
        self._config = config
        self.topics: dict[str, Topic] = {}
        self.by_id: dict[uuid.UUID, Topic] = {}
        self.partition_count = 0
        self.counters: dict[str, int] = {}
        # Defaults of topic settings that were set while the broker ran, by Kafka's names for them;
        # those of the broker itself come before those of all brokers.
        self.broker_settings: dict[str, Mapping[str, str]] = {}
        # Raised whenever a topic is made, changed or deleted.
        self.version = 0

    # ---- commands ------------------------------------------------------------------------

    def create_topic(
        self, name: str, partitions: int, settings: Mapping[str, str]
    ) -> list[KeyValue]:
        check_name(name)
        if name in self.topics:
            raise ApiError(ErrorCode.TOPIC_ALREADY_EXISTS, f"topic {name!r} exists already")
        self._check_collision(name)
        count = self._config.default_partitions if partitions == -1 else partitions
        if count < 1:
            raise ApiError(ErrorCode.INVALID_PARTITIONS, f"{count} partitions are too few")
        self._check_room(count, topics=1)
        in_memory = self.config_of(settings).durability == "memory"
        return [_topic_record(name, uuid.uuid4(), count, settings, in_memory)]

    def delete_topic(self, topic: Topic) -> list[KeyValue]:
        # By id: a new topic of the same name may have come meanwhile.
        if self.by_id.get(topic.id) is None:
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "the topic is gone already")
        return [(_key(topic=topic.name), None)]

    def add_partitions(self, topic: Topic, count: int) -> list[KeyValue]:
        if count <= topic.partitions:
            raise ApiError(
                ErrorCode.INVALID_PARTITIONS,
                f"topic {topic.name!r} has {topic.partitions} partitions; "
                f"it can be given more, not {count}",
            )
        self._check_room(count - topic.partitions, topics=0)
        return [_topic_record(topic.name, topic.id, count, topic.settings, topic.in_memory)]

    def change_settings(self, topic: Topic, settings: Mapping[str, str]) -> list[KeyValue]:
        new = self.config_of(self._pinned(settings, in_memory=topic.in_memory))
        if topic.in_memory != (new.durability == "memory"):
            raise ApiError(
                ErrorCode.INVALID_CONFIG,
                "durability cannot change to or from memory; create a new topic instead",
            )
        return [_topic_record(topic.name, topic.id, topic.partitions, settings, topic.in_memory)]

    def change_broker_settings(self, name: str, settings: Mapping[str, str]) -> list[KeyValue]:
        """Give a broker, or with no name all of them, these defaults of topics, and no others."""
        for key, text in settings.items():
            topic_key = TOPIC_SETTING_OF.get(key)
            if topic_key is None:
                raise ApiError(
                    ErrorCode.INVALID_REQUEST,
                    f"Cannot update these configs dynamically: Set({key})",
                )
            try:
                SETTINGS[topic_key].parse(text)
            except ConfigError as error:
                raise ApiError(ErrorCode.INVALID_REQUEST, f"{key}: {error}") from error
        defaults = _topic_defaults({**self.broker_settings, name: settings})
        for topic in self.topics.values():
            try:
                self._config.topic_config({**defaults, **topic.settings})
            except ConfigError as error:
                raise ApiError(
                    ErrorCode.INVALID_REQUEST, f"topic {topic.name!r} could not be kept: {error}"
                ) from error
        return [(_key(**{"broker-settings": name}), orjson.dumps(dict(settings)))]

    def topic_defaults(self) -> dict[str, str]:
        """The defaults of topic settings, as far as they are not the built-in ones."""
        return {**self._config.effective_defaults, **_topic_defaults(self.broker_settings)}

    def reserve_producer_ids(self) -> list[KeyValue]:
        return [_counter_record("producer-id", self.counter("producer-id") + PRODUCER_ID_BLOCK)]

    def raise_leader_epoch(self) -> list[KeyValue]:
        return [_counter_record("leader-epoch", self.counter("leader-epoch") + 1)]

    def config_of(self, settings: Mapping[str, str]) -> TopicConfig:
        try:
            return self._config.topic_config({**_topic_defaults(self.broker_settings), **settings})
        except ConfigError as error:
            raise ApiError(ErrorCode.INVALID_CONFIG, str(error)) from error

    def topic(self, name: str) -> Topic:
        """ApiError if there is none of this name."""
        topic = self.topics.get(name)
        if topic is None:
            raise ApiError(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, "there is no such topic")
        return topic

    def counter(self, name: str) -> int:
        return self.counters.get(name, 0)

    def _check_collision(self, name: str) -> None:
        # Kafka refuses these too: both map to one name in metrics.
        flat = name.replace(".", "_")
        for other in self.topics:
            if other.replace(".", "_") == flat:
                raise ApiError(
                    ErrorCode.INVALID_TOPIC_EXCEPTION,
                    f"topic {name!r} collides with {other!r}: '.' and '_' count as the same",
                )

    def _check_room(self, partitions: int, topics: int) -> None:
        limits = self._config.limits
        if (
            len(self.topics) + topics > limits.max_topics
            or self.partition_count + partitions > limits.max_partitions
        ):
            raise ApiError(
                ErrorCode.POLICY_VIOLATION,
                f"the broker holds at most {limits.max_topics} topics and "
                f"{limits.max_partitions} partitions",
            )

    # ---- replay --------------------------------------------------------------------------

    def replay(self, key: bytes, value: bytes | None) -> Topic | None:
        """Apply one record; the topic that it says is deleted."""
        subject: dict[str, Any] = orjson.loads(key)
        if "topic" in subject:
            state = None if value is None else orjson.loads(value)
            return self._replay_topic(subject["topic"], state)
        if "broker" in subject and value is not None:
            self.counters[subject["broker"]] = orjson.loads(value)["value"]
        if "broker-settings" in subject and value is not None:
            self._replay_broker_settings(subject["broker-settings"], orjson.loads(value))
        return None

    def _replay_broker_settings(self, name: str, settings: dict[str, str]) -> None:
        self.broker_settings[name] = settings
        self.version += 1
        for topic in list(self.topics.values()):
            fresh = replace(topic, config=self.config_of(topic.settings))
            self.topics[topic.name] = self.by_id[topic.id] = fresh

    def _replay_topic(self, name: str, state: dict[str, Any] | None) -> Topic | None:
        self.version += 1
        before = self.topics.pop(name, None)
        if before is not None:
            del self.by_id[before.id]
            self.partition_count -= before.partitions
        if state is None:
            return before
        topic = self._topic_of(name, state)
        self.topics[name] = self.by_id[topic.id] = topic
        self.partition_count += topic.partitions
        return None

    def topic_in(self, record: KeyValue) -> Topic:
        """The topic that a record of `create_topic` or `add_partitions` speaks of."""
        key, value = record
        assert value is not None
        return self._topic_of(orjson.loads(key)["topic"], orjson.loads(value))

    def _topic_of(self, name: str, state: dict[str, Any]) -> Topic:
        settings = state["settings"]
        if "in_memory" in state:
            settings = self._pinned(settings, in_memory=state["in_memory"])
        return Topic(
            name, uuid.UUID(state["id"]), state["partitions"], settings, self.config_of(settings)
        )

    def _pinned(self, settings: Mapping[str, str], *, in_memory: bool) -> Mapping[str, str]:
        """Where a topic's records are stays as it was made, whatever the broker's default is now.

        Otherwise a start with another default would hide its records, and reuse their offsets.
        """
        by_default = self._config.topic_config({}).durability == "memory"
        if "durability" in settings or by_default == in_memory:
            return settings
        return {**settings, "durability": "memory" if in_memory else "disk"}


def _topic_defaults(broker_settings: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """What brokers' settings say about topics: a broker's own before those of all brokers."""
    named = {**broker_settings.get(ALL_BROKERS, {}), **broker_settings.get(str(NODE_ID), {})}
    return {TOPIC_SETTING_OF[key]: text for key, text in named.items()}


def check_name(name: str) -> None:
    """ApiError if no topic may have this name."""
    problem = None
    if not name:
        problem = "a topic name is empty"
    elif name in (".", ".."):
        problem = f"a topic cannot be named {name!r}"
    elif len(name) > MAX_NAME_LENGTH:
        problem = f"a topic name has at most {MAX_NAME_LENGTH} characters, not {len(name)}"
    elif not _LEGAL_NAME.fullmatch(name):
        problem = f"{name!r} is no topic name: letters, digits, '.', '_' and '-' are allowed"
    elif name in (METADATA_TOPIC, JOURNAL_TOPIC):
        problem = f"{name!r} belongs to the broker"
    if problem is not None:
        raise ApiError(ErrorCode.INVALID_TOPIC_EXCEPTION, problem)


def _key(**subject: str) -> bytes:
    return orjson.dumps(subject)


def _topic_record(
    name: str, id_: uuid.UUID, partitions: int, settings: Mapping[str, str], in_memory: bool
) -> KeyValue:
    state = {
        "id": str(id_),
        "partitions": partitions,
        "settings": dict(settings),
        "in_memory": in_memory,
    }
    return _key(topic=name), orjson.dumps(state)


def _counter_record(name: str, value: int) -> KeyValue:
    return _key(broker=name), orjson.dumps({"value": value})
