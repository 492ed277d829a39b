"""`penstock migrate` while producers write: killed in the middle, cut off, cut over on request."""

from __future__ import annotations

import random
from pathlib import Path

import orjson
from confluent_kafka import TopicPartition

from penstock.testing.apache_kafka import ApacheKafka
from penstock.testing.broker import Broker
from penstock.testing.process import BrokerProcess
from tests.cli import migrating
from tests.cli.migrating import (
    Command,
    Writer,
    commit,
    committed,
    create,
    extent,
    read,
    rows,
    values,
)

PARTITIONS = 2
KILLS = 4


def count_of(bootstrap: str, topic: str) -> int:
    return sum(len(read(bootstrap, topic, number)) for number in range(PARTITIONS))


def test_killed_again_and_again_nothing_is_lost_or_twice(
    broker: Broker, apache_kafka: ApacheKafka, topic: str, seed: int
) -> None:
    chance = random.Random(seed)
    create(broker.bootstrap, topic, PARTITIONS)
    way = ("--from", broker.bootstrap, "--to", apache_kafka.bootstrap, "--topic", topic)
    # Small transactions, so that there is a middle to be killed in.
    how = ("--batch", "20", "--follow")
    with Writer(broker.bootstrap, topic, PARTITIONS) as writer:
        migrating.until(lambda: extent(broker.bootstrap, topic, PARTITIONS) > 200)
        there = 0
        for _ in range(KILLS):
            with Command(*way, *how) as command:
                wanted = there + chance.randrange(1, 200)
                migrating.until(lambda: extent(apache_kafka.bootstrap, topic, PARTITIONS) >= wanted)  # noqa: B023
                command.kill()
            there = extent(apache_kafka.bootstrap, topic, PARTITIONS)
    commit(broker.bootstrap, f"g-{topic}", TopicPartition(topic, 1, 17))
    status, out, err = Command(*way, "--json").wait()
    assert status == 0, err
    summary = orjson.loads(out)
    assert {part["verdict"] for part in summary["topics"][0]["partitions"]} == {"same"}
    for number in range(PARTITIONS):
        expected = rows(broker.bootstrap, topic, number)
        assert rows(apache_kafka.bootstrap, topic, number) == expected
    assert count_of(apache_kafka.bootstrap, topic) == writer.count
    # Offsets are translated across all the runs, each of which has left markers.
    place, _ = committed(apache_kafka.bootstrap, f"g-{topic}")[topic, 1]
    expected_values = values(broker.bootstrap, topic, 1, start=17)
    assert values(apache_kafka.bootstrap, topic, 1, start=place) == expected_values


def test_following_until_the_cut_over(
    broker: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    create(broker.bootstrap, topic, PARTITIONS)
    way = ("--from", broker.bootstrap, "--to", apache_kafka.bootstrap, "--topic", topic)
    with Command(*way, "--follow", "--json") as command:
        with Writer(broker.bootstrap, topic, PARTITIONS) as writer:
            migrating.until(lambda: extent(apache_kafka.bootstrap, topic, PARTITIONS) > 300)
        # Producers have stopped; now finish.
        command.interrupt()
        status, out, err = command.wait()
    assert status == 0, err
    assert "finishing" in err
    summary = orjson.loads(out)
    assert summary["ok"]
    assert summary["records"] == writer.count
    for number in range(PARTITIONS):
        expected = rows(broker.bootstrap, topic, number)
        assert rows(apache_kafka.bootstrap, topic, number) == expected


def test_the_target_dies_and_comes_back(broker: Broker, topic: str, tmp_path: Path) -> None:
    """The command goes on by itself: what was open is tried again, what was decided counts."""
    create(broker.bootstrap, topic, PARTITIONS)
    with BrokerProcess(tmp_path / "data", durability="disk") as target:
        way = ("--from", broker.bootstrap, "--to", target.bootstrap, "--topic", topic)
        with Command(*way, "--follow", "--batch", "20", "--json") as command:
            with Writer(broker.bootstrap, topic, PARTITIONS) as writer:
                migrating.until(lambda: extent(target.bootstrap, topic, PARTITIONS) > 100)
                target.kill()
                target.start()
                migrating.until(lambda: extent(target.bootstrap, topic, PARTITIONS) > 500)
            command.interrupt()
            status, out, err = command.wait()
        assert status == 0, err
        assert orjson.loads(out)["records"] == writer.count
        for number in range(PARTITIONS):
            expected = rows(broker.bootstrap, topic, number)
            assert rows(target.bootstrap, topic, number) == expected
