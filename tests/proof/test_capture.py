"""A captured database under load for minutes, with kills: its tables are in the log, row by row.

The load is that of `capture_load`. At random, by a seed, the capture, the broker or the database is
killed with SIGKILL and started again. `PENSTOCK_SOAK_MINUTES` says how long, in `make proof`;
`make test` kills each of them once. In the end each table, rebuilt from its topic, is the table in
the database, and each source transaction is in the log once and whole.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import orjson
import pytest

from penstock.client.connection import Cluster
from penstock.client.metadata import Metadata
from penstock.errors import PenstockError
from penstock.testing.mariadb import MariaDB
from penstock.testing.postgres import PostgresServer
from penstock.testing.process import BrokerProcess
from tests.capture.kit.capturing import CaptureProcess, Told, check_transactions, records
from tests.capture.kit.databases import KINDS, Database, Mysql, Postgres, Sqlite
from tests.capture.kit.following import MARKS, make_marks, mark
from tests.harness.profiles import SOAK_MINUTES
from tests.proof.capture_load import TABLES, Writer, as_it_is_now, create
from tests.proof.progress import say
from tests.waiting import eventually

WRITERS = 3
WRITTEN_PER_KILL = 40
CATCH_UP_S = 300.0
NAME = "soak"
# Nothing is compacted away: each event of each transaction is to be found.
UNCOMPACTED = {"min.compaction.lag.ms": str(24 * 3_600_000)}


class Soak:
    """One database, one broker, one capture, and what happens to them."""

    def __init__(self, kind: str, folder: Path, seed: int, stack: ExitStack) -> None:
        self.random = random.Random(seed)
        self.kills: Counter[str] = Counter()
        self.server: PostgresServer | MariaDB | None = None
        self.database = self._database(kind, folder, stack)
        make_marks(self.database)
        create(self.database)
        self.broker = stack.enter_context(BrokerProcess(folder / "broker", durability="os"))
        settings: dict[str, Any] = {
            "url": self.database.url,
            "options": dict(self.database.options),
            "unavailable": "fill",
            "topic_config": UNCOMPACTED,
            "heartbeat_ms": 1_000,
        }
        self.capture = stack.enter_context(
            CaptureProcess(NAME, settings, self.broker.bootstrap, folder / "capture.log")
        )
        self.writers = [
            Writer(self.database, number, seed + number, defines=number == 0)
            for number in range(WRITERS)
        ]

    def _database(self, kind: str, folder: Path, stack: ExitStack) -> Database:
        if kind == "postgresql":
            self.server = stack.enter_context(PostgresServer({"logical_decoding_work_mem": "64kB"}))
            return Postgres(self.server)
        if kind == "mysql":
            self.server = stack.enter_context(
                MariaDB(sync_binlog="1", innodb_flush_log_at_trx_commit="1")
            )
            return Mysql(self.server)
        return Sqlite(folder)

    @contextmanager
    def writing(self) -> Iterator[None]:
        stop = threading.Event()
        threads = [threading.Thread(target=writer.go, args=(stop,)) for writer in self.writers]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(120)
        assert [writer.failure for writer in self.writers if writer.failure] == []

    @property
    def committed(self) -> int:
        return sum(writer.committed for writer in self.writers)

    @property
    def parts(self) -> list[str]:
        """What can be killed."""
        return ["capture", "broker", *(["database"] if self.server else [])]

    def some_part(self) -> str:
        return self.random.choice(["capture", *self.parts])

    def kill(self, kind: str) -> None:
        """Kill one of the parts, and start it again."""
        if kind == "capture":
            self.capture.kill()
            self.capture.start()
        elif kind == "broker":
            self.broker.kill()
            self.broker.start()
        elif self.server is not None:
            self.server.crash()
            self.server.start()
        self.kills[kind] += 1
        assert self.capture.is_alive

    def topic(self, table: str) -> str:
        return f"{NAME}.{self.database.full_name(table)}"

    def is_told(self, number: int) -> bool:
        assert self.capture.is_alive
        try:
            with Cluster(self.broker.bootstrap) as cluster:
                found = records(cluster, self.topic(MARKS))
        except PenstockError:
            return False
        return any(row.key and orjson.loads(row.key)["id"] == number for row in found)

    def catch_up(self) -> None:
        number = mark(self.database)
        eventually(lambda: self.is_told(number), CATCH_UP_S, 0.1)

    def verify(self) -> tuple[int, int]:
        """Transactions and events; AssertionError where the log is not what the database is."""
        with Cluster(self.broker.bootstrap) as cluster:
            assert Metadata(cluster).topics([self.topic(MARKS)])
            told = {name: Told(records(cluster, self.topic(name))) for name in (*TABLES, MARKS)}
            transactions = check_transactions(cluster, NAME, told)
        for name, found in told.items():
            self._compare(name, found)
        return transactions, sum(len(found.events) for found in told.values())

    def _compare(self, name: str, found: Told) -> None:
        with self.database.connect() as session:
            names = self.database.columns(session, name)
        (key,) = names[:1]
        renamed = self.writers[0].renamed
        rebuilt = [as_it_is_now(row, names, renamed) for row in found.table()]
        real = {row[key]: row for row in self.database.rows(name)}
        assert len(rebuilt) == len(real), name
        for row in rebuilt:
            assert row == real.get(row[key]), (name, row[key])


@pytest.mark.processes
@pytest.mark.databases
@pytest.mark.parametrize("kind", KINDS)
def test_each_part_is_killed_once(kind: str, tmp_path: Path, seed: int) -> None:
    """The short form of the soak."""
    with ExitStack() as stack:
        test = Soak(kind, tmp_path, seed, stack)
        test.capture.start()
        # After the snapshot each transaction is told as one.
        test.catch_up()
        with test.writing():
            for part in test.parts:
                target = test.committed + WRITTEN_PER_KILL
                eventually(lambda: test.committed >= target)  # noqa: B023 - called in this round
                test.kill(part)
        test.catch_up()
        transactions, events = test.verify()
    # Several of SQLite's are read as one.
    assert transactions > 0
    assert test.kills == dict.fromkeys(test.parts, 1)
    print(f"{transactions} transactions, {events} events")


def soak(kind: str, folder: Path, seed: int, minutes: float) -> None:
    begun = time.monotonic()
    pause = threading.Event()
    with ExitStack() as stack:
        test = Soak(kind, folder, seed, stack)
        test.capture.start()
        said = begun
        with test.writing():
            while (now := time.monotonic()) - begun < minutes * 60:
                pause.wait(test.random.uniform(0.2, 4.0))
                test.kill(test.some_part())
                if now - said > 30:
                    said = now
                    say(f"{kind}: {test.committed} transactions, killed {dict(test.kills)}", begun)
        test.catch_up()
        transactions, events = test.verify()
        say(
            f"summary: {kind}: {test.committed} transactions written, {transactions} told, "
            f"{events} events, {test.writers[0].definitions} changes of columns, killed "
            f"{dict(test.kills)}, no problem; seed {seed}",
            begun,
        )


@pytest.mark.proof
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", KINDS)
def test_under_load_and_kills(kind: str, tmp_path: Path, seed: int) -> None:
    soak(kind, tmp_path, seed, SOAK_MINUTES)
