"""The assignor of tasks: each is active once, loads are even, copies are apart, little moves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.broker.groups.streams.assignor import Candidate, assign
from penstock.broker.groups.streams.tasks import TaskId, Tasks
from tests.harness.profiles import examples

# Members with their processes: some processes have several threads.
processes = st.dictionaries(
    st.text("abcdefgh", min_size=1, max_size=2), st.sampled_from("PQRS"), min_size=1, max_size=8
)
sizes = st.dictionaries(st.sampled_from(("0", "1", "2")), st.integers(1, 9), max_size=3)
copies = st.integers(0, 3)


def result(
    members: Mapping[str, str],
    counts: Mapping[str, int],
    standbys: int = 0,
    held: Mapping[str, Tasks] | None = None,
) -> dict[str, Tasks]:
    candidates = {
        id_: Candidate(process, (held or {}).get(id_, Tasks())) for id_, process in members.items()
    }
    return assign(candidates, counts, {"1", "2"}, standbys)


def every(counts: Mapping[str, int]) -> list[TaskId]:
    return [(part, number) for part, count in counts.items() for number in range(count)]


def check(
    members: Mapping[str, str], counts: Mapping[str, int], standbys: int, told: Mapping[str, Tasks]
) -> None:
    """What holds whatever was before."""
    assert told.keys() == members.keys()
    active = [task for tasks in told.values() for task in tasks.active]
    assert sorted(active) == sorted(every(counts))
    places: dict[TaskId, list[str]] = {}
    for id_, tasks in told.items():
        assert not tasks.warmup
        for task in (*tasks.active, *tasks.standby):
            places.setdefault(task, []).append(members[id_])
    for task, found in places.items():
        assert len(set(found)) == len(found), "a process has a task twice"
        wanted = 1 + (standbys if task[0] in {"1", "2"} else 0)
        assert len(found) == min(wanted, len(set(members.values())))


@given(processes, sizes, copies)
@settings(max_examples=examples(200))
def test_everything_is_assigned_once_and_copies_are_apart(
    members: Mapping[str, str], counts: Mapping[str, int], standbys: int
) -> None:
    check(members, counts, standbys, result(members, counts, standbys))


@given(processes, processes, sizes, sizes, copies, copies)
@settings(max_examples=examples(200))
def test_so_it_is_after_any_change(
    before: Mapping[str, str],
    after: Mapping[str, str],
    old_counts: Mapping[str, int],
    counts: Mapping[str, int],
    old_standbys: int,
    standbys: int,
) -> None:
    held = result(before, old_counts, old_standbys)
    # Tasks that are gone are of no use to anyone.
    known = frozenset(every(counts))
    held = {id_: Tasks(tasks.active & known, tasks.standby & known) for id_, tasks in held.items()}
    check(after, counts, standbys, result(after, counts, standbys, held))


@given(st.integers(1, 6), st.integers(1, 4), sizes)
@settings(max_examples=examples(100))
def test_equal_processes_have_equally_much(
    count: int, threads: int, counts: Mapping[str, int]
) -> None:
    members = {f"{p}-{t}": str(p) for p in range(count) for t in range(threads)}
    loads = [len(tasks.active) for tasks in result(members, counts).values()]
    assert max(loads) - min(loads) <= 1
    per_process = Counter[str]()
    for id_, tasks in result(members, counts).items():
        per_process[members[id_]] += len(tasks.active)
    assert max(per_process.values()) - min(per_process.values()) <= 1


@given(processes, sizes, copies)
@settings(max_examples=examples(100))
def test_nothing_moves_without_need(
    members: Mapping[str, str], counts: Mapping[str, int], standbys: int
) -> None:
    held = result(members, counts)
    assert result(members, counts, 0, held) == held
    with_copies = result(members, counts, standbys, held)
    assert {id_: tasks.active for id_, tasks in with_copies.items()} == {
        id_: tasks.active for id_, tasks in held.items()
    }


def test_a_standby_becomes_active_where_its_state_is() -> None:
    members = {"a": "P", "b": "Q", "c": "R"}
    held = result(members, {"1": 3}, 1)
    (lost,) = held["a"].active
    (copy,) = [id_ for id_, tasks in held.items() if lost in tasks.standby]
    rest = {id_: process for id_, process in members.items() if id_ != "a"}
    told = result(rest, {"1": 3}, 1, held)
    assert lost in told[copy].active


def test_a_new_process_gets_its_share_and_no_more_moves() -> None:
    members = {"a": "P", "b": "Q"}
    held = result(members, {"0": 6})
    told = result({**members, "c": "R"}, {"0": 6}, 0, held)
    assert [len(tasks.active) for tasks in told.values()] == [2, 2, 2]
    assert told["a"].active < held["a"].active
    assert told["b"].active < held["b"].active


def test_equal_numbers_of_subtopologies_come_together() -> None:
    told = result({"a": "P", "b": "Q"}, {"0": 2, "1": 2})
    numbers = [{number for _, number in tasks.active} for tasks in told.values()]
    assert numbers == [{0}, {1}]


def test_processes_are_loaded_by_their_threads() -> None:
    told = result({"a": "P", "b": "P", "c": "Q"}, {"0": 6})
    assert [len(tasks.active) for tasks in told.values()] == [2, 2, 2]


def test_too_few_standbys_are_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """And not for each task: there may be tens of thousands."""
    members = {"a": Candidate("p"), "b": Candidate("q")}
    assign(members, {"0": 3, "1": 2}, {"0"}, 2)
    (record,) = caplog.records
    assert record.getMessage().startswith("3 of 3 tasks with state have fewer than 2 standbys")
