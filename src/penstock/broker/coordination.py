"""The coordinators of groups, transactions and queues, together with their journal and time.

Each coordinator is a state machine without sockets, disk or clock. A command looks at the state
and returns an answer and the journal entries that change the state; `replay` applies an entry.
What need not survive a restart (who is connected, who holds a lock for how long) a coordinator
keeps for itself. When time has passed it is told so by `tick`.

This is where they meet the rest of the broker:

    response, entries = broker.coordination.groups.commit_offsets(...)
    await broker.coordination.commit(entries)       # applied at once, durable on return
    return response
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

from penstock.broker.boot import boot_id
from penstock.broker.catalog import Topic
from penstock.broker.client_metrics import ClientMetricsCoordinator
from penstock.broker.groups.coordinator import GroupCoordinator
from penstock.broker.journal import Entry, Journal, Key
from penstock.broker.quotas import QuotaCoordinator
from penstock.broker.shares.coordinator import Queue, ShareCoordinator
from penstock.broker.transactions.coordinator import (
    TransactionCoordinator,
    TransactionSettings,
)
from penstock.broker.transactions.markers import Markers
from penstock.broker.waiting import WriteDone
from penstock.errors import StorageError

if TYPE_CHECKING:
    from penstock.broker.server import Broker

log = logging.getLogger(__name__)

# What a failed tick waits before the next: its disk may come back.
_PAUSE_AFTER_FAILURE_S = 1.0
_BOOT = "boot"
# The kinds of entries that say how far a group has read.
_PLACES = frozenset({"offset", "share"})


class Coordinator(Protocol):
    """What the coordinators have in common."""

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of entries that are this one's: the first items of their keys."""
        ...

    def replay(self, key: Key, value: Any) -> None:
        """Apply one entry."""
        ...

    def reset(self) -> None:
        """Be as new: everything is about to be replayed."""
        ...

    def begin(self, now_ms: int, elapsed_ms: int, *, lost: bool) -> Iterable[Entry]:
        """Everything is replayed and the broker is about to serve: what follows from it.

        `lost`: of what was applied before, the newest entries may be missing.
        """
        ...

    def topic_deleted(self, topic: Topic) -> Iterable[Entry]:
        """A topic is gone, and with it what was known of its partitions."""
        ...

    def tick(self, now_ms: int, elapsed_ms: int) -> Iterable[Entry]:
        """Do what is due by now."""
        ...

    @property
    def next_due_ms(self) -> int | None:
        """When `tick` has something to do, in elapsed milliseconds."""
        ...


class Coordination:
    """All coordinators of one broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.journal = Journal(broker.store, broker.sync_waiters, broker.config.durability)
        self.groups = GroupCoordinator(broker.config, broker.catalog)
        self.transactions = TransactionCoordinator(
            TransactionSettings(
                max_timeout_ms=broker.config.transaction_max_timeout_ms,
                expiration_ms=broker.config.transactional_id_expiration_ms,
                two_phase_commit=broker.config.two_phase_commit,
                max_transactional_ids=broker.config.limits.max_transactional_ids,
            )
        )
        self.markers = Markers(broker)
        self.shares = ShareCoordinator(self.groups.settings)
        self.quotas = QuotaCoordinator()
        self.client_metrics = ClientMetricsCoordinator()
        self._coordinators: tuple[Coordinator, ...] = (
            self.groups,
            self.transactions,
            self.shares,
            self.quotas,
            self.client_metrics,
        )
        self._by_kind: dict[str, Coordinator] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._running = False
        self._armed_for_ms = 0
        # When the operating system was started under which the journal was last written.
        self._boot = ""

    def open(self) -> None:
        """Replay the journal."""
        for coordinator in self._coordinators:
            for kind in coordinator.kinds:
                self._by_kind[kind] = coordinator
        self.journal.open(self._replay, self._reset, lambda: self._begin(lost=True))

    def start(self) -> None:
        """Let time pass for the coordinators; the partitions of all topics are there.

        A process that was killed leaves its writes with the operating system. They are lost
        only if that was started anew since, or could not bring them to the disk.
        """
        boot = boot_id()
        same_boot = boot is not None and boot == self._boot
        self.journal.write(self.shares.fit(self._end_of_log))
        kept = self._broker.store.was_clean or same_boot
        self._begin(lost=self.journal.doubtful or not kept)
        if not same_boot:
            self.journal.write([((_BOOT,), boot or "")])
        self._running = True
        self.arm()

    def _end_of_log(self, queue: Queue) -> int | None:
        topic = self._broker.catalog.topics.get(queue.topic)
        if topic is None or str(topic.id) != queue.key[1]:
            return None
        partition = self._broker.partition(queue.topic, queue.number)
        return None if partition is None or partition.damaged else partition.log_end

    def stop(self, *, keep: bool = True) -> None:
        """Time stands still; without `keep` the journal is left as a killed process leaves it."""
        self._running = False
        self.journal.stop(keep=keep)
        if self._timer is not None:
            self._timer.cancel()

    def write(self, entries: Iterable[Entry], *, hurry: bool = True) -> None:
        """Apply entries now; they are durable soon, and before any that are written later.

        Without `hurry` the disk is not bothered at once: to be used where nobody waits for it.
        """
        self.journal.write(entries, hurry=hurry)
        self._carry_out()
        self.arm()

    def put_off(self, entries: Iterable[Entry]) -> None:
        """Apply entries now that would be made again if they were lost."""
        self.journal.put_off(entries)
        self._carry_out()
        self.arm()

    async def commit(self, entries: Iterable[Entry] = ()) -> None:
        """Apply entries now; on return everything that was applied so far is durable."""
        self.journal.stage(entries)
        self._carry_out()
        self.arm()
        await self.journal.durable()

    def commit_then(self, entries: Iterable[Entry], done: WriteDone) -> None:
        """Apply entries now; be called when everything that was applied so far is durable."""
        self.journal.stage(entries)
        self._carry_out()
        self.arm()
        self.journal.when_durable(done)

    def topic_deleted(self, topic: Topic) -> None:
        """Forget what was known of a topic; entries name it by id, so this is only for tidiness."""
        try:
            for coordinator in self._coordinators:
                self.write(coordinator.topic_deleted(topic))
        except StorageError as error:
            self._broker.warn_now_and_then(f"forgetting topic {topic.name}", error)

    # ---- time ----------------------------------------------------------------------------

    def arm(self) -> None:
        """Be woken for the next deadline; to be called where one may have come nearer."""
        if not self._running:
            return
        due = [at for one in self._coordinators if (at := one.next_due_ms) is not None]
        if not due:
            return
        next_ms = min(due)
        if self._timer is not None and not self._timer.cancelled():
            if self._armed_for_ms <= next_ms:
                return
            self._timer.cancel()
        self._armed_for_ms = next_ms
        wait_s = max(next_ms - self._broker.clock.elapsed_ms(), 0) / 1000
        self._timer = self._broker.loop.call_later(wait_s, self._on_time)

    def tick(self) -> None:
        """Do everything that is due by now."""
        clock = self._broker.clock
        now_ms, elapsed_ms = clock.now_ms(), clock.elapsed_ms()
        for coordinator in self._coordinators:
            self.journal.write(coordinator.tick(now_ms, elapsed_ms))
        self._carry_out()

    def _carry_out(self) -> None:
        """Something may have been decided just now."""
        if self._running and self.transactions.undone:
            self.markers.start()

    def _on_time(self) -> None:
        self._timer = None
        try:
            self.tick()
        except StorageError as error:
            self._broker.warn_now_and_then("the coordinators' deadlines", error)
            self._pause()
        except Exception:
            log.exception("the coordinators' deadlines")
            self._pause()
        else:
            self.arm()

    def _pause(self) -> None:
        if self._running:
            self._armed_for_ms = 0
            self._timer = self._broker.loop.call_later(_PAUSE_AFTER_FAILURE_S, self._on_time)

    # ---- replay --------------------------------------------------------------------------

    def _replay(self, key: Key, value: Any) -> None:
        if key[0] == _BOOT:
            self._boot = value
            return
        coordinator = self._by_kind.get(str(key[0]))
        if coordinator is not None:
            coordinator.replay(key, value)
        if key[0] in _PLACES:
            self._broker.overload.committed(key)

    def _reset(self) -> None:
        for coordinator in self._coordinators:
            coordinator.reset()
        self._broker.overload.look_at_all()

    def _begin(self, *, lost: bool) -> None:
        clock = self._broker.clock
        now_ms, elapsed_ms = clock.now_ms(), clock.elapsed_ms()
        for coordinator in self._coordinators:
            self.journal.write(coordinator.begin(now_ms, elapsed_ms, lost=lost))
        if self._running and lost:
            # While clients are served: at a start it is waited for before.
            self.markers.recover_soon()
