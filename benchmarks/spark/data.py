"""The broker and the topics that are read, and the Spark session that reads them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Final

import orjson
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.broker.clients import BUILD, ROOT
from benchmarks.broker.servers import Penstock
from penstock.spark import session

JARS: Final = ROOT / ".kafka" / "spark-jars"
PARTITIONS: Final = 4
PAYLOAD_BYTES: Final = 100
USERS: Final = 10_000
EVENT_STEP_MS: Final = 2
FIRST_EVENT_MS: Final = 1_760_000_000_000


@contextmanager
def broker() -> Iterator[str]:
    """A Penstock broker as a user starts it, on an empty folder; its address."""
    folder = BUILD / "data" / "spark"
    shutil.rmtree(folder, ignore_errors=True)
    server = Penstock(folder, "os")
    server.start()
    try:
        yield server.address
    finally:
        server.stop()
        shutil.rmtree(folder, ignore_errors=True)


def spark_session() -> Any:
    """One session for both connectors."""
    jars = sorted(JARS.glob("*.jar"))
    if not jars:
        raise SystemExit("Spark's Kafka connector is not there: run `make spark-jars`")
    return session(
        "bench",
        master="local[2]",
        **{"spark.jars": ",".join(map(str, jars)), "spark.driver.memory": "4g"},
    )


def make_topic(bootstrap: str, name: str, partitions: int = PARTITIONS) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, num_partitions=partitions)])[name].result(30)


def fill_plain(bootstrap: str, topic: str, count: int) -> None:
    """Records of 100 bytes that do not compress, without keys."""
    noise = os.urandom(PAYLOAD_BYTES * 1000)
    values = [noise[at : at + PAYLOAD_BYTES] for at in range(0, len(noise), PAYLOAD_BYTES)]
    _fill(bootstrap, topic, (values[n % 1000] for n in range(count)), count)


def fill_json(bootstrap: str, topic: str, count: int) -> None:
    """Clicks as JSON, in the order of their event time."""

    def events() -> Iterator[bytes]:
        for n in range(count):
            at = FIRST_EVENT_MS + n * EVENT_STEP_MS
            yield orjson.dumps(
                {"user": f"user-{n * 7919 % USERS}", "page": n % 100, "at": at, "ok": n % 3 == 0}
            )

    _fill(bootstrap, topic, events(), count)


def _fill(bootstrap: str, topic: str, values: Iterator[bytes], count: int) -> None:
    settings = {"bootstrap.servers": bootstrap, "linger.ms": 20, "batch.size": 262_144}
    producer = Producer({**settings, "queue.buffering.max.messages": 1_000_000})
    make_topic(bootstrap, topic)
    for number, value in enumerate(values):
        while True:
            try:
                producer.produce(topic, value, partition=number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
    if producer.flush(120):
        raise RuntimeError(f"{topic}: not all of {count} records were sent")


def available_now(writer: Any, checkpoint: Path) -> float:
    """Run a query over all there is; the seconds it took."""
    shutil.rmtree(checkpoint, ignore_errors=True)
    begun = perf_counter()
    query = writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start()
    query.awaitTermination()
    took = perf_counter() - begun
    if query.exception() is not None:
        raise RuntimeError(str(query.exception()))
    return took
