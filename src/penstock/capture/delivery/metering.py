"""What is told of a capture: counts, rates, lag, progress; and the record that holds it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import orjson

STARTING, SNAPSHOT, STREAMING = "starting", "snapshot", "streaming"
PAUSED, RETRYING, STOPPED, FAILED = "paused", "retrying", "stopped", "failed"

# Lags that are kept for the quantiles, and how many of one commit at most.
_LAGS_MAX: Final = 4_096
_LAGS_PER_COMMIT: Final = 256
# Rates are those of the last seconds.
_WINDOW_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the snapshot of a table, or of all tables together, has come; or a truncate."""

    table: str
    rows: int
    # About how many there are; None if nobody knows.
    estimate: int | None
    rows_per_s: float
    # At this rate; None if nobody knows.
    time_left_s: float | None
    is_incremental: bool = False
    is_paused: bool = False
    waiting: int = 0
    # Of a truncate, rows are records that are read and deletes that are written.
    is_truncate: bool = False


@dataclass(frozen=True, slots=True)
class TableStatus:
    """The schema that a table's events are written with."""

    table: str
    topic: str
    version: int
    id: int
    # What its last change was, if it has changed while this process ran.
    changes: str = ""


@dataclass(frozen=True, slots=True)
class CaptureStatus:
    """What `penstock capture status` shows."""

    name: str
    state: str
    kind: str = ""
    # When this was so.
    ts_ms: int = 0
    # So often it is told; one that is silent for much longer does not run any more.
    told_every_ms: int = 1_000
    position: Mapping[str, Any] | None = None
    # From the commit in the database to the commit in the log.
    lag_ms_p50: float | None = None
    lag_ms_p99: float | None = None
    changes_per_s: float = 0.0
    # Since it was started, and since the beginning of time.
    changes: int = 0
    events: int = 0
    snapshot: Progress | None = None
    # What the database keeps because of this capture.
    database: Mapping[str, Any] = field(default_factory=dict)
    # Unavailable values that the log did not have either.
    unfilled: int = 0
    attempts: int = 0
    error: str = ""
    # When `error` was found, if it is one that does not keep the capture from going on; else 0.
    problem_ms: int = 0
    advice: str = ""
    # Some of the tables, those that were altered last at the end; and how many there are.
    tables: tuple[TableStatus, ...] = ()
    table_count: int = 0

    def encode(self) -> bytes:
        return orjson.dumps(asdict(self))

    @classmethod
    def decode(cls, data: bytes) -> CaptureStatus:
        told = orjson.loads(data)
        known = {name: told[name] for name in cls.__slots__ if name in told}
        if known.get("snapshot"):
            inner = {k: v for k, v in known["snapshot"].items() if k in Progress.__slots__}
            known["snapshot"] = Progress(**inner)
        if "tables" in known:
            items = ({k: v for k, v in item.items() if k in TableStatus.__slots__}
                     for item in known["tables"])  # fmt: skip
            known["tables"] = tuple(TableStatus(**item) for item in items)
        return cls(**known)


class Meter:
    """Counts as a capture goes on. One thread writes, any may look."""

    def __init__(
        self,
        clock_s: Callable[[], float] = time.monotonic,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._clock_s = clock_s
        self._clock_ns = clock_ns
        self._lags_ms: deque[float] = deque(maxlen=_LAGS_MAX)
        self._commits: deque[tuple[float, int]] = deque()
        self._pending: list[int] = []
        self._pending_changes = 0
        self.changes = 0
        self.snapshot_rows = 0
        self.snapshot_estimate: int | None = None
        self._snapshot_began = clock_s()

    def part(self, changes: int, commit_ts_us: int, *, is_last: bool) -> None:
        """Changes of a transaction, not in the log yet."""
        self._pending_changes += changes
        if is_last and len(self._pending) < _LAGS_PER_COMMIT:
            self._pending.append(commit_ts_us)

    def committed(self) -> None:
        """All of that is in the log."""
        now_us = self._clock_ns() // 1_000
        self._lags_ms.extend((now_us - ts_us) / 1_000 for ts_us in self._pending)
        self._pending.clear()
        now_s = self._clock_s()
        self.changes += self._pending_changes
        self._commits.append((now_s, self._pending_changes))
        self._pending_changes = 0
        self._forget(now_s)

    def dropped(self) -> None:
        """None of that came into the log."""
        self._pending.clear()
        self._pending_changes = 0

    def begin_snapshot(self, estimate: int | None) -> None:
        self.snapshot_rows = 0
        self.snapshot_estimate = estimate
        self._snapshot_began = self._clock_s()

    def progress(self, table: str, rows: int, estimate: int | None, **more: Any) -> Progress:
        """The progress of what began with `begin_snapshot`."""
        took_s = max(self._clock_s() - self._snapshot_began, 1e-3)
        rate = self.snapshot_rows / took_s
        left_s = None
        if estimate is not None and rate > 0:
            left_s = max(estimate - rows, 0) / rate
        return Progress(table, rows, estimate, rate, left_s, **more)

    def lag_ms(self, share: float) -> float | None:
        """The lag that so many of the last transactions did not exceed."""
        lags = sorted(self._lags_ms)
        return lags[min(int(len(lags) * share), len(lags) - 1)] if lags else None

    def changes_per_s(self) -> float:
        now_s = self._clock_s()
        self._forget(now_s)
        if not self._commits:
            return 0.0
        span_s = max(now_s - self._commits[0][0], 1.0)
        return sum(count for _, count in self._commits) / span_s

    def _forget(self, now_s: float) -> None:
        while self._commits and now_s - self._commits[0][0] > _WINDOW_S:
            self._commits.popleft()
