"""When a flow or a sink stops because its records end as dead letters, and when it does not."""

from __future__ import annotations

import pytest

from penstock.spark.flows.dead_letters import (
    LEAST,
    RECENT,
    DeadLetterGuard,
    DeadLetterLimit,
    Remedy,
    TooManyDeadLettersError,
    Verdict,
    described,
)

REMEDY = Remedy("mend it", "send them back")
FIRST = described("orders", 0, 12, 'field total is not double: "a lot"')


def guard(share: float = 0.5, count: int | None = None, *, once: bool = False) -> DeadLetterGuard:
    return DeadLetterGuard(DeadLetterLimit(share, count), REMEDY, once=once)


def batch(judge: DeadLetterGuard, records: int, dead: int) -> None:
    judge.check(records, dead, lambda: FIRST)
    judge.committed(records, dead, lambda: FIRST, is_judged=True)


def test_a_micro_batch_in_which_nothing_can_be_read_is_not_committed() -> None:
    judge = guard()
    with pytest.raises(TooManyDeadLettersError) as caught:
        judge.check(20, 20, lambda: FIRST)
    assert str(caught.value) == (
        "all of the last 20 records are dead letters. The first: orders-0 at offset 12: "
        'field total is not double: "a lot"'
    )
    assert caught.value.advice == "mend it"
    assert not caught.value.retriable


@pytest.mark.parametrize("once", [False, True])
def test_one_poison_record_stops_nothing(once: bool) -> None:
    judge = guard(once=once)
    batch(judge, 1, 1)
    for _ in range(20):
        batch(judge, 1, 0)
    assert judge.at_end() is None


def test_records_that_come_one_by_one_are_judged_together() -> None:
    judge = guard()
    for _ in range(LEAST - 1):
        batch(judge, 1, 1)
    with pytest.raises(TooManyDeadLettersError, match=f"all of the last {LEAST} records"):
        batch(judge, 1, 1)


def test_half_of_the_records_may_be_bad_and_not_more() -> None:
    judge = guard()
    batch(judge, 100, 50)
    with pytest.raises(TooManyDeadLettersError, match="51 of the last 100 records"):
        guard().check(100, 51, lambda: FIRST)


def test_what_was_read_well_long_ago_does_not_count() -> None:
    judge = guard()
    batch(judge, 1_000_000, 0)
    with pytest.raises(TooManyDeadLettersError, match="all of the last 2,000 records"):
        judge.check(2 * RECENT, 2 * RECENT, lambda: FIRST)
    for _ in range(RECENT):
        batch(judge, 1, 0)
    for _ in range(RECENT // 2):
        batch(judge, 1, 1)
    with pytest.raises(TooManyDeadLettersError, match="501 of the last 1,000 records"):
        batch(judge, 1, 1)


def test_a_share_of_one_never_stops() -> None:
    judge = guard(share=1, once=True)
    for _ in range(100):
        batch(judge, 100, 100)
    assert judge.at_end() is None


def test_more_than_so_many_at_once_stop_whatever_their_share() -> None:
    batch(guard(count=1000), 200_000, 1000)
    with pytest.raises(TooManyDeadLettersError, match="1,001 records of one micro-batch"):
        guard(count=1000).check(200_000, 1001, lambda: FIRST)


def test_a_run_with_an_end_says_that_nothing_could_be_read() -> None:
    judge = guard(once=True)
    batch(judge, 1, 1)
    said = judge.at_end()
    assert said is not None
    assert "the only record is a dead letter. The first: orders-0 at offset 12" in str(said)
    assert said.advice == "send them back"
    # Two of two are no accident: they stay unread.
    with pytest.raises(TooManyDeadLettersError, match="all of the last 2 records"):
        guard(once=True).check(2, 2, lambda: FIRST)


def test_what_cannot_be_judged_before_it_is_committed_is_judged_afterwards() -> None:
    known: list[tuple[int | None, int] | None] = [None, (30, 30)]
    verdict = Verdict(guard(), lambda: known.pop(0), lambda: FIRST)
    verdict.before_commit()
    with pytest.raises(TooManyDeadLettersError) as caught:
        verdict.after_commit()
    assert caught.value.advice == "send them back"


def test_an_unknown_number_of_records_is_no_reason_to_stop() -> None:
    judge = guard()
    judge.check(None, 500, lambda: FIRST)


def test_a_micro_batch_of_unknown_size_is_judged_when_it_is_known() -> None:
    judge = guard(once=True)
    verdict = Verdict(judge, lambda: (None, 3), lambda: FIRST)
    verdict.before_commit()
    assert verdict.after_commit() == (None, 3)
    assert judge.at_end() is None
    judge.note(30, 3, FIRST)
    assert judge.at_end() is None
    judge.note(40, 40, "")
    said = judge.at_end()
    assert said is not None
    assert FIRST in str(said)


def test_only_micro_batches_with_records_are_remembered() -> None:
    judge = guard()
    for _ in range(2 * RECENT):
        batch(judge, 0, 0)
    assert not judge._recent
    for _ in range(2 * RECENT):
        batch(judge, 1, 0)
    assert len(judge._recent) <= RECENT
