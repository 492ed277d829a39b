"""Housekeeping: round by round on a moved clock, with failing partitions, and with crashes."""

from __future__ import annotations

import asyncio
import errno
import random
import threading
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker.upkeep.compactor import ChildCompactor
from penstock.broker.upkeep.housekeeping import Housekeeping, release_unused_indexes
from penstock.errors import StorageError
from penstock.log.archive import Archive, ArchivedRead, DirectoryArchive
from penstock.log.compaction import Job, Result, compact
from penstock.log.config import TopicConfig
from penstock.log.disk import Disk, OsDisk
from penstock.log.partition import Partition, PartitionId
from penstock.log.segment import Segment
from penstock.log.slice import Slice
from penstock.log.store import LogStore
from penstock.testing.clock import ManualClock
from penstock.testing.faults import SimulatedCrash, SimulatedDisk
from tests.log.keeping import (
    FOLDER,
    Pair,
    append,
    close_segment,
    consume,
    contents,
    fill,
    stored,
    sync,
)
from tests.waiting import eventually

DAY_MS = 24 * 3_600_000
PLAIN = TopicConfig(retention_ms=DAY_MS, segment_bytes=1024)
COMPACTED = TopicConfig(
    cleanup_policy=("compact",), min_cleanable_dirty_ratio=0.1, segment_bytes=1024
)
ARCHIVED = TopicConfig(
    remote_storage_enable=True, local_retention_ms=0, segment_bytes=1024, retention_ms=DAY_MS
)


class HereAndNow:
    """Compacts on the spot: deterministic, and on any disk."""

    async def run(self, disk: Disk, folder: str, job: Job) -> Result:
        return compact(disk, folder, job)


class Setting:
    """A store with some topics, and its housekeeping."""

    def __init__(
        self,
        disk: Disk,
        configs: dict[str, TopicConfig],
        *,
        clock: ManualClock | None = None,
        archive: Archive | None = None,
        folder: str = FOLDER,
    ) -> None:
        self.clock = clock or ManualClock()
        self.store = LogStore(folder, disk, self.clock)
        self.store.open()
        for name, config in configs.items():
            topic_id = uuid.uuid5(uuid.NAMESPACE_DNS, name)
            self.store.load(PartitionId(name, 0), config, topic_id=topic_id)
        self.housekeeping = Housekeeping(
            self.store, archive=archive, interval_ms=1, compactor=HereAndNow()
        )

    def __getitem__(self, name: str) -> Partition:
        return self.store.partitions[PartitionId(name, 0)]

    def rounds(self, count: int = 1) -> None:
        async def several() -> None:
            for _ in range(count):
                await self.housekeeping.run_once()

        asyncio.run(several())


def failure_of(partition: Partition) -> StorageError | None:
    return partition.failure


def in_memory(segment: Segment) -> bool:
    return segment._index is not None


def keyed(partition: Partition, count: int, keys: int = 3) -> None:
    for at in range(count):
        append(partition, [(b"%d" % (at % keys), b"%d" % at * 20)])
    sync(partition)


def test_one_round_does_everything() -> None:
    archive = DirectoryArchive("/archive", SimulatedDisk())
    configs = {"plain": PLAIN, "compacted": COMPACTED, "archived": ARCHIVED}
    setting = Setting(SimulatedDisk(), configs, archive=archive)
    fill(setting["plain"], 20)
    keyed(setting["compacted"], 60)
    fill(setting["archived"], 20)
    close_segment(setting["compacted"])
    records = consume(setting["archived"])
    setting.clock.advance(DAY_MS // 2)
    setting.rounds(2)
    assert [r.offset for r in consume(setting["compacted"])] == [57, 58, 59]
    assert setting["archived"].segments[0].base_offset > 0
    assert consume(setting["archived"]) == records
    assert len(consume(setting["plain"])) == 20
    setting.clock.advance(DAY_MS)
    setting.rounds(3)
    for name in ("plain", "archived"):
        partition = setting[name]
        assert partition.log_start == partition.log_end == 20
        assert partition.size_bytes == 0
        assert consume(partition) == []
    folder = setting["archived"].archived.manifest.folder
    assert archive.names(folder) == [f"{folder}/manifest.json"]
    counters = setting.housekeeping.counters
    assert counters.failures == 0
    assert counters.compactions == 1
    assert counters.records_removed == 57
    assert counters.segments_removed > 6
    assert counters.segments_archived > 2
    setting.store.close()


def test_a_restart_finds_what_housekeeping_wrote_down() -> None:
    disk = SimulatedDisk()
    setting = Setting(disk, {"plain": PLAIN, "compacted": COMPACTED})
    fill(setting["plain"], 20)
    keyed(setting["compacted"], 30)
    close_segment(setting["compacted"])
    setting["plain"].delete_before(7)
    setting.rounds()
    setting.store.abandon()
    again = Setting(disk, {"plain": PLAIN, "compacted": COMPACTED}, clock=setting.clock)
    assert again["plain"].log_start == 7
    assert again["plain"].log_end == 20
    again.rounds()
    assert again.housekeeping.counters.compactions == 0


def test_a_bad_partition_stops_nobody_else() -> None:
    disk = SimulatedDisk()
    configs = {"bad": COMPACTED, "good": COMPACTED, "plain": PLAIN}
    setting = Setting(disk, configs)
    for name in ("bad", "good"):
        keyed(setting[name], 30)
        close_segment(setting[name])
    fill(setting["plain"], 20)
    disk.damage(setting["bad"].closed[0].path(".log"), 70)
    setting.clock.advance(2 * DAY_MS)
    setting.rounds(2)
    assert [r.offset for r in consume(setting["good"])] == [27, 28, 29]
    assert setting["plain"].log_start == 20
    assert setting.housekeeping.counters.failures == 1
    # It is not tried at every round, but it is tried again.
    setting.clock.advance(1000)
    setting.rounds(2)
    assert setting.housekeeping.counters.failures == 2
    setting.clock.advance(1000)
    setting.rounds()
    assert setting.housekeeping.counters.failures == 2


def test_a_failed_partition_is_repaired_when_the_disk_is() -> None:
    disk = SimulatedDisk()
    setting = Setting(disk, {"plain": PLAIN})
    partition = setting["plain"]
    fill(partition, 3)
    append(partition, [(None, b"lost")])
    disk.fail("sync", times=-1, path_part="plain-0")
    plan = partition.plan_sync()
    plan.run()
    partition.finish_sync(plan)
    setting.rounds(3)
    assert partition.failure is not None
    assert setting.housekeeping.counters.failures == 1
    disk.heal()
    setting.clock.advance(60_000)
    setting.rounds()
    assert failure_of(partition) is None
    assert setting.housekeeping.counters.repairs == 1
    assert append(partition, [(None, b"next")]) == 4


def test_retention_makes_room_on_a_full_disk() -> None:
    disk = SimulatedDisk()
    setting = Setting(disk, {"plain": PLAIN, "old": PLAIN})
    fill(setting["plain"], 30)
    fill(setting["old"], 30)
    setting.clock.advance(2 * DAY_MS)
    fill(setting["plain"], 1)
    disk.fail("write", times=-1, error=errno.ENOSPC)
    disk.fail("open", times=-1, error=errno.ENOSPC)
    used = disk.used_bytes
    setting.rounds(2)
    assert disk.used_bytes < used
    assert setting["plain"].log_start > 20
    disk.heal()
    setting.clock.advance(1000)
    setting.rounds(2)
    assert setting["old"].log_start == 30


def test_an_interrupted_swap_is_finished_in_a_later_round() -> None:
    disk = SimulatedDisk()
    setting = Setting(disk, {"compacted": COMPACTED})
    partition = setting["compacted"]
    keyed(partition, 60)
    close_segment(partition)
    before = consume(partition)
    disk.fail("rename", nth=3, times=2, path_part="cleaned")
    setting.rounds()
    assert consume(partition) == before
    setting.clock.advance(1000)
    setting.rounds()
    assert consume(partition) == before
    setting.clock.advance(2000)
    setting.rounds()
    assert [r.offset for r in consume(partition)] == [57, 58, 59]
    assert setting.housekeeping.counters.failures == 2


def test_syncs_are_left_to_whoever_does_them() -> None:
    setting = Setting(SimulatedDisk(), {"plain": PLAIN})
    asked: list[Partition] = []
    housekeeping = Housekeeping(setting.store, request_sync=asked.append)
    append(setting["plain"], [(None, b"x")])
    asyncio.run(housekeeping.run_once())
    assert asked == [setting["plain"]]
    assert setting["plain"].visible == 0
    setting.rounds()
    assert setting["plain"].visible == 1


def test_silent_producers_and_unused_indexes_are_forgotten() -> None:
    setting = Setting(SimulatedDisk(), {"plain": PLAIN})
    partition = setting["plain"]
    fill(partition, 20)
    first, second = partition.closed[:2]
    assert first.index.positions is not None
    release_unused_indexes(partition)
    release_unused_indexes(partition)
    assert not in_memory(first)
    consume(partition)
    release_unused_indexes(partition)
    assert in_memory(first)
    assert in_memory(second)
    release_unused_indexes(partition)
    assert not in_memory(first)
    assert consume(partition)[0].offset == 0


def test_what_a_child_could_not_open_is_compacted_on_a_thread() -> None:
    config = TopicConfig(
        cleanup_policy=("compact",),
        min_cleanable_dirty_ratio=0.1,
        segment_bytes=1024,
        durability="memory",
    )
    setting = Setting(SimulatedDisk(), {"memory": config})
    setting.housekeeping = Housekeeping(setting.store)
    partition = setting["memory"]
    for at in range(60):
        append(partition, [(b"%d" % (at % 3), b"%d" % at * 20)])
    partition.roll()
    setting.rounds()
    assert [r.offset for r in stored(partition)] == [57, 58, 59]
    assert [r.offset for r in consume(partition)] == [57, 58, 59]


# ---- the archive -----------------------------------------------------------------------------


class Unreliable(DirectoryArchive):
    """Out of reach while `down`."""

    down = False

    def size(self, name: str) -> int | None:
        if self.down:
            raise StorageError("the archive is out of reach")
        return super().size(name)


def test_an_archive_out_of_reach_is_tried_again() -> None:
    archive = Unreliable("/archive", SimulatedDisk())
    archive.down = True
    setting = Setting(SimulatedDisk(), {"archived": ARCHIVED}, archive=archive)
    partition = setting["archived"]
    fill(partition, 20)
    records = consume(partition)
    setting.rounds(5)
    assert setting.housekeeping.counters.failures == 1
    assert partition.segments[0].base_offset == 0
    archive.down = False
    setting.clock.advance(1000)
    setting.rounds(2)
    assert len(partition.segments) == 1
    assert isinstance(partition.read(0, 100), ArchivedRead)
    assert consume(partition) == records


def test_a_topic_that_wants_an_archive_and_has_none_keeps_its_segments(
    caplog: pytest.LogCaptureFixture,
) -> None:
    setting = Setting(SimulatedDisk(), {"archived": ARCHIVED})
    fill(setting["archived"], 20)
    setting.rounds(3)
    assert isinstance(setting["archived"].read(0, 100), Slice)
    assert caplog.text.count("has no archive") == 1


def test_what_a_deleted_topic_had_in_the_archive_goes() -> None:
    disk, place = SimulatedDisk(), SimulatedDisk()
    archive = Unreliable("/archive", place)
    setting = Setting(disk, {"archived": ARCHIVED, "other": ARCHIVED}, archive=archive)
    for name in ("archived", "other"):
        fill(setting[name], 20)
    setting.rounds(2)
    folder = setting["archived"].archived.manifest.folder
    kept = setting["other"].archived.manifest.folder
    asyncio.run(setting.housekeeping.let_go(setting["archived"]))
    setting.store.delete(PartitionId("archived", 0))
    # The broker stops before the objects are gone, and knows it at the next start.
    setting.store.close()
    again = Setting(disk, {"other": ARCHIVED}, clock=setting.clock, archive=archive)
    assert archive.names(folder) != []
    again.rounds()
    assert archive.names(folder) == []
    assert archive.names(kept) != []
    assert len(consume(again["other"])) == 20


def test_a_deletion_that_nobody_noted_is_noticed() -> None:
    archive = DirectoryArchive("/archive", SimulatedDisk())
    setting = Setting(SimulatedDisk(), {"archived": ARCHIVED}, archive=archive)
    fill(setting["archived"], 20)
    setting.rounds(2)
    folder = setting["archived"].archived.manifest.folder
    setting.store.delete(PartitionId("archived", 0))
    setting.rounds()
    assert archive.names(folder) == []


# ---- as a task -------------------------------------------------------------------------------


async def until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(eventually, condition)


@pytest.mark.processes
def test_it_runs_until_it_is_stopped(tmp_path: Path) -> None:
    async def scenario() -> None:
        setting = Setting(OsDisk(), {"compacted": COMPACTED}, folder=str(tmp_path / "data"))
        partition = setting["compacted"]
        keyed(partition, 60)
        close_segment(partition)
        housekeeping = Housekeeping(setting.store, interval_ms=5)

        housekeeping.start()
        await until(lambda: housekeeping.counters.compactions > 0)
        await housekeeping.stop()
        assert contents(partition) == [
            (at, b"%d" % (at % 3), b"%d" % at * 20) for at in (57, 58, 59)
        ]
        assert housekeeping.counters.failures == 0
        setting.store.close()

    asyncio.run(scenario())


def test_a_stop_ends_the_child_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A worker that never answers: reading its input is all it does.
    monkeypatch.setattr("penstock.broker.upkeep.compactor._WORKER", "asyncio")

    async def scenario() -> None:
        setting = Setting(OsDisk(), {"compacted": COMPACTED}, folder=str(tmp_path / "data"))
        keyed(setting["compacted"], 60)
        close_segment(setting["compacted"])
        housekeeping = Housekeeping(setting.store, interval_ms=5)
        housekeeping.start()

        await until(lambda: any(t.name.startswith("compaction") for t in threading.enumerate()))
        await asyncio.wait_for(housekeeping.stop(), 20)
        assert len(consume(setting["compacted"])) == 60
        setting.store.close()

    asyncio.run(scenario())


@pytest.mark.processes
def test_a_child_that_dies_is_a_failure_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.broker.upkeep.compactor._WORKER", "penstock.no_such_module")

    async def scenario() -> None:
        setting = Setting(OsDisk(), {"compacted": COMPACTED}, folder=str(tmp_path / "data"))
        keyed(setting["compacted"], 60)
        close_segment(setting["compacted"])
        housekeeping = Housekeeping(setting.store, compactor=ChildCompactor())
        await housekeeping.run_once()
        assert housekeeping.counters.failures == 1
        assert len(consume(setting["compacted"])) == 60
        setting.store.close()

    asyncio.run(scenario())


# ---- crashes ---------------------------------------------------------------------------------

TOPICS = {"plain": PLAIN, "compacted": COMPACTED, "archived": ARCHIVED}


class Life:
    """Writes, time and housekeeping, from crash to crash, beside what must be true."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.disk = SimulatedDisk(seed)
        self.clock = ManualClock()
        # By topic: key and value of every record at its offset; and when it was written.
        self.written: dict[str, list[tuple[Pair, int]]] = {name: [] for name in TOPICS}
        # What was visible once must stay so.
        self.promised = dict.fromkeys(TOPICS, 0)

    def open(self) -> Setting:
        archive = DirectoryArchive("/archive", self.disk)
        return Setting(self.disk, TOPICS, clock=self.clock, archive=archive)

    def run(self) -> None:
        """A few rounds, in the middle of which the machine stops."""
        setting = self.open()
        self.check(setting)
        self.disk.crash_at(self.rng.randint(1, 400))
        for _ in range(4):
            for name in TOPICS:
                self.write(setting, name)
            self.clock.advance(self.rng.choice([1000, DAY_MS // 3]))
            setting.rounds()
            self.check(setting)
        self.disk.crash()
        raise SimulatedCrash

    def write(self, setting: Setting, name: str) -> None:
        partition = setting[name]
        for _ in range(self.rng.randint(0, 12)):
            key = b"%d" % self.rng.randrange(4)
            value = None if self.rng.random() < 0.2 else self.rng.randbytes(60)
            # Noted first: a crash may come after the write. One that came before a sync may have
            # taken records, and their offsets come again.
            self.written[name][partition.log_end :] = [((key, value), self.clock.now_ms())]
            append(partition, [(key, value)])
        if self.rng.random() < 0.5:
            partition.roll()
        sync(partition)
        self.promised[name] = partition.visible

    def check(self, setting: Setting) -> None:
        for name, written in self.written.items():
            partition = setting[name]
            assert partition.visible >= self.promised[name], name
            records = consume(partition)
            assert [(r.key, r.value) for r in records] == [written[r.offset][0] for r in records]
            offsets = {r.offset for r in records}
            visible = written[: partition.visible]
            if name == "compacted":
                self.check_keys(offsets, [pair for pair, _ in visible])
                continue
            assert offsets == set(range(partition.log_start, partition.visible)), name
            now_ms = self.clock.now_ms()
            young = {at for at, (_, time_ms) in enumerate(visible) if now_ms - time_ms <= DAY_MS}
            assert young <= offsets, name

    def check_keys(self, offsets: set[int], visible: list[Pair]) -> None:
        """The latest value of each key is there; of a deleted one nothing, or the tombstone too."""
        latest = {key: at for at, (key, _) in enumerate(visible)}
        for key, at in latest.items():
            if visible[at][1] is not None:
                assert at in offsets
            elif at not in offsets:
                assert not [other for other in offsets if visible[other][0] == key]


def test_a_crash_during_housekeeping_loses_nothing(seed: int) -> None:
    for number in range(25):
        life = Life(seed + number)
        try:
            for _ in range(4):
                with pytest.raises(SimulatedCrash):
                    life.run()
                life.disk = life.disk.after_crash()
        except BaseException as error:
            error.add_note(f"seed {seed + number}")
            raise
