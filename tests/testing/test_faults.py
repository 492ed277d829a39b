"""The simulated disk keeps its own promises: what is synced stays, the rest may do anything."""

from __future__ import annotations

import errno

import pytest

from penstock.errors import DiskFullError, StorageError
from penstock.testing import ManualClock
from penstock.testing.faults import Operation, SimulatedCrash, SimulatedDisk, SimulatedFile
from penstock.testing.power_loss import PAGE_BYTES
from tests.harness.profiles import DISKS

SEEDS = range(DISKS)
BODY = bytes(range(1, 251)) * 12


def new_disk(seed: int = 0) -> SimulatedDisk:
    """With a folder and an empty file in it, both safe."""
    disk = SimulatedDisk(seed)
    disk.make_dirs("/d")
    disk.sync_dir("/")
    disk.open("/d/f", create=True).close()
    disk.sync_dir("/d")
    return disk


def content(disk: SimulatedDisk, path: str = "/d/f") -> bytes:
    file = disk.open(path)
    try:
        return file.pread(file.size(), 0)
    finally:
        file.close()


# ---- contents ----------------------------------------------------------------------------------


def test_what_is_synced_stays() -> None:
    for seed in SEEDS:
        disk = new_disk(seed)
        file = disk.open("/d/f")
        file.pwritev([BODY], 0)
        file.sync()
        file.pwritev([b"more"], len(BODY))
        assert content(disk.after_crash())[: len(BODY)] == BODY


def test_of_the_rest_a_power_loss_keeps_any_part() -> None:
    """Over many seeds everything that a real disk may do is seen."""
    seen = set()
    for seed in SEEDS:
        disk = new_disk(seed)
        file = disk.open("/d/f")
        file.pwritev([BODY], 0)
        left = content(disk.after_crash())
        assert len(left) <= len(BODY)
        if left == BODY:
            seen.add("all")
        elif not left:
            seen.add("nothing")
        elif BODY.startswith(left):
            seen.add("torn at a page" if len(left) % PAGE_BYTES == 0 else "torn at a byte")
        elif b"\x00" in left:
            seen.add("zeros")
        else:
            seen.add("garbage")
        if len(left) == len(BODY) != left.count(0) and left != BODY:
            seen.add("size without data")
        if left[-PAGE_BYTES:] == BODY[len(left) - PAGE_BYTES : len(left)] and left != BODY:
            seen.add("a later page without an earlier one")
    assert seen == {
        "all",
        "nothing",
        "torn at a byte",
        "torn at a page",
        "zeros",
        "garbage",
        "size without data",
        "a later page without an earlier one",
    }


def test_truncations_happen_in_order() -> None:
    for seed in SEEDS:
        disk = new_disk(seed)
        file = disk.open("/d/f")
        file.pwritev([b"a" * 100], 0)
        file.sync()
        file.truncate(50)
        file.pwritev([b"b" * 25], 50)
        left = content(disk.after_crash())
        assert left[:50] == b"a" * 50
        # Either nothing was cut, or the second write came, in whatever shape, after the cut.
        assert left[50:] == b"a" * 50 or (len(left) <= 75 and b"a" * 25 not in left[50:])


def test_a_killed_process_loses_nothing_but_makes_nothing_safe() -> None:
    lost = 0
    for seed in SEEDS:
        disk = new_disk(seed)
        disk.open("/d/f").pwritev([BODY], 0)
        disk.open("/d/g", create=True)
        disk.crash(power_loss=False)
        disk = disk.after_crash()
        assert content(disk) == BODY
        assert disk.exists("/d/g")
        disk = disk.after_crash()
        lost += content(disk) != BODY or not disk.exists("/d/g")
    assert lost > len(SEEDS) / 2


@pytest.mark.parametrize("forgets", [False, True])
def test_a_failed_sync_loses_what_was_pending(forgets: bool) -> None:
    lost = 0
    for seed in SEEDS[: DISKS // 3]:
        disk = new_disk(seed)
        disk.forgets_failed_pages = forgets
        file = disk.open("/d/f")
        file.pwritev([b"safe"], 0)
        file.sync()
        file.pwritev([BODY], 4)
        disk.fail("sync")
        with pytest.raises(StorageError):
            file.sync()
        kept = file.pread(1 << 20, 0)
        assert len(kept) == 4 + len(BODY)
        assert forgets or kept == b"safe" + BODY
        file.sync()
        left = content(disk.after_crash())
        assert left[:4] == b"safe"
        lost += left != b"safe" + BODY
    assert lost > DISKS // 6


def test_what_is_written_again_after_a_failed_sync_is_safe() -> None:
    for seed in SEEDS[: DISKS // 3]:
        disk = new_disk(seed)
        file = disk.open("/d/f")
        file.pwritev([BODY], 0)
        disk.fail("sync")
        with pytest.raises(StorageError):
            file.sync()
        file.pwritev([BODY], 0)
        file.sync()
        assert content(disk.after_crash()) == BODY


# ---- names -------------------------------------------------------------------------------------


def test_names_are_safe_once_their_folder_is_synced() -> None:
    seen = set()
    for seed in SEEDS:
        disk = new_disk(seed)
        disk.open("/d/g", create=True)
        disk.remove("/d/f")
        seen.add(tuple(disk.after_crash().names("/d")))
        disk = new_disk(seed)
        disk.open("/d/g", create=True)
        disk.remove("/d/f")
        disk.sync_dir("/d")
        assert disk.after_crash().names("/d") == ["g"]
    assert seen == {(), ("f",), ("g",), ("f", "g")}


def test_a_rename_is_atomic_and_a_file_has_one_name() -> None:
    seen = set()
    for seed in SEEDS:
        disk = new_disk(seed)
        file = disk.open("/d/new", create=True)
        file.pwritev([b"new"], 0)
        file.sync()
        disk.rename("/d/new", "/d/f")
        disk.rename("/d/f", "/d/e")
        after = disk.after_crash()
        found = {name: content(after, f"/d/{name}") for name in after.names("/d")}
        seen.add(tuple(sorted(found)))
        assert list(found.values()).count(b"new") <= 1
    assert ("e",) in seen
    assert ("f",) in seen
    assert ("f", "new") in seen


def test_a_folder_that_was_not_synced_is_lost_with_all_in_it() -> None:
    lost = 0
    for seed in SEEDS[: DISKS // 6]:
        disk = SimulatedDisk(seed)
        disk.make_dirs("/a/b")
        disk.sync_dir("/a")
        file = disk.open("/a/b/f", create=True)
        file.sync()
        disk.sync_dir("/a/b")
        lost += not disk.after_crash().exists("/a/b/f")
    assert 0 < lost < DISKS // 6


def test_removing_a_tree_may_be_done_in_part() -> None:
    seen = set()
    for seed in SEEDS[: DISKS // 3]:
        disk = new_disk(seed)
        disk.open("/d/g", create=True)
        disk.sync_dir("/d")
        disk.remove_tree("/d")
        assert not disk.exists("/d")
        after = disk.after_crash()
        seen.add(len(after.names("/d")) if after.exists("/d") else None)
    assert seen == {None, 0, 1, 2}


# ---- faults ------------------------------------------------------------------------------------


def test_the_same_seed_does_the_same() -> None:
    def life(seed: int) -> list[bytes]:
        disk = new_disk(seed)
        file = disk.open("/d/f")
        found = []
        for size in (1000, 2000, 3000):
            file.pwritev([BODY[:size]], 0)
            disk.crash_at(1)
            with pytest.raises(SimulatedCrash):
                file.sync()
            disk = disk.after_crash()
            file = disk.open("/d/f")
            found.append(file.pread(1 << 20, 0))
        return found

    assert life(7) == life(7)
    assert [life(seed) for seed in range(9)] == [life(seed) for seed in range(9)]
    assert life(7) != life(8)


def test_faults_come_when_they_were_asked_for() -> None:
    disk = new_disk()
    file = disk.open("/d/f")
    disk.fail("write", nth=3, times=2, error=errno.ENOSPC)
    outcomes = []
    for _ in range(6):
        try:
            file.pwritev([b"x"], 0)
            outcomes.append(True)
        except DiskFullError:
            outcomes.append(False)
    assert outcomes == [True, True, False, False, True, True]
    disk.fail("write", times=-1)
    for _ in range(3):
        with pytest.raises(StorageError):
            file.pwritev([b"x"], 0)
    disk.heal()
    file.pwritev([b"x"], 0)


def do_everything(disk: SimulatedDisk, file: SimulatedFile) -> None:
    file.pwritev([b"x"], 0)
    file.truncate(0)
    file.sync()
    file.pread(1, 0)
    disk.open("/d/g", create=True)
    disk.rename("/d/g", "/d/h")
    disk.remove("/d/h")
    disk.sync_dir("/d")


@pytest.mark.parametrize(
    "operation", ["read", "write", "truncate", "sync", "open", "rename", "remove", "sync_dir"]
)
def test_everything_can_fail(operation: Operation) -> None:
    disk = new_disk()
    file = disk.open("/d/f")
    disk.fail(operation, path_part="/d")
    with pytest.raises(StorageError, match="Input/output"):
        do_everything(disk, file)


def test_faults_on_one_file_only() -> None:
    disk = new_disk()
    disk.fail("write", path_part=".log")
    disk.open("/d/f").pwritev([b"x"], 0)
    with pytest.raises(StorageError):
        disk.open("/d/x.log", create=True).pwritev([b"x"], 0)


def test_a_failed_write_may_have_been_done_in_part() -> None:
    sizes = set()
    for seed in SEEDS[: DISKS // 6]:
        disk = new_disk(seed)
        file = disk.open("/d/f")
        disk.fail("write")
        with pytest.raises(StorageError):
            file.pwritev([b"12345"], 0)
        assert b"12345".startswith(content(disk))
        sizes.add(file.size())
    assert sizes == {0, 1, 2, 3, 4, 5}


def test_a_crash_ends_everything() -> None:
    disk = new_disk()
    file = disk.open("/d/f")
    release = disk.lock("/d/.lock")
    disk.crash_at(3)
    file.pwritev([b"one"], 0)
    file.sync()
    with pytest.raises(SimulatedCrash):
        file.pwritev([b"two"], 3)
    for action in (
        lambda: file.pread(1, 0),
        lambda: file.pwritev([b"x"], 0),
        lambda: disk.open("/d/f"),
        lambda: disk.names("/d"),
        lambda: disk.exists("/d"),
        lambda: disk.remove("/d/f"),
        lambda: disk.make_dirs("/x"),
    ):
        with pytest.raises(SimulatedCrash):
            action()
    # What cleans up on the way out does no harm.
    file.close()
    assert release is not None
    release()
    assert content(disk.after_crash())[:3] == b"one"
    assert disk.after_crash().lock("/d/.lock") is not None


def test_a_crash_is_no_exception() -> None:
    """Nothing that handles errors may go on as if it were one."""
    assert not issubclass(SimulatedCrash, Exception)


def test_space() -> None:
    disk = new_disk()
    disk.capacity_bytes = 10
    file = disk.open("/d/f")
    with pytest.raises(DiskFullError):
        file.pwritev([b"0123456789AB"], 0)
    assert (file.size(), disk.used_bytes) == (10, 10)
    file.pwritev([b"over"], 0)
    file.truncate(4)
    other = disk.open("/d/g", create=True)
    other.pwritev([b"123456"], 0)
    with pytest.raises(DiskFullError):
        other.pwritev([b"7"], 6)
    # A file that is removed gives its space back, also while it is still read.
    disk.remove("/d/f")
    assert file.pread(10, 0) == b"over"
    other.pwritev([b"7890"], 6)
    disk.capacity_bytes = None
    other.pwritev([b"more"], 10)
    assert disk.used_bytes == 14
    disk.rename("/d/g", "/d/f")
    disk.crash(power_loss=False)
    assert disk.after_crash().used_bytes == 14


def test_damage() -> None:
    disk = new_disk()
    file = disk.open("/d/f")
    file.pwritev([b"abc"], 0)
    file.sync()
    disk.damage("/d/f", 1, 0x03)
    assert content(disk) == b"aac"
    assert content(disk.after_crash()) == b"aac"


def test_what_the_engine_never_does() -> None:
    disk = new_disk()
    disk.make_dirs("/e")
    with pytest.raises(StorageError):
        disk.rename("/d/f", "/e/f")
    with pytest.raises(StorageError):
        disk.open("/d")


def test_a_clock_that_moves_when_told() -> None:
    clock = ManualClock()
    before = clock.now_ms()
    assert clock.now_ms() == before
    assert clock.advance(5) == clock.now_ms() == before + 5
    clock.advance(-10)
    assert clock.now_ms() == before - 5
    clock.set(7)
    assert clock.now_ms() == 7
