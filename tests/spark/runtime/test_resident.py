"""Sinks in a Spark task that is killed, or stands still: the store says what the topic says."""

from __future__ import annotations

import os
import random
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.sinks import stores
from penstock.sinks.spec import SinkSpec
from penstock.spark.runtime.resident import ResidentTasks
from penstock.spark.runtime.sink_loop import LogAddress
from penstock.spark.session import RESIDENT_TASKS, settings_of, with_slots
from penstock.spark.sinking.manager import SinkManager
from penstock.testing import Broker
from tests.harness.profiles import RESIDENT_KILLS
from tests.spark.runtime.test_sink_loop import at_end
from tests.spark.sinking.changelog import Changelog, table
from tests.spark.sinking.managed import managed, rows_in, until
from tests.waiting import eventually


def caught_up(manager: SinkManager, broker: Broker, topic: str) -> Callable[[], bool]:
    is_at_end = at_end(broker, topic)
    return lambda: all(is_at_end(unit.applied) for unit in manager._units())  # type: ignore[arg-type]


def has_moved(manager: SinkManager) -> Callable[[], bool]:
    put = [each.put for each in manager.status()]
    return lambda: [each.put for each in manager.status()] != put


def is_gone(manager: SinkManager, pid: int) -> Callable[[], bool]:
    return lambda: pid not in manager._tasks.pids


@pytest.mark.timeout(600)
def test_the_task_is_killed_again_and_again(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    log = Changelog(log_broker.bootstrap, topic, seed)
    specs = [
        SinkSpec(name, topic, f"sqlite:///{tmp_path}/{name}.db?table=orders", max_records=50)
        for name in ("one", "two")
    ]
    log.feed(100)
    with managed(spark, log_broker, tmp_path / "data", specs, tries=20) as manager:
        for _ in range(RESIDENT_KILLS):
            until(manager, has_moved(manager))
            (pid,) = eventually(lambda: manager._tasks.pids)
            log.feed(chance.randrange(400))
            os.kill(pid, signal.SIGKILL)
            log.feed(chance.randrange(1, 100))
            until(manager, is_gone(manager, pid))
        until(manager, caught_up(manager, log_broker, topic))
        assert all(each.restarts >= RESIDENT_KILLS for each in manager.status())
    wanted = table(log_broker.bootstrap, topic)
    assert rows_in(tmp_path / "one.db") == rows_in(tmp_path / "two.db") == wanted


@pytest.mark.timeout(300)
def test_a_task_that_stands_still_is_replaced_and_fenced(
    spark: SparkSession,
    log_broker: Broker,
    topic: str,
    tmp_path: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.spark.runtime.resident.SILENT_S", 6.0)
    log = Changelog(log_broker.bootstrap, topic, seed)
    log.feed(100)
    spec = SinkSpec("orders", topic, f"sqlite:///{tmp_path}/shop.db", max_records=50)
    with managed(spark, log_broker, tmp_path / "data", [spec], tries=20) as manager:
        until(manager, caught_up(manager, log_broker, topic))
        (pid,) = manager._tasks.pids
        os.kill(pid, signal.SIGSTOP)
        log.feed(300)
        until(manager, lambda: manager._tasks.pids and pid not in manager._tasks.pids)
        # Spark may have killed it; if not, it wants to go on now.
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
        until(manager, caught_up(manager, log_broker, topic))
        log.feed(50)
        until(manager, caught_up(manager, log_broker, topic))
    assert rows_in(tmp_path / "shop.db") == table(log_broker.bootstrap, topic)


def test_who_does_not_know_the_key_is_refused(
    spark: SparkSession, log_broker: Broker, topic: str, tmp_path: Path, seed: int
) -> None:
    Changelog(log_broker.bootstrap, topic, seed).feed(20)
    spec = SinkSpec("orders", topic, f"sqlite:///{tmp_path}/shop.db")
    tasks = ResidentTasks(spark, [spec], LogAddress(log_broker.bootstrap))
    try:
        tasks._ensure_jobs()
        assert tasks._listener is not None
        address = tasks._listener.getsockname()
        # Some say nothing, one something else; the task comes all the same.
        silent = [socket.create_connection(address) for _ in range(3)]
        with socket.create_connection(address) as other:
            other.sendall(b"\0\0\0\5hello")
            other.settimeout(60)
            while other.recv(1000):
                pass
        (pid,) = eventually(lambda: tasks.pids)
        assert pid != os.getpid()
        for each in silent:
            each.close()
    finally:
        tasks.close()
    eventually(lambda: not tasks.pids)


@pytest.mark.parametrize(
    ("url", "local"),
    [
        ("sqlite:///shop.db?table=t", True),
        ("duckdb:///shop.db?table=t", True),
        ("parquet:///tmp/x", True),
        ("tantivy:///tmp/x", True),
        ("postgresql://localhost/shop?table=t", True),
        ("postgresql:///shop?table=t", True),
        ("redis://127.0.0.1:6379/0", True),
        ("opensearch+http://localhost:9200/index", True),
        ("webhook+https://example.org/hook", True),
        ("postgresql://db.example.org/shop?table=t", False),
        ("opensearch+https://search.example.org/index", False),
        ("s3://bucket/table", False),
        ("parquet+s3://bucket/table", False),
    ],
)
def test_stores_of_this_machine_are_fed_from_it(url: str, local: bool) -> None:
    assert stores.parse(url).is_local == local
    spec = SinkSpec("s", "t", url)

    def in_driver(master: str) -> bool:
        spark: Any = SimpleNamespace(sparkContext=SimpleNamespace(master=master))
        return ResidentTasks(spark, [spec], LogAddress("localhost:9092"))._runs_in_driver(spec)

    assert in_driver("local[1]")
    assert in_driver("local")
    assert not in_driver("local[2]")
    assert not in_driver("local[*]")
    assert in_driver("spark://master:7077") == local


@pytest.mark.parametrize(
    ("master", "wanted"),
    [("local", "local[2]"), ("local[2]", "local[3]"), ("local[2,4]", "local[3,4]"),
     ("spark://m:7077", "spark://m:7077"), ("local-cluster[2,1,512]", "local-cluster[2,1,512]")],
)  # fmt: skip
def test_a_resident_task_takes_no_core_of_the_flows(master: str, wanted: str) -> None:
    given = {RESIDENT_TASKS: "1"}
    assert with_slots(master, given) == wanted
    assert with_slots(master, {}) == with_slots(master, {RESIDENT_TASKS: "0"}) == master
    if master == "local[2]":
        assert settings_of(master, given, "")["spark.default.parallelism"] == "2"
