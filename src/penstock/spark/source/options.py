"""The options of the source: those of Spark's own Kafka connector, checked and typed.

A user of the connector changes one word, the format. So every option of the connector is known
here, and does what it does there; two differences are on purpose:

- `kafka.isolation.level` is `read_committed` unless said otherwise: records of aborted or open
  transactions are not read.
- An option that is not known is an error, not ignored: a typing mistake in `startingOffset` would
  otherwise read from another place than the one that was meant.

Settings of Java's consumer that have no meaning here (there is no group, nothing is polled) are
accepted without effect.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from penstock.client.connection import parse_bootstrap
from penstock.errors import PenstockError
from penstock.spark.source.errors import OptionError

if TYPE_CHECKING:
    from penstock.client.security import Security

Place = tuple[str, int]
"""A partition: its topic and its number."""
Positions = dict[Place, int]

LATEST: Final = -1
EARLIEST: Final = -2

_STRATEGIES: Final = ("subscribe", "subscribePattern", "assign")
_STARTS: Final = ("startingTimestamp", "startingOffsetsByTimestamp", "startingOffsets")
_ENDS: Final = ("endingTimestamp", "endingOffsetsByTimestamp", "endingOffsets")
_OWN: Final = (
    *_STRATEGIES,
    *_STARTS,
    *_ENDS,
    "startingOffsetsByTimestampStrategy",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "includeHeaders",
    "groupIdPrefix",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "kafkaConsumer.pollTimeoutMs",
    "partition.metadata.cache.ttl.ms",
)
# Of flows: values are typed by the source (`penstock.spark.reading.decoding`).
TYPED: Final = "penstock.typed"
_NAMES: Final = {name.lower(): name for name in _OWN}
_USED_OF_KAFKA: Final = frozenset(
    {
        "bootstrap.servers",
        "client.id",
        "fetch.max.bytes",
        "isolation.level",
        "max.partition.fetch.bytes",
        "request.timeout.ms",
    }
)
_SECURITY: Final = ("security.", "sasl.", "ssl.")
_WITHOUT_EFFECT: Final = frozenset(
    {
        "allow.auto.create.topics", "auto.commit.interval.ms", "check.crcs", "client.dns.lookup",
        "client.rack", "connections.max.idle.ms", "default.api.timeout.ms",
        "exclude.internal.topics", "fetch.max.wait.ms", "fetch.min.bytes", "group.id",
        "group.instance.id",
        "group.protocol", "group.remote.assignor", "heartbeat.interval.ms",
        "max.poll.interval.ms", "max.poll.records",
        "metadata.max.age.ms", "metadata.recovery.rebootstrap.trigger.ms",
        "metadata.recovery.strategy", "metric.reporters", "metrics.num.samples",
        "metrics.recording.level", "metrics.sample.window.ms", "partition.assignment.strategy",
        "receive.buffer.bytes", "reconnect.backoff.max.ms", "reconnect.backoff.ms",
        "retry.backoff.max.ms", "retry.backoff.ms", "send.buffer.bytes", "session.timeout.ms",
        "socket.connection.setup.timeout.max.ms", "socket.connection.setup.timeout.ms",
    }
)  # fmt: skip
_REFUSED: Final = {
    "auto.offset.reset": "Set startingOffsets to earliest or latest instead.",
    "enable.auto.commit": "Spark keeps the offsets in the query's checkpoint.",
    "interceptor.classes": "Change the rows with DataFrame operations instead.",
    "key.deserializer": "Keys are bytes; turn them into something else with DataFrame operations.",
    "value.deserializer": "Values are bytes; turn them into something else likewise.",
}
_ISOLATIONS: Final = ("read_committed", "read_uncommitted")
_TIME_UNITS_MS: Final = {
    "us": 0.001, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Access:
    """How to reach the log, and how much to ask for at once; goes to every task."""

    bootstrap: str
    security: Security | None = None
    client_id: str = "penstock-spark"
    read_committed: bool = True
    timeout_s: float = 30.0
    fetch_bytes: int = 16 << 20
    partition_bytes: int = 8 << 20


@dataclass(frozen=True, slots=True)
class Topics:
    """Which partitions are read: exactly one of the three is set."""

    names: tuple[str, ...] = ()
    pattern: str | None = None
    assigned: frozenset[Place] = frozenset()


@dataclass(frozen=True, slots=True)
class Limit:
    """Where to begin or to end: at offsets, or at the first record not older than a time.

    `everywhere` holds for all partitions; otherwise each is named in `places`. Offsets may be
    LATEST or EARLIEST.
    """

    everywhere: int | None = None
    places: tuple[tuple[Place, int], ...] = ()
    by_time: bool = False
    option: str = ""

    @property
    def has_latest(self) -> bool:
        offsets = [self.everywhere, *(offset for _, offset in self.places)]
        return not self.by_time and LATEST in offsets


@dataclass(frozen=True, slots=True)
class Options:
    """All options of one source."""

    access: Access
    topics: Topics
    start: Limit
    end: Limit
    latest_without_match: bool = False
    max_offsets: int | None = None
    min_offsets: int | None = None
    max_delay_ms: int = 15 * 60_000
    min_partitions: int | None = None
    max_records: int | None = None
    fail_on_data_loss: bool = True
    headers: bool = False
    attempts: int = 3
    attempt_pause_s: float = 0.1
    poll_timeout_s: float = 120.0
    metadata_ttl_s: float = 1.0
    # How values are typed, as the option says it; None leaves them as they are.
    typed: str | None = None


def parse(given: Mapping[str, str], *, streaming: bool) -> Options:
    """The options as they were given, checked; OptionError names the one that is wrong."""
    own, kafka = _sorted_out(given)
    if streaming:
        for name in _ENDS:
            if name in own:
                raise OptionError(
                    f"{name} has no meaning in a stream, which has no end",
                    advice="Use it with spark.read, or stop the stream with trigger(availableNow).",
                )
    start = _limit(own, _STARTS, LATEST if streaming else EARLIEST)
    end = _limit(own, _ENDS, LATEST)
    if not streaming:
        _check_batch_limits(start, end)
    max_offsets = _number(own, "maxOffsetsPerTrigger", at_least=1)
    min_offsets = _number(own, "minOffsetsPerTrigger", at_least=1)
    if min_offsets and max_offsets and min_offsets > max_offsets:
        raise OptionError(
            f"minOffsetsPerTrigger ({min_offsets}) is larger than maxOffsetsPerTrigger "
            f"({max_offsets})"
        )
    ttl_ms = _number(own, "partition.metadata.cache.ttl.ms", at_least=-1)
    return Options(
        access=_access(kafka),
        topics=_topics(own),
        start=start,
        end=end,
        latest_without_match=_choice(
            own, "startingOffsetsByTimestampStrategy", ("error", "latest")
        ) == "latest",
        max_offsets=max_offsets,
        min_offsets=min_offsets,
        max_delay_ms=_duration_ms(own, "maxTriggerDelay", 15 * 60_000),
        min_partitions=_number(own, "minPartitions", at_least=1),
        max_records=_number(own, "maxRecordsPerPartition", at_least=1),
        fail_on_data_loss=_choice(own, "failOnDataLoss", ("true", "false")) == "true",
        headers=_choice(own, "includeHeaders", ("false", "true")) == "true",
        attempts=_number(own, "fetchOffset.numRetries", at_least=0) or 3,
        attempt_pause_s=(_number(own, "fetchOffset.retryIntervalMs", at_least=0) or 100) / 1000,
        poll_timeout_s=(_number(own, "kafkaConsumer.pollTimeoutMs", at_least=1) or 120_000) / 1000,
        metadata_ttl_s=1.0 if ttl_ms is None else max(0, ttl_ms) / 1000,
        typed=given.get(TYPED),
    )  # fmt: skip


def _sorted_out(given: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The source's own options by their proper names, and those of Kafka without `kafka.`."""
    own: dict[str, str] = {}
    kafka: dict[str, str] = {}
    for key, value in given.items():
        lower = key.lower()
        if lower == TYPED:
            continue
        if lower in _NAMES:
            own[_NAMES[lower]] = str(value)
            continue
        if not lower.startswith("kafka."):
            raise OptionError(f"there is no option {key!r}", advice=_nearest(lower))
        name = lower.removeprefix("kafka.")
        if name in _REFUSED:
            raise OptionError(f"{key} cannot be set", advice=_REFUSED[name])
        if name in _USED_OF_KAFKA or name.startswith(_SECURITY):
            kafka[name] = str(value)
        elif name not in _WITHOUT_EFFECT:
            raise OptionError(f"there is no consumer setting {key!r}")
    return own, kafka


def _nearest(wrong: str) -> str:
    from difflib import get_close_matches

    if wrong.removeprefix("kafka.") in _USED_OF_KAFKA or wrong.startswith(_SECURITY):
        return f"Settings of the Kafka client begin with `kafka.`: kafka.{wrong}."
    near = get_close_matches(wrong, _NAMES, 1)
    return f"Did you mean {_NAMES[near[0]]}?" if near else f"Known are: {', '.join(_OWN)}."


def _access(kafka: Mapping[str, str]) -> Access:
    bootstrap = kafka.get("bootstrap.servers", "").strip()
    if not bootstrap:
        raise OptionError(
            "kafka.bootstrap.servers is not set", advice="Name the broker, as in 127.0.0.1:9092."
        )
    secret = {name: value for name, value in kafka.items() if name.startswith(_SECURITY)}
    try:
        parse_bootstrap(bootstrap)
        security = _security(secret) if secret else None
    except PenstockError as error:
        raise OptionError(str(error), advice=error.advice) from error
    isolation = _choice(kafka, "isolation.level", _ISOLATIONS, shown="kafka.isolation.level")
    timeout_ms = _number(kafka, "request.timeout.ms", at_least=1) or 30_000
    return Access(
        bootstrap=bootstrap,
        security=security,
        client_id=kafka.get("client.id", "penstock-spark"),
        read_committed=isolation == "read_committed",
        timeout_s=timeout_ms / 1000,
        fetch_bytes=_number(kafka, "fetch.max.bytes", at_least=1024) or (16 << 20),
        partition_bytes=_number(kafka, "max.partition.fetch.bytes", at_least=1024) or (8 << 20),
    )


def _security(secret: Mapping[str, str]) -> Security:
    # Loaded where it is needed: most tasks need none.
    from penstock.client.security import Security

    return Security.from_options(secret)


def _topics(own: Mapping[str, str]) -> Topics:
    said = [name for name in _STRATEGIES if name in own]
    if len(said) != 1:
        one = "only one of" if said else "one of"
        raise OptionError(f"{one} {', '.join(_STRATEGIES)} must be set")
    text = own[said[0]].strip()
    if said[0] == "subscribe":
        names = tuple(dict.fromkeys(filter(None, (part.strip() for part in text.split(",")))))
        if not names:
            raise OptionError("subscribe names no topic", advice="As in: orders,payments")
        return Topics(names=names)
    if said[0] == "subscribePattern":
        if not text:
            raise OptionError("subscribePattern is empty", advice="As in: orders-.*")
        try:
            re.compile(text)
        except re.error as error:
            raise OptionError(f"subscribePattern {text!r} is no pattern: {error}") from error
        return Topics(pattern=text)
    places = frozenset(
        (topic, number)
        for topic, numbers in _mapping(text, "assign", '{"orders":[0,1]}', list).items()
        for number in _checked(numbers, "assign", '{"orders":[0,1]}')
    )
    if not places:
        raise OptionError("assign names no partition", advice='As in: {"orders":[0,1]}')
    return Topics(assigned=places)


def _limit(own: Mapping[str, str], names: tuple[str, str, str], otherwise: int) -> Limit:
    timestamp, by_timestamp, offsets = names
    if timestamp in own:
        return Limit(everywhere=_number(own, timestamp, at_least=0), by_time=True, option=timestamp)
    if by_timestamp in own:
        example = '{"orders":{"0":1700000000000}}'
        places = tuple(sorted(_places(own[by_timestamp], by_timestamp, example).items()))
        return Limit(places=places, by_time=True, option=by_timestamp)
    text = own.get(offsets, "").strip()
    words = {"": otherwise, "latest": LATEST, "earliest": EARLIEST}
    if text.lower() in words:
        return Limit(everywhere=words[text.lower()], option=offsets)
    example = '{"orders":{"0":23,"1":-1}}'
    found = _places(text, offsets, example)
    for (topic, number), offset in found.items():
        if offset < EARLIEST:
            raise OptionError(
                f"{offsets} of {topic}-{number} is {offset}",
                advice="Use an offset, -1 for latest or -2 for earliest.",
            )
    return Limit(places=tuple(sorted(found.items())), option=offsets)


def _check_batch_limits(start: Limit, end: Limit) -> None:
    if start.has_latest:
        raise OptionError(
            "startingOffsets cannot be latest in a batch read: there would be nothing to read",
            advice="Use earliest or offsets.",
        )
    if not end.by_time and (
        end.everywhere == EARLIEST or any(offset == EARLIEST for _, offset in end.places)
    ):
        raise OptionError(
            "endingOffsets cannot be earliest in a batch read: there would be nothing to read",
            advice="Use latest or offsets.",
        )
    if start.places and end.places and start.by_time == end.by_time:
        if dict(start.places).keys() != dict(end.places).keys():
            raise OptionError(f"{start.option} and {end.option} name different partitions")
        ends = dict(end.places)
        for (topic, number), first in start.places:
            last = ends[topic, number]
            if first > last >= 0:
                raise OptionError(
                    f"{topic}-{number} begins at {first} and ends before it, at {last}",
                    advice=f"Look at {start.option} and {end.option}.",
                )


def _places(text: str, option: str, example: str) -> Positions:
    """`{"topic": {"0": 23}}` as it is written in options and in checkpoints."""
    found: Positions = {}
    for topic, numbers in _mapping(text, option, example, dict).items():
        for number, value in numbers.items():
            if not str(number).isdecimal():
                raise _malformed(option, text, example)
            found[topic, int(number)] = _checked([value], option, example)[0]
    return found


def _mapping(text: str, option: str, example: str, inside: type) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise _malformed(option, text, example) from error
    if not isinstance(value, dict) or not all(isinstance(item, inside) for item in value.values()):
        raise _malformed(option, text, example)
    return value


def _checked(values: list[Any], option: str, example: str) -> list[int]:
    if not all(isinstance(value, int) and not isinstance(value, bool) for value in values):
        raise _malformed(option, json.dumps(values), example)
    return values


def _malformed(option: str, text: str, example: str) -> OptionError:
    return OptionError(f"{option} is {text!r}", advice=f"It should look like {example}.")


def _number(own: Mapping[str, str], name: str, *, at_least: int) -> int | None:
    if name not in own:
        return None
    text = own[name].strip()
    if not re.fullmatch(r"-?\d{1,18}", text) or int(text) < at_least:
        raise OptionError(f"{name} is {text!r}", advice=f"Use a whole number from {at_least} on.")
    return int(text)


def _choice(
    own: Mapping[str, str], name: str, allowed: tuple[str, str], shown: str | None = None
) -> str:
    """One of two words; the first is the default."""
    text = own.get(name, allowed[0]).strip().lower()
    if text not in allowed:
        raise OptionError(f"{shown or name} is {text!r}", advice=f"Use {' or '.join(allowed)}.")
    return text


def _duration_ms(own: Mapping[str, str], name: str, otherwise: int) -> int:
    if name not in own:
        return otherwise
    found = re.fullmatch(r"(\d{1,15})\s*([a-z]*)", own[name].strip().lower())
    if not found or (found.group(2) or "ms") not in _TIME_UNITS_MS:
        raise OptionError(f"{name} is {own[name]!r}", advice="Use a duration, as in 15m or 30s.")
    return int(int(found.group(1)) * _TIME_UNITS_MS[found.group(2) or "ms"])
