"""Transactions: all or nothing, who is fenced, and what readers of committed records see."""

from __future__ import annotations

from typing import Any

from confluent_kafka import IsolationLevel, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import OffsetSpec

from conformance.clients import (
    Member,
    drive,
    error_of,
    fill,
    offset_of,
    read_to_end,
    send,
    until,
    value_of,
    values,
)
from conformance.scenario import REQUEST_TIMEOUT_S, Cluster, scenario
from conformance.scenarios.offsets import committed

COMMITTED: dict[str, Any] = {"isolation_level": "read_committed"}
UNCOMMITTED: dict[str, Any] = {"isolation_level": "read_uncommitted"}


def transactional(cluster: Cluster, name: str | None = None, **config: Any) -> Producer:
    """A transactional producer, ready to begin."""
    producer = cluster.producer(transactional_id=name or cluster.name("txn"), **config)
    producer.init_transactions(REQUEST_TIMEOUT_S)
    return producer


def end_of(cluster: Cluster, topic: str, level: IsolationLevel, partition: int = 0) -> int:
    """The end of a partition as readers of that isolation see it."""
    part = TopicPartition(topic, partition)
    latest: Any = OffsetSpec
    futures = cluster.admin.list_offsets({part: latest.latest()}, isolation_level=level)
    return int(futures[part].result(REQUEST_TIMEOUT_S).offset)


def seen(cluster: Cluster, topic: str) -> dict[str, list[str | None]]:
    """What readers of each isolation level see."""
    return {
        "committed": values(read_to_end(cluster, topic, **COMMITTED)),
        "uncommitted": values(read_to_end(cluster, topic, **UNCOMMITTED)),
    }


@scenario(
    expected={
        "committed": ["a", "b", "e"],
        "uncommitted": ["a", "b", "c", "d", "e"],
        "offsets": [0, 1, 6],
        "end": 8,
    }
)
def commit_and_abort(cluster: Cluster) -> Any:
    """Committed records are seen, aborted ones only on request; markers take offsets."""
    topic = cluster.topic()
    producer = transactional(cluster)
    for records, ends in (("ab", "commit"), ("cd", "abort"), ("e", "commit")):
        producer.begin_transaction()
        send(producer, topic, records)
        if ends == "commit":
            producer.commit_transaction(REQUEST_TIMEOUT_S)
        else:
            producer.abort_transaction(REQUEST_TIMEOUT_S)
    return {
        **seen(cluster, topic),
        "offsets": [offset_of(m) for m in read_to_end(cluster, topic, **COMMITTED)],
        "end": end_of(cluster, topic, IsolationLevel.READ_UNCOMMITTED),
    }


@scenario(
    expected={
        "open": {"committed": ["before"], "uncommitted": ["before", "open", "after"]},
        "ends": (1, 3),
        "closed": ["before", "open", "after"],
        "ends then": (4, 4),
    }
)
def an_open_transaction_holds_readers_back(cluster: Cluster) -> Any:
    """Readers of committed records wait at the first open transaction, others do not."""
    topic = cluster.topic()
    send(cluster.producer(), topic, ["before"])
    producer = transactional(cluster)
    producer.begin_transaction()
    send(producer, topic, ["open"])
    send(cluster.producer(), topic, ["after"])
    observed: dict[str, Any] = {"open": seen(cluster, topic), "ends": ends(cluster, topic)}
    producer.commit_transaction(REQUEST_TIMEOUT_S)
    observed["closed"] = seen(cluster, topic)["committed"]
    observed["ends then"] = ends(cluster, topic)
    return observed


def ends(cluster: Cluster, topic: str) -> tuple[int, int]:
    return (
        end_of(cluster, topic, IsolationLevel.READ_COMMITTED),
        end_of(cluster, topic, IsolationLevel.READ_UNCOMMITTED),
    )


@scenario(expected={"fenced": True, "committed": ["second"], "uncommitted": ["first", "second"]})
def a_newer_producer_fences_the_older(cluster: Cluster) -> Any:
    """Who starts with the same transactional id aborts what was open; the older can do no more."""
    topic, name = cluster.topic(), cluster.name("txn")
    older = transactional(cluster, name)
    older.begin_transaction()
    send(older, topic, ["first"])
    newer = transactional(cluster, name)
    failed = error_of(lambda: older.commit_transaction(REQUEST_TIMEOUT_S))
    newer.begin_transaction()
    send(newer, topic, ["second"])
    newer.commit_transaction(REQUEST_TIMEOUT_S)
    return {"fenced": failed in ("_FENCED", "PRODUCER_FENCED"), **seen(cluster, topic)}


@scenario(expected={"late": True, "committed": []})
def a_zombie_cannot_write(cluster: Cluster) -> Any:
    """A fenced producer that writes without knowing of it gets an error, and nothing is stored."""
    topic, name = cluster.topic(), cluster.name("txn")
    older = transactional(cluster, name)
    older.begin_transaction()
    transactional(cluster, name)
    failures: list[str] = []
    older.produce(
        topic,
        "zombie",
        partition=0,
        on_delivery=lambda error, _: failures.append("" if error is None else error.name()),
    )
    ended = error_of(lambda: older.commit_transaction(REQUEST_TIMEOUT_S))
    return {"late": ended is not None, "committed": seen(cluster, topic)["uncommitted"]}


@scenario(expected={"aborted": -1, "pending": -1, "committed": 2})
def offsets_in_a_transaction(cluster: Cluster) -> Any:
    """Offsets sent to a transaction count when it commits, and not before or otherwise."""
    source, topic, group = cluster.topic(), cluster.topic(), cluster.name("group")
    fill(cluster, source, 3)
    reader = cluster.consumer(group)
    producer = transactional(cluster)
    observed = {}
    for ends_with in ("aborted", "committed"):
        producer.begin_transaction()
        send(producer, topic, ["x"])
        producer.send_offsets_to_transaction(
            [TopicPartition(source, 0, 2)], reader.consumer_group_metadata(), REQUEST_TIMEOUT_S
        )
        if ends_with == "aborted":
            producer.abort_transaction(REQUEST_TIMEOUT_S)
            observed["aborted"] = committed(cluster, group, source)
        else:
            observed["pending"] = unstable(cluster, group, source)
            producer.commit_transaction(REQUEST_TIMEOUT_S)
            observed["committed"] = committed(cluster, group, source)
    return observed


def unstable(cluster: Cluster, group: str, topic: str) -> int:
    """The committed offset as one sees it who does not wait for open transactions."""
    answer = cluster.java.call("list_group_offsets", group=group, require_stable=False)
    return int(answer["offsets"].get(f"{topic}-0", -1))


@scenario(expected={"read": [str(number) for number in range(30)], "committed": 30})
def consume_transform_produce(cluster: Cluster) -> Any:
    """A pipeline whose transactions are cut off now and then delivers each record once."""
    source, topic, group = cluster.topic(), cluster.topic(), cluster.name("group")
    fill(cluster, source, 30)
    name = cluster.name("txn")
    done = 0
    for cut_after in (3, 2, 1000):
        done = run_pipeline(cluster, (source, topic), group, name, cut_after)
    assert done == 30
    return {
        "read": values(read_to_end(cluster, topic, **COMMITTED)),
        "committed": committed(cluster, group, source),
    }


def run_pipeline(
    cluster: Cluster, way: tuple[str, str], group: str, name: str, cut_after: int
) -> int:
    """Move records by fives until all are done, or stop in the middle of a transaction."""
    source, topic = way
    producer = transactional(cluster, name)
    member = Member(
        cluster, group, [source], session_timeout_ms=1500, heartbeat_interval_ms=200, **COMMITTED
    )
    transactions, handled = 0, 0
    while True:
        drive([member], lambda: len(member.records) > handled)  # noqa: B023 - used at once
        batch = member.records[handled : handled + 5]
        handled += len(batch)
        producer.begin_transaction()
        send(producer, topic, [value_of(message) for message in batch])
        transactions += 1
        after = offset_of(batch[-1]) + 1
        if transactions == cut_after:
            # As a crash would: the transaction stays open and nobody ends it.
            member.consumer.close()
            return after
        metadata = member.consumer.consumer_group_metadata()
        producer.send_offsets_to_transaction(
            [TopicPartition(source, 0, after)], metadata, REQUEST_TIMEOUT_S
        )
        producer.commit_transaction(REQUEST_TIMEOUT_S)
        if after == 30:
            member.consumer.close()
            return after


@scenario(expected={"late commit": True, "committed": ["after"], "uncommitted": ["slow", "after"]})
def a_transaction_that_takes_too_long(cluster: Cluster) -> Any:
    """After its time-out a transaction is aborted, and readers go on."""
    topic = cluster.topic()
    slow = transactional(cluster, transaction_timeout_ms=1000)
    slow.begin_transaction()
    send(slow, topic, ["slow"])
    send(cluster.producer(), topic, ["after"])
    until(lambda: end_of(cluster, topic, IsolationLevel.READ_COMMITTED) == 3)
    return {
        "late commit": error_of(lambda: slow.commit_transaction(REQUEST_TIMEOUT_S)) is not None,
        **seen(cluster, topic),
    }


@scenario(expected="INVALID_TRANSACTION_TIMEOUT")
def a_time_out_above_the_limit(cluster: Cluster) -> Any:
    """A producer that wants more time than the broker gives is refused."""
    producer = cluster.producer(
        transactional_id=cluster.name("txn"), transaction_timeout_ms=2_000_000_000
    )
    return error_of(lambda: producer.init_transactions(REQUEST_TIMEOUT_S))


@scenario(expected={"first": ["0", "2"], "second": ["1", "3"], "empty": None})
def many_partitions_at_once(cluster: Cluster) -> Any:
    """A transaction spans partitions and topics; one without records may be committed too."""
    topics = [cluster.topic(2), cluster.topic()]
    producer = transactional(cluster)
    producer.begin_transaction()
    send(producer, topics[0], ["0"], 0)
    send(producer, topics[0], ["2"], 1)
    send(producer, topics[1], ["1", "3"])
    producer.commit_transaction(REQUEST_TIMEOUT_S)
    producer.begin_transaction()
    empty = error_of(lambda: producer.commit_transaction(REQUEST_TIMEOUT_S))
    return {
        "first": sorted(
            text or "" for text in values(read_to_end(cluster, topics[0], (0, 1), **COMMITTED))
        ),
        "second": values(read_to_end(cluster, topics[1], **COMMITTED)),
        "empty": empty,
    }


@scenario(expected={"listed": "Ongoing", "described": ("Ongoing", 1), "then": "CompleteCommit"})
def transactions_as_admins_see_them(cluster: Cluster) -> Any:
    """An open transaction is listed with its state and its partitions."""
    topic, name = cluster.topic(), cluster.name("txn")
    producer = transactional(cluster, name)
    producer.begin_transaction()
    send(producer, topic, ["x"])
    listed = cluster.java.call("list_transactions")["transactions"][name]
    described = cluster.java.call("describe_transaction", id=name)
    producer.commit_transaction(REQUEST_TIMEOUT_S)

    def completed() -> bool:
        state = cluster.java.call("describe_transaction", id=name)["state"]
        return bool(state == "CompleteCommit")

    until(completed)
    return {
        "listed": listed["state"],
        "described": (described["state"], len(described["partitions"])),
        "then": "CompleteCommit",
    }


@scenario(expected={"order": "_STATE", "after": None})
def out_of_order(cluster: Cluster) -> Any:
    """Committing without having begun is an error that harms nothing."""
    producer = transactional(cluster)
    wrong = error_of(lambda: producer.commit_transaction(REQUEST_TIMEOUT_S))
    producer.begin_transaction()
    try:
        producer.commit_transaction(REQUEST_TIMEOUT_S)
    except KafkaException as failure:
        return {"order": wrong, "after": failure.args[0].name()}
    return {"order": wrong, "after": None}
