"""How far a group is behind in a partition, and how long until it loses records: the formulas.

Numbers in, numbers out: no clock, no disk, no broker. The broker's watch (`lag_watch`) fills them
from its own files; `penstock groups describe` fills the same ones from what any Kafka broker
tells a client.

    missed            still to be read (records, bytes)
  ┌─────────┐┌──────────────────────────────────────────┐
  ·─────────┬────────────────────────────────────────────┬──▶ offsets
  committed log_start                                    log_end

*committed* is the next offset that the group will read; *front* the first record that it can
still read: at the committed offset, or at the log's start if that is later.

records
    `log_end - front`: what is still to be read. Offsets are counted, so in a compacted log, and
    with transactions' markers, it is an upper bound.
missed
    `log_start - committed` where that is positive: what was removed before the group had read it.
    Records behind and records missed together are what Kafka's own tool calls the lag.
beyond
    `committed - log_end` where that is positive: the log was made anew, or has lost its end.
bytes
    From the batch that holds the front up to the end: what the group has to fetch to catch up.
seconds
    The age of the record at the front, by its own timestamp; 0 when caught up, never negative.
    None if that record carries no time.
time to loss
    How long until retention may remove a record that the group has not read, if writers and
    readers go on as at present. 0: it may happen at any moment. None: it does not happen, because
    nothing is removed by age or size, because the group is caught up, or because it reads fast
    enough.

Time to loss is a lower bound. A topic promises to keep what is younger than `retention.ms` and
what lies within the last `retention.bytes`; since whole segments are removed, a log mostly keeps
more, and nothing here counts on that.

By size, the bytes behind grow by what is written and shrink by what is read; records are lost when
they have grown to `retention.bytes`.

By age, the front is lost when its age reaches `retention.ms`. The unread records span the time
from the front's timestamp until now, so reading all of them (`drain = records / read rate`) moves
the front through `age` seconds of the log's time in `drain` seconds of ours, and the age of the
front grows by `1 - age / drain` a second. When it has read what there is now, the front is `drain`
seconds old. From there on it reads what is written from now on: the age grows by
`1 - read rate / write rate`, or not at all if it reads as fast as others write.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

# Rates are those of about the last minute; a group commits every few seconds.
WINDOW_S: Final = 60.0
_WINDOW_SAMPLES: Final = 8


@dataclass(frozen=True, slots=True)
class Retention:
    """What a topic promises to keep; None where it keeps all."""

    seconds: float | None = None
    bytes: int | None = None


def retention_of(
    cleanup_policy: Iterable[str], retention_ms: int, retention_bytes: int
) -> Retention:
    """From a topic's settings. A log that is only compacted keeps the last record of every key."""
    if "delete" not in cleanup_policy:
        return Retention()
    return Retention(
        seconds=retention_ms / 1000 if retention_ms >= 0 else None,
        bytes=retention_bytes if retention_bytes >= 0 else None,
    )


@dataclass(frozen=True, slots=True)
class Rates:
    """What is written to a partition and what a group reads of it, a second."""

    written: float = 0.0
    written_bytes: float = 0.0
    read: float = 0.0
    read_bytes: float = 0.0


@dataclass(frozen=True, slots=True)
class Reading:
    """What is known of a group in a partition at one moment."""

    committed: int
    log_start: int
    log_end: int
    # From the batch at the front up to the end; None if it cannot be told.
    bytes_behind: int | None
    # The timestamp of the record at the front; negative or None if it has none.
    front_ms: int | None
    now_ms: int


@dataclass(frozen=True, slots=True)
class Lag:
    """How far behind; the module says what each number means."""

    committed: int
    log_start: int
    log_end: int
    records: int
    bytes: int | None
    seconds: float | None
    missed: int
    beyond: int
    time_to_loss_s: float | None
    # How long a record written now is kept, at the present rate of writing; None: for ever.
    kept_s: float | None


def lag_of(reading: Reading, rates: Rates, retention: Retention) -> Lag:
    """All of it from what was read."""
    start, end = reading.log_start, max(reading.log_start, reading.log_end)
    records = max(0, end - max(reading.committed, start))
    bytes_behind = reading.bytes_behind if records else 0
    seconds: float | None = 0.0
    if records:
        known = reading.front_ms is not None and reading.front_ms >= 0
        seconds = max(0, reading.now_ms - (reading.front_ms or 0)) / 1000 if known else None
    return Lag(
        committed=reading.committed,
        log_start=start,
        log_end=end,
        records=records,
        bytes=bytes_behind,
        seconds=seconds,
        missed=max(0, start - reading.committed),
        beyond=max(0, reading.committed - end),
        time_to_loss_s=time_to_loss_s(records, bytes_behind, seconds, rates, retention),
        kept_s=kept_s(rates, retention),
    )


def time_to_loss_s(
    records: int,
    bytes_behind: int | None,
    age_s: float | None,
    rates: Rates,
    retention: Retention,
) -> float | None:
    """The sooner of loss by age and loss by size."""
    if not records:
        return None
    candidates: list[float | None] = []
    if retention.seconds is not None and age_s is not None:
        candidates.append(loss_by_age_s(records, age_s, retention.seconds, rates))
    if retention.bytes is not None and bytes_behind is not None:
        candidates.append(loss_by_size_s(bytes_behind, retention.bytes, rates))
    return min((value for value in candidates if value is not None), default=None)


def loss_by_age_s(records: int, age_s: float, keep_s: float, rates: Rates) -> float | None:
    """Until the record at the front is `keep_s` old."""
    left_s = keep_s - age_s
    if left_s <= 0:
        return 0.0
    if rates.read <= 0:
        return left_s
    drain_s = records / rates.read
    if drain_s > keep_s:
        return left_s / (1 - age_s / drain_s)
    if rates.read >= rates.written:
        return None
    return drain_s + (keep_s - drain_s) / (1 - rates.read / rates.written)


def loss_by_size_s(bytes_behind: int, keep_bytes: int, rates: Rates) -> float | None:
    """Until the bytes behind have grown to `keep_bytes`."""
    left = keep_bytes - bytes_behind
    if left <= 0:
        return 0.0
    growth = rates.written_bytes - rates.read_bytes
    return left / growth if growth > 0 else None


def kept_s(rates: Rates, retention: Retention) -> float | None:
    """How long a record that is written now is kept."""
    by_size = None
    if retention.bytes is not None and rates.written_bytes > 0:
        by_size = retention.bytes / rates.written_bytes
    return min((s for s in (retention.seconds, by_size) if s is not None), default=None)


class Window:
    """The last samples of a few growing numbers, for their rates; bounded memory.

    Of samples that come more often than needed only the newest is kept beside the older ones. A
    number that falls begins a new window: a group was set back, a topic made anew.
    """

    __slots__ = ("_samples", "_span_s", "_step_s")

    def __init__(self, span_s: float = WINDOW_S, samples: int = _WINDOW_SAMPLES) -> None:
        self._span_s = span_s
        self._step_s = span_s / samples
        self._samples: deque[tuple[float, tuple[float, ...]]] = deque()

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, at_s: float, *values: float) -> None:
        """A sample at a time that never goes back."""
        samples = self._samples
        if samples and any(new < old for new, old in zip(values, samples[-1][1], strict=True)):
            samples.clear()
        if len(samples) > 1 and samples[-1][0] - samples[-2][0] < self._step_s:
            samples.pop()
        samples.append((at_s, values))
        # The oldest that is kept is the last one that is old enough.
        while len(samples) > 2 and samples[1][0] <= at_s - self._span_s:
            samples.popleft()

    @property
    def span_s(self) -> float:
        """How much time the samples cover."""
        return self._samples[-1][0] - self._samples[0][0] if self._samples else 0.0

    def rates(self) -> tuple[float, ...]:
        """Each number's growth a second; zeros where there is no time between samples."""
        if not self._samples:
            return ()
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        if last_s <= first_s:
            return (0.0,) * len(last)
        return tuple((new - old) / (last_s - first_s) for old, new in zip(first, last, strict=True))
