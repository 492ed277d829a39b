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
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from pyspark.sql import SparkSession

from penstock.client.connection import Cluster
from penstock.client.topics import create
from penstock.client.writer import LogWriter
from penstock.spark.flows.declare import physical
from penstock.spark.sink.errors import SinkUnavailableError
from penstock.spark.sink.exactly_once import ExactlyOnce
from penstock.testing.broker import Broker
from penstock.testing.flows import FlowTester
from penstock.testing.process import BrokerProcess
from tests.spark.sink.log import committed
from tests.spark.state.counting import counting, expected, told
from tests.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]
# Each takes a new session; more of them for a longer look.
KILLS = int(os.environ.get("PENSTOCK_STATE_KILLS", "1"))


def some_rows(rng: random.Random, count: int) -> list[dict[str, Any]]:
    return [{"name": f"n{rng.randrange(7)}", "number": rng.randrange(100)} for _ in range(count)]


@pytest.mark.timeout(600)
def test_failures_before_between_and_after(
    spark: SparkSession, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is computed; when state is written and output is not; when both are."""
    rows = some_rows(random.Random(seed), 60)
    write, send = ExactlyOnce._write, ExactlyOnce._send
    points = iter(["none", "before", "none", "between", "none", "after", "between", "after"])
    point = ["none"]

    def failing_write(self: ExactlyOnce, df: Any, batch_id: int) -> Any:
        point[0] = next(points, "none") if not self.name.endswith(".dead") else "none"
        if point[0] == "before":
            raise SinkUnavailableError("before")
        done = write(self, df, batch_id)
        if point[0] == "after":
            raise SinkUnavailableError("after")
        return done

    def failing_send(self: ExactlyOnce, *args: Any) -> Any:
        sent = send(self, *args)
        if point[0] == "between":
            point[0] = "none"
            raise SinkUnavailableError("between")
        return sent

    monkeypatch.setattr(ExactlyOnce, "_write", failing_write)
    monkeypatch.setattr(ExactlyOnce, "_send", failing_send)
    with Broker() as broker:
        tester = FlowTester(spark, broker, tmp_path / "data")
        tester.use(counting("in", "out", batch=12))
        tester.feed("in", rows, key="name")
        status = tester.run(tries=20)["counting"]
        assert told(tester.rows("out")) == expected(rows)
        assert status.restarts >= 4


@pytest.mark.timeout(600)
def test_kills_of_the_driver(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    suffix = uuid4().hex[:8]
    source, target = f"in-{suffix}", f"out-{suffix}"
    rows: list[dict[str, Any]] = []
    pause = threading.Event()
    with BrokerProcess(tmp_path / "broker", durability="os") as broker:
        address = broker.bootstrap
        with Cluster(address) as cluster:
            create(cluster, source, partitions=2)
            create(cluster, target, partitions=2)

        def written() -> int:
            return len(committed(address, target))

        for last in (*[False] * KILLS, True):
            before = written()
            fresh = some_rows(rng, 200)
            rows += fresh
            feed(address, source, fresh)
            driver = start(tmp_path, address, source, target)
            try:
                wanted = len(rows) if last else before + 1
                patiently(lambda wanted=wanted: written() >= wanted, driver, tmp_path)  # type: ignore[misc]
                pause.wait(0 if last else rng.uniform(0, 1.0))
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(driver.pid, signal.SIGKILL)
                driver.wait()
                assert driver.stdin is not None
                driver.stdin.close()

        found = [json.loads(each.value or b"") for each in committed(address, physical(target, 1))]
    assert told(found) == expected(rows)


def feed(address: str, topic: str, rows: list[dict[str, Any]]) -> None:

    with Cluster(address) as cluster, LogWriter(cluster) as writer:
        keys = [row["name"].encode() for row in rows]
        writer.write(topic, keys, [json.dumps(row).encode() for row in rows])


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
        eventually(done, 240.0, 0.2)
    except AssertionError as error:
        text = (folder / "driver.log").read_text(errors="replace")
        raise AssertionError(f"{error}\n{text[-4000:]}") from error
