"""The command line: `python -m benchmarks.live [--only PART] [--rounds N] [--quick]`.

Parts: `shop` (the whole of `penstock demo` at 60 changes/s, with about 150 clicks/s beside them)
and `fifty` (fifty small flows with state on one driver). The tables go to stdout,
`benchmarks/results/live.json` and `docs/benchmarks.md`.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks import frame
from benchmarks.frame import best
from benchmarks.live import fifty, shop

# By cell: title, unit, target.
CELLS: Final = {
    "flows_p50": ("flows of the shop, record in the log → committed, p50", "s", 0.4),
    "flows_p99": ("the same, p99", "s", 1.2),
    "sinks_p50": ("sinks of the shop without an interval, the worst, p50", "s", 0.1),
    "sinks_p99": ("the same, p99", "s", 0.5),
    "row_p50": ("commit in the database → row in `revenue_by_country`, p50", "s", 0.5),
    "row_p99": ("the same, p99", "s", 1.5),
    "cpu": ("processor time of the whole shop, of one core", "%", 90.0),
    "memory": ("memory of the whole shop", "GB", 1.6),
    "first": ("first result after the start", "s", 10.0),
    "batches": ("micro-batches of its flows a second", "", None),
    "batch_cpu": ("processor time of everything for each of them", "ms", None),
    "fifty_p50": ("50 small flows with state on one driver, p50", "s", 1.0),
    "fifty_p99": ("the same, p99", "s", 3.0),
    "fifty_starved": ("of them without a micro-batch", "", 0.0),
    "fifty_cpu": ("their processor time, of one core", "%", None),
    "fifty_memory": ("their memory, without the broker", "GB", None),
}


def render(results: dict[str, Any]) -> str:
    """The tables, as they stand in the page."""
    lines = [frame.measured_on(results), "", "| | measured | target |", "|---|---|---|"]
    cells = {name: values for part in results["parts"].values()
             for name, values in part["cells"].items()}  # fmt: skip
    for name, (title, unit, target) in CELLS.items():
        value = best(cells.get(name, {}).get("penstock"), lower=name != "batches")
        if value is not None:
            wanted = "" if target is None else f"≤ {target:g} {unit}".strip()
            lines.append(f"| {title} | {value:.3g} {unit} | {wanted} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(
        frame.run(
            "live",
            "How live a whole pipeline is.",
            {"shop": shop.measure, "fifty": fifty.measure},
            render,
        )
    )
