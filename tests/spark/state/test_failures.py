"""State and output stay in step: failures at each point of a micro-batch, and kills at any."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pyspark.sql import SparkSession

from penstock.client.connection import Cluster
from penstock.client.topics import create
from penstock.client.writer import LogWriter
from penstock.spark.flows.folder import Folder
from penstock.spark.flows.versions import physical
from penstock.spark.state import watching
from penstock.testing.broker import Broker
from penstock.testing.flows import FlowTester
from penstock.testing.process import BrokerProcess
from tests.harness.profiles import STATE_FAILURE_POINTS, STATE_KILL_ROWS, STATE_KILLS
from tests.spark.failing import fail_at
from tests.spark.sink.log import committed
from tests.spark.state.counting import called, counting, expected, told
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
# Where writes fail, one after the other.
POINTS = (
    "none", "before", "between", "after",
    "none", "before", "none", "between", "none", "after", "between", "after",
)[:STATE_FAILURE_POINTS]  # fmt: skip
BATCH = 12
# The name of what only lets time go on.
END = "end"


def some_rows(rng: random.Random, count: int) -> list[dict[str, Any]]:
    return [{"name": f"n{rng.randrange(7)}", "number": rng.randrange(100)} for _ in range(count)]


@pytest.mark.timeout(600)
def test_failures_before_between_and_after(
    spark: SparkSession, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is computed; when state is written and output is not; when both are."""
    rows = some_rows(random.Random(seed), BATCH * (3 if len(POINTS) < 5 else 7))
    fail_at(POINTS, lambda sink: not sink.name.endswith(".dead"), monkeypatch)
    with Broker() as broker:
        tester = FlowTester(spark, broker, tmp_path / "data")
        tester.use(counting("in", "out", batch=BATCH))
        tester.feed("in", rows, key="name")
        status = tester.run(tries=20)["counting"]
        assert told(tester.rows("out")) == expected(rows)
        # What was written is not written again: there is nothing between state and output then.
        skipped = list(pairwise(POINTS)).count(("after", "between"))
        assert status.restarts >= len(POINTS) - POINTS.count("none") - skipped


@pytest.mark.java
@pytest.mark.timeout(600)
def test_kills_of_the_driver(tmp_path: Path, seed: int) -> None:
    """Of two flows at once, one of which takes rows that the source has packed.

    Some drivers run all micro-batches over prepared plans, some none, some the smaller ones.
    """
    rng = random.Random(seed)
    suffix = uuid4().hex[:8]
    rows_in, names_in = f"rows-{suffix}", f"names-{suffix}"
    counts, named = f"counts-{suffix}", f"named-{suffix}"
    load = Load(rng)
    watch = watching.Watch(
        f"{Folder(tmp_path / 'data').checkpoint('naming', 1)}/{watching.FOLDER}"
    )  # fmt: skip
    pause = threading.Event()
    with BrokerProcess(tmp_path / "broker", durability="os") as broker:
        address = broker.bootstrap
        with Cluster(address) as cluster:
            for each in (rows_in, names_in, counts, named):
                create(cluster, each, partitions=2)

        def written(topic: str) -> int:
            return len(committed(address, topic))

        for last in (*[False] * STATE_KILLS, True):
            target = rng.choice([counts, named])
            wanted = written(target) + 1
            feed(address, names_in, load.changes(STATE_KILL_ROWS // 2))
            feed(address, rows_in, load.rows(STATE_KILL_ROWS))
            if last:
                # Time goes on in all partitions, so that all before it is told.
                for each in (names_in, rows_in):
                    for partition in range(2):
                        feed(address, each, [load.end()], partition)
            most = 0 if last else rng.choice([20_000, 20_000, 39, 0])
            driver = start(tmp_path, address, rows_in, names_in, counts, named, str(most))
            try:
                patiently(lambda: written(target) >= wanted, driver, tmp_path)  # noqa: B023
                if last:
                    done = len(load.all_rows)
                    patiently(lambda: written(named) >= done, driver, tmp_path)  # noqa: B023
                    patiently(lambda: written(counts) >= done + 2, driver, tmp_path)  # noqa: B023
                else:
                    pause.wait(rng.uniform(0, 1.0))
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()
                assert driver.stdin is not None
                driver.stdin.close()
        assert watch.now().packings, "rows did not come packed"

        def rows_of(topic: str) -> list[dict[str, Any]]:
            found = committed(address, physical(topic, 1))
            return [json.loads(each.value or b"") for each in found]

        counted, enriched = rows_of(counts), rows_of(named)
    own = [row for row in counted if row["name"] != END]
    assert told(own) == expected(load.all_rows)
    found = [(row["name"], moment(row["at"]), row["called"]) for row in enriched]
    assert sorted(found) == called(load.all_rows, load.all_changes)


class Load:
    """Rows and changes of names, whose time goes on."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        # Neither so old that retention takes it, nor in the future, which brokers refuse.
        self._time = datetime.now(UTC) - timedelta(days=3)
        self.all_rows: list[dict[str, Any]] = []
        self.all_changes: list[dict[str, Any]] = []

    def changes(self, count: int) -> list[dict[str, Any]]:
        """Of the time in which the next rows are, too."""
        found = [
            {"name": f"n{self._rng.randrange(9)}", "called": f"c{self._rng.random()}", "at": at}
            for at in self._moments(count)
        ]
        self.all_changes += found
        return found

    def rows(self, count: int) -> list[dict[str, Any]]:
        found = [
            {**row, "at": at}
            for row, at in zip(some_rows(self._rng, count), self._moments(count), strict=True)
        ]
        self._time += timedelta(hours=1)
        self.all_rows += found
        return found

    def end(self) -> dict[str, Any]:
        """Long after all others."""
        at = moment((self._time + timedelta(days=1)).isoformat())
        return {"name": END, "number": 0, "called": END, "at": at}

    def _moments(self, count: int) -> list[str]:
        found = sorted(self._rng.random() for _ in range(count))
        return [moment((self._time + timedelta(hours=each)).isoformat()) for each in found]


def moment(text: str) -> str:
    """A time as all tell it that compare theirs."""
    return datetime.fromisoformat(text).astimezone(UTC).isoformat(timespec="milliseconds")


def feed(
    address: str,
    topic: str,
    rows: list[dict[str, Any]],
    partition: int | None = None,
) -> None:
    with Cluster(address) as cluster, LogWriter(cluster) as writer:
        keys = [row["name"].encode() for row in rows]
        values = [json.dumps(row).encode() for row in rows]
        times = [round(datetime.fromisoformat(row["at"]).timestamp() * 1000) for row in rows]
        writer.write(topic, keys, values, timestamps_ms=times, partition=partition)


def start(folder: Path, *names: str) -> subprocess.Popen[bytes]:
    place = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    with (folder / "driver.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.spark.state.counting_child", *names, str(folder)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd=folder,
            env={**os.environ, "PYTHONPATH": place},
            start_new_session=True,
        )


def patiently(check: Callable[[], bool], driver: subprocess.Popen[bytes], folder: Path) -> None:
    def done() -> bool:
        assert driver.poll() is None, "the driver has ended by itself"
        return check()

    try:
        eventually(done, 240.0, 0.5)
    except AssertionError as error:
        text = (folder / "driver.log").read_text(errors="replace")
        raise AssertionError(f"{error}\n{text[-4000:]}") from error
