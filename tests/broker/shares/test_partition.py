"""The state machine of a share partition, alone: against a model, and case by case."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.broker.shares.partition import (
    ACCEPT,
    ACQUIRED,
    AVAILABLE,
    DONE,
    DYING,
    LIMIT_REACHED,
    MAX_RUNS,
    REJECT,
    REJECTED,
    RELEASE,
    RENEW,
    Acquisition,
    NotAcquiredError,
    SharePartition,
    ShareRules,
)
from tests.broker.shares.naive import NaivePartition
from tests.harness.profiles import examples

MEMBERS = ("a", "b", "c")
RULES = ShareRules(delivery_limit=3, lock_ms=100, max_locks=1_000, dead_letters=True)
members = st.sampled_from(MEMBERS)
offsets = st.integers(0, 60)
lengths = st.integers(1, 12)


class AgainstModel(RuleBasedStateMachine):
    """Whatever is done to both, they agree on every record."""

    @initialize(dead_letters=st.booleans(), limit=st.integers(1, 6))
    def begin(self, dead_letters: bool, limit: int) -> None:
        self.share_rules = ShareRules(
            delivery_limit=limit, lock_ms=100, max_locks=1_000, dead_letters=dead_letters
        )
        self.real = SharePartition(0)
        self.model = NaivePartition(self.share_rules)
        self.now_ms = 0

    @rule(member=members, length=lengths, budget=st.integers(1, 15))
    def deliver(self, member: str, length: int, budget: int) -> None:
        first = self.real.next_offset(self.share_rules)
        assert first is not None
        wanted = Acquisition(member, self.now_ms + 100, budget)
        count = self.real.acquire(wanted, first, first + length - 1, self.share_rules)
        taken = [at for low, high, _ in wanted.taken for at in range(low, high + 1)]
        assert count == len(taken) <= budget
        # What could not be delivered any more was given up instead.
        for offset in range(self.model.start, first + length):
            item = self.model.items.get(offset)
            if item is None or item.state != AVAILABLE or offset in taken:
                continue
            if self.real.state_at(offset) in (DYING, DONE):
                assert item.count >= self.share_rules.delivery_limit
                self.model._die(item, LIMIT_REACHED)
        self.model.took(member, self.now_ms + 100, taken)
        self.model._advance()
        for low, _high, times in wanted.taken:
            assert self.model.items[low].count == times

    @rule(first=offsets, length=lengths)
    def skip(self, first: int, length: int) -> None:
        first = max(self.real.start + first % 8, 0)
        self.real.skip(first, first + length - 1)
        self.model.skip(first, first + length - 1)

    @rule(
        member=members,
        place=offsets,
        length=lengths,
        kinds=st.lists(
            st.sampled_from([0, ACCEPT, RELEASE, REJECT, RENEW]), min_size=1, max_size=12
        ),
    )
    def acknowledge(self, member: str, place: int, length: int, kinds: list[int]) -> None:
        first = self.real.start + place % 20
        held = [run for run in self.real.runs if run.state == ACQUIRED and run.member == member]
        if held and place % 3:
            # Mostly something that the member has.
            run = held[place % len(held)]
            first, length = run.first, min(length, run.size)
        kinds = (kinds * length)[:length] if len(kinds) > 1 else kinds
        fits = self.model.holds(member, first, first + length - 1)
        try:
            self.real.acknowledge(
                member, [(first, first + length - 1, kinds)], self.now_ms, self.share_rules
            )
        except NotAcquiredError:
            assert not fits
            return
        assert fits
        for at in range(length):
            kind = kinds[at] if len(kinds) > 1 else kinds[0]
            self.model.answer(first + at, kind, self.now_ms)
        self.model._advance()

    @rule(step=st.integers(1, 150))
    def pass_time(self, step: int) -> None:
        self.now_ms += step
        self.real.expire(self.now_ms, self.share_rules)
        self.model.expire(self.now_ms)

    @rule(member=members)
    def leave(self, member: str) -> None:
        self.real.release(member, self.share_rules)
        self.model.release(member)

    @precondition(lambda self: self.real.sizes[DYING])
    @rule(cut_short=st.booleans())
    def bury(self, cut_short: bool) -> None:
        run = self.real.dying()[0]
        first, last = run.first, (run.first + run.last) // 2 if cut_short else run.last
        self.real.bury(first, last)
        self.model.bury(first, last)

    @rule(step=st.integers(0, 6))
    def cut(self, step: int) -> None:
        offset = self.real.start + step
        self.real.cut(offset)
        self.model.cut(offset)

    @rule()
    def restart(self) -> None:
        self.real = SharePartition.from_value(self.real.to_value())
        self.model.restored()
        # What was never delivered is forgotten at the end.
        while self.model.end > self.real.end:
            item = self.model.items.pop(self.model.end - 1)
            assert (item.state, item.count) == (AVAILABLE, 0)
            self.model.end -= 1

    @invariant()
    def agree(self) -> None:
        real, model = self.real, self.model
        assert (real.start, real.end) == (model.start, model.end)
        at = real.start
        sizes = [0, 0, 0, 0]
        for before, run in zip([None, *real.runs], real.runs, strict=False):
            assert run.first == at
            assert before is None or not before.is_like(run)
            at = run.last + 1
            sizes[run.state] += run.size
            for offset in range(run.first, run.last + 1):
                item = model.items[offset]
                assert item.state == run.state
                if run.state != DONE:
                    assert (item.count, item.member) == (run.count, run.member)
                    assert item.deadline_ms == run.deadline_ms
                if run.state == DYING:
                    assert item.reason == run.reason
        assert at == real.end
        assert sizes == real.sizes


TestAgainstModel = AgainstModel.TestCase
TestAgainstModel.settings = settings(max_examples=examples(50), stateful_step_count=30)


def acquired(share: SharePartition, member: str, first: int, last: int, until: int = 100) -> None:
    wanted = Acquisition(member, until, 10_000)
    share.acquire(wanted, first, last, RULES)
    assert wanted.records == last - first + 1


def test_a_slow_record_holds_nobody_up() -> None:
    share = SharePartition(0)
    acquired(share, "slow", 0, 0)
    for first in range(1, 100_001, 100):
        acquired(share, "a", first, first + 99)
        share.acknowledge("a", [(first, first + 99, [ACCEPT])], 0, RULES)
    assert share.start == 0
    assert len(share.runs) == 2
    assert share.locked == 1
    share.acknowledge("slow", [(0, 0, [ACCEPT])], 0, RULES)
    assert (share.start, share.runs) == (100_001, [])


def test_answers_are_taken_all_or_none() -> None:
    share = SharePartition(0)
    acquired(share, "a", 0, 9)
    acquired(share, "b", 10, 19)
    with pytest.raises(NotAcquiredError):
        share.acknowledge("a", [(0, 4, [ACCEPT]), (8, 12, [ACCEPT])], 0, RULES)
    assert share.sizes[ACQUIRED] == 20


@pytest.mark.parametrize("offsets", [(5, 5), (0, 5), (8, 12), (30, 30), (18, 25)])
def test_only_what_is_held_can_be_answered_for(offsets: tuple[int, int]) -> None:
    share = SharePartition(5)
    acquired(share, "b", 5, 7)
    acquired(share, "a", 8, 19)
    share.acknowledge("a", [(10, 11, [ACCEPT])], 0, RULES)
    with pytest.raises(NotAcquiredError):
        share.acknowledge("a", [(*offsets, [ACCEPT])], 0, RULES)


def test_an_answer_for_what_is_finished_with_all_before_it_is_no_mistake() -> None:
    share = SharePartition(0)
    acquired(share, "a", 0, 9)
    share.acknowledge("a", [(0, 4, [ACCEPT])], 0, RULES)
    for member in "ab":
        share.acknowledge(member, [(0, 4, [RELEASE])], 0, RULES)
    share.acknowledge("a", [(3, 9, [ACCEPT])], 0, RULES)
    assert share.start == 10


def test_an_answer_for_what_the_log_has_dropped_is_no_mistake() -> None:
    share = SharePartition(0)
    acquired(share, "a", 0, 9)
    share.cut(5)
    share.acknowledge("a", [(0, 9, [ACCEPT])], 0, RULES)
    assert share.start == 10


def test_a_lock_ends_and_the_record_is_free_again_with_its_count() -> None:
    share = SharePartition(0)
    acquired(share, "a", 0, 9, until=50)
    assert not share.expire(49, RULES)
    assert share.expire(50, RULES)
    wanted = Acquisition("b", 200, 100)
    share.acquire(wanted, 0, 9, RULES)
    assert wanted.taken == [(0, 9, 2)]


def test_renewing_moves_the_end_of_the_lock() -> None:
    share = SharePartition(0)
    acquired(share, "a", 0, 9, until=50)
    share.acknowledge("a", [(3, 4, [RENEW])], 40, RULES)
    share.expire(60, RULES)
    assert share.sizes == [8, 2, 0, 0]
    assert share.next_deadline_ms() == 140


def test_a_record_is_given_up_at_the_limit_or_when_rejected() -> None:
    share = SharePartition(0)
    for _ in range(RULES.delivery_limit):
        acquired(share, "a", 0, 0)
        share.acknowledge("a", [(0, 0, [RELEASE])], 0, RULES)
    acquired(share, "a", 1, 1)
    share.acknowledge("a", [(1, 1, [REJECT])], 0, RULES)
    assert [(run.first, run.reason) for run in share.dying()] == [
        (0, LIMIT_REACHED),
        (1, REJECTED),
    ]
    # Over a restart too.
    again = SharePartition.from_value(share.to_value())
    assert again.dying() == share.dying()
    again.bury(0, 1)
    assert again.start == 2


def test_without_a_dead_letter_topic_it_is_finished() -> None:
    share = SharePartition(0)
    acquired(share, "a", 0, 4)
    share.acknowledge("a", [(0, 4, [REJECT])], 0, replace(RULES, dead_letters=False))
    assert share.start == 5


def test_records_that_fail_together_are_delivered_apart() -> None:
    """Of a batch with one bad record, only that one reaches the limit."""
    rules = replace(RULES, delivery_limit=5)
    share = SharePartition(0)
    bad, rounds = 13, 0
    while share.start < 32 and rounds < 200:
        rounds += 1
        first = share.next_offset(rules)
        assert first is not None
        wanted = Acquisition("a", 100, 100)
        share.acquire(wanted, first, 31, rules)
        taken = [at for low, high, _ in wanted.taken for at in range(low, high + 1)]
        if bad in taken:
            share.release("a", rules)
        else:
            for low, high, _ in wanted.taken:
                share.acknowledge("a", [(low, high, [ACCEPT])], 0, rules)
        if share.sizes[DYING]:
            assert [(run.first, run.last) for run in share.dying()] == [(bad, bad)]
            share.bury(bad, bad)
    assert share.start == 32


def test_no_more_locks_than_allowed() -> None:
    rules = replace(RULES, max_locks=10)
    share = SharePartition(0)
    acquired(share, "a", 0, 9)
    assert share.next_offset(rules) is None
    share.acknowledge("a", [(4, 4, [ACCEPT])], 0, rules)
    assert share.next_offset(rules) == 10


def test_how_finely_records_are_divided_is_bounded() -> None:
    share = SharePartition(0)
    rules = replace(RULES, max_locks=100_000)
    while (first := share.next_offset(rules)) is not None:
        acquired(share, "a", first, first + 1)
        share.acknowledge("a", [(first, first, [ACCEPT])], 0, rules)
    assert len(share.runs) in (MAX_RUNS, MAX_RUNS + 1)


def test_beginning_anew_goes_both_ways() -> None:
    share = SharePartition(50)
    acquired(share, "a", 50, 59)
    share.restart(10)
    assert share.next_offset(RULES) == 10
    acquired(share, "a", 10, 10)
    with pytest.raises(NotAcquiredError):
        share.acknowledge("a", [(50, 59, [ACCEPT])], 0, RULES)
    assert share.lag(60) == 50
