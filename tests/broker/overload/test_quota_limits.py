"""Quotas on the wire: who is throttled, by how much, and who is not."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import pytest

from penstock.broker.quotas import BURST_MS
from penstock.broker.server import Broker as Server
from penstock.testing.broker import Broker
from penstock.testing.clock import ManualClock
from penstock.testing.java import JVM_OPTIONS, java_command
from penstock.testing.kafka_tools import KafkaTools
from penstock.wire.messages.api_versions import ApiVersionsRequest
from tests.broker.conftest import NEVER_MS
from tests.broker.disks import HastyDisk
from tests.broker.overload.guarded import (
    BATCH,
    FULL_AT,
    VERSION,
    commit,
    guarded_topic,
    wait_for_holds,
)
from tests.broker.quota_requests import CLIENT, EXACT, USER, alter, change, describe
from tests.broker.raw import RawClient
from tests.broker.requests import batch_of_size, create, fetch, metadata, new_name, one
from tests.broker.requests import produce as produce_request
from tests.broker.waits import wait_until

RATE = 100_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def broker(clock: ManualClock) -> Iterator[Broker]:
    """Its time for accounting stands still, so that every number is known."""
    with Broker(disk=HastyDisk(), clock=clock, housekeeping_interval_ms=NEVER_MS) as own:
        yield own


@pytest.fixture
def admin(broker: Broker) -> Iterator[RawClient]:
    with RawClient(broker.bootstrap, client_id="admin") as client:
        yield client


def set_quota(admin: RawClient, who: list[tuple[str, str | None]], **quotas: float | None) -> None:
    result = admin.call(alter(change(who, **quotas))).entries[0]
    assert not result.error_code, result.error_message


def topic_of(admin: RawClient) -> str:
    name = new_name()
    assert not admin.call(create(name)).topics[0].error_code
    return name


def sent(client: RawClient, request: Any, version: int) -> tuple[Any, int]:
    """The answer, and the size of the request."""
    frame = client.frame(request, version)
    client.send_frame(frame)
    return client.receive(), len(frame)


def muted(server: Server) -> int:
    return sum(connection._mute is not None for connection in server.connections)


def at_now(topic: str, clock: ManualClock, size: int) -> Any:
    return produce_request(topic, batch_of_size(size, at_ms=clock.now_ms()))


def test_without_quotas_nothing_is_in_the_way(broker: Broker, admin: RawClient) -> None:
    def plain(server: Server) -> bool:
        return server.dispatch == server.dispatch_plain

    assert broker.call(plain)
    set_quota(admin, [(CLIENT, "x")], producer_byte_rate=1)
    assert not broker.call(plain)
    set_quota(admin, [(CLIENT, "x")], producer_byte_rate=None)
    assert broker.call(plain)


def test_a_producer_is_told_to_wait_for_what_it_owes(
    broker: Broker, admin: RawClient, clock: ManualClock
) -> None:
    topic = topic_of(admin)
    set_quota(admin, [(CLIENT, "app")], producer_byte_rate=RATE)
    used = 0
    with RawClient(broker.bootstrap, client_id="app") as client:
        # The second and later ones are recognised by their bytes, unless they are throttled.
        for _ in range(12):
            response, size = sent(client, at_now(topic, clock, BATCH), VERSION)
            used += size
            owed = max(used - RATE * BURST_MS // 1000, 0)
            assert response.throttle_time_ms == -(-owed * 1000 // RATE)
            assert not one(response).error_code
        assert used > RATE
        assert broker.call(muted) == 1
        # It is read from again when its time has come.
        wait_until(broker, lambda server: muted(server) == 0)
        clock.advance(10_000)
        response, _ = sent(client, at_now(topic, clock, BATCH), VERSION)
        assert response.throttle_time_ms == 0
    with RawClient(broker.bootstrap, client_id="other") as client:
        for _ in range(20):
            response, _ = sent(client, at_now(topic, clock, BATCH), VERSION)
            assert response.throttle_time_ms == 0


def test_while_it_is_muted_nothing_is_read(
    broker: Broker, admin: RawClient, clock: ManualClock
) -> None:
    topic = topic_of(admin)
    set_quota(admin, [(CLIENT, "app")], producer_byte_rate=BATCH)
    with RawClient(broker.bootstrap, client_id="app") as client:
        response, _ = sent(client, at_now(topic, clock, 30 * BATCH), VERSION)
        assert response.throttle_time_ms > 20_000
        client.send(at_now(topic, clock, BATCH), VERSION)
        # Others are served all the while, and another connection of the same client too.
        for _ in range(20):
            assert not one(admin.call(at_now(topic, clock, BATCH), VERSION)).error_code
        assert client.is_silent()
        with RawClient(broker.bootstrap, client_id="app") as second:
            response, _ = sent(second, at_now(topic, clock, 100), VERSION)
            assert response.throttle_time_ms > 20_000
        # A stop does not wait for it either.
        broker.stop()
        assert client.wait_closed() == b""


def test_a_consumer_gets_a_second_s_worth_at_a_time(
    broker: Broker, admin: RawClient, clock: ManualClock
) -> None:
    topic = topic_of(admin)
    for _ in range(10):
        admin.call(at_now(topic, clock, BATCH), VERSION)
    set_quota(admin, [(USER, "ANONYMOUS"), (CLIENT, "app")], consumer_byte_rate=3 * BATCH)
    with RawClient(broker.bootstrap, client_id="app") as client:
        response = client.call(fetch(topic), 12)
        assert len(one(response).records) == 3 * BATCH
        assert response.throttle_time_ms == 0
        response = client.call(fetch(topic, 3, partition_max_bytes=1), 12)
        assert len(one(response).records) == BATCH
        assert response.throttle_time_ms == 334
        assert broker.call(muted) == 1
    response = admin.call(fetch(topic), 12)
    assert len(one(response).records) == 10 * BATCH
    assert response.throttle_time_ms == 0


def test_requests_are_counted(broker: Broker, admin: RawClient, clock: ManualClock) -> None:
    set_quota(admin, [(CLIENT, None)], request_rate=20)
    set_quota(admin, [(CLIENT, "admin")], request_rate=1_000_000)
    with RawClient(broker.bootstrap, client_id="app") as client:
        for _ in range(20):
            assert client.call(metadata()).throttle_time_ms == 0
        assert client.call(metadata()).throttle_time_ms == 50
        assert client.call(ApiVersionsRequest()).throttle_time_ms == 100
        assert client.call(fetch("nowhere"), 12).throttle_time_ms == 150
    with RawClient(broker.bootstrap, client_id=None) as client:
        assert client.call(metadata()).throttle_time_ms == 0


def test_a_held_request_is_not_paid_for_twice(
    broker: Broker, admin: RawClient, clock: ManualClock
) -> None:
    topic = guarded_topic(admin, "block")
    fill_at(admin, topic, clock)
    set_quota(admin, [(CLIENT, "app")], producer_byte_rate=10 * RATE)
    with RawClient(broker.bootstrap, client_id="app") as client:
        frame = client.frame(at_now(topic, clock, BATCH), VERSION)
        client.send_frame(frame)
        wait_for_holds(broker, topic, 1)
        commit(admin, topic, FULL_AT)
        assert not one(client.receive()).error_code
        used = broker.call(lambda s: [b.left for b in s.enforcement.meters._buckets.values()])
        assert used == [10 * RATE - len(frame)]


def fill_at(client: RawClient, topic: str, clock: ManualClock) -> None:
    for _ in range(FULL_AT):
        assert not one(client.call(at_now(topic, clock, BATCH), VERSION)).error_code


def test_quotas_survive_a_restart(broker: Broker, admin: RawClient) -> None:
    who: list[tuple[str, str | None]] = [(USER, "a/b=c"), (CLIENT, None)]
    set_quota(admin, who, producer_byte_rate=123, request_rate=0.5)
    set_quota(admin, [(CLIENT, "gone")], producer_byte_rate=5)
    set_quota(admin, [(CLIENT, "gone")], producer_byte_rate=None)
    for end in (broker.stop, broker.crash):
        end()
        broker.start()
        with RawClient(broker.bootstrap) as client:
            (entry,) = client.call(describe()).entries
        assert {(p.entity_type, p.entity_name) for p in entry.entity} == set(who)
        assert {v.key: v.value for v in entry.values} == {
            "producer_byte_rate": 123,
            "request_rate": 0.5,
        }
        assert broker.call(lambda s: s.dispatch == s.enforcement.dispatch)


def test_an_entity_named_twice_is_refused(broker: Broker, admin: RawClient) -> None:
    twice = change([(CLIENT, "app")], producer_byte_rate=1)
    codes = [r.error_code for r in admin.call(alter(twice, twice)).entries]
    assert (codes[0], bool(codes[1])) == (0, True)


def test_kafka_s_own_command_sets_and_shows_them(broker: Broker, kafka_tools: KafkaTools) -> None:
    def configs(*arguments: str) -> str:
        command = java_command(kafka_tools.home, JVM_OPTIONS, "kafka.admin.ConfigCommand")
        address = ("--bootstrap-server", broker.bootstrap)
        done = subprocess.run(
            [*command, *address, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    client = ("--entity-type", "clients", "--entity-name", "app")
    configs("--alter", "--add-config", "producer_byte_rate=1024", *client)
    assert "producer_byte_rate=1024.0" in configs("--describe", *client)
    with RawClient(broker.bootstrap) as raw:
        (entry,) = raw.call(describe((CLIENT, EXACT, "app"))).entries
    assert [(v.key, v.value) for v in entry.values] == [("producer_byte_rate", 1024)]
