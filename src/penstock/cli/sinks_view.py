"""Running sinks as people and Prometheus see them, and sinks that run beside flows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from penstock.broker.metrics.exposition import Family
from penstock.cli import output
from penstock.cli.run_view import coloured, rate

if TYPE_CHECKING:
    from rich.console import RenderableType

    from penstock.spark.flows.manager import Manager
    from penstock.spark.flows.supervisor import Failure
    from penstock.spark.sinking.manager import SinkManager, SinkStatus

COLUMNS: Final = (
    "sink", "state", "topic", "store", ">rows/s", ">put", ">deleted", ">lag", ">behind",
    ">fresh p50/p99", ">dead", ">restarts",
)  # fmt: skip
STATES: Final = (
    "starting", "running", "waiting", "stopping", "stopped", "paused", "failed", "finished",
)  # fmt: skip


def row(status: Mapping[str, Any]) -> tuple[str, ...]:
    """A sink's line of the table; `status` as `SinkStatus.as_dict` gives it."""
    numbers = status["progress"]
    name = f"{status['name']} (rebuild)" if status["rebuilding"] else str(status["name"])
    state = str(status["state"])
    if status["retry_in_s"] is not None:
        state = f"again in {status['retry_in_s']:.0f} s"
    return (
        name,
        f"{state} !" if status["alarming"] else state,
        str(status["topic"]),
        str(status["store"]),
        rate(numbers["in_per_s"]),
        _counted(status["put"]),
        _counted(status["deleted"]),
        _counted(status["lag"]),
        behind(status["lag_s"]),
        _fresh(status),
        _counted(None if status["put"] is None else numbers["dead_letters"]),
        f"{status['restarts']:,}",
    )


def _counted(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def _fresh(status: Mapping[str, Any]) -> str:
    p50, p99 = status["fresh_p50_s"], status["fresh_p99_s"]
    return "-" if p50 is None or p99 is None else f"{age(p50)} / {age(p99)}"


def age(seconds: float) -> str:
    """A short time in the unit that suits it."""
    if seconds < 1:
        return f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


def behind(lag_s: float | None) -> str:
    if lag_s is None:
        return "-"
    return f"{lag_s:.1f} s" if lag_s < 600 else f"{lag_s / 60:.0f} min"


def rendered(statuses: Sequence[Mapping[str, Any]]) -> RenderableType:
    """All sinks, with what went wrong below."""
    from rich.console import Group
    from rich.text import Text

    errors = []
    for each in statuses:
        if each["error"]:
            remedy = f"\n  {each['advice']}" if each["advice"] else ""
            style = "red" if each["state"] == "failed" else "yellow"
            errors.append(Text(f"{each['name']}: {each['error']}{remedy}", style=style))
    table = output.table(COLUMNS, map(row, statuses))
    return Group(coloured(table, statuses), *errors)


def families(statuses: Sequence[SinkStatus]) -> list[Family]:
    """The numbers of sinks for Prometheus."""
    found = {
        "in": Family("penstock_sink_records_in_total", "counter", "Records that were read."),
        "put": Family("penstock_sink_rows_put_total", "counter", "Rows put into the store."),
        "deleted": Family("penstock_sink_rows_deleted_total", "counter", "Rows taken out."),
        "dead": Family("penstock_sink_dead_letters_total", "counter",
                       "Records and rows that went to the dead-letter topic."),
        "restarts": Family("penstock_sink_restarts_total", "counter",
                           "How often the sink was started again after a failure."),
        "lag": Family("penstock_sink_lag_records", "gauge",
                      "Records in the topic that are not in the store yet."),
        "lag_s": Family("penstock_sink_lag_seconds", "gauge",
                        "Age of the newest record in the store, if there are newer ones; else 0."),
        "fresh": Family("penstock_sink_freshness_seconds", "gauge",
                        "Age of records when they came into the store, over the last minute."),
        "alarm": Family("penstock_sink_alarming", "gauge", "1 if the lag is above max_lag."),
        "state": Family("penstock_sink_state", "gauge",
                        "1 for the state that the sink is in, 0 for the others."),
    }  # fmt: skip
    for each in statuses:
        labels = {"sink": f"{each.name}-rebuild" if each.rebuilding else each.name}
        found["in"].add(each.progress.rows_in, labels)
        found["put"].add(each.put, labels)
        found["deleted"].add(each.deleted, labels)
        found["dead"].add(each.progress.dead_letters, labels)
        found["restarts"].add(each.restarts, labels)
        if each.lag is not None:
            found["lag"].add(each.lag, labels)
        if each.lag_s is not None:
            found["lag_s"].add(each.lag_s, labels)
        for quantile, seconds in (("0.5", each.fresh_p50_s), ("0.99", each.fresh_p99_s)):
            if seconds is not None:
                found["fresh"].add(seconds, {**labels, "quantile": quantile})
        found["alarm"].add(int(each.alarming), labels)
        for state in STATES:
            found["state"].add(int(each.state == state), {**labels, "state": state})
    return list(found.values())


class Together:
    """Flows and sinks in one process, looked after by one loop. Either may be missing.

    A run with an end feeds the sinks after the flows have ended, so that they get what was written.
    """

    def __init__(self, flows: Manager | None, sinks: SinkManager | None, *, once: bool) -> None:
        self._parts: list[Any] = [each for each in (flows, sinks) if each is not None]
        self.flows, self.sinks = flows, sinks
        self._sinks_wait = once and flows is not None and sinks is not None
        self._stopping = False

    def start(self) -> None:
        """Begin."""
        for each in self._parts:
            if not (each is self.sinks and self._sinks_wait):
                each.start()

    def step(self) -> bool:
        """One look at everything; whether all is over."""
        over = [
            each.step() for each in self._parts if not (each is self.sinks and self._sinks_wait)
        ]
        if self._sinks_wait and all(over) and not self._stopping:
            assert self.sinks is not None
            self._sinks_wait = False
            self.sinks.start()
            return False
        return all(over) or self.broken is not None

    def stop(self) -> None:
        """End all, each after its micro-batch."""
        self._stopping = True
        for each in self._parts:
            each.stop()

    def give_up(self, why: Failure) -> None:
        """End at once."""
        for each in self._parts:
            each.give_up(why)

    def close(self) -> None:
        """Let go of the threads."""
        for each in self._parts:
            each.close()

    def status(self) -> list[Any]:
        """Flows, then sinks."""
        return [status for each in self._parts for status in each.status()]

    @property
    def failed(self) -> list[str]:
        return [name for each in self._parts for name in each.failed]

    @property
    def broken(self) -> Failure | None:
        return next((each.broken for each in self._parts if each.broken is not None), None)

    @property
    def on_change(self) -> Callable[[Any], None]:
        found: Callable[[Any], None] = self._parts[0].on_change
        return found

    @on_change.setter
    def on_change(self, tell: Callable[[Any], None]) -> None:
        for each in self._parts:
            each.on_change = tell
