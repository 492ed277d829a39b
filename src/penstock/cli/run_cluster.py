"""A cluster of Spark that does not answer or gives no executors: said, not waited for in silence.

Where no master answers, nothing is started. Where no executor comes, flows are started and wait for
their first task, and so does everybody who waits for the flows. It may still pass, when others
there have finished; so it is said once, and waited on.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from penstock.cli import output
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PATIENCE_S: Final = 15.0
ASK_S: Final = 1.0
CONNECT_S: Final = 5.0
_STANDALONE: Final = "spark://"
NO_EXECUTORS: Final = "the cluster has not given any executor yet"


def check_master(master: str) -> None:
    """PenstockError if none of a standalone cluster's masters answers: Spark itself would say so
    after a minute, in the words of Java."""
    if not master.startswith(_STANDALONE):
        return
    reasons = []
    for place in master.removeprefix(_STANDALONE).split(","):
        host, _, port = place.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
            return
        except ValueError:
            reasons.append(f"{place} is no HOST:PORT")
        except OSError as error:
            reasons.append(f"{place}: {(error.strerror or str(error)).lower()}")
    raise PenstockError(
        f"no Spark answers at {master}: {'; '.join(reasons)}",
        advice="Start its master, or name another with --master; local[*] needs none.",
    )


class Executors:
    """Looked at again and again; tells once that there are none, and once that there are."""

    def __init__(
        self,
        count: Callable[[], int],
        wanted: str,
        tell: Callable[[str], None] = output.warn,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`count` says how many there are, `wanted` what each asks the cluster for."""
        self._count = count
        self._wanted = wanted
        self._tell = tell
        self._clock = clock
        self._began = clock()
        self._next = self._began + PATIENCE_S
        self._told = False
        self._given = False

    def look(self) -> None:
        now = self._clock()
        if self._given or now < self._next:
            return
        self._next = now + ASK_S
        try:
            self._given = self._count() > 0
        except Exception:
            # Java is gone, or just going: told by those who need it.
            return
        if self._given and self._told:
            self._tell("the cluster has given an executor; it goes on")
        elif not self._given and not self._told:
            self._told = True
            self._tell(
                f"{NO_EXECUTORS}, after {now - self._began:.0f} s: perhaps no worker has "
                f"{self._wanted} free. Ask for less with --conf spark.executor.memory=512m or "
                "--conf spark.executor.cores=1, or stop what else runs there; it is waited for"
            )


def executors_of(spark: SparkSession) -> Executors | None:
    """Those of a session; None if it runs in its own process and needs none."""
    context = spark.sparkContext
    if str(context.master).startswith("local"):
        return None
    conf = context.getConf()
    cores = conf.get("spark.executor.cores")
    wanted = f"{conf.get('spark.executor.memory', '1g')} of memory"
    if cores:
        wanted += f" and {cores} cores"
    scala = context._jsc.sc()
    # The driver is one of those that it tells of.
    return Executors(lambda: int(scala.getExecutorMemoryStatus().size()) - 1, wanted)
