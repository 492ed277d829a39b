"""The plan of a run: units of work, their cost, and who gets which."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.harness.schedule import Queue


def item(nodeid: str, *fixtures: str, **marks: tuple[Any, ...]) -> Any:
    found = {name: SimpleNamespace(args=args) for name, args in marks.items()}
    return SimpleNamespace(nodeid=nodeid, fixturenames=fixtures, get_closest_marker=found.get)


def test_a_unit_is_a_file_or_an_independent_test() -> None:
    queue = Queue([
        item("a.py::one"),
        item("b.py::one", independent=()),
        item("a.py::two", timeout=(300,)),
        item("b.py::two", independent=()),
    ])  # fmt: skip
    assert [queue.next_for("gw0") for _ in range(4)] == [[0, 2], [1], [3], []]


LANES = [
    item("quick.py::one"),
    item("s1.py::one", "penstock_spark", java=()),
    item("s2.py::one", "penstock_spark", java=(), timeout=(60,)),
    item("long.py::one", timeout=(90,)),
]
QUICK, S1, S2, LONG = [0], [1], [2], [3]


def test_one_worker_owns_spark_and_long_units_go_first() -> None:
    queue = Queue(LANES)
    assert [queue.next_for(name) for name in ("a", "b", "a", "b")] == [S2, LONG, S1, QUICK]
    assert len(queue) == 0


def test_a_worker_with_nothing_left_of_its_own_helps() -> None:
    queue = Queue(LANES)
    assert queue.next_for("owner") == S2
    assert [queue.next_for("other") for _ in range(3)] == [LONG, QUICK, S1]


def test_no_more_sessions_than_keep_the_processors_busy() -> None:
    queue = Queue([*LANES, item("s3.py::one", "penstock_spark", java=())], workers=3)
    assert [queue.next_for(name) for name in ("a", "b", "b", "c")] == [S2, LONG, QUICK, S1]
    # The third would need a third session.
    assert queue.next_for("b") == []
    assert queue.next_for("c") == [4]
    assert len(queue) == 0


def test_spark_has_a_new_owner_when_its_worker_has_died() -> None:
    queue = Queue([*LANES, item("s2.py::two", "penstock_spark", java=())])
    assert queue.next_for("owner") == [2, 4]
    assert queue.next_for("other") == LONG
    queue.worker_is_gone("owner", [4])
    assert len(queue) == 3
    assert queue.next_for("new") == [4]
    assert queue.next_for("new") == S1
