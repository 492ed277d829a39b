"""Every source transaction in the log once, whole, in order: whatever crashes, and wherever."""

from __future__ import annotations

import threading
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.capture.delivery.control import state_of
from penstock.capture.delivery.writing import TakenOverError
from penstock.capture.source import Row
from penstock.client.connection import Cluster
from penstock.testing.apache_kafka import ApacheKafka
from tests.capture.delivery.fake import Database, Step, parsed
from tests.capture.delivery.running import (
    Crash,
    Fuse,
    capture,
    config,
    new_name,
    on_thread,
    rebuilt,
    records,
    run_to_end,
)
from tests.harness.profiles import examples
from tests.waiting import eventually

TEXTS = st.none() | st.text("abc", max_size=3)
STEPS = st.builds(Step, st.sampled_from(["a", "b"]), st.integers(0, 4), TEXTS)
TRANSACTIONS = st.lists(st.lists(STEPS, min_size=1, max_size=5), max_size=6)
FUSES = st.lists(st.integers(0, 30), max_size=4)


def database() -> Database:
    made = Database()
    made.create("a")
    made.create("b")
    return made


def run_and_crash(log: str, made: Any, data: Database, fuses: list[int], **more: Any) -> None:
    """Run with each fuse, which may or may not blow before the end."""
    for steps in fuses:
        fuse = Fuse(steps)
        try:
            run_to_end(log, made, data, fuse=fuse, **more)
        except Crash:
            assert fuse.is_blown
    run_to_end(log, made, data, **more)


def expected(data: Database, since: int, name: str) -> list[tuple[str, Any, Any, Any]]:
    """The events of one table: (transaction, op, before, after)."""

    def text(row: Row | None) -> Any:
        return None if row is None else parsed(row[1])

    return [
        (str(number), change.op, text(change.before), text(change.after))
        for number, changes in enumerate(data.log, 1)
        if number > since
        for change in changes
        if change.table.name == name
    ]


def told(log: str, topic: str) -> list[tuple[str, Any, Any, Any]]:
    events = [parsed(row.value) for row in records(log, topic) if row.value]
    return [
        (
            event["transaction"]["id"],
            event["op"],
            event["before"] and event["before"]["text"],
            event["after"] and event["after"]["text"],
        )
        for event in events
        if event["op"] != "r"
    ]


@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.too_slow])
@given(
    TRANSACTIONS,
    TRANSACTIONS,
    FUSES,
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from([0.0, 0.003]),
)
def test_each_transaction_once(
    log: str, first: Any, then: Any, fuses: list[int], part: int, batch: int, pause_s: float
) -> None:
    data, name = database(), new_name()
    made = config(name, transaction_metadata=True, batch_changes=batch)
    for steps in first:
        data.commit(*steps)
    run_to_end(log, made, data)
    snapshots = {table: rebuilt(records(log, f"{name}.{table}")) for table in "ab"}
    assert snapshots == data.rows
    began = len(data.log)
    for steps in then:
        data.commit(*steps)
    run_and_crash(log, made, data, fuses, changes_per_part=part, pause_s=pause_s)
    for table in "ab":
        assert told(log, f"{name}.{table}") == expected(data, began, table)
        assert rebuilt(records(log, f"{name}.{table}")) == data.rows[table]
    boundaries = [parsed(row.value) for row in records(log, f"{name}.transaction")]
    assert [item["status"] for item in boundaries] == ["BEGIN", "END"] * (len(data.log) - began)
    with Cluster(log) as cluster:
        state = state_of(cluster, name)
    assert state is not None
    assert state.position == {"n": len(data.log)}
    assert data.confirmed <= len(data.log)


@settings(max_examples=examples(5), suppress_health_check=[HealthCheck.too_slow])
@given(TRANSACTIONS, st.lists(st.tuples(st.integers(0, 30), TRANSACTIONS), max_size=3))
def test_a_snapshot_that_was_interrupted_leaves_no_ghosts(
    log: str, first: Any, crashes: list[tuple[int, Any]]
) -> None:
    """Rows that are deleted between two attempts are gone from the topic, too."""
    data, name = database(), new_name()
    made = config(name, batch_changes=1)
    for steps in first:
        data.commit(*steps)
    for number, then in crashes:
        stop_fuse = Fuse(number)
        try:
            run_to_end(log, made, data, fuse=stop_fuse)
        except Crash:
            assert stop_fuse.is_blown
        for steps in then:
            data.commit(*steps)
    run_to_end(log, made, data)
    for table in "ab":
        assert rebuilt(records(log, f"{name}.{table}")) == data.rows[table]


@settings(max_examples=examples(5), suppress_health_check=[HealthCheck.too_slow])
@given(TRANSACTIONS, FUSES)
def test_at_least_once_without_transactions(log: str, then: Any, fuses: list[int]) -> None:
    data, name = database(), new_name()
    made = config(name, transactions=False, transaction_metadata=True)
    run_to_end(log, made, data)
    for steps in then:
        data.commit(*steps)
    run_and_crash(log, made, data, fuses)
    for table in "ab":
        found = told(log, f"{name}.{table}")
        for event in expected(data, 0, table):
            assert event in found
        assert rebuilt(records(log, f"{name}.{table}")) == data.rows[table]


def test_each_kind_of_crash_is_met(log: str) -> None:
    """The fuse reaches what it should: writes, commits and confirmations."""
    data = database()
    data.commit(Step("a", 1, "x"))
    made = config(new_name())
    fuse = Fuse()
    stop_capture = run_to_end(log, made, data, fuse=fuse)
    data.commit(Step("a", 1, "y"), Step("a", 2, "y"), Step("b", 2, "y"))
    run_to_end(log, made, data, fuse=fuse)
    assert {"before write", "after write", "after commit", "confirm", "part", "rows"} <= set(
        fuse.steps
    )
    assert stop_capture.status().state == "stopped"


def test_the_older_of_two_is_stopped(log: str) -> None:
    """A process that was believed dead writes nothing more once another has taken over."""
    data, made = database(), config(new_name())
    run_to_end(log, made, data)
    fuse = Fuse()
    older = capture(log, made, data, fuse=fuse)
    stop = threading.Event()
    thread, failures = on_thread(lambda: older.run(stop))
    eventually(lambda: older.status().state == "streaming")
    run_to_end(log, made, data)
    data.commit(Step("a", 7, "seven"))
    thread.join(60)
    assert not thread.is_alive()
    assert [type(error) for error in failures] == [TakenOverError]
    assert records(log, f"{made.name}.a") == []
    run_to_end(log, made, data)
    assert rebuilt(records(log, f"{made.name}.a")) == {7: "seven"}


def test_the_same_on_apache_kafka(apache_kafka: ApacheKafka) -> None:
    """Nothing of it depends on whose log it is."""
    log = apache_kafka.bootstrap
    data = database()
    made = config(new_name(), transaction_metadata=True, partitions=2, batch_changes=3)
    data.commit(Step("a", 1, "old"), Step("b", 1, "old"))
    run_to_end(log, made, data)
    began = len(data.log)
    for number in range(6):
        data.commit(*(Step("ab"[id_ % 2], id_, f"{number}") for id_ in range(number, number + 5)))
        data.commit(Step("a", number, None))
        run_and_crash(log, made, data, [7 * number], changes_per_part=2)
    for table in "ab":
        found = told(log, f"{made.name}.{table}")
        assert sorted(found, key=str) == sorted(expected(data, began, table), key=str)
        assert rebuilt(records(log, f"{made.name}.{table}")) == data.rows[table]
