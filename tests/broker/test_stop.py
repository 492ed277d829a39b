"""Stops and starts with many partitions: clean, quick, also in the midst of a deletion."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.broker.server import Broker as Server
from penstock.log.disk import OsDisk, OsFile
from penstock.log.store import CLEAN_MARKER, DELETED_SUFFIX
from penstock.log.verify import verify
from penstock.testing.broker import Broker
from tests.broker import requests as rq
from tests.broker.disks import HastyDisk
from tests.broker.raw import RawClient
from tests.harness.profiles import STOPPED_PARTITIONS
from tests.waiting import eventually

TIMEOUT_S = 60.0


class CountingDisk(HastyDisk):
    """Counts what is opened; removes folders only while it may."""

    def __init__(self) -> None:
        self.opened = 0
        self.may_remove = threading.Event()
        self.may_remove.set()
        self.removing = threading.Event()

    def open(self, path: str, *, create: bool = False) -> OsFile:
        self.opened += 1
        return super().open(path, create=create)

    def go_on_when(self, condition: Callable[[], bool]) -> None:
        """Remove folders again once the condition holds."""
        eventually(condition)
        self.may_remove.set()

    def remove_tree(self, folder: str) -> None:
        if folder.endswith(DELETED_SUFFIX):
            self.removing.set()
            assert self.may_remove.wait(TIMEOUT_S)
        OsDisk.remove_tree(self, folder)


@pytest.fixture
def disk() -> CountingDisk:
    return CountingDisk()


def open_logs(server: Server, topic: str) -> int:
    return sum(
        partition.active.is_open
        for partition in server.store.partitions.values()
        if partition.id.topic == topic
    )


@pytest.mark.timeout(600)
@pytest.mark.parametrize("durability", ["disk", "os"])
def test_a_stop_and_a_start_touch_only_what_has_changed(
    tmp_path: Path, disk: CountingDisk, durability: str
) -> None:
    data, count = str(tmp_path / "data"), STOPPED_PARTITIONS
    with Broker(data, disk=disk, durability=durability) as broker:
        with RawClient(broker.bootstrap) as client:
            client.call(rq.create("t", count))
            written = rq.produce("t", {n: rq.batch(b"%d" % n) for n in range(0, count, 2)})
            parts = client.call(written, 9).responses[0].partition_responses
            assert {part.error_code for part in parts} == {0}
        disk.opened = 0
    # The broker's own files, and none of the partitions'.
    assert disk.opened < 30
    assert (tmp_path / "data" / CLEAN_MARKER).exists()
    assert verify(data).damage == []
    disk.opened = 0
    with Broker(data, disk=disk, durability=durability) as broker:
        assert disk.opened < 40
        assert broker.call(lambda server: server.store.was_clean)
        assert broker.call(lambda server: open_logs(server, "t")) == 0
        with RawClient(broker.bootstrap) as client:
            for number in (0, count // 2 * 2 - 2):
                answer = rq.one(client.call(rq.fetch("t", {number: 0}), 11))
                assert rq.values_of(answer.records) == [b"%d" % number]
            answer = rq.one(client.call(rq.produce("t", rq.batch(b"more")), 9))
            assert (answer.error_code, answer.base_offset) == (0, 1)
        assert broker.call(lambda server: open_logs(server, "t")) in (1, 2)
    assert verify(data).damage == []


def test_a_stop_in_the_midst_of_a_deletion_is_clean_and_the_next_start_goes_on_with_it(
    tmp_path: Path, disk: CountingDisk
) -> None:
    folder = tmp_path / "data"
    with Broker(str(folder), disk=disk) as broker:
        with RawClient(broker.bootstrap) as client:
            client.call(rq.create("gone", 100))
            client.call(rq.create("kept"))
            client.call(rq.produce("kept", rq.batch(b"x")), 9)
            disk.may_remove.clear()
            (deleted,) = client.call(rq.delete("gone")).responses
            assert not deleted.error_code
            assert disk.removing.wait(TIMEOUT_S)
        # One folder is being removed: the stop waits for that one only.
        store = broker.server.store
        threading.Thread(target=disk.go_on_when, args=(lambda: not store.erasing,)).start()
    left = list(folder.glob(f"*{DELETED_SUFFIX}"))
    assert 90 < len(left) < 100
    assert (folder / CLEAN_MARKER).exists()
    assert verify(str(folder)).damage == []
    with Broker(str(folder), disk=disk) as broker, RawClient(broker.bootstrap) as client:
        assert broker.call(lambda server: server.store.was_clean)
        assert rq.values_of(rq.one(client.call(rq.fetch("kept"), 11)).records) == [b"x"]
        (made,) = client.call(rq.create("gone", 2)).topics
        assert not made.error_code
        eventually(lambda: not list(folder.glob(f"*{DELETED_SUFFIX}")))


def test_a_topic_whose_deletion_had_only_begun_is_gone_after_a_stop(
    tmp_path: Path, disk: CountingDisk
) -> None:
    """Decided, and none of its files moved yet: they still lie where they were."""
    folder = tmp_path / "data"
    with Broker(str(folder), disk=disk) as broker:
        with RawClient(broker.bootstrap) as client:
            client.call(rq.create("gone", 3))
            client.call(rq.produce("gone", rq.batch(b"x")), 9)

        def mark(server: Server) -> None:
            for partition in server.topics._by_name["gone"]:
                partition.gone = True

        broker.call(mark)
    assert (folder / CLEAN_MARKER).exists()
    assert not list(folder.glob("gone-?"))
    assert verify(str(folder)).damage == []
