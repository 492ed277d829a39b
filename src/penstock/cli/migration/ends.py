"""The two ends of a migration: what there is, where it begins and ends, and reading it.

Only what every Kafka-protocol broker answers is used. Librdkafka's errors come out as
`BrokerError`, with advice.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from penstock.cli.kafka import (
    REQUEST_TIMEOUT_S,
    BrokerError,
    Connection,
    broker_error,
    result_of,
    translated,
)
from penstock.cli.migration.state import Copied
from penstock.client.migration_map import Place

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message
    from confluent_kafka.admin import AdminClient

# Asked of a broker at a time.
QUESTIONS_AT_ONCE: Final = 1_000
# With this much silence before the expected end, something is wrong.
STALL_TIMEOUT_S: Final = 60.0
WAIT_S: Final = 0.2
LOOK_EVERY_S: Final = 0.05
# What is said to a client whose knowledge of leaders is old or gone, and how often that may happen.
STALE: Final = (
    "FENCED_LEADER_EPOCH",
    "UNKNOWN_LEADER_EPOCH",
    "NOT_LEADER_FOR_PARTITION",
    # The client library's own: it has found no leaders.
    "_NOENT",
)
STALE_ATTEMPTS: Final = 5
# The client library cannot write an older timestamp: zero means now to it.
FIRST_TIMESTAMP_MS: Final = 1

READING: Final = {
    "isolation.level": "read_committed",
    # What is fetched ahead and not yet taken.
    "queued.max.messages.kbytes": 32_768,
    "fetch.wait.max.ms": 100,
    # Partitions at their end are asked again soon.
    "fetch.error.backoff.ms": 50,
    "reconnect.backoff.max.ms": 500,
}


@dataclass(frozen=True, slots=True)
class Bounds:
    """The first offset of a partition, and the one behind the last committed record."""

    start: int
    end: int


class Tail(NamedTuple):
    """What follows an offset: the first committed record, if there is any, and the end."""

    record: int | None
    end: int

    @property
    def next(self) -> int:
        """Where a reader goes on: never behind a record."""
        return self.end if self.record is None else self.record


# Which micro-batches flows have written.
CARRIED: Final = frozenset({"__penstock_flows"})


class End:
    """One cluster."""

    def __init__(self, connection: Connection, what: str) -> None:
        self.connection = connection
        self.what = what

    @property
    def admin(self) -> AdminClient:
        return self.connection.admin()

    def cluster_id(self) -> str:
        doing = f"asking the {self.what} for its id"
        with translated(doing):
            future = self.admin.describe_cluster(request_timeout=REQUEST_TIMEOUT_S)
        return str(result_of(future, doing).cluster_id)

    def topics(self) -> dict[str, int]:
        """The topics that are not a broker's own, with their numbers of partitions.

        Of those whose names begin with underscores only what flows need elsewhere.
        """
        with translated(f"listing the topics of the {self.what}"):
            found = self.admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics
        return {
            name: len(topic.partitions)
            for name, topic in sorted(found.items())
            if (not name.startswith("__") or name in CARRIED) and topic.error is None
        }

    def await_partitions(self, counts: Mapping[str, int]) -> None:
        """Until topics have so many partitions, each with a leader: a cluster takes its time."""
        deadline = time.monotonic() + REQUEST_TIMEOUT_S
        while True:
            with translated(f"looking for topics of the {self.what}"):
                found = self.admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics
            missing = [
                name
                for name, count in counts.items()
                if name not in found
                or sum(part.leader >= 0 for part in found[name].partitions.values()) < count
            ]
            if not missing:
                return
            if time.monotonic() > deadline:
                raise BrokerError(
                    f"{missing[0]} of the {self.what} has partitions without a leader",
                    advice="Look at the cluster: a broker may be down. Then start the command "
                    "again.",
                )
            time.sleep(LOOK_EVERY_S)

    def topic_ids(self, names: Iterable[str]) -> dict[str, str]:
        from confluent_kafka import TopicCollection

        wanted = list(names)
        if not wanted:
            return {}
        doing = f"describing topics of the {self.what}"
        with translated(doing):
            futures = self.admin.describe_topics(
                TopicCollection(wanted), request_timeout=REQUEST_TIMEOUT_S
            )
        return {name: str(result_of(futures[name], doing).topic_id) for name in wanted}

    def bounds(self, places: Iterable[Place]) -> dict[Place, Bounds]:
        """Where partitions begin and end, for readers of committed records."""
        wanted = list(places)
        found: dict[Place, Bounds] = {}
        for at in range(0, len(wanted), QUESTIONS_AT_ONCE):
            some = wanted[at : at + QUESTIONS_AT_ONCE]
            starts, ends = self._offsets(some, latest=False), self._offsets(some, latest=True)
            found |= {place: Bounds(starts[place], ends[place]) for place in some}
        return found

    def uncommitted(self, places: Iterable[Place]) -> dict[Place, int]:
        """Partitions that go on behind their first open transaction, with the offset of it."""
        wanted = list(places)
        found: dict[Place, int] = {}
        for at in range(0, len(wanted), QUESTIONS_AT_ONCE):
            some = wanted[at : at + QUESTIONS_AT_ONCE]
            stable = self._offsets(some, latest=True)
            last = self._offsets(some, latest=True, committed=False)
            found |= {place: stable[place] for place in some if last[place] > stable[place]}
        return found

    def _offsets(
        self, places: list[Place], *, latest: bool, committed: bool = True
    ) -> dict[Place, int]:
        for _ in range(STALE_ATTEMPTS):
            try:
                return self._list_offsets(places, latest=latest, committed=committed)
            except BrokerError as error:
                if error.kafka_name not in STALE:
                    raise
                # A leader was elected anew, and this client does not know it yet.
                known = self.connection
                self.connection = Connection(known.bootstrap, known.settings)
        return self._list_offsets(places, latest=latest, committed=committed)

    def _list_offsets(
        self, places: list[Place], *, latest: bool, committed: bool
    ) -> dict[Place, int]:
        from confluent_kafka import IsolationLevel, TopicPartition
        from confluent_kafka.admin import OffsetSpec

        offset_spec: Any = OffsetSpec  # without types in some versions
        spec = offset_spec.latest() if latest else offset_spec.earliest()
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        doing = f"asking the {self.what} for offsets"
        with translated(doing):
            futures = self.admin.list_offsets(
                {TopicPartition(*place): spec for place in places},
                isolation_level=level,
                request_timeout=REQUEST_TIMEOUT_S,
            )
        return {
            Place(at.topic, at.partition): result_of(future, doing).offset
            for at, future in futures.items()
        }

    def reader(self, starts: Mapping[Place, int]) -> Consumer:
        """A consumer of committed records at these offsets."""
        from confluent_kafka import TopicPartition

        consumer = self.connection.consumer(READING)
        with translated(f"reading the {self.what}"):
            consumer.assign([TopicPartition(*place, offset) for place, offset in starts.items()])
        return consumer

    def tails(self, starts: Mapping[Place, int]) -> dict[Place, Tail]:
        """What follows these offsets. Aborted records and markers take offsets, and are nothing."""
        bounds = self.bounds(starts)
        ranges = {
            place: (max(start, bounds[place].start), bounds[place].end)
            for place, start in starts.items()
        }
        found = {place: offset for place, offset, _ in self.records(ranges, first_only=True)}
        return {
            place: Tail(found.get(place), max(bounds[place].end, start))
            for place, start in starts.items()
        }

    def records(
        self, ranges: Mapping[Place, tuple[int, int]], *, first_only: bool = False
    ) -> Iterator[tuple[Place, int, Copied]]:
        """The committed records of offset ranges, each partition in order; or its first one."""
        from confluent_kafka import TopicPartition

        left = {place: bounds for place, bounds in ranges.items() if bounds[0] < bounds[1]}
        if not left:
            return
        consumer = self.reader({place: start for place, (start, _) in left.items()})
        try:
            last_news = time.monotonic()
            while left:
                for place, offset, record in taken(consumer, 500, WAIT_S, self.what):
                    last_news = time.monotonic()
                    if place not in left:
                        continue
                    end = left[place][1]
                    if record is not None and offset < end:
                        yield place, offset, record
                    is_first = first_only and record is not None
                    if is_first or offset + (record is not None) >= end:
                        del left[place]
                        consumer.pause([TopicPartition(*place)])
                check_stall(last_news, self.what)
        finally:
            consumer.close()


def check_stall(last_news: float, what: str) -> None:
    if time.monotonic() - last_news > STALL_TIMEOUT_S:
        raise BrokerError(
            f"nothing came from the {what} for {STALL_TIMEOUT_S:.0f} s",
            advice="Is it still running? Start the command again: it goes on where it was.",
        )


def taken(
    consumer: Consumer, limit: int, wait_s: float, what: str
) -> Iterator[tuple[Place, int, Copied | None]]:
    """What a consumer has: records with their offsets, and None where a partition ends for now."""
    for message in consumer.consume(limit, wait_s):
        found = _event(message, what)
        if found is not None:
            yield found


def _event(message: Message, what: str) -> tuple[Place, int, Copied | None] | None:
    from confluent_kafka import KafkaError

    error = message.error()
    if error is not None and error.code() != KafkaError._PARTITION_EOF:
        waits = (KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN)
        if error.retriable() or error.code() in waits:
            # The client goes on trying by itself.
            return None
        raise _reading_error(message, what)
    topic, partition, offset = message.topic(), message.partition(), message.offset()
    assert topic is not None
    assert partition is not None
    assert offset is not None
    return Place(topic, partition), offset, None if error is not None else record_of(message)


def _reading_error(message: Message, what: str) -> BrokerError:
    from confluent_kafka import KafkaError

    error = message.error()
    assert error is not None
    place = f"{message.topic()}-{message.partition()}"
    if error.code() == KafkaError._AUTO_OFFSET_RESET:
        failure = BrokerError(
            f"{place}: retention has removed records of the {what} before they were read",
            advice="Start the command again: it goes on with the first record that is still "
            "there, and says how many are missing. Raise retention.ms of the topic first.",
        )
        failure.kafka_name = error.name()
        return failure
    return broker_error(error, f"reading {place} of the {what}")


def record_of(message: Message) -> Copied:
    """A message as it is copied."""
    headers: Any = message.headers() or ()
    key: Any = message.key()
    value: Any = message.value()
    timestamp_ms = message.timestamp()[1]
    clamped = timestamp_ms < FIRST_TIMESTAMP_MS
    written_ms = FIRST_TIMESTAMP_MS if clamped else timestamp_ms
    return Copied(key, value, written_ms, tuple(headers), clamped)
