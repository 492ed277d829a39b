"""The command line: `python -m benchmarks.processing [--case NAME] [--rounds N] [--quick]`.

Cases: `windows`, `session`, `join`, `enrich` (latest and as-of), `view`, `pattern`, `standing`,
`nexmark`, and `flat`: what is kept, over a long run. The tables go to stdout,
`benchmarks/results/processing.json` and `docs/benchmarks.md`.
"""

from __future__ import annotations

from typing import Any, Final

from benchmarks import frame
from benchmarks.frame import Cells, best, number
from benchmarks.processing import flat, matching, nexmark, tables, timed
from benchmarks.processing.harness import part

PARTS: Final[dict[str, frame.Part]] = {
    "windows": part(timed.windows),
    "session": part(timed.session),
    "join": part(timed.join),
    "enrich": part(tables.latest, tables.as_of),
    "view": tables.view,
    "pattern": part(matching.pattern_of_three),
    "standing": part(matching.standing),
    "nexmark": nexmark.measure,
    "flat": flat.measure,
}

# By cell: the title, and how many events/s were aimed for where Spark has no equivalent.
_ROWS: Final[dict[str, tuple[str, int | None]]] = {
    "windows": ("count by 10k keys in windows of 10 s", None),
    "session": ("sessions, gap of 5 s", None),
    "join": ("two streams within 10 s", None),
    "enrich_latest": ("enrichment, table of 1M rows, latest", 400_000),
    "enrich_as_of": ("enrichment, table of 1M rows, as of the event's time", 400_000),
    "view_20k": ("view over two tables of 1M rows, 20k changes per batch", 50_000),
    "view_200k": ("the same, 200k changes per batch", 150_000),
    "pattern": ("pattern of 3 steps, 10k keys, 100k per batch", 200_000),
    "standing": ("10k standing queries, documents", 30_000),
}


def render(results: dict[str, Any]) -> str:
    """A row for each case: ours, Spark's, the ratio; and what is kept over a long run."""
    cells: Cells = {}
    for each in results["parts"].values():
        cells.update(each["cells"])
    titles = (
        "| case | Penstock, events/s | plain Spark | times Spark | aimed for "
        "| processor time per event, µs | plain Spark's |"
    )
    lines = [frame.measured_on(results), "", titles, "|---|---:|---:|---:|---:|---:|---:|"]
    queries = [name for name in cells if name.startswith("q") and not name.endswith("_cpu")]
    for name in [*_ROWS, *queries]:
        if name not in cells:
            continue
        title, aim = _ROWS.get(name, (f"NEXMark {name}", None))
        ours, theirs = (best(cells[name].get(each)) for each in ("penstock", "plain"))
        spent = cells.get(f"{name}_cpu", {})
        ratio = f"{ours / theirs:.2f}" if ours and theirs else "—"
        wanted = number(aim) if aim else ("0.9 of Spark's" if theirs else "—")
        own, other = (number(best(spent.get(each), lower=True)) for each in ("penstock", "plain"))
        lines.append(
            f"| {title} | {number(ours)} | {number(theirs)} | {ratio} | {wanted} | {own} "
            f"| {other} |"
        )
    return "\n".join([*lines, *flat.lines(cells)])


if __name__ == "__main__":
    raise SystemExit(frame.run("processing", __doc__ or "", PARTS, render))
