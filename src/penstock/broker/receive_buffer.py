"""Receive buffers: memory for what has arrived of requests and is not handled yet.

A connection has memory of its own only while unhandled bytes are left after a read. All reads go
into one *shared* buffer of the broker: the event loop reads and handles in one go, so between two
reads nothing is in it. What a read leaves (the first part of a request, or requests that must
wait) is kept for the connection:

- up to `SMALL_BYTES` as a copy, put in front of the next read;
- more by *adopting* the shared buffer as it is, without a copy; the pool puts another in its
  place. An adopted buffer is read into like any, and goes back to the pool once it is empty.

So a busy connection reads in steps of `READ_BYTES` and copies next to nothing, and an idle one
holds nothing. A request that does not fit makes its connection's buffer grow as it *arrives*, never
by what a length field claims. A grown buffer stays with its connection, which is likely to need it
again, until the connection falls silent or another needs the memory (`shrink`).

Bounds
    Beyond `READ_BYTES` per connection all of them share a budget. When many buffers are adopted
    at once, the next are made no larger than needed.

Buffers are mappings of their own and not of the heap: a freed one is the system's again.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from typing import Final

READ_BYTES: Final = 256 * 1024
SMALL_BYTES: Final = 8 * 1024
# So many connections may adopt whole buffers; beyond it they get what they need.
MANY_ADOPTED: Final = 512
# Kept for the next ones that need them; those not needed are freed by `release_unused`.
_MAX_SPARE: Final = 64
_PAGE_BYTES: Final = 4096
_NOTHING: Final = memoryview(b"")


class BufferPool:
    """The receive buffers of one broker, and how much its connections may hold of them."""

    def __init__(self, budget_bytes: int, reclaim: Callable[[], None]) -> None:
        """`reclaim` has all connections `shrink`: the budget is used up."""
        self._reclaim = reclaim
        # What a connection without bytes of its own reads into.
        self.shared = allocate(READ_BYTES)
        self.adopted = 0
        self._left = budget_bytes
        self._spare: list[memoryview] = []
        # How few were spare at any moment since `release_unused` looked.
        self._fewest_spare = 0

    @property
    def left_bytes(self) -> int:
        """What is left of the budget."""
        return self._left

    def adopt_shared(self) -> memoryview:
        """Hand over the shared buffer with what is in it."""
        adopted = self.shared
        self.adopted += 1
        if self._spare:
            self.shared = self._spare.pop()
            self._fewest_spare = min(self._fewest_spare, len(self._spare))
        else:
            self.shared = allocate(READ_BYTES)
        return adopted

    def make(self, size: int) -> memoryview:
        """A buffer of another size; what it has beyond `READ_BYTES` must have been `take`n."""
        self.adopted += 1
        return allocate(size)

    def replaced(self, buffer: memoryview) -> None:
        """A larger one, which counts for both in the budget, has taken this one's place."""
        self.adopted -= 1
        if len(buffer) == READ_BYTES and len(self._spare) < _MAX_SPARE:
            self._spare.append(buffer)

    def put_back(self, amount: int) -> None:
        """Return to the budget what was taken from it."""
        self._left += amount

    def give_back(self, buffer: memoryview) -> None:
        """Take back a buffer of a connection."""
        self.put_back(max(len(buffer) - READ_BYTES, 0))
        self.replaced(buffer)

    def take(self, amount: int) -> bool:
        """Take from the budget; whether there was so much, if need be from idle connections."""
        if amount > self._left:
            self._reclaim()
        if amount > self._left:
            return False
        self._left -= amount
        return True

    def release_unused(self) -> None:
        """Free the spare buffers that nobody has needed since the last time."""
        del self._spare[: self._fewest_spare]
        self._fewest_spare = len(self._spare)


class ReceiveBuffer:
    """What one connection has received and not handled: `view[start:end]` between
    `receive` or `resume` and `keep`.
    """

    __slots__ = ("_copied", "_own", "_pool", "end", "start", "view")

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._own: memoryview | None = None
        # Where there is no own buffer: the bytes that are left.
        self._copied = b""
        self.view = _NOTHING
        self.start = 0
        self.end = 0

    @property
    def size(self) -> int:
        """How much memory of its own it has."""
        return len(self._own) if self._own is not None else len(self._copied)

    @property
    def pending(self) -> int:
        """How many bytes are left."""
        return self.end - self.start

    def target(self) -> memoryview:
        """What to read into now; asked for as often as one likes."""
        if self._own is not None:
            return self._own[self.end :]
        if self._copied:
            return self._with_copied()[len(self._copied) :]
        return self._pool.shared

    def _with_copied(self) -> memoryview:
        shared = self._pool.shared
        shared[: len(self._copied)] = self._copied
        return shared

    def receive(self, count: int) -> None:
        """So many bytes were read into the `target`."""
        if self._own is None:
            self.view = self._pool.shared
        self.end += count

    def resume(self) -> None:
        """Go on with what is left, without a read."""
        if self._own is None:
            self.view = self._with_copied()

    def clear(self) -> bool:
        """Everything is handled: hold nothing; False if `keep` has more to do."""
        if self._own is not None:
            return False
        self._copied = b""
        self.view = _NOTHING
        self.start = self.end = 0
        return True

    def keep(self, start: int, most: int, *, grow: bool = True) -> bool:
        """Everything up to `start` is handled: keep the rest, and room behind it for more.

        Views that were handed out are not valid any more. It does not `grow` beyond `most`
        bytes, and where nothing is read for now not at all. False: there is no memory for it.
        """
        rest = self.end - start
        if self._own is None:
            self._keep_of_shared(start, rest)
        elif not rest and len(self._own) <= READ_BYTES:
            self._drop()
        else:
            self.start = start
        return self._own is None or not grow or self._make_room(rest, most)

    def _keep_of_shared(self, start: int, rest: int) -> None:
        pool, view = self._pool, self.view
        self.view = _NOTHING
        if rest <= SMALL_BYTES:
            self._copied = bytes(view[start : self.end]) if rest else b""
            self.start, self.end = 0, rest
            return
        self._copied = b""
        if pool.adopted < MANY_ADOPTED:
            self._own = self.view = pool.adopt_shared()
            self.start = start
            return
        self._own = self.view = pool.make(min(_pages(2 * rest), READ_BYTES))
        self.view[:rest] = view[start : self.end]
        self.start, self.end = 0, rest

    def _make_room(self, rest: int, most: int) -> bool:
        """Room for the next read: move the rest to the front, or into a larger buffer."""
        start, end, size = self.start, self.end, len(self.view)
        if rest == 0:
            self.start = self.end = 0
        elif size - end >= size // 4:
            return True
        elif rest > size // 2 and size < most:
            return self._enlarge(min(size * 2, most))
        elif start:
            self.view[:rest] = self.view[start:end]
            self.start, self.end = 0, rest
        return True

    def _enlarge(self, size: int) -> bool:
        pool, old, rest = self._pool, self.view, self.end - self.start
        if not pool.take(max(size, READ_BYTES) - max(len(old), READ_BYTES)):
            return False
        self._own = pool.make(size)
        self._own[:rest] = old[self.start : self.end]
        pool.replaced(old)
        self.view = self._own
        self.start, self.end = 0, rest
        return True

    def shrink(self) -> None:
        """Give back an own buffer with nothing in it."""
        if self._own is not None and self.start == self.end:
            self._drop()

    def release(self) -> None:
        """Give back everything: the connection is gone."""
        self._copied = b""
        if self._own is not None:
            self._drop()

    def _drop(self) -> None:
        assert self._own is not None
        self._pool.give_back(self._own)
        self._own = None
        self.view = _NOTHING
        self.start = self.end = 0


def allocate(size: int) -> memoryview:
    """Memory that only becomes resident where it is written."""
    return memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))


def _pages(size: int) -> int:
    return -(-size // _PAGE_BYTES) * _PAGE_BYTES
