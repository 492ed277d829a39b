"""Follows partitions of topics: their records as columns, as they are appended.

A thread fetches and decodes ahead of whoever takes the records; what it holds is bounded in rows
and in bytes. Records come in order within a partition. What readers of committed records must not
see is passed over, so a position may move without records.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from penstock.client.connection import Cluster
from penstock.client.fetching import Fetched, Fetcher
from penstock.client.metadata import Place
from penstock.records.columns.decode import decode

AHEAD_ROWS: Final = 200_000
AHEAD_BYTES: Final = 64 << 20
_WAIT_MS: Final = 500
# Unfolded bytes of one piece.
_PIECE_BYTES: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class Piece:
    """Records of one partition that follow each other, maybe none, and where the next ones are."""

    partition: Place
    records: pa.RecordBatch
    next_offset: int

    @property
    def size(self) -> int:
        return int(self.records.nbytes)


class Tail:
    """Follows partitions from given offsets on; a context manager.

    With `until` each partition named there ends at its offset, and the tail with the last of them.
    """

    def __init__(
        self,
        cluster: Cluster,
        start: Mapping[Place, int],
        *,
        until: Mapping[Place, int] | None = None,
        ahead_rows: int = AHEAD_ROWS,
        ahead_bytes: int = AHEAD_BYTES,
    ) -> None:
        # The next offset of each partition, after what was taken.
        self.positions: dict[Place, int] = dict(start)
        self._until = until
        # Connections are not for two threads.
        self._cluster = cluster.another()
        self._fetcher = Fetcher(self._cluster)
        self._ahead_rows, self._ahead_bytes = ahead_rows, ahead_bytes
        self._changed = threading.Condition()
        self._pieces: deque[Piece] = deque()
        self._rows = self._bytes = 0
        self._error: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="tail", daemon=True)
        self._thread.start()

    def __enter__(self) -> Tail:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def is_done(self) -> bool:
        """Whether everything up to `until` was taken."""
        return self._until is not None and all(
            self.positions.get(partition, 0) >= end for partition, end in self._until.items()
        )

    def take(self, max_rows: int, timeout_s: float) -> list[Piece]:
        """What there is, up to about `max_rows`; waits for the first piece, nothing if none comes.

        What ended the thread is raised once everything before it was taken: OffsetGoneError where
        the log does not have an offset any more.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._pieces or self._error, timeout_s)
            if not self._pieces and self._error is not None:
                raise self._error
            taken: list[Piece] = []
            rows = 0
            while self._pieces:
                if taken and rows + self._pieces[0].records.num_rows > max_rows:
                    break
                piece = self._pieces.popleft() if taken else self._cut(max_rows)
                rows += piece.records.num_rows
                self._rows -= piece.records.num_rows
                self._bytes -= piece.size
                taken.append(piece)
                self.positions[piece.partition] = piece.next_offset
            self._changed.notify_all()
            return taken

    def _cut(self, max_rows: int) -> Piece:
        """The first piece, or as much of it as is asked for."""
        piece = self._pieces.popleft()
        if piece.records.num_rows <= max_rows:
            return piece
        head, rest = piece.records.slice(0, max_rows), piece.records.slice(max_rows)
        self._bytes -= piece.size - head.nbytes - rest.nbytes
        self._pieces.appendleft(Piece(piece.partition, rest, piece.next_offset))
        return Piece(piece.partition, head, int(rest.column("offset")[0].as_py()))

    def close(self) -> None:
        """End the thread, and give connections back; what was not taken is dropped."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        self._thread.join()
        self._fetcher.close()
        self._cluster.close()

    # ---- the thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._fetch()
        except BaseException as error:  # for the thread that takes
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _fetch(self) -> None:
        left = {place: at for place, at in self.positions.items() if at < self._end(place)}
        while left and not self._stopping:
            began = time.monotonic()
            answers = self._fetcher.fetch(left, _WAIT_MS)
            moved = False
            for place, fetched in answers.items():
                moved |= self._decode(place, fetched, left)
            if not moved and not answers:
                # Partitions in trouble are asked for again by the fetcher, with pauses of its own.
                with self._changed:
                    spent_s = time.monotonic() - began
                    self._changed.wait_for(lambda: self._stopping, max(0.0, 0.02 - spent_s))

    def _end(self, place: Place) -> int:
        return self._until.get(place, 0) if self._until is not None else 2**63 - 1

    def _decode(self, place: Place, fetched: Fetched, left: dict[Place, int]) -> bool:
        """Hand on what was fetched of a partition; whether its position has moved."""
        data, aborted = fetched.data, fetched.aborted
        begin = left[place]
        end = self._end(place)
        while data and left[place] < end:
            decoded = decode(
                data,
                first_offset=left[place],
                end_offset=None if self._until is None else end,
                aborted=aborted,
                limit_bytes=_PIECE_BYTES,
            )
            if not decoded.bytes_used:
                break
            next_offset = max(left[place], min(decoded.next_offset, end))
            left[place] = next_offset
            self._put(Piece(place, decoded.batch, next_offset))
            data, aborted = data[decoded.bytes_used :], decoded.aborted
        moved = left[place] > begin
        if left[place] >= end:
            del left[place]
        return moved

    def _put(self, piece: Piece) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: (
                    self._stopping
                    or not self._pieces
                    or (self._rows < self._ahead_rows and self._bytes < self._ahead_bytes)
                )
            )
            self._pieces.append(piece)
            self._rows += piece.records.num_rows
            self._bytes += piece.size
            self._changed.notify_all()
