"""Captures as processes that can be killed, and what the log tells afterwards.

A process is forked from one that has everything imported already, so that hundreds of kills are
quick. It can kill itself at an exact step of writing the log (before and after a write, a flush, a
commit), or be killed from outside at any time; both are SIGKILL.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import orjson

from penstock.capture.delivery import capture
from penstock.capture.delivery.capture import Capture
from penstock.capture.delivery.config import CaptureConfig
from penstock.client.connection import Cluster
from penstock.client.metadata import Metadata
from penstock.client.reading import Row, read_all
from penstock.client.writer import LogWriter
from tests.harness.forks import preload

_FORKS: Final = multiprocessing.get_context("forkserver")
preload()
QUICK: Final[Mapping[str, Any]] = {
    "idle_ms": 10,
    "control_ms": 50,
    "linger_ms": 0,
    "position_ms": 0,
    "retry_ms": 20,
    "retry_max_ms": 500,
    "status_ms": 60_000,
    "transaction_metadata": True,
}
# Tables that were made since are found when the database is asked.
DATABASE_STATUS_S: Final = 0.2
_GONE_S: Final = 60.0


class KillingWriter(LogWriter):
    """A writer whose process is killed after so many steps."""

    left = 0

    def _step(self) -> None:
        self.left -= 1
        if self.left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, *args: Any, **more: Any) -> None:
        self._step()
        super().write(*args, **more)
        self._step()

    def flush(self) -> None:
        self._step()
        super().flush()
        self._step()

    def commit(self) -> None:
        self._step()
        super().commit()
        self._step()


def _run(
    name: str, settings: dict[str, Any], bootstrap: str, steps: int | None, log_file: str
) -> None:
    """The child."""
    capture._DATABASE_STATUS_S = DATABASE_STATUS_S
    logging.basicConfig(
        filename=log_file,
        level=logging.INFO,
        format="%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    config = CaptureConfig.from_mapping(name, settings)
    if steps is None:
        made = Capture(config, bootstrap)
    else:
        left = steps

        def make_writer(cluster: Cluster, config: CaptureConfig) -> LogWriter:
            writer = KillingWriter(cluster, transactional_id=config.transactional_id)
            writer.left = left
            return writer

        made = Capture(config, bootstrap, make_writer=make_writer)
    try:
        made.run()
    except BaseException:
        logging.getLogger(__name__).exception("the capture has failed")
        raise


class CaptureThread:
    """One capture in a thread of this process, to be started and stopped."""

    def __init__(self, name: str, settings: Mapping[str, Any], bootstrap: str) -> None:
        self.name = name
        self._config = CaptureConfig.from_mapping(name, {**QUICK, **settings})
        self._bootstrap = bootstrap
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failures: list[BaseException] = []

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            Capture(self._config, self._bootstrap).run(self._stop)
        except BaseException as error:
            self._failures.append(error)

    @property
    def is_alive(self) -> bool:
        """Whether it runs; AssertionError if it has failed by itself."""
        assert not self._failures, self._failures
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(_GONE_S)
        assert not self.is_alive


class CaptureProcess:
    """One capture, to be started and killed as often as one likes."""

    def __init__(
        self, name: str, settings: Mapping[str, Any], bootstrap: str, log_file: Path
    ) -> None:
        self.name = name
        self.settings = {**QUICK, **settings}
        self.log_file = log_file
        self._bootstrap = bootstrap
        self._process: Any = None
        self.kills = 0

    def start(self, steps: int | None = None) -> None:
        """Start; with `steps`, it is killed after so many steps of writing the log."""
        given = (self.name, self.settings, self._bootstrap, steps, str(self.log_file))
        # The class of processes is not told to the types by its context.
        self._process = _FORKS.Process(target=_run, args=given, daemon=True)
        self._process.start()

    @property
    def is_alive(self) -> bool:
        """Whether it runs; AssertionError if it has failed by itself."""
        assert self._process is not None
        if self._process.is_alive():
            return True
        code = self._process.exitcode
        assert code == -signal.SIGKILL, f"exit status {code}: {self.log_text()[-5000:]}"
        return False

    def kill(self) -> None:
        """End it with SIGKILL, if it has not done so itself."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join(_GONE_S)
            process.close()
            self.kills += 1

    def log_text(self) -> str:
        return self.log_file.read_text(errors="replace") if self.log_file.exists() else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()


# ---- what the log tells ------------------------------------------------------------------


def records(cluster: Cluster, topic: str) -> list[Row]:
    """The committed records of a topic; none if it does not exist."""
    return read_all(cluster, topic) if Metadata(cluster).topics([topic]) else []


@dataclass
class Told:
    """A topic of a table, read from end to end."""

    rows: list[Row]
    events: list[dict[str, Any]] = field(default_factory=list)
    # The table: rows by their key; or those of a table without one, with how often each is there.
    by_key: dict[bytes, dict[str, Any]] = field(default_factory=dict)
    loose: Counter[bytes] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        partition = -1
        mine: dict[bytes, dict[str, Any]] = {}
        for row in [*self.rows, None]:
            if row is None or row.partition != partition:
                # A truncate is in each partition, so each is rebuilt by itself.
                assert not mine.keys() & self.by_key.keys(), "one key in two partitions"
                self.by_key |= mine
                mine, partition = {}, row.partition if row else -1
            if row is not None:
                self._apply(row, mine)

    def _apply(self, row: Row, mine: dict[bytes, dict[str, Any]]) -> None:
        if row.value is None:
            assert row.key is not None
            assert row.key not in mine, "a tombstone without a delete"
            return
        event = orjson.loads(row.value)
        self.events.append(event)
        before, after = event["before"], event["after"]
        if event["op"] == "t":
            mine.clear()
            self.loose.clear()
        elif row.key is not None:
            if event["op"] == "d":
                mine.pop(row.key, None)
            else:
                mine[row.key] = after
        else:
            for gone in (before,) if before is not None else ():
                known = orjson.dumps(gone)
                assert self.loose[known] > 0, f"a row that was not there: {gone}"
                self.loose[known] -= 1
            if after is not None:
                self.loose[orjson.dumps(after)] += 1

    def ops(self) -> str:
        """What happened, without what snapshots read."""
        return " ".join(event["op"] for event in self.events if event["op"] != "r")

    def table(self) -> list[dict[str, Any]]:
        """The rows that follow from it."""
        loose = [orjson.loads(row) for row in self.loose.elements()]
        return [*self.by_key.values(), *loose]


def check_transactions(cluster: Cluster, prefix: str, tables: Mapping[str, Told]) -> int:
    """Each source transaction is in the log once and whole; how many there are."""
    status: Counter[tuple[str, str]] = Counter()
    counts: dict[str, int] = {}
    for row in records(cluster, f"{prefix}.transaction"):
        told = orjson.loads(row.value or b"null")
        status[told["id"], told["status"]] += 1
        if told["status"] == "END":
            counts[told["id"]] = told["event_count"]
    twice = {place: count for place, count in status.items() if count != 1}
    assert not twice, f"told twice: {twice}"
    begun, ended = ({id_ for id_, kind in status if kind == want} for want in ("BEGIN", "END"))
    assert begun == ended, f"half: {begun ^ ended}"
    places = Counter(_places(tables))
    twice_there = {place: count for place, count in places.items() if count != 1}
    assert not twice_there, f"events that are there twice: {twice_there}"
    found = Counter(id_ for id_, _ in places)
    assert found == Counter({id_: count for id_, count in counts.items() if count})
    return len(ended)


def _places(tables: Mapping[str, Told]) -> Iterator[tuple[str, int]]:
    for told in tables.values():
        for event in told.events:
            if event["transaction"] is not None:
                yield event["transaction"]["id"], event["transaction"]["total_order"]
