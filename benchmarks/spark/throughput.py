"""Rates: everything that is in a topic, as one AvailableNow run, ours and Spark's by turns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from benchmarks.broker.clients import BUILD
from benchmarks.broker.workloads import progress
from benchmarks.frame import Asked, Cells
from benchmarks.spark import data
from penstock.spark.sink.writing import Mode, write_stream

CHECKPOINTS: Final = BUILD / "data" / "spark-checkpoints"
FORMATS: Final = {"penstock": "penstock", "jvm": "kafka"}
CLICK: Final = "user string, page int, at long, ok boolean"

# What runs once for a system in a round; the seconds it took.
Job = Callable[[str, str], float]


def _rows(asked: Asked, full: int) -> int:
    return 200_000 if asked.quick else full


def _reader(spark: Any, system: str, bootstrap: str, topic: str) -> Any:
    return (
        spark.readStream.format(FORMATS[system])
        .option("kafka.bootstrap.servers", bootstrap)
        .option("subscribe", topic)
        .option("startingOffsets", "earliest")
        .load()
    )


def _rounds(name: str, asked: Asked, count: int, jobs: dict[str, Callable[[int], float]]) -> Cells:
    """The rounds of all systems by turns; the first of each is for warming up and not counted."""
    found: dict[str, list[float]] = {system: [] for system in jobs}
    for turn in range(asked.rounds + 1):
        for system, job in jobs.items():
            rate = count / job(turn)
            progress(f"  {name} {system}: {rate:,.0f} rows/s{'' if turn else ' (warming up)'}")
            if turn:
                found[system].append(rate)
    return {name: found}


def _checkpoint(*parts: object) -> Path:
    return CHECKPOINTS / "-".join(map(str, parts))


def source(asked: Asked) -> Cells:
    """Source to noop."""
    count = _rows(asked, 6_000_000)
    with data.broker() as bootstrap:
        data.fill_plain(bootstrap, "plain", count)
        spark = data.spark_session()

        def job(system: str) -> Callable[[int], float]:
            def run(turn: int) -> float:
                frame = _reader(spark, system, bootstrap, "plain")
                return data.available_now(
                    frame.writeStream.format("noop"), _checkpoint("source", system, turn)
                )

            return run

        return _rounds("source", asked, count, {name: job(name) for name in FORMATS})


def sink(asked: Asked) -> Cells:
    """Topic to topic, without keys."""
    return _topic_to_topic("sink", asked, "value")


def keyed(asked: Asked) -> Cells:
    """Topic to topic, the partition decided by a key."""
    return _topic_to_topic("keyed", asked, "substring(value, 1, 8) AS key", "value")


def _topic_to_topic(name: str, asked: Asked, *columns: str) -> Cells:
    count = _rows(asked, 2_000_000)
    with data.broker() as bootstrap:
        data.fill_plain(bootstrap, "plain", count)
        spark = data.spark_session()

        def ours(mode: Mode) -> Callable[[int], float]:
            def run(turn: int) -> float:
                out = f"{mode}-{turn}"
                data.make_topic(bootstrap, out)
                frame = _reader(spark, "penstock", bootstrap, "plain").selectExpr(*columns)
                checkpoint = _checkpoint(name, mode, turn)
                writer = write_stream(
                    frame,
                    topic=out,
                    name=f"bench-{name}-{out}",
                    checkpoint=checkpoint,
                    bootstrap=bootstrap,
                    mode=mode,
                )
                return data.available_now(writer, checkpoint)

            return run

        def theirs(turn: int) -> float:
            out = f"jvm-{turn}"
            data.make_topic(bootstrap, out)
            frame = _reader(spark, "jvm", bootstrap, "plain").selectExpr(*columns)
            writer = (
                frame.writeStream.format("kafka")
                .option("kafka.bootstrap.servers", bootstrap)
                .option("topic", out)
            )
            return data.available_now(writer, _checkpoint(name, "jvm", turn))

        jobs = {
            "penstock-exactly-once": ours("exactly-once"),
            "penstock-at-least-once": ours("at-least-once"),
            "jvm": theirs,
        }
        return _rounds(name, asked, count, jobs)


def windows(asked: Asked) -> Cells:
    """JSON parsed and counted per minute and page: the same query, the source differs."""
    count = _rows(asked, 2_000_000)
    with data.broker() as bootstrap:
        data.fill_json(bootstrap, "clicks", count)
        spark = data.spark_session()

        def job(system: str) -> Callable[[int], float]:
            def run(turn: int) -> float:
                frame = _reader(spark, system, bootstrap, "clicks")
                counted = (
                    frame.selectExpr(f"from_json(CAST(value AS string), '{CLICK}') AS click")
                    .selectExpr("click.page", "timestamp_millis(click.at) AS at")
                    .withWatermark("at", "1 minute")
                    .groupBy("page", _window())
                    .count()
                )
                writer = counted.writeStream.format("noop").outputMode("update")
                return data.available_now(writer, _checkpoint("windows", system, turn))

            return run

        return _rounds("windows", asked, count, {name: job(name) for name in FORMATS})


def _window() -> Any:
    from pyspark.sql.functions import window

    return window("at", "1 minute")
