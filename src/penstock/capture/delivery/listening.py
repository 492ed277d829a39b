"""Hearing signals, and telling how it goes: the capture's side of its control topics."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from penstock.capture.delivery.metering import CaptureStatus
from penstock.capture.delivery.signals import SIGNALS_TOPIC, Signal, SignalError
from penstock.capture.delivery.state import CAPTURE_TOPIC
from penstock.client.connection import Cluster
from penstock.client.errors import ClientError, OffsetGoneError
from penstock.client.fetching import Fetcher
from penstock.client.metadata import LATEST, offsets
from penstock.client.writer import LogWriter
from penstock.records.columns.decode import decode

_LOGGER = logging.getLogger(__name__)
_PLACE: Final = (SIGNALS_TOPIC, 0)
_TELLING_TIMEOUT_S: Final = 5.0


class Listener:
    """Reads the signals of one capture. One thread."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._key = name.encode()
        self._fetcher = Fetcher(cluster, isolation="read_uncommitted")

    def close(self) -> None:
        self._fetcher.close()

    def hear(self, offset: int | None) -> tuple[list[Signal], int]:
        """The signals from an offset on, and where to listen next. None: from now on."""
        if offset is None:
            wanted = {_PLACE: LATEST}
            return [], offsets(self._cluster, wanted, isolation="read_uncommitted")[_PLACE]
        try:
            fetched = self._fetcher.fetch({_PLACE: offset}, 0).get(_PLACE)
        except OffsetGoneError as error:
            # Signals that are older than a week, or of a topic that was made anew.
            return [], error.log_start
        if fetched is None or not fetched.data:
            return [], offset
        decoded = decode(fetched.data, first_offset=offset)
        heard = []
        columns = decoded.batch.column("key").to_pylist(), decoded.batch.column("value").to_pylist()
        for key, value in zip(*columns, strict=True):
            if key == self._key and value is not None:
                try:
                    heard.append(Signal.decode(value))
                except SignalError as error:
                    _LOGGER.warning("capture %s: %s", self._key.decode(), error)
        return heard, decoded.next_offset


class Publisher:
    """Writes what is told of a capture; if that fails, the next time will do.

    Both threads of a capture tell: one that its state has changed, the other how far it has come.
    A writer is for one at a time; and what is told later must not be older.
    """

    def __init__(self, bootstrap_cluster: Cluster, name: str) -> None:
        self._cluster = bootstrap_cluster
        self._key = name.encode()
        self._writer: LogWriter | None = None
        self._told_at = 0.0
        self._lock = threading.Lock()

    def is_due(self, every_ms: int) -> bool:
        return (time.monotonic() - self._told_at) * 1_000 >= every_ms

    def tell(self, status: Callable[[], CaptureStatus]) -> None:
        with self._lock:
            self._told_at = time.monotonic()
            try:
                if self._writer is None:
                    self._writer = LogWriter(self._cluster, timeout_s=_TELLING_TIMEOUT_S)
                self._writer.write(CAPTURE_TOPIC, [self._key], [status().encode()])
                self._writer.flush()
            except ClientError as error:
                told = "what `penstock capture status` shows of it is old, for the log took no news"
                _LOGGER.info("capture %s: %s: %s", self._key.decode(), told, error)
                self._drop()

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _drop(self) -> None:
        if self._writer is not None:
            with suppress(ClientError):
                self._writer.close(drop=True)
            self._writer = None
