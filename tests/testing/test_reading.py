"""A whole topic as another client reads it."""

from __future__ import annotations

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.testing import Broker
from penstock.testing.reading import read_messages, read_topic


def test_what_is_committed_by_partition_and_offset() -> None:
    with Broker() as broker:
        at: dict[str, str | int | float | bool] = {"bootstrap.servers": broker.bootstrap}
        admin = AdminClient(at)
        admin.create_topics([NewTopic("t", 3)])["t"].result(30)
        producer = Producer({**at, "transactional.id": "test"})
        producer.init_transactions(30)
        for ends, values in (
            (producer.commit_transaction, "abc"),
            (producer.abort_transaction, "x"),
        ):
            producer.begin_transaction()
            for number, value in enumerate(values):
                producer.produce("t", value, f"k{value}", partition=number % 2, headers={"h": "1"})
            producer.flush(30)
            ends(30)
        found = read_topic(broker.bootstrap, "t")
        assert [(each.partition, each.offset, each.value) for each in found] == [
            (0, 0, b"a"), (0, 1, b"c"), (1, 0, b"b"),
        ]  # fmt: skip
        assert found[0].key == b"ka"
        assert found[0].headers == {"h": b"1"}
        everything = read_messages(broker.bootstrap, "t", isolation="read_uncommitted")
        assert [each.value() for each in everything] == [b"a", b"c", b"x", b"b"]


def test_a_topic_that_is_not_there_has_no_records() -> None:
    with Broker() as broker:
        assert read_topic(broker.bootstrap, "nothing") == []


def test_what_is_still_open_is_not_there_yet() -> None:
    with Broker() as broker:
        producer = Producer({"bootstrap.servers": broker.bootstrap, "transactional.id": "test"})
        producer.init_transactions(30)
        producer.begin_transaction()
        producer.produce("t", "a")
        producer.flush(30)
        assert read_topic(broker.bootstrap, "t") == []
        producer.commit_transaction(30)
        assert [each.value for each in read_topic(broker.bootstrap, "t")] == [b"a"]
