"""How far groups have come: committed offsets, and those of open transactions.

An offset belongs to a topic by its id: a topic that is made anew under an old name does not
inherit the offsets of the old one, not even if the journal still tells of them.

An offset that a transaction carries is *pending*, under the producer's id, until the transaction
ends. Then it becomes the committed one, unless it was *overtaken* by one that the group has
committed since, or it is forgotten. Several transactions may have offsets pending for one
partition.

Which of two is newer is said by the order of their entries, never by the clock, which may be set
back. So where an older one is committed, those that are newer and still pending are written again
behind it: whatever a replay finds pending behind the committed one is newer than it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, NamedTuple
from uuid import UUID

from penstock.broker.journal import Entry, Key

OFFSET: Final = "offset"
PENDING: Final = "pending-offset"

# A topic's name and a partition's number.
Place = tuple[str, int]


class Committed(NamedTuple):
    """One committed offset, in the order in which entries hold it."""

    offset: int
    leader_epoch: int
    metadata: str
    topic_id: str
    commit_ms: int
    # When it goes even if the group's settings would keep it longer: old clients ask for it.
    expire_ms: int | None = None


class NewOffset(NamedTuple):
    """An offset that a client wants to commit."""

    topic: str
    partition: int
    offset: int
    leader_epoch: int = -1
    metadata: str | None = ""


class Offsets:
    """The committed and the pending offsets of all groups."""

    def __init__(self) -> None:
        self.by_group: dict[str, dict[Place, Committed]] = {}
        # By producer id.
        self.pending: dict[int, dict[tuple[str, str, int], Committed]] = {}
        # The producers that have an offset pending, by group and partition.
        self._pending_of: dict[str, dict[Place, set[int]]] = {}
        # Producer, group and partition of what is pending and was not overtaken: its turn.
        self._turns: dict[tuple[int, str, Place], int] = {}
        self._last_turn = 0
        self.count = 0

    def clear(self) -> None:
        self.by_group.clear()
        self.pending.clear()
        self._pending_of.clear()
        self._turns.clear()
        self.count = 0

    # ---- questions -------------------------------------------------------------------------

    def get(self, group_id: str, topic: str, partition: int) -> Committed | None:
        group = self.by_group.get(group_id)
        return None if group is None else group.get((topic, partition))

    def of(self, group_id: str) -> dict[Place, Committed]:
        """All offsets that a group has committed."""
        return self.by_group.get(group_id, {})

    def has_any(self, group_id: str) -> bool:
        """Whether the group has an offset, committed or pending."""
        return group_id in self.by_group or group_id in self._pending_of

    def is_pending(self, group_id: str, topic: str, partition: int) -> bool:
        places = self._pending_of.get(group_id)
        return places is not None and (topic, partition) in places

    def pending_places(self, group_id: str) -> list[Place]:
        return list(self._pending_of.get(group_id, ()))

    # ---- commands --------------------------------------------------------------------------

    def forget(self, group_id: str, places: Iterable[Place]) -> Iterator[Entry]:
        """Entries by which a group has no offsets for these partitions, nor pending ones."""
        committed = self.of(group_id)
        pending = self._pending_of.get(group_id, {})
        for topic, partition in places:
            if (topic, partition) in committed:
                yield (OFFSET, group_id, topic, partition), None
            for producer_id in sorted(pending.get((topic, partition), ())):
                yield (PENDING, producer_id, group_id, topic, partition), None

    def forget_group(self, group_id: str) -> Iterator[Entry]:
        places = dict.fromkeys([*self.of(group_id), *self.pending_places(group_id)])
        return self.forget(group_id, places)

    def forget_topic(self, topic: str, topic_id: UUID) -> Iterator[Entry]:
        """Entries by which nobody has offsets of this topic; one of the same name may be there."""
        id_ = str(topic_id)
        for group_id, offsets in self.by_group.items():
            for (name, partition), committed in offsets.items():
                if name == topic and committed.topic_id == id_:
                    yield (OFFSET, group_id, name, partition), None
        for producer_id, pending in self.pending.items():
            for (group_id, name, partition), waiting in pending.items():
                if name == topic and waiting.topic_id == id_:
                    yield (PENDING, producer_id, group_id, name, partition), None

    def finish(
        self, producer_id: int, is_current: Callable[[str, str], bool], *, commit: bool
    ) -> Iterator[Entry]:
        """Entries by which a producer's pending offsets are committed, or forgotten.

        `is_current` says whether a topic of this name still has this id.
        """
        for (group_id, topic, partition), waiting in self.pending.get(producer_id, {}).items():
            yield (PENDING, producer_id, group_id, topic, partition), None
            place = topic, partition
            turn = self._turns.get((producer_id, group_id, place))
            if not commit or turn is None or not is_current(topic, waiting.topic_id):
                continue
            yield (OFFSET, group_id, topic, partition), tuple(waiting)
            for other in self._newer(group_id, place, turn):
                value = tuple(self.pending[other][group_id, topic, partition])
                yield (PENDING, other, group_id, topic, partition), value

    def _newer(self, group_id: str, place: Place, turn: int) -> list[int]:
        """The producers with offsets that are pending since, the oldest first."""
        turns = {
            other: self._turns.get((other, group_id, place), 0)
            for other in self._pending_of[group_id][place]
        }
        return sorted((one for one in turns if turns[one] > turn), key=turns.__getitem__)

    # ---- replay ----------------------------------------------------------------------------

    def replay(self, key: Key, value: Any) -> None:
        _, group_id, topic, partition = key
        group_id, place = str(group_id), (str(topic), int(partition))
        group = self.by_group.get(group_id)
        if value is not None:
            if group is None:
                group = self.by_group[group_id] = {}
            if place not in group:
                self.count += 1
            group[place] = Committed(*value)
            for producer_id in self._pending_of.get(group_id, {}).get(place, ()):
                self._turns.pop((producer_id, group_id, place), None)
        elif group is not None and group.pop(place, None) is not None:
            self.count -= 1
            if not group:
                del self.by_group[group_id]

    def replay_pending(self, key: Key, value: Any) -> None:
        _, producer_id, group_id, topic, partition = key
        producer_id, group_id, place = int(producer_id), str(group_id), (str(topic), int(partition))
        pending = self.pending.setdefault(producer_id, {})
        places = self._pending_of.setdefault(group_id, {})
        if value is not None:
            if (group_id, *place) not in pending:
                self.count += 1
            pending[(group_id, *place)] = Committed(*value)
            places.setdefault(place, set()).add(producer_id)
            self._last_turn += 1
            self._turns[producer_id, group_id, place] = self._last_turn
        elif pending.pop((group_id, *place), None) is not None:
            self.count -= 1
            self._turns.pop((producer_id, group_id, place), None)
            places[place].discard(producer_id)
            if not places[place]:
                del places[place]
        if not pending:
            del self.pending[producer_id]
        if not places:
            del self._pending_of[group_id]
