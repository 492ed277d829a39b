"""Many requests on one connection: answers in order, slow readers bounded, nobody else delayed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.broker.connection import Connection
from penstock.broker.server import Broker as Server
from penstock.log.slice import Slice
from penstock.testing.broker import Broker
from penstock.wire import Message
from penstock.wire.messages.api_versions import ApiVersionsRequest
from tests.broker.conftest import NEVER_MS
from tests.broker.disks import GatedDisk
from tests.broker.raw import RawClient
from tests.broker.requests import (
    LATEST,
    MIB,
    SET,
    alter,
    batch,
    batch_of_size,
    create,
    fetch,
    list_offsets,
    metadata,
    new_name,
    new_producer,
    one,
    produce,
    values_of,
)
from tests.broker.waits import wait_for_fetches, wait_until

Connect = Callable[[Broker], RawClient]
VERSIONS = ApiVersionsRequest(client_software_name="x", client_software_version="1")


@pytest.fixture
def disk() -> GatedDisk:
    return GatedDisk()


@pytest.fixture
def gated(disk: GatedDisk) -> Iterator[Broker]:
    """A broker that syncs, on a disk that waits at the gate."""
    with Broker(durability="disk", disk=disk, housekeeping_interval_ms=NEVER_MS) as broker:
        yield broker


def connection_of(server: Server, client: RawClient) -> Connection:
    (port,) = {client.socket.getsockname()[1]}
    for connection in server.connections:
        assert connection._transport is not None
        if connection._transport.get_extra_info("peername")[1] == port:
            return connection
    raise LookupError(port)


def held_bytes(connection: Connection) -> int:
    """What the broker keeps in memory for a connection that does not read."""
    assert connection._transport is not None
    parts = [part for part in connection._outgoing if not isinstance(part, Slice)]
    parts += [part for slot in connection._slots if slot.ready for part in slot.parts
              if not isinstance(part, Slice)]  # fmt: skip
    return sum(map(len, parts)) + connection._transport.get_write_buffer_size()


# ---- order -----------------------------------------------------------------------------------


def test_quick_answers_wait_for_the_slow_one_before_them(gated: Broker, disk: GatedDisk) -> None:
    with RawClient(gated.bootstrap) as client, RawClient(gated.bootstrap) as other:
        client.call(create("t"))
        with disk.closed("t"):
            client.send_all(
                VERSIONS,
                (produce("t", batch(b"a")), 12),
                VERSIONS,
                (produce("t", batch(b"b"), acks=1), 12),
                (fetch("t"), 12),
                metadata("t"),
            )
            assert client.receive().api_keys
            disk.wait_for_sync()
            # Others are answered meanwhile, and see nothing that is not safe yet.
            assert not one(other.call(fetch("t"), 12)).records
            assert one(other.call(list_offsets("t", LATEST))).offset == 0
            assert client.is_silent()
        assert one(client.receive()).base_offset == 0
        assert client.receive().api_keys
        assert one(client.receive()).base_offset == 1
        # Read before the sync, so it saw nothing; answered in its turn.
        assert one(client.receive()).records == b""
        assert client.receive().topics[0].name == "t"
        assert values_of(one(client.call(fetch("t", max_wait_ms=10_000), 12)).records) == [
            b"a", b"b",
        ]  # fmt: skip


def test_a_fetch_that_waits_holds_back_what_comes_after_it(
    shared: Broker, client: RawClient, topic: str, connect: Connect
) -> None:
    reader = connect(shared)
    reader.send_all((fetch(topic, max_wait_ms=60_000), 12), VERSIONS, metadata(topic))
    wait_for_fetches(shared, 1)
    client.call(metadata(topic))
    assert reader.is_silent()
    client.call(produce(topic, batch(b"x")), 12)
    assert values_of(one(reader.receive()).records) == [b"x"]
    assert reader.receive().api_keys
    assert reader.receive().topics[0].name == topic


def test_hundreds_of_requests_of_all_kinds_come_back_in_order(
    client: RawClient, topic: str, seed: int
) -> None:
    rng = random.Random(seed)
    written = 0
    wanted: list[tuple[str, int]] = []
    requests: list[Any] = []
    for _ in range(600):
        kind = rng.choice(("produce", "fetch", "metadata", "versions", "id", "list", "alter"))
        made: Message | tuple[Message, int] = VERSIONS
        if kind == "produce":
            made = (produce(topic, batch(b"%d" % written), acks=rng.choice((1, -1))), 12)
            written += 1
        elif kind == "fetch":
            made = (fetch(topic, rng.randint(0, written)), 12)
        elif kind == "metadata":
            made = metadata(topic)
        elif kind == "id":
            made = new_producer()
        elif kind == "list":
            made = list_offsets(topic, LATEST)
        elif kind == "alter":
            made = alter(topic, (SET, "retention.ms", str(written + 1)))
        requests.append(made)
        wanted.append((kind, written))
    client.send_all(*requests)
    for kind, count in wanted:
        answer = client.receive()
        if kind == "produce":
            assert one(answer).base_offset == count - 1
        elif kind == "fetch":
            assert one(answer).high_watermark == count
        elif kind == "list":
            # Answered in its turn, but looked up a little later.
            assert count <= one(answer).offset <= written


def test_more_requests_than_may_wait_are_all_answered(
    shared: Broker, client: RawClient, topic: str, connect: Connect
) -> None:
    """The connection is not read from at its limit, and is again when it has caught up."""
    count = shared.config.limits.max_inflight_requests * 3
    reader = connect(shared)
    reader.send_all(*[(fetch(topic, max_wait_ms=60_000), 12)] * count)
    wait_until(shared, lambda s: connection_of(s, reader)._paused)
    taken = shared.call(lambda s: len(connection_of(s, reader)._slots))
    assert taken <= shared.config.limits.max_inflight_requests
    client.call(produce(topic, batch(b"x")), 12)
    for _ in range(count):
        assert values_of(one(reader.receive()).records) == [b"x"]


def test_pipelined_changes_of_one_topic_all_count(
    shared: Broker, client: RawClient, topic: str
) -> None:
    client.send_all(
        alter(topic, (SET, "retention.ms", "1000")),
        alter(topic, (SET, "max.message.bytes", "2000")),
        alter(topic, (SET, "retention.bytes", "3000")),
    )
    for _ in range(3):
        assert not client.receive().responses[0].error_code
    settings = shared.call(lambda server: dict(server.catalog.topics[topic].settings))
    assert settings == {
        "retention.ms": "1000", "max.message.bytes": "2000", "retention.bytes": "3000",
    }  # fmt: skip


# ---- readers that do not read ----------------------------------------------------------------


@pytest.mark.parametrize(("size", "requests"), [(MIB - 100, 120), (100_000, 900)])
def test_a_slow_reader_is_bounded_and_gets_everything(
    shared: Broker, client: RawClient, size: int, requests: int
) -> None:
    """Large slices are sent from the file, small ones are read; neither piles up in memory."""
    topic = new_name()
    client.call(create(topic))
    client.call(produce(topic, batch_of_size(size)), 12)
    limits = shared.config.limits
    with RawClient(shared.bootstrap, receive_buffer_bytes=16_384) as reader:
        reader.send_all(*[(fetch(topic), 12)] * requests)
        wait_until(shared, lambda s: connection_of(s, reader)._paused)
        held = shared.call(lambda s: held_bytes(connection_of(s, reader)))
        assert held <= limits.max_unsent_bytes + 2 * MIB
        # Nobody else notices.
        assert not one(client.call(fetch(topic, 1), 12)).error_code
        for _ in range(requests):
            assert len(one(reader.receive()).records) == size
        assert reader.call(VERSIONS).api_keys


def test_readers_that_are_woken_at_once_do_not_fill_memory(
    shared: Broker, client: RawClient
) -> None:
    """One record wakes nine hundred fetches of a connection that reads nothing."""
    topic = new_name()
    client.call(create(topic))
    with RawClient(shared.bootstrap, receive_buffer_bytes=16_384) as reader:
        reader.send_all(*[(fetch(topic, max_wait_ms=60_000), 12)] * 900)
        wait_for_fetches(shared, 900)
        client.call(produce(topic, batch_of_size(250_000)), 12)
        wait_for_fetches(shared, 0)
        client.call(VERSIONS)
        assert shared.call(lambda s: held_bytes(connection_of(s, reader))) < 4 * MIB
        for _ in range(900):
            assert len(one(reader.receive()).records) == 250_000


def test_a_reader_that_goes_in_the_middle_of_an_answer_leaves_nothing(
    shared: Broker, client: RawClient
) -> None:
    topic = new_name()
    client.call(create(topic))
    for _ in range(8):
        client.call(produce(topic, batch_of_size(MIB - 100)), 12)
    before = shared.call(lambda s: len(s.connections))
    for _ in range(5):
        with RawClient(shared.bootstrap, receive_buffer_bytes=16_384) as reader:
            reader.send_all(*[(fetch(topic, partition_max_bytes=8 * MIB), 12)] * 3)
            reader.receive_bytes(100_000)
    wait_until(shared, lambda s: len(s.connections) == before)
    assert len(one(client.call(fetch(topic, 7), 12)).records) == MIB - 100


def test_a_large_request_and_small_ones_around_it(shared: Broker, client: RawClient) -> None:
    """The receive buffer grows for it, and what lies around it is not lost."""
    topic = new_name()
    client.call(create(topic, 40))
    large = produce(topic, {number: batch_of_size(MIB - 100) for number in range(40)})
    client.send_all(VERSIONS, (large, 12), VERSIONS, (produce(topic, batch(b"x")), 12), VERSIONS)
    assert client.receive().api_keys
    parts = client.receive().responses[0].partition_responses
    assert [(p.error_code, p.base_offset) for p in parts] == [(0, 0)] * 40
    assert client.receive().api_keys
    assert one(client.receive()).base_offset == 1
    assert client.receive().api_keys
