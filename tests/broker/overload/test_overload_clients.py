"""Overload as real clients see it: they retry, slow down, resume, and lose nothing."""

from __future__ import annotations

import asyncio
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from aiokafka import AIOKafkaProducer
from confluent_kafka import Consumer, Producer, TopicPartition

from penstock.broker.config import Limits
from penstock.broker.server import Broker as Server
from penstock.log.partition import Partition
from penstock.testing.broker import Broker
from penstock.testing.java_client import JavaClient, NewRecord
from penstock.testing.kafka_tools import KafkaTools
from penstock.testing.process import BrokerProcess
from tests.broker.conftest import NEVER_MS
from tests.broker.disks import HastyDisk
from tests.broker.overload.guarded import GROUP, guard_of, guarded_topic, partition_of, span
from tests.broker.quota_requests import alter, change
from tests.broker.raw import RawClient
from tests.broker.requests import create, new_name
from tests.broker.waits import wait_until
from tests.harness.profiles import PUSHED_RECORDS

with warnings.catch_warnings():
    # It reads its schemas by a function that Python 3.11 calls deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from kafka import KafkaProducer

TIMEOUT_S = 60.0
VALUE = b"v" * 1_000
# More than fits into a topic at a time.
COUNT = 60
PUSHED_BYTES = 1_600_000


@pytest.fixture(scope="module")
def broker() -> Iterator[Broker]:
    limits = Limits(max_hold_ms=100)
    with Broker(disk=HastyDisk(), housekeeping_interval_ms=NEVER_MS, limits=limits) as own:
        yield own


def produce_confluent(bootstrap: str, topic: str, *, idempotent: bool) -> list[Any]:
    """Send COUNT records; what became of each."""
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": idempotent,
            "batch.num.messages": 1,
            "linger.ms": 0,
            "message.timeout.ms": int(TIMEOUT_S * 1000),
        }
    )
    errors: list[Any] = []
    for at in range(COUNT):
        producer.produce(topic, VALUE, str(at), on_delivery=lambda error, _: errors.append(error))
    producer.flush(TIMEOUT_S)
    return errors


def produce_kafka_python(bootstrap: str, topic: str, *, idempotent: bool) -> list[Any]:
    producer = KafkaProducer(
        bootstrap_servers=bootstrap,
        enable_idempotence=idempotent,
        acks="all",
        retries=1_000,
        batch_size=0,
        delivery_timeout_ms=int(TIMEOUT_S * 1000),
        request_timeout_ms=10_000,
    )
    futures = [producer.send(topic, VALUE, str(at).encode()) for at in range(COUNT)]
    results: list[Any] = []
    for future in futures:
        try:
            future.get(TIMEOUT_S)
            results.append(None)
        except Exception as error:
            results.append(error)
    producer.close()
    return results


def produce_aiokafka(bootstrap: str, topic: str, *, idempotent: bool) -> list[Any]:
    async def send() -> list[Any]:
        producer = AIOKafkaProducer(
            bootstrap_servers=bootstrap,
            enable_idempotence=idempotent,
            acks="all",
            max_batch_size=1_200,
            request_timeout_ms=int(TIMEOUT_S * 1000),
        )
        await producer.start()
        try:
            sent = [producer.send_and_wait(topic, VALUE, str(at).encode()) for at in range(COUNT)]
            results = await asyncio.gather(*sent, return_exceptions=True)
        finally:
            await producer.stop()
        return [item if isinstance(item, BaseException) else None for item in results]

    return asyncio.run(send())


def produce_java(java: JavaClient, topic: str, *, idempotent: bool) -> list[Any]:
    config = {
        "enable.idempotence": str(idempotent).lower(),
        "batch.size": "0",
        "delivery.timeout.ms": str(int(TIMEOUT_S * 1000)),
        "request.timeout.ms": "10000",
    }
    records = [NewRecord(VALUE, str(at).encode(), partition=0) for at in range(COUNT)]
    return [None for _ in java.produce(topic, records, config)]


SENDERS: dict[str, Callable[..., list[Any]]] = {
    "confluent": produce_confluent,
    "kafka-python": produce_kafka_python,
    "aiokafka": produce_aiokafka,
}


def consume_all(
    bootstrap: str, topic: str, keys: set[int], done: threading.Event, start: int = 0
) -> list[str]:
    """Read as a group and commit, until everything has come; the keys in the order they came."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": GROUP,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition(topic, 0, start)])
    got: list[str] = []
    try:
        while len(set(got)) < len(keys) and not done.is_set():
            messages = consumer.consume(100, 0.05)
            for message in messages:
                assert message.error() is None, message.error()
                got.append((message.key() or b"").decode())
            if messages:
                consumer.commit(asynchronous=False)
    finally:
        consumer.close()
    return got


@pytest.mark.parametrize("overflow", ["reject", "block"])
@pytest.mark.parametrize("idempotent", [True, False], ids=["idempotent", "plain"])
@pytest.mark.parametrize("client", SENDERS)
def test_clients_retry_until_the_group_has_read(
    broker: Broker, client: str, idempotent: bool, overflow: str
) -> None:
    def send(topic: str) -> list[Any]:
        return SENDERS[client](broker.bootstrap, topic, idempotent=idempotent)

    check_retries(broker, send, overflow, in_order=idempotent)


@pytest.mark.parametrize("overflow", ["reject", "block"])
@pytest.mark.parametrize("idempotent", [True, False], ids=["idempotent", "plain"])
def test_so_does_the_java_client(
    broker: Broker, kafka_tools: KafkaTools, idempotent: bool, overflow: str
) -> None:
    with kafka_tools.java_client(broker.bootstrap) as java:

        def send(topic: str) -> list[Any]:
            return produce_java(java, topic, idempotent=idempotent)

        check_retries(broker, send, overflow, in_order=idempotent)


def check_retries(
    broker: Broker, send: Callable[[str], list[Any]], overflow: str, *, in_order: bool
) -> None:
    """A producer meets the bound, is told so, and comes through once a group reads."""
    with RawClient(broker.bootstrap) as raw:
        topic = guarded_topic(
            raw, overflow, retention_bytes=str(16 * len(VALUE)), segment_bytes=str(4 * len(VALUE))
        )
    results: list[Any] = []
    refused = broker.call(lambda s: s.overload.requests_refused)
    sender = threading.Thread(target=lambda: results.extend(send(topic)))
    sender.start()
    # First it must have met the bound and been told so.
    wait_until(broker, lambda s: s.overload.requests_refused > refused)
    assert span(broker, topic)[0] == 0
    done = threading.Event()
    timer = threading.Timer(TIMEOUT_S, done.set)
    timer.start()
    got = consume_all(broker.bootstrap, topic, set(range(COUNT)), done)
    timer.cancel()
    sender.join()
    assert results == [None] * COUNT
    assert {int(key) for key in got} == set(range(COUNT))
    if in_order:
        assert [int(key) for key in got] == list(range(COUNT))


def test_a_full_topic_still_takes_the_end_of_a_transaction(broker: Broker) -> None:
    """And the marker, which no consumer commits past, does not keep it full."""
    with RawClient(broker.bootstrap) as raw:
        topic = guarded_topic(raw, "reject", retention_bytes="4000", segment_bytes="1024")
    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap,
            "transactional.id": topic,
            "message.timeout.ms": int(TIMEOUT_S * 1000),
        }
    )
    producer.init_transactions(TIMEOUT_S)
    for first in (0, 4):
        producer.begin_transaction()
        for at in range(first, first + 4):
            producer.produce(topic, VALUE, str(at))
            producer.flush(TIMEOUT_S)
        producer.commit_transaction(TIMEOUT_S)
        # Four records and a marker, and with them the topic is full.
        assert broker.call(lambda s: guard_of(s, topic).full(s.clock.now_ms())) is not None
        start = span(broker, topic)[0]
        got = consume_all(broker.bootstrap, topic, set(range(4)), threading.Event(), start)
        assert [int(key) for key in got] == list(range(first, first + 4))
    wait_until(broker, lambda s: guard_of(s, topic).full(s.clock.now_ms()) is None)


# ---- quotas ----------------------------------------------------------------------------------


def test_a_client_over_its_quota_is_throttled_and_loses_nothing(broker: Broker) -> None:
    topic, rate = new_name(), 40_000
    with RawClient(broker.bootstrap, client_id="admin") as raw:
        raw.call(create(topic))
        who: list[tuple[str, str | None]] = [("client-id", "greedy")]
        answer = raw.call(alter(change(who, producer_byte_rate=rate)))
        assert not answer.entries[0].error_code
        throttled: list[float] = []
        producer = Producer(
            {
                "bootstrap.servers": broker.bootstrap,
                "client.id": "greedy",
                "batch.num.messages": 10,
                "throttle_cb": lambda event: throttled.append(event.throttle_time),
            }
        )
        failures: list[Any] = []
        for _ in range(COUNT):
            producer.produce(topic, VALUE, on_delivery=lambda error, _: failures.append(error))
        assert producer.flush(TIMEOUT_S) == 0
        producer.poll(0)
        assert failures == [None] * COUNT
        # A second's worth goes at once; the rest has to wait.
        assert any(throttled)
        raw.call(alter(change(who, producer_byte_rate=None)))
    # Without the quota, and with another name, nobody is held up.
    assert produce_confluent(broker.bootstrap, topic, idempotent=True) == [None] * COUNT


# ---- discard-oldest --------------------------------------------------------------------------


def is_synced_to_the_active_segment(partition: Partition) -> bool:
    return partition.visible == COUNT and partition.closed == partition.segments[:-1]


def test_discard_oldest_drops_and_the_slow_consumer_is_told(broker: Broker) -> None:
    topic = new_name()
    with RawClient(broker.bootstrap) as raw:
        raw.call(create(topic, configs={"retention.bytes": "16000", "segment.bytes": "4000"}))
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap,
            "group.id": GROUP,
            "auto.offset.reset": "error",
            "enable.auto.commit": False,
        }
    )
    try:
        produce_confluent(broker.bootstrap, topic, idempotent=True)

        def upkeep(server: Server) -> None:
            assert server.housekeeping is not None
            server.spawn(server.housekeeping.upkeep())

        # Records of this broker are visible before they are synced, and only what is synced may go.
        wait_until(broker, lambda s: is_synced_to_the_active_segment(partition_of(s, topic)))
        broker.call(upkeep)
        wait_until(broker, lambda s: partition_of(s, topic).log_start > 0)
        consumer.assign([TopicPartition(topic, 0, 0)])
        message = consumer.poll(TIMEOUT_S)
        assert message is not None
        error = message.error()
        assert error is not None
        assert error.name() == "_AUTO_OFFSET_RESET"
        assert "out of range" in error.str().lower()
    finally:
        consumer.close()


# ---- under pressure --------------------------------------------------------------------------


@pytest.mark.processes
def test_eight_producers_push_a_hundred_times_the_bound(tmp_path: Path) -> None:
    """The broker's memory stays, nothing is lost, and another topic is as quick as ever."""
    bound, producers, records = 128 << 10, 8, PUSHED_RECORDS
    with BrokerProcess(tmp_path / "data", durability="os") as process:
        topic, other = "guarded", "other"
        with RawClient(process.bootstrap) as raw:
            raw.call(create(other))
            settings = {
                "overflow": "block",
                "overflow.groups": GROUP,
                "retention.bytes": str(bound),
            }
            assert not raw.call(create(topic, configs=settings)).topics[0].error_code
        info = psutil.Process(process.pid)
        failures: list[Any] = []
        threads = [
            threading.Thread(target=_push, args=(process.bootstrap, topic, name, records, failures))
            for name in range(producers)
        ]
        before = info.memory_info().rss
        for thread in threads:
            thread.start()
        # All of them are held by now, or soon are: whoever writes elsewhere does not notice.
        assert produce_confluent(process.bootstrap, other, idempotent=True) == [None] * COUNT
        done = threading.Event()
        timer = threading.Timer(120, done.set)
        timer.start()
        keys = set(range(producers * records))
        got = consume_all(process.bootstrap, topic, keys, done)
        growth = info.memory_info().rss - before
        print(f"the broker grew by {growth:,} bytes")
        timer.cancel()
        for thread in threads:
            thread.join()
        assert failures == []
        assert sorted(map(int, got)) == sorted(keys)
        assert growth < 48 << 20, f"{growth:,} bytes"


def _push(bootstrap: str, topic: str, name: int, records: int, failures: list[Any]) -> None:
    value = bytes(PUSHED_BYTES // records)
    producer = Producer(
        {
            "bootstrap.servers": bootstrap,
            "enable.idempotence": True,
            "queue.buffering.max.messages": 10_000,
            "message.timeout.ms": 120_000,
        }
    )
    for at in range(records):
        key = str(name * records + at)
        producer.produce(
            topic,
            value,
            key,
            on_delivery=lambda error, _: failures.append(error) if error is not None else None,
        )
    assert producer.flush(120) == 0
