"""Starting and stopping: where it listens, who may use a directory, and stops under load."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import psutil
import pytest

from penstock.broker.config import BrokerConfig
from penstock.errors import ConfigError, DataDirectoryError, PenstockError
from penstock.log.store import CLEAN_MARKER
from penstock.testing.broker import Broker
from penstock.testing.faults import SimulatedDisk
from penstock.testing.process import BrokerProcess
from tests.broker import requests as rq
from tests.broker.raw import RawClient
from tests.broker.robustness.disks import FETCH, PRODUCE, Writer
from tests.broker.robustness.killing import KillTest
from tests.harness.profiles import BROKER_STOPS


def leader_epoch(client: RawClient, topic: str) -> int:
    (told,) = client.call(rq.metadata(topic)).topics
    return int(told.partitions[0].leader_epoch)


@pytest.mark.processes
def test_it_listens_on_the_loopback_unless_told_otherwise(tmp_path: Path) -> None:
    assert BrokerConfig(data="x").host == "127.0.0.1"
    with BrokerProcess(tmp_path / "data") as broker:
        listening = [
            connection.laddr.ip
            for connection in psutil.Process(broker.pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
    assert listening == ["127.0.0.1"]


@pytest.mark.processes
def test_a_second_broker_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with BrokerProcess(data) as broker, RawClient(broker.bootstrap) as client:
        client.call(rq.create("t"))
        with pytest.raises(PenstockError, match="in use by another broker"):
            BrokerProcess(data).start()
        with pytest.raises(DataDirectoryError, match="in use by another broker"):
            Broker(str(data)).start()
        # The first has not noticed.
        assert Writer(client, "t").write() == 0


def test_a_start_that_fails_for_its_port_leaves_the_directory_clean(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Broker(str(data)) as broker, RawClient(broker.bootstrap) as client:
        client.call(rq.create("t"))
    assert (data / CLEAN_MARKER).exists()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ConfigError, match="cannot listen"):
            Broker(str(data), port=taken.getsockname()[1]).start()
    assert (data / CLEAN_MARKER).exists()
    with Broker(str(data)) as broker:
        assert broker.call(lambda server: server.store.was_clean)


@pytest.mark.timeout(300)
@pytest.mark.processes
def test_a_stop_under_load_is_clean_and_loses_nothing(tmp_path: Path, seed: int) -> None:
    test = KillTest(tmp_path / "data", seed)
    with test.running():
        for _ in range(BROKER_STOPS):
            with RawClient(test.broker.bootstrap) as client:
                epoch = leader_epoch(client, "on-disk")
            test.wait_for_load()
            assert test.broker.stop() == 0
            assert (test.broker.data / CLEAN_MARKER).exists()
            test.broker.start()
            with RawClient(test.broker.bootstrap) as client:
                # It rises when a start has to recover.
                assert leader_epoch(client, "on-disk") == epoch
            test.verify()
    log = test.broker.log_text()
    assert "Traceback" not in log
    assert "are cut off" not in log


@pytest.mark.processes
def test_a_stop_answers_what_was_asked_and_waits_for_nobody_else(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path / "data") as broker:
        with RawClient(broker.bootstrap) as client:
            client.call(rq.create("t"))
            asked = [rq.produce("t", rq.batch(b"%d" % at)) for at in range(100)]
            client.call(asked[0], PRODUCE)
        waiting = RawClient(broker.bootstrap)
        waiting.send(rq.fetch("t", 1, max_wait_ms=3_600_000), FETCH)
        idle = RawClient(broker.bootstrap)
        half = RawClient(broker.bootstrap)
        half.send_bytes(b"\0\0\0")
        deaf = RawClient(broker.bootstrap, receive_buffer_bytes=4096)
        deaf.send_all(*[(rq.metadata("t"), 9)] * 50_000)
        assert broker.stop() == 0
        for client in (waiting, idle, half, deaf):
            client.close()
    assert (tmp_path / "data" / CLEAN_MARKER).exists()


def test_where_records_are_kept_does_not_follow_a_new_default() -> None:
    """Otherwise offsets would begin anew, and records be hidden."""
    disk = SimulatedDisk()
    data = "/simulated/data"
    with Broker(data, disk=disk, durability="os") as broker:
        with RawClient(broker.bootstrap) as client:
            client.call(rq.create("kept"))
            writer = Writer(client, "kept")
            assert writer.write() == 0
    with Broker(data, disk=disk, durability="memory") as broker:
        with RawClient(broker.bootstrap) as client:
            writer.verify(client)
            client.call(rq.create("fleeting"))
            (altered,) = client.call(rq.alter("kept", (0, "retention.ms", "-1"))).responses
            assert not altered.error_code, altered
            (altered,) = client.call(rq.alter("kept", (0, "durability", "memory"))).responses
            assert altered.error_code
            for _ in range(5):
                assert Writer(client, "fleeting").write() == 0
    with Broker(data, disk=disk, durability="disk") as broker:
        with RawClient(broker.bootstrap) as client:
            writer.verify(client)
            fleeting = rq.one(client.call(rq.list_offsets("fleeting", rq.LATEST)))
            assert fleeting.offset == 5
            earliest = rq.one(client.call(rq.list_offsets("fleeting", rq.EARLIEST)))
            assert earliest.offset == 5


# ---- what interrupted work leaves behind -----------------------------------------------------


def with_topic(data: Path, topic: str) -> None:
    """A directory that was stopped cleanly, with a topic of one record."""
    with Broker(str(data)) as broker, RawClient(broker.bootstrap) as client:
        (made,) = client.call(rq.create(topic)).topics
        assert not made.error_code
        assert Writer(client, topic).write() == 0


def test_records_of_a_topic_whose_deletion_was_interrupted_do_not_come_back(
    tmp_path: Path,
) -> None:
    data, saved = tmp_path / "data", tmp_path / "saved"
    with_topic(data, "t")
    shutil.copytree(data / "t-0", saved)
    with Broker(str(data)) as broker, RawClient(broker.bootstrap) as client:
        client.call(rq.delete("t"))
    # The crash came after the deletion was decided and before the files were gone.
    shutil.copytree(saved, data / "t-0")
    (data / CLEAN_MARKER).unlink()
    with Broker(str(data)) as broker, RawClient(broker.bootstrap) as client:
        assert not (data / "t-0").exists()
        client.call(rq.create("t"))
        assert rq.one(client.call(rq.list_offsets("t", rq.LATEST))).offset == 0
        assert Writer(client, "t").write() == 0
    assert (data / CLEAN_MARKER).exists()


def test_an_empty_partition_of_no_topic_is_removed_and_another_is_put_aside(
    tmp_path: Path,
) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    with_topic(data, "t")
    with_topic(other, "foreign")
    shutil.copytree(other / "foreign-0", data / "foreign-0")
    with Broker(str(other)) as broker, RawClient(broker.bootstrap) as client:
        client.call(rq.create("empty"))
    shutil.copytree(other / "empty-0", data / "empty-0")
    with Broker(str(data)) as broker, RawClient(broker.bootstrap) as client:
        names = {path.name for path in data.iterdir()}
        assert "empty-0" not in names
        assert "foreign-0" not in names
        (aside,) = [name for name in names if name.endswith("-stray")]
        # Nothing of it is lost.
        assert any(path.stat().st_size for path in (data / aside).glob("*.log"))
        client.call(rq.create("foreign"))
        assert rq.one(client.call(rq.list_offsets("foreign", rq.LATEST))).offset == 0
        assert rq.one(client.call(rq.list_offsets("t", rq.LATEST))).offset == 1
