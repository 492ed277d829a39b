"""The command line: `python -m benchmarks.spark [--only PART] [--rounds N] [--quick]`.

Parts: `source` (all of a topic to nowhere), `sink` (topic to topic), `keyed` (the same with keys,
which decide the partition), `windows` (JSON parsed, counted per minute), `latency` (from a
producer through a flow to a consumer), `session` (start of a session). The tables go to stdout,
`benchmarks/results/spark.json` and `docs/benchmarks.md`.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks import frame
from benchmarks.frame import Cells, best, number
from benchmarks.spark import latency, starting, throughput

PARTS: Final[dict[str, frame.Part]] = {
    "source": throughput.source,
    "sink": throughput.sink,
    "keyed": throughput.keyed,
    "windows": throughput.windows,
    "latency": latency.measure,
    "session": starting.measure,
}

_ROWS: Final = (
    ("source", "topic to nowhere, records of 100 bytes, rows/s", False),
    ("sink", "topic to topic, rows/s", False),
    ("keyed", "topic to topic, keys decide the partition, rows/s", False),
    ("windows", "JSON parsed, counted per minute and page, rows/s", False),
    ("latency_p50", "producer to consumer through a flow, p50, ms", True),
    ("latency_p99", "producer to consumer through a flow, p99, ms", True),
    ("session", "session ready, s", True),
)
_SYSTEMS: Final = {
    "penstock": "Penstock",
    "penstock-exactly-once": "Penstock, exactly once",
    "penstock-at-least-once": "Penstock, at least once",
    "jvm": "Spark's connector",
    "no-archive": "without the class archive",
}


def render(results: dict[str, Any]) -> str:
    """A row for each measurement and system, with the ratio to Spark's own connector."""
    cells: Cells = {}
    for part in results["parts"].values():
        cells.update(part["cells"])
    lines = [
        frame.measured_on(results),
        "",
        "| measurement | system | best round | times Spark's connector |",
        "|---|---|---:|---:|",
    ]
    for name, title, lower in _ROWS:
        theirs = best(cells.get(name, {}).get("jvm"), lower=lower)
        for system, values in cells.get(name, {}).items():
            ours = best(values, lower=lower)
            ratio = "—"
            if theirs and ours and system != "jvm":
                ratio = f"{theirs / ours if lower else ours / theirs:.2f}"
            lines.append(f"| {title} | {_SYSTEMS[system]} | {number(ours)} | {ratio} |")
    return "\n".join(lines)


if __name__ == "__main__":
    raise SystemExit(frame.run("spark", __doc__ or "", PARTS, render))
