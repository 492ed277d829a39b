"""Disks for brokers in tests: one that can be held, and helpers for the one that fails."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from penstock.log.disk import OsDisk, OsFile
from penstock.testing.broker import Broker
from penstock.testing.faults import SimulatedDisk
from penstock.testing.history import History, Place, Read
from tests.broker import requests as rq
from tests.broker.raw import RawClient

PRODUCE = rq.BY_NAME["produce"]
FETCH = 11


class HeldDisk(OsDisk):
    """A real disk on which syncs of some files take as long as the test wants."""

    def __init__(self, path_part: str) -> None:
        self._path_part = path_part
        self.go = threading.Event()
        self.go.set()
        self.waiting = threading.Semaphore(0)

    def open(self, path: str, *, create: bool = False) -> OsFile:
        file = super().open(path, create=create)
        if self._path_part not in path:
            return file
        return _HeldFile(os.dup(file.fileno()), path, self)


class _HeldFile(OsFile):
    def __init__(self, fd: int, path: str, disk: HeldDisk) -> None:
        super().__init__(fd, path)
        self._disk = disk

    def sync(self) -> None:
        if not self._disk.go.is_set():
            self._disk.waiting.release()
            assert self._disk.go.wait(60), "the test has forgotten to let the disk go on"
        super().sync()


@contextmanager
def broker_on(disk: SimulatedDisk, **settings: Any) -> Iterator[Broker]:
    """A broker on a simulated disk; housekeeping keeps still until it is called."""
    settings = {"durability": "disk", "housekeeping_interval_ms": 3_600_000, **settings}
    with Broker(disk=disk, **settings) as broker:
        yield broker


class Writer:
    """Writes to one partition and remembers what was acknowledged."""

    def __init__(self, client: RawClient, topic: str, partition: int = 0) -> None:
        self.client = client
        self.place = Place(topic, partition)
        self.history = History()
        self._count = 0

    def write(self, size: int = 100, *, acks: int = -1) -> int:
        """Send a record; the error code of the answer."""
        value = b"%s %d " % (self.place.topic.encode(), self._count) + b"x" * size
        self._count += 1
        self.history.sending("writer", self.place, None, value)
        request = rq.produce(
            self.place.topic, rq.batch(value), acks=acks, partition=self.place.partition
        )
        answer = rq.one(self.client.call(request, PRODUCE))
        if not answer.error_code:
            self.history.acknowledged(self.place, answer.base_offset, None, value)
        return int(answer.error_code)

    def write_until_refused(self, size: int, limit: int = 10_000) -> int:
        """Write until there is an error; its code."""
        for _ in range(limit):
            code = self.write(size)
            if code:
                return code
        raise AssertionError("nothing was refused")

    def verify(self, client: RawClient | None = None) -> None:
        """Read everything back and compare."""
        verify(client or self.client, self.history)


def verify(client: RawClient, history: History, *, compacted: frozenset[str] = frozenset()) -> int:
    """Read every partition of a history and compare; how many records there were."""
    count = 0
    for place in history.places():
        end = history.end(place)
        found, log_start = read_all(client, place)
        count += len(found)
        history.verify(
            place, found, end=end, log_start=log_start, compacted=place.topic in compacted
        )
    return count


def read_all(client: RawClient, place: Place) -> tuple[list[Read], int]:
    """All visible records of a partition, and where it begins now."""
    request = rq.list_offsets(place.topic, rq.EARLIEST, partition=place.partition)
    listed = rq.one(client.call(request))
    assert not listed.error_code, (place, listed)
    offset = log_start = listed.offset
    found: list[Read] = []
    while True:
        fetched = rq.one(client.call(rq.fetch(place.topic, {place.partition: offset}), FETCH))
        if fetched.error_code == 1:
            # Retention was quicker than we are: begin anew where the log begins now.
            return read_all(client, place)
        assert not fetched.error_code, (place, offset, fetched)
        records = [r for r in rq.records_of(fetched.records) if r.offset >= offset]
        found += [Read(record.offset, record.key, record.value) for record in records]
        if not records and offset >= fetched.high_watermark:
            return found, max(log_start, fetched.log_start_offset)
        # Compaction may have emptied the rest of a batch or more.
        offset = records[-1].offset + 1 if records else fetched.high_watermark
