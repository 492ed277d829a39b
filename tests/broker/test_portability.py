"""What is not on every system has a stand-in: the broker without uvloop, sendfile and the like.

macOS is not where these tests run; this takes from Linux what macOS lacks.
"""

from __future__ import annotations

import asyncio
import os

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.testing import Broker

LARGE = os.urandom(400_000)


@pytest.fixture
def bare_system(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.testing.broker.run_loop", asyncio.run)
    monkeypatch.setattr("penstock.broker.connection._HAS_SENDFILE", False)
    monkeypatch.setattr("penstock.log.disk._pwritev", None)
    monkeypatch.delattr(os, "memfd_create")


@pytest.mark.usefixtures("bare_system")
@pytest.mark.parametrize("durability", ["disk", "os", "memory"])
def test_records_go_in_and_come_out(durability: str) -> None:
    with Broker(durability=durability) as broker:
        admin = AdminClient({"bootstrap.servers": broker.bootstrap})
        admin.create_topics([NewTopic("large", 1, 1)])["large"].result(60)
        producer = Producer({"bootstrap.servers": broker.bootstrap})
        for number in range(8):
            producer.produce("large", LARGE, key=str(number))
        assert producer.flush(60) == 0
        consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "none"})
        consumer.assign([TopicPartition("large", 0, 0)])
        messages = [consumer.poll(30) for _ in range(8)]
        consumer.close()
        assert [message.key() for message in messages if message] == [b"%d" % n for n in range(8)]
        assert all(message and message.value() == LARGE for message in messages)
