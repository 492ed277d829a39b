"""The smallest end-to-end latency: a producer, a stateless flow topic to topic, a consumer.

Each record carries the time when it was handed to the producer; the consumer takes the
difference. One record at a time, so that what is measured is how long a micro-batch takes.
"""

from __future__ import annotations

import shutil
import struct
from statistics import quantiles
from time import monotonic, perf_counter
from typing import Any, Final

from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks.broker.workloads import progress
from benchmarks.frame import Asked, Cells
from benchmarks.spark import data
from benchmarks.spark.throughput import CHECKPOINTS, FORMATS
from penstock.spark.sink import write_stream

TIMEOUT_S: Final = 60.0
_STAMP: Final = struct.Struct(">d")


def measure(asked: Asked) -> Cells:
    samples = 30 if asked.quick else 100
    cells: Cells = {"latency_p50": {}, "latency_p99": {}}
    with data.broker() as bootstrap:
        spark = data.spark_session()
        for turn in range(asked.rounds):
            for system in FORMATS:
                took = _through(spark, system, bootstrap, samples, turn)
                cuts = quantiles(took, n=100)
                progress(f"  latency {system}: p50 {cuts[49]:.0f} ms, p99 {cuts[98]:.0f} ms")
                cells["latency_p50"].setdefault(system, []).append(cuts[49])
                cells["latency_p99"].setdefault(system, []).append(cuts[98])
    return cells


def _through(spark: Any, system: str, bootstrap: str, samples: int, turn: int) -> list[float]:
    """Milliseconds from producer to consumer, record by record."""
    into, out = f"in-{system}-{turn}", f"out-{system}-{turn}"
    for topic in (into, out):
        data.make_topic(bootstrap, topic, partitions=1)
    checkpoint = CHECKPOINTS / f"latency-{system}-{turn}"
    shutil.rmtree(checkpoint, ignore_errors=True)
    frame = (
        spark.readStream.format(FORMATS[system])
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", into)
        .option("startingOffsets", "earliest")
        .load()
        .selectExpr("value")
    )
    if system == "penstock":
        query = write_stream(
            frame,
            topic=out,
            name=f"bench-{out}",
            checkpoint=checkpoint,
            bootstrap=bootstrap,
            mode="at-least-once",
        ).start()
    else:
        query = (
            frame.writeStream.format("kafka")
            .option("kafka.bootstrap.servers", bootstrap)
            .option("topic", out)
            .option("checkpointLocation", str(checkpoint))
            .start()
        )
    try:
        return _measure(bootstrap, into, out, samples)
    finally:
        query.stop()


def _measure(bootstrap: str, into: str, out: str, samples: int) -> list[float]:
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0})
    consumer = Consumer(
        {"bootstrap.servers": bootstrap, "group.id": "latency", "fetch.wait.max.ms": 500}
    )
    consumer.assign([TopicPartition(out, 0, 0)])
    took: list[float] = []
    try:
        # The first ones are for warming up.
        for _ in range(samples + 5):
            producer.produce(into, _STAMP.pack(perf_counter()), partition=0)
            producer.flush(TIMEOUT_S)
            stamp = _next(consumer)
            took.append((perf_counter() - stamp) * 1000)
    finally:
        consumer.close()
    return took[5:]


def _next(consumer: Consumer) -> float:
    deadline = monotonic() + TIMEOUT_S
    while monotonic() < deadline:
        message = consumer.poll(1)
        if message is not None and message.error() is None:
            (stamp,) = _STAMP.unpack(message.value() or b"")
            return float(stamp)
    raise RuntimeError("a record did not come through in time")
