"""The supervisor's rules under any sequence of events: bounded tries, honest ends, isolation."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.spark.flows.supervisor import Do, Failure, Policy, Supervised

PASSING = Failure("the broker is away", retriable=True)
FINAL = Failure("the code is wrong")
LACKING = Failure("the topic is not there yet", waits=True)
POLICY = Policy(first_pause_s=1.0, longest_pause_s=8.0, max_tries=3)


@given(
    failures=st.integers(1, 10_000),
    chance=st.floats(0, 1),
    first_s=st.floats(0.01, 10),
    longest_s=st.floats(10, 1000),
)
def test_a_pause_is_bounded_and_never_none(
    failures: int, chance: float, first_s: float, longest_s: float
) -> None:
    policy = Policy(first_pause_s=first_s, longest_pause_s=longest_s)
    pause = policy.pause_s(failures, chance)
    assert 0 < pause <= longest_s
    assert pause <= policy.pause_s(failures + 1, chance)


def test_tries_double_their_pauses_and_end() -> None:
    flow = Supervised(POLICY, lambda: 0.0)
    now, pauses = 0.0, []
    while flow.state != "failed":
        flow.failed(PASSING, now)
        if flow.state == "waiting":
            pauses.append(flow.due - now)
            assert flow.tick(flow.due - 0.001) is Do.NOTHING
            now = flow.due
            assert flow.tick(now) is Do.START
    assert pauses == [1.0, 2.0, 4.0]
    assert flow.given_up
    assert flow.failure == PASSING


def test_progress_begins_the_count_anew() -> None:
    flow = Supervised(POLICY, lambda: 0.0)
    for turn in range(50):
        assert flow.started() is Do.NOTHING
        flow.progressed()
        flow.failed(PASSING, float(turn * 100))
        assert flow.due == turn * 100 + 1.0
        assert flow.tick(turn * 100 + 50.0) is Do.START
    assert flow.restarts == 50


def test_a_flow_that_runs_again_has_no_error_but_the_failure_counts() -> None:
    flow = Supervised(POLICY, lambda: 0.0)
    flow.failed(PASSING, 0.0)
    assert flow.tick(100.0) is Do.START
    shown = [flow.failure]
    flow.started()
    shown.append(flow.failure)
    assert shown == [PASSING, None]
    assert flow.failures == 1


def test_what_cannot_be_mended_is_not_tried_again() -> None:
    flow = Supervised(POLICY, lambda: 0.0)
    flow.started()
    flow.failed(FINAL, 0.0)
    assert flow.state == "failed"
    assert not flow.given_up
    assert flow.tick(1e9) is Do.NOTHING


def test_what_waits_for_others_looks_again_at_the_same_pace_and_has_not_failed() -> None:
    flow = Supervised(POLICY, lambda: 0.0)
    now, shown = 0.0, set()
    for _ in range(10 * POLICY.max_tries):
        flow.failed(LACKING, now)
        assert flow.due == now + POLICY.look_s
        shown.add(flow.shown)
        now = flow.due
        assert flow.tick(now) is Do.START
        shown.add(flow.shown)
    assert shown == {"waiting"}
    assert (flow.failures, flow.restarts) == (0, 0)
    flow.started()
    assert (flow.shown, flow.failure) == ("running", None)


def test_who_is_stopped_while_it_waits_has_nothing_to_tell() -> None:
    for looking in (False, True):
        flow = Supervised(POLICY, lambda: 0.0)
        flow.failed(LACKING, 0.0)
        if looking:
            assert flow.tick(100.0) is Do.START
        flow.stop()
        flow.failed(LACKING, 100.0)
        assert (flow.shown, flow.failure) == ("stopped", None)


def test_a_flow_that_is_told_to_stop_while_it_starts_is_stopped_when_it_has() -> None:
    flow = Supervised(POLICY, lambda: 0.0)
    assert flow.stop() is Do.NOTHING
    assert flow.started() is Do.STOP
    flow.ended()
    assert flow.state == "stopped"


def test_a_restart_of_a_running_flow_stops_it_first() -> None:
    flow = Supervised(POLICY, lambda: 0.0)
    flow.started()
    assert flow.restart() is Do.STOP
    assert flow.restart() is Do.NOTHING
    assert flow.ended() is Do.START
    assert flow.state == "starting"


class Life(RuleBasedStateMachine):
    """Events in any order, against a world in which a query runs or does not."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.flow = Supervised(POLICY, lambda: 0.5)
        # Whether somebody is at work for the flow: starting, running or stopping it.
        self.alive = True
        self.started = False
        self.stop_sent = False
        self.tries_since_progress = 0

    def do(self, what: Do) -> None:
        if what is Do.START:
            assert not self.alive, "two queries of one flow at a time"
            self.alive, self.started, self.stop_sent = True, False, False
        elif what is Do.STOP:
            assert self.alive
            assert not self.stop_sent, "stopped twice"
            self.stop_sent = True

    @precondition(lambda self: self.alive and not self.started)
    @rule()
    def starts(self) -> None:
        self.started = True
        self.do(self.flow.started())

    @precondition(lambda self: self.alive and self.started)
    @rule()
    def progresses(self) -> None:
        self.flow.progressed()
        if self.flow.state == "running":
            self.tries_since_progress = 0

    @precondition(lambda self: self.alive)
    @rule(retriable=st.booleans())
    def fails(self, retriable: bool) -> None:
        self.alive = False
        stopping = self.flow.state == "stopping"
        self.tries_since_progress += not stopping
        self.do(self.flow.failed(PASSING if retriable else FINAL, self.now))
        if not retriable and not stopping:
            assert self.flow.state == "failed"

    @precondition(lambda self: self.alive and not self.started)
    @rule()
    def lacks_something(self) -> None:
        self.alive = False
        stopping = self.flow.state == "stopping"
        tried = self.flow.failures
        self.do(self.flow.failed(LACKING, self.now))
        if not stopping:
            assert (self.flow.shown, self.flow.failures) == ("waiting", tried)

    @precondition(lambda self: self.alive and self.started)
    @rule()
    def ends(self) -> None:
        self.alive = False
        self.do(self.flow.ended())

    @rule(seconds=st.floats(0, 20))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.do(self.flow.tick(self.now))

    @rule()
    def is_stopped(self) -> None:
        self.do(self.flow.stop())

    @rule()
    def is_restarted(self) -> None:
        before = self.flow.state
        what = self.flow.restart()
        if what is Do.START:
            self.tries_since_progress = 0
        elif before in {"running", "stopping"}:
            # Counted from when it comes back.
            self.tries_since_progress = -1_000
        self.do(what)

    @invariant()
    def tries_are_bounded(self) -> None:
        assert self.tries_since_progress <= POLICY.max_tries + 1

    @invariant()
    def an_ended_flow_has_nobody_at_work(self) -> None:
        if self.flow.is_ended or self.flow.state == "waiting":
            assert not self.alive
        else:
            assert self.alive

    @invariant()
    def who_failed_says_why(self) -> None:
        if self.flow.state in {"failed", "waiting"}:
            assert self.flow.failure is not None


TestLife = Life.TestCase


def test_a_run_that_has_nothing_to_do_has_come_to_its_end() -> None:
    flow = Supervised(POLICY, lambda: 0.0)
    flow.failed(Failure("no records yet", retriable=True, is_idle=True), 0.0)
    assert (flow.state, flow.failure) == ("finished", None)
