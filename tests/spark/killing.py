"""Kills at random: the driver, Python workers, the broker, while a stream goes from topic to topic.

Input is fed in pieces, and between them something dies. At the end the output, as another client
reads what is committed, must be what the input says, each record once, and in order for each key.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, TypeVar
from uuid import uuid4

import psutil

from penstock.client.connection import Cluster
from penstock.client.errors import ClientError
from penstock.client.topics import create
from penstock.client.writer import LogWriter
from penstock.spark.sink import marks
from penstock.testing.process import BrokerProcess
from tests.spark.feeding import Record
from tests.spark.sink.log import committed
from tests.waiting import eventually

T = TypeVar("T")
Kind = Literal["driver", "group", "worker", "broker"]
ROOT: Final = Path(__file__).resolve().parents[2]
PATIENCE_S: Final = 240.0
PIECE: Final = 400


class KillRun:
    """One run: a broker, a driver, and what they should have done."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.rng = random.Random(seed)
        self.folder = folder
        self.broker = BrokerProcess(folder / "broker", durability="os")
        suffix = uuid4().hex[:8]
        self.source, self.target, self.dead = (f"{n}-{suffix}" for n in ("in", "out", "dead"))
        self.fed: list[tuple[bytes, bytes]] = []
        self.kills: dict[str, int] = defaultdict(int)
        self._driver: subprocess.Popen[bytes] | None = None
        self._pause = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        with self.broker:
            with Cluster(self.broker.bootstrap) as cluster:
                create(cluster, self.source, partitions=2)
                create(cluster, self.target, partitions=3)
                create(cluster, self.dead, partitions=1)
            self.start_driver()
            try:
                yield
            finally:
                self.end_driver(group=True)

    # ---- the driver ----------------------------------------------------------------------

    def start_driver(self) -> None:
        place = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
        way = self.rng.choice(("driver", "tasks"))
        names = (self.source, self.target, self.dead, str(self.folder), way)
        with (self.folder / "driver.log").open("ab") as log:
            self._driver = subprocess.Popen(
                [sys.executable, "-m", "tests.spark.kill_child", self.broker.bootstrap, *names],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": place},
                start_new_session=True,
            )

    def end_driver(self, *, group: bool) -> None:
        """Kill it; with its Java process, or alone, which leaves Java to find out by itself."""
        driver, self._driver = self._driver, None
        if driver is None:
            return
        if group:
            os.killpg(driver.pid, signal.SIGKILL)
        else:
            driver.kill()
        driver.wait()
        assert driver.stdin is not None
        driver.stdin.close()

    def log_text(self) -> str:
        return (self.folder / "driver.log").read_text(errors="replace")

    def workers(self) -> list[psutil.Process]:
        """Python processes of the driver's Java process: those of tasks, and of the source."""
        assert self._driver is not None
        try:
            below = psutil.Process(self._driver.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        return [process for process in below if _is_worker(process)]

    # ---- rounds --------------------------------------------------------------------------

    def feed(self) -> None:
        """More input; one in ten cannot be read."""
        records = []
        for number in range(len(self.fed), len(self.fed) + PIECE):
            key = b"k%d" % self.rng.randrange(30)
            value = json.dumps({"id": number, "word": f"w{number}"}).encode()
            if self.rng.random() < 0.1:
                value = value[: self.rng.randrange(len(value))]
            records.append((key, value))
        with Cluster(self.broker.bootstrap) as cluster, LogWriter(cluster) as writer:
            keys, values = zip(*records, strict=True)
            writer.write(self.source, keys, values)
            writer.flush()
        self.fed += records

    def batch(self) -> int:
        """The last batch that was committed."""
        try:
            with Cluster(self.broker.bootstrap) as cluster:
                marks.make_topic(cluster)
                mark = marks.last(cluster, self.target)
        except ClientError:
            return -1
        return -1 if mark is None else mark.batch_id

    def round(self, kind: Kind) -> None:
        """Feed, let it work for a while, and kill."""
        before = self.batch()
        self.feed()
        # Mostly at work, sometimes while it still starts.
        if self.rng.random() < 0.7 or kind == "worker":
            self._until(lambda: self.batch() > before)
        self._pause.wait(self.rng.uniform(0, 1.0))
        self.kills[kind] += 1
        if kind == "broker":
            self.broker.kill()
            self._pause.wait(self.rng.uniform(0, 0.5))
            self.broker.start()
        elif kind == "worker":
            victims = self._until(self.workers)
            for victim in self.rng.sample(victims, self.rng.randint(1, len(victims))):
                try:
                    victim.kill()
                except psutil.NoSuchProcess:
                    continue
        else:
            self.end_driver(group=kind == "group")
            self.start_driver()

    def _until(self, check: Callable[[], T]) -> T:
        try:
            return eventually(check, PATIENCE_S, 0.2)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log_text()[-4000:]}") from error

    # ---- the verdict ---------------------------------------------------------------------

    def verify(self) -> None:
        good, bad = expected(self.fed)
        address = self.broker.bootstrap
        self._until(
            lambda: (
                len(committed(address, self.target)) >= len(good)
                and len(committed(address, self.dead)) >= len(bad)
            )
        )
        self.end_driver(group=True)
        check(committed(address, self.target), good)
        dead = committed(address, self.dead)
        check(dead, bad)
        places = [dict(record.headers)["penstock.error.offset"] for record in dead]
        assert len(places) == len(bad)


def expected(
    fed: list[tuple[bytes, bytes]],
) -> tuple[list[tuple[bytes, bytes]], list[tuple[bytes, bytes]]]:
    """The batch result: what goes where, computed without Spark."""
    good, bad = [], []
    for key, value in fed:
        try:
            told = json.loads(value)
            made = {"twice": told["id"] * 2, "word": told["word"].upper()}
        except ValueError:
            bad.append((key, value))
            continue
        good.append((key, json.dumps(made, separators=(",", ":")).encode()))
    return good, bad


def check(found: list[Record], wanted: list[tuple[bytes, bytes]]) -> None:
    """The same records, each once, and those of a key in their order."""
    by_key: dict[bytes | None, list[bytes | None]] = defaultdict(list)
    for record in found:
        by_key[record.key].append(record.value)
    by_wanted: dict[bytes | None, list[bytes | None]] = defaultdict(list)
    for key, value in wanted:
        by_wanted[key].append(value)
    assert len(found) == len(wanted), f"{len(found)} records, {len(wanted)} wanted"
    assert by_key == by_wanted


def _is_worker(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False  # gone, or as good as gone
    return "pyspark.worker" in words or any("source_runner" in word for word in words)
