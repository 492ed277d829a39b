"""Dead letters: read from their topic, and sent back to where they came from.

A letter's headers say what it is: KIP-1191's, or of flows and sinks our own. Sending back goes by
*kinds*: letters of one group, flow or sink, from one topic, for one reason. How far each kind has
been sent back is kept as the committed offsets of a group of its own, and moves in the same
transaction as the records, so that a letter is sent back once, however often the command is stopped
and run again, with whatever filter.

Works on any Kafka broker; on Apache Kafka the letters hold the records only if their group has
`errors.deadletterqueue.copy.record.enable`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from penstock.cli.kafka import REQUEST_TIMEOUT_S, BrokerError, Connection, broker_error, translated
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from confluent_kafka import Consumer, Message, Producer

PREFIX: Final = "__dlq.errors."
# Of what a flow or a sink could not read or take.
UNREAD_PREFIX: Final = "penstock.error."
UNREAD: Final = "unread"
REJECTED: Final = "rejected"
LIMIT: Final = "limit"
OTHER: Final = "other"
REASONS: Final = (REJECTED, LIMIT, OTHER)
PROGRESS_PREFIX: Final = "penstock-redrive"

_POLL_S: Final = 0.5
_READ_TIMEOUT_S: Final = 30.0
_BATCH: Final = 500


class LetterKind(NamedTuple):
    """Whose letters, from where, why."""

    group: str
    topic: str
    reason: str

    @property
    def progress_group(self) -> str:
        """The group whose offsets say how far this kind was sent back.

        No two kinds have the same: a topic's name has no slash, and the group's comes last.
        """
        return "/".join((PROGRESS_PREFIX, self.reason, self.topic, self.group))


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter."""

    kind: LetterKind
    # Where the letter is.
    partition: int
    offset: int
    # Where the record was.
    source_partition: int
    source_offset: int
    delivery_count: int | None
    message: str
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    # The record's own.
    headers: tuple[tuple[str, bytes | None], ...]

    @property
    def is_bare(self) -> bool:
        """Whether it only says where the record is, or there is none: a row that a flow made."""
        if ":" in self.kind.topic:
            return True
        return self.key is None and self.value is None and not self.headers


@dataclass(slots=True)
class Outcome:
    """What came of sending back, or would come of it."""

    sent: Counter[LetterKind] = field(default_factory=Counter)
    # Sent back by an earlier run.
    before: Counter[LetterKind] = field(default_factory=Counter)
    # Without the record, so that there is nothing to send.
    bare: Counter[LetterKind] = field(default_factory=Counter)
    # In the topic, but not dead letters.
    foreign: int = 0

    def add(self, other: Outcome) -> None:
        """Count what came of another topic as well."""
        self.sent += other.sent
        self.before += other.before
        self.bare += other.bare
        self.foreign += other.foreign


def reason_of(message: str) -> str:
    """Why, from the words of the letter: ours and Apache Kafka's."""
    words = message.lower()
    if "reject" in words:
        return REJECTED
    return LIMIT if "delivery count" in words else OTHER


def owner_of(told: Mapping[str, str]) -> str:
    """Which flow or sink a dead letter is of, as the group of its kind; empty if it is not said."""
    for kind in ("flow", "sink"):
        if kind in told:
            return f"{kind}:{told[kind]}"
    return ""


def letter_of(message: Message) -> Letter | None:
    """The letter in a record; None if it is none."""
    told: dict[str, str] = {}
    unread: dict[str, str] = {}
    own: list[tuple[str, bytes | None]] = []
    headers = cast("list[tuple[str, str | bytes | None]]", message.headers() or [])
    for name, value in headers:
        data = value.encode() if isinstance(value, str) else value
        if name.startswith(PREFIX):
            told[name.removeprefix(PREFIX)] = (data or b"").decode(errors="replace")
        elif name.startswith(UNREAD_PREFIX):
            unread[name.removeprefix(UNREAD_PREFIX)] = (data or b"").decode(errors="replace")
        else:
            own.append((name, data))
    if not told and unread:
        told = {**unread, "group": owner_of(unread), "message": unread.get("reason", "")}
    try:
        kind = LetterKind(told["group"], told["topic"],
                          UNREAD if unread else reason_of(told.get("message", "")))  # fmt: skip
        source = int(told["partition"]), int(told["offset"])
    except (KeyError, ValueError):
        return None
    count = told.get("delivery.count", "")
    partition, offset = message.partition(), message.offset()
    assert partition is not None
    assert offset is not None
    return Letter(
        kind, partition, offset, *source, int(count) if count.isdigit() else None,
        told.get("message", ""), message.timestamp()[1], _bytes(message.key()),
        _bytes(message.value()), tuple(own),
    )  # fmt: skip


def _bytes(data: Any) -> bytes | None:
    return data.encode() if isinstance(data, str) else data


# ---- reading -----------------------------------------------------------------------------------


class Reader:
    """Reads a dead-letter topic from its start to the end that it has now."""

    def __init__(self, connection: Connection, topic: str) -> None:
        self._connection = connection
        self.topic = topic
        self._consumer = connection.consumer({"isolation.level": "read_committed"})
        self.foreign = 0

    def close(self) -> None:
        self._consumer.close()

    def letters(self) -> Iterator[Letter]:
        """Every letter, partition by partition in their order."""
        from confluent_kafka import TopicPartition

        for number in self._partitions():
            with translated(f"reading {self.topic}"):
                low, high = self._consumer.get_watermark_offsets(
                    TopicPartition(self.topic, number), REQUEST_TIMEOUT_S
                )
                if low < high:
                    self._consumer.assign([TopicPartition(self.topic, number, low)])
            if low < high:
                yield from self._read(high)

    def _partitions(self) -> list[int]:
        with translated(f"reading {self.topic}"):
            metadata = self._consumer.list_topics(self.topic, REQUEST_TIMEOUT_S)
        found = metadata.topics[self.topic]
        if found.error is not None:
            raise broker_error(found.error, f"reading {self.topic}")
        return sorted(found.partitions)

    def _read(self, end: int) -> Iterator[Letter]:
        from confluent_kafka import KafkaError

        waited_s = 0.0
        while waited_s < _READ_TIMEOUT_S:
            with translated(f"reading {self.topic}"):
                messages = self._consumer.consume(_BATCH, _POLL_S)
            waited_s = 0.0 if messages else waited_s + _POLL_S
            for message in messages:
                error = message.error()
                if error is not None:
                    if error.code() == KafkaError._PARTITION_EOF:
                        return
                    raise broker_error(error, f"reading {self.topic}")
                offset = message.offset()
                if offset is None or offset >= end:
                    return
                letter = letter_of(message)
                if letter is None:
                    self.foreign += 1
                else:
                    yield letter
        raise BrokerError(f"reading {self.topic}: nothing came for {_READ_TIMEOUT_S:.0f} s")


# ---- sending back ------------------------------------------------------------------------------


class Progress:
    """How far each kind of letters has been sent back, per partition of their topic."""

    def __init__(self, connection: Connection, topic: str) -> None:
        self._connection = connection
        self._topic = topic
        self._consumers: dict[LetterKind, Consumer] = {}
        self._offsets: dict[tuple[LetterKind, int], int] = {}

    def close(self) -> None:
        for consumer in self._consumers.values():
            consumer.close()

    def consumer(self, kind: LetterKind) -> Consumer:
        """A client that speaks for the kind's group, and never joins it."""
        consumer = self._consumers.get(kind)
        if consumer is None:
            consumer = self._connection.consumer({"group.id": kind.progress_group})
            self._consumers[kind] = consumer
        return consumer

    def reached(self, kind: LetterKind, partition: int) -> int:
        """The first offset that was not sent back."""
        from confluent_kafka import TopicPartition

        known = self._offsets.get((kind, partition))
        if known is None:
            with translated("asking what was sent back before"):
                (place,) = self.consumer(kind).committed(
                    [TopicPartition(self._topic, partition)], REQUEST_TIMEOUT_S
                )
            known = self._offsets[kind, partition] = max(place.offset, 0)
        return known


def redrive(
    connection: Connection,
    topic: str,
    wanted: Callable[[LetterKind], bool],
    *,
    execute: bool,
    limit: int | None = None,
    target: str | None = None,
) -> Outcome:
    """Send the letters of the wanted kinds back, or count what would be sent."""
    outcome = Outcome()
    reader, progress = Reader(connection, topic), Progress(connection, topic)
    sender = _Sender(connection, topic, progress, target) if execute else None
    try:
        for letter in reader.letters():
            kind = letter.kind
            if not wanted(kind):
                continue
            if letter.offset < progress.reached(kind, letter.partition):
                outcome.before[kind] += 1
            elif letter.is_bare:
                outcome.bare[kind] += 1
            else:
                outcome.sent[kind] += 1
                if sender is not None:
                    sender.add(letter)
            if limit is not None and outcome.sent.total() >= limit:
                break
        if sender is not None:
            sender.finish()
    finally:
        outcome.foreign = reader.foreign
        progress.close()
        reader.close()
    return outcome


class _Sender:
    """Sends letters back, some hundreds in one transaction with how far that is."""

    def __init__(
        self, connection: Connection, topic: str, progress: Progress, target: str | None
    ) -> None:
        self._topic = topic
        self._target = target
        self._progress = progress
        self._waiting: list[Letter] = []
        self._failed: list[Any] = []
        self._partitions: dict[str, int] = {}
        self._producer: Producer = connection.producer(
            {"transactional.id": f"{PROGRESS_PREFIX}.{topic}", "linger.ms": 5}
        )
        # Fences another run of this command on the same letters.
        with translated("beginning to send back"):
            self._producer.init_transactions(REQUEST_TIMEOUT_S)

    def add(self, letter: Letter) -> None:
        self._waiting.append(letter)
        if len(self._waiting) >= _BATCH:
            self.finish()

    def finish(self) -> None:
        """Send what waits; on return it is sent, and noted as sent."""
        if not self._waiting:
            return
        letters, self._waiting = self._waiting, []
        with translated("sending back"):
            self._producer.begin_transaction()
            try:
                for letter in letters:
                    self._send(letter)
                self._note(letters)
                self._producer.commit_transaction(REQUEST_TIMEOUT_S)
            except BaseException:
                self._producer.abort_transaction(REQUEST_TIMEOUT_S)
                raise
        if self._failed:
            raise broker_error(self._failed[0], "sending back")

    def _send(self, letter: Letter) -> None:
        topic = self._target or letter.kind.topic
        options: dict[str, Any] = {}
        if letter.source_partition < self._partition_count(topic):
            options["partition"] = letter.source_partition
        self._producer.produce(
            topic,
            value=letter.value,
            key=letter.key,
            headers=list(letter.headers),
            on_delivery=self._delivered,
            **options,
        )
        self._producer.poll(0)

    def _partition_count(self, topic: str) -> int:
        count = self._partitions.get(topic)
        if count is None:
            found = self._producer.list_topics(topic, REQUEST_TIMEOUT_S).topics[topic]
            if found.error is not None:
                raise broker_error(found.error, f"sending back to {topic}")
            count = self._partitions[topic] = len(found.partitions)
        return count

    def _delivered(self, error: Any, _message: Any) -> None:
        if error is not None:
            self._failed.append(error)

    def _note(self, letters: Iterable[Letter]) -> None:
        """Let how far it is become known together with the records."""
        from confluent_kafka import TopicPartition

        reached: dict[LetterKind, dict[int, int]] = {}
        for letter in letters:
            places = reached.setdefault(letter.kind, {})
            places[letter.partition] = max(places.get(letter.partition, 0), letter.offset + 1)
        for kind, places in reached.items():
            self._producer.send_offsets_to_transaction(
                [TopicPartition(self._topic, number, at) for number, at in places.items()],
                self._progress.consumer(kind).consumer_group_metadata(),
                REQUEST_TIMEOUT_S,
            )


def no_topic(group: str) -> PenstockError:
    """A group has no topic for dead letters."""
    return PenstockError(
        f"group {group!r} has no dead-letter topic",
        advice=f"Set one: `penstock queue alter {group} "
        f"-c errors.deadletterqueue.topic.name=dlq.{group}`.",
    )
