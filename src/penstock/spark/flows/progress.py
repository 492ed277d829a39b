"""How a flow gets on: Spark's report of each micro-batch, reduced to what people look at.

Pure: reports in, numbers out. Totals are since the flow, or its generation, first ran: what was
counted before a restart is taken over (`restored`), but for the last second before a kill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from penstock.spark.source.lag import lag

# Spark's word for no watermark yet.
_EPOCH: Final = "1970-01-01"
TOTALS: Final = ("rows_in", "rows_out", "dead_letters", "late_rows", "null_values")


@dataclass(slots=True)
class Progress:
    """Numbers of one flow."""

    batch_id: int = -1
    batches: int = 0
    rows_in: int = 0
    rows_out: int = 0
    dead_letters: int = 0
    late_rows: int = 0
    # Rows of views that cannot be computed as they are now.
    set_aside: int = 0
    # Records without a value, which a flow passes over.
    null_values: int = 0
    in_per_s: float = 0.0
    out_per_s: float = 0.0
    # The time that the last micro-batch took.
    batch_ms: int = 0
    # Records that are in the log and not read yet; None if the source does not say.
    lag: int | None = None
    watermark: str = ""
    state_rows: int = 0
    state_bytes: int = 0
    # When the last micro-batch with rows began, by Spark's clock.
    timestamp: str = ""
    # Time, and state, are kept by operators of ours, of which Spark reports nothing.
    is_timed: bool = False
    is_operated: bool = False

    def totals(self) -> dict[str, int]:
        """What is to be remembered over a restart."""
        return {name: getattr(self, name) for name in TOTALS}

    @classmethod
    def restored(cls, totals: Mapping[str, int]) -> Progress:
        """Numbers that go on from what was remembered."""
        found = cls()
        for name in TOTALS:
            setattr(found, name, int(totals.get(name, 0)))
        return found

    def note_time(self, late_rows: int, watermark_us: int) -> None:
        """What a micro-batch has found about event time."""
        self.is_timed = True
        self.late_rows += late_rows
        try:
            at = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=watermark_us)
        except OverflowError:
            # What an earlier version took for a time.
            self.watermark = ""
            return
        # The first day of all is the watermark before there is one.
        self.watermark = "" if at.year == 1 else at.strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"

    def note_set_aside(self, rows: int) -> None:
        """How many rows of views cannot be computed after a micro-batch."""
        self.set_aside = rows

    def note_state(self, rows: int, size: int) -> None:
        """What operators keep after a micro-batch."""
        self.is_operated = True
        self.state_rows, self.state_bytes = rows, size

    def take(
        self,
        report: Mapping[str, Any],
        written: Mapping[int, int],
        readings: Sequence[int] = (),
        read: int | None = None,
        valued: int | None = None,
    ) -> bool:
        """Add a report of Spark's; False if it is one of a batch that is counted already.

        `written` says how many rows each batch wrote, which Spark does not know. `readings` says
        how often each source was read in a batch: Spark counts its rows each time; and `read`, if
        given, how many records it had; `valued` how many of them had a value, if that is known.
        """
        batch_id = int(report.get("batchId", -1))
        duration = report.get("durationMs") or {}
        # An idle trigger reports with the id of the batch to come, and has not run it.
        ran = "addBatch" in duration
        self._take_state(report)
        if not ran:
            self.in_per_s = self.out_per_s = 0.0
            return False
        if batch_id <= self.batch_id:
            return False
        rows_in = _rows_in(report, readings) if read is None else read
        rows_out = written.get(batch_id, 0)
        self.batch_id = batch_id
        self.batches += 1
        self.rows_in += rows_in
        self.rows_out += rows_out
        self.null_values += max(0, rows_in - valued) if valued is not None else 0
        self.batch_ms = int(duration.get("triggerExecution", 0))
        seconds = max(self.batch_ms, 1) / 1000
        self.in_per_s, self.out_per_s = rows_in / seconds, rows_out / seconds
        self.timestamp = str(report.get("timestamp", ""))
        self.late_rows += sum(
            int(each.get("numRowsDroppedByWatermark") or 0)
            for each in report.get("stateOperators") or ()
        )
        return True

    def _take_state(self, report: Mapping[str, Any]) -> None:
        operators: Sequence[Mapping[str, Any]] = report.get("stateOperators") or ()
        if not self.is_operated:
            self.state_rows = sum(int(each.get("numRowsTotal") or 0) for each in operators)
            self.state_bytes = sum(int(each.get("memoryUsedBytes") or 0) for each in operators)
        behind = lag(report)
        self.lag = None if behind is None else behind.total_offsets
        if self.is_timed:
            return
        watermark = str((report.get("eventTime") or {}).get("watermark", ""))
        self.watermark = "" if watermark.startswith(_EPOCH) else watermark

    def watermark_s(self) -> float | None:
        """The watermark as seconds since 1970."""
        if not self.watermark:
            return None
        return datetime.fromisoformat(self.watermark).timestamp()


def _rows_in(report: Mapping[str, Any], readings: Sequence[int]) -> int:
    sources: Sequence[Mapping[str, Any]] = report.get("sources") or ()
    if not sources or len(sources) != len(readings):
        return int(report.get("numInputRows") or 0)
    return sum(
        int(each.get("numInputRows") or 0) // max(1, times)
        for each, times in zip(sources, readings, strict=True)
    )
