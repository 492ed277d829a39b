"""The log, as a capture writes it: events and the state that they lead to, together.

With transactions both are in one transaction of the log. Without, the state is written after the
events are acknowledged: a crash in between repeats events, and never leaves one out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from penstock.capture.delivery.config import CaptureConfig
from penstock.capture.delivery.state import State, state_topic
from penstock.capture.delivery.topics import Topics
from penstock.capture.events.batch import Batch
from penstock.capture.source import CaptureError
from penstock.client.connection import Cluster
from penstock.client.errors import FencedError
from penstock.client.inside import Inside
from penstock.client.reading import last_values, read_batches
from penstock.client.writer import LogWriter

# After that the session ends, and another one tries; so whoever stops a capture waits no longer.
_TIMEOUT_S: Final = 30.0

MakeWriter = Callable[[Cluster, CaptureConfig], LogWriter]


def make_writer(cluster: Cluster, config: CaptureConfig) -> LogWriter:
    """What a capture writes with."""
    settings = config.delivery
    return LogWriter(
        cluster,
        transactional_id=config.transactional_id if settings.transactions else None,
        codec=settings.codec,
        transaction_timeout_ms=settings.transaction_timeout_ms,
        timeout_s=_TIMEOUT_S,
    )


class TakenOverError(CaptureError):
    """Another process runs the same capture."""

    advice = "Let one process run it; this one has stopped and written nothing since."


class TooSlowError(CaptureError):
    """A transaction took longer than the log waits for one."""

    advice = (
        "Raise transaction_timeout_ms of the capture (and transaction.max.timeout.ms of the "
        "broker), or set transactions = false."
    )


class Log:
    """Where one session of a capture writes."""

    def __init__(self, config: CaptureConfig, cluster: Cluster, writer: LogWriter) -> None:
        self.cluster = cluster
        self.topics = Topics(cluster, config.topics)
        self._config = config
        self._writer = writer
        self._is_open = False
        self._opened_at = 0.0
        # The ids under which this session has written transactions: nearly always one.
        self._producers: set[int] = set()
        # Since the last commit.
        self.records = 0
        self.size_bytes = 0

    def start(self) -> State:
        """Take the log over from whoever had it, and read where to go on."""
        name = self._config.name
        self.topics.ensure_own(name)
        self._writer.init()
        stored = last_values(self.cluster, state_topic(name)).get(name.encode())
        return State() if stored is None else State.decode(stored)

    def put(self, batch: Batch) -> None:
        """Write what is in a batch; visible with the next commit."""
        for run in batch.take():
            count = run.count
            if not count:
                continue
            self.topics.ensure(run.topic, compacted=run.compacted)
            self._begin()
            self._guarded(
                lambda run=run: self._writer.write(  # type: ignore[misc]
                    run.topic,
                    *run.whole(),
                    headers=run.header_list(),
                    partition=run.partition,
                )
            )
            self.records += count
            self.size_bytes += run.size_bytes

    def commit(self, state: State) -> None:
        """What was put is there for readers, and so is the state."""
        state.ts_ms = time.time_ns() // 1_000_000
        name = self._config.name
        if not self._config.delivery.transactions:
            self._guarded(self._writer.flush)
        self._begin()
        record = [name.encode()], [state.encode()]
        self._guarded(lambda: self._writer.write(state_topic(name), *record))
        self._guarded(self._writer.commit)
        self._is_open = False
        self.records = self.size_bytes = 0

    def abort(self) -> None:
        """Forget what was put since the last commit."""
        if self._is_open:
            self._is_open = False
            self._writer.abort()
        self.records = self.size_bytes = 0

    def read(self, topic: str) -> Iterator[tuple[bytes, bytes | None]]:
        """The records of a topic, each partition's in order; nothing if it does not exist."""
        if not self.topics.exists(topic):
            return
        for _, batch in read_batches(self.cluster, topic):
            keys, values = batch.column("key").to_pylist(), batch.column("value").to_pylist()
            for key, value in zip(keys, values, strict=True):
                if key is not None:
                    yield key, value

    def look_inside(self, topic: str, start: Mapping[int, int] | None = None) -> Inside | None:
        """A topic with what was put into it, committed or not; None if it does not exist."""
        if not self.topics.exists(topic):
            return None
        self._guarded(self._writer.flush)
        return Inside(self.cluster, topic, self._producers, start=start)

    def time_left_s(self) -> float | None:
        """How long the log waits for what is open, or is opened next; None: for ever."""
        if not self._config.delivery.transactions:
            return None
        taken_s = time.monotonic() - self._opened_at if self._is_open else 0.0
        return self._config.delivery.transaction_timeout_ms / 1_000 - taken_s

    def _begin(self) -> None:
        if not self._is_open:
            self._guarded(self._writer.begin)
            if self._config.delivery.transactions:
                self._guarded(lambda: self._producers.add(self._writer.ids.producer_id))
            self._is_open = True
            self._opened_at = time.monotonic()

    def _guarded(self, step: Callable[[], None]) -> None:
        try:
            step()
        except FencedError as error:
            name = self._config.name
            limit_s = self._config.delivery.transaction_timeout_ms / 1_000
            took_s = time.monotonic() - self._opened_at
            if self._is_open and took_s >= limit_s:
                raise TooSlowError(
                    f"capture {name}: a transaction took {took_s:.0f} s, and the log has given it "
                    f"up after {limit_s:.0f} s"
                ) from error
            raise TakenOverError(f"capture {name} was taken over by another process") from error
