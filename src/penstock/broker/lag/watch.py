"""Looks after how far groups are behind, and warns before one of them misses records.

Every few seconds a *pass* goes over the offsets of all groups (for a share group: the first record
that it has not finished) and measures each against its partition; groups that are only a command's
progress (`names`) are left out. It runs on the event loop, which owns the partitions, in slices of
a few milliseconds, and spends a small share of the time at most: with very many groups a pass takes
several intervals, and nothing else gets slower. A group that has caught up costs a comparison; one
that stands still costs no read of the log either.

What is known is the last pass's: `lags` by (group, topic, partition). A bound on their number
keeps memory in check; what is beyond it is counted and not watched.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, replace
from time import perf_counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from penstock.broker.lag.alerts import Alert, Alerts
from penstock.broker.lag.formulas import (
    WINDOW_S,
    Lag,
    Rates,
    Reading,
    Retention,
    Window,
    lag_of,
    retention_of,
)
from penstock.broker.lag.names import keeps_progress
from penstock.broker.lag.webhook import Webhook
from penstock.broker.metrics.metering import Histogram
from penstock.errors import LogError
from penstock.log.config import TopicConfig
from penstock.log.measure import Place, Tail, bytes_from, bytes_since, locate, tail_of
from penstock.log.partition import Partition

if TYPE_CHECKING:
    from penstock.broker.server import Broker

log = logging.getLogger(__name__)

# The event loop is given back at least this often, and left alone after so much work.
_SLICE_S: Final = 0.002
_WORK_S: Final = 0.05
# A rate is believed, and alerts given by it, once it was measured over this many intervals.
_SETTLED_INTERVALS: Final = 3
# In one pass; a broker that comes back after a long time has much to say at once.
_MAX_LINES: Final = 50


class Offset(NamedTuple):
    """The first offset that a group still needs."""

    topic: str
    partition: int
    offset: int


class Offsets(Protocol):
    """Where the groups are."""

    def groups(self) -> list[str]:
        """The groups that have offsets."""
        ...

    def of(self, group: str) -> Iterable[Offset]: ...


Key = tuple[str, str, int]


@dataclass(slots=True)
class _Writers:
    """What is written to a partition."""

    partition: Partition
    tail: Tail
    window: Window
    written_bytes: int = 0
    seen: int = 0


@dataclass(slots=True)
class _Reader:
    """A group in a partition."""

    partition: Partition
    window: Window
    # Where its front was found, for which offset.
    place: Place | None = None
    place_for: int = -1
    bytes_behind: int | None = None
    written_bytes: int = 0
    read_bytes: int = 0
    seen: int = 0


class LagWatch:
    """The watch of one broker."""

    def __init__(self, broker: Broker, offsets: Offsets) -> None:
        config = broker.config
        self._broker = broker
        self._offsets = offsets
        self._interval_s = config.lag_interval_ms / 1000
        self._most = config.limits.max_watched_lags
        self._task: asyncio.Task[None] | None = None
        self._readers: dict[Key, _Reader] = {}
        self._writers: dict[Partition, _Writers] = {}
        self._pass = 0
        self._slice_end = 0.0
        self._work_end: float | None = None
        self.lags: dict[Key, Lag] = {}
        # How many offsets are beyond the bound, and not looked at.
        self.unwatched = 0
        self.passes = 0
        self.alerts = Alerts(config.alert_before_loss_ms / 1000)
        self.webhook = Webhook(config.alert_webhook) if config.alert_webhook else None
        # By how much the event loop was late when it was this watch's turn.
        self.loop_delay = Histogram.of_seconds()

    def start(self) -> None:
        if self._interval_s > 0:
            self._task = asyncio.ensure_future(self._repeat())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
            self._task = None
        if self.webhook is not None:
            await asyncio.get_running_loop().run_in_executor(None, self.webhook.close)

    async def _repeat(self) -> None:
        while True:
            await self._rest()
            try:
                await self.look(paced=True)
            except Exception:
                # Whatever it is must not end the watch.
                log.exception("measuring the lag of groups")

    async def _rest(self) -> None:
        loop = self._broker.loop
        due = loop.time() + self._interval_s
        await asyncio.sleep(self._interval_s)
        self.loop_delay.observe(max(0.0, loop.time() - due))

    async def _breathe(self) -> None:
        """Give the loop back if this pass has held it long enough."""
        now = perf_counter()
        if now < self._slice_end:
            return
        if self._work_end is not None and now >= self._work_end:
            await self._rest()
            self._work_end = perf_counter() + _WORK_S
        else:
            await asyncio.sleep(0)
        self._slice_end = perf_counter() + _SLICE_S

    # ---- a pass --------------------------------------------------------------------------

    async def look(self, *, paced: bool = False) -> None:
        """One pass over all groups; alerts are given as they change."""
        self._pass += 1
        self._slice_end = perf_counter() + _SLICE_S
        self._work_end = perf_counter() + _WORK_S if paced else None
        watched = unwatched = 0
        for group in self._offsets.groups():
            await self._breathe()
            if keeps_progress(group):
                continue
            for at in list(self._offsets.of(group)):
                if watched >= self._most:
                    unwatched += 1
                    continue
                partition = self._broker.partition(at.topic, at.partition)
                if partition is not None and not partition.gone:
                    watched += 1
                    self._measure((group, at.topic, at.partition), partition, at.offset)
                    await self._breathe()
        self.unwatched = unwatched
        await self._forget_unseen()
        await self._judge()
        self.passes += 1

    def _measure(self, key: Key, partition: Partition, committed: int) -> None:
        clock = self._broker.clock
        elapsed_s = clock.elapsed_ms() / 1000
        writers = self._writers_of(partition, elapsed_s)
        reader = self._readers.get(key)
        if reader is None or reader.partition is not partition:
            reader = _Reader(partition, self._window(), written_bytes=writers.written_bytes)
            self._readers[key] = reader
        reader.seen = self._pass
        bytes_behind = self._find(reader, committed)
        if bytes_behind is not None and reader.bytes_behind is not None:
            # What was written and is not behind any more has been read.
            written = writers.written_bytes - reader.written_bytes
            reader.read_bytes += max(0, written - (bytes_behind - reader.bytes_behind))
        reader.bytes_behind, reader.written_bytes = bytes_behind, writers.written_bytes
        reader.window.add(elapsed_s, committed, reader.read_bytes)
        written_rate, written_bytes_rate = writers.window.rates()
        read_rate, read_bytes_rate = reader.window.rates()
        config = partition.config
        self.lags[key] = lag_of(
            Reading(
                committed,
                partition.log_start,
                partition.visible,
                bytes_behind,
                reader.place.timestamp_ms if reader.place is not None else None,
                clock.now_ms(),
            ),
            Rates(written_rate, written_bytes_rate, read_rate, read_bytes_rate),
            retention_for(key[0], config),
        )

    def _window(self) -> Window:
        return Window(max(WINDOW_S, self._interval_s * (_SETTLED_INTERVALS + 1)))

    def _writers_of(self, partition: Partition, elapsed_s: float) -> _Writers:
        """What is known of the partition's writers, brought up to date once in a pass."""
        writers = self._writers.get(partition)
        if writers is None:
            writers = self._writers[partition] = _Writers(
                partition, tail_of(partition), self._window()
            )
        if writers.seen != self._pass:
            writers.seen = self._pass
            writers.written_bytes += bytes_since(partition, writers.tail)
            writers.tail = tail_of(partition)
            writers.window.add(elapsed_s, partition.log_end, writers.written_bytes)
        return writers

    def _find(self, reader: _Reader, committed: int) -> int | None:
        """The bytes behind, having found the front unless it is where it was."""
        partition = reader.partition
        front = max(committed, partition.log_start)
        if front >= partition.visible:
            reader.place, reader.place_for = None, -1
            return 0
        # Compaction moves what stays.
        if reader.place is None or reader.place_for != front or partition.config.compacted:
            try:
                reader.place = locate(partition, front)
            except LogError as error:
                self._broker.warn_now_and_then(f"measuring {partition.id}", error)
                reader.place, reader.place_for = None, -1
                return None
            reader.place_for = front
        return 0 if reader.place is None else bytes_from(partition, reader.place)

    async def _forget_unseen(self) -> None:
        """Let go of groups and partitions that are not there any more."""
        for key in [key for key, reader in self._readers.items() if reader.seen != self._pass]:
            del self._readers[key]
            # There is none if it could not be measured.
            self.lags.pop(key, None)
        await self._breathe()
        unseen = [p for p, writers in self._writers.items() if writers.seen != self._pass]
        for partition in unseen:
            del self._writers[partition]

    # ---- alerts --------------------------------------------------------------------------

    async def _judge(self) -> None:
        """Begin and end alerts by what the pass has found."""
        settled_s = self._interval_s * _SETTLED_INTERVALS
        by_topic: dict[tuple[str, str], dict[int, Lag]] = {}
        for (group, topic, number), lag in self.lags.items():
            if self._readers[group, topic, number].window.span_s < settled_s:
                # Too early to say how fast it reads.
                lag = replace(lag, time_to_loss_s=None)  # noqa: PLW2901
            by_topic.setdefault((group, topic), {})[number] = lag
        await self._breathe()
        gone = {(group, topic) for _, group, topic in self.alerts.firing} - by_topic.keys()
        now_ms, changes = self._broker.clock.now_ms(), 0
        for group, topic in (*by_topic, *gone):
            lags = by_topic.get((group, topic), {})
            for alert in self.alerts.observe(group, topic, lags, now_ms):
                changes += 1
                self._tell(alert, logged=changes <= _MAX_LINES)
            await self._breathe()
        if changes > _MAX_LINES:
            log.warning("%d more alerts have begun or ended", changes - _MAX_LINES)

    def _tell(self, alert: Alert, *, logged: bool) -> None:
        if logged:
            log.log(logging.WARNING if alert.firing else logging.INFO, "%s", alert.in_words())
        if self.webhook is not None:
            self.webhook.post(message_of(alert, self._broker))


def retention_for(group: str, config: TopicConfig) -> Retention:
    """What a topic keeps for a group; all of it if the topic waits for that group."""
    if config.guarded and group in config.overflow_groups:
        return Retention()
    return retention_of(config.cleanup_policy, config.retention_ms, config.retention_bytes)


def message_of(alert: Alert, broker: Broker) -> dict[str, Any]:
    """An alert as it is sent to the webhook."""
    host, port = broker.advertised
    return {
        "alert": alert.kind,
        "state": "firing" if alert.firing else "ended",
        "group": alert.group,
        "topic": alert.topic,
        "partitions": list(alert.partitions),
        "partition_count": alert.partition_count,
        "time_to_loss_seconds": alert.time_to_loss_s,
        "records_behind": alert.records_behind,
        "missed_records": alert.missed_records,
        "timestamp_ms": alert.at_ms,
        "broker": f"{host}:{port}",
        "cluster": broker.store.cluster_id,
        "text": alert.in_words(),
    }
