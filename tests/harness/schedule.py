"""Which worker runs which tests.

A unit of work is a file, or a single test of a file marked `independent`. One worker owns the Spark
session: it runs all units that use it, because a second session costs ten seconds and a gigabyte.
The other workers run everything else. A worker that has finished its own kind helps with the rest.

Units that wait for Java or for database servers go first, and quick ones last, so that no worker
ends the run alone with a long file. What a unit needs is known to the workers, which collect the
tests, and not to the controller, which schedules them: a worker writes it to a file of the run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

from tests.harness.needs import needs_of, uses_spark

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

PLAN_FILE: Final = "plan.json"
SPARK: Final = "spark"
# A test that says that it takes long is begun early; so is what starts processes.
EXTERNAL_COST_S: Final = 1.0
QUICK_COST_S: Final = 0.02
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
    return EXTERNAL_COST_S if needs_of(item) else QUICK_COST_S


def write_plan(items: Iterable[pytest.Item], folder: Path) -> None:
    """Tell the controller each test's unit, and each unit's cost and whether it uses Spark."""
    units: dict[str, str] = {}
    costs: dict[str, float] = {}
    spark: set[str] = set()
    for item in items:
        unit = units[item.nodeid] = unit_of(item)
        costs[unit] = costs.get(unit, 0.0) + expected_cost_s(item)
        if uses_spark(item):
            spark.add(unit)
    plan = {"units": units, "costs": costs, SPARK: sorted(spark)}
    partial = folder / f"{PLAN_FILE}.part"
    partial.write_text(json.dumps(plan))
    partial.rename(folder / PLAN_FILE)


class LaneScheduling(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Two lanes: the units that use the Spark session, for one worker, and all others."""

    def __init__(self, config: pytest.Config, log: Producer, folder: Path) -> None:
        super().__init__(config, log)
        self._folder = folder
        self._units: dict[str, str] = {}
        self._costs: dict[str, float] = {}
        self._spark_units: set[str] = set()
        self._spark_owner: WorkerController | None = None

    def schedule(self) -> None:
        if self.collection is None and self.collection_is_completed:
            plan = json.loads((self._folder / PLAN_FILE).read_text())
            self._units, self._costs = plan["units"], plan["costs"]
            self._spark_units = set(plan[SPARK])
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self._units.get(nodeid, nodeid.partition("::")[0])

    def _assign_work_unit(self, node: WorkerController) -> None:
        unit = self._choose(node)
        # The base class takes the first of the queue.
        self.workqueue.move_to_end(unit, last=False)
        super()._assign_work_unit(node)

    def _choose(self, node: WorkerController) -> str:
        """The costliest unit of the worker's own lane, or of the other one when that is empty."""
        if self._spark_owner not in self.assigned_work:
            self._spark_owner = node
        spark = [unit for unit in self.workqueue if unit in self._spark_units]
        others = [unit for unit in self.workqueue if unit not in self._spark_units]
        own, other = (spark, others) if node is self._spark_owner else (others, spark)
        return str(max(own or other, key=lambda unit: self._costs.get(unit, 0.0)))
