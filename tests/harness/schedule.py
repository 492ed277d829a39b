"""Which worker runs which tests.

A unit of work is a file, or a single test of a file marked `independent`. One worker owns the Spark
session: it runs all units that use it, because a second session costs ten seconds and a gigabyte.
The other workers run everything else. A worker that has finished its own kind helps with the rest;
with Spark one of them, since two sessions keep two processors busy and a third would only be begun.

Units that wait for Java or for database servers go first, and quick ones last, so that no worker
ends the run alone with a long file.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pytest

from tests.harness.needs import needs_of, uses_spark

# A test that says that it takes long is begun early; so is what starts processes.
EXTERNAL_COST_S: Final = 1.0
QUICK_COST_S: Final = 0.02
# Of what only `make proof` runs.
PROOF_COST_S: Final = 300.0
# The share of a test's timeout that it is expected to take.
TIMEOUT_SHARE: Final = 0.1


def unit_of(item: pytest.Item) -> str:
    """The unit that a test belongs to: its file, or itself."""
    if item.get_closest_marker("independent"):
        return item.nodeid
    return item.nodeid.partition("::")[0]


def expected_cost_s(item: pytest.Item) -> float:
    """A guess at a test's duration, good enough to start the long ones first."""
    timeout = item.get_closest_marker("timeout")
    if timeout is not None and timeout.args:
        return float(timeout.args[0]) * TIMEOUT_SHARE
    if item.get_closest_marker("proof"):
        return PROOF_COST_S
    return EXTERNAL_COST_S if needs_of(item) else QUICK_COST_S


def spark_workers(workers: int) -> int:
    """How many of so many workers may have a Spark session, in the end."""
    return max(2, -(-workers // 2))


class Queue:
    """The units that nobody has begun, in two lanes: those that use Spark, and all others."""

    def __init__(self, items: Sequence[pytest.Item], workers: int = 2) -> None:
        self._sessions = spark_workers(workers)
        # Those that have begun a unit that uses Spark.
        self._spark_workers: set[str] = set()
        self._units: dict[str, list[int]] = {}
        self._costs: dict[str, float] = {}
        self._spark_units: set[str] = set()
        self._spark_owner: str | None = None
        for index, item in enumerate(items):
            unit = unit_of(item)
            self._units.setdefault(unit, []).append(index)
            self._costs[unit] = self._costs.get(unit, 0.0) + expected_cost_s(item)
            if uses_spark(item):
                self._spark_units.add(unit)
        self._waiting = list(self._units)

    def __len__(self) -> int:
        return len(self._waiting)

    def next_for(self, worker: str) -> list[int]:
        """The tests of the costliest unit of the worker's own lane, or of the other if that is
        empty; none if nothing is left for it."""
        if not self._waiting:
            return []
        if self._spark_owner is None:
            self._spark_owner = worker
        spark = [unit for unit in self._waiting if unit in self._spark_units]
        others = [unit for unit in self._waiting if unit not in self._spark_units]
        if worker not in self._spark_workers and len(self._spark_workers) >= self._sessions:
            spark = []
        own, other = (spark, others) if worker == self._spark_owner else (others, spark)
        if not own and not other:
            return []
        unit = max(own or other, key=lambda unit: self._costs[unit])
        if unit in self._spark_units:
            self._spark_workers.add(worker)
        self._waiting.remove(unit)
        return self._units[unit]

    def worker_is_gone(self, worker: str, rest: Sequence[int]) -> None:
        """A worker died: the tests that it was given and did not begin wait again."""
        if worker == self._spark_owner:
            self._spark_owner = None
        self._spark_workers.discard(worker)
        for unit, indexes in self._units.items():
            left = [index for index in indexes if index in rest]
            if left:
                self._units[unit] = left
                self._waiting.append(unit)
