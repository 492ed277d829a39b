"""Committed offsets against a model: commits, transactions, deletions and restarts at random.

The model is a few dictionaries with one rule each. What the coordinator says must be what the model
says, at every moment and after every restart, and nothing may be left in the journal that nobody
needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from penstock.broker.groups.offsets import NewOffset
from penstock.wire.errors import ErrorCode
from tests.broker.groups.machine import Machine
from tests.harness.profiles import examples

GROUPS = ("g", "h")
TOPICS = ("t", "u")
PARTITIONS = 2
PRODUCERS = (1, 2, 3)

groups = st.sampled_from(GROUPS)
topics = st.sampled_from(TOPICS)
producers = st.sampled_from(PRODUCERS)
offsets = st.dictionaries(
    st.tuples(topics, st.integers(0, PARTITIONS - 1)), st.integers(0, 1_000), min_size=1
)

Place = tuple[str, str, int]


class OffsetsMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine()
        self.made = 0
        for topic in TOPICS:
            self._make(topic)
        # Offset and its place in the order of all commits.
        self.commits = 0
        self.committed: dict[Place, tuple[int, int]] = {}
        self.pending: dict[int, dict[Place, tuple[int, int]]] = {one: {} for one in PRODUCERS}

    def _make(self, topic: str) -> None:
        self.made += 1
        self.machine.topic(topic, PARTITIONS, id_=self.made)

    @rule(group=groups, given=offsets)
    def commit(self, group: str, given: dict[Any, int]) -> None:
        new = [NewOffset(topic, number, at) for (topic, number), at in given.items()]
        assert not any(self.machine.commit(*new, group_id=group))
        for place, offset in given.items():
            self.commits += 1
            self.committed[group, *place] = offset, self.commits

    @rule(producer=producers, group=groups, given=offsets)
    def commit_in_transaction(self, producer: int, group: str, given: dict[Any, int]) -> None:
        new = [NewOffset(topic, number, at) for (topic, number), at in given.items()]
        assert not any(self.machine.commit_in_transaction(producer, *new, group_id=group))
        for place, offset in given.items():
            self.commits += 1
            self.pending[producer][group, *place] = offset, self.commits

    @rule(producer=producers, commit=st.booleans(), cuts=st.lists(st.integers(0, 6), max_size=3))
    def end_transaction(self, producer: int, commit: bool, cuts: Sequence[int] = ()) -> None:
        """Broken off after some entries, and begun again after a restart, as often as one likes."""
        for most in cuts:
            self.machine.finish(producer, commit=commit, most=most)
            self.machine.restart()
        self.machine.finish(producer, commit=commit)
        for place, (offset, turn) in self.pending[producer].items():
            present = self.committed.get(place)
            if commit and (present is None or present[1] <= turn):
                self.committed[place] = offset, turn
        self.pending[producer] = {}

    @rule(group=groups)
    def delete_group(self, group: str) -> None:
        code, entries = self.machine.groups.delete(group)
        self.machine.write(entries)
        known = any(place[0] == group for place in self._places())
        assert (code == ErrorCode.NONE) >= known
        self._forget(lambda place: place[0] == group)

    @rule(group=groups, topic=topics, number=st.integers(0, PARTITIONS - 1))
    def delete_offset(self, group: str, topic: str, number: int) -> None:
        if group in self.machine.groups.groups:
            codes, entries = self.machine.groups.delete_offsets(group, [(topic, number)])
            self.machine.write(entries)
            assert codes == [ErrorCode.NONE]
            self._forget(lambda place: place == (group, topic, number))

    @rule(topic=topics, told=st.booleans())
    def make_topic_anew(self, topic: str, told: bool) -> None:
        """The coordinator may not have been told of it: the broker was killed in between."""
        old = self.machine.catalog.topics[topic]
        self._make(topic)
        if told:
            self.machine.write(self.machine.groups.topic_deleted(old))
        self._forget(lambda place: place[1] == topic)

    @rule()
    def restart(self) -> None:
        self.machine.restart()

    @rule(ms=st.integers(1, 1_000))
    def pass_time(self, ms: int) -> None:
        self.machine.pass_time(ms)

    @rule(ms=st.integers(1, 100_000))
    def set_the_clock_back(self, ms: int) -> None:
        self.machine.now_ms -= ms

    def _places(self) -> set[Place]:
        return set(self.committed).union(*self.pending.values())

    def _forget(self, gone: Any) -> None:
        for places in (self.committed, *self.pending.values()):
            for place in [place for place in places if gone(place)]:
                del places[place]

    @invariant()
    def both_say_the_same(self) -> None:
        coordinator = self.machine.groups
        for group in GROUPS:
            for topic in TOPICS:
                for number in range(PARTITIONS):
                    expected = self.committed.get((group, topic, number))
                    found = coordinator.committed(group, topic, number)
                    assert found == (None if expected is None else expected[0])

    def teardown(self) -> None:
        for producer in PRODUCERS:
            self.end_transaction(producer, commit=True)
        self.both_say_the_same()
        for group in GROUPS:
            self.delete_group(group)
        assert not self.machine.journal
        assert self.machine.groups.offsets.count == 0


TestOffsets = OffsetsMachine.TestCase
TestOffsets.settings = settings(max_examples=examples(50), stateful_step_count=30)
