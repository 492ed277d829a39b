"""When to warn that a group is about to miss records, or has missed some: as pure state.

There is one state for each kind of alert, group and topic. What is handed out is a *change*: an
alert begins or ends. While it lasts nothing is said again, however often it is looked at.

near-loss
    Some partition has unread records, and its time to loss is below the limit. The limit is the
    setting, but at most a quarter of the time for which the topic keeps a record at the present
    rates: with a retention of ten minutes nobody can be warned an hour ahead. It ends when the
    time to loss is a quarter above the limit again, so that an estimate that wavers around the
    limit does not ring the bell at every look.
missed
    The committed offset of some partition lies below the log's start. It ends when the group has
    committed an offset that is in the log.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from penstock.broker.lag.formulas import Lag

Kind = Literal["near-loss", "missed"]

KINDS: Final[tuple[Kind, ...]] = ("near-loss", "missed")
MAX_PARTITIONS_TOLD: Final = 20
_SHARE_OF_RETENTION: Final = 0.25
_END_ABOVE: Final = 1.25


@dataclass(frozen=True, slots=True)
class Alert:
    """A change: an alert for a group and a topic begins (`firing`) or ends."""

    kind: Kind
    firing: bool
    group: str
    topic: str
    at_ms: int
    # Those that it is about, at most MAX_PARTITIONS_TOLD of `partition_count`.
    partitions: tuple[int, ...] = ()
    partition_count: int = 0
    # The soonest of them.
    time_to_loss_s: float | None = None
    records_behind: int = 0
    missed_records: int = 0

    def in_words(self) -> str:
        """One line for people."""
        if self.kind == "near-loss":
            if not self.firing:
                return f"group {self.group} is no longer about to miss records of {self.topic}"
            left = "at any moment"
            if self.time_to_loss_s:
                left = f"in {show_seconds(self.time_to_loss_s)}"
            return (
                f"group {self.group} will miss records of {self.topic} {left}: it is "
                f"{self.records_behind} records behind and retention catches up with it "
                f"({self._where()})"
            )
        if not self.firing:
            return f"group {self.group} is back within the log of {self.topic}"
        return (
            f"group {self.group} has missed {self.missed_records} records of {self.topic}: "
            f"they were removed before it read them ({self._where()})"
        )

    def _where(self) -> str:
        told = ", ".join(map(str, self.partitions))
        more = self.partition_count - len(self.partitions)
        word = "partition" if self.partition_count == 1 else "partitions"
        return f"{word} {told}" + (f" and {more} more" if more else "")


class Alerts:
    """Which alerts there are now, for all groups."""

    def __init__(self, threshold_s: float) -> None:
        """`threshold_s`: warn this long before records are lost; 0 for no such warning."""
        self._threshold_s = threshold_s
        self.firing: dict[tuple[Kind, str, str], Alert] = {}
        # How often an alert of each kind has begun.
        self.begun: dict[Kind, int] = dict.fromkeys(KINDS, 0)

    def observe(self, group: str, topic: str, lags: Mapping[int, Lag], now_ms: int) -> list[Alert]:
        """What changes, now that the partitions of a group are behind by this much."""
        near = self.firing.get(("near-loss", group, topic)) is not None
        found: dict[Kind, list[int]] = {
            "near-loss": [n for n, lag in lags.items() if self._is_near(lag, firing=near)],
            "missed": [n for n, lag in lags.items() if lag.missed],
        }
        changes = []
        for kind, numbers in found.items():
            key = (kind, group, topic)
            if bool(numbers) == (key in self.firing):
                continue
            alert = _alert(kind, group, topic, {n: lags[n] for n in numbers}, now_ms)
            if numbers:
                self.firing[key] = alert
                self.begun[kind] += 1
            else:
                del self.firing[key]
            changes.append(alert)
        return changes

    def forget(self, group: str, topic: str, now_ms: int) -> list[Alert]:
        """The group has no offsets there any more, or the topic is gone."""
        return self.observe(group, topic, {}, now_ms)

    def _is_near(self, lag: Lag, *, firing: bool) -> bool:
        if not lag.records or lag.time_to_loss_s is None:
            return False
        limit_s = self._threshold_s
        if lag.kept_s is not None:
            limit_s = min(limit_s, lag.kept_s * _SHARE_OF_RETENTION)
        return lag.time_to_loss_s < limit_s * (_END_ABOVE if firing else 1)


def _alert(kind: Kind, group: str, topic: str, lags: Mapping[int, Lag], now_ms: int) -> Alert:
    soonest = [lag.time_to_loss_s for lag in lags.values() if lag.time_to_loss_s is not None]
    return Alert(
        kind=kind,
        firing=bool(lags),
        group=group,
        topic=topic,
        at_ms=now_ms,
        partitions=tuple(sorted(lags)[:MAX_PARTITIONS_TOLD]),
        partition_count=len(lags),
        time_to_loss_s=min(soonest, default=None),
        records_behind=sum(lag.records for lag in lags.values()),
        missed_records=sum(lag.missed for lag in lags.values()),
    )


def show_seconds(seconds: float) -> str:
    """A time span for people: `45s`, `3m 20s`, `2h 5m`, `9d 4h`."""
    if seconds < 1:
        return f"{seconds * 1000:.0f}ms" if seconds else "0s"
    whole = int(seconds)
    for size, unit, small, small_unit in (
        (86_400, "d", 3_600, "h"),
        (3_600, "h", 60, "m"),
        (60, "m", 1, "s"),
    ):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size}{unit}" + (f" {rest}{small_unit}" if rest else "")
    return f"{whole}s"
