"""Many clients that do everything at once to the same few topics: each gets a sensible answer.

Topics are made, grown, altered, emptied and deleted while others write, read and wait. No answer
may be an unknown error, no connection may be closed, and nobody may be left without an answer.
"""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from penstock.testing.broker import Broker
from penstock.wire import Message
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsTopic,
)
from penstock.wire.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
)
from penstock.wire.messages.describe_log_dirs import DescribeLogDirsRequest
from penstock.wire.messages.describe_topic_partitions import DescribeTopicPartitionsRequest
from penstock.wire.messages.metadata import MetadataRequest
from tests.broker import requests as rq
from tests.broker.raw import RawClient
from tests.broker.robustness.watch import no_errors, quick_broker, wait_for_quiet
from tests.harness.profiles import CHAOS_STEPS

CLIENTS = 6
NAMES = ("a", "b", "c")
SETTINGS = (
    ("durability", "disk"), ("durability", "os"), ("retention.bytes", "5000"),
    ("retention.ms", "1"), ("segment.bytes", "2000"), ("cleanup.policy", "compact"),
    ("cleanup.policy", "delete"), ("max.message.bytes", "1000"), ("retention.ms", "-1"),
    ("message.timestamp.type", "LogAppendTime"),
)  # fmt: skip
EXPECTED = {
    ErrorCode.NONE, ErrorCode.OFFSET_OUT_OF_RANGE, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
    ErrorCode.UNKNOWN_TOPIC_ID, ErrorCode.TOPIC_ALREADY_EXISTS, ErrorCode.INVALID_PARTITIONS,
    ErrorCode.POLICY_VIOLATION, ErrorCode.MESSAGE_TOO_LARGE, ErrorCode.INVALID_RECORD,
    # To those who wait for a write to a topic that is deleted meanwhile.
    ErrorCode.KAFKA_STORAGE_ERROR,
    ErrorCode.FENCED_LEADER_EPOCH,
}  # fmt: skip


def codes_in(value: Any) -> Counter[int]:
    """Every error code anywhere in a response."""
    found: Counter[int] = Counter()
    for name in getattr(value, "__slots__", ()):
        item = getattr(value, name)
        if name == "error_code":
            found[int(item)] += 1
        elif isinstance(item, list):
            for inner in item:
                found += codes_in(inner)
    return found


class Client:
    """One of the many."""

    def __init__(self, broker: Broker, seed: object) -> None:
        self.rng = random.Random(repr(seed))
        self.bootstrap = broker.bootstrap
        self.codes: Counter[int] = Counter()
        self.failure: BaseException | None = None
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        try:
            with RawClient(self.bootstrap) as client:
                for _ in range(CHAOS_STEPS):
                    # Now and then several at once.
                    asked = [self._request() for _ in range(self.rng.choice((1, 1, 1, 5)))]
                    client.send_all(*asked)
                    for _ in asked:
                        self.codes += codes_in(client.receive())
        except BaseException as error:
            self.failure = error

    def _request(self) -> tuple[Message, int]:
        rng, name = self.rng, self.rng.choice(NAMES)
        partition, acks, moment = (
            rng.randint(0, 2),
            rng.choice((-1, 1)),
            rng.choice((-1, -2, -3, 0)),
        )
        batch = rq.batch(*[rng.randbytes(rng.randint(1, 300)) for _ in range(3)], key=b"k")
        makers: list[tuple[int, Callable[[], tuple[Message, int]]]] = [
            (8, lambda: (rq.produce(name, batch, partition=partition, acks=acks), 9)),
            (4, lambda: (rq.fetch(name, {partition: rng.randint(0, 20)}, max_wait_ms=5), 11)),
            (2, lambda: (rq.create(name, rng.randint(1, 3), segment_bytes="1500"), 7)),
            (2, lambda: (rq.delete(name), 6)),
            (1, lambda: (rq.delete_records(name, rng.randint(-1, 10), partition=partition), 2)),
            (2, lambda: (rq.alter(name, (0, *rng.choice(SETTINGS))), 1)),
            (1, lambda: (rq.alter(name, (1, rng.choice(SETTINGS)[0], None)), 1)),
            (1, lambda: (rq.list_offsets(name, moment, partition=partition), 7)),
            (1, lambda: (rq.metadata(name, create_missing=rng.random() < 0.2), 12)),
            (1, lambda: (MetadataRequest(topics=None), 9)),
            (1, lambda: (grow(name, rng.randint(1, 4)), 3)),
            (1, lambda: (describe(name), 4)),
            (1, lambda: (DescribeLogDirsRequest(topics=None), 4)),
            (1, lambda: (DescribeTopicPartitionsRequest(topics=[]), 0)),
            (1, lambda: (rq.new_producer(), 4)),
        ]  # fmt: skip
        weights, functions = zip(*makers, strict=True)
        (make,) = rng.choices(functions, weights)
        made: tuple[Message, int] = make()
        return made


def grow(name: str, count: int) -> Message:
    topic = CreatePartitionsTopic(name=name, count=count, assignments=None)
    return CreatePartitionsRequest(topics=[topic], timeout_ms=30_000)


def describe(name: str) -> Message:
    resource = DescribeConfigsResource(resource_type=2, resource_name=name)
    return DescribeConfigsRequest(resources=[resource], include_synonyms=True)


@pytest.mark.parametrize("durability", ["disk", "memory"])
@pytest.mark.processes
def test_everyone_gets_a_sensible_answer(durability: str, seed: int) -> None:
    settings = {"durability": durability, "housekeeping_interval_ms": 10}
    with quick_broker(**settings) as broker, no_errors(broker):
        clients = [Client(broker, (seed, number)) for number in range(CLIENTS)]
        for client in clients:
            client.thread.start()
        for client in clients:
            client.thread.join()
        codes: Counter[int] = Counter()
        for client in clients:
            if client.failure is not None:
                raise client.failure
            codes += client.codes
        print({ErrorCode(code).name: count for code, count in codes.items()})
        allowed = EXPECTED | {ErrorCode.INVALID_CONFIG} if durability == "memory" else EXPECTED
        assert set(codes) <= {int(code) for code in allowed}
        assert codes[0] > sum(codes.values()) // 4
        wait_for_quiet(broker)
