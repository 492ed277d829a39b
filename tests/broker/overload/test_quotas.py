"""Quotas without sockets: which one holds for whom, and what the accounting lets through."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.broker import quotas
from penstock.broker.catalog import ApiError
from penstock.broker.quotas import (
    BURST_MS,
    CLIENT_ID,
    CONSUMED,
    MAX_THROTTLE_MS,
    PRODUCED,
    REQUESTED,
    USER,
    Bucket,
    Change,
    Entity,
    Meters,
    QuotaCoordinator,
    entity_of,
)
from penstock.testing.clock import ManualClock
from penstock.wire.errors import ErrorCode
from tests.harness.profiles import QUOTA_CLIENTS, examples

ME, APP = "me", "app"


def set_quota(coordinator: QuotaCoordinator, entity: Entity, kind: str, value: float) -> None:
    for entry in coordinator.alter(list(entity), [Change(kind, value)]):
        coordinator.replay(*entry)


# ---- whose quota -----------------------------------------------------------------------------

# Kafka's order, the most particular first.
ORDER = [
    entity_of(user=ME, client_id=APP),
    entity_of(user=ME, client_id=None),
    entity_of(user=ME),
    entity_of(user=None, client_id=APP),
    entity_of(user=None, client_id=None),
    entity_of(user=None),
    entity_of(client_id=APP),
    entity_of(client_id=None),
]


@given(st.sets(st.integers(0, len(ORDER) - 1)))
@settings(max_examples=examples(66))
def test_the_most_particular_entity_counts(present: set[int]) -> None:
    coordinator = QuotaCoordinator()
    for at in present:
        set_quota(coordinator, ORDER[at], PRODUCED, at + 1)
    set_quota(coordinator, entity_of(user="other", client_id=APP), PRODUCED, 99)
    set_quota(coordinator, entity_of(client_id="other"), PRODUCED, 99)
    found = coordinator.limit(ME, APP, PRODUCED)
    if present:
        assert found is not None
        assert found[0] == min(present) + 1
    else:
        assert found is None
    assert coordinator.limit(ME, APP, CONSUMED) is None


def test_each_kind_is_looked_up_by_itself() -> None:
    coordinator = QuotaCoordinator()
    set_quota(coordinator, entity_of(user=ME), PRODUCED, 1)
    set_quota(coordinator, entity_of(client_id=None), CONSUMED, 2)
    assert coordinator.limit(ME, APP, PRODUCED) == (1, (PRODUCED, ME, None))
    assert coordinator.limit(ME, APP, CONSUMED) == (2, (CONSUMED, None, APP))


def test_a_client_without_an_id_falls_under_the_default() -> None:
    coordinator = QuotaCoordinator()
    set_quota(coordinator, entity_of(user=ME), PRODUCED, 1)
    assert coordinator.limit(ME, "", PRODUCED) == (1, (PRODUCED, ME, None))
    set_quota(coordinator, entity_of(user=ME, client_id=None), PRODUCED, 2)
    assert coordinator.limit(ME, "", PRODUCED) == (2, (PRODUCED, ME, ""))


def test_who_shares_a_bucket() -> None:
    coordinator = QuotaCoordinator()
    set_quota(coordinator, entity_of(user=ME), PRODUCED, 1_000)
    set_quota(coordinator, entity_of(user=None, client_id=None), PRODUCED, 1_000)
    meters = Meters(coordinator)

    def bucket(user: str, client: str) -> Bucket | None:
        return meters.bucket(user, client, PRODUCED, 0)

    assert bucket(ME, "a") is bucket(ME, "b")
    assert bucket("x", "a") is not bucket("x", "b")
    assert bucket("x", "a") is not bucket("y", "a")
    assert bucket("x", "a") is bucket("x", "a")


# ---- setting them ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("parts", "change"),
    [
        ([], Change(PRODUCED, 1)),
        ([("planet", "x")], Change(PRODUCED, 1)),
        ([("ip", "127.0.0.1")], Change("connection_creation_rate", 1)),
        ([(USER, "")], Change(PRODUCED, 1)),
        ([(USER, "a"), (USER, "b")], Change(PRODUCED, 1)),
        ([(USER, "a")], Change("request_percentage", 1)),
        ([(USER, "a")], Change(PRODUCED, 0)),
        ([(USER, "a")], Change(PRODUCED, -1)),
        ([(USER, "a")], Change(PRODUCED, 1.5)),
        ([(USER, "a")], Change(REQUESTED, float("nan"))),
        ([(USER, "a")], Change(REQUESTED, float("inf"))),
    ],
)
def test_what_cannot_be_set(parts: list[tuple[str, str | None]], change: Change) -> None:
    with pytest.raises(ApiError) as caught:
        QuotaCoordinator().alter(parts, [change])
    assert caught.value.code == ErrorCode.INVALID_REQUEST


def test_entities_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MAX_ENTITIES", 2)
    coordinator = QuotaCoordinator()
    for name in ("a", "b"):
        set_quota(coordinator, entity_of(user=name), PRODUCED, 1)
    with pytest.raises(ApiError) as caught:
        set_quota(coordinator, entity_of(user="c"), PRODUCED, 1)
    assert caught.value.code == ErrorCode.POLICY_VIOLATION
    # Those there are can still be changed and removed.
    set_quota(coordinator, entity_of(user="a"), PRODUCED, 2)
    assert coordinator.alter([(USER, "a")], [Change(PRODUCED, None)]) == [
        (("quota", USER, "a"), None)
    ]


@given(st.lists(st.tuples(st.sampled_from(ORDER), st.booleans()), max_size=20))
@settings(max_examples=examples(66))
def test_the_state_is_what_the_entries_say(steps: list[tuple[Entity, bool]]) -> None:
    coordinator, again = QuotaCoordinator(), QuotaCoordinator()
    for at, (entity, wanted) in enumerate(steps):
        changes = [Change(REQUESTED, at + 0.5 if wanted else None)]
        for key, value in coordinator.alter(list(entity), changes):
            coordinator.replay(key, value)
            again.replay(key, value)
    assert again.quotas == coordinator.quotas
    assert all(values for values in coordinator.quotas.values())


def test_nothing_is_written_that_changes_nothing() -> None:
    coordinator = QuotaCoordinator()
    set_quota(coordinator, entity_of(client_id=APP), PRODUCED, 5)
    assert coordinator.alter([(CLIENT_ID, APP)], [Change(PRODUCED, 5)]) == []
    assert coordinator.alter([(CLIENT_ID, APP)], [Change(CONSUMED, None)]) == []


# ---- the accounting --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(QUOTA_CLIENTS))
def test_over_any_time_a_client_uses_its_rate(seed: int) -> None:
    """Clients that wait as they are told: bytes against the time that has passed."""
    rng = random.Random(seed)
    clock = ManualClock()
    rate, largest = rng.choice([500, 10_000, 1_000_000]), rng.choice([100, 5_000])
    bucket = Bucket(rate, clock.elapsed_ms())
    connections = rng.randint(1, 5)
    free_at = [0] * connections
    used: list[tuple[int, int]] = []
    for _ in range(500):
        # The connection that may send first sends, when it may or some time later.
        at = min(range(connections), key=free_at.__getitem__)
        idle_ms = rng.choice([0, 0, 0, 50, 3_000])
        clock.advance(max(free_at[at] - clock.elapsed_ms(), 0) + idle_ms)
        size = rng.randint(1, largest)
        used.append((clock.elapsed_ms(), size))
        free_at[at] = clock.elapsed_ms() + bucket.take(size, clock.elapsed_ms())
    slack = rate * BURST_MS / 1000 + (connections + 1) * largest
    for first in range(0, len(used), 25):
        total = 0
        for moment, size in used[first:]:
            total += size
            passed_ms = moment - used[first][0]
            assert total <= rate * passed_ms / 1000 + slack, f"seed {seed}"


def test_a_busy_client_gets_all_of_its_rate() -> None:
    clock, rate = ManualClock(), 10_000
    bucket, sent = Bucket(rate, 0), 0
    while clock.elapsed_ms() < 100_000:
        clock.advance(bucket.take(700, clock.elapsed_ms()))
        sent += 700
    assert sent == pytest.approx(rate * 100, rel=0.02)


def test_nobody_is_told_to_wait_for_too_long_at_a_time() -> None:
    bucket = Bucket(1_000, 0)
    assert bucket.take(100_000_000, 0) == MAX_THROTTLE_MS
    # And the rest is not forgiven.
    assert bucket.take(0, MAX_THROTTLE_MS) == MAX_THROTTLE_MS


def test_idle_time_is_saved_up_for_a_second_only() -> None:
    bucket = Bucket(1_000, 0)
    assert bucket.take(1_000, 3_600_000) == 0
    assert bucket.take(1, 3_600_000) == 1


def test_a_clock_that_stands_still_gives_nothing() -> None:
    bucket = Bucket(1_000, 500)
    bucket.take(1_000, 500)
    assert bucket.take(10, 0) == 10


def test_clients_that_are_tracked_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotas, "MAX_TRACKED", 10)
    coordinator = QuotaCoordinator()
    set_quota(coordinator, entity_of(client_id=None), PRODUCED, 1_000)
    meters = Meters(coordinator)
    for at in range(1_000):
        # One of them is there all the time, and owes more and more.
        for client in (f"client-{at}", "busy"):
            bucket = meters.bucket(ME, client, PRODUCED, 0)
            assert bucket is not None
            bucket.take(100, 0)
    assert len(meters) == 10
    assert len(meters._limits) <= 10
    busy = meters.bucket(ME, "busy", PRODUCED, 0)
    assert busy is not None
    assert busy.left == 1_000 - 100 * 1_000
