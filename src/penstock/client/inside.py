"""A topic as it is for whoever has a transaction open: what is committed, and its own records.

A reader of committed records sees nothing from the first open transaction on; a reader of
uncommitted ones sees what was aborted, too. So up to the end of what is decided the former is
asked, and from there on the latter, twice: the first time only for who wrote what and how it ended
(the markers in the log say it), the second time for the records. What is open counts if it is ours;
of others nobody knows yet what becomes of it.

All that was written must be acknowledged before (`LogWriter.flush`). One thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Final

import numpy as np
import pyarrow as pa

from penstock.client.connection import Cluster
from penstock.client.fetching import Fetched, Fetcher
from penstock.client.metadata import EARLIEST, LATEST, Isolation, Metadata, Place, offsets
from penstock.client.reading import TIMEOUT_S, walk
from penstock.records.batch import headers
from penstock.records.columns.decode import decode
from penstock.records.control import read_marker

Aborted = tuple[tuple[int, int], ...]

_FETCH_BYTES: Final = 1 << 20


class Inside:
    """One look at a topic: where it began and ends is settled when it is made."""

    def __init__(
        self,
        cluster: Cluster,
        topic: str,
        producers: Collection[int],
        *,
        start: Mapping[int, int] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """`producers` are our ids; what lies before `start`, by partition, is passed over."""
        self._cluster = cluster
        self._producers = frozenset(producers)
        self._timeout_s = timeout_s
        self._metadata = Metadata(cluster, timeout_s=timeout_s)
        places = [(topic, number) for number in self._metadata.partitions(topic)]

        def ask(which: int, *, decided: bool) -> dict[Place, int]:
            return offsets(
                cluster,
                dict.fromkeys(places, which),
                isolation="read_committed" if decided else "read_uncommitted",
                metadata=self._metadata,
                timeout_s=timeout_s,
            )

        # In this order: what is decided never lies beyond the end.
        self._decided = ask(LATEST, decided=True)
        self._ends = ask(LATEST, decided=False)
        given = {(topic, number): offset for number, offset in (start or {}).items()}
        wanted = {
            # A topic that ends before it is another one of the same name.
            place: given.get(place, 0) if given.get(place, 0) <= self._ends[place] else 0
            for place in places
        }
        self._earliest = partial(ask, EARLIEST, decided=True)
        earliest = self._earliest()
        self._starts = {place: max(first, earliest[place]) for place, first in wanted.items()}
        # Whether the log does not have all of it any more, or had not when it was read to its end.
        # Compaction never moves a log's start: only retention and the deletion of records do.
        self.is_cut = self._starts != wanted

    @property
    def ends(self) -> dict[int, int]:
        """Where each partition ends, for the `start` of the next look."""
        return {number: offset for (_, number), offset in self._ends.items()}

    @property
    def count(self) -> int:
        """How many records there are to be read, at most."""
        return sum(self._ends[place] - first for place, first in self._starts.items())

    def read(self) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Partitions' numbers and their records as columns, each partition's in order."""
        for place, batch in self._committed():
            yield place[1], batch
        for place, batch in self._tail():
            yield place[1], batch
        # What went meanwhile was passed over.
        for place, first in self._earliest().items():
            self.is_cut |= min(first, self._ends[place]) > self._starts[place]

    def _left(self, starts: Mapping[Place, int], ends: Mapping[Place, int]) -> dict[Place, int]:
        return {place: first for place, first in starts.items() if first < ends[place]}

    def _committed(self) -> Iterator[tuple[Place, pa.RecordBatch]]:
        ends, left = self._decided, self._left(self._starts, self._decided)

        def look(place: Place, fetched: Fetched) -> tuple[int, pa.RecordBatch | None]:
            decoded = decode(
                fetched.data,
                first_offset=left[place],
                end_offset=ends[place],
                aborted=fetched.aborted,
            )
            return decoded.next_offset, decoded.batch if decoded.batch.num_rows else None

        with self._fetcher("read_committed") as fetcher:
            yield from walk(fetcher, left, ends, look, timeout_s=self._timeout_s)

    def _tail(self) -> Iterator[tuple[Place, pa.RecordBatch]]:
        """What lies beyond the end of what is decided."""
        ends = self._ends
        # Whatever `start` says: transactions are to be seen from their beginnings.
        aborted = self._undone(self._left(self._decided, ends))
        left = self._left(self._decided, ends)

        def look(place: Place, fetched: Fetched) -> tuple[int, pa.RecordBatch | None]:
            decoded = decode(
                fetched.data,
                first_offset=left[place],
                end_offset=ends[place],
                aborted=aborted.get(place, ()),
            )
            aborted[place] = decoded.aborted
            found = decoded.batch
            known = int(np.searchsorted(found.column("offset").to_numpy(), self._starts[place]))
            return decoded.next_offset, found.slice(known) if known < found.num_rows else None

        with self._fetcher("read_uncommitted") as fetcher:
            yield from walk(fetcher, left, ends, look, timeout_s=self._timeout_s)

    def _undone(self, left: dict[Place, int]) -> dict[Place, Aborted]:
        """Transactions that do not count, as producers and the offsets where they begin."""
        open_: dict[Place, dict[int, int]] = {place: {} for place in left}
        gone: dict[Place, list[tuple[int, int]]] = {place: [] for place in left}

        def look(place: Place, fetched: Fetched) -> tuple[int, None]:
            next_offset = left[place]
            for at, header in headers(fetched.data):
                if header.is_control:
                    marker = read_marker(fetched.data[at : at + header.size])
                    first = open_[place].pop(header.producer_id, None)
                    if marker is not None and not marker.commit and first is not None:
                        gone[place].append((header.producer_id, first))
                elif header.is_transactional:
                    open_[place].setdefault(header.producer_id, header.base_offset)
                next_offset = max(next_offset, header.next_offset)
            return min(next_offset, self._ends[place]), None

        with self._fetcher("read_uncommitted") as fetcher:
            for _ in walk(fetcher, left, self._ends, look, timeout_s=self._timeout_s):
                pass
        for place, producers in open_.items():
            gone[place] += [item for item in producers.items() if item[0] not in self._producers]
        return {place: tuple(items) for place, items in gone.items()}

    def _fetcher(self, isolation: Isolation) -> Fetcher:
        return Fetcher(
            self._cluster,
            isolation=isolation,
            # What is unfolded may be many times as much, and only one batch of it is looked at.
            partition_max_bytes=_FETCH_BYTES,
            metadata=self._metadata,
            timeout_s=self._timeout_s,
        )
