"""A Spark cluster of a test's own: a standalone master and workers, from the pip package alone.

All of it listens on 127.0.0.1, on ports that the system chose. A worker runs its executors as
processes below it; `kill_worker` ends them together, as a machine that fails does.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from time import monotonic
from types import TracebackType
from typing import Final, Self

import psutil

from penstock.errors import PenstockError

START_TIMEOUT_S: Final = 120.0
_POLL_S: Final = 0.05
_MASTER: Final = "org.apache.spark.deploy.master.Master"
_WORKER: Final = "org.apache.spark.deploy.worker.Worker"
_MASTER_READY: Final = re.compile(r"Starting Spark master at (spark://\S+)")
_WORKER_READY: Final = "Successfully registered with master"


def quick_java_options() -> str:
    """For a Java process that lives for a minute, be it a part of a cluster or an executor.

    What is compiled once more for speed comes too late, and an archive of Spark's classes, where
    there is one, halves the work of a start.
    """
    from penstock.spark.archive import java_options
    from penstock.spark.java import find_java

    archive = java_options(find_java())
    return f"-XX:TieredStopAtLevel=1 -XX:+UseSerialGC {archive}".rstrip()


class SparkClusterError(PenstockError):
    """A part of the cluster did not start."""


class _Part:
    """The master or a worker: a Java process with its log."""

    def __init__(
        self, name: str, arguments: list[str], folder: Path, settings: dict[str, str]
    ) -> None:
        import pyspark

        self.name = name
        self.log = folder / f"{name}.log"
        home = Path(pyspark.__file__).parent
        environment = {
            **os.environ,
            "SPARK_HOME": str(home),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": quick_java_options(),
            "SPARK_LOCAL_DIRS": str(folder / "scratch"),
            "PYSPARK_PYTHON": sys.executable,
            "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
            **settings,
        }
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [str(home / "bin" / "spark-class"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=folder,
                env=environment,
                start_new_session=True,
            )

    def wait_for(self, pattern: str | re.Pattern[str]) -> str:
        """The words in its log that say that it is ready."""
        deadline, pause = monotonic() + START_TIMEOUT_S, threading.Event()
        while True:
            text = self.log.read_text(errors="replace")
            found = re.search(pattern, text)
            if found is not None:
                return found.group(found.lastindex or 0)
            if self._process.poll() is not None or monotonic() > deadline:
                raise SparkClusterError(f"Spark's {self.name} did not start: {text[-2000:]}")
            pause.wait(_POLL_S)

    def kill(self) -> None:
        """End it and all below it, at once."""
        try:
            root = psutil.Process(self._process.pid)
            processes = [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            processes = []
        for process in processes:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(processes, timeout=30)
        self._process.wait()


class SparkCluster:
    """A master and some workers; a context manager."""

    def __init__(self, workers: int = 2, *, cores: int = 1, memory: str = "900m") -> None:
        self._count = workers
        self._cores = cores
        self._memory = memory
        self.folder = Path(tempfile.mkdtemp(prefix="penstock-spark-"))
        self._parts: list[_Part] = []
        self.workers: list[_Part] = []
        self.master = ""

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> Self:
        """Start everything; `master` is then the address to hand to Spark."""
        arguments = ["--host", "127.0.0.1", "--port", "0", "--webui-port", "0"]
        try:
            master = _Part("master", [_MASTER, *arguments], self.folder, {})
            self._parts.append(master)
            self.master = master.wait_for(_MASTER_READY)
            for _ in range(self._count):
                self.add_worker(wait=False)
            for worker in self.workers:
                worker.wait_for(_WORKER_READY)
        except BaseException:
            self.stop()
            raise
        return self

    def add_worker(self, *, wait: bool = True) -> None:
        """One more, as after a machine was replaced."""
        name = f"worker-{len(self._parts)}"
        arguments = [
            *(_WORKER, "--host", "127.0.0.1", "--port", "0", "--webui-port", "0"),
            *("--cores", str(self._cores), "--memory", self._memory),
            *("--work-dir", str(self.folder / name), self.master),
        ]
        worker = _Part(name, arguments, self.folder, {})
        self._parts.append(worker)
        self.workers.append(worker)
        if wait:
            worker.wait_for(_WORKER_READY)

    def kill_worker(self, number: int = 0) -> None:
        """End a worker with its executors, as a machine that fails does."""
        worker = self.workers.pop(number)
        worker.kill()

    def stop(self) -> None:
        """End everything, and leave nothing behind."""
        for part in reversed(self._parts):
            part.kill()
        self._parts.clear()
        self.workers.clear()
        shutil.rmtree(self.folder, ignore_errors=True)
