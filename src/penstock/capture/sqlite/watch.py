"""Who wakes the stream: the operating system, when somebody writes to the database's files.

Linux tells by inotify, which is reached through ctypes. Elsewhere, and on file systems that do not
tell, the stream looks by itself every few milliseconds; so a wake-up that is missed costs time and
nothing else.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import struct
import sys
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Final

_MODIFY, _MOVED_TO, _CREATE, _DELETE = 0x2, 0x80, 0x100, 0x200
_NONBLOCK_CLOEXEC: Final = os.O_NONBLOCK | getattr(os, "O_CLOEXEC", 0)
_EVENT: Final = struct.Struct("iIII")
# How often we look where nobody tells.
_LOOK_MS: Final = 20
# Writers make a commit visible a moment after they have written it: look again so soon after.
_AGAIN_MS: Final = (1, 2, 5, 10, 20)


class Watch:
    """Waits for writes to one database; `wake` ends a wait from another thread."""

    def __init__(self, path: Path) -> None:
        self._names = {path.name + end for end in ("", "-wal", "-journal")}
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._inotify = _inotify(path.parent)
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)
        if self._inotify is not None:
            self._poll.register(self._inotify, select.POLLIN)
        # Pauses until we look again although nobody has told anything more.
        self._again: list[int] = []
        # So that nobody wakes through a number that is another file's by now.
        self._lock = Lock()
        self._closed = False

    @property
    def is_told(self) -> bool:
        return self._inotify is not None

    def wake(self) -> None:
        with self._lock:
            if self._closed:
                return
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake_write, b"\0")

    def wait(self, timeout_ms: float) -> None:
        """Return when there may be something to read, at the latest after so long."""
        deadline = monotonic() + timeout_ms / 1000
        while True:
            left_ms = (deadline - monotonic()) * 1000
            pause = min(left_ms, self._again.pop(0) if self._again else left_ms)
            if self._inotify is None:
                pause = min(pause, _LOOK_MS)
            short = pause < left_ms
            ready = {fd for fd, _ in self._poll.poll(max(pause, 0))}
            if self._wake_read in ready:
                _drain(self._wake_read)
                return
            if self._inotify in ready and self._is_ours(_drain(self._inotify or 0)):
                self._again = list(_AGAIN_MS)
                return
            if not ready and (short or monotonic() >= deadline):
                return

    def quiet(self) -> None:
        """Something was found: no need to look again by ourselves."""
        self._again = []

    def _is_ours(self, events: bytes) -> bool:
        at = 0
        while at + _EVENT.size <= len(events):
            _, _, _, length = _EVENT.unpack_from(events, at)
            at += _EVENT.size
            name = events[at : at + length].rstrip(b"\0")
            if os.fsdecode(name) in self._names:
                return True
            at += length
        return False

    def close(self) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            for number in (self._wake_read, self._wake_write, self._inotify):
                if number is not None:
                    os.close(number)


def _inotify(folder: Path) -> int | None:
    if not sys.platform.startswith("linux"):
        return None
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        number: int = libc.inotify_init1(_NONBLOCK_CLOEXEC)
    except (OSError, AttributeError):
        return None
    if number < 0:
        return None
    mask = _MODIFY | _MOVED_TO | _CREATE | _DELETE
    if libc.inotify_add_watch(number, os.fsencode(folder), mask) < 0:
        os.close(number)
        return None
    return number


def _drain(number: int) -> bytes:
    found = b""
    while True:
        try:
            part = os.read(number, 65536)
        except BlockingIOError:
            return found
        found += part
        if len(part) < 65536:
            return found
