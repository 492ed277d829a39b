"""Which partitions of a decided transaction get its marker, also when it is carried out again."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import Any, Final

import pytest

from penstock.broker.server import Broker as Server
from penstock.broker.transactions import markers
from penstock.broker.transactions.markers import has_ended
from penstock.broker.transactions.state import Ids, Transaction
from penstock.log.producers import BatchMeta, ProducerStates
from penstock.records.batch import headers
from penstock.records.control import Marker
from penstock.testing.broker import Broker
from penstock.testing.faults import SimulatedDisk
from penstock.wire.errors import ErrorCode
from tests.broker.raw import RawClient
from tests.broker.requests import create, fetch, one
from tests.broker.transactions.raw_producer import RawProducer, read
from tests.broker.waits import wait_until

NONE: Final = ErrorCode.NONE
ID: Final = 7
BOTH_FORMS = pytest.mark.parametrize("form", ["older", "newer"])


def decided(epoch: int, form: str) -> Transaction:
    """A transaction of this epoch; in the newer form its end gives its producer the next one."""
    bumped = form == "newer"
    next_ids = Ids(ID, epoch + bumped)
    opened = Transaction("orders", Ids(ID, epoch)).opened(0)
    return opened.decided(commit=True, ids=next_ids, bumped=bumped, now_ms=0)


class Log:
    """What a partition knows of the producer."""

    def __init__(self) -> None:
        self.producers = ProducerStates()
        self._end = 0

    def write(self, epoch: int) -> Log:
        meta = BatchMeta(0, 0, self._end, self._end, 0)
        self.producers.update(ID, epoch, meta, transactional=1)
        self._end += 1
        return self

    def mark(self, epoch: int) -> Log:
        self.producers.end(ID, epoch, Marker(True, 0), self._end, 0)
        self._end += 1
        return self


@BOTH_FORMS
def test_what_has_no_marker_yet_gets_one(form: str) -> None:
    txn = decided(3, form)
    assert not has_ended(txn, Log().producers)
    assert not has_ended(txn, Log().write(3).producers)
    assert not has_ended(txn, Log().write(2).mark(2).producers)
    # It wrote here in an earlier transaction, and was only named in this one.
    assert not has_ended(txn, Log().write(3).mark(3).producers)


@BOTH_FORMS
def test_what_the_producer_does_next_is_not_ended(form: str) -> None:
    """Its completion was lost: it is carried out again while the producer goes on."""
    txn = decided(3, form)
    assert txn.marker is not None
    done = Log().write(3).mark(txn.marker.epoch)
    # In the older form the next transaction waits until this one is not carried out any more.
    assert has_ended(txn, done.producers) == (form == "newer")
    assert has_ended(txn, done.write(4).producers)
    assert has_ended(txn, done.mark(5).producers)


# ---- in a broker -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def client() -> Iterator[RawClient]:
    with Broker() as broker, RawClient(broker.bootstrap) as connection:
        for topic in ("written", "named"):
            assert not connection.call(create(topic)).topics[0].error_code
        yield connection


def marks(client: RawClient, topic: str) -> list[int]:
    """The epochs of the markers in a topic."""
    part = one(client.call(fetch(topic), 12))
    return [h.producer_epoch for _, h in headers(bytes(part.records or b"")) if h.is_control]


@BOTH_FORMS
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
def test_partitions_that_were_only_named_get_a_marker(
    client: RawClient, form: str, commit: bool
) -> None:
    producer = RawProducer(client, f"{form} {commit}", form)
    assert not producer.init().error_code
    assert producer.send("written", b"x") == NONE
    assert producer.add("named", 0) == NONE
    before, seen = marks(client, "named"), len(read(client, "written"))
    assert producer.end(commit=commit) == NONE
    assert marks(client, "named") == [*before, producer.ids.epoch]
    assert len(read(client, "written")) == seen + commit
    assert read(client, "named") == []


@BOTH_FORMS
def test_over_a_kill_with_the_next_transaction_under_way(form: str) -> None:
    with Broker() as broker:
        with RawClient(broker.bootstrap) as client:
            assert not client.call(create("named")).topics[0].error_code
            producer = RawProducer(client, "orders", form)
            assert not producer.init().error_code
            assert producer.add("named", 0) == NONE
            assert producer.end() == NONE
            assert producer.send("named", b"next") == NONE
        broker.crash()
        broker.start()
        with RawClient(broker.bootstrap) as client:
            assert read(client, "named") == []
            assert read(client, "named", committed=False) == [b"next"]
            producer.client = client
            assert producer.end() == NONE
            assert read(client, "named") == [b"next"]
        assert broker.call(_undone) == 0


@BOTH_FORMS
def test_a_disk_that_refuses_holds_up_no_other_partition(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that have their marker get no second one each time that it is tried again."""
    monkeypatch.setattr(markers, "_PAUSE_AFTER_FAILURE_S", 0.0)
    monkeypatch.setattr(markers, "_PARTITIONS_AT_ONCE", 1)
    disk, topics = SimulatedDisk(), ("a", "b", "c")
    with Broker("/simulated/data", disk=disk) as broker, RawClient(broker.bootstrap) as client:
        for topic in topics:
            assert not client.call(create(topic)).topics[0].error_code
        producer = RawProducer(client, "orders", form)
        assert not producer.init().error_code
        for topic in topics:
            assert producer.send(topic, b"x") == NONE
        broker.call(count_attempts)
        disk.fail("write", times=-1, error=errno.ENOSPC, path_part="/b-0/")
        producer.end()
        wait_until(broker, lambda server: server.coordination.markers.attempts > 3)  # type: ignore[attr-defined]
        assert [len(marks(client, topic)) for topic in topics] == [1, 0, 1]
        disk.heal()
        wait_until(broker, lambda server: not _undone(server))
        assert [len(marks(client, topic)) for topic in topics] == [1, 1, 1]
        assert [read(client, topic) for topic in topics] == [[b"x"]] * 3


def count_attempts(server: Server) -> None:
    markers: Any = server.coordination.markers
    markers.attempts, attempt = 0, markers._end_in_partitions

    async def counted(txn: Transaction) -> None:
        markers.attempts += 1
        await attempt(txn)

    markers._end_in_partitions = counted


def _undone(server: Server) -> int:
    return len(server.coordination.transactions.undone)
