"""Every limit of the configuration, reached on purpose; a witness notices nothing of it."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from penstock.broker import server
from penstock.broker.config import Limits
from penstock.broker.connection import Connection
from penstock.broker.open_files import share_out
from penstock.testing.broker import Broker
from penstock.wire.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from tests.broker import requests as rq
from tests.broker.raw import RawClient
from tests.broker.robustness.watch import (
    Witness,
    eventually,
    leftovers,
    memory_bytes,
    no_errors,
    quick_broker,
    wait_for_quiet,
)

MIB = 1 << 20
WEEK_MS = 7 * 24 * 3_600_000


@contextmanager
def limited(**limits: int) -> Iterator[Broker]:
    """A broker with these limits; at the end nothing may be left of its clients."""
    with quick_broker(limits=Limits(**limits)) as broker, no_errors(broker):
        yield broker
        wait_for_quiet(broker)


def connection_of(broker: Broker, client: RawClient) -> Connection:
    """The broker's end of a client's connection."""
    port = client.socket.getsockname()[1]

    def find(server: Any) -> Connection:
        for connection in server.connections:
            assert isinstance(connection, Connection)
            transport = connection._transport
            assert transport is not None
            if transport.get_extra_info("peername")[1] == port:
                return connection
        raise AssertionError("the client is not connected")

    client.call(rq.metadata())
    return broker.call(find)


def is_closed(client: RawClient) -> bool:
    """Whether the broker has closed; waits for that."""
    client.wait_closed()
    return True


def test_connections_beyond_the_limit_are_refused_and_the_others_served() -> None:
    with limited(max_connections=5) as broker, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(broker.bootstrap)) for _ in range(5)]
        for client in clients:
            client.call(rq.metadata())
        for _ in range(20):
            with RawClient(broker.bootstrap) as refused:
                assert is_closed(refused)
        for client in clients:
            client.call(rq.metadata())
        clients.pop().close()
        eventually(lambda: broker.call(lambda s: len(s.connections)) == 4, "one is gone")
        with RawClient(broker.bootstrap) as client:
            client.call(rq.metadata())


def test_connections_leave_descriptors_for_logs(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert share_out(65_536, 10_000) == (32_768, 10_000)
    # Logs give way to connections, but not wholly.
    assert share_out(20_000, 10_000) == (9_744, 10_000)
    assert not caplog.messages
    assert share_out(1_024, 10_000) == (341, 555)
    assert "at most 555 connections instead of 10000" in caplog.text
    monkeypatch.setattr(server, "raise_file_limit", lambda: 12)
    with limited(max_connections=100) as broker, ExitStack() as stack:
        assert broker.call(lambda s: s.store.most_open_logs) == 4
        for _ in range(7):
            stack.enter_context(RawClient(broker.bootstrap)).call(rq.metadata())
        with RawClient(broker.bootstrap) as refused:
            assert is_closed(refused)


def test_a_request_may_be_as_large_as_the_limit_and_no_larger() -> None:
    with limited(max_request_bytes=1000) as broker, RawClient(broker.bootstrap) as client:
        client.call(rq.create("t"))
        for size in (999, 1000):
            frame = client.frame(rq.metadata("t"), 9)
            frame += bytes(size - len(frame))
            client.send_frame(frame)
            client.receive()
        client.send_bytes(struct.pack(">i", 1001))
        assert is_closed(client)


def test_many_small_requests_pass_a_small_limit() -> None:
    limits = limited(max_request_bytes=100, max_inflight_requests=3)
    with limits as broker, RawClient(broker.bootstrap) as client:
        count = 20_000
        client.send_all(*[(rq.metadata(), 1)] * count)
        for _ in range(count):
            client.receive()


def test_receive_buffers_share_a_budget_and_give_it_back() -> None:
    with limited(max_buffered_bytes=4 * MIB) as broker, Witness(broker), ExitStack() as stack:
        clients = [stack.enter_context(RawClient(broker.bootstrap)) for _ in range(12)]
        for client in clients:
            # More than half of a buffer of 1 MiB, and never the rest.
            client.send_bytes(struct.pack(">i", 50 * MIB) + bytes(700_000))
        eventually(lambda: broker.call(lambda s: len(s.connections)) < 10, "some are cut off")
        assert broker.call(lambda s: s.buffer_pool.left_bytes) >= 0
        for client in clients:
            client.close()
        eventually(
            lambda: broker.call(lambda s: s.buffer_pool.left_bytes) == 4 * MIB, "all is back"
        )
        with RawClient(broker.bootstrap) as client:
            client.call(rq.create("t", max_message_bytes=str(4 * MIB)))
            for _ in range(3):
                answer = rq.one(client.call(rq.produce("t", rq.batch(bytes(2 * MIB))), 9))
                assert not answer.error_code


def test_an_idle_connection_gives_its_grown_buffer_to_one_that_needs_it() -> None:
    with limited(max_buffered_bytes=5 * MIB) as broker, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(broker.bootstrap)) for _ in range(6)]
        clients[0].call(rq.create("t", max_message_bytes=str(4 * MIB)))
        for client in clients:
            answer = rq.one(client.call(rq.produce("t", rq.batch(bytes(2 * MIB))), 9))
            assert not answer.error_code


def test_unanswered_requests_are_bounded_and_answered_in_order() -> None:
    with limited(max_inflight_requests=10) as broker, RawClient(broker.bootstrap) as client:
        client.call(rq.create("t"))
        connection = connection_of(broker, client)
        waits = [(rq.fetch("t", 0, max_wait_ms=WEEK_MS), 11)] * 100
        client.send_all(*waits)
        eventually(lambda: connection._paused, "it is not read from any more")
        assert broker.call(lambda _: len(connection._slots)) == 10
        with RawClient(broker.bootstrap) as other:
            other.call(rq.produce("t", rq.batch(b"news")), 9)
        for _ in waits:
            assert rq.values_of(rq.one(client.receive()).records) == [b"news"]
        client.call(rq.metadata())


def test_one_request_at_a_time_is_a_possible_limit() -> None:
    with limited(max_inflight_requests=1) as broker, RawClient(broker.bootstrap) as client:
        client.send_all(*[(rq.metadata(), 9)] * 50)
        for _ in range(50):
            client.receive()


@contextmanager
def reluctant_reader(broker: Broker) -> Iterator[RawClient]:
    """A client that has room for little, and reads only when the test does."""
    with Witness(broker), RawClient(broker.bootstrap, receive_buffer_bytes=8192) as client:
        yield client


@pytest.mark.parametrize("slice_bytes", [100_000, 900_000], ids=["read", "sendfile"])
def test_a_client_that_does_not_read_holds_bounded_memory(slice_bytes: int) -> None:
    with limited(max_unsent_bytes=2 * MIB) as broker, reluctant_reader(broker) as client:
        client.call(rq.create("t"))
        client.call(rq.produce("t", rq.batch(b"x" * slice_bytes)), 9)
        connection = connection_of(broker, client)
        before = memory_bytes()
        asked = 200
        client.send_all(*[(rq.fetch("t"), 11)] * asked)
        eventually(lambda: connection._paused, "it is not read from any more")
        assert broker.call(lambda _: connection._outgoing_bytes) <= 4 * MIB
        assert memory_bytes() - before < 16 * MIB
        for _ in range(asked):
            (value,) = rq.values_of(rq.one(client.receive()).records)
            assert value is not None
            assert len(value) == slice_bytes
        client.call(rq.metadata())


def test_large_answers_to_small_requests_are_bounded_too() -> None:
    limits = limited(max_unsent_bytes=MIB, max_inflight_requests=100_000)
    with limits as broker, reluctant_reader(broker) as client:
        client.call(rq.create("t", 300))
        connection = connection_of(broker, client)
        before = memory_bytes()
        # Each answer has some 8 KB: 24 MB in all.
        asked = 3_000
        client.send_all(*[(rq.metadata("t"), 9)] * asked)
        eventually(lambda: connection._paused, "it is not read from any more")
        assert memory_bytes() - before < 12 * MIB
        for _ in range(asked):
            client.receive_frame()
        client.asked.clear()
        client.call(rq.metadata())


def test_many_slow_connections_are_all_served() -> None:
    with limited() as broker, Witness(broker) as witness, ExitStack() as stack:
        clients = [stack.enter_context(RawClient(broker.bootstrap)) for _ in range(150)]
        frames = [client.frame(rq.metadata("witness"), 9) for client in clients]
        streams = [struct.pack(">i", len(frame)) + frame for frame in frames]
        for at in range(len(streams[0])):
            for client, stream in zip(clients, streams, strict=True):
                client.send_bytes(stream[at : at + 1])
        for client in clients:
            assert client.receive().topics[0].name == "witness"
        eventually(lambda: witness.rounds > 0, "the witness is served")


def test_silent_connections_are_closed_and_busy_ones_are_not() -> None:
    with limited(max_idle_ms=1_000_000) as broker, RawClient(broker.bootstrap) as busy:
        # Connected, and never a byte: as old as its connection, not as old as the machine.
        silent = RawClient(broker.bootstrap)
        half = RawClient(broker.bootstrap)
        half.send_bytes(b"\0\0")
        eventually(lambda: broker.call(lambda s: len(s.connections)) == 3, "all are connected")
        broker.call(lambda server: server._sweep())
        assert broker.call(lambda s: len(s.connections)) == 3

        def make_old(server: Any) -> None:
            for connection in server.connections:
                connection.last_active -= 2_000

        broker.call(make_old)
        busy.call(rq.metadata())
        broker.call(lambda server: server._sweep())
        assert is_closed(silent)
        assert is_closed(half)
        busy.call(rq.metadata())
        silent.close()
        half.close()


# ---- fetch sessions --------------------------------------------------------------------------


def session_request(partitions: int, session: tuple[int, int] = (0, 0)) -> FetchRequest:
    return FetchRequest(
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=1,
        session_id=session[0],
        session_epoch=session[1],
        topics=[
            FetchTopic(
                topic="t",
                partitions=[
                    FetchPartition(partition=n, fetch_offset=0, partition_max_bytes=1)
                    for n in range(partitions)
                ],
            )
        ],
    )


def test_a_flood_of_fetch_sessions_is_bounded() -> None:
    with limited(max_fetch_sessions=20) as broker, RawClient(broker.bootstrap) as client:
        client.call(rq.create("t"))
        first = client.call(session_request(1), 11).session_id
        sessions = [client.call(session_request(1), 11).session_id for _ in range(500)]
        assert len({first, *sessions[:19]}) == 20
        assert broker.call(lambda s: len(s.fetch_sessions)) == 20
        # Those who were there first are not disturbed; the others do without a session.
        assert not any(sessions[19:])
        assert not client.call(rq.fetch(None, session=(first, 1)), 11).error_code


def test_the_partitions_of_all_fetch_sessions_are_bounded() -> None:
    with limited(max_fetch_sessions=20) as broker, RawClient(broker.bootstrap) as client:
        client.call(rq.create("t"))
        small = client.call(session_request(1), 11).session_id
        large = client.call(session_request(3_500), 11).session_id
        assert small
        assert large
        # Another large one does not fit beside it: the oldest go.
        other = client.call(session_request(3_500), 11).session_id
        assert other
        assert broker.call(lambda s: len(s.fetch_sessions)) == 1
        # One that is too large by itself is answered, and not remembered.
        too_large = client.call(session_request(4_001), 11)
        assert too_large.session_id == 0
        assert len(too_large.responses[0].partitions) == 4_001
        # Nor can one grow to be so.
        session = client.call(session_request(1), 11).session_id
        grown = client.call(session_request(4_001, (session, 1)), 11)
        assert grown.session_id == 0
        assert broker.call(lambda s: len(s.fetch_sessions)) <= 1


def test_nothing_is_left_of_long_polls_whose_clients_are_gone() -> None:
    with limited() as broker:
        with RawClient(broker.bootstrap) as client:
            client.call(rq.create("t"))
        for _ in range(50):
            with RawClient(broker.bootstrap) as client:
                client.send(rq.fetch("t", max_wait_ms=WEEK_MS), 11)
                eventually(lambda: "waiting reads" in broker.call(leftovers), "it waits")
            wait_for_quiet(broker)
