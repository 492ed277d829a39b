"""Particular frames that are bad in a particular way, each with the end it must come to."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from functools import cache, partial
from typing import Any

import cramjam
import pytest

from penstock.broker.connection import Connection
from penstock.records import record
from penstock.records.compression import CODES
from penstock.records.record import BatchOptions
from penstock.testing.broker import Broker
from penstock.wire import APIS, Message, is_flexible, request_header
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.alter_configs import (
    AlterableConfig as OldAlterableConfig,
)
from penstock.wire.messages.alter_configs import (
    AlterConfigsRequest,
)
from penstock.wire.messages.alter_configs import (
    AlterConfigsResource as OldAlterConfigsResource,
)
from penstock.wire.messages.api_versions import ApiVersionsRequest
from penstock.wire.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsTopic,
)
from penstock.wire.messages.create_topics import (
    CreatableTopic,
    CreatableTopicConfig,
    CreateTopicsRequest,
)
from penstock.wire.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
)
from penstock.wire.messages.metadata import MetadataRequest, MetadataRequestTopic
from tests.broker import requests as rq
from tests.broker.raw import ConnectionEndedError, RawClient
from tests.broker.robustness.frames import sealed
from tests.broker.robustness.fuzzer import Fuzzer
from tests.broker.robustness.watch import (
    Witness,
    eventually,
    memory_bytes,
    no_errors,
    quick_broker,
    wait_for_quiet,
)
from tests.harness.profiles import FLIPPED_BITS

LONGEST = 0x7FFF


@pytest.fixture
def broker() -> Iterator[Broker]:
    with quick_broker() as broker, no_errors(broker):
        yield broker
        wait_for_quiet(broker)


def produced(client: RawClient, topic: str, batch: bytes) -> Any:
    return rq.one(client.call(rq.produce(topic, batch), rq.BY_NAME["produce"]))


def only_connection(broker: Broker) -> Connection:
    (connection,) = broker.call(lambda server: list(server.connections))
    return connection


def has_received(broker: Broker, connection: Connection, count: int) -> bool:
    return broker.call(lambda _: connection._received.pending) == count


@pytest.mark.parametrize(
    ("request_", "version"),
    [
        (ApiVersionsRequest(client_software_name="x", client_software_version="1"), 3),
        (rq.metadata("t"), 12),
        (rq.produce("t", rq.batch(b"one", b"two")), 9),
        (rq.produce("t", rq.batch(b"one", b"two")), 3),
        (rq.fetch("t"), 11),
    ],
    ids=["api-versions", "metadata", "produce", "old-produce", "fetch"],
)
def test_a_frame_may_come_in_two_at_any_byte(
    broker: Broker, request_: Message, version: int
) -> None:
    with RawClient(broker.bootstrap) as client:
        client.call(rq.create("t"))
        connection = only_connection(broker)
        size = len(client.frame(request_, version)) + 4
        client.asked.clear()
        for at in range(1, size):
            frame = client.frame(request_, version)
            whole = struct.pack(">i", len(frame)) + frame
            client.send_bytes(whole[:at])
            eventually(partial(has_received, broker, connection, at), f"{at} bytes have arrived")
            client.send_bytes(whole[at:])
            client.receive()


def test_many_frames_may_come_byte_by_byte(broker: Broker) -> None:
    with RawClient(broker.bootstrap) as client:
        client.call(rq.create("t"))
        for request, version in ((rq.produce("t", rq.batch(b"x")), 9), (rq.metadata("t"), 9)):
            frame = client.frame(request, version)
            for byte in struct.pack(">i", len(frame)) + frame:
                client.send_bytes(bytes([byte]))
            client.receive()


@pytest.mark.parametrize("length", [0, -1, -0x80000000, (100 << 20) + 1, 0x7FFFFFFF])
def test_an_impossible_length_closes_the_connection_at_once(broker: Broker, length: int) -> None:
    with RawClient(broker.bootstrap) as client:
        client.send_bytes(struct.pack(">i", length))
        assert client.wait_closed() == b""


def test_a_length_alone_costs_no_memory(broker: Broker) -> None:
    with RawClient(broker.bootstrap) as client:
        client.call(rq.metadata())
        client.send_bytes(struct.pack(">i", 100 << 20) + bytes(1000))
        connection = only_connection(broker)
        eventually(lambda: connection._received.pending == 1004, "it has arrived")
        assert connection._received.size < 1 << 20


def test_half_a_request_and_then_silence_disturbs_nobody(broker: Broker) -> None:
    clients = [RawClient(broker.bootstrap) for _ in range(50)]
    with Witness(broker) as witness:
        frame = clients[0].frame(rq.produce("witness", rq.batch(b"x" * 100)), 9)
        for at, client in enumerate(clients):
            client.send_bytes((struct.pack(">i", len(frame)) + frame)[: 1 + at])
        rounds = witness.rounds
        eventually(lambda: witness.rounds > rounds + 5, "the witness goes on")
    for client in clients:
        client.close()


def test_every_key_and_version_is_answered_or_refused(broker: Broker) -> None:
    host, port = broker.bootstrap.split(":")
    fuzzer = Fuzzer(host, int(port))
    bodies = (b"", bytes(40))
    fuzzer.send_frames(
        struct.pack(">hhih", key, version, 7, -1) + body
        for key in (*range(-2, max(APIS) + 3), 0x7FFF, -0x8000)
        for version in (*range(-1, 20), 0x7FFF)
        for body in bodies
    )
    assert set(fuzzer.outcomes) == {"answered", "closed"}


COUNTS = [
    (key, version, at)
    for key, version, at in [
        # API, version, where in the body a count is.
        (3, 1, 0), (3, 12, 0), (2, 1, 4), (0, 3, 8), (0, 9, 8), (1, 4, 17), (1, 12, 25),
        (19, 2, 0), (19, 7, 0), (20, 1, 0), (21, 0, 0), (32, 1, 0), (33, 0, 0), (35, 1, 0),
        (37, 0, 0), (44, 0, 0), (44, 1, 0), (61, 0, 0), (75, 0, 0), (23, 2, 0),
    ]
]  # fmt: skip


@pytest.mark.parametrize(("key", "version", "at"), COUNTS)
def test_an_array_that_claims_to_be_giant_is_refused_at_once(
    broker: Broker, key: int, version: int, at: int
) -> None:
    before = memory_bytes()
    claims = (b"\x7f\xff\xff\xff", b"\x01\x00\x00\x00")
    if is_flexible(key, version):
        claims = (b"\xff\xff\xff\xff\x07", b"\x80\x80\x80\x08")
    for claim in claims:
        with RawClient(broker.bootstrap) as client:
            header = request_header(key, version, 1, "x")
            client.send_frame(header + bytes(at) + claim + bytes(2000))
            with pytest.raises(ConnectionEndedError):
                client.receive_frame()
    assert memory_bytes() - before < 32 << 20


# ---- batches ---------------------------------------------------------------------------------


@cache
def bomb(codec: str, size: int) -> bytes:
    """A batch of one record, or so it says, that unfolds to so many zeros."""
    zeros = bytes(size)
    packed = {
        "gzip": lambda: bytes(cramjam.gzip.compress(zeros, level=1)),
        "snappy": lambda: bytes(cramjam.snappy.compress_raw(zeros)),
        "lz4": lambda: bytes(cramjam.lz4.compress(zeros, level=1)),
        "zstd": lambda: bytes(cramjam.zstd.compress(zeros)),
    }[codec]()
    options = BatchOptions(codec=CODES[codec])
    shell = record.simple_batch([b"x"], key=b"k", timestamp_ms=rq.now_ms(), options=options)
    return sealed(packed, shell)


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_a_batch_that_unfolds_without_end_is_refused(broker: Broker, codec: str) -> None:
    batch = bomb(codec, 100 << 20)
    with Witness(broker), RawClient(broker.bootstrap) as client:
        largest = str(50 << 20)
        client.call(rq.create("compacted", cleanup_policy="compact", max_message_bytes=largest))
        before = memory_bytes()
        for _ in range(3):
            answer = produced(client, "compacted", batch)
            assert answer.error_code == ErrorCode.CORRUPT_MESSAGE
        assert memory_bytes() - before < 100 << 20
        assert produced(client, "compacted", rq.batch(b"v", key=b"k")).base_offset == 0


@pytest.mark.parametrize("codec", ["gzip", "snappy", "lz4", "zstd"])
def test_a_bomb_in_the_log_does_not_go_off_when_looked_up_by_time(
    broker: Broker, codec: str
) -> None:
    batch = bomb(codec, 100 << 20)
    with Witness(broker), RawClient(broker.bootstrap) as client:
        client.call(rq.create("t", max_message_bytes=str(50 << 20)))
        assert produced(client, "t", batch).base_offset == 0
        later = rq.now_ms() + 60_000
        produced(client, "t", rq.batch(b"good", at_ms=later))
        before = memory_bytes()
        assert rq.one(client.call(rq.list_offsets("t", 0))).offset == 0
        assert rq.one(client.call(rq.list_offsets("t", later))).offset == 1
        assert rq.one(client.call(rq.list_offsets("t", rq.MAX_TIMESTAMP))).offset == 1
        assert memory_bytes() - before < 100 << 20


def test_a_claimed_count_of_records_uses_up_no_offsets(broker: Broker) -> None:
    with RawClient(broker.bootstrap) as client:
        client.call(rq.create("t"))
        for codec in (0, 4):
            raw = bytearray(rq.batch(b"x", codec=codec))
            struct.pack_into(">i", raw, 23, 0x7FFFFFFE)
            struct.pack_into(">i", raw, 57, 0x7FFFFFFF)
            lying = sealed(bytes(raw[61:]), bytes(raw))
            answer = produced(client, "t", lying)
            assert answer.error_code == ErrorCode.INVALID_RECORD
        assert produced(client, "t", rq.batch(b"y")).base_offset == 0


@pytest.mark.parametrize("version", [3, 9, 13])
def test_no_flipped_bit_of_a_batch_gets_into_the_log_unnoticed(
    broker: Broker, version: int
) -> None:
    with RawClient(broker.bootstrap) as client:
        (made,) = client.call(rq.create("t")).topics
        topic = made.topic_id if version >= 13 else "t"
        good = rq.batch(b"some value", b"another", key=b"key", producer=(77, 0, 0))
        taken = 0
        for at in range(len(good)):
            for bit in range(FLIPPED_BITS):
                bad = bytearray(good)
                bad[at] ^= 1 << bit
                answer = rq.one(client.call(rq.produce(topic, bytes(bad)), version))
                # The log sets the first eight bytes and the epoch itself.
                harmless = at < 8 or 12 <= at < 16
                assert bool(answer.error_code) != harmless, (at, bit, answer)
                taken += harmless
        fetched = rq.one(client.call(rq.fetch("t"), 11))
        records = rq.records_of(fetched.records)
    # Of one idempotent producer's batch, sent again and again, one copy.
    assert taken == 12 * FLIPPED_BITS
    assert [(r.offset, r.key, r.value) for r in records] == [
        (0, b"key", b"some value"),
        (1, b"key", b"another"),
    ]


# ---- answers that quote the question ---------------------------------------------------------

LONG = "Ж" * (LONGEST // 2)


@pytest.mark.parametrize(
    "request_",
    [
        CreateTopicsRequest(topics=[CreatableTopic(name="\0" * LONGEST)] * 2),
        CreateTopicsRequest(topics=[CreatableTopic(name=LONG, num_partitions=1)]),
        CreateTopicsRequest(
            topics=[
                CreatableTopic(
                    name="t",
                    num_partitions=1,
                    replication_factor=1,
                    configs=[CreatableTopicConfig(name="\1" * LONGEST, value="\1" * LONGEST)],
                )
            ]
        ),
        rq.create("t", retention_ms="\2" * LONGEST),
        rq.create("t", retention_ms="9" * LONGEST),
        rq.delete(LONG),
        rq.alter(LONG, (0, "retention.ms", "1")),
        rq.alter("there", (0, "\3" * LONGEST, "\3" * LONGEST)),
        rq.alter("there", (0, "retention.ms", "\3" * LONGEST)),
        AlterConfigsRequest(
            resources=[
                OldAlterConfigsResource(
                    resource_type=2,
                    resource_name="there",
                    configs=[OldAlterableConfig(name="\3" * LONGEST, value="\3" * LONGEST)],
                )
            ]
        ),
        DescribeConfigsRequest(
            resources=[
                DescribeConfigsResource(
                    resource_type=kind, resource_name=LONG, configuration_keys=[LONG]
                )
                for kind in (0, 2, 4, 8, 100)
            ]
        ),
        CreatePartitionsRequest(
            topics=[CreatePartitionsTopic(name=LONG, count=2, assignments=None)]
        ),
        MetadataRequest(topics=[MetadataRequestTopic(name=LONG)], allow_auto_topic_creation=True),
        MetadataRequest(topics=[MetadataRequestTopic(name="\4" * LONGEST)]),
    ],
)
def test_the_longest_names_and_values_are_answered(broker: Broker, request_: Message) -> None:
    with RawClient(broker.bootstrap) as client:
        client.call(rq.create("there"))
        for version in (None, 5 if request_.API_KEY in (3, 19) else None):
            client.call(request_, version)


def test_topics_cannot_be_asked_for_by_id_before_that_was_invented(broker: Broker) -> None:
    with RawClient(broker.bootstrap) as client:
        (made,) = client.call(rq.create("t")).topics
        for version in (10, 11):
            (topic,) = client.call(rq.metadata(made.topic_id), version).topics
            assert topic.error_code == ErrorCode.INVALID_REQUEST
        (topic,) = client.call(rq.metadata(made.topic_id), 12).topics
        assert topic.name == "t"
