"""Which leader epoch began at which offset.

The epoch rises with every start after an unclean stop. A client that knows the epoch of what it
read last can ask where that epoch ended, and so learns whether the log was cut behind its back.
The file is Kafka's `leader-epoch-checkpoint`; every batch carries its epoch as well, so what the
file lacks after a crash is found again by recovery.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Final

from penstock.errors import StorageError
from penstock.log.checkpoint import read_checkpoint, write_checkpoint
from penstock.log.disk import Disk

FILE_NAME: Final = "leader-epoch-checkpoint"


class LeaderEpochs:
    """Epochs and their first offsets, both rising."""

    __slots__ = ("_disk", "_path", "_saved", "entries")

    def __init__(self, disk: Disk, folder: str) -> None:
        self._disk = disk
        self._path = os.path.join(folder, FILE_NAME)
        self.entries: list[tuple[int, int]] = []
        self._saved: list[tuple[int, int]] = []

    def load(self) -> None:
        rows = read_checkpoint(self._disk, self._path, columns=2) or []
        try:
            self.entries = [(int(epoch), int(start)) for epoch, start in rows]
        except ValueError:
            self.entries = []
        self._saved = list(self.entries)

    def use_disk(self, disk: Disk) -> None:
        """Go on with another way to the same file."""
        self._disk = disk

    def restore(self, entries: Iterable[Sequence[int]]) -> None:
        """Begin with what the file holds, known from elsewhere."""
        self.entries = [(epoch, start) for epoch, start in entries]
        self._saved = list(self.entries)

    @property
    def latest(self) -> int:
        return self.entries[-1][0] if self.entries else -1

    def observe(self, epoch: int, offset: int) -> None:
        """Take in a batch that is already in the log."""
        if epoch > self.latest:
            self.entries.append((epoch, offset))

    def holds(self, epoch: int, offset: int) -> bool:
        """Whether a record at the offset can be of the epoch, as far as is known."""
        known = next((e for e, start in reversed(self.entries) if start <= offset), epoch)
        return epoch == known

    def assign(self, epoch: int, offset: int) -> None:
        """A new epoch begins at the offset; durable on return, or it has not begun."""
        if epoch > self.latest:
            self.entries.append((epoch, offset))
            try:
                self.save()
            except StorageError:
                self.entries.pop()
                raise

    def truncate(self, offset: int) -> None:
        """Epochs that began at or after the offset did not happen."""
        self.entries = [entry for entry in self.entries if entry[1] < offset]

    def save(self) -> bool:
        """Durable on return; whether there was something to write, and the folder was synced."""
        if self.entries == self._saved:
            return False
        write_checkpoint(self._disk, self._path, self.entries)
        self._saved = list(self.entries)
        return True

    def end_of(self, epoch: int, log_end: int) -> tuple[int, int]:
        """The largest known epoch not above `epoch` and the offset where it ended.

        As Kafka answers: -1, -1 for an epoch that is not known yet; for one before all that are
        known, that epoch and where the first of them begins.
        """
        if epoch < 0 or epoch > self.latest:
            return -1, -1
        found, end = epoch, log_end
        for known, start in reversed(self.entries):
            if known <= epoch:
                found = known
                break
            end = start
        return found, end
