"""Frames by the thousand that no decent client sends, while a decent client is served.

Each of them ends in an answer or a closed connection. No exception escapes, nothing is left of
them in the broker, memory does not grow, and the decent client notices nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.broker.config import Limits
from penstock.testing.broker import Broker
from tests.broker import requests as rq
from tests.broker.raw import RawClient
from tests.broker.robustness.fuzzer import FuzzProcess, Work
from tests.broker.robustness.watch import (
    Witness,
    eventually,
    memory_bytes,
    no_errors,
    quick_broker,
    wait_for_quiet,
)
from tests.harness.profiles import FUZZ_FRAMES, FUZZ_STREAMS

GROWTH_MAX_BYTES = 64 << 20
TOPICS = (
    rq.create("fuzz", 3, segment_bytes="100000"),
    rq.create("fuzz-compacted", 1, cleanup_policy="compact"),
    rq.create("fuzz-stamped", 1, message_timestamp_type="LogAppendTime", durability="disk"),
    rq.create("fuzz-memory", 2, durability="memory", retention_bytes="1000000"),
)


@pytest.fixture
def broker() -> Iterator[Broker]:
    limits = Limits(max_topics=40, max_partitions=300, max_fetch_sessions=50)
    with quick_broker(limits=limits, housekeeping_interval_ms=200) as broker:
        yield broker


def fuzz_work(broker: Broker, seed: int, frames: int, streams: int) -> Work:
    """What to do to a broker; its topics are made for it."""
    with RawClient(broker.bootstrap) as client:
        for request in TOPICS:
            (made,) = client.call(request).topics
            assert not made.error_code, made
    topics = broker.call(lambda server: {t.name: str(t.id) for t in server.catalog.topics.values()})
    topics.pop("witness", None)
    host, port = broker.bootstrap.split(":")
    return Work(host, int(port), seed, topics, int(time.time() * 1000), frames, streams)


def check_outcomes(outcomes: Counter[str], wanted: int) -> None:
    assert set(outcomes) <= {"answered", "closed", "waiting"}, outcomes
    assert outcomes["waiting"] < wanted // 100, outcomes
    assert outcomes["answered"] > wanted // 10, outcomes
    assert outcomes["closed"] > wanted // 10, outcomes
    assert outcomes.total() >= wanted, outcomes


@pytest.mark.timeout(300)
@pytest.mark.processes
def test_no_frame_disturbs_the_broker_or_another_client(broker: Broker, seed: int) -> None:
    with Witness(broker) as witness, no_errors(broker):
        work = fuzz_work(broker, seed, 2_000, 500)
        # What is loaded and cached on first use is not growth.
        check_outcomes(FuzzProcess(work).outcomes(), 2_500)
        before = memory_bytes()
        outcomes = FuzzProcess(replace(work, frames=FUZZ_FRAMES, streams=FUZZ_STREAMS)).outcomes()
        grown = memory_bytes() - before
        eventually(lambda: witness.rounds > 50, "the witness goes on")
    print(f"{outcomes}, {witness.rounds} rounds of the witness, {grown >> 20} MiB more memory")
    check_outcomes(outcomes, FUZZ_FRAMES + FUZZ_STREAMS)
    wait_for_quiet(broker)
    assert grown < GROWTH_MAX_BYTES
    assert broker.call(lambda server: len(server.fetch_sessions)) <= 50
