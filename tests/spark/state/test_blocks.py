"""Whether rows may be late, told from blocks of them: never a late one without a warning."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.spark.state.time import Seen, Times

LATENESS_US = 10
SIZE = 4


def is_late_somewhere(times: list[int], before: int | None) -> bool:
    reached = before
    for at in times:
        if reached is not None and at < reached - LATENESS_US:
            return True
        reached = at if reached is None else max(reached, at)
    return False


@given(
    st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=30), min_size=1, max_size=3),
    st.one_of(st.none(), st.integers(0, 60)),
)
def test_no_late_row_is_overlooked(partitions: list[list[int]], before: int | None) -> None:
    known = Times({0: {("t", number): before for number in range(len(partitions))}})
    blocks = [
        Seen(0, ("t", number), min(rows[begin : begin + SIZE]), max(rows[begin : begin + SIZE]))
        for number, rows in enumerate(partitions)
        for begin in range(0, len(rows), SIZE)
    ]
    if any(is_late_somewhere(rows, before) for rows in partitions):
        assert known.may_any_be_late(blocks, LATENESS_US)


def test_a_long_micro_batch_in_order_has_no_late_rows() -> None:
    blocks = [Seen(0, ("t", 0), at, at + 9) for at in range(0, 100_000, 10)]
    assert Times().may_be_late(Seen(0, ("t", 0), 0, 100_000), LATENESS_US)
    assert not Times().may_any_be_late(blocks, LATENESS_US)
