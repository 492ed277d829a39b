"""The journal by itself, on a disk that fails at awkward moments."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from penstock.broker.catalog import JOURNAL_TOPIC
from penstock.broker.committer import Committer
from penstock.broker.journal import Journal, Key
from penstock.broker.waiting import SyncWaiters
from penstock.errors import DiskFullError, StorageError
from penstock.log.store import LogStore
from penstock.testing.faults import SimulatedDisk

JOURNAL = f"{JOURNAL_TOPIC}-0"
RECORDS = f"{JOURNAL}/0"


class Keeper:
    """What the entries say, and a beginning that may fail."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.state: dict[Key, Any] = {}
        self.begun = 0
        self.fail_begin = False
        self.store = LogStore("/simulated/data", self.disk)
        self.waiters = SyncWaiters()
        self.journal = Journal(self.store, self.waiters, "disk")

    def begin(self) -> None:
        if self.fail_begin:
            raise StorageError("no room")
        self.begun += 1

    async def run(self, story: Callable[[Keeper], Coroutine[Any, Any, None]]) -> None:
        self.store.open()
        committer = Committer(self.waiters.release)
        self.waiters.attach(committer)
        self.journal.open(self.state.__setitem__, self.state.clear, self.begin)
        try:
            await story(self)
        finally:
            await committer.close()

    def after_a_kill(self) -> dict[Key, Any]:
        """What another process would find."""
        self.store.abandon()
        store = LogStore("/simulated/data", self.disk)
        store.open()
        found: dict[Key, Any] = {}
        Journal(store, SyncWaiters(), "disk").open(found.__setitem__, found.clear, lambda: None)
        return found

    async def fail_sync(self) -> None:
        """Lose an entry to a failed sync."""
        self.disk.fail("sync", path_part=JOURNAL)
        self.journal.write([(("lost",), 1)])
        with pytest.raises(StorageError):
            await self.journal.durable()


def play(story: Callable[[Keeper], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(Keeper().run(story))


def test_a_beginning_that_fails_is_made_up_for() -> None:
    async def story(keeper: Keeper) -> None:
        journal = keeper.journal
        journal.write([(("kept",), 1)])
        await journal.durable()
        await keeper.fail_sync()
        keeper.fail_begin = True
        for _ in range(2):
            with pytest.raises(StorageError, match="no room"):
                journal.write([(("new",), 1)])
        keeper.fail_begin = False
        with pytest.raises(StorageError, match="ask once more"):
            journal.write([(("new",), 1)])
        assert keeper.begun == 1
        assert keeper.state == {("kept",): 1}
        journal.write([(("new",), 1)])
        await journal.durable()
        assert keeper.state == {("kept",): 1, ("new",): 1}

    play(story)


def test_a_start_knows_that_a_sync_had_failed_before() -> None:
    async def story(keeper: Keeper) -> None:
        assert not keeper.journal.doubtful
        keeper.journal.write([(("kept",), 1)])
        await keeper.journal.durable()
        await keeper.fail_sync()
        # The process is killed before the repair.
        keeper.store.abandon()
        store = LogStore("/simulated/data", keeper.disk)
        store.open()
        again = Journal(store, keeper.waiters, "disk")
        again.open(keeper.state.__setitem__, keeper.state.clear, keeper.begin)
        assert again.doubtful

    play(story)


def test_what_nobody_waits_for_is_synced_a_moment_later() -> None:
    async def story(keeper: Keeper) -> None:
        partition = keeper.journal.partition
        keeper.journal.write([(("unhurried",), 1)], hurry=False)
        assert not partition.sync_running
        assert partition.visible < partition.log_end
        synced: asyncio.Future[StorageError | None] = asyncio.get_running_loop().create_future()
        keeper.waiters.add(partition, partition.log_end, synced.set_result)
        async with asyncio.timeout(60):
            assert await synced is None
        keeper.journal.write([(("another",), 1)], hurry=False)
        # Whoever waits does not wait for that moment.
        keeper.journal.stop()
        await keeper.journal.durable()
        assert partition.visible == partition.log_end

    play(story)


def test_what_is_put_off_goes_with_the_next_entry_in_one_batch() -> None:
    async def story(keeper: Keeper) -> None:
        journal, partition = keeper.journal, keeper.journal.partition
        journal.write([(("first",), 0)])
        await journal.durable()
        end = partition.log_end
        journal.put_off([(("first",), 1), (("second",), 1)])
        journal.put_off([(("first",), 2)])
        assert keeper.state == {("first",): 2, ("second",): 1}
        assert partition.log_end == end
        journal.write([(("third",), 1)])
        assert partition.log_end == end + 4
        assert [header.record_count for header, _ in partition.batches()][1:] == [4]
        await journal.durable()
        assert keeper.after_a_kill() == {("first",): 2, ("second",): 1, ("third",): 1}

    play(story)


@pytest.mark.parametrize("how", ["waited for", "a moment later", "stopped", "killed"])
def test_what_is_put_off_is_lost_with_the_process_and_only_then(how: str) -> None:
    async def story(keeper: Keeper) -> None:
        journal, partition = keeper.journal, keeper.journal.partition
        journal.put_off([(("late",), 1)])
        match how:
            case "waited for":
                await journal.durable()
                assert partition.visible == partition.log_end == 1
            case "a moment later":
                synced: asyncio.Future[StorageError | None]
                synced = asyncio.get_running_loop().create_future()
                keeper.waiters.add(partition, 1, synced.set_result)
                async with asyncio.timeout(60):
                    assert await synced is None
            case "stopped":
                journal.stop()
            case _:
                journal.stop(keep=False)
        assert keeper.after_a_kill() == ({} if how == "killed" else {("late",): 1})

    play(story)


def test_what_was_put_off_outlives_a_failed_append() -> None:
    async def story(keeper: Keeper) -> None:
        journal = keeper.journal
        journal.put_off([(("late",), 1)])
        keeper.disk.fail("write", times=2, error=errno.ENOSPC, path_part=RECORDS)
        with pytest.raises(StorageError):
            journal.write([(("more",), 1)])
        with pytest.raises(StorageError):
            await journal.durable()
        # Nothing was promised, so nothing is lost and nothing is read again.
        assert keeper.state == {("late",): 1}
        journal.write([(("more",), 1)])
        await journal.durable()
        assert keeper.begun == 0
        assert keeper.after_a_kill() == keeper.state == {("late",): 1, ("more",): 1}

    play(story)


def test_what_was_put_off_is_tried_again_without_being_asked() -> None:
    async def story(keeper: Keeper) -> None:
        journal, partition = keeper.journal, keeper.journal.partition
        keeper.disk.fail("write", times=2, error=errno.ENOSPC, path_part=RECORDS)
        journal.put_off([(("late",), 1)])
        synced: asyncio.Future[StorageError | None] = asyncio.get_running_loop().create_future()
        keeper.waiters.add(partition, 1, synced.set_result)
        async with asyncio.timeout(60):
            assert await synced is None
        assert keeper.begun == 0
        assert keeper.after_a_kill() == keeper.state == {("late",): 1}

    play(story)


def test_what_was_put_off_is_not_tried_again_after_the_end() -> None:
    async def story(keeper: Keeper) -> None:
        journal = keeper.journal
        journal.put_off([(("late",), 1)])
        keeper.disk.fail("write", error=errno.ENOSPC, path_part=RECORDS)
        journal.stop()
        assert journal._unhurried is None
        assert keeper.after_a_kill() == {}

    play(story)


@pytest.mark.parametrize("how", ["staged", "half of it appended", "disk failed"])
def test_what_was_put_off_does_not_outlive_a_failure_of_more(how: str) -> None:
    async def story(keeper: Keeper) -> None:
        journal, told = keeper.journal, list[StorageError | None]()
        journal.put_off([(("late",), 1)])
        match how:
            case "staged":
                journal.stage([(("promised",), 1)])
                journal.when_durable(told.append)
                keeper.disk.fail("write", error=errno.ENOSPC, path_part=RECORDS)
            case "half of it appended":
                journal.put_off([(("many", number), 1) for number in range(1_000)])
                keeper.disk.fail("write", nth=2, error=errno.ENOSPC, path_part=RECORDS)
            case _:
                keeper.disk.fail("write", error=errno.ENOSPC, path_part=RECORDS)
                keeper.disk.fail("truncate", path_part=RECORDS)
        with pytest.raises(StorageError):
            journal.write([(("more",), 1)])
        assert [type(error) for error in told] == [DiskFullError] * (how == "staged")
        # The state was ahead of the journal: it is read again.
        with pytest.raises(StorageError, match="read again"):
            journal.write([(("more",), 1)])
        assert keeper.state == ({("late",): 1} if how == "half of it appended" else {})
        journal.write([(("more",), 1)])
        await journal.durable()
        assert keeper.after_a_kill() == keeper.state

    play(story)


def test_who_waits_for_what_was_put_off_is_told_that_it_failed() -> None:
    """It was put off in a turn in which what had been staged is appended already."""

    async def story(keeper: Keeper) -> None:
        journal, told = keeper.journal, list[StorageError | None]()
        journal.stage([(("new",), 1)])
        journal.write([(("more",), 1)])
        journal.put_off([(("late",), 1)])
        journal.when_durable(told.append)
        keeper.disk.fail("write", error=errno.ENOSPC, path_part=RECORDS)
        await asyncio.sleep(0)
        assert [type(error) for error in told] == [DiskFullError]
        await journal.durable()
        assert keeper.begun == 0
        assert keeper.after_a_kill() == keeper.state
        assert keeper.state == {("new",): 1, ("more",): 1, ("late",): 1}

    play(story)


@pytest.mark.parametrize("appended", [False, True], ids=["staged", "appended"])
def test_what_rests_on_a_lost_state_is_not_confirmed(appended: bool) -> None:
    """The disk fails and is repaired by somebody else, between an entry and the turn's end."""

    async def story(keeper: Keeper) -> None:
        journal, told = keeper.journal, list[StorageError | None]()
        journal.stage([(("new",), 1)])
        journal.when_durable(told.append)
        if appended:
            journal.write([(("more",), 1)])
        journal.partition.refuse_staged(StorageError("the disk is on fire"))
        journal.partition.repair()
        await asyncio.sleep(0)
        assert [type(error) for error in told] == [StorageError]
        while keeper.begun == 0:
            # While a sync is under way it cannot be repaired.
            with pytest.raises(StorageError):
                await journal.durable()
            await asyncio.sleep(0)
        assert keeper.state == {}

    play(story)
