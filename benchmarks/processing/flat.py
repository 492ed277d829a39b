"""What is kept must not grow with the stream: state and memory over many micro-batches.

Keys are ever new, time moves on, and each micro-batch is as large as the others. The first quarter
of the micro-batches, less the very first ones, is compared with the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from statistics import mean
from typing import Final

import numpy as np
from pyspark.sql import DataFrame

from benchmarks.broker.workloads import progress
from benchmarks.frame import Asked, Cells, number
from benchmarks.processing import usage
from benchmarks.processing.feeding import mixed, rows, times, write
from benchmarks.processing.harness import Bench, Nowhere, bench, wait_until_over
from benchmarks.processing.matching import EVENT, STEPS
from benchmarks.processing.timed import timed
from penstock.spark import flow
from penstock.spark import windows as w
from penstock.spark.flows.declare import Flow
from penstock.spark.joins import within

PER_BATCH: Final = 20_000
STEP_US: Final = 500
# Before this many micro-batches windows have not closed yet, and nothing is full.
FILLING: Final = 3
_QUARTERS: Final = ("first quarter", "last quarter")
_MEASURES: Final = {
    "rows": ("rows of state", 1),
    "bytes": ("state, kB", 1_000),
    "python": ("memory of Python, MB", 1_000_000),
    "java": ("memory of Java, MB", 1_000_000),
}


def _windows(limit: int) -> Flow:
    @flow(inputs=timed("payments", EVENT, limit), output=Nowhere(), name="windows")
    def counted(payments: DataFrame) -> DataFrame:
        return w.tumbling(payments, "10 seconds", by=["card"], values={"n": w.count()})

    return counted


def _dedup(limit: int) -> Flow:
    @flow(inputs=timed("payments", EVENT, limit), output=Nowhere(), name="dedup")
    def once(payments: DataFrame) -> DataFrame:
        return w.deduplicated(payments, key=["card"], within="10 seconds")

    return once


def _join(limit: int) -> Flow:
    inputs = [timed("payments", EVENT, limit), timed("others", EVENT, limit)]

    @flow(inputs=inputs, output=Nowhere(), name="join")
    def joined(payments: DataFrame, others: DataFrame) -> DataFrame:
        return within(payments, others, on=["card"], bound=("0 s", "10 s"), how="left")

    return joined


def _pattern(limit: int) -> Flow:
    @flow(inputs=timed("payments", EVENT, limit), output=Nowhere(), name="pattern")
    def alarms(payments: DataFrame) -> DataFrame:
        return STEPS.match(payments, by="card", measures={"first": "small.amount"})

    return alarms


FLOWS: Final[Mapping[str, Callable[[int], Flow]]] = {
    "windows": _windows,
    "dedup": _dedup,
    "join": _join,
    "pattern": _pattern,
}


def measure(asked: Asked) -> Cells:
    batches = 15 if asked.quick else 60
    per_batch = PER_BATCH // 10 if asked.quick else PER_BATCH
    cells: Cells = {}
    with bench("flat") as one:
        one.topics("payments", "others")
        n = np.arange(batches * per_batch, dtype=np.int64)
        for topic, salt in (("payments", 1), ("others", 2)):
            # A card is used a few times within some seconds, and never again.
            card = n // 2_000 * 500 + mixed(n, salt, 1_000)
            write(one, topic, rows(
                card=card, kind=mixed(n, salt + 2, 4), amount=mixed(n, salt + 4, 1000),
                at=times(n * STEP_US),
            ))  # fmt: skip
        one.writer.flush()
        for name, make in FLOWS.items():
            seen = _run(one, make(per_batch))
            for key, quarters in _quarters(seen).items():
                cells[f"flat_{name}_{key}"] = {
                    quarter: [value] for quarter, value in zip(_QUARTERS, quarters, strict=True)
                }
                progress(f"  flat {name}, {key}: {quarters[0]:,.0f}, then {quarters[1]:,.0f}")
    return cells


def _run(one: Bench, made: Flow) -> list[dict[str, float]]:
    """What is kept after each micro-batch."""
    running, _ = one.start(made)
    seen: dict[int, dict[str, float]] = {}

    def look() -> None:
        running.poll()
        at = running.progress.batch_id
        if at >= 0 and at not in seen:
            python, java = usage.memory(without=one.broker_pid)
            seen[at] = {
                "rows": running.progress.state_rows,
                "bytes": running.progress.state_bytes,
                "python": python,
                "java": java,
            }

    try:
        wait_until_over(running, look)
    finally:
        running.stop(60)
    return [seen[at] for at in sorted(seen)]


def _quarters(seen: list[dict[str, float]]) -> dict[str, tuple[float, float]]:
    counted = seen[FILLING:]
    part = max(1, len(counted) // 4)
    return {
        key: (
            mean(each[key] for each in counted[:part]),
            mean(each[key] for each in counted[-part:]),
        )
        for key in _MEASURES
    }


def lines(cells: Cells) -> list[str]:
    """The table of a long run."""
    found = []
    for name in FLOWS:
        for key, (title, unit) in _MEASURES.items():
            cell = cells.get(f"flat_{name}_{key}")
            if cell is not None:
                first, last = (cell[each][0] / unit for each in _QUARTERS)
                ratio = f"{last / first:.2f}" if first else "—"
                found.append(f"| {name} | {title} | {number(first)} | {number(last)} | {ratio} |")
    if not found:
        return []
    return [
        "",
        "| over a long run | what is kept | first quarter | last quarter | last : first |",
        "|---|---|---:|---:|---:|",
        *found,
    ]
