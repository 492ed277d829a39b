"""A client of the raw protocol for one broker of any kind: what protocol scenarios are given.

`ProtocolClient` sends requests exactly as they are written and returns what is answered. It makes
topics and waits until they are served, and knows their ids and epochs. Names of topics are new
each time, so that one broker serves all scenarios. Touches its connections and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any, Final
from uuid import UUID

from penstock.wire import Message
from penstock.wire.errors import ErrorCode
from tests.broker.raw import ConnectionEndedError, RawClient
from tests.broker.requests import (
    create,
    fetch,
    list_offsets,
    metadata,
    new_name,
    new_producer,
    one,
    produce,
)

READY_TIMEOUT_S: Final = 60.0
BY_NAME_VERSION: Final = 12


def error_name(code: int) -> str:
    return ErrorCode(code).name


class ProtocolClient:
    """One connection to a broker, and the topics that were made through it."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.connection = RawClient(bootstrap)
        self.ids: dict[str, UUID] = {}

    def close(self) -> None:
        self.connection.close()

    def call(self, request: Message, version: int | None = None) -> Any:
        return self.connection.call(request, version)

    # ---- topics ----------------------------------------------------------------------------

    def topic(self, partitions: int = 1, **configs: str) -> str:
        """A new topic that is served; settings are keywords with `_` for `.`."""
        name = new_name()
        self.create_topic(name, partitions, **configs)
        return name

    def create_topic(self, name: str, partitions: int = 1, **configs: str) -> None:
        """Create a topic with as many replicas as the broker likes, and wait until it is served."""
        self._created(name, self.call(create(name, partitions, -1, configs=configs)), partitions)

    def recreate_topic(self, name: str, partitions: int = 1) -> None:
        """Create a topic whose namesake was just deleted: Kafka may need a moment to remove it."""
        deadline = monotonic() + READY_TIMEOUT_S
        while True:
            answer = self.call(create(name, partitions, -1))
            is_taken = answer.topics[0].error_code == ErrorCode.TOPIC_ALREADY_EXISTS
            if not is_taken or monotonic() > deadline:
                return self._created(name, answer, partitions)

    def _created(self, name: str, answer: Any, partitions: int) -> None:
        result = answer.topics[0]
        assert not result.error_code, (error_name(result.error_code), result.error_message)
        self.ids[name] = result.topic_id
        self.wait_served(name, partitions)

    def wait_served(self, name: str, partitions: int = 1) -> None:
        """Kafka answers before its broker knows a new topic, and before the leaders serve it."""
        deadline = monotonic() + READY_TIMEOUT_S
        while not self._is_served(name, partitions):
            assert monotonic() < deadline, f"topic {name} is not served"

    def _is_served(self, name: str, partitions: int) -> bool:
        """Whether all partitions have leaders, and those that this broker leads can be read."""
        answer = self.call(metadata(name))
        (topic,) = answer.topics
        leaders = {part.partition_index: part.leader_id for part in topic.partitions}
        if topic.error_code or len(leaders) != partitions or min(leaders.values()) < 0:
            return False
        (node,) = (b.node_id for b in answer.brokers if f"{b.host}:{b.port}" == self.bootstrap)
        led_here = {number: 0 for number, leader in leaders.items() if leader == node}
        fetched = self.call(fetch(name, led_here), BY_NAME_VERSION).responses
        return not any(part.error_code for topic in fetched for part in topic.partitions)

    def leader_epoch(self, name: str) -> int:
        return int(self.call(metadata(name)).topics[0].partitions[0].leader_epoch)

    # ---- records ---------------------------------------------------------------------------

    def produced(self, request: Message, version: int = BY_NAME_VERSION) -> tuple[str, int]:
        """What a produce of one batch is answered: the error's name and the base offset."""
        result = one(self.call(request, version))
        return error_name(result.error_code), result.base_offset

    def fill(self, topic: str, *batches: bytes) -> None:
        """Write batches, and wait until they can be read."""
        self.fill_partition(topic, 0, *batches)

    def fill_partition(self, topic: str, number: int, *batches: bytes) -> None:
        end = 0
        for item in batches:
            error, end = self.produced(produce(topic, {number: item}))
            assert error == "NONE", error
        # Kafka raises its high watermark a moment after it has answered.
        self.call(fetch(topic, {number: end}, max_wait_ms=10_000), BY_NAME_VERSION)

    def producer_id(self) -> int:
        deadline = monotonic() + READY_TIMEOUT_S
        # Kafka asks its controller for the first ones, and says so in the meantime.
        while (answer := self.call(new_producer())).error_code:
            assert monotonic() < deadline, error_name(answer.error_code)
        return int(answer.producer_id)

    # ---- other connections -----------------------------------------------------------------

    def outcome_of(self, send: Callable[[RawClient], Any]) -> Any:
        """What comes of something done on a connection of its own; `closed` if it is cut."""
        with RawClient(self.bootstrap) as connection:
            try:
                return send(connection)
            except (ConnectionEndedError, BrokenPipeError):
                return "closed"


def listed(
    client: ProtocolClient, topic: str, at: int, version: int | None = None, **kw: int
) -> Any:
    """What is answered to a look-up by time: the error's name, the offset, its timestamp."""
    part = one(client.call(list_offsets(topic, at, **kw), version))
    return error_name(part.error_code), part.offset, part.timestamp
