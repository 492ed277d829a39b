"""Transactions as a plain reading of the log tells them, for comparison with the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.records.batch import read_header
from penstock.records.control import read_marker


class Event(NamedTuple):
    """A transactional batch: of records (`commit` is None), or a marker."""

    offset: int
    producer_id: int
    commit: bool | None


class Ended(NamedTuple):
    """A transaction from its first record to its marker."""

    producer_id: int
    first: int
    marker: int
    commit: bool


@dataclass
class History:
    """What is open and what has ended after some events."""

    open: dict[int, int] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)

    def stable(self, visible: int, log_start: int) -> int:
        unseen = [item.first for item in self.ended if item.marker >= visible]
        return max(log_start, min([visible, *self.open.values(), *unseen]))

    def aborted(self, start: int, end: int) -> list[tuple[int, int]]:
        """Producer and first offset of those that reach into [start, end)."""
        return [
            (item.producer_id, item.first)
            for item in self.ended
            if not item.commit and item.marker >= start and item.first < end
        ]


def events_of(batches: Iterable[bytes]) -> list[Event]:
    found: list[Event] = []
    for data in batches:
        header = read_header(data)
        if header.is_control:
            marker = read_marker(data)
            if marker is not None:
                found.append(Event(header.base_offset, header.producer_id, marker.commit))
        elif header.is_transactional:
            found.append(Event(header.base_offset, header.producer_id, None))
    return found


def history_of(events: Iterable[Event]) -> History:
    history = History()
    for offset, producer_id, commit in events:
        if commit is None:
            history.open.setdefault(producer_id, offset)
        else:
            first = history.open.pop(producer_id, None)
            if first is not None:
                history.ended.append(Ended(producer_id, first, offset, commit))
    return history
