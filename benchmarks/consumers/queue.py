"""Acknowledged messages a second: one publisher and some consumers that share a queue.

The publisher waits for every confirmation (acks=all, publisher confirms), with a window; each
consumer acknowledges every message by itself. What counts is the time from the first message
published to the last one acknowledged. Run as a program, this is one consumer.
"""

from __future__ import annotations

import selectors
import subprocess
import sys
from time import perf_counter

from confluent_kafka import ShareConsumer

from benchmarks.broker import clients
from benchmarks.consumers.kafka import create_topic, set_group, worker

SIZE = 100
PATIENCE_S = 120.0


def measure(bootstrap: str, consumers: int, count: int, name: str) -> float:
    """Acknowledged messages a second of a share group."""
    topic, group = f"queue-{name}", f"queue-{name}"
    create_topic(bootstrap, topic, 1)
    set_group(bootstrap, group, share__auto__offset__reset="earliest")
    processes = [worker(__name__, (bootstrap, topic, group)) for _ in range(consumers)]
    try:
        for process in processes:
            assert process.stdout is not None
            # Each says when it has joined.
            process.stdout.readline()
        begun = perf_counter()
        publisher = clients.start(
            "kafka_bench", "produce", addr=bootstrap, topic=topic, size=SIZE, count=count
        )
        left = _drain(processes, count, begun)
        took_s = perf_counter() - begun
        publisher.wait(PATIENCE_S)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if left > 0:
        raise RuntimeError(f"{left} of {count} messages were not acknowledged in time")
    return count / took_s


def _drain(processes: list[subprocess.Popen[str]], left: int, begun: float) -> int:
    """Add up what the consumers say until nothing is left, or too much time has passed."""
    with selectors.DefaultSelector() as selector:
        for process in processes:
            assert process.stdout is not None
            selector.register(process.stdout, selectors.EVENT_READ, process.stdout)
        while left > 0 and perf_counter() < begun + PATIENCE_S:
            for key, _ in selector.select(1.0):
                line = key.data.readline()
                if not line:
                    raise RuntimeError("a consumer ended early")
                left -= int(line)
    return left


def consume(bootstrap: str, topic: str, group: str) -> None:
    """Acknowledge for ever; say how many after each round."""
    consumer = ShareConsumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "share.acknowledgement.mode": "explicit",
            "log_level": 0,
        }
    )
    consumer.subscribe([topic])
    consumer.poll(1.0)
    print("ready", flush=True)
    while True:
        messages = [message for message in consumer.poll(0.2) if message.error() is None]
        for message in messages:
            consumer.acknowledge(message)
        if messages:
            consumer.commit_sync()
            print(len(messages), flush=True)


def measure_rabbit(address: str, kind: str, consumers: int, count: int, name: str) -> float:
    """Acknowledged messages a second of a queue of RabbitMQ."""
    topic = f"queue-{name}"
    clients.run("rabbit_bench", "create", f"kind={kind}", addr=address, topic=topic)
    publisher = clients.start(
        "rabbit_bench", "produce", addr=address, topic=topic, size=SIZE, count=count
    )
    answer = clients.run(
        "rabbit_bench", "drain", addr=address, topic=topic, count=count, consumers=consumers
    )
    publisher.wait(PATIENCE_S)
    return float(answer["msgs_per_s"])


if __name__ == "__main__":
    consume(*sys.argv[1:])
