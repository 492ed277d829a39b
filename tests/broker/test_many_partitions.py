"""Topics of many partitions: made with one sync, or one by one if that fails."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.log.disk import OsDisk, OsFile
from penstock.log.store import PARTITION_METADATA
from penstock.testing.broker import Broker
from tests.broker import requests as rq
from tests.broker.raw import RawClient

MANY = 100


class Together:
    """The disk's way to sync everything at once."""

    def __init__(self, disk: BulkDisk) -> None:
        self._disk = disk

    def sync(self) -> None:
        self._disk.bulk_syncs += 1
        if self._disk.broken:
            self._disk.full = self._disk.filling
            raise StorageError("the disk is broken")

    def covers(self, path: str) -> bool:
        return True

    def close(self) -> None:
        """Nothing is held."""


class BulkDisk(OsDisk):
    """The real disk; counts how folders are synced."""

    def __init__(self) -> None:
        self.bulk_syncs = 0
        self.folder_syncs = 0
        self.broken = False
        # Whether no log can be made any more: now, and once a sync of all has failed.
        self.full = self.filling = False

    def open(self, path: str, *, create: bool = False) -> OsFile:
        if self.full and "/t-" in path:
            raise StorageError("the disk is full")
        return super().open(path, create=create)

    def sync_dir(self, folder: str) -> None:
        self.folder_syncs += 1
        super().sync_dir(folder)

    def bulk_sync(self, folder: str) -> Together:
        return Together(self)


@pytest.fixture
def disk() -> BulkDisk:
    return BulkDisk()


@pytest.fixture
def broker(tmp_path: Path, disk: BulkDisk) -> Iterator[Broker]:
    with Broker(str(tmp_path), disk=disk, durability="disk") as broker:
        yield broker
        disk.broken = False


def test_many_partitions_are_synced_together_and_used_like_others(
    broker: Broker, disk: BulkDisk, tmp_path: Path
) -> None:
    with RawClient(broker.bootstrap) as client:
        before = disk.folder_syncs
        (made,) = client.call(rq.create("t", MANY)).topics
        assert not made.error_code
        assert (disk.bulk_syncs, disk.folder_syncs - before) == (1, 0)
        assert len(list(tmp_path.glob(f"t-*/{PARTITION_METADATA}"))) == MANY
        answer = rq.one(client.call(rq.produce("t", rq.batch(b"x"), partition=MANY - 1), 9))
        assert not answer.error_code
        assert broker.call(
            lambda server: {p.disk for p in server.store.partitions.values()} == {disk}
        )
        # A few are synced one by one.
        client.call(rq.create("few", 3))
        assert disk.bulk_syncs == 1
        assert disk.folder_syncs > before


def test_if_they_cannot_be_synced_together_they_are_made_one_by_one(
    broker: Broker, disk: BulkDisk, tmp_path: Path
) -> None:
    with RawClient(broker.bootstrap) as client:
        disk.broken = True
        before = disk.folder_syncs
        for name in ("t", "u"):
            (made,) = client.call(rq.create(name, MANY)).topics
            assert not made.error_code
            assert len(list(tmp_path.glob(f"{name}-*/{PARTITION_METADATA}"))) == MANY
        # It is not tried again.
        assert disk.bulk_syncs == 1
        assert disk.folder_syncs - before > 2 * MANY
        answer = rq.one(client.call(rq.produce("t", rq.batch(b"x"), partition=MANY - 1), 9))
        assert not answer.error_code


def test_if_they_cannot_be_synced_at_all_nothing_is_made(
    broker: Broker, disk: BulkDisk, tmp_path: Path
) -> None:
    with RawClient(broker.bootstrap) as client:
        disk.broken = disk.filling = True
        (refused,) = client.call(rq.create("t", MANY)).topics
        assert refused.error_code
        assert not list(tmp_path.glob("t-*"))
        disk.full = False
        (made,) = client.call(rq.create("t", MANY)).topics
        assert not made.error_code
