"""Groups that are ordered by key: no record overtakes an older one of its key."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest

from penstock.broker.shares.keys import WINDOW
from penstock.records import compression
from penstock.records.record import BatchOptions, Record, encode
from penstock.testing.broker import Broker
from tests.broker.requests import now_ms
from tests.broker.shares.members import (
    ACCEPT,
    REJECT,
    RELEASE,
    Taker,
    fill,
    new_queue,
    numbered,
    send_batch,
    set_group,
)


def keyed(*keys: str | None, first: int = 0, codec: int = compression.NONE) -> bytes:
    """A batch with a record for each of the keys; the value is its offset."""
    records = [
        Record(at, now_ms(), None if key is None else key.encode(), b"%d" % (first + at))
        for at, key in enumerate(keys)
    ]
    return encode(records, BatchOptions(codec=codec))


def test_one_record_of_a_key_at_a_time(shared: Broker) -> None:
    topic, group = new_queue(shared, share_ordered_by_key="true")
    send_batch(shared, topic, keyed("a", "b", "a", "c", None, "b", None))
    send_batch(shared, topic, keyed("a", "d", first=7))
    with Taker(shared, group, topic) as one, Taker(shared, group, topic) as other:
        got = one.fetch()
        assert got.offsets == [0, 1, 3, 4, 6, 8]
        assert other.fetch().offsets == []
        one.acknowledge((0, 0, ACCEPT))
        assert other.fetch().offsets == [2]
        one.acknowledge((1, 1, ACCEPT))
        # Freed by one, delivered to another; the third of `a` waits for the second.
        assert other.fetch([(2, 2, ACCEPT)]).offsets == [5, 7]


def test_a_record_that_comes_back_goes_before_those_behind_it(shared: Broker) -> None:
    topic, group = new_queue(shared, share_ordered_by_key="true")
    send_batch(shared, topic, keyed("a", "a", "a"))
    with Taker(shared, group, topic) as one, Taker(shared, group, topic) as other:
        assert one.fetch().acquired == [(0, 0, 1)]
        one.acknowledge((0, 0, RELEASE))
        assert other.fetch().acquired == [(0, 0, 2)]
        other.client.close()
        assert one.fetch(wait_ms=10_000).acquired == [(0, 0, 3)]
        one.acknowledge((0, 0, REJECT))
        assert one.fetch().acquired == [(1, 1, 1)]


def test_a_fetch_that_waits_is_woken_by_a_freed_key(shared: Broker) -> None:
    topic, group = new_queue(shared, share_ordered_by_key="true")
    send_batch(shared, topic, keyed("a", "a"))
    with Taker(shared, group, topic) as one, Taker(shared, group, topic) as other:
        one.fetch()
        other.fetch()
        other.send(wait_ms=20_000)
        one.acknowledge((0, 0, ACCEPT))
        assert other.receive().offsets == [1]


@pytest.mark.parametrize("how", ["restart", "crash"])
def test_the_order_survives_a_restart(broker: Broker, how: str) -> None:
    topic, group = new_queue(broker, share_ordered_by_key="true")
    send_batch(broker, topic, keyed("a", "b", "a", "b", "c", codec=compression.GZIP))
    send_batch(broker, topic, keyed("a", "c", first=5))
    with Taker(broker, group, topic) as one:
        assert one.fetch().offsets == [0, 1, 4]
        one.acknowledge((1, 1, ACCEPT))
    broker.crash() if how == "crash" else broker.stop()
    broker.start()
    with Taker(broker, group, topic) as one:
        assert one.fetch().offsets == [0, 3, 4]
        assert one.fetch([(0, 0, ACCEPT)]).offsets == [2]


def test_a_group_can_become_ordered_while_it_reads(shared: Broker) -> None:
    topic, group = new_queue(shared)
    send_batch(shared, topic, keyed("a", "b", "a", "b"))
    send_batch(shared, topic, keyed("a", "a", "b", first=4))
    with Taker(shared, group, topic) as one:
        assert one.fetch(max_records=1).offsets == [0, 1, 2, 3]
        set_group(shared, group, share_ordered_by_key="true")
        assert one.fetch().offsets == []
        assert one.fetch([(0, 3, ACCEPT)]).offsets == [4, 6]
        set_group(shared, group, share_ordered_by_key="false")
        assert one.fetch().offsets == [5]


def test_a_key_far_behind_does_not_stop_the_others_before_the_window(shared: Broker) -> None:
    topic, group = new_queue(
        shared, share_ordered_by_key="true", share_partition_max_record_locks="1000"
    )
    for first in range(0, WINDOW // 2, 1000):
        send_batch(shared, topic, keyed(*["hot"] * 1000, first=first))
    send_batch(shared, topic, keyed("x", "y", first=WINDOW // 2))
    with Taker(shared, group, topic) as one:
        assert one.fetch().offsets == [0]
        seen: list[int] = []
        while len(seen) < 2:
            seen += one.fetch().offsets
        assert seen == [WINDOW // 2, WINDOW // 2 + 1]


def test_keys_in_order_under_load(shared: Broker, seed: int) -> None:
    """Several consumers, answers of all kinds: each key's records finish in their order."""
    rng = random.Random(seed)
    topic, group = new_queue(
        shared,
        share_ordered_by_key="true",
        share_delivery_count_limit="1000",
        share_partition_max_record_locks="50",
    )
    keys: list[str | None] = []
    while len(keys) < 600:
        some = [rng.choice(["a", "b", "c", "d", "e", "f", "g", None]) for _ in range(30)]
        codec = rng.choice([compression.NONE, compression.GZIP])
        send_batch(shared, topic, keyed(*some, first=len(keys), codec=codec))
        keys += some
    takers = [Taker(shared, group, topic) for _ in range(5)]
    hands: list[set[int]] = [set() for _ in takers]
    finished: dict[str | None, list[int]] = defaultdict(list)
    count = 0
    while count < len(keys):
        at = rng.randrange(len(takers))
        taker, hand = takers[at], hands[at]
        answers = []
        for offset in sorted(hand):
            kind = rng.choice([ACCEPT, ACCEPT, ACCEPT, RELEASE, None])
            if kind is not None:
                answers.append((offset, offset, kind))
                hand.discard(offset)
                if kind == ACCEPT:
                    finished[keys[offset]].append(offset)
                    count += 1
        got = taker.fetch(answers, max_records=rng.randrange(1, 40), strict=rng.random() < 0.5)
        assert got.acknowledge_error == "NONE"
        in_flight = {keys[o] for one in hands for o in one if keys[o] is not None}
        for offset, record in zip(got.offsets, got.records, strict=True):
            assert record.value == b"%d" % offset
            key = keys[offset]
            if key is not None:
                assert key not in in_flight, f"{key} is in two hands"
                in_flight.add(key)
        hand |= set(got.offsets)
    for key, order in finished.items():
        assert len(order) == keys.count(key)
        assert key is None or order == sorted(order)
    for taker in takers:
        taker.client.close()


def test_records_without_keys_go_in_batches(shared: Broker) -> None:
    topic, group = new_queue(shared, share_ordered_by_key="true")
    fill(shared, topic, *numbered(100))
    with Taker(shared, group, topic) as one:
        assert one.fetch().acquired == [(0, 99, 1)]
