"""Heartbeats: records in the log that only say that time has passed.

A partition without records holds back the watermark, for nobody knows what its next record says.
With `idle` a flow writes a heartbeat into each partition that had no news for so long, into the log
and not only into its own memory: a replay finds them at the same places and closes the same windows
there. Several flows that read a topic do not write more of them: the first one's is news to the
others.

A heartbeat is a record without a value, with the time as its timestamp, and a key that says so in
the format of the topic: whoever reads change events with a converter must be able to read it too
(see `penstock.spark.reading.heartbeat_keys`). To compacted topics and tables it is the deletion of
a row that nobody has. No flow shows it to its function, or puts it among its dead letters.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Final

from penstock.client.connection import Cluster
from penstock.client.metadata import LATEST, Metadata, offsets
from penstock.client.table_schemas import SCHEMAS_TOPIC
from penstock.client.writer import LogWriter
from penstock.errors import PenstockError
from penstock.spark.flows.inputs import Place
from penstock.spark.reading.heartbeat_keys import (
    AVRO_HEARTBEAT,
    HEARTBEAT,
    schema_record,
)

log = logging.getLogger(__name__)

HEADER: Final = "penstock.heartbeat"
# How often in the time of idleness it is looked, and at least and at most how long a look waits.
_LOOKS: Final = 4
_LEAST_S: Final = 0.1
_MOST_S: Final = 10.0
# The manager waits meanwhile; the thread ends by itself in any case.
_JOIN_S: Final = 1.0

_Partition = tuple[str, int]


class Idleness:
    """Which partitions have had no news for too long. Pure: ends of the log in, names out."""

    def __init__(self, idle_s: Mapping[str, float]) -> None:
        self._idle_s = idle_s
        self._known: dict[_Partition, tuple[int, float]] = {}

    def look(self, ends: Mapping[_Partition, int], now_s: float) -> list[_Partition]:
        """Those that are due, after a look at where each ends."""
        due = []
        for part, end in sorted(ends.items()):
            known = self._known.get(part)
            if known is None or known[0] != end:
                self._known[part] = (end, now_s)
            elif now_s - known[1] >= self._idle_s[part[0]]:
                due.append(part)
                # Its own heartbeat is news as well, if it is written.
                self._known[part] = (end, now_s)
        return due


class Heartbeats:
    """A thread that keeps the streams of a flow awake, until it is closed."""

    def __init__(
        self,
        place: Place,
        idle_us: Mapping[str, int],
        *,
        avro: Collection[str] = (),
        clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000,
    ) -> None:
        """`avro` are those of the topics whose records are Avro."""
        self._place = place
        self._idle = Idleness({topic: us / 1e6 for topic, us in idle_us.items()})
        self._topics = sorted(idle_us)
        self._avro = frozenset(avro)
        self._clock_ms = clock_ms
        self._pause_s = max(_LEAST_S, min(_MOST_S, min(idle_us.values()) / 1e6 / _LOOKS))
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeats", daemon=True)
        self.written = 0

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(_JOIN_S)

    def _run(self) -> None:
        told = ""
        while not self._closed.is_set():
            try:
                with self._place.cluster() as cluster:
                    while not self._closed.wait(self._pause_s):
                        self.beat(cluster)
                        told = ""
            except (PenstockError, OSError) as error:
                if str(error) != told:
                    log.warning("no heartbeats into %s: %s", ", ".join(self._topics), error)
                told = str(error)
                self._closed.wait(_MOST_S)

    def beat(self, cluster: Cluster) -> int:
        """One look, and heartbeats where they are due; how many there were."""
        metadata = Metadata(cluster)
        wanted = {(topic, part): LATEST for topic in self._topics
                  for part in metadata.partitions(topic)}  # fmt: skip
        ends = offsets(cluster, wanted, isolation="read_uncommitted", metadata=metadata)
        due = self._idle.look(ends, time.monotonic())
        if due:
            now_ms = self._clock_ms()
            headers = [[(HEADER, str(now_ms).encode())]]
            in_avro = any(topic in self._avro for topic, _ in due)
            with LogWriter(cluster) as writer:
                if in_avro and metadata.topics([SCHEMAS_TOPIC]):
                    # Where captures keep theirs; the topic is compacted.
                    key, value = schema_record().encode()
                    writer.write(SCHEMAS_TOPIC, [key], [value], partition=0)
                for topic, part in due:
                    key = AVRO_HEARTBEAT if topic in self._avro else HEARTBEAT
                    writer.write(
                        topic, [key], [None], timestamps_ms=now_ms, headers=headers,
                        partition=part,
                    )  # fmt: skip
        self.written += len(due)
        return len(due)
