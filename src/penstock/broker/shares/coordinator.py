"""All queues: what every share group has done with every partition it reads.

A `Queue` is one group's records of one partition: its state (`partition`), and who waits for it.
Acknowledgements change the state at once, in memory; `changes` gives the journal entries for all
that has changed since, one for each queue however many answers it took. The entry is the whole
state, so a later one makes up for an earlier one that was never written, and whoever tells a
client that something is acknowledged has written `changes` before and waited for it:

    code = shares.acknowledge(queue, member, answers, elapsed_ms)
    await rounds.durable()              # writes `changes`, many clients' at once

Entry: ("share", group, topic id, partition)  {"topic": NAME, "start": N, "runs": [...]}

Locks are in memory only; their ends are kept in `Timers`, one for each queue, at the earliest.
No sockets, no disk, no clock; `on_dying` and the wakers are called on the caller's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Final

from penstock.broker.catalog import ApiError, Topic
from penstock.broker.groups.settings import DEFAULT_SETTINGS, GroupSettings
from penstock.broker.journal import Entry, Key
from penstock.broker.shares.partition import (
    AVAILABLE,
    DYING,
    Acknowledgement,
    NotAcquiredError,
    NotDeliveredError,
    SharePartition,
    ShareRules,
)
from penstock.broker.timers import Timers
from penstock.wire.errors import ErrorCode

# Group, topic id, partition.
QueueKey = tuple[str, str, int]
Waker = Callable[[], None]

# How many queues clients can make by asking for them.
MAX_QUEUES: Final = 100_000


class Queue:
    """One group's records of one partition."""

    __slots__ = ("due_ms", "key", "share", "topic", "waiting", "written")

    def __init__(self, key: QueueKey, topic: str, share: SharePartition) -> None:
        self.key = key
        self.topic = topic
        self.share = share
        # When its locks are looked at next.
        self.due_ms: int | None = None
        # The entry that was made last, so that it is recognised when it comes back.
        self.written: Any = None
        # Fetches that wait for something to become free.
        self.waiting: dict[object, Waker] = {}

    @property
    def group(self) -> str:
        return self.key[0]

    @property
    def number(self) -> int:
        return self.key[2]

    def wake(self) -> None:
        for ready in list(self.waiting.values()):
            ready()


@lru_cache(maxsize=256)
def rules_of(settings: GroupSettings) -> ShareRules:
    return ShareRules(
        delivery_limit=settings.share_delivery_count_limit,
        lock_ms=settings.share_record_lock_duration_ms,
        max_locks=settings.share_partition_max_record_locks,
        dead_letters=bool(settings.errors_deadletterqueue_topic_name),
        renewable=settings.share_renew_acknowledge_enable,
        ordered=settings.share_ordered_by_key,
    )


class ShareCoordinator:
    """The queues of one broker."""

    kinds: Final = frozenset({"share"})

    def __init__(
        self, settings: Callable[[str], GroupSettings] = lambda _group: DEFAULT_SETTINGS
    ) -> None:
        self.settings = settings
        # Told of a queue that has dead letters to write.
        self.on_dying: Callable[[Queue], None] = lambda _queue: None
        # Told when sessions and locks are void, because everything is replayed.
        self.on_reset: Callable[[], None] = lambda: None
        self._queues: dict[QueueKey, Queue] = {}
        self._by_group: dict[str, dict[QueueKey, Queue]] = {}
        self._dirty: dict[QueueKey, Queue] = {}
        self._timers: Timers[QueueKey] = Timers()

    # ---- what there is -------------------------------------------------------------------

    def queue(self, group: str, topic_id: str, partition: int) -> Queue | None:
        return self._queues.get((group, topic_id, partition))

    def queues_of(self, group: str) -> list[Queue]:
        return list(self._by_group.get(group, {}).values())

    def groups(self) -> Iterator[str]:
        """Groups of which something is known."""
        yield from self._by_group

    def start_offset(self, group: str, topic_id: str, partition: int) -> int | None:
        """The first offset that the group still needs; None if it has not begun."""
        queue = self.queue(group, topic_id, partition)
        return None if queue is None else queue.share.start

    def rules(self, group: str) -> ShareRules:
        return rules_of(self.settings(group))

    def open(self, group: str, topic: Topic, partition: int, start: int) -> Queue:
        """The queue, begun at `start` if it is new."""
        key = (group, str(topic.id), partition)
        queue = self._queues.get(key)
        if queue is None:
            if len(self._queues) >= MAX_QUEUES:
                raise ApiError(ErrorCode.GROUP_MAX_SIZE_REACHED, "there are too many queues")
            queue = self._add(key, topic.name, SharePartition(start))
            # Where it begins is known from now on, whatever is written to the topic meanwhile.
            self.changed(queue)
        return queue

    def _add(self, key: QueueKey, topic: str, share: SharePartition) -> Queue:
        queue = self._queues[key] = Queue(key, topic, share)
        self._by_group.setdefault(key[0], {})[key] = queue
        return queue

    def _drop(self, key: QueueKey) -> Queue | None:
        queue = self._queues.pop(key, None)
        if queue is None:
            return None
        of_group = self._by_group[key[0]]
        del of_group[key]
        if not of_group:
            del self._by_group[key[0]]
        self._dirty.pop(key, None)
        self._timers.cancel(key)
        return queue

    # ---- answers and locks ---------------------------------------------------------------

    def acknowledge(
        self, queue: Queue, member: str, answers: Iterable[Acknowledgement], elapsed_ms: int
    ) -> ErrorCode:
        """Take a member's answers; they are safe once `changes` are."""
        share, rules = queue.share, self.rules(queue.group)
        # While nothing could be given out, any answer may make room.
        wakes = bool(queue.waiting) and share.next_offset(rules) is None
        try:
            share.acknowledge(member, answers, elapsed_ms, rules)
        except NotDeliveredError:
            return ErrorCode.INVALID_REQUEST
        except NotAcquiredError:
            return ErrorCode.INVALID_RECORD_STATE
        # Most answers set nothing free, and many may be waiting.
        wakes = wakes or share.order is not None or share.sizes[AVAILABLE] > 0
        self._settle(queue, wakes=wakes)
        return ErrorCode.NONE

    def locked(self, queue: Queue, deadline_ms: int) -> None:
        """Records were given out until then; they are taken back by `tick`."""
        if self._queues.get(queue.key) is not queue:
            # Forgotten meanwhile, and its locks with it.
            return
        if queue.due_ms is None or deadline_ms < queue.due_ms:
            queue.due_ms = deadline_ms
            self._timers.set(queue.key, deadline_ms)

    def searched(self, queue: Queue, start: int, dying: int) -> None:
        """A fetch looked for records, and may have passed over some or given some up.

        `start` and `dying` are where the queue began before, and how many it had given up.
        """
        share = queue.share
        if share.start != start or share.sizes[DYING] != dying:
            self.changed(queue)
        if share.sizes[DYING] > dying:
            self.on_dying(queue)

    def session_ended(self, group: str, member: str) -> None:
        """A member's session is over: what it has is free for others.

        That it has left its group is no reason: its last answers may be on their way, on another
        connection than its leave was.
        """
        rules = self.rules(group)
        for queue in self.queues_of(group):
            if queue.share.release(member, rules):
                self._settle(queue)

    def buried(self, queue: Queue, first: int, last: int) -> None:
        """The dead letters of these records are safe."""
        queue.share.bury(first, last)
        self._settle(queue)

    def changed(self, queue: Queue) -> None:
        """The journal must hear of the queue's state."""
        if self._queues.get(queue.key) is queue:
            self._dirty[queue.key] = queue

    def _settle(self, queue: Queue, *, wakes: bool = True) -> None:
        self.changed(queue)
        if queue.share.sizes[DYING]:
            self.on_dying(queue)
        if wakes:
            queue.wake()

    # ---- the journal ---------------------------------------------------------------------

    def changes(self) -> list[Entry]:
        """Entries for all that has changed; they must be written now, or asked for again."""
        entries: list[Entry] = []
        for key, queue in self._dirty.items():
            queue.written = {"topic": queue.topic, **queue.share.to_value()}
            entries.append((("share", *key), queue.written))
        return entries

    def replay(self, key: Key, value: Any) -> None:
        """Apply one entry."""
        name = (str(key[1]), str(key[2]), int(key[3]))
        queue = self._queues.get(name)
        if value is None:
            self._drop(name)
        elif queue is not None and queue.written is value:
            # What `changes` has made of the state itself, on its way into the journal.
            self._dirty.pop(name, None)
        elif queue is not None:
            queue.share = SharePartition.from_value(value)
            queue.wake()
        else:
            self._add(name, value["topic"], SharePartition.from_value(value))

    def reset(self) -> None:
        """Be as new: everything is about to be replayed."""
        for queue in list(self._queues.values()):
            self._drop(queue.key)
        self._timers.clear()
        self.on_reset()

    def begin(self, now_ms: int, elapsed_ms: int, *, lost: bool) -> Iterable[Entry]:
        """Everything is replayed: dead letters that were not written yet are due."""
        for queue in self._queues.values():
            if queue.share.sizes[DYING]:
                self.on_dying(queue)
        return ()

    def fit(self, end_of: Callable[[Queue], int | None]) -> list[Entry]:
        """Know nothing of records that their log has lost with the power.

        To be asked at a start, before new ones have their offsets: they would pass for finished.
        """
        for queue in self._queues.values():
            end = end_of(queue)
            if end is not None and queue.share.cut_end(end):
                self.changed(queue)
        return self.changes()

    # ---- what operators do ---------------------------------------------------------------

    def move(self, group: str, topic: Topic, partition: int, offset: int) -> list[Entry]:
        """Begin anew at an offset."""
        value = {"topic": topic.name, **SharePartition(offset).to_value()}
        return [(("share", group, str(topic.id), partition), value)]

    def forget(self, group: str, topic_id: str | None = None) -> list[Entry]:
        """Know nothing of a group any more, or nothing of what it did with a topic."""
        return [
            (("share", *queue.key), None)
            for queue in self.queues_of(group)
            if topic_id is None or queue.key[1] == topic_id
        ]

    def topic_deleted(self, topic: Topic) -> Iterable[Entry]:
        topic_id = str(topic.id)
        gone = [queue for queue in self._queues.values() if queue.key[1] == topic_id]
        for queue in gone:
            queue.wake()
        return [(("share", *queue.key), None) for queue in gone]

    # ---- time ----------------------------------------------------------------------------

    def tick(self, now_ms: int, elapsed_ms: int) -> Iterable[Entry]:
        for key in self._timers.due(elapsed_ms):
            queue = self._queues[key]
            queue.due_ms = None
            if queue.share.expire(elapsed_ms, self.rules(queue.group)):
                self._settle(queue)
            deadline_ms = queue.share.next_deadline_ms()
            if deadline_ms is not None:
                self.locked(queue, deadline_ms)
        return self.changes()

    @property
    def next_due_ms(self) -> int | None:
        return self._timers.next_ms
