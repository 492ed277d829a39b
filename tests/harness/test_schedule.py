"""The plan of a run: units of work, their cost, and who gets which."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness import schedule


def item(nodeid: str, *fixtures: str, **marks: tuple[Any, ...]) -> Any:
    found = {name: SimpleNamespace(args=args) for name, args in marks.items()}
    return SimpleNamespace(nodeid=nodeid, fixturenames=fixtures, get_closest_marker=found.get)


def test_the_plan_names_units_costs_and_what_uses_spark(tmp_path: Path) -> None:
    items = [
        item("a.py::one"),
        item("a.py::two", timeout=(300,)),
        item("b.py::one", "penstock_spark", java=()),
        item("c.py::one", independent=()),
        item("c.py::two", independent=()),
    ]
    schedule.write_plan(items, tmp_path)
    plan = json.loads((tmp_path / schedule.PLAN_FILE).read_text())
    assert plan["units"]["a.py::two"] == "a.py"
    assert plan["units"]["c.py::two"] == "c.py::two"
    assert plan["spark"] == ["b.py"]
    assert plan["costs"]["a.py"] > plan["costs"]["b.py"] > plan["costs"]["c.py::one"]


@pytest.fixture
def scheduling() -> schedule.LaneScheduling:
    made = schedule.LaneScheduling.__new__(schedule.LaneScheduling)
    made._units = {}
    made._costs = {"s1": 1.0, "s2": 5.0, "q": 0.1, "long": 9.0}
    made._spark_units = {"s1", "s2"}
    made._spark_owner = None
    made.assigned_work = {}
    made.workqueue = OrderedDict.fromkeys(["s1", "q", "s2", "long"])
    return made


def test_one_worker_owns_spark_and_long_units_go_first(
    scheduling: schedule.LaneScheduling,
) -> None:
    first, second = object(), object()
    scheduling.assigned_work = {first: {}, second: {}}
    order = []
    for node in (first, second, first, second):
        unit = scheduling._choose(node)
        order.append(unit)
        del scheduling.workqueue[unit]
    assert order == ["s2", "long", "s1", "q"]


def test_a_worker_with_nothing_left_of_its_own_helps(scheduling: schedule.LaneScheduling) -> None:
    owner, other = object(), object()
    scheduling.assigned_work = {owner: {}, other: {}}
    assert scheduling._choose(owner) == "s2"
    for unit in ("q", "long"):
        del scheduling.workqueue[unit]
    assert scheduling._choose(other) == "s2"


def test_spark_has_a_new_owner_when_its_worker_has_died(
    scheduling: schedule.LaneScheduling,
) -> None:
    owner, other = object(), object()
    scheduling.assigned_work = {owner: {}, other: {}}
    scheduling._choose(owner)
    del scheduling.assigned_work[owner]
    assert scheduling._choose(other) == "s2"
