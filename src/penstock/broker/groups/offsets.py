"""How far groups have come: committed offsets, and those of open transactions.

An offset belongs to a topic by its id: a topic that is made anew under an old name does not
inherit the offsets of the old one, not even if the journal still tells of them.

An offset that a transaction carries is *pending*, under the producer's id, until the transaction
ends. Then it becomes the committed one, unless it was *overtaken* by one that the group has
committed since, or it is forgotten. Several transactions may have offsets pending for one
partition.

Which of two is newer is said by their *turns*, which are counted and kept with them, and never by
the clock, which may be set back. An offset keeps its turn when its transaction ends. So ending one
can be broken off after any entry and done again: the end is the same.
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
    # The later the larger. 0: it was written without; the order of entries says it.
    turn: int = 0


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
        self._last_turn = 0
        self.count = 0

    def clear(self) -> None:
        self.by_group.clear()
        self.pending.clear()
        self._pending_of.clear()
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

    def next_turn(self) -> int:
        """The turn of an offset that comes now."""
        self._last_turn += 1
        return self._last_turn

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
            if commit and is_current(topic, waiting.topic_id):
                present = self.get(group_id, topic, partition)
                if present is None or present.turn < waiting.turn:
                    yield (OFFSET, group_id, topic, partition), tuple(waiting)
            # Only behind it: who finds it pending still finishes it once more.
            yield (PENDING, producer_id, group_id, topic, partition), None

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
            group[place] = self._committed(value)
        elif group is not None and group.pop(place, None) is not None:
            self.count -= 1
            if not group:
                del self.by_group[group_id]

    def _committed(self, value: Any) -> Committed:
        committed = Committed(*value)
        if not committed.turn:
            return committed._replace(turn=self.next_turn())
        self._last_turn = max(self._last_turn, committed.turn)
        return committed

    def replay_pending(self, key: Key, value: Any) -> None:
        _, producer_id, group_id, topic, partition = key
        producer_id, group_id, place = int(producer_id), str(group_id), (str(topic), int(partition))
        pending = self.pending.setdefault(producer_id, {})
        places = self._pending_of.setdefault(group_id, {})
        if value is not None:
            if (group_id, *place) not in pending:
                self.count += 1
            pending[(group_id, *place)] = self._committed(value)
            places.setdefault(place, set()).add(producer_id)
        elif pending.pop((group_id, *place), None) is not None:
            self.count -= 1
            places[place].discard(producer_id)
            if not places[place]:
                del places[place]
        if not pending:
            del self.pending[producer_id]
        if not places:
            del self._pending_of[group_id]
