"""What is answered about offsets, leader epochs, deleted records and producers of a partition."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from conformance.scenario import scenario
from penstock.wire.messages.describe_producers import DescribeProducersRequest, TopicRequest
from tests.broker.protocol_client import ProtocolClient, error_name, listed
from tests.broker.requests import (
    EARLIEST,
    LATEST,
    MAX_TIMESTAMP,
    batch,
    delete,
    delete_records,
    end_of_epoch,
    list_offsets,
    metadata,
    one,
    produce,
)


@scenario()
def offsets_by_time(client: ProtocolClient) -> Any:
    """The first offset at or after a time, the end, the start, and the largest timestamp."""
    topic = client.topic()
    client.fill(topic, *(batch(b"a", b"b", at_ms=at) for at in (1000, 2000, 5000, 3000)))
    times = (LATEST, EARLIEST, MAX_TIMESTAMP, 0, 1000, 1001, 2000, 4000, 5000, 5001)
    return [listed(client, topic, at) for at in times]


@scenario()
def offsets_of_an_empty_partition(client: ProtocolClient) -> Any:
    """It starts and ends at 0 and has no offset for any time."""
    topic = client.topic()
    return [listed(client, topic, at) for at in (LATEST, EARLIEST, MAX_TIMESTAMP, 0, -4, -5)]


@scenario()
def special_times_in_old_versions(client: ProtocolClient) -> Any:
    """Special timestamps are refused in versions older than they are."""
    topic = client.topic()
    client.fill(topic, batch(b"a", at_ms=1000))
    return [
        listed(client, topic, at, version)
        for at, version in (
            (-1, 1), (-2, 1), (-3, 6), (-3, 7), (-4, 7), (-4, 8), (-5, 8), (-5, 9), (-6, 10),
            (-7, 10), (-100, 10),
        )
    ]  # fmt: skip


@scenario()
def offsets_of_unknown_partitions(client: ProtocolClient) -> Any:
    """A topic or partition that does not exist is an error."""
    topic = client.topic()
    return [
        listed(client, "nowhere", LATEST),
        listed(client, topic, LATEST, partition=9),
        listed(client, topic, LATEST, partition=-1),
    ]


@scenario()
def leader_epochs_of_requests(client: ProtocolClient) -> Any:
    """A request that knows a newer leader epoch than the broker is refused."""
    topic = client.topic()
    now = client.leader_epoch(topic)
    return [
        [listed(client, topic, LATEST, leader_epoch=epoch) for epoch in (-1, now, now + 1)],
        [
            (error_name(part.error_code), part.end_offset)
            for epoch in (-1, now, now + 1)
            for part in [one(client.call(end_of_epoch(topic, now, current=epoch)))]
        ],
    ]


@scenario()
def leader_epochs_of_listed_offsets(client: ProtocolClient) -> Any:
    """An offset is listed with its leader epoch; no offset, no epoch."""
    topic = client.topic()
    now = client.leader_epoch(topic)
    empty = [one(client.call(list_offsets(topic, at))).leader_epoch == now for at in (-1, -2)]
    client.fill(topic, batch(b"a", at_ms=1000))
    full = [
        one(client.call(list_offsets(topic, at))).leader_epoch == now
        for at in (LATEST, EARLIEST, MAX_TIMESTAMP, 500)
    ]
    return empty, full, one(client.call(list_offsets(topic, 5000))).leader_epoch


@scenario()
def ends_of_epochs(client: ProtocolClient) -> Any:
    """The current epoch ends at the end of the log; unknown ones have no end."""
    topic = client.topic()
    now = client.leader_epoch(topic)
    answers: list[Any] = []
    for item in (None, batch(b"a", b"b")):
        if item is not None:
            client.fill(topic, item)
        for epoch in (now, now + 1, now + 100, -1):
            part = one(client.call(end_of_epoch(topic, epoch)))
            epoch_after = part.leader_epoch - now if part.leader_epoch >= 0 else None
            answers.append((error_name(part.error_code), epoch_after, part.end_offset))
    answers.append(error_name(one(client.call(end_of_epoch("nowhere", 0))).error_code))
    return answers


@scenario()
def deleting_records(client: ProtocolClient) -> Any:
    """The log start moves forward only, up to the high watermark."""
    topic = client.topic()
    client.fill(topic, *(batch(b"a", b"b") for _ in range(5)))
    answers = []
    for before in (3, 1, 3, 11, -2, 10, -1):
        part = one(client.call(delete_records(topic, before)))
        answers.append((error_name(part.error_code), part.low_watermark))
        answers.append(listed(client, topic, EARLIEST))
    for name, number in (("nowhere", 0), (topic, 5)):
        part = one(client.call(delete_records(name, 0, partition=number)))
        answers.append((error_name(part.error_code), part.low_watermark))
    return answers, client.produced(produce(topic, batch(b"next")))


@scenario()
def deleting_records_of_a_compacted_topic(client: ProtocolClient) -> Any:
    """Refused by policy, unless the topic also deletes."""
    answers = []
    for policy in ("compact", "compact,delete"):
        topic = client.topic(cleanup_policy=policy)
        client.fill(topic, batch(b"a", key=b"k"))
        part = one(client.call(delete_records(topic, -1)))
        answers.append((error_name(part.error_code), part.low_watermark))
    return answers


@scenario()
def offsets_after_deleting_records(client: ProtocolClient) -> Any:
    """No look-up by time finds a deleted record."""
    topic = client.topic()
    client.fill(topic, *(batch(b"a", b"b", at_ms=at) for at in (1000, 2000, 3000)))
    client.call(delete_records(topic, 3))
    return [listed(client, topic, at) for at in (LATEST, EARLIEST, MAX_TIMESTAMP, 500, 1500, 2500)]


@scenario()
def producers_of_a_partition(client: ProtocolClient) -> Any:
    """Active producers are described with epoch, last sequence and last timestamp."""
    topic, pid = client.topic(), client.producer_id()
    client.fill(topic, batch(b"a", b"b", b"c", at_ms=77, producer=(pid, 0, 0)))

    def describe(name: str, number: int) -> Any:
        request = DescribeProducersRequest(
            topics=[TopicRequest(name=name, partition_indexes=[number])]
        )
        part = one(client.call(request))
        return error_name(part.error_code), [
            (p.producer_id == pid, p.producer_epoch, p.last_sequence, p.last_timestamp,
             p.current_txn_start_offset, p.coordinator_epoch)
            for p in part.active_producers
        ]  # fmt: skip

    return describe(topic, 0), describe(topic, 5), describe("nowhere", 0)


@scenario()
def a_recreated_topic_has_another_id(client: ProtocolClient) -> Any:
    """The old id is unknown, and the new topic is empty."""
    topic = client.topic()
    old: UUID = client.ids[topic]
    client.fill(topic, batch(b"old"))
    client.call(delete(topic))
    client.recreate_topic(topic)
    new = client.call(metadata(topic)).topics[0].topic_id
    return (
        old != new,
        error_name(client.call(metadata(old)).topics[0].error_code),
        client.produced(produce(old, batch()), 13)[0],
        client.produced(produce(new, batch()), 13),
        listed(client, topic, LATEST)[1],
    )
