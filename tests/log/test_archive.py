"""The archive: a directory and a real S3 server, and logs that are read from both ends of it."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import boto3
import pytest
from moto.server import ThreadedMotoServer

from penstock.errors import ConfigError, StorageError
from penstock.log import retention, tiering
from penstock.log.archive import (
    Archive,
    ArchivedLog,
    ArchivedRead,
    ArchiveReader,
    DirectoryArchive,
    Manifest,
    ObjectStoreArchive,
    open_archive,
    read_object,
)
from penstock.log.config import TopicConfig
from penstock.log.partition import Partition
from penstock.log.slice import Slice
from penstock.log.store import LogStore
from penstock.records.record import Record
from penstock.testing.clock import START_MS, ManualClock
from penstock.testing.faults import SimulatedDisk
from tests.harness.profiles import S3_LOOKUP_STEP, some
from tests.log.keeping import (
    ID,
    append,
    close_segment,
    consume,
    end_transaction,
    fill,
    open_store,
    sync,
    write_in_transaction,
)

DAY_MS = 24 * 3_600_000
KINDS = ["directory", "s3"]
CONFIG = TopicConfig(
    remote_storage_enable=True,
    local_retention_ms=0,
    segment_bytes=2500,
    index_interval_bytes=200,
)


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """moto's S3 server on a free port."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def s3_url(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    bucket = f"bucket-{uuid4().hex}"
    boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1").create_bucket(
        Bucket=bucket
    )
    return f"s3://{bucket}/some/prefix?endpoint={s3_endpoint}&region=us-east-1"


def archive_of(kind: str, request: pytest.FixtureRequest, folder: Path) -> Archive:
    if kind == "directory":
        return open_archive(str(folder / "archive"))
    return open_archive(request.getfixturevalue("s3_url"))


@pytest.fixture(params=KINDS)
def archive(request: pytest.FixtureRequest, tmp_path: Path) -> Archive:
    """Each kind of archive."""
    return archive_of(request.param, request, tmp_path)


@pytest.fixture(params=some(KINDS, test=2, check=1))
def any_archive(request: pytest.FixtureRequest, tmp_path: Path) -> Archive:
    """For what does not depend on the kind: a request to the server takes its time."""
    return archive_of(request.param, request, tmp_path)


@pytest.fixture
def directory() -> Archive:
    return DirectoryArchive("/archive", SimulatedDisk())


# ---- the places ------------------------------------------------------------------------------


def test_what_every_archive_does(archive: Archive) -> None:
    assert archive.size("a/b/one") is None
    assert archive.names("a/b") == []
    archive.put("a/b/one", [b"hello ", b"world"], 11)
    archive.put("a/b/two", [], 0)
    archive.put("a/bc/three", [b"x"], 1)
    assert archive.size("a/b/one") == 11
    assert archive.get("a/b/one", 0, 11) == b"hello world"
    assert archive.get("a/b/one", 6, 3) == b"wor"
    assert archive.get("a/b/one", 6, 100) == b"world"
    assert read_object(archive, "a/b/two") == b""
    assert read_object(archive, "a/b/three") is None
    assert archive.names("a/b") == ["a/b/one", "a/b/two"]
    archive.put("a/b/one", [b"again"], 5)
    assert read_object(archive, "a/b/one") == b"again"
    archive.remove("a/b/one")
    archive.remove("a/b/one")
    assert archive.names("a/b") == ["a/b/two"]
    with pytest.raises(StorageError):
        archive.get("a/b/one", 0, 1)


def test_large_objects_go_in_parts(archive: Archive) -> None:
    part = random.Random(1).randbytes(1 << 20)
    archive.put("large", (part for _ in range(19)), 19 << 20)
    assert archive.size("large") == 19 << 20
    assert archive.get("large", (18 << 20) + 5, 1000) == part[5:1005]


def test_a_failing_source_leaves_what_was_there(archive: Archive) -> None:
    def broken() -> Iterator[bytes]:
        yield bytes(9 << 20)
        raise StorageError("the disk failed")

    archive.put("object", [b"old"], 3)
    with pytest.raises(StorageError):
        archive.put("object", broken(), 18 << 20)
    assert read_object(archive, "object") == b"old"


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_archive(str(tmp_path)), DirectoryArchive)
    found = open_archive(f"file://{tmp_path}/with%20space")
    assert isinstance(found, DirectoryArchive)
    assert found.root == f"{tmp_path}/with space"
    secret = "s3://bucket/prefix?region=eu&access_key_id=id&secret_access_key=geheim"
    s3 = open_archive(secret)
    assert isinstance(s3, ObjectStoreArchive)
    assert "geheim" not in repr(s3)
    for wrong in ("", "ftp://host/x", "s3://", "file://host/x", "s3://bucket?colour=red"):
        with pytest.raises(ConfigError):
            open_archive(wrong)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(ConfigError) as missing:
        open_archive("s3://bucket")
    assert "pip install 'penstock[archive]'" in missing.value.advice


# ---- logs ------------------------------------------------------------------------------------


def archive_all(store: LogStore, partition: Partition, archive: Archive) -> int:
    """What housekeeping does, in one go; how many segments were archived."""
    manifest = partition.archived.manifest
    if partition.archived.reader is None:
        folder = manifest.folder or tiering.archive_folder(store.cluster_id, partition)
        manifest = Manifest(folder, manifest.generation, manifest.segments)
        manifest = tiering.reconcile(archive, partition.disk, partition.folder, manifest)
        partition.archived = ArchivedLog(manifest, ArchiveReader(archive))
    count = 0
    while (upload := tiering.next_upload(partition)) is not None:
        segment = upload.run(archive, manifest.folder)
        manifest = partition.archived.manifest.with_segment(segment)
        tiering.publish(archive, partition.disk, partition.folder, manifest)
        partition.archived = ArchivedLog(manifest, partition.archived.reader)
        count += 1
    return count


def drop_local(partition: Partition) -> int:
    removal = retention.local_excess(partition, partition.clock.now_ms())
    if removal is None:
        return 0
    removal.begin()
    count = len(removal.segments)
    removal.detach()
    removal.erase()
    return count


def filled(
    config: TopicConfig = CONFIG, disk: SimulatedDisk | None = None
) -> tuple[LogStore, Partition, list[Record]]:
    store = open_store(config, ManualClock(), disk)
    partition = store.partitions[ID]
    for at in range(60):
        append(partition, [(b"k", b"%03d" % at * 20)] * 2, timestamp_ms=START_MS + 10 * at)
    sync(partition)
    return store, partition, consume(partition)


def test_archived_segments_are_read_like_any_other(archive: Archive) -> None:
    store, partition, records = filled()
    closed = len(partition.closed)
    assert closed >= 3
    assert archive_all(store, partition, archive) == closed
    assert archive_all(store, partition, archive) == 0
    assert isinstance(partition.read(0, 100), Slice)
    assert drop_local(partition) == closed
    assert len(partition.segments) == 1
    assert partition.log_start == 0
    for offset in range(len(records)):
        found = partition.read(offset, 1)
        assert found is not None
        assert isinstance(found, ArchivedRead) == (offset < partition.segments[0].base_offset)
    sizes = [300, 100_000, 1000, 1]
    # One record at a time is a hundred requests to a server.
    for max_bytes in sizes if isinstance(archive, DirectoryArchive) else some(sizes, test=2):
        assert consume(partition, 0, max_bytes) == records
    assert consume(partition, 37) == records[37:]
    names = [n for n in partition.disk.names(partition.folder) if n.startswith("000000000")]
    assert {name[:20] for name in names} == {f"{partition.segments[0].base_offset:020d}"}


def test_reads_are_bounded(directory: Archive) -> None:
    store, partition, _ = filled()
    archive_all(store, partition, directory)
    drop_local(partition)
    whole = partition.read(0, 1)
    assert isinstance(whole, ArchivedRead)
    first = len(whole.load())
    assert first > 100
    cut = partition.read(1, 2 * first + 5)
    assert isinstance(cut, ArchivedRead)
    assert len(cut.load()) == 2 * first
    nothing = partition.read(0, 1, whole_first=False)
    assert isinstance(nothing, ArchivedRead)
    assert nothing.load() == b""
    limited = partition.read(0, 10_000, limit=4)
    assert isinstance(limited, ArchivedRead)
    assert len(limited.load()) == 2 * first


def test_aborted_transactions_go_along(any_archive: Archive) -> None:
    store = open_store(CONFIG, ManualClock())
    partition = store.partitions[ID]
    for number in range(30):
        producer_id = 5 + number % 3
        write_in_transaction(partition, producer_id, [(b"k", b"x" * 80)] * 2)
        end_transaction(partition, 5 + (number + 1) % 3, commit=number % 2 == 0)
    sync(partition)
    opened = min(first for _, first in partition.open_transactions().values())
    count = archive_all(store, partition, any_archive)
    # Nothing from the first open transaction on.
    assert 2 < count <= len(partition.closed)
    assert partition.archived.end <= partition.stable == opened
    end = partition.archived.end
    wanted = partition.aborted_transactions(0, end)
    assert len(wanted) > 5
    for producer_id in (5, 6, 7):
        end_transaction(partition, producer_id, commit=True)
    close_segment(partition)
    archive_all(store, partition, any_archive)
    assert partition.archived.end == partition.log_end
    drop_local(partition)
    for start in range(0, end, 5):
        for upto in (start + 1, start + 20, end):
            assert partition.archived.aborted_transactions(start, min(upto, end)) == [
                item for item in wanted if item.first_offset < upto and item.last_offset >= start
            ]


def test_without_its_index_an_archived_segment_is_not_read_as_committed(
    directory: Archive,
) -> None:
    store = open_store(CONFIG, ManualClock())
    partition = store.partitions[ID]
    write_in_transaction(partition, 5, [(b"k", b"void")])
    end_transaction(partition, 5, commit=False)
    close_segment(partition)
    archive_all(store, partition, directory)
    (name,) = [n for n in directory.names(partition.archived.manifest.folder) if "txnindex" in n]
    data = read_object(directory, name) or b""
    assert len(data) == 34
    for wrong in (data[:-1], data[:-1] + b"\7", b""):
        directory.put(name, [wrong], len(wrong))
        fresh = ArchivedLog(partition.archived.manifest, ArchiveReader(directory))
        with pytest.raises(StorageError):
            fresh.aborted_transactions(0, 1)
    manifest = partition.archived.manifest
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest
    # A segment without aborted transactions is listed as it was before there were any.
    plain = replace(manifest.segments[0], aborted=0, aborted_checksum=0)
    assert not [field for field in plain.to_row() if field.startswith("aborted")]


def test_lookups_by_time_reach_into_the_archive(any_archive: Archive) -> None:
    store, partition, records = filled()
    step = 7 if isinstance(any_archive, DirectoryArchive) else S3_LOOKUP_STEP
    expected = {
        wanted: next((r.offset for r in records if r.timestamp_ms >= wanted), None)
        for wanted in range(START_MS - 20, START_MS + 620, step)
    }
    archive_all(store, partition, any_archive)
    drop_local(partition)
    for wanted, offset in expected.items():
        lookup = tiering.time_lookup(partition, wanted)
        found = lookup.load() if lookup is not None else None
        found = found or partition.offset_for_time(wanted)
        assert (found.offset if found else None) == offset
    assert tiering.time_lookup(partition, START_MS + 590) is None
    assert tiering.max_lookup(partition) is None
    append(partition, [(None, b"old")], timestamp_ms=START_MS)
    for _ in range(20):
        append(partition, [(None, b"x" * 300)], timestamp_ms=START_MS)
    sync(partition)
    archive_all(store, partition, any_archive)
    drop_local(partition)
    newest = tiering.max_lookup(partition)
    assert newest is not None
    answer = newest.load()
    assert answer is not None
    assert (answer.offset, answer.timestamp_ms) == (118, START_MS + 590)


def test_what_is_archived_is_known_after_a_restart(directory: Archive) -> None:
    disk = SimulatedDisk()
    store, partition, records = filled(disk=disk)
    archive_all(store, partition, directory)
    drop_local(partition)
    for clean in (True, False):
        if clean:
            store.close()
        else:
            store.abandon()
        store = open_store(CONFIG, ManualClock(), disk)
        partition = store.partitions[ID]
        assert (partition.log_start, partition.log_end) == (0, 120)
        found = partition.read(0, 100)
        assert isinstance(found, ArchivedRead)
        with pytest.raises(StorageError, match="no archive is configured"):
            found.load()
        archive_all(store, partition, directory)
        assert consume(partition) == records


def test_retention_counts_archived_and_local_together(directory: Archive) -> None:
    config = TopicConfig(
        remote_storage_enable=True,
        local_retention_bytes=1500,
        retention_bytes=6000,
        segment_bytes=1500,
    )
    store, partition, records = filled(config)
    archive_all(store, partition, directory)
    drop_local(partition)
    assert 1500 <= partition.size_bytes < 3000 + 1500
    removal = retention.expired(partition, START_MS)
    assert removal is not None
    assert removal.segments == []
    removal.begin()
    store.checkpoint()
    manifest = partition.archived.manifest
    total = partition.size_bytes + sum(
        s.size for s in manifest.segments
        if partition.log_start < s.end_offset <= partition.segments[0].base_offset
    )  # fmt: skip
    assert 6000 <= total < 7500
    assert consume(partition) == records[partition.log_start :]
    following = manifest.from_offset(partition.log_start)
    tiering.publish(directory, partition.disk, partition.folder, following)
    gone = [s for s in manifest.segments if s not in following.segments]
    tiering.remove_segments(directory, manifest.folder, gone)
    partition.archived = ArchivedLog(following, partition.archived.reader)
    assert consume(partition) == records[partition.log_start :]
    assert retention.expired(partition, START_MS) is None
    names = directory.names(manifest.folder)
    assert not [n for n in names if f"/{gone[0].base_offset:020d}" in n]
    tiering.remove_archived(directory, manifest.folder)
    assert directory.names(manifest.folder) == []


def test_local_retention(directory: Archive) -> None:
    store, partition, _ = filled(
        TopicConfig(
            remote_storage_enable=True, retention_ms=DAY_MS, segment_bytes=1500,
            local_retention_ms=-2, local_retention_bytes=-2,
        )
    )  # fmt: skip
    archive_all(store, partition, directory)
    assert drop_local(partition) == 0
    partition.config = TopicConfig(local_retention_ms=300, local_retention_bytes=-1)
    assert isinstance(partition.clock, ManualClock)
    partition.clock.set(START_MS + 590)
    dropped = drop_local(partition)
    assert 0 < dropped < 10
    assert all(s.max_timestamp_ms >= START_MS + 290 for s in partition.segments)
    partition.config = TopicConfig(local_retention_ms=-1, local_retention_bytes=0)
    assert drop_local(partition) == len(partition.archived.segments) - dropped
    assert len(partition.segments) == 1


def test_gaps_are_stepped_over(directory: Archive) -> None:
    disk = SimulatedDisk()
    store, partition, records = filled(disk=disk)
    # A failed sync leaves offsets that are never filled, at the end of a closed segment.
    append(partition, [(None, b"lost")] * 5)
    disk.fail("sync")
    plan = partition.plan_sync()
    plan.run()
    partition.finish_sync(plan)
    partition.repair()
    assert partition.log_end == 125
    fill(partition, 3)
    close_segment(partition)
    archive_all(store, partition, directory)
    drop_local(partition)
    assert [r.offset for r in consume(partition)] == [*range(120), 125, 126, 127]
    for offset in range(118, 129):
        found = consume(partition, offset)
        assert [r.offset for r in found] == [o for o in (118, 119, 125, 126, 127) if o >= offset]
    assert consume(partition)[:120] == records


def test_a_damaged_segment_is_not_archived(directory: Archive) -> None:
    disk = SimulatedDisk()
    store, partition, _ = filled(disk=disk)
    disk.damage(partition.closed[1].path(".log"), 700)
    with pytest.raises(StorageError, match="damaged"):
        archive_all(store, partition, directory)
    assert [s.base_offset for s in partition.archived.segments] == [0]


def test_damage_in_the_archive_is_noticed() -> None:
    place = SimulatedDisk()
    archive = DirectoryArchive("/archive", place)
    store, partition, records = filled()
    archive_all(store, partition, archive)
    drop_local(partition)
    folder = f"/archive/{partition.archived.manifest.folder}"
    place.damage(f"{folder}/{0:020d}.log", 90)
    with pytest.raises(StorageError, match="damaged"):
        consume(partition)
    # A lost index makes reading slower, no more.
    second = partition.archived.segments[1].base_offset
    place.remove(f"{folder}/{second:020d}.index")
    place.remove(f"{folder}/{second:020d}.timeindex")
    assert consume(partition, second) == records[second:]


class Corrupting(DirectoryArchive):
    """Stores something else than what it was given."""

    def put(self, name: str, chunks: object, size: int) -> None:
        super().put(name, [bytes(size)], size)


def test_what_comes_out_differently_is_not_believed() -> None:
    store, partition, records = filled()
    with pytest.raises(StorageError, match="differently"):
        archive_all(store, partition, Corrupting("/archive", SimulatedDisk()))
    assert partition.archived.segments == ()
    assert drop_local(partition) == 0
    assert consume(partition) == records


def test_an_upload_gives_up_when_the_broker_stops(directory: Archive) -> None:
    store, partition, _ = filled()
    upload = tiering.next_upload(partition)
    assert upload is not None
    with pytest.raises(StorageError, match="stops"):
        upload.run(directory, store.cluster_id, lambda: True)
    assert directory.names(store.cluster_id) in ([], [f"{store.cluster_id}/{0:020d}.index.tmp"])


def test_leftovers_in_the_archive_are_removed_and_a_newer_manifest_wins(directory: Archive) -> None:
    disk = SimulatedDisk()
    store, partition, records = filled(disk=disk)
    archive_all(store, partition, directory)
    manifest = partition.archived.manifest
    directory.put(f"{manifest.folder}/{999:020d}.log", [b"half an upload"], 14)
    # The process dies after the archive has a newer manifest than the partition's folder.
    fill(partition, 10)
    upload = tiering.next_upload(partition)
    assert upload is not None
    newer = manifest.with_segment(upload.run(directory, manifest.folder)).to_bytes()
    directory.put(f"{manifest.folder}/manifest.json", [newer], len(newer))
    store.abandon()
    store = open_store(CONFIG, ManualClock(), disk)
    partition = store.partitions[ID]
    assert len(partition.archived.segments) == len(manifest.segments)
    archive_all(store, partition, directory)
    assert len(partition.archived.segments) > len(manifest.segments)
    assert f"{manifest.folder}/{999:020d}.log" not in directory.names(manifest.folder)
    drop_local(partition)
    assert consume(partition)[:120] == records
    assert [r.offset for r in consume(partition)] == list(range(130))


def test_a_damaged_manifest_is_not_guessed_at(directory: Archive) -> None:
    disk = SimulatedDisk()
    store, partition, _ = filled(disk=disk)
    archive_all(store, partition, directory)
    folder = partition.archived.manifest.folder
    directory.put(f"{folder}/manifest.json", [b"{}"], 2)
    store.close()
    store = open_store(CONFIG, ManualClock(), disk)
    with pytest.raises(StorageError, match="damaged"):
        archive_all(store, store.partitions[ID], directory)
    disk.damage(f"{store.partitions[ID].folder}/archive-manifest.json", 3)
    store.close()
    with pytest.raises(StorageError, match="damaged"):
        open_store(CONFIG, ManualClock(), disk)


def test_no_changed_byte_of_a_manifest_passes(directory: Archive) -> None:
    store, partition, _ = filled()
    archive_all(store, partition, directory)
    data = bytearray(partition.archived.manifest.to_bytes())
    assert Manifest.from_bytes(bytes(data)) == partition.archived.manifest
    for at in range(len(data)):
        data[at] ^= 1
        assert Manifest.from_bytes(bytes(data)) is None
        data[at] ^= 1
    assert Manifest.from_bytes(bytes(data[:-1])) is None


def test_the_cache_of_indexes_is_bounded(directory: Archive) -> None:
    store, partition, records = filled()
    archive_all(store, partition, directory)
    drop_local(partition)
    reader = ArchiveReader(directory, cache_bytes=100)
    partition.archived = ArchivedLog(partition.archived.manifest, reader)
    assert consume(partition) == records
    assert 0 < reader.cached_bytes <= 100


def test_a_topic_of_the_same_name_has_its_own_place(directory: Archive) -> None:
    store, partition, _ = filled()
    archive_all(store, partition, directory)
    first = partition.archived.manifest.folder
    assert str(ID) in first
    assert first.startswith(store.cluster_id + "/")
    assert set(first.split("/")[1]) <= set(
        "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"
    )
