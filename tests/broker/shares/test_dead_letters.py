"""Records that a group gives up: where they go, what is told of them, and that none is lost."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.records.record import Record, encode
from penstock.testing.broker import Broker
from tests.broker.disks import HastyDisk
from tests.broker.raw import RawClient
from tests.broker.requests import (
    alter,
    create,
    delete_records,
    fetch,
    new_name,
    now_ms,
    one,
    records_of,
)
from tests.broker.shares.members import (
    ACCEPT,
    REJECT,
    RELEASE,
    Taker,
    fill,
    new_queue,
    numbered,
    send_batch,
    set_group,
)
from tests.broker.waits import wait_until

NEVER_MS = 3_600_000


def letters(broker: Broker, topic: str, count: int, partition: int = 0) -> list[Record]:
    """The dead letters in a partition, once there are so many."""
    wait_until(
        broker, lambda server: getattr(server.partition(topic, partition), "visible", 0) >= count
    )
    with RawClient(broker.bootstrap) as client:
        found = records_of(one(client.call(fetch(topic, {partition: 0}), 12)).records)
    assert len(found) == count
    return found


def settled(broker: Broker, group: str, start: int) -> None:
    """Until the group is done with everything before `start`."""
    wait_until(
        broker,
        lambda server: all(
            queue.share.start >= start for queue in server.coordination.shares.queues_of(group)
        ),
    )


def told(letter: Record) -> dict[str, str]:
    return {
        name.removeprefix("__dlq.errors."): (value or b"").decode()
        for name, value in letter.headers
        if name.startswith("__dlq.errors.")
    }


def test_rejected_records_go_to_the_dead_letter_topic(shared: Broker) -> None:
    dlq = new_name("dlq.")
    topic, group = new_queue(shared, partitions=2, errors_deadletterqueue_topic_name=dlq)
    record = Record(0, now_ms(), b"key", b"value", (("trace", b"1"), ("none", None)))
    send_batch(shared, topic, encode([record, record._replace(offset=1, value=b"good")]), 1)
    with Taker(shared, group, topic) as taker:
        taker.fetch_all(partitions=[1])
        assert taker.acknowledge((0, 1, [REJECT, ACCEPT]), partition=1) == "NONE"
    (letter,) = letters(shared, dlq, 1)
    assert (letter.key, letter.value) == (b"key", b"value")
    assert letter.headers[:2] == (("trace", b"1"), ("none", None))
    assert told(letter) == {
        "topic": topic,
        "partition": "1",
        "offset": "0",
        "group": group,
        "delivery.count": "1",
        "message": "rejected by the consumer",
    }
    settled(shared, group, 2)


def test_records_delivered_too_often_go_there_too(shared: Broker) -> None:
    dlq = new_name("dlq.")
    topic, group = new_queue(
        shared, errors_deadletterqueue_topic_name=dlq, share_delivery_count_limit="2"
    )
    fill(shared, topic, b"a", b"b", b"c")
    with Taker(shared, group, topic) as taker:
        taker.fetch()
        taker.acknowledge((0, 2, [ACCEPT, RELEASE, ACCEPT]))
        assert taker.fetch().acquired == [(1, 1, 2)]
        taker.acknowledge((1, 1, RELEASE))
        assert taker.fetch().acquired == []
    (letter,) = letters(shared, dlq, 1)
    assert letter.value == b"b"
    assert told(letter)["delivery.count"] == "2"
    assert "limit" in told(letter)["message"]
    settled(shared, group, 3)


def test_without_the_record_a_letter_says_where_it_is(shared: Broker) -> None:
    dlq = new_name("dlq.")
    topic, group = new_queue(
        shared,
        errors_deadletterqueue_topic_name=dlq,
        errors_deadletterqueue_copy_record_enable="false",
    )
    fill(shared, topic, b"secret", key=b"k")
    with Taker(shared, group, topic) as taker:
        taker.fetch()
        taker.acknowledge((0, 0, REJECT))
    (letter,) = letters(shared, dlq, 1)
    assert (letter.key, letter.value) == (None, None)
    assert told(letter)["offset"] == "0"


def test_a_whole_batch_of_letters(shared: Broker) -> None:
    dlq = new_name("dlq.")
    topic, group = new_queue(shared, errors_deadletterqueue_topic_name=dlq)
    for at in range(4):
        fill(shared, topic, *numbered(500, at * 500), codec=1)
    with Taker(shared, group, topic) as taker:
        got = taker.fetch(max_records=2_000)
        assert taker.acknowledge((0, got.offsets[-1], REJECT)) == "NONE"
        found = letters(shared, dlq, got.offsets[-1] + 1)
    assert [letter.value for letter in found] == numbered(got.offsets[-1] + 1)


def test_letters_that_are_too_large_together_go_apart(shared: Broker) -> None:
    dlq = new_name("dlq.")
    with RawClient(shared.bootstrap) as client:
        client.call(create(dlq, configs={"max.message.bytes": "2000"}))
    topic, group = new_queue(shared, errors_deadletterqueue_topic_name=dlq)
    fill(shared, topic, b"x" * 900, b"y" * 900, b"z" * 900, b"!" * 5_000)
    with Taker(shared, group, topic) as taker:
        taker.fetch()
        taker.acknowledge((0, 3, REJECT))
    found = letters(shared, dlq, 4)
    # What does not fit at all stays where it is, and the letter says where.
    assert [len(letter.value or b"") for letter in found] == [900, 900, 900, 0]
    assert told(found[3])["offset"] == "3"
    settled(shared, group, 4)


def test_a_letter_that_was_sent_back_and_died_again_tells_of_its_last_death(
    shared: Broker,
) -> None:
    dlq = new_name("dlq.")
    topic, group = new_queue(shared, errors_deadletterqueue_topic_name=dlq)
    old = (("__dlq.errors.topic", b"elsewhere"), ("mine", b"1"))
    send_batch(shared, topic, encode([Record(0, now_ms(), None, b"v", old)]))
    with Taker(shared, group, topic) as taker:
        taker.fetch()
        taker.acknowledge((0, 0, REJECT))
    (letter,) = letters(shared, dlq, 1)
    assert [name for name, _ in letter.headers].count("__dlq.errors.topic") == 1
    assert told(letter)["topic"] == topic


def test_what_cannot_be_written_is_tried_again(shared: Broker) -> None:
    dlq = new_name("dlq.")
    with RawClient(shared.bootstrap) as client:
        client.call(create(dlq, configs={"errors.deadletterqueue.group.enable": "false"}))
        topic, group = new_queue(shared, errors_deadletterqueue_topic_name=dlq)
        fill(shared, topic, b"x", b"y")
        with Taker(shared, group, topic) as taker:
            taker.fetch()
            assert taker.acknowledge((0, 1, [REJECT, ACCEPT])) == "NONE"
            # Rejected, but not finished: and not delivered again either.
            assert taker.fetch().acquired == []
        client.call(alter(dlq, (0, "errors.deadletterqueue.group.enable", "true")))
    (letter,) = letters(shared, dlq, 1)
    assert letter.value == b"x"
    settled(shared, group, 2)


def test_a_record_that_is_gone_from_the_log_holds_nothing_up(shared: Broker) -> None:
    dlq = new_name("dlq.")
    with RawClient(shared.bootstrap) as client:
        client.call(create(dlq, configs={"errors.deadletterqueue.group.enable": "false"}))
        topic, group = new_queue(shared, errors_deadletterqueue_topic_name=dlq)
        fill(shared, topic, b"x", b"y")
        with Taker(shared, group, topic) as taker:
            taker.fetch()
            taker.acknowledge((0, 0, REJECT))
        client.call(delete_records(topic, 1))
        client.call(alter(dlq, (0, "errors.deadletterqueue.group.enable", "true")))
    settled(shared, group, 1)


def test_a_group_without_the_topic_drops_them(shared: Broker) -> None:
    dlq = new_name("dlq.")
    topic, group = new_queue(shared, errors_deadletterqueue_topic_name=dlq)
    set_group(shared, group, errors_deadletterqueue_topic_name="")
    fill(shared, topic, b"x")
    with Taker(shared, group, topic) as taker:
        taker.fetch()
        taker.acknowledge((0, 0, REJECT))
    settled(shared, group, 1)
    assert shared.call(lambda server: dlq not in server.catalog.topics)


def test_a_group_that_reads_its_own_dead_letters_keeps_them_until_it_has_another_topic(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Broker(disk=HastyDisk(), housekeeping_interval_ms=NEVER_MS) as broker:
        topic, group = new_queue(broker)
        # Nothing is known yet of what the group will read.
        set_group(broker, group, errors_deadletterqueue_topic_name=topic)
        fill(broker, topic, b"x")
        with Taker(broker, group, topic) as taker:
            taker.fetch()
            taker.acknowledge((0, 0, REJECT))
        wait_until(broker, lambda _: f"the group itself reads {topic!r}" in caplog.text)
        assert broker.call(lambda server: server.partition(topic, 0).visible) == 1  # type: ignore[union-attr]
        (queue,) = broker.call(lambda server: list(server.coordination.shares.queues_of(group)))
        assert queue.share.start == 0
        dlq = new_name("dlq.")
        set_group(broker, group, errors_deadletterqueue_topic_name=dlq)
        (letter,) = letters(broker, dlq, 1)
        assert letter.value == b"x"
        settled(broker, group, 1)


def test_a_topic_that_the_group_reads_is_refused_for_its_dead_letters(shared: Broker) -> None:
    topic, group = new_queue(shared)
    fill(shared, topic, b"x")
    with Taker(shared, group, topic) as taker:
        taker.fetch()
        with pytest.raises(AssertionError, match="the group itself reads"):
            set_group(shared, group, errors_deadletterqueue_topic_name=topic)
    set_group(shared, group, errors_deadletterqueue_topic_name=new_name("dlq."))


@pytest.fixture
def durable() -> Iterator[Broker]:
    with Broker(disk=HastyDisk(), durability="disk", housekeeping_interval_ms=NEVER_MS) as own:
        yield own


def test_letters_that_were_due_at_a_crash_are_written_after_it(durable: Broker) -> None:
    dlq = new_name("dlq.")
    with RawClient(durable.bootstrap) as client:
        client.call(create(dlq, configs={"errors.deadletterqueue.group.enable": "false"}))
    topic, group = new_queue(durable, errors_deadletterqueue_topic_name=dlq)
    fill(durable, topic, b"x", b"y", b"z")
    with Taker(durable, group, topic) as taker:
        taker.fetch()
        assert taker.acknowledge((0, 1, [REJECT, ACCEPT])) == "NONE"
    durable.crash()
    durable.start()
    with Taker(durable, group, topic) as taker:
        # Only what nobody had answered for.
        assert taker.fetch().acquired == [(2, 2, 2)]
        taker.acknowledge((2, 2, ACCEPT))
        taker.client.call(alter(dlq, (0, "errors.deadletterqueue.group.enable", "true")))
    assert [letter.value for letter in letters(durable, dlq, 1)] == [b"x"]
    settled(durable, group, 3)
