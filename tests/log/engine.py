"""One partition on a simulated disk, and the few things that tests do to it."""

from __future__ import annotations

import uuid
from collections.abc import Iterable

from penstock.log.config import TopicConfig
from penstock.log.partition import Partition, PartitionId
from penstock.log.slice import Slice
from penstock.log.store import LogStore
from penstock.records.batch import headers
from penstock.records.record import BatchOptions, Record, decode, encode
from penstock.testing.clock import ManualClock
from penstock.testing.faults import SimulatedDisk

FOLDER = "/data/penstock"
ID = PartitionId("topic", 0)
PARTITION_FOLDER = f"{FOLDER}/{ID}"
TOPIC_ID = uuid.UUID(int=1)
SMALL = TopicConfig(segment_bytes=1000, index_interval_bytes=100)


class Engine:
    """A store with one partition; `reopen` starts the next process on what is left."""

    def __init__(self, config: TopicConfig = SMALL, disk: SimulatedDisk | None = None) -> None:
        self.config = config
        self.disk = disk or SimulatedDisk(1)
        self.clock = ManualClock()
        self.epoch = 0
        self.open()

    def open(self) -> Partition:
        self.store = LogStore(FOLDER, self.disk, self.clock)
        self.store.open()
        self.partition = self.store.load(
            ID, self.config, topic_id=TOPIC_ID, leader_epoch=self.epoch
        )
        return self.partition

    def reopen(self) -> Partition:
        """After a clean stop."""
        self.store.close()
        return self.open()

    def kill(self) -> Partition:
        """After a crash of the process."""
        self.disk.crash(power_loss=False)
        return self.recover()

    def lose_power(self) -> Partition:
        """After a power loss."""
        self.disk.crash()
        return self.recover()

    def recover(self) -> Partition:
        self.disk = self.disk.after_crash()
        self.epoch += 1
        return self.open()

    def write(self, *texts: str, sync: bool = True) -> None:
        """One batch for each text."""
        for text in texts:
            self.partition.append(batch(text, timestamp_ms=self.clock.now_ms()))
        if sync:
            self.sync()

    def sync(self) -> None:
        plan = self.partition.plan_sync()
        plan.run()
        self.partition.finish_sync(plan)

    def path(self, name: str) -> str:
        return f"{PARTITION_FOLDER}/{name}"

    def names(self, suffix: str = "") -> list[str]:
        return [name for name in self.disk.names(PARTITION_FOLDER) if name.endswith(suffix)]

    def log_bytes(self) -> dict[str, bytes]:
        """The content of every log file."""
        found = {}
        for name in self.names(".log"):
            file = self.disk.open(self.path(name))
            found[name] = file.pread(file.size(), 0)
            file.close()
        return found


def batch(
    *texts: str,
    timestamp_ms: int = 1_700_000_000_000,
    producer: tuple[int, int, int] | None = None,
    codec: int = 0,
) -> bytes:
    """A batch of text values; `producer` is id, epoch and first sequence."""
    options = BatchOptions(codec) if producer is None else BatchOptions(codec, *producer)
    records = [Record(at, timestamp_ms, b"key", text.encode()) for at, text in enumerate(texts)]
    return encode(records, options)


def read(partition: Partition, offset: int | None = None, max_bytes: int = 500) -> list[Record]:
    """All visible records from an offset on, as a consumer gets them."""
    at = partition.log_start if offset is None else offset
    found: list[Record] = []
    while (piece := partition.read(at, max_bytes)) is not None:
        assert isinstance(piece, Slice)
        data = piece.read()
        end = 0
        for position, header in headers(data):
            end = position + header.size
            found += decode(data[position:end])
            at = header.next_offset
        assert end == len(data), "something that is no batch"
    first = partition.log_start if offset is None else offset
    return [record for record in found if record.offset >= first]


def texts(partition: Partition, offset: int | None = None) -> list[str]:
    return [(record.value or b"").decode() for record in read(partition, offset)]


def numbered(numbers: Iterable[int]) -> list[str]:
    """Texts of a hundred characters: ten batches or less fill a small segment."""
    return [f"{number:03d}" + "." * 97 for number in numbers]
