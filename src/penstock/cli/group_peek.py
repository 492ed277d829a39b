"""The times of records at given places: of the first records that a group has not read.

One batch of each partition is enough, and asking for more is slow: a consumer that is assigned to
all of them first fetches far into a few. So the leaders are asked by single Fetch requests, for
many partitions at once and few bytes of each. Of the first partition that has records a broker
gives a whole batch, whatever its size; of the others only what fits. Each answer thus settles at
least one, and what is left is asked for again.

Where leaders cannot be asked directly (Kerberos, tokens), librdkafka reads the partitions one after
another.

What is found is a time in ms (negative: the record has none), or None where no record is left,
only markers of transactions. What is not there could not be found out.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from uuid import UUID

from penstock.cli.kafka import Connection, translated
from penstock.cli.protocol import cluster, reachable
from penstock.client.connection import Address, ClientError
from penstock.client.connection import Connection as Leader
from penstock.errors import CorruptBatchError
from penstock.records.batch import MAGIC, Buffer, headers
from penstock.records.record import decode

if TYPE_CHECKING:
    from confluent_kafka import Consumer

    from penstock.client.connection import Cluster

Place = tuple[str, int]
Times = dict[Place, int | None]

# Partitions in one request, the bytes asked for of each, and of all.
_AT_ONCE: Final = 50
_EACH_BYTES: Final = 64 << 10
_MAX_BYTES: Final = 8 << 20
# What lies in slower storage may need a moment.
_WAIT_MS: Final = 500
_POLL_S: Final = 0.1
# So that one partition that does not answer leaves time for the others.
_ONE_S: Final = 2.0


class Unread(NamedTuple):
    """The first offset that has not been read, and the end of the log."""

    front: int
    end: int


# ---- by asking the leaders ---------------------------------------------------------------


def ask_leaders(
    connection: Connection, unread: Mapping[Place, Unread], deadline_s: float
) -> tuple[Times, list[Place]]:
    """The times, and the places for which somebody else has to look."""
    times: Times = {}
    left = list(unread)
    if not reachable(connection.settings):
        return times, left
    with suppress(ClientError), cluster(connection.bootstrap, connection.settings) as brokers:
        by_leader, ids = _leaders(brokers, {topic for topic, _ in unread})
        for address, places in by_leader.items():
            wanted = {place: unread[place] for place in places if place in unread}
            asked: set[Place] = set()
            with suppress(ClientError, CorruptBatchError):
                for place, time_ms in _ask(brokers.at(address), ids, wanted, deadline_s):
                    times[place] = time_ms
                asked = set(wanted)
            left = [place for place in left if place not in asked and place not in times]
    return times, left


def _leaders(
    brokers: Cluster, topics: set[str]
) -> tuple[dict[Address, list[Place]], dict[str, UUID]]:
    """Where the leaders are, of which partitions, and the topics' ids."""
    from penstock.wire.messages.metadata import MetadataRequest, MetadataRequestTopic

    request = MetadataRequest(
        topics=[MetadataRequestTopic(name=topic) for topic in sorted(topics)],
        allow_auto_topic_creation=False,
    )
    told = brokers.any().call(request, at_least=4)
    addresses = {broker.node_id: (broker.host, broker.port) for broker in told.brokers}
    by_leader: dict[Address, list[Place]] = {}
    for topic in told.topics:
        for part in topic.partitions:
            if part.leader_id in addresses:
                places = by_leader.setdefault(addresses[part.leader_id], [])
                places.append((topic.name, part.partition_index))
    return by_leader, {topic.name: topic.topic_id for topic in told.topics}


def _ask(
    leader: Leader, ids: Mapping[str, UUID], unread: Mapping[Place, Unread], deadline_s: float
) -> Iterator[tuple[Place, int | None]]:
    """Ask one leader until nothing is left, nothing comes, or the time is over."""
    names = {id_: name for name, id_ in ids.items()}
    waiting = dict(unread)
    while waiting and time.monotonic() < deadline_s:
        asked = dict(islice(waiting.items(), _AT_ONCE))
        answer = leader.call(_request(asked, ids))
        moved = False
        for topic in answer.responses:
            for part in topic.partitions:
                place = (topic.topic or names.get(topic.topic_id, ""), part.partition_index)
                if place not in asked:
                    continue
                front, end = asked[place]
                time_ms, next_offset = first_time(part.records or b"", front)
                moved = moved or next_offset > front or bool(part.error_code)
                waiting[place] = Unread(next_offset, end)
                if time_ms is not None or next_offset >= end:
                    yield place, time_ms
                if time_ms is not None or next_offset >= end or part.error_code:
                    del waiting[place]
        if not moved:
            for place in asked:
                del waiting[place]


def _request(unread: Mapping[Place, Unread], ids: Mapping[str, UUID]) -> Any:
    from penstock.wire.messages.fetch import FetchPartition, FetchRequest, FetchTopic

    topics: dict[str, FetchTopic] = {}
    for (name, number), (front, _) in unread.items():
        topic = topics.setdefault(name, FetchTopic(topic=name, topic_id=ids[name]))
        topic.partitions.append(
            FetchPartition(partition=number, fetch_offset=front, partition_max_bytes=_EACH_BYTES)
        )
    return FetchRequest(
        max_wait_ms=_WAIT_MS, min_bytes=1, max_bytes=_MAX_BYTES, topics=list(topics.values())
    )


def first_time(records: Buffer, front: int) -> tuple[int | None, int]:
    """The time of the first record from `front` on; and, if there is none, where to look next.

    CorruptBatchError for what is no batch of today's format.
    """
    next_offset = front
    for at, header in headers(records):
        if header.magic != MAGIC:
            raise CorruptBatchError(f"magic byte {header.magic}, expected {MAGIC}")
        if header.next_offset <= front:
            continue
        next_offset = header.next_offset
        if header.is_control:
            continue
        for record in decode(memoryview(records)[at : at + header.size]):
            if record.offset >= front:
                return record.timestamp_ms, next_offset
    return None, next_offset


# ---- by librdkafka -----------------------------------------------------------------------


def read_singly(consumer: Consumer, unread: Mapping[Place, Unread], deadline_s: float) -> Times:
    """The times, read by a consumer from one partition after another."""
    from confluent_kafka import KafkaError, TopicPartition

    times: Times = {}
    with translated("reading the first unread records"):
        try:
            for place, (front, _) in unread.items():
                until_s = min(deadline_s, time.monotonic() + _ONE_S)
                consumer.assign([TopicPartition(*place, front)])
                while time.monotonic() < until_s:
                    message = consumer.poll(_POLL_S)
                    if message is None or (message.topic(), message.partition()) != place:
                        continue
                    error = message.error()
                    if error is None:
                        times[place] = message.timestamp()[1]
                    elif error.code() == KafkaError._PARTITION_EOF:
                        times[place] = None
                    elif error.retriable():
                        continue
                    break
        finally:
            consumer.unassign()
    return times
