"""The main table as a picture: four panels of bars, one bar per system and durability."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from benchmarks.broker.results import Results, SystemResult

COLOURS: Final = {"disk": "#1f5fa8", "os": "#e08a2e", "memory": "#8c8c8c"}
MEANING: Final = {
    "disk": "disk: fsynced before the acknowledgement",
    "os": "os: handed to the operating system",
    "memory": "memory: in the process only",
}
BAR: Final = 0.38


def draw(results: Results, path: Path) -> None:
    """Write the picture as SVG; the same results give the same bytes."""
    rows = [row for row in results.systems.values() if "produce_100" in row.cells]
    if not rows:
        return
    rows.reverse()  # bars are drawn from the bottom
    with mpl.rc_context({"svg.hashsalt": "penstock", "font.size": 8.5}):
        figure, axes = plt.subplots(2, 3, figsize=(13, 8.2), sharey="row")
        panels: list[tuple[Axes, str, str, Callable[[SystemResult], tuple[float, float]]]] = [
            (axes[0][0], "produce, MB/s", "100 B and 1 KiB", _rates("produce")),
            (axes[0][1], "consume, MB/s", "100 B and 1 KiB", _rates("consume")),
            (axes[0][2], "memory, MB", "idle and loaded", _memory),
            (axes[1][0], "publish-to-ack, ms", "p50 and p99", _latency("ack")),
            (axes[1][1], "publish-to-consume, ms", "p50 and p99", _latency("e2e")),
            (axes[1][2], "start, s", "", lambda row: (min(row.start_s), 0.0)),
        ]
        for axis, title, pair, values in panels:
            _panel(axis, rows, f"{title} ({pair})" if pair else title, values)
        # Bars on a logarithmic axis need a beginning that does not depend on the shortest one.
        lowest = {axes[0][2]: 5, axes[1][0]: 0.02, axes[1][1]: 0.02, axes[1][2]: 0.005}
        for axis, left in lowest.items():
            axis.set_xscale("log")
            axis.set_xlim(left=left)
            axis.xaxis.set_major_formatter("{x:g}")
        figure.legend(
            handles=[Patch(color=COLOURS[level], label=MEANING[level]) for level in COLOURS],
            loc="lower center",
            ncols=3,
            frameon=False,
        )
        figure.suptitle("One machine, one partition, one C client (paler: the second of two)")
        figure.tight_layout(rect=(0, 0.03, 1, 0.99))
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def _rates(mode: str) -> Callable[[SystemResult], tuple[float, float]]:
    return lambda row: (
        row.value(f"{mode}_100", "mb_per_s") or 0,
        row.value(f"{mode}_1024", "mb_per_s") or 0,
    )


def _latency(cell: str) -> Callable[[SystemResult], tuple[float, float]]:
    return lambda row: (
        (row.value(cell, "p50_us") or 0) / 1000,
        (row.value(cell, "p99_us") or 0) / 1000,
    )


def _memory(row: SystemResult) -> tuple[float, float]:
    return min(row.idle_mb), max(row.loaded_mb)


def _panel(
    axis: Axes,
    rows: list[SystemResult],
    title: str,
    values: Callable[[SystemResult], tuple[float, float]],
) -> None:
    for at, row in enumerate(rows):
        first, second = values(row)
        colour = COLOURS[row.level]
        upper = at + BAR / 2 if second else at
        axis.barh(upper, first, BAR, color=colour)
        if second:
            axis.barh(at - BAR / 2, second, BAR, color=colour, alpha=0.55)
    axis.set_title(title)
    axis.set_yticks(range(len(rows)), [f"{row.name}, {row.level}" for row in rows])
    axis.grid(axis="x", alpha=0.3)
    axis.set_axisbelow(True)
    axis.spines[["top", "right"]].set_visible(False)
