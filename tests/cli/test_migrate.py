"""`penstock migrate` to a real Apache Kafka: what arrives, what is said, what is refused."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

import pytest
from confluent_kafka import Consumer, ShareConsumer, TopicPartition

from penstock.cli.migration import engine, groups
from penstock.cli.migration.ends import End
from penstock.cli.migration.groups import find_groups
from penstock.cli.migration.plan import TopicPlan, prepare
from penstock.testing.apache_kafka import ApacheKafka
from penstock.testing.broker import Broker
from penstock.testing.java_client import NewRecord
from penstock.testing.kafka_tools import KafkaTools
from tests.broker.group_requests import commit as offset_commit
from tests.broker.groups.streams_members import StreamsClient, settle, stateless
from tests.broker.raw import RawClient
from tests.broker.shares.members import set_group
from tests.cli import migrating
from tests.cli.migrating import (
    Row,
    clients,  # noqa: F401
    commit,
    committed,
    create,
    fill,
    numbers,
    read,
    rows,
    short_waits,  # noqa: F401
    values,
)
from tests.cli.runner import Ran, run

NOW_MS = 1_700_000_000_000


def migrate(source: Any, target: Any, *args: str) -> Ran:
    return run("migrate", "--from", source.bootstrap, "--to", target.bootstrap, *args)


def test_everything_arrives(broker: Broker, apache_kafka: ApacheKafka, topic: str) -> None:
    settings = {"retention_ms": "-1", "durability": "os", "segment_bytes": "1048576"}
    create(broker.bootstrap, topic, 3, **settings)
    headers = [("a", b"1"), ("a", None), ("é", b"\xff\x00")]
    fill(broker.bootstrap, topic, [b"v"], 0, key=b"k", headers=headers, timestamp=NOW_MS)
    fill(broker.bootstrap, topic, [None, b""], 1, key=b"")
    fill(broker.bootstrap, topic, [b"\xff" * 70_000, b"no key"], 2)
    done = migrate(broker, apache_kafka, "--topic", topic, "--json").ok().json
    for number in range(3):
        expected = rows(broker.bootstrap, topic, number)
        assert rows(apache_kafka.bootstrap, topic, number) == expected
    assert rows(apache_kafka.bootstrap, topic, 0) == [Row(b"k", b"v", NOW_MS, tuple(headers))]
    (moved,) = done["topics"]
    assert [part["copied"] for part in moved["partitions"]] == [1, 2, 2]
    for part in moved["partitions"]:
        assert part["verdict"] == "same"
        assert part["source"] == part["target"]
    assert [item["name"] for item in moved["left_out"]] == ["durability"]
    assert migrating.setting(apache_kafka.bootstrap, topic, "segment.bytes") == "1048576"


def test_a_dry_run_does_nothing(broker: Broker, apache_kafka: ApacheKafka, topic: str) -> None:
    create(broker.bootstrap, topic, 2, durability="os")
    fill(broker.bootstrap, topic, [b"x"])
    commit(broker.bootstrap, f"g-{topic}", TopicPartition(topic, 0, 1))
    shown = migrate(broker, apache_kafka, "--topic", topic, "--dry-run").ok()
    assert "will be made" in shown.out
    assert "durability=os is left out" in shown.err
    plan = migrate(broker, apache_kafka, "--topic", topic, "--dry-run", "--json").ok().json
    assert plan["topics"][0]["partitions"] == 2
    assert plan["groups"] == [{"group": f"g-{topic}", "offsets": 1, "busy": False}]
    there = migrating.admin(apache_kafka.bootstrap).list_topics(timeout=60).topics
    assert topic not in there


def test_a_second_run_brings_what_came_since(
    broker: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    create(broker.bootstrap, topic)
    fill(broker.bootstrap, topic, numbers(0, 10))
    for expected in (10, 0):
        done = migrate(broker, apache_kafka, "--topic", topic, "--json").ok().json
        assert done["records"] == expected
    fill(broker.bootstrap, topic, numbers(10, 5))
    done = migrate(broker, apache_kafka, "--topic", topic, "--json").ok().json
    # Only what is new is compared, and it is the same on both sides.
    assert done["topics"][0]["partitions"][0]["target"]["records"] == 5
    assert done["topics"][0]["partitions"][0]["verdict"] == "same"
    assert values(apache_kafka.bootstrap, topic) == numbers(0, 15)


def test_old_records_and_the_logs_own_times_are_kept(
    broker: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    """The target's settings would remove old records and give them new times: they come last."""
    stamped = create(broker.bootstrap, f"{topic}-stamped", message_timestamp_type="LogAppendTime")
    aged = create(broker.bootstrap, f"{topic}-aged", retention_ms="3600000000000")
    fill(broker.bootstrap, stamped, numbers(0, 3))
    fill(broker.bootstrap, aged, numbers(0, 3), timestamp=1)
    migrate(broker, apache_kafka, "--topic", f"{topic}-*").ok()
    for name in (stamped, aged):
        assert rows(apache_kafka.bootstrap, name) == rows(broker.bootstrap, name)
    assert (
        migrating.setting(apache_kafka.bootstrap, stamped, "message.timestamp.type")
        == "LogAppendTime"
    )
    assert migrating.setting(apache_kafka.bootstrap, aged, "retention.ms") == "3600000000000"
    assert migrating.setting(apache_kafka.bootstrap, stamped, "retention.ms") == "604800000"


def test_times_that_cannot_be_written_are_said(
    broker: Broker, apache_kafka: ApacheKafka, kafka_tools: KafkaTools, topic: str
) -> None:
    create(broker.bootstrap, topic, retention_ms="-1")
    with kafka_tools.java_client(broker.bootstrap) as java:
        java.produce(topic, [NewRecord(b"x", partition=0, timestamp_ms=0)])
    done = migrate(broker, apache_kafka, "--topic", topic).ok()
    assert "1 record had a timestamp of 1970" in done.err
    assert rows(apache_kafka.bootstrap, topic) == [Row(None, b"x", 1, ())]


def test_aborted_records_stay_behind_and_every_offset_is_translated(
    broker: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    create(broker.bootstrap, topic)
    writer = migrating.producer(broker.bootstrap, transactional_id=topic)
    writer.init_transactions(10)
    for number, ends in enumerate(["commit", "abort", "commit", "abort", "commit"]):
        writer.begin_transaction()
        for letter in "abc"[: 1 + number % 3]:
            writer.produce(topic, f"{ends} {number}{letter}", partition=0)
        writer.flush(60)
        if ends == "commit":
            writer.commit_transaction(10)
        else:
            writer.abort_transaction(10)
    end = read(broker.bootstrap, topic)[-1].offset()
    assert end is not None
    # A group at each offset there is: at records, aborted ones, markers, and behind them all.
    names = {offset: f"{topic}-{offset}" for offset in range(end + 3)}
    for offset, name in names.items():
        commit(broker.bootstrap, name, TopicPartition(topic, 0, offset, metadata="kept"))
    # Small transactions leave markers, and so gaps, in the target too.
    done = migrate(broker, apache_kafka, "--topic", topic, "--batch", "2", "--json").ok().json
    assert {moved["outcome"] for moved in done["groups"]} == {"moved"}
    assert b"abort" not in b"".join(v or b"" for v in values(apache_kafka.bootstrap, topic))
    for offset, name in names.items():
        place, metadata = committed(apache_kafka.bootstrap, name)[topic, 0]
        expected = values(broker.bootstrap, topic, start=offset)
        assert values(apache_kafka.bootstrap, topic, start=place) == expected
        assert metadata == "kept"


def test_an_open_transaction_is_waited_for(
    broker: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    create(broker.bootstrap, topic)
    fill(broker.bootstrap, topic, [b"before"])
    writer = migrating.producer(broker.bootstrap, transactional_id=topic)
    writer.init_transactions(10)
    writer.begin_transaction()
    writer.produce(topic, b"open", partition=0)
    writer.flush(60)
    fill(broker.bootstrap, topic, [b"after"])
    done = migrate(broker, apache_kafka, "--topic", topic).ok()
    assert f"{topic}-0: records from offset 1 on are behind an open transaction" in done.err
    assert values(apache_kafka.bootstrap, topic) == [b"before"]
    writer.commit_transaction(10)
    done = migrate(broker, apache_kafka, "--topic", topic).ok()
    assert "open transaction" not in done.err
    assert values(apache_kafka.bootstrap, topic) == [b"before", b"open", b"after"]


def test_a_compacted_topic_has_gaps(apache_kafka: ApacheKafka, topic: str) -> None:
    with Broker(housekeeping_interval_ms=50) as source:
        create(
            source.bootstrap,
            topic,
            cleanup_policy="compact",
            segment_bytes="4096",
            min_cleanable_dirty_ratio="0.01",
        )
        for number in range(300):
            fill(source.bootstrap, topic, [b"%d" % number * 20], key=b"k%d" % (number % 5))
        migrating.until(lambda: len(read(source.bootstrap, topic)) < 150)
        offsets = [message.offset() for message in read(source.bootstrap, topic)]
        committed_at = offsets[len(offsets) // 2]
        assert committed_at is not None
        commit(source.bootstrap, f"g-{topic}", TopicPartition(topic, 0, committed_at - 1))
        done = migrate(source, apache_kafka, "--topic", topic, "--json").ok().json
        expected = rows(source.bootstrap, topic)
        (part,) = done["topics"][0]["partitions"]
        assert part["verdict"] in ("same", "source changed since")
        assert len(rows(apache_kafka.bootstrap, topic)) == part["copied"]
        assert rows(apache_kafka.bootstrap, topic)[-len(expected) :][-1] == expected[-1]
        place, _ = committed(apache_kafka.bootstrap, f"g-{topic}")[topic, 0]
        # A value says where it was in the source, which goes on being compacted.
        copied = [
            int(each[: len(each) // 20]) for each in values(apache_kafka.bootstrap, topic) if each
        ]
        later = len(values(apache_kafka.bootstrap, topic, start=place))
        assert all(number < committed_at - 1 for number in copied[:-later])
        assert all(number >= committed_at - 1 for number in copied[-later:])
        assert migrating.setting(apache_kafka.bootstrap, topic, "cleanup.policy") == "compact"


def test_a_group_goes_on_with_the_next_unread_record(
    broker: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    create(broker.bootstrap, topic)
    fill(broker.bootstrap, topic, numbers(0, 20))
    config = {
        "group.id": f"g-{topic}",
        "auto.offset.reset": "error",
        "enable.auto.commit": False,
        "log_level": 0,
    }
    commit(broker.bootstrap, f"g-{topic}", TopicPartition(topic, 0, 13))
    migrate(broker, apache_kafka, "--topic", topic, "--batch", "4").ok()
    consumer = Consumer({**config, "bootstrap.servers": apache_kafka.bootstrap})
    try:
        consumer.subscribe([topic])
        found = consumer.consume(7, 20)
        assert [message.value() for message in found] == numbers(13, 7)
        consumer.commit(asynchronous=False)
    finally:
        consumer.close()
    # It has moved over; what it reads there from now on is its own business.
    done = migrate(broker, apache_kafka, "--topic", topic, "--json").ok().json
    assert [moved["outcome"] for moved in done["groups"]] == ["further already"]


def test_a_group_that_is_busy_in_the_target_is_said(
    broker: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    create(broker.bootstrap, topic)
    fill(broker.bootstrap, topic, numbers(0, 3))
    migrate(broker, apache_kafka, "--topic", topic).ok()
    commit(broker.bootstrap, f"g-{topic}", TopicPartition(topic, 0, 1))
    consumer = Consumer(
        {"bootstrap.servers": apache_kafka.bootstrap, "group.id": f"g-{topic}", "log_level": 0}
    )
    try:
        consumer.subscribe([topic])
        migrating.until(lambda: consumer.poll(0.05) is None and consumer.assignment())
        failed = migrate(broker, apache_kafka, "--topic", topic)
        assert failed.status == 1
        assert f"group g-{topic}" in failed.err
        assert "stop its members" in failed.err
    finally:
        consumer.close()
    migrate(broker, apache_kafka, "--topic", topic).ok()


def test_what_is_refused(broker: Broker, apache_kafka: ApacheKafka, topic: str) -> None:
    create(broker.bootstrap, topic)
    same = migrate(broker, broker)
    assert (same.status, "same cluster" in same.err) == (1, True)
    unknown = migrate(broker, apache_kafka, "--topic", "no-such-topic")
    assert (unknown.status, "no topic no-such-topic" in unknown.err) == (1, True)
    create(apache_kafka.bootstrap, topic, 2)
    more = migrate(broker, apache_kafka, "--topic", topic)
    assert (more.status, "2 partitions in the target" in more.err) == (1, True)
    nobody = run("migrate", "--from", broker.bootstrap, "--to", "127.0.0.1:1")
    assert (nobody.status, "no broker answers" in nobody.err) == (1, True)
    assert run("migrate").status == 2


def test_records_of_others_in_the_target_are_not_mixed_with(
    broker: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    create(broker.bootstrap, topic)
    fill(broker.bootstrap, topic, [b"ours"])
    create(apache_kafka.bootstrap, topic)
    fill(apache_kafka.bootstrap, topic, [b"theirs"])
    refused = migrate(broker, apache_kafka, "--topic", topic)
    assert (refused.status, "did not write" in refused.err) == (1, True)
    assert values(apache_kafka.bootstrap, topic) == [b"theirs"]


@pytest.mark.parametrize(
    ("more", "compared", "target_is"),
    [(0, "--verify", "apache"), (5, "--no-verify", "apache"), (5, "--verify", "penstock")],
)
def test_a_foreign_record_behind_ours_is_found_and_nothing_is_touched(
    more: int,
    compared: str,
    target_is: str,
    broker: Broker,
    apache_kafka: ApacheKafka,
    topic: str,
) -> None:
    create(broker.bootstrap, topic, retention_ms="86400000")
    fill(broker.bootstrap, topic, numbers(0, 5), timestamp=int(time.time() * 1000))
    commit(broker.bootstrap, f"g-{topic}", TopicPartition(topic, 0, 5))
    with Broker() as other:
        target: Any = apache_kafka if target_is == "apache" else other
        there = target.bootstrap
        migrate(broker, target, "--topic", topic, compared).ok()
        before = committed(there, f"g-{topic}")
        fill(there, topic, [b"foreign"])
        fill(broker.bootstrap, topic, numbers(5, more))
        failed = migrate(broker, target, "--topic", topic, "--json")
        assert failed.status == 1
        assert "was not written by this migration" in failed.err
        (part,) = failed.json["topics"][0]["partitions"]
        assert (part["verdict"], part["foreign_offset"]) == ("different", 6)
        assert "different" in migrate(broker, target, "--topic", topic).out
        # The group goes on with that record; the topic's own settings stay in force.
        assert committed(there, f"g-{topic}") == before
        assert values(there, topic, start=before[topic, 0][0]) == [b"foreign"]
        assert values(there, topic) == [*numbers(0, 5), b"foreign"]
        assert migrating.setting(there, topic, "retention.ms") == "86400000"


@pytest.mark.parametrize("compared_before", [False, True])
def test_a_foreign_record_among_ours_is_found(
    compared_before: bool, broker: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    """One that comes after the target was looked at, before the first record of this run."""
    create(broker.bootstrap, topic)
    fill(broker.bootstrap, topic, numbers(0, 5))
    first = "--verify" if compared_before else "--no-verify"
    migrate(broker, apache_kafka, "--topic", topic, first).ok()
    fill(broker.bootstrap, topic, numbers(5, 5))
    there = apache_kafka.bootstrap

    def also_theirs(target: End, plan: TopicPlan, replication: int | None) -> None:
        prepare(target, plan, replication)
        fill(there, topic, [b"foreign"])

    with patch.object(engine, "prepare", also_theirs):
        failed = migrate(broker, apache_kafka, "--topic", topic)
    assert failed.status == 1
    assert "different" in failed.out
    ours = 5 if compared_before else 10
    assert f"{ours} (" in failed.err
    assert f"{ours + 1} (" in failed.err


def test_no_offset_is_moved_over_a_record_that_was_not_copied(
    broker: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    """Even if nothing is compared, and the record comes at the last moment."""
    create(broker.bootstrap, topic)
    fill(broker.bootstrap, topic, numbers(0, 3))
    commit(broker.bootstrap, f"g-{topic}", TopicPartition(topic, 0, 3))
    there = apache_kafka.bootstrap

    def also_theirs(source: End, places: Any, wanted: Any) -> Any:
        fill(there, topic, [b"foreign"])
        return find_groups(source, places, wanted)

    with patch.object(groups, "find_groups", also_theirs):
        migrate(broker, apache_kafka, "--topic", topic, "--no-verify").ok()
    place, _ = committed(there, f"g-{topic}")[topic, 0]
    assert values(there, topic, start=place) == [b"foreign"]


def test_an_offset_that_the_group_has_changed_in_the_target_is_its_own(
    broker: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    create(broker.bootstrap, topic)
    fill(broker.bootstrap, topic, numbers(0, 10))
    there, group = apache_kafka.bootstrap, f"g-{topic}"

    def moved_to(source_offset: int) -> tuple[str, int]:
        commit(broker.bootstrap, group, TopicPartition(topic, 0, source_offset))
        shown = migrate(broker, apache_kafka, "--topic", topic, "--group", group, "--json")
        (moved,) = shown.ok().json["groups"]
        return moved["outcome"], committed(there, group)[topic, 0][0]

    assert moved_to(3) == ("moved", 3)
    # Still what a run has committed: it follows the source.
    assert moved_to(3) == ("moved", 3)
    assert moved_to(5) == ("moved", 5)
    commit(there, group, TopicPartition(topic, 0, 1))
    assert moved_to(7) == ("changed there", 1)
    shown = migrate(broker, apache_kafka, "--topic", topic, "--group", group).ok()
    assert "1 offset left alone: committed in the target by others" in shown.out


def test_a_target_that_was_deleted_is_filled_and_mapped_anew(
    broker: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    create(broker.bootstrap, topic)
    fill(broker.bootstrap, topic, numbers(0, 20))
    commit(broker.bootstrap, f"g-{topic}", TopicPartition(topic, 0, 13))
    there = apache_kafka.bootstrap
    for batch in ("2", "1000"):
        migrate(broker, apache_kafka, "--topic", topic, "--batch", batch).ok()
        place, _ = committed(there, f"g-{topic}")[topic, 0]
        assert values(there, topic, start=place) == numbers(13, 7)
        migrating.admin(there).delete_topics([topic])[topic].result(60)
        migrating.until(lambda: topic not in migrating.admin(there).list_topics(timeout=60).topics)


@pytest.mark.parametrize("overflow", ["block", "reject"])
def test_a_topic_that_stops_its_producers_at_its_bound(
    overflow: str, broker: Broker, topic: str
) -> None:
    settings = {"overflow": overflow, "overflow_groups": f"g-{topic}", "retention_bytes": "1048576"}
    create(broker.bootstrap, topic, 1, retention_ms="-1", **settings)
    with Broker() as target:
        for first in (0, 10, 20):
            fill(broker.bootstrap, topic, numbers(first, 10))
            migrate(broker, target, "--topic", topic).ok()
            assert values(target.bootstrap, topic) == numbers(0, first + 10)
            for name, value in settings.items():
                found = migrating.setting(target.bootstrap, topic, name.replace("_", "."))
                assert found == value


def test_partitions_that_are_added_later(
    broker: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    create(broker.bootstrap, topic)
    fill(broker.bootstrap, topic, numbers(0, 3))
    migrate(broker, apache_kafka, "--topic", topic).ok()
    run("topics", "alter", topic, "--partitions", "2", "-b", broker.bootstrap).ok()
    fill(broker.bootstrap, topic, numbers(3, 2), 1)
    migrate(broker, apache_kafka, "--topic", topic).ok()
    assert values(apache_kafka.bootstrap, topic, 1) == numbers(3, 2)


def test_a_topic_made_anew_is_another(
    broker: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    create(broker.bootstrap, topic)
    fill(broker.bootstrap, topic, numbers(0, 3))
    migrate(broker, apache_kafka, "--topic", topic).ok()
    migrating.admin(broker.bootstrap).delete_topics([topic])[topic].result(60)
    create(broker.bootstrap, topic)
    refused = migrate(broker, apache_kafka, "--topic", topic)
    assert (refused.status, "made anew" in refused.err) == (1, True)


def test_an_application_of_kafka_streams_goes_on(
    broker: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    create(broker.bootstrap, topic)
    fill(broker.bootstrap, topic, numbers(0, 5))
    group = f"s-{topic}"
    set_group(broker, group, streams_initial_rebalance_delay_ms="0")
    with RawClient(broker.bootstrap) as client:
        one = StreamsClient(client.call, group, "one", stateless(topic))
        one.beat()
        settle(one, tasks=1)
        client.call(offset_commit(group, topic, {0: 3}, member="one", generation=one.epoch), 9)
        one.leave()
    done = migrate(broker, apache_kafka, "--topic", topic, "--json").ok().json
    assert [(moved["group"], moved["outcome"]) for moved in done["groups"]] == [(group, "moved")]
    assert committed(apache_kafka.bootstrap, group)[topic, 0][0] == 3


def test_queues_are_said_to_stay_behind(
    broker: Broker, apache_kafka: ApacheKafka, topic: str
) -> None:
    create(broker.bootstrap, topic)
    queue = ShareConsumer(
        {"bootstrap.servers": broker.bootstrap, "group.id": f"q-{topic}", "log_level": 0}
    )
    try:
        queue.subscribe([topic])
        queue.poll(0.1)
        done = migrate(broker, apache_kafka, "--topic", topic, "--group", f"q-{topic}").ok()
        assert f"1 share group not moved (q-{topic})" in done.err
    finally:
        queue.close()


@pytest.mark.parametrize("way", ["kafka to penstock", "penstock to penstock"])
def test_other_ways(way: str, broker: Broker, apache_kafka: ApacheKafka, topic: str) -> None:
    with Broker(durability="disk") as target:
        source: Any = apache_kafka if way.startswith("kafka") else broker
        create(source.bootstrap, topic, 2, retention_ms="123456789")
        for number in range(2):
            fill(source.bootstrap, topic, numbers(0, 50), number, key=b"k", headers={"h": b"1"})
        commit(source.bootstrap, f"g-{topic}", TopicPartition(topic, 1, 30))
        for _ in range(2):
            migrate(source, target, "--topic", topic, "--group", f"g-{topic}", "--batch", "7").ok()
        for number in range(2):
            expected = rows(source.bootstrap, topic, number)
            assert rows(target.bootstrap, topic, number) == expected
        place, _ = committed(target.bootstrap, f"g-{topic}")[topic, 1]
        assert values(target.bootstrap, topic, 1, start=place) == numbers(30, 20)
        assert migrating.setting(target.bootstrap, topic, "retention.ms") == "123456789"
