"""The place of an answer: answers leave a connection in the order of their requests."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from penstock.log.slice import Slice

if TYPE_CHECKING:
    from penstock.broker.connection import Connection

Part = bytes | bytearray | memoryview | Slice

_LENGTH: Final = struct.Struct(">i")


class Slot:
    """The place of one answer in the order of answers."""

    __slots__ = ("connection", "parts", "ready", "size")

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.parts: Sequence[Part] = ()
        self.size = 0
        self.ready = False

    def answer(self, parts: Sequence[Part]) -> None:
        """Give the answer: the whole response without its length; once."""
        size = sum(map(len, parts))
        self.parts = (_LENGTH.pack(size), *parts)
        self.size = size + 4
        self.ready = True
        self.connection.answered()

    def answer_frame(self, frame: bytes) -> None:
        """Give the answer as a frame that begins with its length."""
        self.parts = (frame,)
        self.size = len(frame)
        self.ready = True
        self.connection.answered()
