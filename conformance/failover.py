"""Work that goes on while a broker dies: a producer, a group, a pipeline of transactions.

Run on three nodes of Apache Kafka, one of which is killed in the middle (the one that leads a
partition of every topic here, and coordinates where it happens to), and on the embedded broker,
which has one node: that one is killed and started again. In both cases nothing that was
acknowledged may be lost, nothing may be there twice, and each partition keeps its order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Final

from confluent_kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from conformance.scenario import REQUEST_TIMEOUT_S, Cluster

PARTITIONS: Final = 3
RECORDS: Final = 3000
# The node is killed when so many records have been acknowledged.
KILL_AT: Final = 1000
BATCH: Final = 100
TIMEOUT_S: Final = 60.0
IDLE_MS: Final = 2000


@dataclass(slots=True)
class Work:
    """What goes on meanwhile, and how far each part has come."""

    source: str
    target: str
    reader_group: str
    pipe_group: str
    transactional_id: str
    acknowledged: dict[int, list[int]] = field(default_factory=dict)
    read: list[tuple[int, int, int]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def acknowledged_count(self) -> int:
        return sum(map(len, self.acknowledged.values()))


def survive(cluster: Cluster, kill: Callable[[], object], recover: Callable[[], object]) -> Any:
    """Do all the work, kill a node in the middle, and say what came of it."""
    work = Work(
        cluster.topic(PARTITIONS),
        cluster.topic(PARTITIONS),
        cluster.name("readers"),
        cluster.name("pipe"),
        cluster.name("txn"),
    )
    threads = [
        threading.Thread(target=_guarded, args=(work, part, cluster), name=part.__name__)
        for part in (_produce, _read, _pipe)
    ]
    for thread in threads:
        thread.start()
    deadline = monotonic() + TIMEOUT_S
    while work.acknowledged_count < KILL_AT and not work.failures:
        assert monotonic() < deadline, "the work did not get going"
        threads[0].join(0.05)
    kill()
    recover()
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive(), (
            f"{thread.name} did not end: {work.acknowledged_count} acknowledged, "
            f"{len(work.read)} read; {work.failures}"
        )
    assert not work.failures, work.failures
    return judge(work, everything(cluster, work.source), everything(cluster, work.target))


def judge(work: Work, source: dict[int, list[int]], target: dict[int, list[int]]) -> Any:
    """Plain facts about what was acknowledged, stored, read and passed on."""
    # A group may read again what it had not committed; each place must hold the same then.
    read: dict[int, list[int]] = {}
    for partition, _, value in sorted(set(work.read)):
        read.setdefault(partition, []).append(value)
    return {
        "acknowledged": work.acknowledged_count,
        "stored as acknowledged": source == work.acknowledged,
        "read by the group": read == work.acknowledged,
        "passed on once, in order": target == work.acknowledged,
    }


def _guarded(work: Work, part: Callable[[Cluster, Work], None], cluster: Cluster) -> None:
    try:
        part(cluster, work)
    except Exception as failure:  # shown by the thread that judges
        work.failures.append(f"{part.__name__}: {failure!r}")


def _produce(cluster: Cluster, work: Work) -> None:
    """Idempotent, acks=all: each record of a partition once, in order, whatever happens."""
    producer = cluster.producer(
        enable_idempotence=True,
        acks="all",
        message_timeout_ms=int(TIMEOUT_S * 1000),
        retry_backoff_ms=50,
        reconnect_backoff_max_ms=500,
        queue_buffering_max_messages=200,
    )

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            work.failures.append(f"produce: {error}")
            return
        number, value = message.partition(), message.value()
        assert number is not None
        assert value is not None
        work.acknowledged.setdefault(number, []).append(int(value))

    for number in range(RECORDS):
        while True:
            try:
                producer.produce(
                    work.source, str(number), partition=number % PARTITIONS, on_delivery=delivered
                )
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    assert producer.flush(TIMEOUT_S) == 0, "not everything was acknowledged"


def _consumer(cluster: Cluster, group: str) -> Consumer:
    return cluster.consumer(
        group,
        isolation_level="read_committed",
        session_timeout_ms=6000,
        heartbeat_interval_ms=500,
        reconnect_backoff_max_ms=500,
    )


def _next(consumer: Consumer) -> list[Message]:
    """Records as they come; what the client mends by itself is let pass."""
    found = []
    for message in consumer.consume(BATCH, 0.1):
        error = message.error()
        if error is None:
            found.append(message)
        elif error.fatal():
            raise KafkaException(error)
    return found


def _plain(message: Message) -> tuple[int, int, int]:
    partition, offset, value = message.partition(), message.offset(), message.value()
    assert partition is not None
    assert offset is not None
    assert value is not None
    return partition, offset, int(value)


def _read(cluster: Cluster, work: Work) -> None:
    """A group's member that commits as it goes."""
    consumer = _consumer(cluster, work.reader_group)
    consumer.subscribe([work.source])
    deadline = monotonic() + TIMEOUT_S
    while len({value for _, _, value in work.read}) < RECORDS:
        assert monotonic() < deadline, f"only {len(work.read)} records were read"
        found = _next(consumer)
        work.read += map(_plain, found)
        if found:
            try:
                consumer.commit(asynchronous=False)
            except KafkaException as failure:
                # Committed with the next ones; what is lost is read again.
                if failure.args[0].fatal():
                    raise


def _pipe(cluster: Cluster, work: Work) -> None:
    """Consume, transform, produce: positions and results in the same transactions."""
    consumer = _consumer(cluster, work.pipe_group)
    consumer.subscribe([work.source])
    producer = _transactional(cluster, work)
    done = 0
    deadline = monotonic() + TIMEOUT_S
    while done < RECORDS:
        assert monotonic() < deadline, f"only {done} records were passed on"
        batch = [_plain(message) for message in _next(consumer)]
        if not batch:
            continue
        if _pass_on(consumer, producer, work, batch):
            done += len(batch)
        else:
            _rewind(consumer)


def _transactional(cluster: Cluster, work: Work) -> Producer:
    producer = cluster.producer(
        transactional_id=work.transactional_id,
        transaction_timeout_ms=20_000,
        # Or the client may wait for ever for the coordinator of before, where there is one node.
        metadata_recovery_strategy="none",
        # Or it may wait for ever for the group's coordinator that died: who took its place it asks
        # only when a connection opens or closes, and its own time limit does not count there.
        connections_max_idle_ms=IDLE_MS,
        retry_backoff_ms=50,
        reconnect_backoff_max_ms=500,
    )
    producer.init_transactions(REQUEST_TIMEOUT_S)
    return producer


def _pass_on(
    consumer: Consumer, producer: Producer, work: Work, batch: list[tuple[int, int, int]]
) -> bool:
    """One transaction; False if it was aborted and must be done again."""
    producer.begin_transaction()
    try:
        for partition, _, value in batch:
            producer.produce(work.target, str(value), partition=partition)
        after = {partition: offset + 1 for partition, offset, _ in batch}
        producer.send_offsets_to_transaction(
            [TopicPartition(work.source, number, offset) for number, offset in after.items()],
            consumer.consumer_group_metadata(),
            REQUEST_TIMEOUT_S,
        )
        _commit(producer)
    except KafkaException as failure:
        if not failure.args[0].txn_requires_abort():
            raise
        producer.abort_transaction(REQUEST_TIMEOUT_S)
        return False
    return True


def _commit(producer: Producer) -> None:
    while True:
        try:
            producer.commit_transaction(REQUEST_TIMEOUT_S)
            return
        except KafkaException as failure:
            if not failure.args[0].retriable():
                raise


def _rewind(consumer: Consumer) -> None:
    """Back to what was committed, to read it once more."""
    places = consumer.committed(consumer.assignment(), timeout=REQUEST_TIMEOUT_S)
    for place in places:
        consumer.seek(TopicPartition(place.topic, place.partition, max(place.offset, 0)))


def everything(cluster: Cluster, topic: str) -> dict[int, list[int]]:
    """All committed records of a topic, by partition, in their order."""
    consumer = cluster.consumer(isolation_level="read_committed")
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    found: dict[int, list[int]] = {number: [] for number in range(PARTITIONS)}
    ended: set[int] = set()
    deadline = monotonic() + TIMEOUT_S
    while len(ended) < PARTITIONS:
        assert monotonic() < deadline, "the end of the topic did not come"
        for message in consumer.consume(500, 0.1):
            error, number = message.error(), message.partition()
            assert number is not None
            if error is None:
                found[number].append(_plain(message)[2])
            elif error.code() == KafkaError._PARTITION_EOF:
                ended.add(number)
    return found
