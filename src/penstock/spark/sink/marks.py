"""Which micro-batch of a query was written last: a record in the log, in the same transaction.

The topic `__penstock_flows` has one compacted partition; the key is the query's name, the value
says which batch of which checkpoint (Spark's id of the query, which lives in it).

Read it after the query's transactional id was taken over: then nothing of the query's own is
undecided. Others that write here may have transactions open, and a reader of committed records
would stop in front of them; so all is read, and the markers of the query's own producer decide.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from typing import Final

from penstock.client.connection import Cluster
from penstock.client.errors import ClientError
from penstock.client.fetching import Fetcher
from penstock.client.metadata import EARLIEST, LATEST, Metadata, offsets
from penstock.client.topics import create
from penstock.client.transactions import Ids
from penstock.records.batch import headers
from penstock.records.control import read_marker
from penstock.records.record import BatchOptions, Record, decode, encode
from penstock.spark.sink.errors import SinkError

TOPIC: Final = "__penstock_flows"
PARTITION: Final = 0
_CONFIG: Final = {
    "cleanup.policy": "compact",
    "min.cleanable.dirty.ratio": "0.1",
    "segment.bytes": str(16 << 20),
}
_WAIT_MS: Final = 500
# Without any progress for so long, reading is given up.
_PATIENCE_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Mark:
    """The last micro-batch that was written, of which life of the query."""

    query_id: str
    batch_id: int
    records: int = 0

    def value(self) -> bytes:
        told = {"query": self.query_id, "batch": self.batch_id, "records": self.records}
        return json.dumps(told).encode()

    @classmethod
    def from_value(cls, value: bytes) -> Mark:
        try:
            told = json.loads(value)
            return cls(str(told["query"]), int(told["batch"]), int(told.get("records", 0)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SinkError(
                f"{TOPIC} has a record that is not a mark: {value[:100]!r}",
                advice="Somebody else writes there. Give the query a new name, which starts anew.",
            ) from error


def make_topic(cluster: Cluster) -> None:
    """Make sure that there is the topic of marks."""
    if not Metadata(cluster).topics([TOPIC]):
        create(cluster, TOPIC, partitions=1, config=_CONFIG, exists_ok=True)


def packed(name: str, mark: Mark, ids: Ids) -> bytes:
    """A mark as the batch that goes into the transaction."""
    record = Record(0, time.time_ns() // 1_000_000, name.encode(), mark.value())
    return encode(
        [record],
        BatchOptions(
            producer_id=ids.producer_id,
            producer_epoch=ids.epoch,
            base_sequence=0,
            transactional=True,
        ),
    )


def last(cluster: Cluster, name: str, *, timeout_s: float = _PATIENCE_S) -> Mark | None:
    """The last mark of a query that was committed."""
    place = (TOPIC, PARTITION)
    at = offsets(cluster, {place: EARLIEST}, isolation="read_uncommitted")[place]
    end = offsets(cluster, {place: LATEST}, isolation="read_uncommitted")[place]
    scan = _Scan(name.encode())
    deadline = time.monotonic() + timeout_s
    with Fetcher(cluster, isolation="read_uncommitted") as fetcher:
        while at < end:
            told = fetcher.fetch({place: at}, _WAIT_MS).get(place)
            reached = at if told is None else scan.read(told.data, at)
            if reached > at:
                at, deadline = reached, time.monotonic() + timeout_s
            elif time.monotonic() > deadline:
                raise ClientError(f"{TOPIC} cannot be read from offset {at} to its end at {end}")
    return scan.result()


class _Scan:
    """Finds the last mark among all batches, as they come."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._committed: Mark | None = None
        # A mark whose transaction has not ended so far as we have read, and its producer.
        self._open: tuple[int, Mark] | None = None

    def read(self, data: memoryview, at: int) -> int:
        """Take batches in; the offset after them."""
        for start, header in headers(data):
            batch = data[start : start + header.size]
            if header.next_offset <= at:
                continue
            at = header.next_offset
            if header.is_control:
                self._end(header.producer_id, batch)
                continue
            # A broker may be set to compress whatever it is given.
            if not header.codec and self._key not in bytes(batch):
                continue
            for record in decode(batch):
                if record.key == self._key and record.value is not None:
                    self._settle()
                    self._open = (header.producer_id, Mark.from_value(record.value))
        return at

    def _end(self, producer_id: int, batch: memoryview) -> None:
        if self._open is None or self._open[0] != producer_id:
            return
        marker = read_marker(batch)
        if marker is not None and not marker.commit:
            self._open = None
        self._settle()

    def _settle(self) -> None:
        if self._open is not None:
            self._committed, self._open = self._open[1], None

    def result(self) -> Mark | None:
        # Nothing of ours is undecided: a mark that was not aborted counts.
        self._settle()
        return self._committed
