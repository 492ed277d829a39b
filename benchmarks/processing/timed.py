"""Windows and joins of streams, and what Spark has in their place."""

from __future__ import annotations

from typing import Final

import numpy as np
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from benchmarks.frame import Asked
from benchmarks.processing.feeding import mixed, rows, times, write
from benchmarks.processing.harness import Bench, Case, Nowhere
from penstock.spark import flow, stream
from penstock.spark import windows as w
from penstock.spark.flows.declare import Flow, Stream
from penstock.spark.joins import within

CLICK: Final = "user bigint, amount bigint, at timestamp"
# Between two events.
STEP_US: Final = 100
LATENESS: Final = "1 second"
KEYS: Final = 10_000


def size(asked: Asked, full: int) -> int:
    """Events in a micro-batch."""
    return full // 10 if asked.quick else full


def timed(topic: str, schema: str, limit: int) -> Stream:
    return stream(
        topic,
        json=schema,
        time="at",
        lateness=LATENESS,
        options={"maxOffsetsPerTrigger": str(limit)},
    )


# ---- windows -----------------------------------------------------------------------------


def windows(asked: Asked) -> Case:
    """Counts by user, 10,000 of them, in windows of ten seconds."""
    per_batch = size(asked, 400_000)

    def feed(bench: Bench, first: int, batches: int) -> None:
        n = np.arange(first * per_batch, (first + batches) * per_batch, dtype=np.int64)
        write(bench, "clicks", rows(
            user=mixed(n, 1, KEYS), amount=mixed(n, 2, 1000), at=times(n * STEP_US)
        ))  # fmt: skip

    def ours(limit: int) -> Flow:
        @flow(inputs=timed("clicks", CLICK, limit), output=Nowhere(), name="windows")
        def counted(clicks: DataFrame) -> DataFrame:
            return w.tumbling(clicks, "10 seconds", by=["user"], values={"n": w.count()})

        return counted

    def plain(bench: Bench, limit: int) -> DataFrame:
        clicks = bench.read("clicks", CLICK, limit).withWatermark("at", LATENESS)
        return clicks.groupBy(F.window("at", "10 seconds"), "user").count()

    return Case("windows", per_batch, lambda bench: bench.topics("clicks"), feed, ours, plain)


def session(asked: Asked) -> Case:
    """Sessions with a gap of five seconds; each two seconds another two thousand users."""
    per_batch = size(asked, 400_000)

    def feed(bench: Bench, first: int, batches: int) -> None:
        n = np.arange(first * per_batch, (first + batches) * per_batch, dtype=np.int64)
        user = n // 20_000 * 2_000 + mixed(n, 1, 2_000)
        write(bench, "clicks", rows(user=user, amount=mixed(n, 2, 1000), at=times(n * STEP_US)))

    def ours(limit: int) -> Flow:
        @flow(inputs=timed("clicks", CLICK, limit), output=Nowhere(), name="session")
        def counted(clicks: DataFrame) -> DataFrame:
            return w.session(clicks, "5 seconds", by=["user"], values={"n": w.count()})

        return counted

    def plain(bench: Bench, limit: int) -> DataFrame:
        clicks = bench.read("clicks", CLICK, limit).withWatermark("at", LATENESS)
        return clicks.groupBy(F.session_window("at", "5 seconds"), "user").count()

    return Case("session", per_batch, lambda bench: bench.topics("clicks"), feed, ours, plain)


# ---- two streams -------------------------------------------------------------------------

SHOWN: Final = "ad bigint, page bigint, at timestamp"
CLICKED: Final = "ad bigint, user bigint, at timestamp"


def join(asked: Asked) -> Case:
    """Ads shown and clicked within ten seconds: half of them are."""
    per_batch = size(asked, 200_000)
    half = per_batch // 2

    def feed(bench: Bench, first: int, batches: int) -> None:
        n = np.arange(first * half, (first + batches) * half, dtype=np.int64)
        at = n * STEP_US * 2
        write(bench, "shown", rows(ad=n, page=mixed(n, 1, 1000), at=times(at)))
        # Of the ads of the last two seconds; every other one is of an ad that nobody has shown.
        ad = np.where(n % 2, n - mixed(n, 2, 10_000), -1 - n)
        write(bench, "clicked", rows(ad=ad, user=mixed(n, 3, KEYS), at=times(at)))

    def ours(limit: int) -> Flow:
        inputs = [timed("shown", SHOWN, limit // 2), timed("clicked", CLICKED, limit // 2)]

        @flow(inputs=inputs, output=Nowhere(), name="join")
        def joined(shown: DataFrame, clicked: DataFrame) -> DataFrame:
            return within(shown, clicked, on=["ad"], bound=("0 s", "10 s"))

        return joined

    def plain(bench: Bench, limit: int) -> DataFrame:
        shown = bench.read("shown", SHOWN, limit // 2).withWatermark("at", LATENESS)
        clicked = bench.read("clicked", CLICKED, limit // 2).withWatermark("at", LATENESS)
        clicked = clicked.select(F.col("ad").alias("ad2"), "user", F.col("at").alias("at2"))
        return shown.join(
            clicked, F.expr("ad = ad2 AND at2 >= at AND at2 <= at + interval 10 seconds")
        )

    return Case(
        "join", per_batch, lambda bench: bench.topics("shown", "clicked"), feed, ours, plain
    )
