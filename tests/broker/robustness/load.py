"""Load on a broker that is killed under it: producers that go on, and topics that come and go.

Every producer tells the history of what it sends and of what is acknowledged, and nothing else
stops it but `stop`: when the broker is gone it waits until there is one again.

- `IdempotentProducer`: librdkafka with idempotence; every record must end up in the log once.
- `StubbornProducer`: sends a batch again and again under its sequence number until it is taken.
- `PlainProducer`: sends each record once, several at a time; what was not acknowledged is dropped.
- `TopicChurn`: makes topics, writes to them, deletes them, and makes them anew.
"""

from __future__ import annotations

import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, Literal

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from penstock.testing.history import History, Place
from tests.broker import requests as rq
from tests.broker.raw import ConnectionEndedError, RawClient

PRODUCE: Final = rq.BY_NAME["produce"]
# Between steps: all that is written is also read back, again and again.
PACE_S: Final = 0.004
_RETRIABLE: Final = {3, 5, 6, 7, 56}
_BROKEN: Final = (OSError, ConnectionEndedError)


class Worker(ABC):
    """Something that happens on a thread until it is stopped; its failure is the test's."""

    def __init__(self, bootstrap: str, history: History, seed: object) -> None:
        self.bootstrap = bootstrap
        self.history = history
        self.rng = random.Random(repr(seed))
        self.stopping = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, name=type(self).__name__)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop, and fail as the worker has failed."""
        self.stopping.set()
        self._thread.join()
        self.check()

    def check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _guarded(self) -> None:
        try:
            self.run()
        except BaseException as error:
            self._failure = error

    @abstractmethod
    def run(self) -> None: ...

    def value(self, number: int) -> bytes:
        size = self.rng.choice((10, 100, 100, 1000))
        return b"%s %d " % (str(id(self)).encode(), number) + self.rng.randbytes(size)


class RawWorker(Worker):
    """Works on a connection, and on a new one when that breaks."""

    def run(self) -> None:
        while not self.stopping.is_set():
            with suppress(*_BROKEN), RawClient(self.bootstrap, timeout_s=30) as client:
                while not self.stopping.wait(PACE_S):
                    self.step(client)
            # Nobody listens while the broker is gone.
            self.stopping.wait(0.02)

    @abstractmethod
    def step(self, client: RawClient) -> None: ...


class PlainProducer(RawWorker):
    """Several requests at a time, each sent once."""

    def __init__(
        self, bootstrap: str, history: History, seed: object, places: list[Place], acks: int
    ) -> None:
        super().__init__(bootstrap, history, seed)
        self._places = places
        self._acks = acks
        self._count = 0

    def step(self, client: RawClient) -> None:
        sent: list[tuple[Place, list[bytes], bytes]] = []
        for _ in range(self.rng.randint(1, 8)):
            place = self.rng.choice(self._places)
            key = b"key-%d" % self.rng.randint(0, 20)
            values = [self.value(self._count + at) for at in range(self.rng.randint(1, 5))]
            self._count += len(values)
            for value in values:
                self.history.sending(f"plain-{id(self)}", place, key, value)
            sent.append((place, values, key))
        requests = [
            rq.produce(
                place.topic,
                rq.batch(*values, key=key, codec=self.rng.choice((0, 0, 4))),
                acks=self._acks,
                partition=place.partition,
            )
            for place, values, key in sent
        ]
        client.send_all(*[(request, PRODUCE) for request in requests])
        for place, values, key in sent:
            answer = rq.one(client.receive())
            assert answer.error_code in {0, *_RETRIABLE}, answer
            if not answer.error_code:
                for at, value in enumerate(values):
                    self.history.acknowledged(place, answer.base_offset + at, key, value)


class StubbornProducer(RawWorker):
    """One batch at a time under its sequence number, until it is acknowledged."""

    def __init__(self, bootstrap: str, history: History, seed: object, place: Place) -> None:
        super().__init__(bootstrap, history, seed)
        self._place = place
        self._producer_id = -1
        self._sequence = 0
        self._pending: list[bytes] = []

    def step(self, client: RawClient) -> None:
        if self._producer_id < 0:
            self._producer_id = client.call(rq.new_producer()).producer_id
            return
        if not self._pending:
            self._pending = [self.value(self._sequence + at) for at in range(3)]
            for value in self._pending:
                self.history.sending(f"stubborn-{id(self)}", self._place, b"stubborn", value)
        batch = rq.batch(
            *self._pending, key=b"stubborn", producer=(self._producer_id, 0, self._sequence)
        )
        request = rq.produce(self._place.topic, batch, partition=self._place.partition)
        answer = rq.one(client.call(request, PRODUCE))
        assert answer.error_code in {0, *_RETRIABLE}, answer
        if answer.error_code:
            return
        for at, value in enumerate(self._pending):
            offset = answer.base_offset + at
            self.history.acknowledged(self._place, offset, b"stubborn", value)
        self._sequence += len(self._pending)
        self._pending = []


class IdempotentProducer(Worker):
    """librdkafka, which retries by itself for as long as it takes."""

    def __init__(self, bootstrap: str, history: History, seed: object, places: list[Place]) -> None:
        super().__init__(bootstrap, history, seed)
        self._places = places
        self.errors: list[str] = []

    def run(self) -> None:
        producer = Producer(
            {
                "bootstrap.servers": self.bootstrap,
                "enable.idempotence": True,
                "linger.ms": 1,
                "message.timeout.ms": 0,
                "retry.backoff.ms": 20,
                "reconnect.backoff.ms": 10,
                "reconnect.backoff.max.ms": 50,
                "queue.buffering.max.messages": 500,
                "error_cb": self._on_error,
                "log_level": 0,
            }
        )
        number = 0
        while not self.stopping.is_set():
            place = self.rng.choice(self._places)
            key, value = b"key-%d" % self.rng.randint(0, 20), self.value(number)
            self.history.sending("idempotent", place, key, value)
            number += 1
            while not self._produce(producer, place, key, value):
                producer.poll(0.05)
            producer.poll(0)
            if number % 10 == 0:
                self.stopping.wait(PACE_S)
        # All of it must arrive in the end.
        assert producer.flush(60) == 0, "librdkafka could not deliver all it had"
        assert not self.errors, self.errors

    def _produce(self, producer: Producer, place: Place, key: bytes, value: bytes) -> bool:
        try:
            producer.produce(
                place.topic, value, key, place.partition, on_delivery=self._on_delivery
            )
        except BufferError:
            return False
        except KafkaException as error:
            raise AssertionError(f"produce: {error}, {self.errors}") from error
        return True

    def _on_delivery(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.errors.append(f"not delivered: {error}")
            return
        topic, partition, offset = message.topic(), message.partition(), message.offset()
        assert topic is not None
        assert partition is not None
        assert offset is not None
        self.history.acknowledged(
            Place(topic, partition), offset, _bytes(message.key()), _bytes(message.value())
        )

    def _on_error(self, error: KafkaError) -> None:
        if error.fatal():
            self.errors.append(f"fatal: {error}")


def _bytes(data: Any) -> bytes:
    assert isinstance(data, bytes)
    return data


TopicState = Literal["there", "gone", "unknown"]


class TopicChurn(RawWorker):
    """A few names that are made, written to, deleted, and made anew."""

    def __init__(self, bootstrap: str, history: History, seed: object) -> None:
        super().__init__(bootstrap, history, seed)
        self._count = 0
        # Held during each step: whoever holds it sees topics that nobody changes.
        self.still = threading.Lock()
        self.states: dict[str, TopicState] = {f"churn-{at}": "gone" for at in range(4)}
        self.made = 0
        self.deleted = 0

    def step(self, client: RawClient) -> None:
        with self.still:
            self._step(client)

    def _step(self, client: RawClient) -> None:
        name = self.rng.choice(list(self.states))
        if self.states[name] == "there":
            if self.rng.random() < 0.6:
                self._write(client, name)
            else:
                self._change(client, name, "gone", self._delete)
        elif self.states[name] == "gone":
            self._change(client, name, "there", self._make)
        else:
            (told,) = client.call(rq.metadata(name)).topics
            self.settle(name, there=not told.error_code)

    def _change(
        self,
        client: RawClient,
        name: str,
        goal: TopicState,
        change: Callable[[RawClient, str], int],
    ) -> None:
        # Until there is an answer nobody knows.
        self.states[name] = "unknown"
        code = change(client, name)
        assert code == 0, (name, goal, code)
        self.states[name] = goal

    def _make(self, client: RawClient, name: str) -> int:
        (made,) = client.call(rq.create(name, 2, segment_bytes="2000")).topics
        self.made += 1
        return int(made.error_code)

    def _delete(self, client: RawClient, name: str) -> int:
        (deleted,) = client.call(rq.delete(name)).responses
        self.history.forget(name)
        self.deleted += 1
        return int(deleted.error_code)

    def _write(self, client: RawClient, name: str) -> None:
        place = Place(name, self.rng.randint(0, 1))
        value = self.value(self._count)
        self._count += 1
        self.history.sending("churn", place, None, value)
        request = rq.produce(name, rq.batch(value), partition=place.partition)
        answer = rq.one(client.call(request, PRODUCE))
        assert not answer.error_code, answer
        self.history.acknowledged(place, answer.base_offset, None, value)

    def settle(self, name: str, *, there: bool) -> None:
        """The broker was gone in the midst of a change; now it is known what came of it."""
        self.states[name] = "there" if there else "gone"
        if not there:
            self.history.forget(name)
