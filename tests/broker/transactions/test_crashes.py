"""Killed, or without power, at every step between a decision and its completion.

However it ends, a transaction is committed in all partitions with its offsets, or aborted in all;
what its producer was told is what happened; and nobody goes on with a half of it.
"""

from __future__ import annotations

import asyncio
import errno
import threading
import uuid
from collections.abc import Callable
from typing import Any, Final

import pytest

from penstock.broker.server import Broker as Server
from penstock.broker.transactions.state import State, Transaction
from penstock.records.record import BatchOptions, simple_batch
from penstock.testing.broker import Broker
from penstock.testing.faults import SimulatedDisk
from penstock.wire.errors import ErrorCode
from tests.broker.raw import RawClient
from tests.broker.requests import create, now_ms, one
from tests.broker.transactions.raw_producer import RawProducer, read
from tests.broker.transactions.test_protocol import committed_offset
from tests.broker.waits import wait_until

TIMEOUT_S: Final = 60.0
NAME, GROUP = "orders", "readers"
TOPICS: Final = ("a", "b")
BOTH_FORMS = pytest.mark.parametrize("form", ["older", "newer"])
NONE = ErrorCode.NONE


class Step:
    """A place at which carrying out a decision stops for good."""

    def __init__(self) -> None:
        self.reached = threading.Event()

    async def stay(self, *_: object) -> None:
        self.reached.set()
        await asyncio.Event().wait()

    def undecided(self, server: Server) -> None:
        """The decision is written, and nobody has waited for it."""
        server.coordination.markers._decision_durable = self.stay  # type: ignore[method-assign]

    def decided(self, server: Server) -> None:
        markers = server.coordination.markers
        markers._end_in_partitions = self.stay  # type: ignore[method-assign,assignment]

    def one_marker(self, server: Server) -> None:
        markers = server.coordination.markers

        async def write_one(txn: Transaction) -> None:
            assert txn.marker is not None
            first = list(markers._unended(txn))[:1]
            await markers.write(first, txn.marker, commit=txn.state == State.PREPARE_COMMIT)
            await self.stay()

        markers._end_in_partitions = write_one  # type: ignore[method-assign]

    def all_markers(self, server: Server) -> None:
        markers = server.coordination.markers
        write = markers._end_in_partitions

        async def write_all(txn: Transaction) -> None:
            await write(txn)
            await self.stay()

        markers._end_in_partitions = write_all  # type: ignore[method-assign]

    def completed(self, server: Server) -> None:
        markers = server.coordination.markers
        complete = markers._complete

        def complete_and_tell(txn: Transaction) -> None:
            complete(txn)
            self.reached.set()

        markers._complete = complete_and_tell  # type: ignore[method-assign]


STEPS: Final = ("undecided", "decided", "one_marker", "all_markers", "completed")


@pytest.fixture
def another_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each start is one of the whole machine."""
    monkeypatch.setattr("penstock.broker.coordination.boot_id", lambda: uuid.uuid4().hex)


def make_topics(client: RawClient) -> None:
    for topic in TOPICS:
        assert not client.call(create(topic)).topics[0].error_code


def opened(client: RawClient, form: str, **asked: Any) -> RawProducer:
    """A transaction in both topics, with an offset."""
    producer = RawProducer(client, NAME, form)
    assert not producer.init(**asked).error_code
    for topic in TOPICS:
        assert producer.send(topic, b"x") == NONE
    assert producer.send_offset(GROUP, TOPICS[0], 7) == NONE
    return producer


def outcome(client: RawClient) -> str:
    """What became of it: everything, or nothing."""
    seen = {(topic, tuple(read(client, topic))) for topic in TOPICS}
    offset = committed_offset(client, GROUP, TOPICS[0])
    if seen == {(topic, (b"x",)) for topic in TOPICS}:
        assert offset == 7
        return "committed"
    assert seen == {(topic, ()) for topic in TOPICS}
    assert offset == -1
    return "aborted"


def is_over(client: RawClient, producer: RawProducer) -> None:
    """Nothing is left open: the next transaction is seen at once."""
    successor = RawProducer(client, producer.name)
    assert not successor.init().error_code
    for topic in TOPICS:
        assert successor.send(topic, b"next") == NONE
    assert successor.end() == NONE
    for topic in TOPICS:
        assert read(client, topic)[-1] == b"next"


def stop_at(broker: Broker, step: str, producer: RawProducer, *, commit: bool) -> None:
    stop = Step()
    patch: Callable[[Server], None] = getattr(stop, step)
    broker.call(patch)
    producer.client.send(producer.end_request(commit=commit), producer.end_version)
    assert stop.reached.wait(TIMEOUT_S)


@BOTH_FORMS
@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
@pytest.mark.parametrize("step", STEPS)
def test_a_killed_broker_carries_out_what_was_decided(step: str, commit: bool, form: str) -> None:
    with Broker() as broker:
        with RawClient(broker.bootstrap) as client:
            make_topics(client)
            producer = opened(client, form)
            stop_at(broker, step, producer, commit=commit)
            broker.crash()
        broker.start()
        with RawClient(broker.bootstrap) as client:
            assert outcome(client) == ("committed" if commit else "aborted")
            # The producer has not heard the answer, and asks again.
            producer.client = client
            assert producer.end(commit=commit) == NONE
            is_over(client, producer)


@BOTH_FORMS
def test_a_killed_broker_leaves_open_transactions_open(form: str) -> None:
    with Broker() as broker:
        with RawClient(broker.bootstrap) as client:
            make_topics(client)
            producer = opened(client, form)
            broker.crash()
        broker.start()
        with RawClient(broker.bootstrap) as client:
            producer.client = client
            assert producer.send(TOPICS[1], b"y") == NONE
            assert read(client, TOPICS[1]) == []
            assert producer.end() == NONE
            assert read(client, TOPICS[1]) == [b"x", b"y"]


@BOTH_FORMS
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.usefixtures("another_boot")
def test_without_power_it_is_all_or_nothing(step: str, form: str, seed: int) -> None:
    disk, data = SimulatedDisk(seed), "/simulated/data"
    with Broker(data, disk=disk, durability="disk") as broker:
        with RawClient(broker.bootstrap) as client:
            make_topics(client)
            producer = opened(client, form)
            stop_at(broker, step, producer, commit=True)
            broker.crash()
    with Broker(data, disk=disk.after_crash(), durability="disk") as broker:
        with RawClient(broker.bootstrap) as client:
            result = outcome(client)
            if step != "undecided":
                assert result == "committed"
            producer.client = client
            # It is told the truth, or that it is out of the game.
            told = producer.end()
            if told == NONE:
                assert result == "committed"
            else:
                assert told == ErrorCode.PRODUCER_FENCED
            is_over(client, producer)


def without_syncs_of_the_journal(server: Server) -> None:
    """What is written to the journal stays unsafe from now on."""
    request, journal = server.committer.request, server.coordination.journal.partition

    def request_others(partition: Any) -> None:
        if partition is not journal:
            request(partition)

    server.committer.request = request_others  # type: ignore[method-assign]


@BOTH_FORMS
@pytest.mark.usefixtures("another_boot")
def test_without_power_open_transactions_are_aborted(form: str, seed: int) -> None:
    disk, data = SimulatedDisk(seed), "/simulated/data"
    with Broker(data, disk=disk, durability="disk") as broker:
        with RawClient(broker.bootstrap) as client:
            make_topics(client)
            producer = RawProducer(client, NAME, form)
            producer.init()
            assert producer.send(TOPICS[0], b"first") == NONE
            assert producer.end() == NONE
            wait_until(broker, _is_safe)
            # What is opened now the journal may lose, though the records are safe.
            broker.call(without_syncs_of_the_journal)
            for topic in TOPICS:
                assert producer.send(topic, b"x") == NONE
            broker.crash()
    with Broker(data, disk=disk.after_crash(), durability="disk") as broker:
        with RawClient(broker.bootstrap) as client:
            producer.client = client
            assert read(client, TOPICS[0]) == [b"first"]
            assert read(client, TOPICS[1]) == []
            # Its producer must not go on with a half, nor take the end before for this one.
            assert producer.send(TOPICS[0], b"y", say_so=False) == ErrorCode.INVALID_PRODUCER_EPOCH
            assert producer.end() == ErrorCode.PRODUCER_FENCED
            is_over(client, producer)
            assert read(client, TOPICS[0]) == [b"first", b"next"]


def test_what_cannot_be_aborted_at_a_start_is_aborted_later() -> None:
    disk, data = SimulatedDisk(), "/simulated/data"
    options = BatchOptions(producer_id=77, producer_epoch=0, base_sequence=0, transactional=True)
    batch = simple_batch([b"void"], timestamp_ms=now_ms(), options=options)

    def write_unknown(server: Server) -> None:
        """What is left where the journal has lost that it was opened."""
        partition = server.partition(TOPICS[0], 0)
        assert partition is not None
        partition.append(batch, in_transaction=True)

    with Broker(data, disk=disk) as broker:
        with RawClient(broker.bootstrap) as client:
            make_topics(client)
        broker.call(write_unknown)
        broker.stop()
        disk.fail("write", times=-1, error=errno.ENOSPC, path_part=f"/{TOPICS[0]}-0/")
        broker.start()
        assert broker.call(lambda server: _open_in(server, TOPICS[0])) == 1
        disk.heal()
        # Its producer never comes back, and readers are not held up for ever.
        wait_until(broker, lambda server: not _open_in(server, TOPICS[0]))
        with RawClient(broker.bootstrap) as client:
            assert read(client, TOPICS[0]) == []


def _open_in(server: Server, topic: str) -> int:
    partition = server.partition(topic, 0)
    assert partition is not None
    return len(partition.open_transactions())


def _is_safe(server: Server) -> bool:
    journal = server.coordination.journal.partition
    return journal.visible == journal.log_end


@BOTH_FORMS
@pytest.mark.usefixtures("another_boot")
def test_without_power_a_completed_transaction_is_not_taken_for_the_next(
    form: str, seed: int
) -> None:
    disk, data = SimulatedDisk(seed), "/simulated/data"
    with Broker(data, disk=disk, durability="disk") as broker:
        with RawClient(broker.bootstrap) as client:
            make_topics(client)
            producer = opened(client, form)
            step = Step()

            def lose_the_completion(server: Server) -> None:
                step.completed(server)
                complete = server.coordination.markers._complete

                def unsafe(txn: Transaction) -> None:
                    without_syncs_of_the_journal(server)
                    complete(txn)

                server.coordination.markers._complete = unsafe  # type: ignore[method-assign]

            broker.call(lose_the_completion)
            assert producer.end() == NONE
            if form == "newer":
                # The older form does not get as far: its next transaction waits for this one.
                assert producer.send(TOPICS[0], b"next half") == NONE
            broker.crash()
    with Broker(data, disk=disk.after_crash(), durability="disk") as broker:
        with RawClient(broker.bootstrap) as client:
            assert outcome(client) == "committed"
            producer.client = client
            if form == "newer":
                code = producer.send(TOPICS[0], b"other half")
                assert code == ErrorCode.INVALID_PRODUCER_EPOCH
            is_over(client, producer)


@pytest.mark.parametrize("commit", [True, False], ids=["commit", "abort"])
@pytest.mark.usefixtures("another_boot")
def test_without_power_a_prepared_transaction_waits_for_its_decision(
    commit: bool, seed: int
) -> None:
    disk, data = SimulatedDisk(seed), "/simulated/data"
    with Broker(data, disk=disk, durability="disk") as broker:
        with RawClient(broker.bootstrap) as client:
            make_topics(client)
            producer = opened(client, "newer", two_phase=True)
            prepared = producer.ids
            broker.crash()
    with Broker(data, disk=disk.after_crash(), durability="disk") as broker:
        with RawClient(broker.bootstrap) as client:
            other = RawProducer(client, NAME)
            told = other.init(two_phase=True, keep=True)
            assert (told.ongoing_txn_producer_id, told.ongoing_txn_producer_epoch) == prepared
            producer.client = client
            assert producer.send(TOPICS[0], b"late") == ErrorCode.INVALID_PRODUCER_EPOCH
            assert other.send(TOPICS[0], b"new") == ErrorCode.INVALID_TXN_STATE
            assert other.end(commit=commit) == NONE
            assert outcome(client) == ("committed" if commit else "aborted")
            is_over(client, other)


def test_a_failing_disk_delays_an_end_but_does_not_change_it() -> None:
    disk = SimulatedDisk()
    with (
        Broker(
            "/simulated/data", disk=disk, durability="disk", housekeeping_interval_ms=20
        ) as broker,
        RawClient(broker.bootstrap) as client,
    ):
        make_topics(client)
        producer = opened(client, "newer")
        disk.fail("sync", path_part="b-0/")
        code = producer.end()
        assert code == ErrorCode.COORDINATOR_NOT_AVAILABLE
        # It is decided; the partition that failed is mended meanwhile.
        wait_until(broker, lambda server: _repaired(server, "b"))
        while (code := producer.end()) != NONE:
            assert code in {
                ErrorCode.COORDINATOR_NOT_AVAILABLE,
                ErrorCode.CONCURRENT_TRANSACTIONS,
            }
        assert outcome(client) == "committed"


def _repaired(server: Server, topic: str) -> bool:
    partition = server.partition(topic, 0)
    assert partition is not None
    partition.repair()
    return partition.failure is None


def test_a_prepared_write_is_acknowledged_when_the_journal_is_safe_too() -> None:
    disk = SimulatedDisk()
    with (
        Broker("/simulated/data", disk=disk, durability="disk") as broker,
        RawClient(broker.bootstrap) as client,
    ):
        make_topics(client)
        producer = RawProducer(client, NAME)
        producer.init(two_phase=True)
        held = broker.call(lambda server: server.committer.request)
        broker.call(without_syncs_of_the_journal)
        producer.begin_send(TOPICS[0], b"x")
        wait_until(broker, lambda server: _end(server, TOPICS[0]) == 1)
        assert client.is_silent()

        def go_on(server: Server) -> None:
            server.committer.request = held  # type: ignore[method-assign]
            held(server.coordination.journal.partition)

        broker.call(go_on)
        assert one(client.receive()).error_code == NONE


def _end(server: Server, topic: str) -> int:
    partition = server.partition(topic, 0)
    assert partition is not None
    return partition.visible


@BOTH_FORMS
def test_when_the_journals_disk_fails_nothing_half_is_committed(form: str) -> None:
    """The state is read again while clients are served, and its newest part is gone."""
    disk = SimulatedDisk()
    with (
        Broker("/simulated/data", disk=disk, durability="disk") as broker,
        RawClient(broker.bootstrap) as client,
    ):
        make_topics(client)
        producer = RawProducer(client, NAME, form)
        producer.init()
        wait_until(broker, _is_safe)
        disk.fail("sync", path_part="__penstock_journal")
        # The records are safe, but what the journal knows of the transaction is not.
        sent = producer.send(TOPICS[0], b"half")
        wait_until(broker, lambda server: server.coordination.journal.partition.failure is not None)
        successor = RawProducer(client, NAME, form)
        while successor.init().error_code:
            pass
        for topic in TOPICS:
            while (code := successor.send(topic, b"whole")) != NONE:
                assert code in {
                    ErrorCode.CONCURRENT_TRANSACTIONS,
                    ErrorCode.NOT_ENOUGH_REPLICAS,
                    ErrorCode.KAFKA_STORAGE_ERROR,
                }
        assert successor.end() == NONE
        for topic in TOPICS:
            assert read(client, topic) == [b"whole"]
        assert producer.end() == ErrorCode.PRODUCER_FENCED
        assert sent in {NONE, ErrorCode.COORDINATOR_NOT_AVAILABLE}


@BOTH_FORMS
def test_one_completion_without_room_does_not_end_the_transactions_of_others(form: str) -> None:
    disk = SimulatedDisk()
    with (
        Broker("/simulated/data", disk=disk, durability="disk") as broker,
        RawClient(broker.bootstrap) as client,
    ):
        make_topics(client)
        producer, other = RawProducer(client, NAME, form), RawProducer(client, "other", form)
        for each, topic in zip((producer, other), TOPICS, strict=True):
            each.init()
            assert each.send(topic, b"x") == NONE
        wait_until(broker, _is_safe)

        def without_room(server: Server) -> None:
            markers = server.coordination.markers
            complete = markers._complete

            def first(txn: Transaction) -> None:
                markers._complete = complete  # type: ignore[method-assign]
                disk.fail("write", error=errno.ENOSPC, path_part="__penstock_journal")
                complete(txn)

            markers._complete = first  # type: ignore[method-assign]

        broker.call(without_room)
        assert producer.end() == NONE
        while (code := other.end()) != NONE:
            assert code in {
                ErrorCode.COORDINATOR_NOT_AVAILABLE,
                ErrorCode.CONCURRENT_TRANSACTIONS,
            }
        for topic in TOPICS:
            assert read(client, topic) == [b"x"]
