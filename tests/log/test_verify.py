"""The offline examination: no changed byte passes, and nothing sound is called damaged."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.log.config import TopicConfig
from penstock.log.findings import Report
from penstock.log.offline import Broken, Intact, LogFile, is_locked, locate
from penstock.log.partition import PartitionId
from penstock.log.store import LogStore
from penstock.log.verify import Verifier, rebuild_indexes, verify
from penstock.records.batch import CRC_START, HEADER_SIZE, LENGTH_BASE
from penstock.records.record import Record, encode
from tests.harness.profiles import CUT_FILES, DAMAGED_BYTES, FLIPPED_BITS, examples
from tests.log.data_dirs import crashed, fill, open_store, stopped, sync, write

FIRST_LOG = "orders-0/00000000000000000000.log"


def files_of(folder: Path) -> list[Path]:
    """Every file whose bytes mean something."""
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".lock")


def last_log(folder: Path) -> Path:
    return max((folder / "orders-0").glob("*.log"))


def damage_in(folder: Path) -> list[str]:
    return [finding.path for finding in verify(str(folder)).damage]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A stopped data directory with every kind of file; tests put back what they change."""
    folder = stopped(tmp_path_factory.mktemp("verify") / "data", batches=5)
    suffixes = {path.suffix for path in files_of(folder)}
    assert {".log", ".index", ".timeindex", ".txnindex", ".digest", ".snapshot"} <= suffixes
    assert len(list((folder / "orders-0").glob("*.log"))) > 1
    assert all(p.stat().st_size for p in (folder / "orders-0").glob("*000.index"))
    return folder


def test_a_sound_directory_has_no_findings(sound: Path) -> None:
    report = verify(str(sound), open_records=True)
    assert report.findings == []
    assert report.clean_stop is True
    assert (report.partitions, report.batches, report.records) == (4, 22, 42)


def test_after_a_crash_nothing_is_damaged(tmp_path: Path) -> None:
    report = verify(str(crashed(tmp_path / "data")))
    assert report.damage == []
    assert report.clean_stop is False


def test_after_recovery_and_a_clean_stop_nothing_is_damaged(tmp_path: Path) -> None:
    folder = crashed(tmp_path / "data")
    with last_log(folder).open("ab") as log:
        log.write(b"torn" * 10)
    open_store(folder, epoch=3).close()
    assert verify(str(folder)).findings == []
    store = open_store(folder, epoch=3)
    fill(store, 3)
    store.close()
    assert verify(str(folder)).findings == []


# ---- changed bytes --------------------------------------------------------------------------


def test_changed_bytes_are_found(sound: Path, seed: int) -> None:
    rng = random.Random(seed)
    missed = []
    for path in files_of(sound):
        data = path.read_bytes()
        for at in rng.sample(range(len(data)), min(len(data), DAMAGED_BYTES)):
            changed = bytearray(data)
            changed[at] ^= rng.randrange(1, 256)
            path.write_bytes(changed)
            if not damage_in(sound):
                missed.append(f"{path.name} byte {at}: {data[at]} became {changed[at]}")
        path.write_bytes(data)
    assert missed == []
    assert damage_in(sound) == []


def test_flipped_bits_of_the_heads_of_batches_are_found(sound: Path) -> None:
    path = sound / FIRST_LOG
    data = path.read_bytes()
    missed = []
    for at in range(HEADER_SIZE):
        for bit in range(FLIPPED_BITS):
            changed = bytearray(data)
            changed[at] ^= 1 << bit
            path.write_bytes(changed)
            if not damage_in(sound):
                missed.append((at, bit))
    path.write_bytes(data)
    assert missed == []


def test_every_cut_and_every_extra_byte_is_found(sound: Path, seed: int) -> None:
    rng = random.Random(seed)
    missed = []
    for path in files_of(sound):
        data = path.read_bytes()
        cuts = {0, len(data) - 1, len(data) - 8, len(data) - 12, len(data) // 2}
        cuts |= {rng.randrange(len(data) or 1) for _ in range(5)}
        variants = [data[:cut] for cut in sorted(cuts) if 0 <= cut < len(data)]
        variants += [data + extra for extra in (b"\0", b"\n", b" ", b"7", bytes(8), bytes(12))]
        variants += [data + data[-12:], data + data] if data else []
        for variant in rng.sample(variants, min(len(variants), CUT_FILES)):
            path.write_bytes(variant)
            if not damage_in(sound):
                missed.append(f"{path.name}: {len(data)} bytes became {len(variant)}")
        path.write_bytes(data)
    assert missed == []


def test_every_file_that_is_gone_is_found(sound: Path) -> None:
    missed = []
    for path in files_of(sound):
        data = path.read_bytes()
        path.unlink()
        if not damage_in(sound):
            missed.append(path.name)
        path.write_bytes(data)
    # Without the marker it was no clean stop; without a snapshot the log is read instead. What a
    # partition in memory may lose is gone anyway.
    may_go = {"clean-shutdown", "offset-reserve"}
    assert [n for n in missed if n not in may_go and not n.endswith(".snapshot")] == []


@settings(max_examples=examples(50), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_harm_to_a_log_is_found_and_the_rest_still_read(sound: Path, data: st.DataObject) -> None:
    path = sound / FIRST_LOG
    original = path.read_bytes()
    with LogFile(str(path), 0) as log:
        batches = [piece for piece in log.walk() if isinstance(piece, Intact)]
    start = data.draw(st.integers(0, len(original) - 1))
    end = data.draw(st.integers(start + 1, min(len(original), start + 300)))
    noise = data.draw(st.sampled_from([bytes(end - start), b"\xff" * (end - start), None]))
    harm = noise if noise is not None else data.draw(st.binary(min_size=end - start,
                                                               max_size=end - start))  # fmt: skip
    changed = original[:start] + harm + original[end:]
    first = next((i for i, (a, b) in enumerate(zip(original, changed, strict=True)) if a != b), -1)
    if first < 0:
        return
    path.write_bytes(changed)
    try:
        report = verify(str(sound))
        with LogFile(str(path), 0) as log:
            found = [piece for piece in log.walk() if isinstance(piece, Intact)]
    finally:
        path.write_bytes(original)
    assert report.damage
    # Offset and epoch are not under a batch's checksum: if they differ from what the digest or
    # the list of epochs says, either side may be the one that has changed.
    heads = {b.position + at for b in batches for at in range(CRC_START)}
    if any(
        a != b and i not in heads for i, (a, b) in enumerate(zip(original, changed, strict=True))
    ):
        assert any(Path(finding.path) == path for finding in report.damage)
    untouched = [b for b in batches if b.position >= end or b.position + b.header.size <= start]
    assert set(untouched) <= set(found)


def test_a_wrong_length_that_leads_to_another_batch_hides_none_between(sound: Path) -> None:
    path = sound / FIRST_LOG
    original = path.read_bytes()
    with LogFile(str(path), 0) as log:
        batches = [piece for piece in log.walk() if isinstance(piece, Intact)]
    second, fourth = batches[1], batches[3]
    length = fourth.position + fourth.header.size - second.position - LENGTH_BASE
    at = second.position + 8
    path.write_bytes(original[:at] + length.to_bytes(4) + original[at + 4 :])
    try:
        with LogFile(str(path), 0) as log:
            found = [piece for piece in log.walk() if isinstance(piece, Intact)]
    finally:
        path.write_bytes(original)
    assert found == [batch for batch in batches if batch is not second]


# ---- what is said ------------------------------------------------------------------------


def change(path: Path, at: int, by: int = 1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= by
    path.write_bytes(data)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return stopped(tmp_path / "data")


def only_damage(report: Report) -> tuple[str, int | None, int | None]:
    assert len(report.damage) == 1, report.damage
    found = report.damage[0]
    assert found.remedy
    return found.kind, found.position, found.offset


def test_a_changed_record_is_named_by_position_and_offset(folder: Path) -> None:
    second = 89
    change(folder / FIRST_LOG, second + HEADER_SIZE + 5)
    report = verify(str(folder))
    assert only_damage(report) == ("batch", second, 2)
    assert "offsets 2 to 3 are affected" in report.damage[0].message


def test_a_changed_length_costs_one_batch(folder: Path) -> None:
    change(folder / FIRST_LOG, 89 + 11, 0x40)
    report = verify(str(folder))
    assert only_damage(report) == ("batch", 89, 2)
    assert report.batches == 37


def test_a_changed_epoch_is_told_from_a_changed_digest(folder: Path) -> None:
    change(folder / FIRST_LOG, 89 + 15, 4)
    kinds = {finding.kind: finding for finding in verify(str(folder)).damage}
    assert kinds["head"].position == 89
    change(folder / FIRST_LOG, 89 + 15, 4)
    digest = folder / FIRST_LOG.replace(".log", ".digest")
    digest.write_bytes(digest.read_bytes().replace(b" ", b" 0", 1)[:-1])
    assert only_damage(verify(str(folder)))[0] == "digest"


def test_a_changed_offset_is_named(folder: Path) -> None:
    change(folder / FIRST_LOG, 89 + 7, 0x40)
    found = verify(str(folder)).damage
    assert any(finding.kind == "offset" for finding in found)
    assert {Path(finding.path) for finding in found} == {folder / FIRST_LOG}


def test_a_cut_log_is_named_with_where_it_ended(folder: Path) -> None:
    last = last_log(folder)
    last.write_bytes(b"")
    kinds = {finding.kind for finding in verify(str(folder)).damage}
    assert "size" in kinds


def test_records_that_do_not_open_are_found_only_when_asked(tmp_path: Path) -> None:
    store = LogStore(str(tmp_path / "data"))
    store.open()
    from tests.log.data_dirs import TOPIC_IDS

    partition = store.load(PartitionId("users", 0), TopicConfig(), topic_id=TOPIC_IDS["users"])
    batch = bytearray(encode([Record(0, 0, None, b"x" * 20)]))
    batch[HEADER_SIZE + 4] = 0xFF  # the length of the key
    import struct

    from crc32c import crc32c

    struct.pack_into(">I", batch, 17, crc32c(memoryview(batch)[21:]))
    partition.append(bytes(batch))
    sync(partition)
    store.close()
    assert verify(str(tmp_path / "data")).findings == []
    assert only_damage(verify(str(tmp_path / "data"), open_records=True)) == ("records", 0, 0)


# ---- after a crash -----------------------------------------------------------------------


@pytest.mark.parametrize("tail", [b"\0" * 500, b"torn" * 3, b"torn" * 100])
def test_a_torn_tail_is_a_note(tmp_path: Path, tail: bytes) -> None:
    folder = crashed(tmp_path / "data")
    log = last_log(folder)
    end = log.stat().st_size
    log.write_bytes(log.read_bytes() + tail)
    report = verify(str(folder))
    assert report.damage == []
    assert [(n.kind, n.position, n.offset) for n in report.notes] == [("torn tail", end, 22)]


def test_harm_below_the_recovery_point_is_damage(tmp_path: Path) -> None:
    folder = crashed(tmp_path / "data")
    change(folder / "orders-0" / "00000000000000000000.log", 70)
    assert only_damage(verify(str(folder)))[:2] == ("batch", 0)


def test_a_log_cut_below_the_recovery_point_is_damage(tmp_path: Path) -> None:
    folder = crashed(tmp_path / "data", batches=8)
    log = last_log(folder)
    log.write_bytes(log.read_bytes()[:90])
    assert only_damage(verify(str(folder)))[0] == "size"


def test_a_broken_batch_before_good_ones_is_damage_even_unsynced(tmp_path: Path) -> None:
    folder = crashed(tmp_path / "data", batches=3)
    (folder / "recovery-point-offset-checkpoint").unlink()
    change(folder / FIRST_LOG, 70)
    report = verify(str(folder))
    assert only_damage(report)[:2] == ("batch", 0)
    assert "Copy the data directory" in report.damage[0].remedy


# ---- places ------------------------------------------------------------------------------


def test_a_partition_and_a_single_file_can_be_examined(folder: Path) -> None:
    assert verify(str(folder / "orders-0")).findings == []
    assert verify(str(folder / FIRST_LOG)).segments == 1
    change(folder / FIRST_LOG, 70)
    assert verify(str(folder / "orders-0")).damage
    assert verify(str(folder / FIRST_LOG)).damage
    assert verify(str(folder / "orders-1")).findings == []


def test_a_copied_partition_is_examined_by_itself(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy" / "orders-0"
    shutil.copytree(folder / "orders-0", copy)
    assert verify(str(copy)).findings == []
    change(copy / "00000000000000000000.index", 3)
    assert only_damage(verify(str(copy)))[0] == "index"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda _: None, "does not exist"),
        (lambda p: p.mkdir(), "holds no log"),
        (lambda p: p.write_text("x"), "not a segment"),
    ],
)
def test_what_is_no_log_is_refused(
    tmp_path: Path, make: Callable[[Path], object], message: str
) -> None:
    path = tmp_path / "it"
    make(path)
    with pytest.raises(Exception, match=message):
        locate(str(path))


def test_a_running_broker_is_noticed(tmp_path: Path) -> None:
    store = open_store(tmp_path / "data")
    assert is_locked(str(tmp_path / "data"))
    write(store.partitions[PartitionId("orders", 0)], 3)
    assert verify(str(tmp_path / "data"), running=True).damage == []
    store.close()
    assert not is_locked(str(tmp_path / "data"))


def test_looking_leaves_no_trace(folder: Path) -> None:
    before = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files_of(folder)}
    verify(str(folder), open_records=True)
    assert is_locked(str(folder)) is False
    after = {path: (path.read_bytes(), path.stat().st_mtime_ns) for path in files_of(folder)}
    assert before == after


def test_foreign_files_and_leftovers_are_noted(folder: Path) -> None:
    (folder / "notes.txt").write_text("x")
    (folder / "orders-0" / "x.tmp").write_text("x")
    (folder / "old-0.abc-delete").mkdir()
    report = verify(str(folder))
    assert report.damage == []
    assert sorted(note.kind for note in report.notes) == ["leftover", "leftover", "unknown"]


# ---- rebuilding --------------------------------------------------------------------------


def run(folder: Path) -> Verifier:
    verifier = Verifier(locate(str(folder)), str(folder))
    for _ in verifier.run():
        pass
    return verifier


@pytest.mark.parametrize("suffix", [".index", ".timeindex", ".digest"])
def test_what_is_made_from_the_log_can_be_made_again(folder: Path, suffix: str) -> None:
    for harm in ("change", "remove"):
        path = folder / FIRST_LOG.replace(".log", suffix)
        if harm == "change":
            change(path, 5)
        else:
            path.unlink()
        log_before = (folder / FIRST_LOG).read_bytes()
        verifier = run(folder)
        assert verifier.report.damage
        rebuild_indexes(str(folder), verifier.rebuildable)
        assert verify(str(folder)).findings == []
        assert (folder / FIRST_LOG).read_bytes() == log_before
    store = open_store(folder, epoch=1)
    assert store.was_clean
    store.close()


def test_a_changed_head_is_not_blessed_by_a_new_digest(folder: Path) -> None:
    change(folder / FIRST_LOG, 89 + 7, 0x40)
    verifier = run(folder)
    assert verifier.report.damage
    assert verifier.rebuildable == []


def test_rebuilding_needs_the_directory_to_itself(folder: Path) -> None:
    store = open_store(folder, epoch=2)
    with pytest.raises(Exception, match="in use"):
        rebuild_indexes(str(folder), [(str(folder / "orders-0"), 0)])
    store.close()


# ---- walking -----------------------------------------------------------------------------


@settings(max_examples=examples(66))
@given(noise=st.binary(max_size=400))
def test_any_bytes_can_be_walked(tmp_path_factory: pytest.TempPathFactory, noise: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.log"
    path.write_bytes(noise)
    with LogFile(str(path), 0) as log:
        pieces = list(log.walk())
    ends = [p.end if isinstance(p, Broken) else p.position + p.header.size for p in pieces]
    assert [piece.position for piece in pieces] == [0, *ends][: len(pieces)]
    assert not pieces or ends[-1] == len(noise)


def test_a_batch_beyond_the_window_is_found_behind_harm(tmp_path: Path) -> None:
    # 3 MiB, in which a header might begin at every sixteenth byte.
    large = encode([Record(0, 0, None, (b"\x02" + b"\xff" * 15) * (3 << 16))])
    small = encode([Record(1, 0, None, b"after")])
    data = bytearray(large + small)
    data[9] ^= 0x10  # the length, so that the next batch must be searched for
    path = tmp_path / "00000000000000000000.log"
    path.write_bytes(data)
    with LogFile(str(path), 0) as log:
        broken, intact = log.walk()
    assert isinstance(broken, Broken)
    assert (broken.position, broken.end) == (0, len(large))
    assert isinstance(intact, Intact)
    assert intact.header.base_offset == 1
