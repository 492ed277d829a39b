"""Captures of the fake database, run to the end or until they are made to crash."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from penstock.capture.delivery.capture import Capture
from penstock.capture.delivery.config import CaptureConfig
from penstock.capture.source import Source, SourceSettings
from penstock.client.connection import Cluster
from penstock.client.metadata import Metadata
from penstock.client.reading import Row, read_all
from penstock.client.writer import LogWriter
from tests.capture.delivery.fake import Database, FakeSource, parsed

QUICK: dict[str, Any] = {
    "idle_ms": 1,
    "control_ms": 10,
    "linger_ms": 0,
    "position_ms": 0,
    "retry_ms": 1,
    "retry_max_ms": 10,
    "status_ms": 60_000,
}


class Crash(BaseException):
    """The process is killed here."""


class Fuse:
    """Lets so many steps happen, then crashes; nothing happens after that."""

    def __init__(self, steps: int | None = None) -> None:
        self._left = steps
        self.is_blown = False
        self.steps: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, step: str) -> None:
        with self._lock:
            if self.is_blown:
                raise Crash(step)
            self.steps.append(step)
            if self._left is not None:
                self._left -= 1
                if self._left < 0:
                    self.is_blown = True
                    raise Crash(step)


class FusedWriter(LogWriter):
    """A writer that dies with its fuse: no abort, no flush, as when a process is killed."""

    fuse: Fuse

    def write(self, *args: Any, **more: Any) -> None:
        self.fuse("before write")
        super().write(*args, **more)
        self.fuse("after write")

    def flush(self) -> None:
        self.fuse("before flush")
        super().flush()
        self.fuse("after flush")

    def commit(self) -> None:
        super().commit()
        self.fuse("after commit")

    def abort(self) -> None:
        self.fuse("abort")
        super().abort()

    def close(self, *, drop: bool = False) -> None:
        if self.fuse.is_blown:
            self._sender.close()
            return
        super().close(drop=drop)


def new_name() -> str:
    """Unique on the servers that several processes share: replication slots have this name."""
    return f"fake{uuid4().hex[:12]}"


def config(name: str, **settings: Any) -> CaptureConfig:
    return CaptureConfig.from_mapping(name, {"url": "fake://", **QUICK, **settings})


def capture(
    bootstrap: str,
    settings: CaptureConfig,
    database: Database,
    *,
    fuse: Fuse | None = None,
    stop: threading.Event | None = None,
    **more: Any,
) -> Capture:
    """A capture of the database, which stops when all is delivered if `stop` is given."""
    used = fuse or Fuse()

    def open_source(source: SourceSettings) -> Source:
        return FakeSource(source, database, stop=stop, happens=used, **more)

    def make_writer(cluster: Cluster, made: CaptureConfig) -> LogWriter:
        used("start")
        is_atomic = made.delivery.transactions
        writer = FusedWriter(
            cluster,
            transactional_id=made.transactional_id if is_atomic else None,
            transaction_timeout_ms=made.delivery.transaction_timeout_ms,
        )
        writer.fuse = used
        return writer

    return Capture(settings, bootstrap, open_source=open_source, make_writer=make_writer)


def run_to_end(bootstrap: str, settings: CaptureConfig, database: Database, **more: Any) -> Capture:
    """Deliver all that the database has, and stop."""
    stop = threading.Event()
    made = capture(bootstrap, settings, database, stop=stop, **more)
    made.run(stop)
    return made


def records(bootstrap: str, topic: str) -> list[Row]:
    """The committed records of a topic; none if it does not exist."""
    with Cluster(bootstrap) as cluster:
        if not Metadata(cluster).topics([topic]):
            return []
        return read_all(cluster, topic)


def rebuilt(rows: list[Row]) -> dict[int, str]:
    """The table that a topic tells of."""
    found: dict[int, str] = {}
    for row in rows:
        event, key = parsed(row.value), parsed(row.key)
        if event is None or event["op"] == "d":
            found.pop(key["id"], None)
        else:
            found[key["id"]] = event["after"]["text"]
    return found


def on_thread(step: Callable[[], None]) -> tuple[threading.Thread, list[BaseException]]:
    """Run something beside the test; what it raised."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            step()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, failures
