"""A Spark session with what streaming from Python needs already set.

    from penstock.spark import session

    spark = session()
    orders = spark.readStream.format("penstock").option(...).load()

What is set, and why:

- Workers run the Python of this process (see `python`) and find this package; otherwise they take
  whatever `python3` is, and the query dies with "failed to connect back".
- Checkpoint files are written by plain renames, without a second file for the checksum: half the
  time of a small micro-batch went there. Only where the machine itself is the cluster; elsewhere
  Spark's own choice stands, for a checkpoint may lie in an object store. There, too, shuffled rows
  have no checksum: it tells whether a task that is run again after a machine was lost gives others.
- State in RocksDB, Arrow between Java and Python, UTC as the time zone of the session, as many
  shuffle partitions as there are cores (at most eight), the user interface on a free port
  (`spark.sparkContext.uiWebUrl`), warnings only in the log, loopback addresses only.
- Workers that acknowledge at once what Java sends (see `penstock.worker_daemon`): 40 ms of each
  task went there. Only on one machine, too; on others `spark.python.daemon.module` can be set to it
  where this package is installed.
- Where the machine itself is the cluster, and runs Linux, the processes that plan micro-batches are
  forked from one that has loaded all they need (see `fork_server`): a second less for each stream.
- Where `spark.penstock.residentTasks` is set, as `penstock run` does for sinks: a slot for each
  such task beside the cores, since it runs for as long as the session.
- No code for unions as a whole: flows tell the streams of a micro-batch apart by their parts.
- A class archive (see `archive`), so that Java starts in a third of the time.

Anything can be set otherwise by its Spark name: `session(**{"spark.driver.memory": "4g"})`. Java
options of yours are added to ours. If there is a session already, it is the one that is returned,
as `getOrCreate` does; settings that can change at run time are applied to it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from pyspark import SparkContext
from pyspark.sql import SparkSession

from penstock.errors import PenstockError
from penstock.spark.archive import java_options
from penstock.spark.fork_server import ForkServer
from penstock.spark.java import find_java
from penstock.spark.python import worker_python
from penstock.spark.registering import register

_JAVA_OPTIONS: Final = "spark.driver.extraJavaOptions"
_MOST_SHUFFLE_PARTITIONS: Final = 8
_LOCAL: Final = re.compile(r"local(\[(\*|\d+)(?P<failures>,\d+)?\])?")
# How many tasks of sinks run for as long as the session, beside those of the flows.
RESIDENT_TASKS: Final = "spark.penstock.residentTasks"
_STREAMING: Final = "org.apache.spark.sql.execution.streaming"

_ANYWHERE: Final = {
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.streaming.stateStore.providerClass": (
        f"{_STREAMING}.state.RocksDBStateStoreProvider"
    ),
    "spark.ui.port": "0",
    "spark.ui.showConsoleProgress": "false",
    "spark.python.worker.reuse": "true",
    "spark.sql.codegen.wholeStage.union.enabled": "false",
}
_ON_ONE_MACHINE: Final = {
    "spark.sql.streaming.checkpointFileManagerClass": (
        f"{_STREAMING}.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
    "spark.sql.streaming.checkpoint.fileChecksum.enabled": "false",
    "spark.sql.shuffle.orderIndependentChecksum.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "2g",
    "spark.python.daemon.module": "penstock.worker_daemon",
}


class SessionError(PenstockError):
    """Spark did not start."""

    def __str__(self) -> str:
        return f"{super().__str__()}. {self.advice}" if self.advice else super().__str__()


def session(name: str = "penstock", master: str = "local[*]", **conf: Any) -> SparkSession:
    """The Spark session of this process, made if there is none, with the source registered."""
    given = {key: _text(value) for key, value in conf.items()}
    for key in given:
        if not key.startswith("spark."):
            raise SessionError(
                f"{key!r} is not a setting of Spark", advice="Their names begin with `spark.`."
            )
    running = _running()
    if running is not None:
        for key, value in given.items():
            if running.conf.isModifiable(key):
                running.conf.set(key, value)
        register(running)
        return running
    java = find_java()
    _prepare_workers(master)
    builder = SparkSession.builder.appName(name).master(with_slots(master, given))
    for key, value in settings_of(master, given, java_options(java)).items():
        builder = builder.config(key, value)
    try:
        spark = builder.getOrCreate()
    except Exception as error:
        if type(error).__name__ != "PySparkRuntimeError":
            raise
        raise SessionError(
            f"Spark did not start with {java.program}, Java {java.version}: {error}",
            advice="Its own words stand above, on stderr; look at memory and at the settings given",
        ) from error
    if _is_local(master) and sys.platform == "linux":
        # Elsewhere libraries with threads do not bear a fork.
        _use_fork_server(spark.sparkContext)
    register(spark)
    return spark


def _use_fork_server(context: SparkContext) -> None:
    """Let streams be planned by forks, until the context is stopped."""
    server = ForkServer(context.pythonExec)
    context.pythonExec = server.program
    stop = context.stop

    def stop_both() -> None:
        stop()
        server.close()

    # A session's `stop` calls it too.
    context.stop = stop_both  # type: ignore[method-assign]


def _running() -> SparkSession | None:
    """The session of this process: the first, and not one that was made from it."""
    made = SparkSession._instantiatedSession
    if made is not None and made._sc._jsc is not None:
        return made
    return SparkSession.getActiveSession()


def settings_of(master: str, given: Mapping[str, str], archive: str) -> dict[str, str]:
    """Ours, then what was given; Java's options are joined."""
    settings = dict(_ANYWHERE)
    if _is_local(master):
        settings |= _ON_ONE_MACHINE
        cores = min(_cores(master), _MOST_SHUFFLE_PARTITIONS)
        settings["spark.sql.shuffle.partitions"] = str(cores)
        if RESIDENT_TASKS in given:
            settings["spark.default.parallelism"] = str(_cores(master))
    quiet = f"-Dlog4j2.configurationFile={files('penstock.spark') / 'quiet.properties'}"
    settings |= given
    options = [] if " " in quiet else [quiet]
    options += [archive, given.get(_JAVA_OPTIONS, "")]
    settings[_JAVA_OPTIONS] = " ".join(filter(None, options))
    path = os.environ.get("PYTHONPATH", "")
    settings.setdefault("spark.executorEnv.PYTHONPATH", path)
    return settings


def with_slots(master: str, given: Mapping[str, str]) -> str:
    """A local master with a slot more for each resident task: it is a thread, and no core."""
    match = _LOCAL.fullmatch(master)
    count = given.get(RESIDENT_TASKS, "0")
    if match is None or not count.isdecimal() or not int(count):
        return master
    return f"local[{_cores(master) + int(count)}{match['failures'] or ''}]"


def _prepare_workers(master: str) -> None:
    """Workers inherit the environment: the same Python, and this package on its path."""
    if _is_local(master):
        os.environ["PYSPARK_PYTHON"] = worker_python()
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    package = str(Path(__file__).resolve().parents[2])
    paths = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part]
    if package not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([package, *paths])


def _is_local(master: str) -> bool:
    return master == "local" or master.startswith(("local[", "local-cluster["))


def _cores(master: str) -> int:
    inside = master.partition("[")[2].rstrip("]").split(",")[0]
    if inside.isdecimal():
        return max(1, int(inside))
    return (os.cpu_count() or 1) if inside == "*" else 1


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
