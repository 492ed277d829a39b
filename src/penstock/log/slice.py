"""A stretch of the log where it lies, so that it can be sent without being read."""

from __future__ import annotations

from penstock.log.disk import File


class Slice:
    """Whole batches in a file, to be read or sent from there; its length is theirs in bytes."""

    __slots__ = ("file", "length", "position")

    def __init__(self, file: File, position: int, length: int) -> None:
        self.file = file
        self.position = position
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __repr__(self) -> str:
        return f"Slice({self.position}..{self.position + self.length})"

    def read(self) -> bytes:
        """The bytes themselves."""
        return self.file.pread(self.length, self.position)
