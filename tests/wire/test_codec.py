"""The codec on its own: round trips, damaged and hostile input, values that cannot be written."""

from __future__ import annotations

import tracemalloc
from uuid import UUID

import pytest

from penstock.errors import PenstockError
from penstock.wire import Buffer, Message, Struct, WireError, decoder, encoder, parts_encoder
from penstock.wire.codec import REQUEST_ELEMENTS_MAX
from penstock.wire.messages.api_versions import ApiVersionsRequest, ApiVersionsResponse
from penstock.wire.messages.create_topics import CreateTopicsRequest
from penstock.wire.messages.delete_records import DeleteRecordsRequest, DeleteRecordsTopic
from penstock.wire.messages.fetch import (
    FetchableTopicResponse,
    FetchRequest,
    FetchResponse,
    PartitionData,
)
from penstock.wire.messages.init_producer_id import InitProducerIdRequest
from penstock.wire.messages.metadata import MetadataRequest, MetadataRequestTopic
from penstock.wire.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
    TopicProduceResponse,
)
from penstock.wire.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment
from penstock.wire.primitive import encode_uvarint
from tests.harness.profiles import ABSURD_PLACES, DAMAGED_MESSAGES
from tests.wire.samples import SEED, Sampler, every_message, name_of, versions_of

MESSAGES = [cls for _, cls in every_message()]


def accepts(cls: type[Message], version: int, data: Buffer) -> bool:
    """Whether the bytes are a message; anything but WireError goes through."""
    try:
        _, end = decoder(cls, version)(data, 0)
    except WireError:
        return False
    assert end <= len(data)
    return True


@pytest.mark.parametrize("cls", MESSAGES, ids=name_of)
def test_round_trip_of_every_version(cls: type[Message]) -> None:
    for version in versions_of(cls):
        encode, decode = encoder(cls, version), decoder(cls, version)
        for turn in range(3):
            where = f"{cls.NAME} v{version}, turn {turn}, PENSTOCK_SEED={SEED}"
            message = Sampler("trip", cls.NAME, version, turn).message(cls, version)
            data = encode(message)
            assert decode(data, 0) == (message, len(data)), where
            # At another place of a writable view, with other bytes around it.
            around = memoryview(bytearray(b"abc" + data + b"xyz"))
            assert decode(around, 3) == (message, len(data) + 3), where
            assert b"".join(parts_encoder(cls, version)(message)) == data, where


@pytest.mark.parametrize("cls", MESSAGES, ids=name_of)
def test_every_truncation_is_refused(cls: type[Message]) -> None:
    for version in versions_of(cls):
        message = Sampler("cut", cls.NAME, version, items_max=2).message(cls, version)
        data = encoder(cls, version)(message)
        for size in range(len(data)):
            where = f"{cls.NAME} v{version}, {size} bytes, PENSTOCK_SEED={SEED}"
            assert not accepts(cls, version, data[:size]), where
        assert not accepts(cls, version, memoryview(data)[:-1]) or not data


@pytest.mark.parametrize("cls", MESSAGES, ids=name_of)
def test_damage_raises_nothing_but_wire_error(cls: type[Message]) -> None:
    for version in versions_of(cls):
        sampler = Sampler("damage", cls.NAME, version, items_max=2)
        rng = sampler.rng
        data = encoder(cls, version)(sampler.message(cls, version))
        for _ in range(DAMAGED_MESSAGES):
            damaged = bytearray(data)
            for _ in range(rng.randint(1, 4)):
                if damaged:
                    damaged[rng.randrange(len(damaged))] = rng.choice((0, 1, 127, 128, 254, 255))
            accepts(cls, version, bytes(damaged))
            noise = rng.randbytes(rng.randint(0, 60))
            accepts(cls, version, noise)
            accepts(cls, version, memoryview(noise))


@pytest.mark.parametrize("cls", MESSAGES, ids=name_of)
def test_absurd_lengths_cost_no_memory(cls: type[Message]) -> None:
    version = cls.UNSTABLE_MAX
    sampler = Sampler("absurd", cls.NAME, items_max=1)
    data = encoder(cls, version)(sampler.message(cls, version))[:ABSURD_PLACES]
    absurd = [b"\x7f\xff\xff\xff", b"\xff\xff\xff\xff\x07", b"\xff\xff\x7f", b"\x80\0\0\0", b"\x7f"]
    inputs = [data[:i] + value + data[i:] for i in range(len(data) + 1) for value in absurd]
    for hostile in inputs:
        accepts(cls, version, hostile)  # what the first run compiles and caches is not counted
    tracemalloc.start()
    try:
        for hostile in inputs:
            accepts(cls, version, hostile)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 300_000, f"{cls.NAME}: {peak} bytes, PENSTOCK_SEED={SEED}"


def test_count_beyond_the_bytes_is_refused() -> None:
    topics = encode_uvarint(2_000_000) + b"\0" * 500
    with pytest.raises(WireError, match="topics: count"):
        decoder(MetadataRequest, 9)(topics, 0)
    with pytest.raises(WireError, match="topics: count"):
        decoder(MetadataRequest, 4)(b"\x7f\xff\xff\xff" + bytes(500), 0)
    with pytest.raises(WireError, match="topics: count"):
        decoder(MetadataRequest, 4)(b"\xff\xff\xff\xfe" + bytes(500), 0)


def test_elements_of_a_request_are_limited_however_long_it_is() -> None:
    one_topic = b"\x02a\0"
    many = REQUEST_ELEMENTS_MAX + 1
    body = encode_uvarint(many + 1) + one_topic * many + b"\1\0\0\0\0"
    with pytest.raises(WireError, match="topics: count"):
        decoder(MetadataRequest, 9)(body, 0)


def test_wire_error_is_one_of_ours_and_not_retriable() -> None:
    with pytest.raises(PenstockError) as caught:
        decoder(MetadataRequest, 9)(b"", 0)
    assert not caught.value.retriable
    assert "MetadataRequest v9" in str(caught.value)


def test_unknown_version_is_refused() -> None:
    for version in (-1, 99):
        with pytest.raises(WireError, match="no version"):
            decoder(MetadataRequest, version)
        with pytest.raises(WireError, match="no version"):
            encoder(MetadataRequest, version)


def test_unstable_version_can_be_read_and_written() -> None:
    assert InitProducerIdRequest.VERSIONS == (0, 5)
    assert InitProducerIdRequest.UNSTABLE_MAX == 6
    message = InitProducerIdRequest(transactional_id="t", enable_2pc=True, keep_prepared_txn=True)
    data = encoder(InitProducerIdRequest, 6)(message)
    assert decoder(InitProducerIdRequest, 6)(data, 0) == (message, len(data))


def test_known_bytes_of_old_and_flexible_versions() -> None:
    request = MetadataRequest(topics=[MetadataRequestTopic(name="ab")])
    assert encoder(MetadataRequest, 0)(request) == b"\0\0\0\1\0\2ab"
    assert encoder(MetadataRequest, 9)(request) == b"\2\3ab\0\1\0\0\0"
    assert encoder(MetadataRequest, 12)(request) == b"\2" + bytes(16) + b"\3ab\0\1\0\0"
    assert encoder(MetadataRequest, 9)(MetadataRequest(topics=None)) == b"\0\1\0\0\0"


def test_tagged_field_is_written_only_when_it_differs() -> None:
    plain = FetchRequest()
    assert encoder(FetchRequest, 12)(plain).endswith(b"\1\1\1\0")
    named = FetchRequest(cluster_id="c")
    assert encoder(FetchRequest, 12)(named).endswith(b"\1\1\1\1\0\2\2c")


def test_unknown_tagged_fields_are_skipped() -> None:
    data = encoder(ApiVersionsRequest, 3)(ApiVersionsRequest(client_software_name="x"))
    assert data.endswith(b"\0")
    unknown = encode_uvarint(2) + encode_uvarint(5) + b"\3abc" + encode_uvarint(70_000) + b"\0"
    message, end = decoder(ApiVersionsRequest, 3)(data[:-1] + unknown, 0)
    assert message == ApiVersionsRequest(client_software_name="x")
    assert end == len(data) - 1 + len(unknown)


def test_tagged_field_with_a_wrong_size_is_refused() -> None:
    data = encoder(ApiVersionsResponse, 3)(ApiVersionsResponse(finalized_features_epoch=7))
    assert data.endswith(b"\1\1\x08" + (7).to_bytes(8))
    wrong = data[:-9] + b"\x09" + data[-8:] + b"\0"
    with pytest.raises(WireError, match="wrong size"):
        decoder(ApiVersionsResponse, 3)(wrong, 0)


def test_absent_fields_keep_their_defaults_and_are_fresh() -> None:
    data = encoder(FetchRequest, 4)(FetchRequest(rack_id="not in this version"))
    first, _ = decoder(FetchRequest, 4)(data, 0)
    second, _ = decoder(FetchRequest, 4)(data, 0)
    assert first == FetchRequest()
    first.forgotten_topics_data.append(Sampler().struct(CreateTopicsRequest, 7))  # type: ignore[arg-type]
    first.replica_state.replica_id = 5
    assert second == FetchRequest()


def test_records_of_a_view_are_not_copied_and_bytes_are() -> None:
    batch = PartitionProduceData(index=1, records=b"records")
    request = ProduceRequest(topic_data=[TopicProduceData(name="t", partition_data=[batch])])
    frame = bytearray(encoder(ProduceRequest, 9)(request))
    decoded, _ = decoder(ProduceRequest, 9)(memoryview(frame), 0)
    records = decoded.topic_data[0].partition_data[0].records
    assert isinstance(records, memoryview)
    assert records.obj is frame
    assert decoded.topic_data[0].name == "t"
    from_bytes, _ = decoder(ProduceRequest, 9)(bytes(frame), 0)
    assert from_bytes.topic_data[0].partition_data[0].records == b"records"
    assignment = SyncGroupRequestAssignment(member_id="m", assignment=b"a")
    data = encoder(SyncGroupRequest, 4)(SyncGroupRequest(assignments=[assignment]))
    sync, _ = decoder(SyncGroupRequest, 4)(memoryview(bytearray(data)), 0)
    assert type(sync.assignments[0].assignment) is bytes


def test_parts_hold_the_callers_records_uncopied() -> None:
    records = memoryview(bytearray(100_000))
    data = PartitionData(partition_index=0, records=records)
    response = FetchResponse(responses=[FetchableTopicResponse(partitions=[data])])
    parts = parts_encoder(FetchResponse, 16)(response)
    assert any(part is records for part in parts)


def test_values_that_cannot_be_written_are_a_wire_error() -> None:
    wrong: list[tuple[Message, int]] = [
        (MetadataRequest(topics=None), 0),
        (MetadataRequest(topics=[MetadataRequestTopic(name=None)]), 9),
        (MetadataRequest(topics=[MetadataRequestTopic(name="\ud800")]), 9),
        (MetadataRequest(topics=[MetadataRequestTopic(name="x" * 32768)]), 9),
        (MetadataRequest(topics=[MetadataRequestTopic(name="x" * 32768)]), 4),
        (FetchRequest(max_wait_ms=1 << 31), 12),
        (FetchRequest(max_wait_ms="soon"), 12),  # type: ignore[arg-type]
        (DeleteRecordsRequest(topics=[DeleteRecordsTopic(partitions=[None])]), 2),  # type: ignore[list-item]
    ]
    for message, version in wrong:
        with pytest.raises(WireError, match="cannot be written"):
            encoder(type(message), version)(message)


def test_longest_string_passes_and_a_longer_one_is_refused() -> None:
    longest = MetadataRequest(topics=[MetadataRequestTopic(name="x" * 32767)])
    for version in (4, 9):
        data = encoder(MetadataRequest, version)(longest)
        assert decoder(MetadataRequest, version)(data, 0) == (longest, len(data))
    too_long = b"\2" + encode_uvarint(32769) + b"x" * 32768 + b"\0\1\0\0\0"
    with pytest.raises(WireError, match="too long"):
        decoder(MetadataRequest, 9)(too_long, 0)


def test_text_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(WireError, match="not UTF-8"):
        decoder(MetadataRequest, 9)(b"\2\3a\xff\0\1\0\0\0", 0)


def test_lists_are_kept_not_copied() -> None:
    topics: list[TopicProduceResponse] = []
    response = ProduceResponse(responses=topics)
    partition = PartitionProduceResponse(index=1, base_offset=2)
    topics.append(TopicProduceResponse(name="t", partition_responses=[partition]))
    assert response.responses is topics
    assert ProduceResponse().responses is not ProduceResponse().responses


def test_messages_compare_by_value_and_show_their_fields() -> None:
    one, other = MetadataRequestTopic(name="a"), MetadataRequestTopic(name="a")
    assert one == other
    other.topic_id = UUID(int=1)
    assert one != other
    assert one != "a"
    assert isinstance(one, Struct)
    assert repr(one) == f"MetadataRequestTopic(topic_id={UUID(int=0)!r}, name='a')"
    with pytest.raises(TypeError):
        hash(one)
