"""A cluster of Spark that gives no executors is told of, once, and waited for."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.cli.run_cluster import NO_EXECUTORS, PATIENCE_S, Executors, check_master
from penstock.errors import PenstockError
from penstock.testing.spark_cluster import SparkCluster
from tests.cli.runner import run
from tests.waiting import eventually

# The command, with less patience.
IMPATIENT = "from penstock.cli import main, run_cluster; run_cluster.PATIENCE_S = 2; main.main()"


def test_it_is_told_once_and_when_it_has_passed() -> None:
    now, there, told = [0.0], [0], list[str]()

    def count() -> int:
        if there[0] < 0:
            raise ConnectionRefusedError
        return there[0]

    executors = Executors(count, "1g of memory", told.append, lambda: now[0])

    def pass_by(seconds: float) -> None:
        for _ in range(int(seconds * 10)):
            now[0] += 0.1
            executors.look()

    pass_by(PATIENCE_S - 1)
    assert told == []
    pass_by(10)
    assert len(told) == 1
    assert NO_EXECUTORS in told[0]
    assert "1g of memory" in told[0]
    # Java that does not answer is for others to tell.
    there[0] = -1
    pass_by(10)
    there[0] = 2
    pass_by(10)
    there[0] = 0
    pass_by(100)
    assert told[1:] == ["the cluster has given an executor; it goes on"]


def test_nothing_is_told_of_a_cluster_that_is_quick() -> None:
    now, told = [0.0], list[str]()
    executors = Executors(lambda: 1, "1g of memory", told.append, lambda: now[0])
    for _ in range(100):
        now[0] += 1
        executors.look()
    assert told == []


@pytest.mark.java
def test_a_master_that_does_not_answer_is_told_before_anything_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        there, not_there = (f"127.0.0.1:{each.getsockname()[1]}" for each in (server, deaf))
        for master in ("local[2]", "yarn", f"spark://{there}", f"spark://{not_there},{there}"):
            check_master(master)
        for master in (f"spark://{not_there}", "spark://nowhere"):
            with pytest.raises(PenstockError, match="no Spark answers at"):
                check_master(master)
        data = tmp_path / "demo"
        ran = run("demo", "--master", f"spark://{not_there}", "--data", str(data))
        assert ran.status == 1
        assert f"no Spark answers at spark://{not_there}" in ran.err
        assert not (data / "log").exists()


@pytest.mark.java
@pytest.mark.timeout(600)
def test_a_cluster_whose_workers_are_too_small(tmp_path: Path, at: str, topic: str) -> None:
    (tmp_path / "flows.py").write_text(
        "from penstock.spark import flow, stream, topic\n\n\n"
        f"@flow(inputs=stream('{topic}', text=True), output=topic('{topic}-out'))\n"
        "def same(a):\n    return a.selectExpr('value AS text')\n"
    )
    run("produce", topic, stdin=b"hello\n").ok()
    said = tmp_path / "said.txt"
    with SparkCluster(workers=1, memory="300m") as cluster:
        command = [sys.executable, "-c", IMPATIENT, "run", "flows.py", "--plain",
                   "--master", cluster.master, "--conf", "spark.ui.enabled=false",
                   "--conf", "spark.driver.host=127.0.0.1", "--conf", "spark.executor.memory=600m",
                   "--stop-timeout", "1s"]  # fmt: skip
        with said.open("wb") as file:
            process = subprocess.Popen(
                command, cwd=tmp_path, stdout=file, stderr=file, env=dict(os.environ)
            )
        try:
            eventually(lambda: NO_EXECUTORS in said.read_text(), 200)
            assert "600m of memory" in said.read_text()
            assert process.poll() is None
            process.send_signal(signal.SIGINT)
            # Whether it is being planned then, or waits for a task.
            assert process.wait(120) == 0, said.read_text()
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    assert said.read_text().count(NO_EXECUTORS) == 1
