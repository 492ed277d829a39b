"""Members of consumer and share groups to play, beside `machine`: one heartbeat at a time.

A `Reader` does what a client does: it joins, reads what it is told to, gives up what it is told to
when it has finished with it, and joins again when it is fenced. Its answers may get lost. `reads`
is what it reads right now, whatever the broker believes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from penstock.broker.catalog import ApiError, Topic
from penstock.broker.groups.assigned import AssignedGroup
from penstock.broker.groups.assignors import Partitions
from penstock.broker.groups.consumer import ConsumerGroup
from penstock.broker.groups.members import AWAY, JOINING, LEAVING, Answer, Beat
from penstock.broker.groups.share import ShareGroup
from penstock.wire.errors import ErrorCode
from tests.broker.groups.machine import GROUP, Machine

INTERVAL_MS = 5_000
SESSION_MS = 45_000
REBALANCE_MS = 60_000


class World(Machine):
    """A coordinator and a catalog of topics."""

    def make(self, name: str, partitions: int = 4) -> Topic:
        self._replay(self.catalog.create_topic(name, partitions, {}))
        return self.catalog.topics[name]

    def grow(self, name: str, partitions: int) -> None:
        self._replay(self.catalog.add_partitions(self.catalog.topics[name], partitions))

    def delete(self, name: str) -> None:
        topic = self.catalog.topics[name]
        self._replay(self.catalog.delete_topic(topic))
        self.write(self.groups.topic_deleted(topic))

    def _replay(self, records: Iterable[tuple[bytes, bytes | None]]) -> None:
        for key, value in records:
            self.catalog.replay(key, value)

    @property
    def consumers(self) -> ConsumerGroup:
        group = self.groups.get(GROUP)
        assert isinstance(group, ConsumerGroup)
        return group

    @property
    def sharers(self) -> ShareGroup:
        group = self.groups.get(GROUP)
        assert isinstance(group, ShareGroup)
        return group

    def all_of(self, *names: str) -> Partitions:
        """Every partition of these topics."""
        topics = [self.catalog.topics[name] for name in names if name in self.catalog.topics]
        return frozenset(
            (topic.id, number) for topic in topics for number in range(topic.partitions)
        )


@dataclass
class Reader:
    """One client in one group."""

    world: World
    id: str
    names: frozenset[str] = frozenset()
    regex: str | None = None
    instance_id: str | None = None
    assignor: str | None = None
    kind: type[AssignedGroup] = ConsumerGroup
    epoch: int = JOINING
    # What it reads, and what it has been told to read.
    reads: Partitions = frozenset()
    told: Partitions = frozenset()
    # What it has last said that it reads; None: it must say everything anew.
    said: Partitions | None = None
    # It was told what to read, and has not acknowledged it: clients do, also where nothing changes.
    is_fresh: bool = False
    interval_ms: int = 0
    slow: bool = False

    def beat(self, *, lose_answer: bool = False, **changes: Any) -> Answer | None:
        """One heartbeat; None if it was fenced, or the answer got lost."""
        try:
            answer = self._send(self._next_beat(**changes))
        except ApiError as error:
            if error.code not in (ErrorCode.FENCED_MEMBER_EPOCH, ErrorCode.UNKNOWN_MEMBER_ID):
                raise
            self.abandon()
            return None
        if lose_answer:
            self.said = None
            return None
        self._take(answer)
        return answer

    def _next_beat(self, **changes: Any) -> Beat:
        owned = self.reads
        fields: dict[str, Any] = {
            "instance_id": self.instance_id,
            "client_host": "/127.0.0.1",
        }
        if self.epoch == JOINING or self.said is None:
            # What it has not begun to read it does not begin: it will be told anew.
            self.told &= self.reads
            fields["names"] = self.names
            if self.kind is ConsumerGroup:
                fields["regex"] = self.regex
                fields["rebalance_timeout_ms"] = REBALANCE_MS
                fields["assignor"] = self.assignor
                fields["owned"] = owned
        elif self.kind is ConsumerGroup and (
            owned != self.said or (self.is_fresh and owned == self.told)
        ):
            fields["owned"] = owned
        if owned == self.told:
            self.is_fresh = False
        self.said = owned
        return Beat(self.id, self.epoch, **{**fields, **changes})

    def _send(self, beat: Beat) -> Answer:
        world = self.world
        if beat.epoch == JOINING:
            group = world.groups.get_or_make(GROUP, self.kind.kind)
        else:
            group = world.groups.groups[GROUP]
        assert isinstance(group, self.kind)
        handle = group.leave if beat.epoch < 0 else group.heartbeat
        try:
            answer, entries = handle(beat, world.now_ms, world.elapsed_ms)
        except ApiError:
            world.groups.drop_if_void(GROUP)
            raise
        world.write(entries)
        return answer

    def _take(self, answer: Answer) -> None:
        self.epoch = answer.epoch
        self.interval_ms = answer.interval_ms
        if answer.assigned is not None:
            self.told = answer.assigned
            self.is_fresh = True
        if not self.slow:
            self.settle()

    def settle(self) -> None:
        """Give up what it must, then read what it is to read."""
        self.reads = self.told

    def abandon(self) -> None:
        """It is no member any more: it reads nothing, and joins again."""
        self.reads = frozenset()
        self.told, self.said, self.epoch = frozenset(), None, JOINING

    def subscribe(self, *names: str, regex: str | None = None) -> None:
        self.names, self.regex = frozenset(names), regex
        if self.epoch != JOINING:
            self.beat(names=self.names, regex=regex or "")

    def leave(self, epoch: int = LEAVING) -> Answer:
        self.reads = frozenset()
        answer = self._send(Beat(self.id, epoch, instance_id=self.instance_id))
        self.abandon()
        return answer

    def go_away(self) -> Answer:
        return self.leave(AWAY)


def settle(readers: Iterable[Reader], rounds: int = 30) -> None:
    """Everybody beats and does what it is told, until nobody is told anything new."""
    readers = list(readers)
    for reader in readers:
        reader.slow = False
        reader.settle()
    for _ in range(rounds):
        before = [(reader.epoch, reader.reads) for reader in readers]
        for reader in readers:
            reader.beat()
        if before == [(reader.epoch, reader.reads) for reader in readers]:
            return
    raise AssertionError(f"not settled after {rounds} rounds")
