"""What scenarios do again and again: send, read to an end, be a member of a group, name an error.

Nothing here sleeps; whatever waits, polls clients until a condition holds, and says what it saw
when it does not in time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from time import monotonic
from typing import Any, Final

from confluent_kafka import (
    AcknowledgeType,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    ShareConsumer,
    TopicPartition,
)

from conformance.scenario import REQUEST_TIMEOUT_S, Cluster

TIMEOUT_S: Final = 60.0
POLL_S: Final = 0.02
# Whoever wants to see that nothing comes looks for so long.
SILENCE_S: Final = 0.5


# ---- producing -------------------------------------------------------------------------------


def send(
    producer: Producer, topic: str, values: Iterable[str | bytes | None], partition: int = 0,
    **more: Any,
) -> None:  # fmt: skip
    """Hand records to a producer and wait for their acknowledgements."""
    errors: list[str] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            errors.append(error.name())

    for value in values:
        producer.produce(topic, value, partition=partition, on_delivery=delivered, **more)
    assert producer.flush(TIMEOUT_S) == 0, "not everything was sent in time"
    assert not errors, errors


def sent_errors(
    producer: Producer, topic: str, value: bytes | str | None, partition: int = 0, **more: Any
) -> str | None:
    """The name of the error that one record met; None if it was taken."""
    errors: list[str | None] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        errors.append(None if error is None else error.name())

    producer.produce(topic, value, partition=partition, on_delivery=delivered, **more)
    assert producer.flush(TIMEOUT_S) == 0, "it was not sent in time"
    return errors[0]


def fill(cluster: Cluster, topic: str, count: int, partition: int = 0, first: int = 0) -> None:
    """Records `0`, `1`, ... in a partition."""
    send(cluster.producer(), topic, map(str, range(first, first + count)), partition)


# ---- consuming -------------------------------------------------------------------------------


def text(data: str | bytes | None) -> str | None:
    return data.decode() if isinstance(data, bytes) else data


def value_of(message: Message) -> str | None:
    return text(message.value())


def offset_of(message: Message) -> int:
    offset = message.offset()
    assert offset is not None
    return offset


def partition_of(message: Message) -> int:
    partition = message.partition()
    assert partition is not None
    return partition


def read_to_end(
    cluster: Cluster, topic: str, partitions: Sequence[int] = (0,), start: int = 0, **config: Any
) -> list[Message]:
    """All records of partitions from an offset up to the end, by assignment."""
    consumer = cluster.consumer(**config)
    consumer.assign([TopicPartition(topic, number, start) for number in partitions])
    messages: list[Message] = []
    ended: set[int] = set()
    deadline = monotonic() + TIMEOUT_S
    while len(ended) < len(partitions):
        assert monotonic() < deadline, f"the end did not come; {len(messages)} records did"
        for message in consumer.consume(1000, POLL_S):
            error = message.error()
            if error is None:
                messages.append(message)
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add(partition_of(message))
            elif not error.retriable():
                raise KafkaException(error)
    return messages


def values(messages: Iterable[Message]) -> list[str | None]:
    return [value_of(message) for message in messages]


# ---- members of groups -----------------------------------------------------------------------


class Member:
    """A consumer in a group, and what happened to it."""

    def __init__(self, cluster: Cluster, group: str, topics: Sequence[str], **config: Any) -> None:
        self.records: list[Message] = []
        # Kafka's names of errors, and what was said.
        self.errors: list[str] = []
        self.reasons: list[str] = []
        # The partitions of each callback, in order.
        self.assigned: list[list[int]] = []
        self.revoked: list[list[int]] = []
        self.consumer = cluster.consumer(group, **config)
        self.consumer.subscribe(list(topics), on_assign=self._on_assign, on_revoke=self._on_revoke)

    def _on_assign(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self.assigned.append(sorted(part.partition for part in partitions))

    def _on_revoke(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self.revoked.append(sorted(part.partition for part in partitions))

    @property
    def partitions(self) -> list[int]:
        """The numbers of the partitions that it has now."""
        return sorted(part.partition for part in self.consumer.assignment())

    @property
    def values(self) -> list[str | None]:
        return values(self.records)

    def poll(self) -> None:
        for message in self.consumer.consume(500, POLL_S):
            error = message.error()
            if error is None:
                self.records.append(message)
            elif error.code() != KafkaError._PARTITION_EOF:
                self.errors.append(error.name())
                self.reasons.append(error.str())

    def commit(self) -> None:
        self.consumer.commit(asynchronous=False)


def drive(members: Sequence[Member], condition: Callable[[], Any]) -> None:
    """Poll all members until the condition holds."""
    deadline = monotonic() + TIMEOUT_S
    while not condition():
        for member in members:
            member.poll()
        assert monotonic() < deadline, "it did not happen: " + "; ".join(
            f"partitions {m.partitions}, {len(m.records)} records, errors {m.errors}"
            for m in members
        )


def drive_for(members: Sequence[Member], seconds: float = SILENCE_S) -> None:
    """Poll all members for a while, to see what does not happen."""
    until = monotonic() + seconds
    while monotonic() < until:
        for member in members:
            member.poll()


def spread(members: Sequence[Member]) -> list[list[int]]:
    """Who has what, without regard to who is who."""
    return sorted(member.partitions for member in members)


# ---- members of share groups -----------------------------------------------------------------


def take(
    consumer: ShareConsumer,
    count: int,
    decide: Callable[[Message], AcknowledgeType] = lambda _: AcknowledgeType.ACCEPT,
) -> list[Message]:
    """Poll until so many records have come; acknowledge each as decided, and see that it counts."""
    messages: list[Message] = []
    deadline = monotonic() + TIMEOUT_S
    while len(messages) < count:
        for message in received(consumer):
            consumer.acknowledge(message, decide(message))
            messages.append(message)
        assert monotonic() < deadline, f"only {values(messages)} came, of {count}"
    for error in consumer.commit_sync(TIMEOUT_S).values():
        assert error is None, error
    return messages


def hold(consumer: ShareConsumer) -> list[Message]:
    """Poll until records come, and leave them unacknowledged."""
    deadline = monotonic() + TIMEOUT_S
    while not (messages := received(consumer)):
        assert monotonic() < deadline, "nothing came"
    return messages


def received(consumer: ShareConsumer) -> list[Message]:
    """The records of one poll."""
    return [message for message in consumer.poll(POLL_S) if message.error() is None]


def what_comes(consumer: ShareConsumer, seconds: float = SILENCE_S) -> list[str | None]:
    """What comes within a while; it is accepted."""
    messages: list[Message] = []
    until_then = monotonic() + seconds
    while monotonic() < until_then:
        for message in received(consumer):
            consumer.acknowledge(message, AcknowledgeType.ACCEPT)
            messages.append(message)
    return values(messages)


# ---- errors and conditions -------------------------------------------------------------------


def error_of(call: Callable[[], Any]) -> str | None:
    """The name of the Kafka error that a call ends in; None if it succeeds."""
    try:
        call()
    except KafkaException as failure:
        error: KafkaError = failure.args[0]
        return error.name()
    return None


def outcome(future: Any) -> str | None:
    """The name of the error of an admin call; None if it succeeded."""
    return error_of(lambda: future.result(REQUEST_TIMEOUT_S))


def until(condition: Callable[[], Any]) -> Any:
    """What a condition gives, once it gives something; it must take its time by itself."""
    deadline = monotonic() + TIMEOUT_S
    while not (value := condition()):
        assert monotonic() < deadline, "it did not happen in time"
    return value
