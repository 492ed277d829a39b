"""One client's connection: bytes in, frames out to the handlers, answers back in order.

In
    The socket reads straight into a buffer, which is this connection's own only while it holds
    part of a request (`receive_buffer`). Every complete frame in it is handled per read, in
    place; a frame is a view of the buffer and valid only during that call.

Out
    Kafka clients match answers by their order. Each request takes a `Slot` in a queue; a slot
    may be answered at once or later (a write waits for its sync, a fetch for records), and
    answers leave in the order of the slots. Large stretches of log files go from the page cache
    to the socket by sendfile, on a duplicate of the descriptor, while the transport is idle.

Bounds
    A connection with too many unanswered requests or too many unsent bytes is not read from
    until it has caught up. A *suspended* one is not read from either, nor are the frames in
    its buffer handled: a request for a full topic waits there (`overload`), and so do those of a
    client that has used up its quota (`quotas`). Bad bytes close the connection they came on,
    and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import select
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, cast

from penstock.broker.apis.produce_single import Targets
from penstock.broker.overload import RequestHeldError
from penstock.broker.receive_buffer import ReceiveBuffer
from penstock.broker.slot import Part, Slot
from penstock.errors import StorageError, WireError
from penstock.log.slice import Slice

if TYPE_CHECKING:
    from penstock.broker.server import Broker

log = logging.getLogger(__name__)

_SENDFILE_FROM_BYTES: Final = 256 * 1024
# So much is put together for one write, and no more is read from files before it is sent.
_WRITE_BYTES: Final = 1 << 20
_LENGTH: Final = struct.Struct(">i")
_GONE: Final = (errno.EPIPE, errno.ECONNRESET)
# Elsewhere than on Linux sendfile has other arguments; reading and writing serves as well.
_HAS_SENDFILE: Final = sys.platform == "linux"
# Where this is not known a client that left is noticed when it is answered.
_CLOSED_BY_PEER: Final[int] = getattr(select, "POLLRDHUP", 0)


class Connection(asyncio.BufferedProtocol):
    """The protocol object of one connection."""

    # There may be ten thousand of them.
    __slots__ = (
        "__weakref__", "_broker", "_flush_scheduled", "_in_read", "_limits", "_mute",
        "_muted_until", "_outgoing", "_outgoing_bytes", "_paused", "_received", "_send_blocked",
        "_send_socket", "_slots", "_stopped", "_suspensions", "_transport", "_transport_full",
        "_turns", "closed", "incomplete_since", "last_active", "on_lost", "peer_host", "targets",
        "traffic",
    )  # fmt: skip

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self.traffic = broker.traffic
        self._limits = broker.config.limits
        self._received = ReceiveBuffer(broker.buffer_pool)
        self._transport: asyncio.Transport | None = None
        self._slots: deque[Slot] = deque()
        self._outgoing: deque[Part] = deque()
        self._outgoing_bytes = 0
        self._send_socket: socket.socket | None = None
        self._send_blocked = False
        self._transport_full = False
        self._paused = False
        self._stopped = False
        # How many reasons there are to handle nothing for now.
        self._suspensions = 0
        self._mute: asyncio.TimerHandle | None = None
        self._muted_until = 0.0
        self._flush_scheduled = False
        self._in_read = False
        self.closed = False
        self.targets = Targets()
        # Those whose answer takes memory wait until it can leave at once.
        self._turns: dict[Slot, asyncio.Event] = {}
        # What waits on behalf of this connection, to be let go with it.
        self.on_lost: set[Callable[[], None]] = set()
        self.peer_host = ""
        self.last_active = 0.0
        # Since when a request has been arriving that is not complete yet.
        self.incomplete_since: float | None = None

    # ---- life ----------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        peer = transport.get_extra_info("peername")
        self.peer_host = str(peer[0]) if peer else ""
        tune(self._transport)
        self.last_active = self._broker.loop.time()
        # Told of every unsent byte, so that sendfile never overtakes the transport.
        self._transport.set_write_buffer_limits(high=0)
        if not self._broker.admit(self):
            log.warning("refused a connection from %s: too many connections", self.peer_host)
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._broker.dismiss(self)
        self._received.release()
        if self._send_socket is not None:
            if self._send_blocked:
                self._broker.loop.remove_writer(self._send_socket.fileno())
            self._send_socket.close()
        for forget in list(self.on_lost):
            forget()
        if self._mute is not None:
            self._mute.cancel()
        for turn in self._turns.values():
            turn.set()
        self._turns.clear()
        self._slots.clear()
        self._outgoing.clear()

    def close(self, reason: str | None = None) -> None:
        """Cut the connection now; what it still waits for is not answered."""
        if reason is not None:
            log.info("closing the connection from %s: %s", self.peer_host, reason)
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def stop_reading(self) -> None:
        """Take no more requests; those that were taken are still answered."""
        self._stopped = True
        self._pause()

    def finish(self) -> None:
        """Close once what is answered has been sent."""
        self._flush()
        if self._transport is not None and not self._outgoing:
            self._transport.close()
        else:
            self.close()

    def eof_received(self) -> bool:
        return False

    # ---- in ------------------------------------------------------------------------------

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._received.target()

    def buffer_updated(self, nbytes: int) -> None:
        self._received.receive(nbytes)
        self.traffic.bytes_in += nbytes
        self.last_active = self._broker.loop.time()
        if not self.closed:
            self._handle_frames()

    def _handle_frames(self) -> None:
        broker, received = self._broker, self._received
        view, end = received.view, received.end
        first = start = received.start
        broker.now_ms = broker.clock.now_ms()
        slots, most_slots, ready_bytes = self._slots, self._limits.max_inflight_requests, 0
        frames = 0
        self._in_read = True
        try:
            while end - start >= 4 and not self._paused:
                (length,) = _LENGTH.unpack_from(view, start)
                if not 0 < length <= self._limits.max_request_bytes:
                    self.close(f"a frame of {length} bytes")
                    return
                if end - start - 4 < length:
                    break
                frame = view[start + 4 : start + 4 + length]
                start += 4 + length
                broker.dispatch(self, frame)
                frames += 1
                if self.closed:
                    return
                if slots and slots[-1].ready:
                    ready_bytes += slots[-1].size
                if len(slots) >= most_slots or ready_bytes > self._limits.max_unsent_bytes:
                    self._pause()
        except RequestHeldError:
            # It is whole, and handled anew from the buffer once there is room for it.
            start -= 4 + length
            if not self.closed:
                self.suspend()
        except WireError as error:
            self.close(f"malformed request: {error}")
            return
        except Exception:
            # A bug, and this client's request met it: nobody else may notice.
            log.exception("handling a request from %s", self.peer_host)
            self.close()
            return
        finally:
            # What the frames asked to append still lies in the buffer: write it out first.
            self.traffic.frames += frames
            broker.finish_round()
            self._in_read = False
            if self.closed:
                start = end
            if start < end or not received.clear():
                self._keep_rest(start)
        if start == end or self._paused:
            self.incomplete_since = None
        elif start > first or self.incomplete_since is None:
            self.incomplete_since = self.last_active
        self._flush()

    def _keep_rest(self, start: int) -> None:
        """Keep what is not handled, with room for the next read."""
        # While it is suspended nothing is read: the buffer stays as it is.
        grow = not self._suspensions and not self.closed
        if not self._received.keep(start, self._limits.max_request_bytes + 4, grow=grow):
            self.close("all receive buffers are in use")

    def shrink(self) -> None:
        """Give a grown buffer back while nothing is in it."""
        self._received.shrink()

    def _pause(self) -> None:
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def _resume_if_caught_up(self) -> None:
        if (
            self._paused
            and not self.closed
            and not self._stopped
            and not self._suspensions
            and len(self._slots) <= self._limits.max_inflight_requests // 2
            and self._outgoing_bytes < self._limits.max_unsent_bytes
        ):
            self._paused = False
            # Frames may lie in the buffer already, and no read would announce them. They come
            # first: until they are handled there may be no room to read into.
            self._broker.loop.call_soon(self._handle_waiting)

    def _handle_waiting(self) -> None:
        if not self._is_open():
            return
        received = self._received
        if received.pending:
            received.resume()
            self._handle_frames()
        else:
            self._keep_rest(received.start)
        if self._is_open():
            assert self._transport is not None
            self._transport.resume_reading()

    def _is_open(self) -> bool:
        return not self.closed and not self._paused

    # ---- waiting -------------------------------------------------------------------------

    def suspend(self) -> None:
        """Handle no more requests until `proceed`; they wait in the buffer and the network."""
        self._suspensions += 1
        self._pause()

    def proceed(self) -> None:
        """End one suspension."""
        self._suspensions -= 1
        self._resume_if_caught_up()

    def mute(self, delay_ms: int) -> None:
        """Be suspended for so long, or for as long as it already is if that is longer."""
        until = self._broker.loop.time() + delay_ms / 1000
        if self.closed or until <= self._muted_until:
            return
        if self._mute is None:
            self.suspend()
        else:
            self._mute.cancel()
        self._muted_until = until
        self._mute = self._broker.loop.call_at(until, self._unmute)

    def _unmute(self) -> None:
        self._mute = None
        self.proceed()

    def peer_has_left(self) -> bool:
        """Whether the client has closed its end; also while nothing is read from it."""
        if self._transport is None or self._transport.is_closing():
            return True
        if not _CLOSED_BY_PEER:
            return False
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), _CLOSED_BY_PEER)
        return bool(poll.poll(0))

    # ---- out -----------------------------------------------------------------------------

    def open_slot(self) -> Slot:
        """The next place in the order of answers."""
        slot = Slot(self)
        self._slots.append(slot)
        return slot

    def take_slot(self, slot: Slot) -> None:
        """Put a slot that was made elsewhere into the order of answers."""
        self._slots.append(slot)

    async def turn_of(self, slot: Slot) -> None:
        """Wait until all earlier requests of this connection are answered."""
        if self._slots and self._slots[0] is not slot and not self.closed:
            turn = self._turns[slot] = asyncio.Event()
            await turn.wait()

    def answered(self) -> None:
        """A slot was answered; several of them at once cost one write."""
        if not self._in_read and not self._flush_scheduled and not self.closed:
            self._flush_scheduled = True
            self._broker.loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Send what is answered, as far as the order allows."""
        self._flush_scheduled = False
        if self.closed:
            return
        slots, outgoing = self._slots, self._outgoing
        before = self._outgoing_bytes
        while slots and slots[0].ready:
            slot = slots.popleft()
            self._outgoing_bytes += slot.size
            outgoing.extend(slot.parts)
        self.traffic.bytes_out += self._outgoing_bytes - before
        if slots and slots[0] in self._turns:
            self._turns.pop(slots[0]).set()
        if outgoing and not self._send_blocked and not self._transport_full:
            self._send()
        if self._outgoing_bytes > self._limits.max_unsent_bytes:
            self._pause()
        elif self._paused:
            self._resume_if_caught_up()

    def _send(self) -> None:
        """Hand over what can go now: short parts to the transport, long slices by sendfile."""
        assert self._transport is not None
        outgoing = self._outgoing
        short: list[bytes | bytearray | memoryview] = []
        short_bytes = 0
        while outgoing:
            if short_bytes >= _WRITE_BYTES:
                self._transport.write(b"".join(short))
                short, short_bytes = [], 0
                if self._transport_full:
                    # The rest stays in its files until the reader has taken this.
                    return
            part = outgoing[0]
            if isinstance(part, Slice):
                if self._can_sendfile(part):
                    if not self._send_file(short, part):
                        return
                    short, short_bytes = [], 0
                    continue
                data = self._read(part)
                if data is None:
                    return
                part = data
            short.append(part)
            short_bytes += len(part)
            outgoing.popleft()
        self._outgoing_bytes = 0
        if short:
            if len(short) == 1:
                self._transport.write(short[0])
            else:
                self._transport.write(b"".join(short))

    def _read(self, part: Slice) -> bytes | None:
        try:
            data = part.read()
        except StorageError as error:
            self.close(str(error))
            return None
        if len(data) != part.length:
            self.close("a log file is shorter than it should be")
            return None
        return data

    def _can_sendfile(self, part: Slice) -> bool:
        worth_it = part.length >= _SENDFILE_FROM_BYTES and part.file.fileno() >= 0
        return _HAS_SENDFILE and worth_it and self._open_send_socket()

    def _open_send_socket(self) -> bool:
        """Have a descriptor of its own for sendfile; False if none is left."""
        if self._send_socket is None:
            assert self._transport is not None
            original = self._transport.get_extra_info("socket")
            try:
                self._send_socket = socket.socket(fileno=os.dup(original.fileno()))
            except OSError:
                # It is read and sent as other answers are.
                return False
            self._send_socket.setblocking(False)
        return True

    def _send_file(self, short: list[bytes | bytearray | memoryview], part: Slice) -> bool:
        """Send `short` and then the slice; whether all of it went."""
        assert self._transport is not None
        if self._transport.get_write_buffer_size():
            # `resume_writing` comes back here once the transport has sent what it holds.
            self._outgoing.extendleft(reversed(short))
            self._transport_full = True
            return False
        assert self._send_socket is not None
        if short:
            head = b"".join(short)
            sent = self._send_head(head)
            if sent < len(head):
                self._outgoing.appendleft(head[sent:])
                return self._wait_writable()
        while part.length:
            try:
                sent = os.sendfile(
                    self._send_socket.fileno(), part.file.fileno(), part.position, part.length
                )
            except BlockingIOError:
                return self._wait_writable()
            except OSError as error:
                self.close(None if error.errno in _GONE else str(error))
                return False
            if not sent:
                self.close("a log file is shorter than it should be")
                return False
            part.position += sent
            part.length -= sent
        self._outgoing.popleft()
        return True

    def _send_head(self, head: bytes) -> int:
        assert self._send_socket is not None
        try:
            return self._send_socket.send(head, socket.MSG_MORE)
        except OSError:
            # Full for now, or gone: the sendfile after it will tell.
            return 0

    def _wait_writable(self) -> bool:
        assert self._send_socket is not None
        if not self._send_blocked:
            self._send_blocked = True
            self._broker.loop.add_writer(self._send_socket.fileno(), self._writable)
        return False

    def _writable(self) -> None:
        assert self._send_socket is not None
        self._send_blocked = False
        self._broker.loop.remove_writer(self._send_socket.fileno())
        self._flush()

    def pause_writing(self) -> None:
        self._transport_full = True

    def resume_writing(self) -> None:
        self._transport_full = False
        if self._outgoing or self._paused:
            self._flush()


def tune(transport: asyncio.BaseTransport) -> None:
    """Small answers leave at once."""
    sock = transport.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
