"""Running flows as people see them: a table that is kept up to date, or lines for a file."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.cli import output
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from penstock.spark.flows.manager import Status

COLUMNS: Final = (
    "flow", "state", ">in/s", ">out/s", ">rows in", ">rows out", ">lag", ">batch", "watermark",
    ">state", ">late", ">dead", ">restarts",
)  # fmt: skip

# What has run for so long after a failure goes on, also if there is nothing to do.
BACK_S: Final = 60.0


def rate(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 or value == 0 else f"{value:.1f}"


def size(value: int) -> str:
    """Bytes for people."""
    number = float(value)
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def duration(ms: int) -> str:
    return f"{ms} ms" if ms < 10_000 else f"{ms / 1000:.1f} s"


def row(status: Mapping[str, Any]) -> tuple[str, ...]:
    """A flow's line of the table; `status` as `Status.as_dict` gives it."""
    numbers: Mapping[str, Any] = status["progress"]
    name = f"{status['name']} (rebuild)" if status["rebuilding"] else str(status["name"])
    state = str(status["state"])
    if status["retry_in_s"] is not None:
        state = f"again in {status['retry_in_s']:.0f} s"
    kept = f"{numbers['state_rows']:,} rows, {size(numbers['state_bytes'])}"
    return (
        name,
        state,
        rate(numbers["in_per_s"]),
        rate(numbers["out_per_s"]),
        f"{numbers['rows_in']:,}",
        f"{numbers['rows_out']:,}",
        "-" if numbers["lag"] is None else f"{numbers['lag']:,}",
        duration(numbers["batch_ms"]) if numbers["batches"] else "-",
        numbers["watermark"].partition(".")[0].replace("T", " ") or "-",
        kept if numbers["state_rows"] or numbers["state_bytes"] else "-",
        f"{numbers['late_rows']:,}",
        f"{numbers['dead_letters']:,}",
        f"{status['restarts']:,}",
    )


def rendered(
    statuses: Sequence[Mapping[str, Any]], *, with_failures: bool = True
) -> RenderableType:
    """All flows, with what went wrong below."""
    from rich.console import Group
    from rich.text import Text

    errors = []
    for each in statuses:
        if each["error"] and (with_failures or each["state"] != "failed"):
            remedy = f"\n  {each['advice']}" if each["advice"] else ""
            style = "red" if each["state"] == "failed" else "yellow"
            kind = "sink" if "store" in each else "flow"
            errors.append(Text(f"{kind} {each['name']}: {each['error']}{remedy}", style=style))
        if rows := each["progress"].get("set_aside"):
            errors.append(Text(_set_aside(str(each["name"]), rows), style="bold red"))
    # Sinks have a table of their own.
    from penstock.cli import sinks_view

    flows = [each for each in statuses if "store" not in each]
    sinks = [each for each in statuses if "store" in each]
    tables = [coloured(output.table(COLUMNS, map(row, flows)), flows)] if flows else []
    if sinks:
        table = output.table(sinks_view.COLUMNS, map(sinks_view.row, sinks))
        tables.append(coloured(table, sinks))
    return Group(*tables, *errors)


def coloured(table: Table, statuses: Sequence[Mapping[str, Any]]) -> Table:
    """The table with the rows in red of those that have failed."""
    for line_of, each in zip(table.rows, statuses, strict=True):
        if each["state"] == "failed":
            line_of.style = "red"
    return table


def _set_aside(name: str, rows: int) -> str:
    what = "rows that cannot be computed are" if rows != 1 else "row that cannot be computed is"
    return f"flow {name}: {rows:,} {what} set aside: `penstock view aside {name}` shows why"


class View:
    """Shows flows while they run; a context manager. `show` is called again and again."""

    def __init__(self, *, plain: bool, every_s: float) -> None:
        self._plain = plain or not sys.stdout.isatty()
        self._every_s = every_s
        self._live: Any = None
        self._told: dict[str, tuple[int, int]] = {}
        self._next = 0.0
        # What was said of those that wait, and which have failed: each is said once.
        self._waiting: dict[str, str] = {}
        self._again: dict[str, tuple[float, int]] = {}
        self._failed: set[str] = set()

    def __enter__(self) -> View:
        if not self._plain:
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(highlight=False), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def changed(self, status: Status) -> None:
        """A flow has got into another state. Trying again and again is one state."""
        if self._live is not None:
            return
        name = _name(status)
        if status.state == "waiting" and status.error:
            if self._waiting.get(name) != status.error:
                self._waiting[name] = status.error
                line(f"{name}: waiting: {' '.join(filter(None, (status.error, status.advice)))}")
            return
        if name in self._waiting and status.state in {"starting", "running"}:
            # It may fail again with its first micro-batch: `_tell_back` says when it goes well.
            self._again[name] = time.monotonic() + BACK_S, status.progress.batches
            return
        self._waiting.pop(name, None)
        if status.state != "failed":
            self._failed.discard(name)
        line(f"{name}: {status.state}")
        self.tell_failure(status)

    def _tell_back(self, statuses: Sequence[Status]) -> None:
        """A line for each that had to wait and goes on now."""
        for each in statuses:
            name = _name(each)
            if name not in self._waiting or each.state != "running" or name not in self._again:
                continue
            due, batches = self._again[name]
            if each.progress.batches > batches or time.monotonic() >= due:
                del self._waiting[name], self._again[name]
                line(f"{name}: running again")

    def tell_failure(self, status: Status) -> None:
        """Why one has failed, unless that was told."""
        name = _name(status)
        if status.state == "failed" and name not in self._failed:
            self._failed.add(name)
            output.fail(PenstockError(f"{name}: {status.error}", advice=status.advice))

    def finish(self, statuses: Sequence[Status]) -> None:
        """The last look; failures are told after it."""
        if self._live is not None:
            told = [each.as_dict() for each in statuses]
            self._live.update(rendered(told, with_failures=False), refresh=True)
        self.report(statuses)

    def show(self, statuses: Sequence[Status]) -> None:
        if self._live is not None:
            self._live.update(rendered([each.as_dict() for each in statuses]), refresh=True)
            return
        self._tell_back(statuses)
        now = time.monotonic()
        if now >= self._next:
            self._next = now + self._every_s
            self.report(statuses)

    def report(self, statuses: Sequence[Status]) -> None:
        """A line for each flow that has done something since the last."""
        for each in statuses:
            numbers = each.progress
            key, seen = _name(each), (numbers.batch_id, numbers.batches)
            if numbers.batches and self._told.get(key) != seen and self._live is None:
                self._told[key] = seen
                cells = dict(zip(COLUMNS, row(each.as_dict()), strict=True))
                told = (
                    f"{name.removeprefix('>')} {text}"
                    for name, text in list(cells.items())[2:]
                    if text not in {"-", "0"}
                )
                line(f"{_name(each)}: {', '.join(told)}")
                if rows := getattr(numbers, "set_aside", 0):
                    line(_set_aside(each.name, rows))


def kind_of(status: Any) -> str:
    """Whether this is a flow or a sink: both may have the same name."""
    return "sink" if hasattr(status, "store") else "flow"


def _name(status: Status) -> str:
    rebuild = " (rebuild)" if status.rebuilding else ""
    return f"{kind_of(status)} {status.name}{rebuild}"


def line(text: str) -> None:
    """A line with the time, for a file or a pipe."""
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
