"""What the broker set out to reach, beside what it did."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from benchmarks.broker.results import Results, SystemResult

THROUGHPUT_CELLS: Final = {
    "produce_100": "produce 100 B",
    "produce_1024": "produce 1 KiB",
    "consume_100": "consume 100 B",
    "consume_1024": "consume 1 KiB",
}
RAW_PRODUCE: Final = ("raw_produce_64k", "raw_produce_64k_deep", "raw_produce_1m")
RAW_FETCH: Final = ("raw_fetch_64k", "raw_fetch_1m")


@dataclass(frozen=True)
class Target:
    """One line: the target, the figure, whether it is met."""

    text: str
    measured: str
    met: bool


def targets(results: Results) -> Iterator[Target]:
    """Every target there is a measurement for."""
    disk = results.systems.get("penstock")
    if disk is not None and disk.cells:
        yield from _against_kafka(disk, results.systems.get("kafka"))
        yield from _raw(disk, results.systems.get("penstock-os"))
        yield from _latency(disk, "disk", 10.0)
    os_level = results.systems.get("penstock-os")
    if os_level is not None and os_level.cells:
        yield from _latency(os_level, "os", 1.0)
    if disk is not None and disk.start_s:
        yield _at_most("start", min(disk.start_s), 0.5, "s")
        yield _at_most("idle memory", min(disk.idle_mb), 80, "MB")
    if "penstock" in results.retained:
        yield from _retained(results.retained["penstock"])


def _at_least(what: str, value: float, bound: float, unit: str) -> Target:
    digits = 2 if bound < 10 else 0
    return Target(
        f"{what} ≥ {bound:g} {unit}".strip(), f"{value:.{digits}f} {unit}".strip(), value >= bound
    )


def _at_most(what: str, value: float, bound: float, unit: str) -> Target:
    digits = 2 if bound <= 10 else 0
    return Target(
        f"{what} ≤ {bound:g} {unit}".strip(), f"{value:.{digits}f} {unit}".strip(), value <= bound
    )


def _against_kafka(disk: SystemResult, kafka: SystemResult | None) -> Iterator[Target]:
    if kafka is None or kafka.run != disk.run:
        return
    for cell, text in THROUGHPUT_CELLS.items():
        ours, theirs = disk.value(cell, "mb_per_s"), kafka.value(cell, "mb_per_s")
        if ours and theirs:
            ratio = ours / theirs
            yield Target(
                f"{text}, our fsync on ≥ Kafka without fsync",
                f"{ratio:.2f} times ({ours:.0f} against {theirs:.0f} MB/s)",
                ratio >= 1,
            )


def _raw(disk: SystemResult, os_level: SystemResult | None) -> Iterator[Target]:
    for row, level in ((disk, "disk"), (os_level, "os")):
        if row is None or "raw_produce_64k" not in row.cells:
            continue
        produce = max(row.value(cell, "mb_per_s") or 0 for cell in RAW_PRODUCE)
        fetch = max(row.value(cell, "mb_per_s") or 0 for cell in RAW_FETCH)
        small = row.value("raw_small_d256", "requests_per_s") or 0
        yield _at_least(f"raw produce, 64 KiB+ requests, `{level}`", produce, 400, "MB/s")
        yield _at_least(f"raw fetch, 64 KiB+ answers, `{level}`", fetch, 800, "MB/s")
        yield _at_least(f"pipelined small requests, `{level}`", small, 80_000, "req/s")


def _latency(row: SystemResult, level: str, bound_ms: float) -> Iterator[Target]:
    p99_us = row.value("ack", "p99_us")
    if p99_us is not None:
        yield _at_most(f"p99 publish-to-ack at `{level}`", p99_us / 1000, bound_ms, "ms")


def _retained(entry: dict[str, float]) -> Iterator[Target]:
    size = f"{entry['gb']:.0f} GB retained"
    for what in ("produce", "consume"):
        yield _at_least(
            f"{what} rate with {size} over that of an empty log", entry[f"{what}_ratio"], 0.95, ""
        )
    yield _at_most(f"start with {size} after a clean stop", entry["start_clean_s"], 1.0, "s")
    bound_s = 2 * entry["start_crash_empty_s"] + 1
    yield Target(
        f"start with {size} after a crash is bounded by the active segment",
        f"{entry['start_crash_s']:.2f} s, one segment {entry['start_crash_empty_s']:.2f} s",
        entry["start_crash_s"] <= bound_s,
    )
