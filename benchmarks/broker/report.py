"""The results as Markdown: one table of all systems, ratios to Apache Kafka, the raw protocol, the
retained log, and the targets with what was reached.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from benchmarks.broker import crowd
from benchmarks.broker.raw import RAW_CELLS, RawCell
from benchmarks.broker.results import Results, SystemResult
from benchmarks.broker.retained import MEASURES, Entry
from benchmarks.broker.targets import targets

THROUGHPUT: Final = {
    "produce_100": "produce 100 B",
    "produce_1024": "produce 1 KiB",
    "consume_100": "consume 100 B",
    "consume_1024": "consume 1 KiB",
}
LATENCY: Final = {"ack": "publish-to-ack p50 / p99", "e2e": "publish-to-consume p50 / p99"}
NONE: Final = "-"


def markdown(results: Results) -> str:
    """Everything, ready for stdout and for the documentation."""
    machine = results.machine
    where = f"{machine['cpu']}, {machine['memory']} of memory, {machine['disk']}"
    software = f"{machine['system']}, Python {machine['python']}"
    parts = [
        f"Measured {machine['date']} on {where}; {software}; load before: {machine['load']}.",
        _systems_table(results),
        _ratio_table(results),
        _raw_table(results),
        _retained_table(results),
        _crowd_table(results),
        _targets_table(results),
        _clients_list(results),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _short(number: float) -> str:
    """Three figures: 1.27M, 183k, 950, 0.42."""
    for divisor, suffix in ((1e6, "M"), (1e3, "k")):
        if number >= divisor:
            scaled = number / divisor
            return f"{scaled:.{2 if scaled < 10 else 1 if scaled < 100 else 0}f}{suffix}"
    return f"{number:.{2 if number < 1 else 1 if number < 10 else 0}f}"


def _us(value: float) -> str:
    return f"{value:.0f} µs" if value < 1000 else f"{value / 1000:.1f} ms"


def _rate(row: SystemResult, cell: str) -> str:
    best = row.best(cell)
    if best is None:
        return NONE
    return f"{_short(best['msgs_per_s'])}/s · {_short(best['mb_per_s'])} MB/s"


def _latency(row: SystemResult, cell: str) -> str:
    best = row.best(cell)
    return NONE if best is None else f"{_us(best['p50_us'])} / {_us(best['p99_us'])}"


def _name(row: SystemResult) -> str:
    return f"{row.name} {row.version}".strip()


def _seconds(values: list[float]) -> str:
    return f"{min(values):.2f} s" if values else NONE


def _megabytes(value: float | None) -> str:
    return NONE if value is None else f"{value:.0f} MB"


def _systems_table(results: Results) -> str:
    header = [
        *("system", "durability of an acknowledged message"),
        *THROUGHPUT.values(),
        *LATENCY.values(),
        *("start", "idle", "loaded"),
    ]
    rows = []
    for row in results.systems.values():
        if row.missing:
            absent = [f"not available: {row.missing}", *[NONE] * (len(header) - 3)]
            rows.append([_name(row), row.durability, *absent])
            continue
        rows.append(
            [
                _name(row),
                row.durability,
                *(_rate(row, cell) for cell in THROUGHPUT),
                *(_latency(row, cell) for cell in LATENCY),
                _seconds(row.start_s),
                _megabytes(min(row.idle_mb, default=None)),
                _megabytes(max(row.loaded_mb, default=None)),
            ]
        )
    return _table(header, rows)


def _ratio_table(results: Results) -> str:
    """Throughput over Kafka's, and latency under Kafka's: above 1 is better than Kafka."""
    kafka = results.systems.get("kafka")
    if kafka is None or not kafka.cells:
        return ""
    rows = []
    for row in results.systems.values():
        if row.missing or row is kafka or not row.cells or row.run != kafka.run:
            continue
        ratios = [_ratio(row, kafka, cell, "mb_per_s") for cell in THROUGHPUT]
        ratios += [_ratio(row, kafka, cell, "p99_us", inverse=True) for cell in LATENCY]
        rows.append([_name(row), row.durability, *ratios])
    if not rows:
        return ""
    columns = [*THROUGHPUT.values(), "publish-to-ack p99", "publish-to-consume p99"]
    text = "How many times as good as Apache Kafka at its default (no fsync), same run:\n\n"
    return text + _table(["system", "durability", *columns], rows)


def _ratio(
    row: SystemResult, kafka: SystemResult, cell: str, name: str, *, inverse: bool = False
) -> str:
    ours, theirs = row.value(cell, name), kafka.value(cell, name)
    if not ours or not theirs:
        return NONE
    return f"{theirs / ours if inverse else ours / theirs:.2f}"


def _raw_table(results: Results) -> str:
    rows_of = [row for row in results.systems.values() if RAW_CELLS[0].name in row.cells]
    if not rows_of:
        return ""
    text = (
        "The Kafka protocol over bare sockets (c connections, d requests in flight on each; in "
        "brackets the broker's processor time):\n\n"
    )
    header = ["request", *(f"{row.name}, {row.level}" for row in rows_of)]
    rows = [[cell.text, *(_raw(row, cell) for row in rows_of)] for cell in RAW_CELLS]
    return text + _table(header, rows)


def _raw(row: SystemResult, cell: RawCell) -> str:
    best = row.best(cell.name)
    if best is None:
        return NONE
    if cell.unit == "MB/s":
        per_gb = best["server_cpu_s"] / (best["bytes"] / 1e9)
        return f"{best['mb_per_s']:.0f} MB/s ({per_gb:.1f} s/GB)"
    per_request = best["server_cpu_s"] / best["requests"] * 1e6
    if cell.unit == "req/s":
        return f"{_short(best['requests_per_s'])} req/s ({per_request:.0f} µs)"
    return f"{_us(best['p50_us'])} / {_us(best['p99_us'])} ({per_request:.0f} µs)"


def _retained_table(results: Results) -> str:
    if not results.retained:
        return ""
    header = ["with a retained log", *(entry["title"] for entry in results.retained.values())]
    rows = [
        [text, *(_retained(entry, show) for entry in results.retained.values())]
        for text, show in MEASURES.items()
    ]
    return _table(header, rows)


def _retained(entry: Entry, show: Callable[[Entry], str]) -> str:
    try:
        return show(entry)
    except KeyError:  # measured before there was such a figure
        return NONE


def _crowd_table(results: Results) -> str:
    if not results.crowd:
        return ""
    entries = results.crowd.values()
    header = ["many at once (in brackets processor time)", *(entry["title"] for entry in entries)]
    rows = [[text, *(_retained(e, show) for e in entries)] for text, show in crowd.MEASURES.items()]
    failed = [entry.get("failed", "") for entry in entries]
    if any(failed):
        rows.append(["ended with", *(text or NONE for text in failed)])
    return _table(header, rows)


def _targets_table(results: Results) -> str:
    rows = [
        [target.text, target.measured, "yes" if target.met else "**no**"]
        for target in targets(results)
    ]
    return _table(["target", "measured", "met"], rows) if rows else ""


def _clients_list(results: Results) -> str:
    """Which client with which settings made the figures, once each."""
    lines: list[str] = []
    for cell in (*THROUGHPUT, *LATENCY):
        for row in results.systems.values():
            best = row.best(cell)
            mode = cell.partition("_")[0]
            if best is not None:
                line = f"- {mode}, {best['client']}: {best['settings']}"
                if line not in lines:
                    lines.append(line)
    return "Clients:\n\n" + "\n".join(lines) if lines else ""
