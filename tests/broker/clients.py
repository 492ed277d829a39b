"""Five Kafka clients behind one face: produce these records so, read those from there.

confluent-kafka (librdkafka of today), kcat (librdkafka as Debian has it), kafka-python, aiokafka
and Apache Kafka's Java client. Each is used as its users use it; nothing is stubbed. A client that
cannot do something (kcat cannot set a timestamp) says so in its attributes.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AsyncPartition
from confluent_kafka import Consumer, Message, Producer, TopicPartition

from penstock.testing.java_client import JavaClient, NewRecord

with warnings.catch_warnings():
    # It reads its schemas by a function that Python 3.11 calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import KafkaConsumer, KafkaProducer
    from kafka import TopicPartition as PythonPartition

TIMEOUT_S: Final = 60.0
# A client that is closed waits for the answer to its last fetch.
WAIT_MS: Final = 20
Header = tuple[str, bytes | None]
BEGINNING: Final = -2


@dataclass(frozen=True, slots=True)
class Item:
    """A record as a producer gives it."""

    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()
    timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True)
class How:
    """How records are sent."""

    codec: str = "none"
    acks: str = "all"
    idempotent: bool = False


@dataclass(frozen=True, slots=True)
class Got:
    """A record as a consumer sees it."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...] = ()


class Client(Protocol):
    """What every client can do here; partition 0 is meant throughout."""

    sets_timestamps: bool
    sends_null_headers: bool

    def produce(self, topic: str, items: Sequence[Item], how: How) -> None:
        """Send all, and wait until all are acknowledged."""
        ...

    def consume(self, topic: str, count: int, start: int = BEGINNING) -> list[Got]:
        """Read `count` records from an offset on."""
        ...

    def consume_since(self, topic: str, count: int, timestamp_ms: int) -> list[Got]:
        """Read `count` records from a time on."""
        ...


class ConfluentClient:
    """confluent-kafka."""

    sets_timestamps = True
    sends_null_headers = True

    def __init__(self, bootstrap: str) -> None:
        self._config = {"bootstrap.servers": bootstrap}

    def produce(self, topic: str, items: Sequence[Item], how: How) -> None:
        producer = Producer(
            {
                **self._config,
                "compression.type": how.codec,
                "acks": how.acks,
                "enable.idempotence": how.idempotent,
                "linger.ms": 5,
            }
        )
        failures: list[str] = []

        def delivered(error: Any, message: Message) -> None:
            if error is not None:
                failures.append(str(error))

        for item in items:
            extra: dict[str, Any] = {}
            if item.timestamp_ms is not None:
                extra["timestamp"] = item.timestamp_ms
            producer.produce(
                topic,
                item.value,
                item.key,
                partition=0,
                headers=list(item.headers),
                on_delivery=delivered,
                **extra,
            )
        assert producer.flush(TIMEOUT_S) == 0
        assert not failures, failures

    def consume(self, topic: str, count: int, start: int = BEGINNING) -> list[Got]:
        return self._consume(lambda _: TopicPartition(topic, 0, start), count)

    def consume_since(self, topic: str, count: int, timestamp_ms: int) -> list[Got]:
        def look_up(consumer: Consumer) -> TopicPartition:
            wanted = [TopicPartition(topic, 0, timestamp_ms)]
            found: TopicPartition = consumer.offsets_for_times(wanted, timeout=TIMEOUT_S)[0]
            return found

        return self._consume(look_up, count)

    def _consume(self, place: Any, count: int) -> list[Got]:
        consumer = Consumer(
            {**self._config, "group.id": "unused", "enable.auto.commit": False,
             "auto.offset.reset": "error", "fetch.wait.max.ms": WAIT_MS}
        )  # fmt: skip
        try:
            consumer.assign([place(consumer)])
            messages = consumer.consume(count, timeout=TIMEOUT_S)
        finally:
            consumer.close()
        assert len(messages) == count, f"{len(messages)} of {count} records came"
        return [_of_confluent(message) for message in messages]


def _of_confluent(message: Message) -> Got:
    assert message.error() is None, message.error()
    offset = message.offset()
    assert offset is not None
    # Text where the application has chosen a deserializer, which these consumers have not.
    key: Any = message.key()
    value: Any = message.value()
    headers: Any = message.headers() or ()
    return Got(offset, message.timestamp()[1], key, value, tuple(headers))


class KcatClient:
    """kcat, a program of its own."""

    sets_timestamps = False
    sends_null_headers = True

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap

    def produce(self, topic: str, items: Sequence[Item], how: How) -> None:
        """All items of a call have the same headers, as the program has it."""
        (headers,) = {item.headers for item in items}
        options = ["-z", how.codec] if how.codec != "none" else []
        options += ["-X", f"acks={how.acks}", "-X", f"enable.idempotence={how.idempotent}".lower()]
        # One batch: of a smaller one librdkafka keeps the plain form where that is shorter.
        options += ["-X", "linger.ms=1000", "-X", f"batch.num.messages={len(items)}"]
        for name, value in headers:
            options += ["-H", name if value is None else f"{name}={value.decode()}"]
        lines = [(item.key or b"") + b"\x01" + (item.value or b"") for item in items]
        self._run(
            ["-P", "-t", topic, "-p", "0", "-D", "\\x02", "-K", "\\x01", "-Z", *options],
            b"\x02".join(lines),
        )

    def consume(self, topic: str, count: int, start: int = BEGINNING) -> list[Got]:
        return self._consume(topic, count, "beginning" if start == BEGINNING else str(start))

    def consume_since(self, topic: str, count: int, timestamp_ms: int) -> list[Got]:
        return self._consume(topic, count, f"s@{timestamp_ms}")

    def _consume(self, topic: str, count: int, start: str) -> list[Got]:
        line = "%o %T %K %S\\x01%h\\x01%k%s"
        arguments = ["-C", "-t", topic, "-p", "0", "-o", start, "-c", str(count), "-e", "-f", line]
        output = self._run(arguments)
        found: list[Got] = []
        while output:
            numbers, headers, output = output.split(b"\x01", 2)
            offset, timestamp_ms, key_size, value_size = map(int, numbers.split())
            key, output = _take(output, key_size)
            value, output = _take(output, value_size)
            found.append(Got(offset, timestamp_ms, key, value, _kcat_headers(headers.decode())))
        assert len(found) == count, f"{len(found)} of {count} records came"
        return found

    def _run(self, arguments: list[str], stdin: bytes = b"") -> bytes:
        done = subprocess.run(
            ["kcat", "-b", self._bootstrap, "-q", *arguments],
            input=stdin,
            capture_output=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    def query(self, topic: str, timestamp_ms: int) -> int:
        """`kcat -Q`: the offset for a time."""
        text = self._run(["-Q", "-t", f"{topic}:0:{timestamp_ms}"]).decode()
        found = re.search(r"offset (-?\d+)", text)
        assert found, text
        return int(found[1])

    def listing(self) -> str:
        """`kcat -L`: brokers and topics, as JSON."""
        return self._run(["-L", "-J"]).decode()


def _take(data: bytes, size: int) -> tuple[bytes | None, bytes]:
    return (None, data) if size < 0 else (data[:size], data[size:])


def _kcat_headers(text: str) -> tuple[Header, ...]:
    pairs = [pair.partition("=") for pair in text.split(",") if pair]
    return tuple((n, None if value == "NULL" else value.encode()) for n, _, value in pairs)


class PythonClient:
    """kafka-python."""

    sets_timestamps = True
    sends_null_headers = False

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap

    def produce(self, topic: str, items: Sequence[Item], how: How) -> None:
        producer = KafkaProducer(
            bootstrap_servers=self._bootstrap,
            compression_type=None if how.codec == "none" else how.codec,
            acks=how.acks if how.acks == "all" else int(how.acks),
            enable_idempotence=how.idempotent,
            linger_ms=5,
        )
        try:
            waiting = [
                producer.send(
                    topic,
                    value=item.value,
                    key=item.key,
                    headers=list(item.headers),
                    partition=0,
                    timestamp_ms=item.timestamp_ms,
                )
                for item in items
            ]
            producer.flush(TIMEOUT_S)
            for future in waiting:
                future.get(TIMEOUT_S)
        finally:
            producer.close(TIMEOUT_S)

    def consume(self, topic: str, count: int, start: int = BEGINNING) -> list[Got]:
        return self._consume(topic, count, lambda _: start)

    def consume_since(self, topic: str, count: int, timestamp_ms: int) -> list[Got]:
        place = PythonPartition(topic, 0)

        def look_up(consumer: Any) -> int:
            return int(consumer.offsets_for_times({place: timestamp_ms})[place].offset)

        return self._consume(topic, count, look_up)

    def _consume(self, topic: str, count: int, start: Any) -> list[Got]:
        place = PythonPartition(topic, 0)
        consumer = KafkaConsumer(
            bootstrap_servers=self._bootstrap,
            consumer_timeout_ms=int(TIMEOUT_S * 1000),
            enable_auto_commit=False,
            fetch_max_wait_ms=WAIT_MS,
        )
        try:
            consumer.assign([place])
            offset = start(consumer)
            if offset == BEGINNING:
                consumer.seek_to_beginning(place)
            else:
                consumer.seek(place, offset)
            found = [message for _, message in zip(range(count), consumer, strict=False)]
        finally:
            consumer.close()
        assert len(found) == count, f"{len(found)} of {count} records came"
        return [Got(m.offset, m.timestamp, m.key, m.value, tuple(m.headers)) for m in found]


class AsyncClient:
    """aiokafka."""

    sets_timestamps = True
    sends_null_headers = True

    def __init__(self, bootstrap: str) -> None:
        self._bootstrap = bootstrap

    def produce(self, topic: str, items: Sequence[Item], how: How) -> None:
        asyncio.run(asyncio.wait_for(self._produce(topic, items, how), TIMEOUT_S))

    async def _produce(self, topic: str, items: Sequence[Item], how: How) -> None:
        async with AIOKafkaProducer(
            bootstrap_servers=self._bootstrap,
            compression_type=None if how.codec == "none" else how.codec,
            acks=how.acks if how.acks == "all" else int(how.acks),
            enable_idempotence=how.idempotent,
            linger_ms=5,
        ) as producer:
            waiting = [
                await producer.send(
                    topic,
                    value=item.value,
                    key=item.key,
                    headers=list(item.headers),
                    partition=0,
                    timestamp_ms=item.timestamp_ms,
                )
                for item in items
            ]
            await producer.flush()
            await asyncio.gather(*waiting)

    def consume(self, topic: str, count: int, start: int = BEGINNING) -> list[Got]:
        return asyncio.run(asyncio.wait_for(self._consume(topic, count, start), TIMEOUT_S))

    def consume_since(self, topic: str, count: int, timestamp_ms: int) -> list[Got]:
        work = self._consume(topic, count, BEGINNING, since=timestamp_ms)
        return asyncio.run(asyncio.wait_for(work, TIMEOUT_S))

    async def _consume(
        self, topic: str, count: int, start: int, since: int | None = None
    ) -> list[Got]:
        place = AsyncPartition(topic, 0)
        async with AIOKafkaConsumer(
            bootstrap_servers=self._bootstrap, fetch_max_wait_ms=WAIT_MS
        ) as consumer:
            consumer.assign([place])
            if since is not None:
                start = (await consumer.offsets_for_times({place: since}))[place].offset
            if start == BEGINNING:
                await consumer.seek_to_beginning(place)
            else:
                consumer.seek(place, start)
            found = [await consumer.getone() for _ in range(count)]
        return [Got(m.offset, m.timestamp, m.key, m.value, tuple(m.headers)) for m in found]


class JvmClient:
    """Apache Kafka's Java client."""

    sets_timestamps = True
    sends_null_headers = True

    def __init__(self, java: JavaClient) -> None:
        self.java = java

    def produce(self, topic: str, items: Sequence[Item], how: How) -> None:
        config = {
            "compression.type": how.codec,
            "acks": how.acks,
            "enable.idempotence": str(how.idempotent).lower(),
            "linger.ms": "5",
        }
        self.java.produce(
            topic,
            [NewRecord(i.value, i.key, i.headers, i.timestamp_ms, 0) for i in items],
            config,
        )

    def consume(self, topic: str, count: int, start: int = BEGINNING) -> list[Got]:
        starts: Any = (0,) if start == BEGINNING else {0: start}
        config = {"fetch.max.wait.ms": str(WAIT_MS)}
        found = self.java.consume(topic, starts, config, max_records=count, timeout_s=TIMEOUT_S)
        return [Got(r.offset, r.timestamp_ms, r.key, r.value, r.headers) for r in found]

    def consume_since(self, topic: str, count: int, timestamp_ms: int) -> list[Got]:
        return self.consume(topic, count, self.java.list_offset(topic, 0, timestamp_ms).offset)
