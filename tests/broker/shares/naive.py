"""What a share partition does, record by record, in the plainest way there is.

The model that the real state machine is compared with: one dictionary entry for each offset, no
runs, no counters, no shortcuts.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.broker.shares.partition import (
    ACCEPT,
    ACQUIRED,
    AVAILABLE,
    DONE,
    DYING,
    GAP,
    LIMIT_REACHED,
    NO_REASON,
    REJECT,
    REJECTED,
    RENEW,
    ShareRules,
)


@dataclass
class Item:
    """One record."""

    state: int = AVAILABLE
    count: int = 0
    member: str = ""
    deadline_ms: int = 0
    reason: int = NO_REASON


class NaivePartition:
    """One group's records of one partition."""

    def __init__(self, rules: ShareRules) -> None:
        self.rules = rules
        self.items: dict[int, Item] = {}
        self.start = 0
        self.end = 0

    def _grow(self, end: int) -> None:
        for offset in range(self.end, end):
            self.items[offset] = Item()
        self.end = max(self.end, end)

    def _advance(self) -> None:
        while self.start < self.end and self.items[self.start].state == DONE:
            self.start += 1

    def took(self, member: str, deadline_ms: int, offsets: list[int]) -> None:
        """What the real one has given out must have been free here as well."""
        for offset in offsets:
            self._grow(offset + 1)
            item = self.items[offset]
            assert item.state == AVAILABLE, offset
            assert item.count < self.rules.delivery_limit
            item.state, item.member, item.deadline_ms = ACQUIRED, member, deadline_ms
            item.count += 1

    def skip(self, first: int, last: int) -> None:
        self._grow(last + 1)
        for offset in range(max(first, self.start), last + 1):
            if self.items[offset].state == AVAILABLE:
                self.items[offset] = Item(DONE)
        self._advance()

    def holds(self, member: str, first: int, last: int) -> bool:
        return all(
            offset >= self.start
            and offset in self.items
            and self.items[offset].state == ACQUIRED
            and self.items[offset].member == member
            for offset in range(first, last + 1)
        )

    def answer(self, offset: int, kind: int, now_ms: int) -> None:
        item = self.items[offset]
        if kind in (GAP, ACCEPT):
            self.items[offset] = Item(DONE)
        elif kind == RENEW:
            item.deadline_ms = now_ms + self.rules.lock_ms
        elif kind == REJECT:
            self._die(item, REJECTED)
        else:
            self._put_back(item)

    def _die(self, item: Item, reason: int) -> None:
        item.state = DYING if self.rules.dead_letters else DONE
        item.member, item.deadline_ms = "", 0
        item.reason = reason

    def _put_back(self, item: Item) -> None:
        if item.count >= self.rules.delivery_limit:
            self._die(item, LIMIT_REACHED)
        else:
            item.state, item.member, item.deadline_ms = AVAILABLE, "", 0

    def expire(self, now_ms: int) -> None:
        for item in self.items.values():
            if item.state == ACQUIRED and item.deadline_ms <= now_ms:
                self._put_back(item)
        self._advance()

    def release(self, member: str) -> None:
        for item in self.items.values():
            if item.state == ACQUIRED and item.member == member:
                self._put_back(item)
        self._advance()

    def bury(self, first: int, last: int) -> None:
        for offset in range(first, last + 1):
            item = self.items.get(offset)
            if item is not None and item.state == DYING:
                item.state = DONE
        self._advance()

    def cut(self, offset: int) -> None:
        self._grow(offset)
        for at in range(self.start, offset):
            self.items[at] = Item(DONE)
        self._advance()

    def restored(self) -> None:
        """Locks do not survive a restart."""
        for item in self.items.values():
            if item.state == ACQUIRED:
                item.state, item.member, item.deadline_ms = AVAILABLE, "", 0
        self._advance()
