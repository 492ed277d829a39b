"""Consume, transform, produce: transactions a second, and how long a record takes through them.

One worker reads a topic, writes each record to another and commits the offsets it has read in the
same transaction, ten records to each. For the latency a record at a time is sent, and timed until
a reader that sees only committed records has its copy.
"""

from __future__ import annotations

import threading
from statistics import median, quantiles
from time import perf_counter

from confluent_kafka import Consumer, Producer

from benchmarks.consumers.kafka import TIMEOUT_S, create_topic

RECORDS = 10
LATENCIES = 100


class _Pipeline:
    """The worker: reads `source`, writes `target`, exactly once."""

    def __init__(self, bootstrap: str, source: str, target: str) -> None:
        self._target = target
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": f"pipeline-{source}",
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "fetch.wait.max.ms": 10,
                "log_level": 0,
            }
        )
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "transactional.id": f"pipeline-{source}",
                "linger.ms": 0,
                "log_level": 0,
            }
        )
        self._producer.init_transactions(TIMEOUT_S)
        self._consumer.subscribe([source])

    def step(self, records: int) -> int:
        """One transaction of at most so many records; how many there were."""
        messages = self._consumer.consume(records, 0.5)
        good = [message for message in messages if message.error() is None]
        if not good:
            return 0
        self._producer.begin_transaction()
        for message in good:
            self._producer.produce(self._target, message.value())
        self._producer.send_offsets_to_transaction(
            self._consumer.position(self._consumer.assignment()),
            self._consumer.consumer_group_metadata(),
            TIMEOUT_S,
        )
        self._producer.commit_transaction(TIMEOUT_S)
        return len(good)

    def close(self) -> None:
        self._consumer.close()


def measure(bootstrap: str, seconds: float, name: str) -> dict[str, float]:
    """Transactions a second, and the latency through the pipeline in milliseconds."""
    source, target = f"in-{name}", f"out-{name}"
    for topic in (source, target):
        create_topic(bootstrap, topic, 1)
    feed = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, "log_level": 0})
    for _ in range(60_000):
        feed.produce(source, bytes(100))
        feed.poll(0)
    feed.flush(TIMEOUT_S)
    pipeline = _Pipeline(bootstrap, source, target)
    while not pipeline.step(RECORDS):
        pass
    begun, done = perf_counter(), 0
    while perf_counter() < begun + seconds and pipeline.step(RECORDS):
        done += 1
    rate = done / (perf_counter() - begun)
    while pipeline.step(10_000):
        pass
    latencies = _latencies(bootstrap, source, target, pipeline)
    pipeline.close()
    return {
        "txn_per_s": round(rate, 1),
        "p50_ms": round(median(latencies) * 1000, 2),
        "p99_ms": round(quantiles(latencies, n=100)[98] * 1000, 2),
    }


class Measured:
    """The figures of one run, which is made when the first of them is asked for."""

    def __init__(self, bootstrap: str, seconds: float, name: str) -> None:
        self._run = (bootstrap, seconds, name)
        self._found: dict[str, float] = {}

    def value(self, name: str) -> float:
        if not self._found:
            self._found = measure(*self._run)
        return self._found[name]


def _latencies(bootstrap: str, source: str, target: str, pipeline: _Pipeline) -> list[float]:
    reader = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"reader-{source}",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 10,
            "log_level": 0,
        }
    )
    reader.subscribe([target])
    feed = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0, "log_level": 0})
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            pipeline.step(1)

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    found: list[float] = []
    try:
        for at in range(LATENCIES + 10):
            mark = f"latency-{at}".encode()
            begun = perf_counter()
            feed.produce(source, mark)
            feed.flush(TIMEOUT_S)
            while True:
                message = reader.poll(TIMEOUT_S)
                if message is None:
                    raise RuntimeError("a record did not come through")
                if message.error() is None and message.value() == mark:
                    break
            # The first ones find coordinators and leaders.
            if at >= 10:
                found.append(perf_counter() - begun)
    finally:
        stop.set()
        worker.join()
        reader.close()
    return found
