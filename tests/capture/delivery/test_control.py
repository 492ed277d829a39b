"""Captures from outside: snapshots on demand, pause, resume, stop, status; and their modes."""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.capture.delivery.capture import Capture
from penstock.capture.delivery.config import CaptureConfig
from penstock.capture.delivery.control import (
    Signal,
    forget,
    send,
    snapshot_all_signal,
    snapshot_signal,
    state_of,
    status_of,
)
from penstock.capture.delivery.listening import Publisher
from penstock.capture.delivery.metering import CaptureStatus
from penstock.capture.delivery.state import CAPTURE_TOPIC
from penstock.capture.delivery.writing import TooSlowError
from penstock.capture.source import (
    CaptureError,
    Check,
    DatabaseBusyError,
    DatabaseUnreachableError,
    PositionLostError,
    Source,
    SourceSettings,
)
from penstock.client.connection import Cluster
from penstock.client.transactions import described
from penstock.testing import Broker
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


def database(**tables: dict[int, str]) -> Database:
    made = Database()
    for name, rows in (tables or {"a": {}}).items():
        made.create(name)
        made.rows[name] |= rows
    return made


@contextmanager
def running(log: str, made: CaptureConfig, data: Database, **more: Any) -> Iterator[Capture]:
    """A capture that runs beside the test; it must not have failed at the end."""
    stop = threading.Event()
    it = capture(log, made, data, **more)
    thread, failures = on_thread(lambda: it.run(stop))
    try:
        yield it
    finally:
        stop.set()
        thread.join(60)
    assert failures == []
    assert not thread.is_alive()


def topic(log: str, made: CaptureConfig, name: str = "a") -> dict[int, str]:
    return rebuilt(records(log, f"{made.name}.{name}"))


def marks(log: str, made: CaptureConfig, name: str = "a") -> list[str]:
    found = records(log, f"{made.name}.{name}")
    return [parsed(row.value)["source"]["snapshot"] for row in found if row.value]


# ---- modes -------------------------------------------------------------------------------


def test_the_first_snapshot_is_marked_and_the_stream_goes_on_from_it(log: str) -> None:
    data = database(a={1: "x", 2: "y", 3: "z"}, b={1: "p"}, c={})
    made = config(new_name())
    run_to_end(log, made, data)
    data.commit(Step("a", 1, "new"))
    run_to_end(log, made, data)
    assert topic(log, made) == data.rows["a"]
    ops = [parsed(row.value)["op"] for row in records(log, f"{made.name}.a")]
    assert ops == ["r", "r", "r", "u"]
    assert marks(log, made)[0] == "first"
    assert marks(log, made)[-1] == "false"
    assert sorted([marks(log, made)[2], marks(log, made, "b")[0]]) == [
        "last",
        "last_in_data_collection",
    ]


@pytest.mark.parametrize("workers", [1, 4])
def test_initial_only_stops_by_itself(log: str, workers: int) -> None:
    tables = {f"t{number}": dict.fromkeys(range(number), "x") for number in range(6)}
    data = database(**tables)
    made = config(new_name(), snapshot="initial_only", snapshot_workers=workers)
    it = capture(log, made, data)
    it.run()
    for name in tables:
        assert topic(log, made, name) == data.rows[name]
    data.commit(Step("t1", 9, "x"))
    capture(log, made, data).run()
    assert 9 not in topic(log, made, "t1")


def test_no_data_begins_with_the_next_change(log: str) -> None:
    data = database(a={1: "x"})
    made = config(new_name(), snapshot="no_data")
    run_to_end(log, made, data)
    data.commit(Step("a", 2, "y"))
    run_to_end(log, made, data)
    assert topic(log, made) == {2: "y"}


def test_always_takes_a_snapshot_at_each_start_and_forgets_what_is_gone(log: str) -> None:
    data = database(a={1: "x", 2: "y"})
    made = config(new_name(), snapshot="always")
    run_to_end(log, made, data)
    data.rows["a"] = {2: "y", 3: "z"}
    run_to_end(log, made, data)
    assert topic(log, made) == {2: "y", 3: "z"}


def test_a_lost_position_is_never_skipped_over(log: str) -> None:
    data = database(a={1: "x"})
    made = config(new_name())
    run_to_end(log, made, data)
    data.commit(Step("a", 1, None), Step("a", 2, "y"))
    data.log_start = 1
    with pytest.raises(PositionLostError) as caught:
        run_to_end(log, made, data)
    assert "snapshot" in caught.value.advice
    assert topic(log, made) == {1: "x"}
    with Cluster(log) as cluster:
        told = status_of(cluster, made.name)
        assert told is not None
        assert (told.state, told.error) == ("failed", str(caught.value))
        send(cluster, made.name, snapshot_all_signal())
    run_to_end(log, made, data)
    assert topic(log, made) == {2: "y"}


def test_a_lost_position_leads_to_a_snapshot_when_needed(log: str) -> None:
    data = database(a={1: "x"})
    made = config(new_name(), snapshot="when_needed")
    run_to_end(log, made, data)
    data.commit(Step("a", 1, None), Step("a", 2, "y"))
    data.log_start = 1
    run_to_end(log, made, data)
    assert topic(log, made) == {2: "y"}


def test_nothing_is_touched_where_a_check_fails(log: str) -> None:
    data, made = database(), config(new_name())
    checks = [
        Check("wal_level", False, "replica", "ALTER SYSTEM SET wal_level = logical"),
        Check("warning", False, "x", "y", required=False),
    ]
    with pytest.raises(CaptureError, match="wal_level: replica") as caught:
        run_to_end(log, made, data, checks=checks)
    assert caught.value.advice == "ALTER SYSTEM SET wal_level = logical"
    assert not data.is_set_up


# ---- incremental snapshots ---------------------------------------------------------------


@settings(max_examples=examples(5), suppress_health_check=[HealthCheck.too_slow])
@given(
    st.dictionaries(st.integers(0, 40), st.text("xyz", max_size=2), max_size=20),
    st.lists(st.integers(5, 60), max_size=3),
)
def test_a_snapshot_on_demand_goes_on_after_crashes(
    log: str, rows: dict[int, str], fuses: list[int]
) -> None:
    """Rows of which the log knows nothing come by chunks; each once more than not at all."""
    data = database(a={})
    made = config(new_name(), chunk_rows=3, chunk_rows_max=3, snapshot_new_tables=False)
    run_to_end(log, made, data)
    data.rows["a"] |= rows
    with Cluster(log) as cluster:
        before = state_of(cluster, made.name)
        assert before is not None
        heard = before.signals or 0
        send(cluster, made.name, snapshot_signal("a"))
        for number, steps in enumerate(fuses):
            fuse = Fuse(steps)
            stop = threading.Event()
            thread, failures = on_thread(
                lambda fuse=fuse, stop=stop: capture(  # type: ignore[misc]
                    log, made, data, fuse=fuse
                ).run(stop)
            )
            data.commit(Step("a", 100 + number, "streamed"))
            eventually(lambda fuse=fuse: fuse.is_blown or _is_read(cluster, made, heard))  # type: ignore[misc]
            stop.set()
            thread.join(60)
            assert all(isinstance(error, Crash) for error in failures)
        with running(log, made, data):
            eventually(lambda: _is_read(cluster, made, heard))
            eventually(lambda: topic(log, made) == data.rows["a"])
    snapshot_rows = [
        parsed(row.key)["id"]
        for row in records(log, f"{made.name}.a")
        if row.value and parsed(row.value)["op"] == "r"
    ]
    assert snapshot_rows == sorted(set(snapshot_rows))
    assert set(rows) <= set(snapshot_rows)


def _is_read(cluster: Cluster, made: CaptureConfig, before: int) -> bool:
    """Whether a signal after the given one was heard, and nothing is left to be read."""
    state = state_of(cluster, made.name)
    return state is not None and (state.signals or 0) > before and not state.queue


def test_snapshots_are_paused_resumed_and_stopped(log: str) -> None:
    data = database(a=dict.fromkeys(range(50), "x"), b={1: "y"})
    made = config(new_name(), chunk_rows=5, chunk_rows_max=5, snapshot="no_data", status_ms=10)
    run_to_end(log, made, data)
    with Cluster(log) as cluster:
        send(cluster, made.name, Signal("pause-snapshot"))
        send(cluster, made.name, snapshot_signal("a", where="ignored by the fake"))
        send(cluster, made.name, snapshot_signal("b", "nowhere"))
        with running(log, made, data) as it:
            told = eventually(lambda: it.status().snapshot)
            assert told is not None
            assert (told.table, told.is_paused, told.rows) == ("a", True, 0)
            eventually(lambda: "nowhere" in it.status().error)
            send(cluster, made.name, Signal("stop-snapshot", {"data-collections": ["a"]}))
            send(cluster, made.name, Signal("resume-snapshot"))
            eventually(lambda: topic(log, made, "b") == {1: "y"})
            assert topic(log, made) == {}
            send(cluster, made.name, snapshot_signal("*"))
            eventually(lambda: topic(log, made) == data.rows["a"])
    assert set(marks(log, made)) == {"incremental"}


def test_tables_that_appear_are_read_by_themselves(log: str) -> None:
    data = database(a={1: "x"})
    made = config(new_name())
    run_to_end(log, made, data)
    data.create("b")
    data.rows["b"] |= {1: "old", 2: "older"}
    with running(log, made, data) as it:
        eventually(lambda: topic(log, made, "b") == {1: "old", 2: "older"})
        data.create("c")
        data.rows["c"][1] = "unseen"
        data.commit(Step("c", 2, "seen"))
        eventually(lambda: topic(log, made, "c") == {1: "unseen", 2: "seen"})
        assert it.status().snapshot is None


# ---- the capture itself ------------------------------------------------------------------


def test_a_change_that_comes_alone_does_not_wait_for_others(log: str) -> None:
    data, made = database(), config(new_name(), linger_ms=60_000)
    run_to_end(log, made, data)
    with running(log, made, data):
        data.commit(Step("a", 1, "alone"))
        eventually(lambda: topic(log, made) == {1: "alone"}, timeout_s=30)


def test_it_is_paused_resumed_and_stopped_from_elsewhere(log: str) -> None:
    data, made = database(), config(new_name(), status_ms=10)
    run_to_end(log, made, data)
    stop = threading.Event()
    with Cluster(log) as cluster:
        first = capture(log, made, data)
        thread, failures = on_thread(lambda: first.run(stop))
        eventually(lambda: first.status().state == "streaming")
        send(cluster, made.name, Signal("pause"))
        eventually(lambda: _state(cluster, made) == "paused")
        data.commit(Step("a", 1, "while paused"))
        # Who starts it again finds it paused.
        stop.set()
        thread.join(60)
        assert failures == []
        second = capture(log, made, data)
        thread, failures = on_thread(second.run)
        eventually(lambda: second.status().state == "paused")
        assert topic(log, made) == {}
        # What is said meanwhile is not forgotten.
        data.rows["a"][5] = "only a snapshot tells"
        send(cluster, made.name, snapshot_signal("a"))
        send(cluster, made.name, Signal("resume"))
        eventually(lambda: topic(log, made) == data.rows["a"])
        send(cluster, made.name, Signal("stop"))
        thread.join(60)
        assert not thread.is_alive()
        assert failures == []
        assert _state(cluster, made) == "stopped"
        forget(cluster, made.name)
        assert status_of(cluster, made.name) is None
        assert state_of(cluster, made.name) is None


def _state(cluster: Cluster, made: CaptureConfig) -> str:
    told = status_of(cluster, made.name)
    return "" if told is None else told.state


def test_a_database_that_goes_away_is_waited_for(log: str) -> None:
    data, made = database(), config(new_name())
    failing = threading.Event()
    tries: list[str] = []

    def happens(step: str) -> None:
        if failing.is_set() and step == "part":
            tries.append(step)
            if len(tries) > 3:
                failing.clear()
            raise DatabaseUnreachableError("the database is away")

    failing.set()
    run_to_end(log, made, data, fuse=happens_too(happens))
    data.commit(Step("a", 1, "x"))
    run_to_end(log, made, data, fuse=happens_too(happens))
    assert len(tries) == 4
    assert topic(log, made) == {1: "x"}
    assert len(records(log, f"{made.name}.a")) == 1


def test_an_outage_is_told_when_it_begins_and_when_it_ends(
    log: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, made = database(), config(new_name())
    run_to_end(log, made, data)
    data.commit(Step("a", 1, "x"))
    caplog.set_level("INFO", logger="penstock.capture.delivery.capture")
    tries: list[str] = []

    def happens(step: str) -> None:
        if step == "part" and len(tries) < 4:
            tries.append(step)
            raise DatabaseUnreachableError("the database is away")

    run_to_end(log, made, data, fuse=happens_too(happens))
    assert len(tries) == 4
    told = [record.getMessage().removeprefix(f"capture {made.name}: ") for record in caplog.records]
    lost, back = told[1:3]
    assert lost == "the database is away; trying again until it works"
    assert re.fullmatch(r"streaming again, after \d+ s", back)
    assert [told[0], *told[3:]] == ["streaming", "stopped"]


@pytest.mark.parametrize("waits", [True, False])
def test_a_database_that_was_never_there(log: str, waits: bool) -> None:
    data, made = database(), config(new_name())
    stop = threading.Event()
    error = DatabaseUnreachableError("nobody is there", advice="Start it.")
    opens = OpensLate(capture(log, made, data, stop=stop), error)
    it = Capture(made, log, open_source=opens, waits=waits)
    if waits:
        it.run(stop)
        assert opens.tries == 3
        return
    with pytest.raises(DatabaseUnreachableError, match="nobody is there"):
        it.run(stop)
    assert opens.tries == 1
    with Cluster(log) as cluster:
        told = status_of(cluster, made.name)
    assert told is not None
    assert (told.state, told.advice) == ("failed", "Start it.")


def test_a_database_that_is_busy_is_waited_for_from_the_start(log: str) -> None:
    data, made = database(), config(new_name())
    stop = threading.Event()
    opens = OpensLate(capture(log, made, data, stop=stop), DatabaseBusyError("it is locked"))
    Capture(made, log, open_source=opens, waits=False).run(stop)
    assert opens.tries == 3


class OpensLate:
    """Opens the source of a capture at the third try; an error before."""

    def __init__(self, inner: Capture, error: DatabaseUnreachableError) -> None:
        self._inner = inner
        self._error = error
        self.tries = 0

    def __call__(self, source: SourceSettings) -> Source:
        self.tries += 1
        if self.tries < 3:
            raise self._error
        return self._inner._open_source(source)


class happens_too(Fuse):  # noqa: N801
    """A fuse that never blows, with something else that happens."""

    def __init__(self, then: Any) -> None:
        super().__init__()
        self._then = then

    def __call__(self, step: str) -> None:
        super().__call__(step)
        self._then(step)


def test_a_broker_that_goes_away_is_waited_for() -> None:
    data, made = database(a={1: "x"}), config(new_name())
    with Broker() as broker:
        with running(broker.bootstrap, made, data) as it:
            eventually(lambda: it.status().state == "streaming")
            data.commit(Step("a", 2, "y"))
            broker.crash()
            data.commit(Step("a", 3, "z"))
            broker.start()
            eventually(lambda: topic(broker.bootstrap, made) == {1: "x", 2: "y", 3: "z"})
        assert len(records(broker.bootstrap, f"{made.name}.a")) == 3


def test_a_large_transaction_appears_at_once(log: str) -> None:
    data, made = database(), config(new_name(), batch_changes=10)
    run_to_end(log, made, data)
    waiting, go_on = threading.Event(), threading.Event()
    parts: list[str] = []

    def happens(step: str) -> None:
        if step == "part":
            parts.append(step)
            if len(parts) == 50:
                waiting.set()
                go_on.wait(60)

    data.commit(*(Step("a", number, "x") for number in range(100)))
    with running(log, made, data, fuse=happens_too(happens), changes_per_part=1) as it:
        assert waiting.wait(60)
        eventually(lambda: it.status().events == 49)
        assert topic(log, made) == {}
        assert state_in_log(log, made) == {"n": 0}
        go_on.set()
        eventually(lambda: len(topic(log, made)) == 100)


def test_a_transaction_that_takes_too_long_is_told_of(log: str) -> None:
    data, made = database(), config(new_name(), transaction_timeout_ms=1_000)
    run_to_end(log, made, data)
    # Large enough to be sent before the transaction is complete.
    data.commit(*(Step("a", number, "x" * 700_000) for number in range(4)))
    parts: list[str] = []

    def happens(step: str) -> None:
        if step == "part":
            parts.append(step)
            if len(parts) == 2:
                # Until the broker has given the transaction up.
                eventually(lambda: _is_aborted(log, made))

    with pytest.raises(TooSlowError, match=made.name) as caught:
        run_to_end(log, made, data, fuse=happens_too(happens), changes_per_part=2)
    assert "transaction_timeout_ms" in caught.value.advice
    run_to_end(log, made, data)
    assert topic(log, made) == data.rows["a"]


def _is_aborted(log: str, made: CaptureConfig) -> bool:
    with Cluster(log) as cluster:
        return described(cluster, made.transactional_id).state == "CompleteAbort"


def test_changes_that_are_left_out_move_the_position_only(log: str) -> None:
    data, made = database(), config(new_name(), filters={"a": "row.text == 'shown'"})
    run_to_end(log, made, data)
    for number in range(20):
        data.commit(*(Step("a", id_, "hidden") for id_ in range(number, number + 3)))
    it = run_to_end(log, made, data)
    assert state_in_log(log, made) == {"n": 20}
    assert it.status().events == 0
    data.commit(Step("a", 1, "hidden"), Step("a", 2, "shown"), Step("a", 3, "hidden"))
    run_to_end(log, made, data, changes_per_part=1)
    assert topic(log, made) == {2: "shown"}


def test_rows_of_many_megabytes(log: str) -> None:
    data, made = database(), config(new_name())
    run_to_end(log, made, data)
    # Nothing that compression would make small.
    text = random.Random(1).randbytes(2_500_000).hex()
    data.commit(Step("a", 1, text), Step("a", 2, "small"))
    run_to_end(log, made, data)
    assert topic(log, made) == {1: text, 2: "small"}


def state_in_log(log: str, made: CaptureConfig) -> Any:
    with Cluster(log) as cluster:
        state = state_of(cluster, made.name)
    return None if state is None else state.position


def test_events_are_counted_and_told(log: str) -> None:
    data, made = database(), config(new_name())
    run_to_end(log, made, data)
    for number in range(10):
        data.commit(Step("a", number, "x"))
    it = run_to_end(log, made, data)
    status = it.status()
    assert (status.changes, status.events, status.kind) == (10, 10, "fake")
    assert status.lag_ms_p50 is not None
    with Cluster(log) as cluster:
        told = status_of(cluster, made.name)
        assert told is not None
        assert (told.state, told.position, told.events) == ("stopped", {"n": 10}, 10)


def test_both_threads_may_tell_at_once(log: str) -> None:
    """Each status comes whole, and none is older than the one before it."""
    data, made = database(), config(new_name())
    run_to_end(log, made, data)
    numbers = itertools.count(1)
    with Cluster(log) as cluster:
        publisher = Publisher(cluster, made.name)

        def tell() -> None:
            for _ in range(100):
                publisher.tell(lambda: CaptureStatus(made.name, "telling", events=next(numbers)))

        told = [on_thread(tell) for _ in range(3)]
        for thread, _ in told:
            thread.join(60)
        publisher.close()
    assert [failures for _, failures in told] == [[], [], []]
    found = [
        parsed(row.value)["events"]
        for row in records(log, CAPTURE_TOPIC)
        if row.key == made.name.encode() and row.value and parsed(row.value)["state"] == "telling"
    ]
    assert found == list(range(1, 301))
