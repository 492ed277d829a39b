"""The parts of overload without a broker: settings, what retention keeps, what nobody needs."""

from __future__ import annotations

import asyncio
import random

import pytest

from penstock.broker import overload
from penstock.broker.overload import Guard, first_record
from penstock.broker.upkeep.housekeeping import Housekeeping
from penstock.broker.waiting import SyncWaiters
from penstock.errors import ConfigError, StorageError
from penstock.log import retention
from penstock.log.archive import DirectoryArchive
from penstock.log.config import DISCARD_OLDEST, TopicConfig, topic_config
from penstock.log.partition import Partition
from penstock.log.store import LogStore
from penstock.testing.clock import ManualClock
from penstock.testing.faults import SimulatedDisk
from tests.harness.profiles import BOUNDED_LOGS
from tests.log.keeping import (
    ID,
    append,
    close_segment,
    end_transaction,
    open_store,
    sync,
    write_in_transaction,
)

BOUND = 10_000
GUARDED = TopicConfig(
    overflow="reject",
    overflow_groups=("g",),
    retention_bytes=BOUND,
    retention_ms=-1,
    segment_bytes=1_000,
    durability="os",
)


def partition_of(store: LogStore) -> Partition:
    return store.partitions[ID]


def write(partition: Partition, size: int = 400, times: int = 1) -> None:
    for _ in range(times):
        append(partition, [(None, b"v" * size)])


# ---- settings --------------------------------------------------------------------------------


def settings(**values: str) -> dict[str, str]:
    named = {"overflow": "block", "overflow_groups": "g", "retention_bytes": "1000000", **values}
    return {name.replace("_", "."): value for name, value in named.items() if value}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"overflow": "explode"}, "discard-oldest, block, reject"),
        ({"overflow_groups": ""}, "needs overflow.groups"),
        ({"overflow_groups": " , "}, "needs overflow.groups"),
        ({"overflow_groups": ",".join(map(str, range(101)))}, "at most 100"),
        ({"cleanup_policy": "compact"}, "only compacted"),
        ({"retention_bytes": "-1", "retention_ms": "-1"}, "needs a bound"),
        ({"retention_bytes": "0"}, "needs room"),
        ({"retention_ms": "0"}, "needs room"),
    ],
)
def test_what_is_not_accepted(wrong: dict[str, str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        topic_config(settings(**wrong))


def test_what_is_accepted() -> None:
    config = topic_config(settings(overflow_groups="b, a"))
    assert config.guarded
    assert config.overflow_groups == ("b", "a")
    assert topic_config(settings(retention_bytes="")).guarded
    assert topic_config(settings(cleanup_policy="compact,delete")).guarded
    assert topic_config(settings(remote_storage_enable="true")).guarded
    assert topic_config(settings(durability="memory")).guarded
    assert not topic_config({}).guarded
    # Names may be there already while the topic does not wait for them.
    assert not topic_config(settings(overflow=DISCARD_OLDEST)).guarded


def test_a_guarded_topic_has_several_segments_unless_it_says_otherwise() -> None:
    assert topic_config(settings()).segment_bytes == 125_000
    assert topic_config(settings(retention_bytes="1000")).segment_bytes == 64 << 10
    assert topic_config(settings(retention_bytes=str(1 << 40))).segment_bytes == 256 << 20
    assert topic_config(settings(segment_bytes="5000")).segment_bytes == 5_000
    assert topic_config({"retention.bytes": "1000000"}).segment_bytes == 256 << 20


# ---- retention -------------------------------------------------------------------------------


def removed(partition: Partition) -> int:
    """Let retention do what is due; where the log starts then."""
    removal = retention.expired(partition, partition.clock.now_ms())
    if removal is not None:
        removal.begin()
        removal.detach()
        removal.erase()
    return partition.log_start


@pytest.mark.parametrize("seed", range(BOUNDED_LOGS))
def test_nothing_that_is_needed_goes_and_the_rest_goes_at_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    partition = partition_of(open_store(GUARDED))
    needed = 0
    for _ in range(60):
        write(partition, rng.randint(10, 600), rng.randint(1, 4))
        sync(partition)
        needed = rng.randint(needed, partition.log_end)
        partition.keep_from = needed
        start, closed = removed(partition), partition.closed
        assert start <= needed, f"seed {seed}"
        oldest_end = partition.segments[1].base_offset if len(partition.segments) > 1 else None
        if closed and oldest_end is not None and oldest_end <= needed:
            assert retention.total_bytes(partition) < BOUND, f"seed {seed}"


def test_age_alone_removes_nothing_that_is_needed() -> None:
    clock = ManualClock()
    config = TopicConfig(
        overflow="block", overflow_groups=("g",), retention_ms=1_000, segment_bytes=1_000,
        durability="os",
    )  # fmt: skip
    partition = partition_of(open_store(config, clock))
    write(partition, times=10)
    sync(partition)
    clock.advance(60_000)
    assert not retention.roll_if_expired(partition, clock.now_ms())
    assert removed(partition) == 0
    partition.keep_from = 4
    assert removed(partition) == 4
    partition.keep_from = partition.log_end
    assert retention.roll_if_expired(partition, clock.now_ms())
    sync(partition)
    assert removed(partition) == 10


def test_before_anything_is_known_of_the_groups_nothing_goes() -> None:
    partition = partition_of(open_store(GUARDED))
    write(partition, times=60)
    sync(partition)
    assert removed(partition) == 0


def test_what_was_archived_counts_and_is_kept() -> None:
    clock, disk = ManualClock(), SimulatedDisk()
    config = TopicConfig(
        overflow="block", overflow_groups=("g",), retention_bytes=BOUND, retention_ms=-1,
        segment_bytes=1_000, remote_storage_enable=True, local_retention_bytes=0,
        durability="os",
    )  # fmt: skip
    store = open_store(config, clock, disk)
    partition = partition_of(store)
    housekeeping = Housekeeping(store, archive=DirectoryArchive("/archive", SimulatedDisk()))
    write(partition, times=30)

    async def rounds() -> None:
        for _ in range(4):
            await housekeeping.run_once()

    asyncio.run(rounds())
    guard = Guard(partition, "g")
    # Most of it is in the archive only by now, and all of it is still there.
    assert partition.segments[0].base_offset > 20
    assert partition.log_start == 0
    assert guard.size_bytes >= BOUND
    assert guard.full(clock.now_ms()) is not None
    assert first_record(partition, 3)[0] == 3
    partition.keep_from = 20
    asyncio.run(rounds())
    assert 0 < partition.log_start <= 20
    assert guard.full(clock.now_ms()) is None


# ---- what nobody needs -----------------------------------------------------------------------

TRANSACTIONAL = TopicConfig(segment_bytes=1_000, durability="os")


def test_markers_and_aborted_records_are_needed_by_nobody() -> None:
    partition = partition_of(open_store(TRANSACTIONAL))
    write(partition)  # 0
    write_in_transaction(partition, 7, [(None, b"a")])  # 1
    end_transaction(partition, 7, commit=True)  # 2
    write_in_transaction(partition, 7, [(None, b"a")] * 3)  # 3, 4, 5
    end_transaction(partition, 7, commit=False)  # 6
    write(partition, 900)  # 7, in a segment of its own
    end = partition.log_end
    sync(partition)
    places = [first_record(partition, offset)[0] for offset in range(end + 1)]
    assert places == [0, 1, 7, 7, 7, 7, 7, 7, 8]
    write_in_transaction(partition, 8, [(None, b"open")])  # 8
    assert first_record(partition, 8)[0] == 8


def test_a_long_run_of_aborted_records_is_looked_through_bit_by_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(overload, "MAX_SKIPPED_BATCHES", 10)
    clock = ManualClock()
    config = TopicConfig(overflow="block", overflow_groups=("g",), retention_ms=1_000)
    partition = partition_of(open_store(config, clock))
    for _ in range(20):
        write_in_transaction(partition, 7, [(None, b"a")])
        end_transaction(partition, 7, commit=False)
    clock.advance(2_000)
    guard, places = Guard(partition, "g"), []
    for _ in range(6):
        assert guard.full(clock.now_ms()) is None
        places.append(guard.needed)
    assert places == [10, 20, 30, 40, 40, 40]
    assert asyncio.run(overload._first_needed(partition, 0)) == 40
    write(partition)
    assert guard.full(clock.now_ms()) is None
    clock.advance(2_000)
    assert guard.full(clock.now_ms()) is not None


def test_gaps_are_skipped_and_the_start_of_the_log_counts() -> None:
    partition = partition_of(open_store(TRANSACTIONAL))
    write(partition, times=6)
    sync(partition)
    partition.delete_before(3)
    assert first_record(partition, 0)[0] == 3
    assert first_record(partition, 99)[0] == 6


def test_a_transaction_that_ends_a_full_log_does_not_block_it_for_ever() -> None:
    config = TopicConfig(
        overflow="block", overflow_groups=("g",), retention_bytes=1_000, retention_ms=-1,
        segment_bytes=1_000, durability="os",
    )  # fmt: skip
    partition = partition_of(open_store(config))
    write_in_transaction(partition, 7, [(None, b"v" * 900)])
    end_transaction(partition, 7, commit=True)
    guard = Guard(partition, "g")
    assert guard.full(partition.clock.now_ms()) is not None
    # The group has read the record and committed behind it, before the marker.
    partition.keep_from, _ = first_record(partition, 1)
    assert partition.keep_from == partition.log_end
    retention.roll_if_alone(partition)
    sync(partition)
    removed(partition)
    assert guard.full(partition.clock.now_ms()) is None


# ---- failed syncs ----------------------------------------------------------------------------


def test_who_waits_for_a_sync_is_told_before_the_repair_cuts_it_off() -> None:
    disk, clock = SimulatedDisk(), ManualClock()
    store = open_store(TopicConfig(segment_bytes=1_000, durability="disk"), clock, disk)
    partition = partition_of(store)
    write(partition)
    sync(partition)
    write(partition)
    waiters = SyncWaiters()
    told: list[StorageError | None] = []
    waiters.add(partition, partition.log_end, told.append)
    # The partition fails in a way that nobody is told of: a roll by age, say.
    partition.refuse_staged(StorageError("broken"))
    housekeeping = Housekeeping(store, request_sync=lambda _: None, release_waiters=waiters.release)
    asyncio.run(housekeeping.upkeep())
    assert partition.repairs == 1
    waiters.release(partition)
    assert [str(error) for error in told] == ["broken"]


def test_a_segment_that_is_all_there_is_is_closed_when_it_is_full() -> None:
    config = TopicConfig(
        overflow="block", overflow_groups=("g",), retention_bytes=1_000, retention_ms=-1,
        durability="os",
    )  # fmt: skip
    partition = partition_of(open_store(config))
    write(partition)
    assert not retention.roll_if_alone(partition)
    write(partition, 900)
    assert retention.roll_if_alone(partition)
    assert not retention.roll_if_alone(partition)
    write(partition)
    assert not retention.roll_if_alone(partition)
    close_segment(partition)
    assert removed(partition) == 0
