"""Our capture as a peer: `python -m benchmarks.capture.ours URL TABLE BOOTSTRAP NAME [read]`.

It runs the capture as `penstock capture run` does, with its defaults. Changes are counted when the
log has committed them, durably; the clock begins with the first that is written. The lag of a
change is the time of that commit less the time that the row says it was written at; it is looked
for after the word `stamp` only, since that costs half a microsecond of each change.

With `read` the events are made, counted and thrown away: nothing is written to the log.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from typing import Any, Final

from penstock.capture.delivery.capture import Capture
from penstock.capture.delivery.config import CaptureConfig
from penstock.capture.delivery.process import settle
from penstock.capture.delivery.writing import make_writer
from penstock.client.connection import Cluster

MOST_LAGS: Final = 4_000_000
STAMP: Final = b'"written_us":'


def now_us() -> int:
    return time.time_ns() // 1000


def cpu_us() -> int:
    used = os.times()
    return int((used.user + used.system) * 1e6)


class Counts:
    """What was delivered; two threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._written = 0
        self._stamps: list[int] = []
        self.is_stamping = False
        self.clear()

    def clear(self) -> None:
        with self._lock:
            self._count = self._first_us = self._last_us = self._first_cpu_us = 0
            self._lags: list[int] = []

    def wrote(self, values: Any) -> None:
        if not self._count and not self._written:
            self._first_us, self._first_cpu_us = now_us(), cpu_us()
        # Tombstones are no changes.
        nulls = values.count(None) if isinstance(values, list) else values.null_count
        self._written += len(values) - nulls
        if not self.is_stamping:
            return
        for value in values if isinstance(values, list) else values.to_pylist():
            if value is None:
                continue
            # What the row is now comes after what it was.
            at = value.rfind(STAMP)
            digits = value[at + len(STAMP) : at + len(STAMP) + 16]
            if at >= 0 and digits.isdigit():
                self._stamps.append(int(digits))

    def committed(self) -> None:
        with self._lock:
            self._count += self._written
            if self._written:
                self._last_us = now = now_us()
                if len(self._lags) < MOST_LAGS:
                    self._lags += [now - stamp for stamp in self._stamps]
            self._written = 0
            self._stamps = []

    def report(self) -> str:
        with self._lock:
            lags = sorted(self._lags)
            told = {
                "count": self._count,
                "first_us": self._first_us,
                "last_us": self._last_us,
                "cpu_us": cpu_us(),
                "first_cpu_us": self._first_cpu_us,
                "lag_p50_us": lags[len(lags) // 2] if lags else -1,
                "lag_p99_us": lags[int(len(lags) * 0.99)] if lags else -1,
            }
        return json.dumps(told)


class Counted:
    """The capture's writer, with what goes through it counted."""

    def __init__(self, writer: Any, prefix: str, counts: Counts) -> None:
        self._writer = writer
        self._prefix = f"{prefix}."
        self._counts = counts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)

    def write(self, topic: str, keys: Any, values: Any, **more: Any) -> None:
        if topic.startswith(self._prefix):
            self._counts.wrote(values)
        self._writer.write(topic, keys, values, **more)

    def commit(self) -> None:
        self._writer.commit()
        self._counts.committed()


class Dropped(Counted):
    """A writer that only counts."""

    def begin(self) -> None:
        pass

    def write(self, topic: str, keys: Any, values: Any, **more: Any) -> None:
        if topic.startswith(self._prefix):
            self._counts.wrote(values)

    def commit(self) -> None:
        self._counts.committed()

    def abort(self) -> None:
        pass


def main() -> None:
    url, table, bootstrap, name, *more = sys.argv[1:]
    kind = Dropped if more == ["read"] else Counted
    prefix = "bench"
    config = CaptureConfig.from_mapping(
        f"bench_{name[-6:].lower()}", {"url": url, "include": [table], "prefix": prefix}
    )
    counts, stop = Counts(), threading.Event()

    def counted(cluster: Cluster, settings: CaptureConfig) -> Any:
        return kind(make_writer(cluster, settings), prefix, counts)

    capture = Capture(config, bootstrap, make_writer=counted)

    def run() -> None:
        try:
            capture.run(stop)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
            os._exit(1)

    settle()
    thread = threading.Thread(target=run)
    thread.start()
    for line in sys.stdin:
        if line.strip() == "clear":
            counts.clear()
        counts.is_stamping |= line.strip() == "stamp"
        print(counts.report(), flush=True)
    stop.set()
    thread.join()


if __name__ == "__main__":
    main()
