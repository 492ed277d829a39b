"""Kafka clients that tests leave behind: they are collected before their threads are too many.

A client of librdkafka has about five threads, which wake up all the time until Python collects it.
One in a reference cycle, as of the exception of a failed request and its frames, waits for a full
collection, and those are rare. A worker was seen with 700 threads, which took an eighth of two
processors.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Final

# Some five clients.
THREADS_MORE: Final = 25
_THREADS: Final = Path("/proc/self/task")


def count_threads() -> int:
    """The threads of this process, native ones included; zero where that is not known."""
    return len(os.listdir(_THREADS)) if _THREADS.exists() else 0


class Collector:
    """Collects when there are many more threads than after the last time."""

    def __init__(self, count: Callable[[], int] = count_threads) -> None:
        self._count = count
        self._before = count()

    def look(self) -> None:
        """To be called between tests."""
        threads = self._count()
        if threads > self._before + THREADS_MORE:
            gc.collect()
            threads = self._before = self._count()
        self._before = min(self._before, threads)


COLLECTOR: Final = Collector()
