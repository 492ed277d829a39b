"""The internal topics of Kafka Streams applications, made when a streams group misses them.

A heartbeat is answered without waiting for them: the members are told that topics are missing, and
get their tasks with one of the next heartbeats. A topic that cannot be made is not tried again for
a while, and members are told why.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from penstock.broker.catalog import ApiError
from penstock.broker.groups.streams.topology import InternalTopic
from penstock.errors import LogError
from penstock.wire.errors import ErrorCode

if TYPE_CHECKING:
    from penstock.broker.server import Broker

log = logging.getLogger(__name__)

# Of one topic and of all together; the oldest make room.
_MAX_REASON_LENGTH: Final = 1_000
_MAX_FAILURES: Final = 1_000


class InternalTopics:
    """Internal topics that are being made, and those that could not be."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._making: set[str] = set()
        # Why a topic could not be made, and until when it is not tried again.
        self._failures: dict[str, tuple[str, int]] = {}

    def make(self, topics: Iterable[InternalTopic], pause_ms: int) -> None:
        """Begin to make topics, unless they are being made, or could not be just now."""
        wanted = [topic for topic in topics if topic.name not in self._making]
        wanted = [topic for topic in wanted if self.failure(topic.name) is None]
        if not wanted:
            return
        self._making |= {topic.name for topic in wanted}
        self._broker.spawn(self._make(wanted, pause_ms))

    def failure(self, name: str) -> str | None:
        """Why a topic could not be made just now."""
        reason, until_ms = self._failures.get(name, ("", 0))
        if until_ms > self._broker.clock.elapsed_ms():
            return reason
        self._failures.pop(name, None)
        return None

    async def _make(self, topics: list[InternalTopic], pause_ms: int) -> None:
        try:
            for topic in topics:
                await self._make_one(topic, pause_ms)
        finally:
            self._making -= {topic.name for topic in topics}

    async def _make_one(self, topic: InternalTopic, pause_ms: int) -> None:
        try:
            if topic.replication_factor not in (-1, 0, 1):
                raise ApiError(
                    ErrorCode.INVALID_REPLICATION_FACTOR,
                    f"replication factor {topic.replication_factor}: there is one broker, so 1 at "
                    "most",
                )
            await self._broker.topics.create(topic.name, topic.partitions, dict(topic.settings))
        except (ApiError, LogError) as error:
            if isinstance(error, ApiError) and error.code == ErrorCode.TOPIC_ALREADY_EXISTS:
                # A client was quicker; whether it fits is looked at with the next heartbeat.
                return
            log.warning("internal topic %s cannot be made: %s", topic.name, error)
            while len(self._failures) >= _MAX_FAILURES:
                del self._failures[next(iter(self._failures))]
            until_ms = self._broker.clock.elapsed_ms() + pause_ms
            self._failures[topic.name] = (str(error)[:_MAX_REASON_LENGTH], until_ms)
