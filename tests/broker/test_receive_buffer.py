"""Receive buffers against what any buffer must do: bytes come out whole, in order, and bounded."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.broker import receive_buffer
from penstock.broker.receive_buffer import (
    MANY_ADOPTED,
    READ_BYTES,
    SMALL_BYTES,
    BufferPool,
    ReceiveBuffer,
)
from tests.harness.profiles import examples

MIB = 1 << 20
MOST = 4 * MIB
LENGTH = struct.Struct(">i")


def pool_of(budget_bytes: int = 64 * MIB) -> BufferPool:
    return BufferPool(budget_bytes, lambda: None)


class Reader:
    """A connection: reads its stream piece by piece, and takes whole frames out of the buffer."""

    def __init__(self, pool: BufferPool, stream: bytes) -> None:
        self.buffer = ReceiveBuffer(pool)
        self.frames: list[bytes] = []
        self._stream = memoryview(stream)
        self.refused = False

    @property
    def done(self) -> bool:
        return not self._stream

    def read(self, most: int, *, handle: int = 1 << 30, grow: bool = True) -> None:
        """Read at most so much, as the event loop does, and handle at most so many frames."""
        target = self.buffer.target()
        assert len(target), "there is always room for a read"
        count = min(most, len(target), len(self._stream))
        target[:count] = self._stream[:count]
        self._stream = self._stream[count:]
        self.buffer.receive(count)
        self._handle(handle, grow=grow)

    def go_on(self) -> None:
        """Handle what was left, without a read."""
        if self.buffer.pending:
            self.buffer.resume()
            self._handle(1 << 30, grow=True)
        else:
            self.refused |= not self.buffer.keep(self.buffer.start, MOST)

    def _handle(self, most: int, *, grow: bool) -> None:
        view, start, end = self.buffer.view, self.buffer.start, self.buffer.end
        while end - start >= 4 and most:
            (length,) = LENGTH.unpack_from(view, start)
            if end - start - 4 < length:
                break
            self.frames.append(bytes(view[start + 4 : start + 4 + length]))
            start += 4 + length
            most -= 1
        if start < end or not self.buffer.clear():
            self.refused |= not self.buffer.keep(start, MOST, grow=grow)


def framed(frames: list[bytes]) -> bytes:
    return b"".join(LENGTH.pack(len(frame)) + frame for frame in frames)


def frames_of(rng: random.Random) -> list[bytes]:
    """Of all sizes around the bounds: many small ones, some larger than a buffer."""
    bounds = (1, 100, SMALL_BYTES, READ_BYTES // 2, READ_BYTES, 3 * READ_BYTES)
    return [
        rng.randbytes(max(rng.choice(bounds) + rng.randint(-9, 9), 1))
        for _ in range(rng.choice((2, 8)))
    ]


def pieces(rng: random.Random) -> Iterator[int]:
    """How much arrives at a time."""
    largest = rng.choice((30_000, 65_536, READ_BYTES, MIB))
    while True:
        yield rng.randint(1, largest)


@settings(max_examples=examples(25))
@given(st.integers(0, 1 << 32))
def test_frames_cut_anywhere_come_out_whole_though_connections_share_a_buffer(number: int) -> None:
    rng = random.Random(number)
    pool = pool_of()
    budget = pool.left_bytes
    sent = [frames_of(rng) for _ in range(3)]
    readers = [Reader(pool, framed(frames)) for frames in sent]
    steps = [pieces(rng) for _ in readers]
    paused: set[int] = set()
    while not all(reader.done for reader in readers) or paused:
        at = rng.randrange(len(readers))
        reader = readers[at]
        if at in paused:
            # What waits in the buffer is handled before anything is read.
            paused.discard(at)
            reader.go_on()
        elif not reader.done:
            stops = rng.random() < 0.2
            handled = rng.randint(0, 2) if stops else 1 << 30
            reader.read(next(steps[at]), handle=handled, grow=not stops)
            if stops:
                paused.add(at)
        # Asking for a place to read into changes nothing.
        readers[rng.randrange(len(readers))].buffer.target()
    assert [reader.frames for reader in readers] == sent
    assert not any(reader.refused for reader in readers)
    for reader in readers:
        assert not reader.buffer.pending
        assert reader.buffer.size == 0 or reader.buffer.size > READ_BYTES
        reader.buffer.shrink()
        assert reader.buffer.size == 0
    assert (pool.adopted, pool.left_bytes) == (0, budget)


def test_a_connection_without_unhandled_bytes_holds_nothing() -> None:
    pool = pool_of()
    reader = Reader(pool, framed([b"x" * 100] * 5))
    assert reader.buffer.size == 0
    while not reader.done:
        reader.read(104)
        assert reader.buffer.size == 0
    assert len(reader.frames) == 5


def test_what_is_left_of_a_read_is_kept_in_as_little_memory_as_it_is() -> None:
    pool = pool_of()
    for size in (1, 3, 500, SMALL_BYTES):
        reader = Reader(pool, framed([bytes(MIB)])[:size])
        reader.read(MIB)
        assert (reader.buffer.pending, reader.buffer.size) == (size, size)
    assert pool.adopted == 0
    larger = Reader(pool, framed([bytes(MIB)])[: SMALL_BYTES + 1])
    larger.read(MIB)
    assert (larger.buffer.size, pool.adopted) == (READ_BYTES, 1)
    larger.buffer.release()
    assert pool.adopted == 0


def test_when_many_hold_buffers_the_next_get_what_they_need() -> None:
    pool = pool_of()
    pool.adopted = MANY_ADOPTED
    frames = [bytes(100_000), b"next"]
    reader = Reader(pool, framed(frames))
    reader.read(20_000)
    assert 20_000 <= reader.buffer.size < 50_000
    while not reader.done:
        reader.read(20_000)
        assert reader.buffer.size <= READ_BYTES
    assert reader.frames == frames
    assert (reader.buffer.size, pool.adopted) == (0, MANY_ADOPTED)


def test_buffers_grow_as_bytes_arrive_within_the_budget_and_give_it_back() -> None:
    pool = pool_of(2 * MIB)
    reader = Reader(pool, framed([bytes(50 * MIB)])[: 3 * MIB])
    sizes = []
    while not reader.done and not reader.refused:
        reader.read(50_000)
        sizes.append(reader.buffer.size)
        assert reader.buffer.size <= max(READ_BYTES, 4 * reader.buffer.pending)
    # 2 MiB would fit beside the first 256 KiB, and 4 MiB do not.
    assert reader.refused
    assert max(sizes) == 2 * MIB
    reader.buffer.release()
    assert (pool.left_bytes, pool.adopted) == (2 * MIB, 0)


def test_a_grown_buffer_that_is_empty_goes_to_who_needs_it() -> None:
    idle: list[ReceiveBuffer] = []

    def shrink_all() -> None:
        for buffer in idle:
            buffer.shrink()

    pool = BufferPool(MIB, shrink_all)
    first, second = (Reader(pool, framed([bytes(900_000), b"x"])) for _ in range(2))
    idle += [first.buffer, second.buffer]
    while not first.done:
        first.read(MIB)
    assert first.buffer.size == MIB
    while not second.done:
        second.read(MIB)
    assert not second.refused
    assert (first.buffer.size, second.buffer.size) == (0, MIB)


def test_a_request_that_may_not_grow_further_still_has_room() -> None:
    """As large as the limit allows, behind others, so that it reaches the end of the buffer."""
    pool = pool_of()
    frames = [bytes(MOST // 2 - 3), bytes(MOST - 4), b"after", bytes(MOST - 4)]
    reader = Reader(pool, framed(frames))
    while not reader.done:
        reader.read(300_000)
    assert reader.frames == frames
    assert not reader.refused


def test_spare_buffers_are_freed_when_nobody_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    made = 0

    def counted(size: int) -> memoryview:
        nonlocal made
        made += 1
        return memoryview(bytearray(size))

    monkeypatch.setattr(receive_buffer, "allocate", counted)
    pool = pool_of()
    half = framed([bytes(2 * SMALL_BYTES)])[:-1]

    def together(count: int) -> None:
        """So many connections hold a part of a request at the same time."""
        readers = [Reader(pool, half) for _ in range(count)]
        for reader in readers:
            reader.read(MIB)
        for reader in readers:
            reader.buffer.release()

    together(20)
    # One of them is the shared one.
    assert made == 21
    together(20)
    assert made == 21
    # The first look comes right after they were needed, the second finds that 15 were not.
    pool.release_unused()
    together(5)
    pool.release_unused()
    together(5)
    assert made == 21
    together(20)
    assert made == 21 + 15
