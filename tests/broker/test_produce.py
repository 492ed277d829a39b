"""Produce beyond what Apache Kafka is asked too: stricter checks, and ids that never come again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

from penstock.broker.catalog import PRODUCER_ID_BLOCK
from penstock.records.batch import read_header
from penstock.testing.broker import Broker
from penstock.wire.errors import ErrorCode
from tests.broker.disks import GatedDisk
from tests.broker.raw import RawClient
from tests.broker.requests import (
    MIB,
    batch,
    batch_of_size,
    create,
    delete,
    fetch,
    metadata,
    new_name,
    new_producer,
    one,
    produce,
    resealed,
    values_of,
)

Connect = Callable[[Broker], RawClient]


def written(client: RawClient, topic: str, records: bytes) -> tuple[ErrorCode, int]:
    part = one(client.call(produce(topic, records), 12))
    return ErrorCode(part.error_code), part.base_offset


ODD = {
    # Kafka drops what follows a batch without a word.
    "bytes behind": (batch(b"a") + b"junk", ErrorCode.INVALID_RECORD),
    # Kafka answers with an unknown error.
    "codec 5": (resealed(batch(b"a"), attributes=5), ErrorCode.INVALID_RECORD),
    "codec 7": (resealed(batch(b"a"), attributes=7), ErrorCode.INVALID_RECORD),
    "negative count": (resealed(batch(b"a"), record_count=-1), ErrorCode.INVALID_RECORD),
    "no records": (
        resealed(batch(b"a"), record_count=0, last_offset_delta=-1),
        ErrorCode.INVALID_RECORD,
    ),
    "short length": (resealed(batch(b"a"), batch_length=10), ErrorCode.CORRUPT_MESSAGE),
    "negative length": (resealed(batch(b"a"), batch_length=-1), ErrorCode.CORRUPT_MESSAGE),
    "transactional": (resealed(batch(b"a"), attributes=0x10), ErrorCode.INVALID_RECORD),
    "zeros": (bytes(61), ErrorCode.INVALID_RECORD),
    "ones": (b"\xff" * 200, ErrorCode.CORRUPT_MESSAGE),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_batches_are_refused(client: RawClient, topic: str, name: str) -> None:
    records, code = ODD[name]
    assert written(client, topic, records) == (code, -1)
    assert written(client, topic, batch(b"good")) == (ErrorCode.NONE, 0)


def test_what_the_producer_says_of_offset_and_epoch_does_not_matter(
    client: RawClient, topic: str
) -> None:
    """Kafka 4.3 takes such a batch, and loses it, if the epoch is above its own."""
    written(client, topic, batch(b"first"))
    odd = resealed(batch(b"second"), base_offset=77, leader_epoch=12345)
    assert written(client, topic, odd) == (ErrorCode.NONE, 1)
    header = read_header(one(client.call(fetch(topic, 1), 12)).records)
    epoch = client.call(metadata(topic)).topics[0].partitions[0].leader_epoch
    assert (header.base_offset, header.leader_epoch) == (1, epoch)


def test_only_offset_and_epoch_of_a_batch_are_written_by_the_broker(
    shared: Broker, client: RawClient, topic: str
) -> None:
    sent = batch(b"x" * 1000, key=b"k", codec=4)
    written(client, topic, sent)
    stored = Path(shared.data, f"{topic}-0", f"{0:020d}.log").read_bytes()
    assert stored[16:] == sent[16:]
    assert stored[8:12] == sent[8:12]


def test_the_largest_batches_by_default(client: RawClient, topic: str) -> None:
    limit = MIB + 12
    assert written(client, topic, batch_of_size(limit)) == (ErrorCode.NONE, 0)
    assert written(client, topic, batch_of_size(limit + 1))[0] == ErrorCode.MESSAGE_TOO_LARGE


def test_a_request_with_the_same_partition_twice(client: RawClient, topic: str) -> None:
    request = produce(topic, batch(b"a"))
    request.topic_data.append(produce(topic, batch(b"b")).topic_data[0])
    answer = client.call(request, 12)
    assert [t.partition_responses[0].base_offset for t in answer.responses] == [0, 1]
    assert values_of(one(client.call(fetch(topic), 12)).records) == [b"a", b"b"]


def test_one_bad_partition_does_not_harm_the_others(client: RawClient) -> None:
    topic = new_name()
    client.call(create(topic, 3))
    for n in range(3):
        parts = client.call(produce(topic, {0: batch(), 1: b"bad", 2: batch()}), 12)
        told = parts.responses[0].partition_responses
        assert [(p.error_code, p.base_offset) for p in told] == [
            (0, n), (ErrorCode.INVALID_RECORD, -1), (0, n),
        ]  # fmt: skip


def test_an_id_of_a_deleted_topic_is_unknown(client: RawClient, topic: str) -> None:
    old: UUID = client.call(metadata(topic)).topics[0].topic_id
    for _ in range(2):
        assert not one(client.call(produce(old, batch()), 13)).error_code
    client.call(delete(topic))
    client.call(create(topic))
    part = one(client.call(produce(old, batch()), 13))
    assert part.error_code == ErrorCode.UNKNOWN_TOPIC_ID
    new: UUID = client.call(metadata(topic)).topics[0].topic_id
    assert one(client.call(produce(new, batch()), 13)).base_offset == 0


# ---- producer ids ----------------------------------------------------------------------------


def test_producer_ids_never_come_again(broker: Broker) -> None:
    """Neither after a clean stop nor after a crash, nor past the end of a reserved block."""
    seen: list[int] = []
    for end in (broker.stop, broker.crash, broker.crash, broker.stop):
        with RawClient(broker.bootstrap) as client:
            count = PRODUCER_ID_BLOCK + 10
            client.send_all(*[new_producer()] * count)
            seen += [client.receive().producer_id for _ in range(count)]
        end()
        broker.start()
    assert len(set(seen)) == len(seen)
    assert min(seen) >= 0


def test_ids_are_different_for_all_who_ask_at_once(shared: Broker, connect: Connect) -> None:
    clients = [connect(shared) for _ in range(10)]
    for client in clients:
        client.send_all(*[new_producer()] * 50)
    ids = [client.receive().producer_id for client in clients for _ in range(50)]
    assert len(set(ids)) == 500


@pytest.mark.parametrize("clean", [True, False])
def test_duplicates_are_known_after_a_restart(broker: Broker, clean: bool) -> None:
    def send(client: RawClient, *sequence: int) -> list[tuple[ErrorCode, int]]:
        return [written(client, "t", batch(b"%d" % n, producer=(pid, 0, n))) for n in sequence]

    with RawClient(broker.bootstrap) as client:
        client.call(create("t"))
        pid = client.call(new_producer()).producer_id
        send(client, 0, 1, 2)
    (broker.stop if clean else broker.crash)()
    broker.start()
    with RawClient(broker.bootstrap) as client:
        ok = ErrorCode.NONE
        gap = ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
        assert send(client, 2, 0, 4, 3, 3) == [(ok, 2), (ok, 0), (gap, -1), (ok, 3), (ok, 3)]
        old = batch(b"old epoch", producer=(pid, -1, 0))
        assert written(client, "t", old)[0] == ErrorCode.INVALID_PRODUCER_EPOCH
        records = one(client.call(fetch("t"), 12)).records
        assert values_of(records) == [b"0", b"1", b"2", b"3"]


def test_a_duplicate_is_not_acknowledged_before_the_first_is_safe() -> None:
    disk = GatedDisk()
    with Broker(durability="disk", disk=disk) as broker, RawClient(broker.bootstrap) as client:
        client.call(create("t"))
        pid = client.call(new_producer()).producer_id
        once = batch(b"a", producer=(pid, 0, 0))
        with disk.closed("t"), RawClient(broker.bootstrap) as again:
            client.send(produce("t", once), 12)
            disk.wait_for_sync()
            again.send(produce("t", once), 12)
            with RawClient(broker.bootstrap) as other:
                assert not one(other.call(fetch("t"), 12)).records
            assert client.is_silent()
            assert again.is_silent()
            disk.let_pass()
            assert one(client.receive()).base_offset == 0
            assert one(again.receive()).base_offset == 0
        assert values_of(one(client.call(fetch("t"), 12)).records) == [b"a"]
