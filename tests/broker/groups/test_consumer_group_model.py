"""Consumer groups under everything that can happen to them, in any order.

Members join, beat, lose answers, dawdle, change their minds, leave, fall silent and come back;
topics come, grow and go; the broker is restarted. At every moment no partition is read by two
members, whatever the clients have been told. And whenever everybody has done what it was told,
each partition that somebody wants has a reader.
"""

from __future__ import annotations

from contextlib import suppress
from itertools import combinations, count
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from penstock.broker.catalog import ApiError
from penstock.wire.errors import ErrorCode
from tests.broker.groups.readers import INTERVAL_MS, Reader, World, settle
from tests.harness.profiles import examples

NAMES = ("a", "b", "c")
PATTERNS = (None, "a|b", "[bc]", ".*", "x+")
# Mostly the same topics, so that members have something to share.
wishes = st.one_of(
    st.sampled_from([(frozenset("ab"), None), (frozenset("a"), None)]),
    st.tuples(st.frozensets(st.sampled_from(NAMES)), st.sampled_from(PATTERNS)),
)
which = st.integers(0, 11)
# How a heartbeat is sent and taken: mostly without haste.
MANNERS = tuple(
    frozenset(words.split())
    for words in ("", "", "slow", "slow", "slow", "anew", "slow anew", "lost", "slow lost")
)


class ConsumerGroups(RuleBasedStateMachine):
    """One group, its clients and its topics."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.world.make("a", 3)
        self.world.make("b", 2)
        self.readers: list[Reader] = []
        self.ids = count(1)
        for _ in range(2):
            self.join((frozenset("ab"), None), None, None)

    def one(self, at: int) -> Reader:
        return self.readers[at % len(self.readers)]

    # ---- members -----------------------------------------------------------------------------

    @precondition(lambda self: len(self.readers) < 6)
    @rule(
        wish=wishes,
        instance_id=st.sampled_from((None, None, "i", "j")),
        assignor=st.sampled_from((None, "range", "uniform")),
    )
    def join(
        self, wish: tuple[frozenset[str], str | None], instance_id: str | None, assignor: str | None
    ) -> None:
        one = Reader(self.world, f"m{next(self.ids)}", *wish, instance_id, assignor)
        try:
            one.beat()
        except ApiError as error:
            if error.code != ErrorCode.UNRELEASED_INSTANCE_ID:
                raise
            members = self.world.consumers.members.values()
            assert any(member.profile.instance_id == instance_id for member in members)
        else:
            self.readers.append(one)

    @precondition(lambda self: self.readers)
    @rule(beats=st.lists(st.tuples(which, st.sampled_from(MANNERS)), min_size=1, max_size=12))
    def beat(self, beats: list[tuple[int, frozenset[str]]]) -> None:
        """Several, for most of what can go wrong takes more than one."""
        for at, manner in beats:
            if not self.readers:
                return
            one = self.one(at)
            one.slow = "slow" in manner
            if "anew" in manner:
                one.said = None
            self.send(one, "lost" in manner)
            self.nobody_reads_what_another_member_reads()

    def send(self, one: Reader, lose_answer: bool = False) -> None:
        """A heartbeat; one whose instance id has gone to another member ends there."""
        try:
            one.beat(lose_answer=lose_answer)
        except ApiError as error:
            if error.code not in (ErrorCode.FENCED_INSTANCE_ID, ErrorCode.UNRELEASED_INSTANCE_ID):
                raise
            self.readers.remove(one)

    @precondition(lambda self: self.readers)
    @rule(at=which)
    def finish_reading(self, at: int) -> None:
        self.one(at).settle()

    @precondition(lambda self: self.readers)
    @rule(at=which, wish=wishes)
    def change_mind(self, at: int, wish: tuple[frozenset[str], str | None]) -> None:
        one = self.one(at)
        one.names, one.regex = wish[0], wish[1] or ""
        one.said = None
        self.send(one)

    @precondition(lambda self: self.readers)
    @rule(at=which, comes_back=st.booleans())
    def leave(self, at: int, comes_back: bool) -> None:
        one = self.one(at)
        self.readers.remove(one)
        if one.id in self.world.consumers.members:
            if comes_back and one.instance_id is not None:
                one.go_away()
            else:
                one.leave()

    @precondition(lambda self: self.readers)
    @rule(at=which)
    def die(self, at: int) -> None:
        """It is not heard of any more, and reads nothing."""
        self.readers.remove(self.one(at))

    # ---- the world ---------------------------------------------------------------------------

    @rule(ms=st.sampled_from((100, INTERVAL_MS, INTERVAL_MS, 30_000)))
    def pass_time(self, ms: int) -> None:
        self.world.pass_time(ms)

    @rule(name=st.sampled_from(NAMES), partitions=st.integers(1, 6))
    def change_topic(self, name: str, partitions: int) -> None:
        topic = self.world.catalog.topics.get(name)
        if topic is None:
            self.world.make(name, partitions)
        elif partitions > topic.partitions:
            self.world.grow(name, partitions)
        else:
            self.world.delete(name)

    @rule()
    def restart(self) -> None:
        self.world.restart()

    @precondition(lambda self: self.readers)
    @rule(at=which)
    def fail_to_write(self, at: int) -> None:
        """The journal fails: what a heartbeat would change is not written, and nobody is told."""
        one = self.one(at)
        group = self.world.groups.groups.get("g")
        if group is not None and one.id in self.world.consumers.members:
            with suppress(ApiError):
                self.world.consumers.heartbeat(
                    one._next_beat(), self.world.now_ms, self.world.elapsed_ms
                )
        one.said = None
        self.world.restart()

    def settle_all(self) -> None:
        """Everybody does what it is told for long enough that the dead are found out."""
        if not self.readers:
            return
        for _ in range(45_000 // INTERVAL_MS + 1):
            for one in list(self.readers):
                one.slow = False
                one.settle()
                self.send(one)
            self.world.pass_time(INTERVAL_MS)
        settle(self.readers)
        if self.readers:
            self.check_settled()

    def check_settled(self) -> None:
        group = self.world.consumers
        assert group.state == "Stable"
        wanted = {name for name in self.world.catalog.topics if group.subscribed_to(name)}
        reads = [partition for one in self.readers for partition in one.reads]
        assert sorted(reads) == sorted(self.world.all_of(*wanted))

    # ---- what always holds -------------------------------------------------------------------

    @invariant()
    def nobody_reads_what_another_member_reads(self) -> None:
        group = self.world.groups.groups.get("g")
        if group is None:
            return
        # Who was removed does not know it yet; what it does is fenced by its epoch.
        members = self.world.consumers.members
        alive = [
            one
            for one in self.readers
            if one.id in members
            and one.epoch
            in (members[one.id].standing.epoch, members[one.id].standing.previous_epoch)
        ]
        for one, other in combinations(alive, 2):
            assert not one.reads & other.reads, (one, other)
            assert not one.told & other.told, (one, other)

    @invariant()
    def targets_are_exclusive(self) -> None:
        if self.world.groups.groups.get("g") is None:
            return
        seen: set[Any] = set()
        for member in self.world.consumers.members.values():
            assert not seen & member.standing.target
            seen |= member.standing.target
        owned: set[Any] = set()
        for member in self.world.consumers.members.values():
            mine = member.standing.assigned | member.standing.revoking
            assert not owned & mine
            owned |= mine
            assert all(self.world.consumers.owners[one] == member.id for one in mine)
        assert self.world.consumers.owners.keys() == owned

    def teardown(self) -> None:
        self.settle_all()


TestConsumerGroups = ConsumerGroups.TestCase
TestConsumerGroups.settings = settings(max_examples=examples(66), stateful_step_count=40)
