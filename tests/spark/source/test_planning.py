"""Sharing a limit and cutting ranges: nothing lost, nothing twice, never more than allowed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.spark.source.options import Place
from penstock.spark.source.planning import TOGETHER_MAX, Range, limited, tasks

places = st.tuples(st.sampled_from(("a", "b", "c")), st.integers(0, 9))
offsets = st.integers(0, 2**40)
sizes = st.one_of(st.integers(0, 30), st.integers(0, 2**32))
logs = st.dictionaries(places, st.tuples(offsets, sizes), max_size=20)


def as_ranges(found: dict[Place, tuple[int, int]]) -> list[Range]:
    return [Range(*place, start, start + size) for place, (start, size) in found.items()]


@given(logs, st.integers(1, 2**33))
def test_a_limit_is_kept_and_used_up(found: dict[Place, tuple[int, int]], limit: int) -> None:
    begins = {place: start for place, (start, _) in found.items()}
    ends = {place: start + size for place, (start, size) in found.items()}
    shared = limited(limit, begins, ends)
    assert shared.keys() == ends.keys()
    assert all(begins[place] <= shared[place] <= ends[place] for place in ends)
    taken = sum(shared[place] - begins[place] for place in ends)
    there = sum(size for _, size in found.values())
    assert taken <= min(limit, there)
    # Rounding leaves at most one offset per partition for the next time.
    assert taken >= min(limit, there) - len(ends)
    if limit >= len(ends):
        assert all(shared[place] > begins[place] for place in ends if found[place][1])


@given(st.integers(2, 12), st.data())
def test_a_small_limit_lets_everyone_have_a_turn(count: int, data: st.DataObject) -> None:
    limit = data.draw(st.integers(1, count))
    at: dict[Place, int] = {("t", number): 0 for number in range(count)}
    ends = dict.fromkeys(at, 1000)
    for _ in range(2 * count):
        at = limited(limit, at, ends)
    assert all(at.values())


@given(
    logs,
    st.none() | st.integers(1, 40),
    st.none() | st.integers(2**20, 2**30),
)
def test_tasks_cover_exactly_what_was_asked_for(
    found: dict[Place, tuple[int, int]], min_partitions: int | None, max_records: int | None
) -> None:
    ranges = as_ranges(found)
    planned = tasks(ranges, min_partitions=min_partitions, max_records=max_records)
    pieces = sorted(
        (item for task in planned for item in task), key=lambda it: (it.place, it.start)
    )
    for item in ranges:
        at = item.start
        for piece in (piece for piece in pieces if piece.place == item.place):
            assert piece.start == at
            assert piece.end > piece.start
            at = piece.end
        assert at == item.end
    for task in planned:
        assert len({item.place for item in task}) == len(task)
        size = sum(item.size for item in task)
        if len(task) > 1:
            assert size <= TOGETHER_MAX
        if max_records is not None:
            assert size <= max_records


@given(st.integers(1, 64), st.integers(1, 8))
def test_large_ranges_are_cut_into_as_many_tasks_as_asked_for(wanted: int, partitions: int) -> None:
    ranges = [Range("t", number, 100, 1_000_100) for number in range(partitions)]
    planned = tasks(ranges, min_partitions=wanted)
    assert len(planned) >= min(wanted, max(partitions, wanted - partitions))
    assert len(planned) <= max(partitions, wanted + partitions)


def test_small_ranges_share_a_task() -> None:
    ranges = [Range("t", number, 0, 100) for number in range(50)]
    assert len(tasks(ranges)) == 1
    assert len(tasks(ranges, min_partitions=8)) == 8
    assert tasks([]) == []
