"""What producers are answered: batches, acks, timestamps, keys, sequences."""

from __future__ import annotations

import struct
from typing import Any

from conformance.scenario import scenario
from penstock.records.batch import headers, read_header
from penstock.records.record import BatchOptions, Record, encode
from penstock.wire import encoder, request_header
from penstock.wire.messages.init_producer_id import InitProducerIdRequest
from penstock.wire.messages.produce import PartitionProduceData, ProduceRequest, TopicProduceData
from tests.broker.protocol_client import ProtocolClient, error_name
from tests.broker.raw import RawClient
from tests.broker.requests import (
    batch,
    batch_of_size,
    delete_records,
    fetch,
    new_producer,
    now_ms,
    one,
    produce,
    records_of,
    resealed,
    values_of,
)

DAY_MS = 86_400_000


def one_by_one(client: ProtocolClient, topic: str, *batches: bytes) -> list[tuple[str, int]]:
    return [client.produced(produce(topic, item)) for item in batches]


# ---- damaged and odd batches -----------------------------------------------------------------


@scenario()
def offsets_are_consecutive(client: ProtocolClient) -> Any:
    """Each batch is answered with the offset of its first record."""
    topic = client.topic()
    return one_by_one(client, topic, batch(b"a"), batch(b"b", b"c"), batch(b"d"))


@scenario()
def a_wrong_checksum(client: ProtocolClient) -> Any:
    """Refused as corrupt; it takes no offset."""
    topic = client.topic()
    damaged = bytearray(batch(b"hello"))
    damaged[-1] ^= 1
    return one_by_one(client, topic, bytes(damaged), batch(b"good"))


@scenario()
def wrong_magic_numbers(client: ProtocolClient) -> Any:
    """Old formats are invalid, unknown ones corrupt."""
    topic = client.topic()
    return one_by_one(client, topic, *(resealed(batch(b"x" * 99), magic=m) for m in (0, 1, 3, 127)))


@scenario()
def a_short_message_of_the_old_format(client: ProtocolClient) -> Any:
    """Refused as invalid, though it is shorter than the header of a batch."""
    topic = client.topic()
    # offset, size, crc, magic 1, attributes, timestamp, no key, a value of one byte
    body = struct.pack(">bbqiib", 1, 0, 0, -1, 1, 7)
    message = struct.pack(">qiI", 0, len(body) + 4, 0) + body
    return one_by_one(client, topic, message)


@scenario()
def no_records(client: ProtocolClient) -> Any:
    """A request without records for its partition is invalid."""
    return one_by_one(client, client.topic(), b"")


@scenario()
def a_batch_cut_short(client: ProtocolClient) -> Any:
    """Invalid, wherever it is cut."""
    topic = client.topic()
    whole = batch(b"hello")
    return [error for error, _ in one_by_one(client, topic, *(whole[:n] for n in (5, 20, 61, 70)))]


@scenario()
def two_batches_for_one_partition(client: ProtocolClient) -> Any:
    """Refused; the partition goes on at the same offset."""
    topic = client.topic()
    return one_by_one(client, topic, batch(b"a") + batch(b"b"), batch(b"c"))


@scenario()
def counts_that_do_not_agree(client: ProtocolClient) -> Any:
    """A batch whose last offset does not fit its count of records is invalid."""
    topic = client.topic()
    good = batch(b"a", b"b", b"c")
    return one_by_one(
        client,
        topic,
        resealed(good, last_offset_delta=5),
        resealed(good, last_offset_delta=1),
        resealed(good, last_offset_delta=-1),
    )


@scenario()
def attributes_that_the_broker_sets(client: ProtocolClient) -> Any:
    """The bit for append time is cleared and timestamps stay; other bits are stored as sent."""
    topic = client.topic()
    raw = encode([Record(n, 1000 + n, None, b"v") for n in range(3)])
    sent = one_by_one(client, topic, *(resealed(raw, attributes=bits) for bits in (8, 64, 128, 72)))
    client.fill(topic, batch())
    stored = one(client.call(fetch(topic), 12)).records
    return (
        sent,
        [header.attributes for _, header in headers(stored)],
        [item.timestamp_ms for item in records_of(stored)][:-1],
    )


@scenario()
def a_control_batch_from_a_client(client: ProtocolClient) -> Any:
    """Only brokers write control batches."""
    topic = client.topic()
    item = [Record(0, now_ms(), b"\0\0\0\0", b"\0\0\0\0\0\0")]
    return one_by_one(client, topic, encode(item, BatchOptions(control=True)))


@scenario()
def batches_up_to_the_limit(client: ProtocolClient) -> Any:
    """max.message.bytes is the largest size that is taken."""
    topic = client.topic(max_message_bytes="1000")
    return one_by_one(client, topic, batch_of_size(1000), batch_of_size(1001), batch_of_size(999))


# ---- where they go ---------------------------------------------------------------------------


@scenario()
def unknown_topics_and_partitions(client: ProtocolClient) -> Any:
    """An error of the partition."""
    topic = client.topic(2)
    return [
        client.produced(produce("nowhere", batch())),
        client.produced(produce(topic, {2: batch()})),
        client.produced(produce(topic, {-1: batch()})),
    ]


@scenario()
def topics_by_id(client: ProtocolClient) -> Any:
    """Version 13 writes by topic id; an unknown id is an error of its own."""
    topic = client.topic()
    unknown = type(client.ids[topic])(int=client.ids[topic].int ^ 1)
    return [
        client.produced(produce(client.ids[topic], batch()), 13),
        client.produced(produce(unknown, batch()), 13),
        client.produced(produce(client.ids[topic], {7: batch()}), 13),
        client.produced(produce(type(unknown)(int=0), batch()), 13),
    ]


@scenario()
def good_and_bad_partitions_in_one_request(client: ProtocolClient) -> Any:
    """Each partition is answered on its own."""
    topic = client.topic(3)
    answer = client.call(
        produce(topic, {0: batch(b"a"), 1: b"bad", 2: batch(b"c"), 9: batch()}), 12
    )
    parts = answer.responses[0].partition_responses
    return sorted((p.index, error_name(p.error_code), p.base_offset) for p in parts)


@scenario()
def two_topics_in_one_request(client: ProtocolClient) -> Any:
    """Each topic is answered on its own."""
    names = [client.topic(), client.topic(), "nowhere"]
    data = [
        TopicProduceData(name=n, partition_data=[PartitionProduceData(index=0, records=batch())])
        for n in names
    ]
    answer = client.call(ProduceRequest(acks=1, timeout_ms=1000, topic_data=data), 9)
    results = {t.name: t.partition_responses[0] for t in answer.responses}
    return [(error_name(results[n].error_code), results[n].base_offset) for n in names]


@scenario()
def a_request_without_topics(client: ProtocolClient) -> Any:
    """It is answered, without topics."""
    return client.call(ProduceRequest(acks=-1, timeout_ms=1000), 12).responses


# ---- acks ------------------------------------------------------------------------------------


@scenario()
def numbers_of_acks(client: ProtocolClient) -> Any:
    """1 and -1 are valid; 2, -2 and others are refused."""
    topic = client.topic()
    return [client.produced(produce(topic, batch(), acks=n)) for n in (1, -1, 2, -2, 32767)]


@scenario()
def acks_0_has_no_answer(client: ProtocolClient) -> Any:
    """The records are there all the same."""
    topic = client.topic()

    def send(connection: RawClient) -> Any:
        connection.send_unanswered(produce(topic, batch(b"a"), acks=0), 12)
        return values_of(one(connection.call(fetch(topic, max_wait_ms=5000), 12)).records)

    return client.outcome_of(send)


@scenario()
def acks_0_that_fails_cuts_the_connection(client: ProtocolClient) -> Any:
    topic = client.topic()

    def send(connection: RawClient) -> Any:
        connection.send_unanswered(produce(topic, {5: batch()}, acks=0), 12)
        return connection.wait_closed()

    return client.outcome_of(send)


# ---- versions and codecs ---------------------------------------------------------------------


@scenario()
def zstd_needs_version_7(client: ProtocolClient) -> Any:
    """Older versions refuse it."""
    topic = client.topic()
    return [
        client.produced(produce(topic, batch(b"z" * 500, codec=4)), version)
        for version in (3, 6, 3, 7, 12)
    ]


@scenario()
def every_codec_in_every_version(client: ProtocolClient) -> Any:
    """gzip, snappy, lz4 and no compression are taken in versions 3 to 12."""
    topic = client.topic()
    return [
        client.produced(produce(topic, batch(b"v" * 300, codec=codec)), version)
        for codec in range(4)
        for version in range(3, 13)
    ]


def stored_codecs(client: ProtocolClient, topic: str) -> Any:
    """The codecs of a topic's batches, and all values."""
    records = one(client.call(fetch(topic, max_wait_ms=1_000), 12)).records
    return [header.codec for _, header in headers(bytes(records))], values_of(records)


@scenario()
def topics_that_choose_their_codec(client: ProtocolClient) -> Any:
    """Batches are stored in the codec of their topic, whatever they came in."""
    results = []
    for target in ("uncompressed", "gzip", "snappy", "lz4", "zstd", "producer"):
        topic = client.topic(compression_type=target)
        answers = one_by_one(
            client, topic, *(batch(b"x" * 200, b"%d" % codec, codec=codec) for codec in range(5))
        )
        results.append((target, answers, stored_codecs(client, topic)))
    return results


@scenario()
def sequences_in_a_topic_that_chooses_its_codec(client: ProtocolClient) -> Any:
    """Pipelined batches keep their order, duplicates their offset, gaps are refused."""
    topic, id_ = client.topic(compression_type="gzip"), client.producer_id()
    for sequence in range(10):
        item = batch(b"%d" % sequence, codec=sequence % 5, producer=(id_, 0, sequence))
        client.connection.send(produce(topic, item), 12)
    answers = [one(client.connection.receive()) for _ in range(10)]
    again = batch(b"9", producer=(id_, 0, 9))
    gap = batch(b"x", producer=(id_, 0, 12))
    return (
        [(error_name(part.error_code), part.base_offset) for part in answers],
        one_by_one(client, topic, again, gap),
        stored_codecs(client, topic),
    )


@scenario()
def sizes_in_a_topic_that_chooses_its_codec(client: ProtocolClient) -> Any:
    """A batch may be too large as it came, and as it is stored."""
    small = client.topic(compression_type="gzip", max_message_bytes="1000")
    unfolds = client.topic(compression_type="uncompressed", max_message_bytes="1000")
    return (
        one_by_one(client, small, batch(b"x" * 5_000), batch(b"x")),
        one_by_one(client, unfolds, batch(b"x" * 5_000, codec=1), batch(b"x", codec=1)),
    )


@scenario()
def damaged_batches_in_a_topic_that_chooses_its_codec(client: ProtocolClient) -> Any:
    """Damaged batches, and those that cannot be unpacked, are refused and take no offset."""
    topic = client.topic(compression_type="lz4")
    damaged = bytearray(batch(b"hello", codec=1))
    damaged[-1] ^= 1
    whole = batch(b"x" * 500, codec=1)
    torn = resealed(whole[:-20], batch_length=len(whole) - 32)
    # Kafka calls what it cannot unpack an unknown error.
    refused = client.produced(produce(topic, torn))[0] != "NONE"
    return refused, one_by_one(client, topic, bytes(damaged), batch(b"x", codec=1))


@scenario()
def versions_that_are_not_offered(client: ProtocolClient) -> Any:
    """The connection is closed."""
    topic = client.topic()

    def send(version: int) -> Any:
        def ask(connection: RawClient) -> bytes:
            body = encoder(ProduceRequest, 12)(produce(topic))
            connection.send_frame(request_header(0, version, 1, "x") + body)
            return connection.wait_closed()

        return client.outcome_of(ask)

    return [send(version) for version in (14, 100, -1)]


# ---- timestamps ------------------------------------------------------------------------------


@scenario()
def timestamps_far_away(client: ProtocolClient) -> Any:
    """Timestamps outside of the limits of the topic are refused, before and after now."""
    topic = client.topic(
        message_timestamp_before_max_ms="60000", message_timestamp_after_max_ms="60000"
    )
    now = now_ms()
    stamps = (now, now - DAY_MS, now + DAY_MS, now - 30_000, now + 30_000)
    return one_by_one(client, topic, *(batch(at_ms=stamp) for stamp in stamps))


@scenario()
def timestamps_by_default(client: ProtocolClient) -> Any:
    """Any age is taken; a day ahead is refused."""
    topic = client.topic()
    now = now_ms()
    return one_by_one(client, topic, *(batch(at_ms=at) for at in (0, 1, now + DAY_MS, -1)))


@scenario()
def an_old_record_among_new_ones(client: ProtocolClient) -> Any:
    """One bad timestamp refuses the batch."""
    topic = client.topic(message_timestamp_before_max_ms="60000")
    now = now_ms()
    mixed = encode([Record(0, now - DAY_MS, None, b"old"), Record(1, now, None, b"new")])
    return one_by_one(client, topic, mixed)


@scenario()
def append_time_takes_any_timestamp(client: ProtocolClient) -> Any:
    """Records get the time of the broker, which the response names."""
    topic = client.topic(message_timestamp_type="LogAppendTime")
    before = now_ms()
    answer = one(client.call(produce(topic, batch(b"a", b"b", at_ms=5)), 12))
    after = now_ms()
    stored = one(client.call(fetch(topic, max_wait_ms=5000), 12)).records
    stamps = {item.timestamp_ms for item in records_of(stored)}
    return (
        error_name(answer.error_code),
        before <= answer.log_append_time_ms <= after,
        stamps == {answer.log_append_time_ms},
        read_header(stored).attributes,
    )


@scenario()
def create_time_has_no_append_time(client: ProtocolClient) -> Any:
    """The response names none, and timestamps are stored as sent."""
    topic = client.topic()
    answer = one(client.call(produce(topic, batch(b"a", at_ms=5)), 12))
    stored = one(client.call(fetch(topic, max_wait_ms=5000), 12)).records
    return answer.log_append_time_ms, [r.timestamp_ms for r in records_of(stored)]


# ---- compacted topics ------------------------------------------------------------------------


@scenario()
def compacted_topics_need_keys(client: ProtocolClient) -> Any:
    """A batch with a record without a key is refused, in every codec."""
    topic = client.topic(cleanup_policy="compact")
    mixed = encode([Record(0, now_ms(), b"k", b"v"), Record(1, now_ms(), None, b"v")])
    return one_by_one(
        client,
        topic,
        batch(b"a"),
        batch(b"a", key=b"k"),
        mixed,
        batch(None, key=b"k"),
        batch(b"a", key=b""),
        *(batch(b"a" * 99, codec=codec) for codec in range(5)),
        *(batch(b"a" * 99, key=b"k", codec=codec) for codec in range(5)),
    )


@scenario()
def which_record_has_no_key(client: ProtocolClient) -> Any:
    """The response names the record."""
    topic = client.topic(cleanup_policy="compact")
    mixed = encode([Record(n, now_ms(), b"k" if n != 1 else None, b"v") for n in range(3)])
    answer = one(client.call(produce(topic, mixed), 12))
    return error_name(answer.error_code), [error.batch_index for error in answer.record_errors]


# ---- idempotent producers --------------------------------------------------------------------


@scenario()
def sequences_in_order(client: ProtocolClient) -> Any:
    """Batches whose sequences follow each other are taken."""
    topic, pid = client.topic(), client.producer_id()
    return one_by_one(
        client,
        topic,
        batch(b"a", producer=(pid, 0, 0)),
        batch(b"b", b"c", producer=(pid, 0, 1)),
        batch(b"d", producer=(pid, 0, 3)),
    )


@scenario()
def duplicates_get_their_first_offset(client: ProtocolClient) -> Any:
    """Any of the last five batches may be repeated, and is stored once."""
    topic, pid = client.topic(), client.producer_id()
    batches = [batch(b"%d" % n, producer=(pid, 0, n)) for n in range(5)]
    first = one_by_one(client, topic, *batches)
    again = one_by_one(client, topic, *reversed(batches))
    stored = values_of(one(client.call(fetch(topic, max_wait_ms=5000), 12)).records)
    return first, again, stored


@scenario()
def a_duplicate_older_than_the_last_five(client: ProtocolClient) -> Any:
    """It is out of order."""
    topic, pid = client.topic(), client.producer_id()
    batches = [batch(b"%d" % n, producer=(pid, 0, n)) for n in range(7)]
    return one_by_one(client, topic, *batches), one_by_one(client, topic, batches[1], batches[2])


@scenario()
def gaps_and_repeats_in_the_sequence(client: ProtocolClient) -> Any:
    """Both are out of order, and the right batch is taken afterwards."""
    topic, pid = client.topic(), client.producer_id()
    return one_by_one(
        client,
        topic,
        batch(b"a", producer=(pid, 0, 0)),
        batch(b"gap", producer=(pid, 0, 2)),
        batch(b"b", producer=(pid, 0, 1)),
        batch(b"ab", b"ba", producer=(pid, 0, 0)),
        batch(b"c", producer=(pid, 0, 2)),
    )


@scenario()
def a_new_producer_starts_at_any_sequence(client: ProtocolClient) -> Any:
    """From then on its sequence has no gaps."""
    topic, pid = client.topic(), client.producer_id()
    return one_by_one(
        client,
        topic,
        batch(b"a", producer=(pid, 0, 50)),
        batch(b"b", producer=(pid, 0, 51)),
        batch(b"c", producer=(pid, 0, 60)),
    )


@scenario()
def a_batch_of_another_shape_is_no_duplicate(client: ProtocolClient) -> Any:
    """Overlapping batches are out of order."""
    topic, pid = client.topic(), client.producer_id()
    return one_by_one(
        client,
        topic,
        batch(b"a", b"b", b"c", producer=(pid, 0, 0)),
        batch(b"b", b"c", producer=(pid, 0, 1)),
        batch(b"a", b"b", producer=(pid, 0, 0)),
        batch(b"c", b"d", producer=(pid, 0, 2)),
        batch(b"d", producer=(pid, 0, 3)),
    )


@scenario()
def epochs_of_a_producer(client: ProtocolClient) -> Any:
    """Old epochs are refused; a new one begins with sequence 0."""
    topic, pid = client.topic(), client.producer_id()
    return one_by_one(
        client,
        topic,
        batch(b"a", producer=(pid, 1, 0)),
        batch(b"old epoch", producer=(pid, 0, 0)),
        batch(b"new epoch not from 0", producer=(pid, 2, 1)),
        batch(b"new epoch", producer=(pid, 2, 0)),
        batch(b"same as before", producer=(pid, 1, 0)),
        batch(b"next", producer=(pid, 2, 1)),
    )


@scenario()
def sequences_wrap_around(client: ProtocolClient) -> Any:
    """After 2147483647 comes 0, in the middle of a batch too."""
    topic, pid = client.topic(), client.producer_id()
    top = 0x7FFFFFFF
    return one_by_one(
        client,
        topic,
        batch(b"a", producer=(pid, 0, top - 1)),
        batch(b"b", b"c", b"d", producer=(pid, 0, top)),
        batch(b"e", producer=(pid, 0, 2)),
        batch(b"b", b"c", b"d", producer=(pid, 0, top)),
    )


@scenario()
def each_partition_has_its_own_sequence(client: ProtocolClient) -> Any:
    topic, pid = client.topic(2), client.producer_id()
    return [
        client.produced(produce(topic, {n: batch(b"a", producer=(pid, 0, sequence))}))
        for n, sequence in ((0, 0), (1, 0), (0, 1), (1, 1), (0, 3), (1, 2))
    ]


@scenario()
def idempotent_batches_need_a_sequence(client: ProtocolClient) -> Any:
    """A producer id with sequence -1 is invalid; with epoch -1 it is taken."""
    topic, pid = client.topic(), client.producer_id()
    return one_by_one(
        client, topic, batch(b"a", producer=(pid, -1, 0)), batch(b"a", producer=(pid, 0, -1))
    )


@scenario()
def producer_ids_are_new_each_time(client: ProtocolClient) -> Any:
    """A producer without a transactional id gets a new id even if it names its old one."""
    first = client.call(new_producer())
    second = client.call(new_producer())
    # Without a transactional id a producer that names its old id gets a new one.
    third = client.call(new_producer(first.producer_id, 0))
    ids = [answer.producer_id for answer in (first, second, third)]
    return (
        [error_name(answer.error_code) for answer in (first, second, third)],
        len(set(ids)),
        [answer.producer_epoch for answer in (first, second, third)],
    )


@scenario()
def an_empty_transactional_id(client: ProtocolClient) -> Any:
    """InitProducerId refuses it."""
    request = InitProducerIdRequest(transactional_id="", transaction_timeout_ms=1000)
    return error_name(client.call(request, 4).error_code)


@scenario()
def a_producer_id_without_its_epoch(client: ProtocolClient) -> Any:
    """InitProducerId refuses it, and an epoch without its id."""
    return [
        error_name(client.call(new_producer(id_, epoch), 4).error_code)
        for id_, epoch in ((5, -1), (-1, 5))
    ]


@scenario()
def producers_of_deleted_records(client: ProtocolClient) -> Any:
    """The producer goes on; its deleted batch is still known as a duplicate."""
    topic, pid = client.topic(), client.producer_id()
    first = one_by_one(client, topic, batch(b"a", producer=(pid, 0, 0)))
    client.call(delete_records(topic, -1))
    again = one_by_one(client, topic, batch(b"a", producer=(pid, 0, 0)))
    on = one_by_one(client, topic, batch(b"b", producer=(pid, 0, 1)))
    return first, again, on
