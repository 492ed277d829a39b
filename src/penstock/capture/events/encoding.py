"""What an encoder is: rows, keys and envelopes of one table as bytes; and the time they carry."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from penstock.capture.source import Fragment, Row


class Order(NamedTuple):
    """An event's place in its source transaction."""

    id: str
    total: int
    in_table: int


class Moment:
    """The time at which events were made; moved on once for many of them, as asking is not free."""

    def __init__(self, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._clock_ns = clock_ns
        self.ns = 0
        self.json = b""
        self.tick()

    def tick(self) -> None:
        ns = self.ns = self._clock_ns()
        self.json = b'"ts_ms":%d,"ts_us":%d,"ts_ns":%d}' % (ns // 1_000_000, ns // 1_000, ns)


class Encoder(Protocol):
    """Bytes for the events of one table."""

    # The key of events that are about the table as a whole.
    whole_key: bytes

    def key(self, row: Row) -> bytes:
        """The key of a row, all of whose columns are given."""
        ...

    def row(self, shown: Row) -> bytes:
        """A row, of which the shown columns are given."""
        ...

    def value(
        self,
        op: str,
        before: bytes | None,
        after: bytes | None,
        source: Fragment,
        order: Order | None,
    ) -> bytes:
        """The envelope around rows that `row` has made."""
        ...

    def unavailable(self, place: int) -> Fragment:
        """What stands for an unavailable value in the shown column at this place."""
        ...

    def gone(
        self, key: bytes, event: bytes, source: Fragment, orders: Callable[[], Order] | None
    ) -> bytes | None:
        """The delete of a row of which only the key is known, and perhaps the event that told it
        last or how that began; None where neither can be taken apart."""
        ...

    def truncate(self, source: Fragment, order: Order | None, *, is_expanded: bool) -> bytes:
        """The envelope of a truncate; expanded if a delete of each row stands before it."""
        ...
