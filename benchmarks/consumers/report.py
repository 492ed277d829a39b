"""The measured values as a table: the best round of each, and the ratios that matter."""

from __future__ import annotations

from typing import Final

from benchmarks.broker.systems import SYSTEMS

# Of these the lowest counts, of all others the highest.
_LOWER_IS_BETTER: Final = ("rebalance_", "transactions_p")

_NAMES: Final = {
    "rebalance_classic": "join to first record, classic protocol, {} members (s)",
    "rebalance_consumer": "join to first record, KIP-848, {} members (s)",
    "commits": "committed offsets/s, {} consumers, each waits for every commit",
    "transactions_txn_per_s": "transactions/s (consume, transform, produce; 10 records each)",
    "transactions_p50_ms": "latency through the transactional pipeline, p50 (ms)",
    "transactions_p99_ms": "latency through the transactional pipeline, p99 (ms)",
    "queue": "acknowledged messages/s of a queue, {} consumers",
}


def best(name: str, values: list[float]) -> float:
    return min(values) if name.startswith(_LOWER_IS_BETTER) else max(values)


def _title(name: str) -> str:
    if name in _NAMES:
        return _NAMES[name]
    stem, _, number = name.rpartition("_")
    return _NAMES[stem].format(number)


def _text(value: float | None) -> str:
    if value is None:
        return "—"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def render(machine: dict[str, str], cells: dict[str, dict[str, list[float]]]) -> str:
    """A Markdown table with a row per measurement and a column per system."""
    names = list(dict.fromkeys(name for row in cells.values() for name in row))
    systems = list(cells)
    measured = (
        f"Measured on {machine['date']}: {machine['cpu']}, {machine['memory']}, "
        f"{machine['system']}, Python {machine['python']}, {machine['disk']}; load before the "
        f"run {machine['load']}. Best of the rounds."
    )
    lines = [
        measured,
        "",
        "| | " + " | ".join(_column(key) for key in systems) + " | Penstock : Kafka |",
        "|---|" + "---:|" * (len(systems) + 1),
    ]
    for name in names:
        values = {
            key: best(name, found) if (found := cells[key].get(name)) else None for key in systems
        }
        shown = " | ".join(_text(values[key]) for key in systems)
        lines.append(f"| {_title(name)} | {shown} | {_ratio(name, values)} |")
    return "\n".join(lines)


def _column(key: str) -> str:
    system = SYSTEMS[key]
    return f"{system.name} (`{system.level}`)"


def _ratio(name: str, values: dict[str, float | None]) -> str:
    """How many times as good as Kafka's default Penstock's default is."""
    ours, theirs = values.get("penstock"), values.get("kafka")
    if not ours or not theirs:
        return "—"
    better = theirs / ours if name.startswith(_LOWER_IS_BETTER) else ours / theirs
    return f"{better:.2f}"
