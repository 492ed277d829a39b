"""What is not on every system has a stand-in: the broker without uvloop, sendfile and the like.

macOS is not where these tests run; this takes from Linux what macOS lacks.
"""

from __future__ import annotations

import asyncio
import errno
import os

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from penstock.testing import Broker
from tests.broker import requests as rq
from tests.broker.raw import RawClient

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


def test_without_a_descriptor_for_sendfile_records_are_sent_as_other_answers_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refused: list[int] = []

    def dup(descriptor: int) -> int:
        refused.append(descriptor)
        raise OSError(errno.EMFILE, "Too many open files")

    with Broker(durability="disk") as broker, RawClient(broker.bootstrap) as client:
        client.call(rq.create("large"))
        client.call(rq.produce("large", rq.batch(LARGE)), 9)
        monkeypatch.setattr(os, "dup", dup)
        data = rq.one(client.call(rq.fetch("large"), 12)).records
        assert [record.value for record in rq.records_of(data)] == [LARGE]
        assert refused
        client.call(rq.metadata("large"))
