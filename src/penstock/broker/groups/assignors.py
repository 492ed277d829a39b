"""Who is to read which partition, decided from subscriptions and from what was decided before.

An assignor is a function of the members (what each wants, and what it was last meant to have) and
of the partition counts of the topics, in the order of their names. It knows no epochs and no
clients: its answer is a *target*, which a group then approaches step by step.

*uniform*  Every partition of a wanted topic has one reader. Members that want the same get equally
           many, give or take one; for any others, no partition could go to a member that has two
           fewer. What needs not move stays: a partition leaves a member that still wants it only
           because that member has too many.
*range*    Topic by topic, members get equal shares of consecutive numbers. So partition n of all
           topics that have equally many partitions and the same readers is with one member, where
           their records can be joined. What members had before does not matter.
*simple*   For share groups: as uniform, but every partition has at least two readers where there
           are two, so that a slow or dead one stops nothing, and more where members would have
           nothing to read otherwise.

Answers are the same for the same arguments, whatever the order of the members.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final
from uuid import UUID

TopicPartition = tuple[UUID, int]
Partitions = frozenset[TopicPartition]
NOTHING: Final[Partitions] = frozenset()

# How many members of a share group read a partition, if there are as many.
_SHARE_READERS: Final = 2
# How many members are looked at for chains of partitions that could be moved: some milliseconds.
_CHAIN_PATIENCE: Final = 100_000


@dataclass(frozen=True, slots=True)
class Subscriber:
    """One member: the topics it wants, of those that exist, and what it was meant to have."""

    topics: frozenset[UUID]
    held: Partitions = NOTHING
    instance_id: str | None = None


Members = Mapping[str, Subscriber]
# How many partitions each topic has.
Counts = Mapping[UUID, int]
Assignor = Callable[[Members, Counts], dict[str, Partitions]]


def uniform(members: Members, counts: Counts) -> dict[str, Partitions]:
    """Equally many partitions for each, moving as few as possible."""
    return _Dealing(members, counts, lambda readers, partitions: 1).result()


def simple(members: Members, counts: Counts) -> dict[str, Partitions]:
    """For share groups: partitions have several readers, and nobody is left without any."""
    return _Dealing(members, counts, _share_readers).result()


def _share_readers(readers: int, partitions: int) -> int:
    return min(readers, max(_SHARE_READERS, -(-readers // partitions)))


def ranges(members: Members, counts: Counts) -> dict[str, Partitions]:
    """Consecutive numbers of each topic, for static members first, by their instance ids."""
    found: dict[str, list[TopicPartition]] = {member: [] for member in members}
    for topic, readers in _readers(members, counts).items():
        quota, extra = divmod(counts[topic], len(readers))
        start = 0
        for position, member in enumerate(sorted(readers, key=lambda id_: _rank(id_, members))):
            end = start + quota + (position < extra)
            found[member] += [(topic, number) for number in range(start, end)]
            start = end
    return {member: frozenset(partitions) for member, partitions in found.items()}


def _rank(member: str, members: Members) -> tuple[bool, str]:
    instance_id = members[member].instance_id
    return instance_id is None, member if instance_id is None else instance_id


class _Dealing:
    """Partitions in the hands of members: first what they had, then the rest, then in balance.

    Partitions are given and taken one at a time, always to and from the members that have least
    and most: so no more are moved than must be, and every move makes the loads more even, which
    cannot go on for ever. Loads in a heap are as they were when noted; they are looked at again
    before they are believed.
    """

    def __init__(
        self, members: Members, counts: Counts, readers_of: Callable[[int, int], int]
    ) -> None:
        self._counts = counts
        self._readers = _readers(members, counts)
        self._wanted = self._wanted_readers(readers_of)
        # How many sets of members there are that want some topic.
        self._alike = len(set(self._readers.values()))
        self._patience = _CHAIN_PATIENCE
        # The numbers that each member has of each topic, the latest last.
        self._hands: dict[str, dict[UUID, dict[int, None]]] = {
            member: {} for member in sorted(members)
        }
        self._load = dict.fromkeys(self._hands, 0)
        # How many readers each partition has.
        self._read = {topic: [0] * count for topic, count in counts.items()}
        self._keep(members)
        self._heaps: dict[UUID, list[tuple[int, str]]] = {}
        self._heap_up()
        self._fill()
        # Who gives may be who gets later on, where members want different topics.
        while self._balance():
            self._heap_up()

    def result(self) -> dict[str, Partitions]:
        return {
            member: frozenset((topic, n) for topic, numbers in hand.items() for n in numbers)
            for member, hand in self._hands.items()
        }

    def _wanted_readers(self, readers_of: Callable[[int, int], int]) -> dict[UUID, int]:
        """How many readers each topic's partitions are to have."""
        partitions: dict[tuple[str, ...], int] = {}
        for topic, readers in self._readers.items():
            partitions[readers] = partitions.get(readers, 0) + self._counts[topic]
        return {
            topic: readers_of(len(readers), partitions[readers]) if readers else 0
            for topic, readers in self._readers.items()
        }

    def _keep(self, members: Members) -> None:
        """Leave with members what they had, as far as they want it and it is not too much."""
        claims: dict[UUID, dict[int, list[str]]] = {}
        for member in self._hands:
            one = members[member]
            for topic, numbers in by_topic(one.held).items():
                if topic in one.topics and topic in self._counts:
                    claimed = claims.setdefault(topic, {})
                    for number in numbers:
                        if number < self._counts[topic]:
                            claimed.setdefault(number, []).append(member)
        for topic in self._counts:
            for number, claimants in sorted(claims.get(topic, {}).items()):
                # Where there are too many, those that have least.
                claimants.sort(key=lambda one: len(members[one].held))
                for member in claimants[: self._wanted[topic]]:
                    self._give(member, topic, number)

    def _heap_up(self) -> None:
        """The members that want each topic, least loaded first; one heap for the same members."""
        heaps: dict[tuple[str, ...], list[tuple[int, str]]] = {}
        for readers in self._readers.values():
            if readers not in heaps:
                heaps[readers] = [(self._load[member], member) for member in readers]
                heapq.heapify(heaps[readers])
        self._heaps = {topic: heaps[readers] for topic, readers in self._readers.items()}

    def _fill(self) -> None:
        """Find readers for what lacks them; first where there is the least choice."""
        for topic in sorted(self._counts, key=lambda topic: len(self._readers[topic])):
            read = self._read[topic]
            for number in range(self._counts[topic]):
                while read[number] < self._wanted[topic]:
                    member = self._least_loaded(topic, number)
                    assert member is not None, "no more readers are wanted than there are"
                    self._give(member, topic, number)

    def _balance(self) -> bool:
        """Take from those that have most, until none can give; whether anything was moved."""
        queue = [(-load, member) for member, load in self._load.items()]
        heapq.heapify(queue)
        found = False
        while queue:
            load, giver = heapq.heappop(queue)
            if -load != self._load[giver]:
                continue
            for member in self._relieve(giver):
                found = True
                heapq.heappush(queue, (-self._load[member], member))
        return found

    def _relieve(self, giver: str) -> list[str]:
        """Have one partition fewer with a member, and one more with one that has at least two
        fewer; whose loads have changed, none if that cannot be.
        """
        limit = self._load[giver] - 2
        for topic, numbers in self._hands[giver].items():
            # The others have too much, whichever partition it is.
            if self._least_load(topic) > limit:
                continue
            for number in reversed(numbers):
                taker = self._least_loaded(topic, number, limit)
                if taker is not None:
                    self._move(giver, taker, topic, number)
                    return [giver, taker]
        return self._relieve_by_chain(giver, limit)

    def _relieve_by_chain(self, giver: str, limit: int) -> list[str]:
        """The same through others, each of which gives one and gets one."""
        if self._alike == 1 or self._patience <= 0 or min(self._load.values()) > limit:
            return []
        came_by: dict[str, tuple[str, UUID]] = {giver: ("", UUID(int=0))}
        seen: set[tuple[str, ...]] = set()
        pending = deque([giver])
        while pending:
            member = pending.popleft()
            for topic in self._hands[member]:
                if (readers := self._readers[topic]) in seen:
                    continue
                seen.add(readers)
                self._patience -= len(readers)
                for taker in readers:
                    if taker in came_by or not self._movable(member, taker, topic):
                        continue
                    came_by[taker] = member, topic
                    pending.append(taker)
                    if self._load[taker] <= limit:
                        self._move_along(came_by, giver, taker)
                        return [giver, taker]
        return []

    def _movable(self, giver: str, taker: str, topic: UUID) -> list[int]:
        """A number that one has and the other has not."""
        others = self._hands[taker].get(topic, {})
        return next(([n] for n in reversed(self._hands[giver][topic]) if n not in others), [])

    def _move_along(self, came_by: Mapping[str, tuple[str, UUID]], giver: str, taker: str) -> None:
        while taker != giver:
            member, topic = came_by[taker]
            self._move(member, taker, topic, *self._movable(member, taker, topic))
            taker = member

    def _least_load(self, topic: UUID) -> int:
        heap = self._heaps[topic]
        while heap[0][0] != self._load[heap[0][1]]:
            heapq.heapreplace(heap, (self._load[heap[0][1]], heap[0][1]))
        return heap[0][0]

    def _least_loaded(self, topic: UUID, number: int, limit: int | None = None) -> str | None:
        """The member with least, up to a limit, that wants a partition and does not have it."""
        heap = self._heaps[topic]
        passed: list[tuple[int, str]] = []
        found = None
        while heap:
            load, member = heap[0]
            if load != self._load[member]:
                heapq.heapreplace(heap, (self._load[member], member))
            elif limit is not None and load > limit:
                break
            elif number in self._hands[member].get(topic, ()):
                passed.append(heapq.heappop(heap))
            else:
                found = member
                break
        for item in passed:
            heapq.heappush(heap, item)
        return found

    def _give(self, member: str, topic: UUID, number: int) -> None:
        self._hands[member].setdefault(topic, {})[number] = None
        self._load[member] += 1
        self._read[topic][number] += 1

    def _move(self, giver: str, taker: str, topic: UUID, number: int) -> None:
        # To the end with the topic: what is taken next is of another one.
        numbers = self._hands[giver].pop(topic)
        del numbers[number]
        if numbers:
            self._hands[giver][topic] = numbers
        self._load[giver] -= 1
        self._read[topic][number] -= 1
        self._give(taker, topic, number)


def _readers(members: Members, counts: Counts) -> dict[UUID, tuple[str, ...]]:
    """Who wants each topic, in order; equal tuples are the same object."""
    alike: dict[frozenset[UUID], list[str]] = {}
    for member in sorted(members):
        alike.setdefault(members[member].topics, []).append(member)
    kinds = list(alike.items())
    known: dict[tuple[int, ...], tuple[str, ...]] = {}
    found: dict[UUID, tuple[str, ...]] = {}
    for topic in counts:
        of = tuple(at for at, (topics, _) in enumerate(kinds) if topic in topics)
        if of not in known:
            known[of] = tuple(sorted(member for at in of for member in kinds[at][1]))
        found[topic] = known[of]
    return found


def by_topic(partitions: Partitions) -> dict[UUID, list[int]]:
    """The numbers of each topic, in order."""
    found: dict[UUID, list[int]] = {}
    for topic, number in partitions:
        found.setdefault(topic, []).append(number)
    for numbers in found.values():
        numbers.sort()
    return found


DEFAULT_ASSIGNOR: Final = "uniform"
# What members of a consumer group may ask for.
CONSUMER_ASSIGNORS: Final[Mapping[str, Assignor]] = {"uniform": uniform, "range": ranges}
SHARE_ASSIGNOR: Final = "simple"
