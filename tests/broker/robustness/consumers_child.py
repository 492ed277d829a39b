"""Consumers in a process of their own, to be killed and held: `python -m` with settings as JSON.

Each does what an application does, and tells of it in lines of JSON on its standard output, every
line with the time of the system-wide monotonic clock. It ends when its standard input does, so it
never outlives its parent; a line `hang` there stops its polling, `go` lets it go on.

- `transform`: reads a topic, writes another, and commits both in transactions. Whatever cannot be
  mended, a fenced producer or a fatal error, makes it begin anew with new clients.
- `member`: reads a topic as a member of a group and commits what it has read.
- `share`: takes records from a queue, and accepts, releases or rejects each of them.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sys
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Any, ClassVar, Final

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

CALL_TIMEOUT_S: Final = 10.0
POLL_S: Final = 0.1
COMMON: Final[dict[str, Any]] = {
    "log_level": 0,
    # librdkafka 2.16 remembers a group's coordinator over a re-bootstrap, though it has given that
    # one up: producers then wait for ever in `send_offsets_to_transaction` (its issue 5511).
    "metadata.recovery.strategy": "none",
    "reconnect.backoff.ms": 10,
    "reconnect.backoff.max.ms": 100,
    "socket.timeout.ms": 4_000,
    "fetch.wait.max.ms": 50,
    "retry.backoff.ms": 20,
    "topic.metadata.refresh.fast.interval.ms": 50,
}
# Answers that say for sure that an acknowledgement has changed nothing.
REFUSALS: Final = frozenset(
    {
        KafkaError.INVALID_RECORD_STATE,
        KafkaError.SHARE_SESSION_NOT_FOUND,
        KafkaError.INVALID_SHARE_SESSION_EPOCH,
        KafkaError.UNKNOWN_MEMBER_ID,
    }
)
# Not for share consumers.
READER: Final = {"fetch.error.backoff.ms": 20, "auto.offset.reset": "earliest"}


def tell(event: str, **fields: Any) -> None:
    """One line, written whole and at once: what comes after it has not happened yet."""
    line = json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n"
    os.write(1, line.encode())


class Role(ABC):
    """What a child does until it is told to stop."""

    # Arguments that are not settings of the client.
    own: ClassVar[tuple[str, ...]] = ()

    def __init__(self, settings: dict[str, Any]) -> None:
        self.name: str = settings.pop("name")
        self.topic: str = settings.pop("topic")
        self.rng = random.Random(repr((settings.pop("seed"), self.name)))
        self.options = {name: settings.pop(name) for name in self.own}
        # How often it begins anew; 0: as often as it takes.
        self.lives: int = settings.pop("lives", 0)
        self.config = {**COMMON, **settings}
        self.stopping = threading.Event()
        self.free = threading.Event()
        self.free.set()
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            if line.strip() == "hang":
                self.free.clear()
            else:
                self.free.set()
        self.stopping.set()
        self.free.set()

    def may_go_on(self) -> bool:
        """False when it is to stop; waits while it is to hang."""
        if not self.free.is_set():
            tell("hangs")
            self.free.wait()
            tell("goes on")
        return not self.stopping.is_set()

    def run(self) -> None:
        """Begin anew after every failure, as a supervisor of the application would."""
        tell("started", pid=os.getpid())
        lives = itertools.count(1)
        while self.may_go_on():
            try:
                self.live()
            except KafkaException as error:
                tell("trouble", error=str(error))
                if next(lives) == self.lives:
                    break
                self.stopping.wait(0.05)
        tell("stopped")

    @abstractmethod
    def live(self) -> None:
        """One life of its clients."""


def patiently(call: Any, *arguments: Any) -> None:
    """Call a step of a transaction again for as long as that may help."""
    while True:
        try:
            call(*arguments)
        except KafkaException as error:
            if not error.args[0].retriable() or error.args[0].txn_requires_abort():
                raise
            tell("retries", error=f"{call.__name__}: {error}")
        else:
            return


class Transform(Role):
    """Consume, transform, produce: each record's number, to the partition of the same number."""

    own = ("to", "group", "instance", "protocol", "transactional_id", "batch", "abort_share",
           "brink")  # fmt: skip

    def live(self) -> None:
        producer = Producer(
            {
                **self.config,
                "transactional.id": self.options["transactional_id"],
                "transaction.timeout.ms": 10_000,
                "message.timeout.ms": 10_000,
                "linger.ms": 0,
            }
        )
        patiently(producer.init_transactions, CALL_TIMEOUT_S)
        tell("ready")
        self._batch: list[Message] = []
        # Where the next record of a partition is expected; told where another comes.
        self._next: dict[int, int] = {}
        consumer = Consumer(self._consumer_config())
        try:
            consumer.subscribe([self.topic], on_revoke=self._drop, on_lost=self._drop)
            while self.may_go_on():
                self._round(producer, consumer)
        finally:
            with suppress(KafkaException):
                consumer.close()

    def _consumer_config(self) -> dict[str, Any]:
        config = {
            **self.config,
            **READER,
            "group.id": self.options["group"],
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
        if self.options["protocol"] == "consumer":
            config["group.protocol"] = "consumer"
        else:
            config |= {"session.timeout.ms": 2_000, "heartbeat.interval.ms": 200}
            config["partition.assignment.strategy"] = self.options["protocol"]
        if self.options["instance"]:
            config["group.instance.id"] = self.options["instance"]
        return config

    def _drop(self, _: Consumer, places: list[TopicPartition]) -> None:
        """What belongs to another from now on must not be written here."""
        gone = {place.partition for place in places}
        self._batch = [message for message in self._batch if message.partition() not in gone]

    def _round(self, producer: Producer, consumer: Consumer) -> None:
        self._batch = []
        for _ in range(self.options["batch"]):
            message = consumer.poll(0.01 if self._batch else POLL_S)
            if message is None:
                break
            error = message.error()
            if error is None:
                self._batch.append(message)
                self._note_position(message)
            elif error.fatal():
                raise KafkaException(error)
            else:
                tell("consumer error", error=str(error))
        if not self._batch:
            return
        try:
            done = self._transaction(producer, consumer, self._batch)
        except KafkaException as error:
            if not error.args[0].txn_requires_abort():
                raise
            tell("refused", error=str(error))
            patiently(producer.abort_transaction, CALL_TIMEOUT_S)
            done = False
        tell("ended", transaction=self._transaction_name, committed=done, written=self._written)
        if not done:
            # Where to is known to the broker alone.
            for place in consumer.committed(consumer.assignment(), CALL_TIMEOUT_S):
                tell("committed", place=(place.partition, place.offset), error=str(place.error))
                if place.error is not None:
                    # Then its offset says nothing.
                    raise KafkaException(place.error)
                start = max(place.offset, 0)
                consumer.seek(TopicPartition(place.topic, place.partition, start))

    def _note_position(self, message: Message) -> None:
        number, offset = message.partition() or 0, message.offset() or 0
        if self._next.get(number) != offset:
            tell("begins", place=(number, offset))
        self._next[number] = offset + 1

    def _transaction(self, producer: Producer, consumer: Consumer, batch: list[Message]) -> bool:
        name = f"{self.name}.{os.getpid()}.{time.monotonic_ns()}"
        self._transaction_name = name
        self._written: list[tuple[int, int, str]] = []
        values = [(m.partition() or 0, f"{m.partition()}:{m.offset()}:{name}") for m in batch]
        tell("sending", transaction=name, values=values)
        producer.begin_transaction()
        ends: dict[int, int] = {}
        for message, (number, value) in zip(batch, values, strict=True):
            producer.produce(
                self.options["to"], value, partition=number, on_delivery=self._on_delivery
            )
            ends[number] = (message.offset() or 0) + 1
        if self.rng.random() < self.options["abort_share"]:
            if self.rng.random() < 0.5:
                producer.flush(CALL_TIMEOUT_S)
            patiently(producer.abort_transaction, CALL_TIMEOUT_S)
            return False
        places = [TopicPartition(self.topic, number, end) for number, end in ends.items()]
        if self.options["brink"] == "offsets":
            self._wait_at_the_brink(producer)
        patiently(
            producer.send_offsets_to_transaction,
            places,
            consumer.consumer_group_metadata(),
            CALL_TIMEOUT_S,
        )
        if self.options["brink"] == "commit":
            self._wait_at_the_brink(producer)
        tell("committing", transaction=name)
        patiently(producer.commit_transaction, CALL_TIMEOUT_S)
        return True

    def _wait_at_the_brink(self, producer: Producer) -> None:
        """Records are written, and nothing is decided: a bad moment to be held."""
        producer.flush(CALL_TIMEOUT_S)
        self.free.clear()
        tell("at the brink")
        self.free.wait()

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        value: Any = message.value()
        if error is None:
            where = message.partition() or 0, message.offset() or 0
            self._written.append((*where, value.decode()))


class Member(Role):
    """One member of a group, which says what it owns, has read and has committed."""

    def live(self) -> None:
        consumer = Consumer({**self.config, **READER, "enable.auto.commit": False})
        consumer.subscribe(
            [self.topic],
            on_assign=lambda _, places: self._tell("assigned", places),
            on_revoke=self._on_revoke,
            on_lost=self._on_lost,
        )
        # What is read and not yet committed, of the partitions that it owns.
        self._read: dict[int, int] = {}
        self._failed: KafkaException | None = None
        try:
            while self.may_go_on():
                self._step(consumer)
                if self._failed is not None:
                    raise self._failed
        finally:
            with suppress(KafkaException):
                consumer.close()
            tell("left")

    @staticmethod
    def _tell(event: str, places: list[TopicPartition]) -> None:
        tell(event, partitions=[place.partition for place in places])

    def _on_revoke(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        self._commit(consumer)
        self._forget(places)
        self._tell("revoked", places)

    def _on_lost(self, consumer: Consumer, places: list[TopicPartition]) -> None:
        self._forget(places)
        self._tell("lost", places)

    def _forget(self, places: list[TopicPartition]) -> None:
        """Somebody else reads on from the last commit: a later one of ours would set it back."""
        for place in places:
            self._read.pop(place.partition, None)

    def _step(self, consumer: Consumer) -> None:
        seen: list[tuple[int, int]] = []
        while len(seen) < 20:
            message = consumer.poll(0.005 if seen else POLL_S)
            if message is None:
                break
            error, number, offset = message.error(), message.partition(), message.offset()
            if error is not None and error.fatal():
                raise KafkaException(error)
            if error is None and number is not None and offset is not None:
                seen.append((number, offset))
                self._read[number] = offset + 1
        if seen:
            tell("read", records=seen)
        self._commit(consumer)

    def _commit(self, consumer: Consumer) -> None:
        places = [TopicPartition(self.topic, number, end) for number, end in self._read.items()]
        if not places:
            return
        try:
            consumer.commit(offsets=places, asynchronous=False)
        except KafkaException as error:
            # Tried again with the next step: in a cooperative rebalance the partition stays, and
            # nobody reads again what could not be committed meanwhile. A static member that came
            # back under a new id is fenced for good; only here does librdkafka say so.
            self._failed = error if error.args[0].code() == KafkaError._FATAL else None
        else:
            self._read = {}


class Share(Role):
    """One consumer of a queue."""

    own = ("release_share", "reject_share")

    def live(self) -> None:
        consumer = ShareConsumer({**self.config, "share.acknowledgement.mode": "explicit"})
        consumer.subscribe([self.topic])
        try:
            while self.may_go_on():
                self._step(consumer)
        finally:
            with suppress(KafkaException):
                consumer.close()

    def _step(self, consumer: ShareConsumer) -> None:
        asked_at = time.monotonic()
        messages = [m for m in consumer.poll(POLL_S) or [] if m.error() is None]
        if not messages:
            return
        taken = [(m.partition(), m.offset(), m.delivery_count()) for m in messages]
        tell("delivered", asked_at=asked_at, records=taken)
        answers: dict[int, list[tuple[int, bool]]] = {}
        for message in messages:
            answer = self._answer()
            consumer.acknowledge(message, answer)
            if answer != AcknowledgeType.RELEASE:
                place = answers.setdefault(message.partition() or 0, [])
                place.append((message.offset() or 0, answer == AcknowledgeType.ACCEPT))
        tell("answering", answers=answers)
        results = consumer.commit_sync(CALL_TIMEOUT_S)
        confirmed: dict[int, list[tuple[int, bool]]] = {}
        refused: dict[int, list[tuple[int, bool]]] = {}
        for where, error in results.items():
            answered = answers.get(where.partition, [])
            if error is None:
                confirmed[where.partition] = answered
            elif error.args[0].code() in REFUSALS:
                refused[where.partition] = answered
        errors = [str(error) for error in results.values() if error is not None]
        tell("confirmed", answers=confirmed, errors=errors)
        tell("refused", answers=refused)

    def _answer(self) -> AcknowledgeType:
        chance = self.rng.random()
        if chance < self.options["release_share"]:
            return AcknowledgeType.RELEASE
        if chance < self.options["release_share"] + self.options["reject_share"]:
            return AcknowledgeType.REJECT
        return AcknowledgeType.ACCEPT


ROLES: Final[dict[str, type[Role]]] = {"transform": Transform, "member": Member, "share": Share}


def main() -> None:
    settings = json.loads(sys.argv[1])
    ROLES[settings.pop("role")](settings).run()


if __name__ == "__main__":
    main()
