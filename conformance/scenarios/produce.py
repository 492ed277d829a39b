"""Writing and reading: what goes in comes out, in order, and what may not go in is refused."""

from __future__ import annotations

from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    TIMESTAMP_LOG_APPEND_TIME,
    KafkaException,
    TopicPartition,
)

from conformance.clients import (
    Member,
    drive,
    fill,
    offset_of,
    read_to_end,
    send,
    sent_errors,
    value_of,
    values,
)
from conformance.scenario import REQUEST_TIMEOUT_S, Cluster, scenario

LONG_AGO_MS = 1_600_000_000_000


@scenario(
    expected=[
        (0, None, "no key", []),
        (1, "", "empty key", []),
        (2, "k", None, []),
        (3, "k", "", []),
        (4, "k", "v", [("a", b"1"), ("a", b"2"), ("none", None), ("empty", b""), ("é", b"\xff")]),
    ]
)
def keys_values_and_headers(cluster: Cluster) -> Any:
    """Null and empty keys, values and headers are told apart; headers repeat and keep order."""
    topic = cluster.topic()
    producer = cluster.producer()
    send(producer, topic, ["no key"])
    send(producer, topic, ["empty key"], key=b"")
    send(producer, topic, [None, b""], key=b"k")
    headers = [("a", b"1"), ("a", b"2"), ("none", None), ("empty", b""), ("é", b"\xff")]
    send(producer, topic, ["v"], key=b"k", headers=headers)
    records = []
    for message in read_to_end(cluster, topic):
        key = message.key()
        shown = key.decode() if isinstance(key, bytes) else key
        records.append((offset_of(message), shown, value_of(message), message.headers() or []))
    return records


@scenario(expected=dict.fromkeys(("none", "gzip", "snappy", "lz4", "zstd"), True))
def every_codec(cluster: Cluster) -> Any:
    """Whatever the codec, the same records come back in the same order."""
    topic = cluster.topic()
    whole: dict[str, bool] = {}
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        start = len(whole) * 300
        wanted = [f"{codec} {number} " + "x" * 50 for number in range(300)]
        send(cluster.producer(compression_type=codec, linger_ms=20), topic, wanted)
        messages = read_to_end(cluster, topic, start=start)
        whole[codec] = values(messages) == wanted and [offset_of(m) for m in messages] == list(
            range(start, start + 300)
        )
    return whole


@scenario(expected=[["0", "1"], ["0", "1"], ["0", "1"]])
def every_acknowledgement(cluster: Cluster) -> Any:
    """Records sent with acks 0, 1 and all are there for readers."""
    observed = []
    for acks in ("0", "1", "all"):
        topic = cluster.topic()
        send(cluster.producer(acks=acks), topic, ["0", "1"])
        messages: list[str | None] = []
        # With acks=0 nobody says when they have arrived.
        while len(messages) < 2:
            messages = values(read_to_end(cluster, topic))
        observed.append(messages)
    return observed


@scenario(expected={"create": [LONG_AGO_MS, LONG_AGO_MS + 1], "append": [True, True], "kind": True})
def timestamps(cluster: Cluster) -> Any:
    """A record keeps its producer's time, or gets the log's, as the topic says."""
    created = cluster.topic()
    appended = cluster.topic(config={"message.timestamp.type": "LogAppendTime"})
    for topic in (created, appended):
        for time_ms in (LONG_AGO_MS, LONG_AGO_MS + 1):
            send(cluster.producer(), topic, ["x"], timestamp=time_ms)
    late = read_to_end(cluster, appended)
    return {
        "create": [message.timestamp()[1] for message in read_to_end(cluster, created)],
        "append": [message.timestamp()[1] > LONG_AGO_MS + 1 for message in late],
        "kind": all(message.timestamp()[0] == TIMESTAMP_LOG_APPEND_TIME for message in late),
    }


@scenario(expected={"future": "INVALID_TIMESTAMP", "past": "INVALID_TIMESTAMP", "near": None})
def timestamps_out_of_bounds(cluster: Cluster) -> Any:
    """A topic refuses times further away than it says."""
    settings = {
        "message.timestamp.after.max.ms": "60000",
        "message.timestamp.before.max.ms": "3153600000000",
    }
    topic = cluster.topic(config=settings)
    producer = cluster.producer()
    return {
        "future": sent_errors(producer, topic, "x", timestamp=LONG_AGO_MS * 2),
        "past": sent_errors(
            producer,
            cluster.topic(config={"message.timestamp.before.max.ms": "60000"}),
            "x",
            timestamp=LONG_AGO_MS,
        ),
        "near": sent_errors(producer, topic, "x", timestamp=LONG_AGO_MS),
    }


@scenario(expected={"large": "MSG_SIZE_TOO_LARGE", "small": None, "keyless": "INVALID_RECORD"})
def records_that_are_refused(cluster: Cluster) -> Any:
    """A record above the topic's size, or without a key where one is needed, is refused."""
    small = cluster.topic(config={"max.message.bytes": "2000"})
    compacted = cluster.topic(config={"cleanup.policy": "compact"})
    producer = cluster.producer()
    return {
        "large": sent_errors(producer, small, b"x" * 4000),
        "small": sent_errors(producer, small, b"x" * 1000),
        "keyless": sent_errors(producer, compacted, "x"),
    }


@scenario(
    expected={
        "topic": "UNKNOWN_TOPIC_OR_PART",
        "partition": "_UNKNOWN_PARTITION",
        "read": "UNKNOWN_TOPIC_OR_PART",
    }
)
def what_is_not_there(cluster: Cluster) -> Any:
    """Writing to an unknown topic or partition, and reading from one, ends in an error."""
    producer = cluster.producer(
        allow_auto_create_topics=False,
        topic_metadata_propagation_max_ms=0,
        message_timeout_ms=3000,
    )
    reader = Member(
        cluster, cluster.name("group"), [cluster.name()], allow_auto_create_topics=False
    )
    drive([reader], lambda: reader.errors)
    return {
        "topic": error_of_produce(producer, cluster.name(), 0),
        "partition": error_of_produce(producer, cluster.topic(), 5),
        "read": reader.errors[0],
    }


def error_of_produce(producer: Any, topic: str, partition: int) -> str | None:
    """The client refuses at once what it already knows, and by its report what it learns."""
    try:
        return sent_errors(producer, topic, "x", partition)
    except KafkaException as failure:
        return str(failure.args[0].name())


@scenario(expected={"bounds": (0, 10), "from 7": ["7", "8", "9"], "last": ["9"], "end": []})
def reading_from_anywhere(cluster: Cluster) -> Any:
    """A reader may start at the beginning, at the end and anywhere between."""
    topic = cluster.topic()
    fill(cluster, topic, 10)
    consumer = cluster.consumer()
    return {
        "bounds": consumer.get_watermark_offsets(TopicPartition(topic, 0), REQUEST_TIMEOUT_S),
        "from 7": values(read_to_end(cluster, topic, start=7)),
        "last": values(read_to_end(cluster, topic, start=9)),
        "end": values(read_to_end(cluster, topic, start=OFFSET_END)),
    }


@scenario(expected=[(0, 0), (1, 2), (2, 2), (3, -1)])
def offsets_by_time(cluster: Cluster) -> Any:
    """A time leads to the first record that is not older; one after the last leads nowhere."""
    topic = cluster.topic()
    producer = cluster.producer()
    for time_ms in (0, 0, 2, 1):
        send(producer, topic, ["x"], timestamp=LONG_AGO_MS + time_ms)
    consumer = cluster.consumer()
    offsets = []
    for time_ms in (0, 1, 2, 3):
        at = [TopicPartition(topic, 0, LONG_AGO_MS + time_ms)]
        (answer,) = consumer.offsets_for_times(at, timeout=REQUEST_TIMEOUT_S)
        offsets.append((time_ms, answer.offset))
    return offsets


@scenario(expected={"low": 4, "left": ["4", "5"], "all": (6, 6), "then": ["6"]})
def deleted_records(cluster: Cluster) -> Any:
    """What is before an offset can be deleted; offsets go on where they were."""
    topic = cluster.topic()
    fill(cluster, topic, 6)
    part = TopicPartition(topic, 0, 4)
    low = cluster.admin.delete_records([part])[part].result(REQUEST_TIMEOUT_S).low_watermark
    left = values(read_to_end(cluster, topic, start=OFFSET_BEGINNING))
    everything = TopicPartition(topic, 0, OFFSET_END)
    cluster.admin.delete_records([everything])[everything].result(REQUEST_TIMEOUT_S)
    bounds = cluster.consumer().get_watermark_offsets(part, REQUEST_TIMEOUT_S)
    fill(cluster, topic, 1, first=6)
    return {
        "low": low,
        "left": left,
        "all": bounds,
        "then": values(read_to_end(cluster, topic, start=OFFSET_BEGINNING)),
    }


@scenario(expected=[str(number) for number in range(500)])
def an_idempotent_producer(cluster: Cluster) -> Any:
    """An idempotent producer with many requests in flight writes each record once, in order."""
    topic = cluster.topic()
    producer = cluster.producer(
        enable_idempotence=True, batch_num_messages=7, max_in_flight_requests_per_connection=5
    )
    send(producer, topic, map(str, range(500)))
    return values(read_to_end(cluster, topic))


@scenario(expected={"made": True, "read": ["x"], "refused": True})
def topics_made_by_writing(cluster: Cluster) -> Any:
    """A producer's first record makes its topic; a reader that may not, does not."""
    topic = cluster.name()
    send(cluster.producer(), topic, ["x"])
    other = cluster.name()
    asked = cluster.consumer(allow_auto_create_topics=False).list_topics(
        other, timeout=REQUEST_TIMEOUT_S
    )
    return {
        "made": topic in cluster.admin.list_topics(timeout=REQUEST_TIMEOUT_S).topics,
        "read": values(read_to_end(cluster, topic)),
        "refused": asked.topics[other].error is not None,
    }
