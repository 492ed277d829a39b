"""A truncate deletes what the topic holds: once, at its place, whatever crashes."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.capture.delivery import emptying
from penstock.capture.delivery.capture import Capture
from penstock.capture.delivery.ghosts import Ghosts
from penstock.capture.delivery.metering import Progress
from penstock.capture.delivery.state import State
from penstock.capture.delivery.writing import Log
from penstock.capture.events.batch import Batch
from penstock.capture.source import CaptureError, Table
from penstock.client.connection import Cluster
from penstock.client.reading import Row, last_values
from penstock.client.table_schemas import TableColumn
from penstock.client.topics import create
from penstock.client.writer import LogWriter
from penstock.testing.apache_kafka import ApacheKafka
from tests.broker.requests import delete_records
from tests.capture.delivery.fake import INT, STRING, Database, Step, Truncate, parsed
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
from tests.capture.events.samples import schema_texts
from tests.capture.events.test_avro import read
from tests.harness.profiles import examples
from tests.waiting import eventually

TABLES = st.sampled_from(["a", "b"])
TEXTS = st.none() | st.text("abc", max_size=3)
STEPS = st.builds(Step, TABLES, st.integers(0, 4), TEXTS) | st.builds(Truncate, TABLES)
TRANSACTIONS = st.lists(st.lists(STEPS, min_size=1, max_size=6), min_size=1, max_size=5)
FUSES = st.lists(st.integers(0, 40), max_size=4)
Event = tuple[str, str, int, Any]


def database(**tables: dict[int, str]) -> Database:
    made = Database()
    for name, rows in tables.items():
        made.create(name)
        for id_, text in rows.items():
            made.commit(Step(name, id_, text))
    return made


def some(count: int, text: str = "x") -> dict[int, str]:
    return dict.fromkeys(range(count), text)


def events(rows: list[Row]) -> list[Any]:
    return [parsed(row.value) for row in rows if row.value]


def ops(rows: list[Row]) -> str:
    """What the records are, one letter each; `-` is a tombstone."""
    return "".join("-" if row.value is None else parsed(row.value)["op"] for row in rows)


def run_and_crash(log: str, made: Any, data: Database, fuses: list[int], **more: Any) -> None:
    for steps in fuses:
        fuse = Fuse(steps)
        try:
            run_to_end(log, made, data, fuse=fuse, **more)
        except Crash:
            assert fuse.is_blown
    run_to_end(log, made, data, **more)


def expected(data: Database, since: int, name: str, known: set[int]) -> list[Event]:
    """The events of a table, with the deletes of those rows that a truncate finds."""
    found: list[Event] = []
    for number, changes in enumerate(data.log[since:], since + 1):
        for change in changes:
            if change.table.name != name:
                continue
            if change.op == "t":
                found += [(str(number), "d", id_, None) for id_ in sorted(known)]
                known = set()
                continue
            row = change.after or change.before
            assert row is not None
            id_ = int(row[0])
            known = known - {id_} if change.op == "d" else known | {id_}
            after = None if change.after is None else parsed(change.after[1])
            found.append((str(number), change.op, id_, after))
    return found


def told(rows: list[Row]) -> list[Event]:
    return [
        (
            event["transaction"]["id"],
            event["op"],
            (event["after"] or event["before"])["id"],
            event["after"] and event["after"]["text"],
        )
        for event in events(rows)
        if event["op"] != "r"
    ]


# ---- exactly once ------------------------------------------------------------------------


def check_each_once(
    log: str, first: Any, then: Any, fuses: list[int], part: int, batch: int
) -> None:
    data, name = database(a={}, b={}), new_name()
    made = config(name, transaction_metadata=True, batch_changes=batch)
    for steps in first:
        data.commit(*steps)
    run_to_end(log, made, data)
    began, known = len(data.log), {table: set(data.rows[table]) for table in "ab"}
    for steps in then:
        data.commit(*steps)
    run_and_crash(log, made, data, fuses, changes_per_part=part)
    wanted = {table: expected(data, began, table, known[table]) for table in "ab"}
    for table in "ab":
        rows = records(log, f"{name}.{table}")
        assert told(rows) == wanted[table]
        assert rebuilt(rows) == data.rows[table]
    ends = [parsed(row.value) for row in records(log, f"{name}.transaction")][1::2]
    assert sum(end["event_count"] for end in ends) == len(wanted["a"]) + len(wanted["b"])


@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.too_slow])
@given(TRANSACTIONS, TRANSACTIONS, FUSES, st.integers(1, 3), st.integers(1, 8))
def test_each_delete_once(
    log: str, first: Any, then: Any, fuses: list[int], part: int, batch: int
) -> None:
    check_each_once(log, first, then, fuses, part, batch)


@settings(max_examples=examples(5), suppress_health_check=[HealthCheck.too_slow])
@given(TRANSACTIONS, FUSES, st.integers(1, 3))
def test_without_transactions_it_comes_out_the_same(
    log: str, then: Any, fuses: list[int], part: int
) -> None:
    data = database(a=some(3), b={})
    made = config(new_name(), transactions=False, partitions=2)
    run_to_end(log, made, data)
    for steps in then:
        data.commit(*steps)
    run_and_crash(log, made, data, fuses, changes_per_part=part)
    for table in "ab":
        assert rebuilt(records(log, f"{made.name}.{table}")) == data.rows[table]


@pytest.mark.java
def test_with_apache_kafka(apache_kafka: ApacheKafka) -> None:
    inside = [Step("a", 1, "x"), Truncate("a"), Step("a", 1, "y"), Step("b", 1, "z")]
    then = [inside, [Step("a", 2, "x")], [Truncate("b"), Truncate("a")], [Step("b", 3, "x")]]
    check_each_once(apache_kafka.bootstrap, [[Step("a", 7, "x")]], then, [5, 13], 1, 4)


# ---- what is written ---------------------------------------------------------------------


def test_rows_of_the_same_transaction_are_gone_too_and_later_ones_are_not(log: str) -> None:
    data = database(a=some(2))
    made = config(new_name())
    run_to_end(log, made, data)
    data.commit(Step("a", 5, "p"), Step("a", 0, None), Truncate("a"), Step("a", 5, "q"))
    run_to_end(log, made, data, changes_per_part=1)
    rows = records(log, f"{made.name}.a")
    assert ops(rows) == "rr" + "cd-" + "d-d-" + "c"
    assert rebuilt(rows) == {5: "q"}
    gone = parsed(rows[5].value)
    assert (gone["op"], gone["before"], gone["after"]) == ("d", {"id": 1, "text": "x"}, None)
    assert gone["source"]["table"] == "a"


def test_of_very_large_rows_only_the_key_is_told(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emptying, "_ROW_BYTES", 1000)
    data = database(a={1: "x", 2: "x" * 1000})
    made = config(new_name())
    run_to_end(log, made, data)
    data.commit(Truncate("a"))
    run_to_end(log, made, data)
    gone = [event["before"] for event in events(records(log, f"{made.name}.a"))[2:]]
    assert gone == [{"id": 1, "text": "x"}, {"id": 2, "text": None}]


def test_the_event_itself_says_that_the_deletes_stand_before_it(log: str) -> None:
    data = database(a=some(2))
    made = config(new_name(), skip=["none"], schemas=True)
    run_to_end(log, made, data)
    data.commit(Truncate("a"))
    run_to_end(log, made, data)
    rows = records(log, f"{made.name}.a")
    shown = [parsed(row.value)["payload"] for row in rows if row.value]
    assert [event["op"] for event in shown] == ["r", "r", "d", "d", "t"]
    assert shown[-1]["expanded"] is True
    assert [event["before"]["id"] for event in shown[2:4]] == [0, 1]


def test_told_to_leave_truncates_alone(log: str) -> None:
    data = database(a=some(2))
    made = config(new_name(), truncates="skip")
    run_to_end(log, made, data)
    data.commit(Truncate("a"), Step("a", 9, "y"))
    run_to_end(log, made, data)
    assert ops(records(log, f"{made.name}.a")) == "rrc"
    run_to_end(log, made := config(new_name(), truncates="skip", skip=["none"]), data)
    data.commit(Truncate("a"))
    run_to_end(log, made, data)
    (*_, event) = events(records(log, f"{made.name}.a"))
    assert event["op"] == "t"
    assert "expanded" not in event


@pytest.mark.parametrize("changed", [{"skip": ["d"]}, {"filters": {"a": "op != 'd'"}}])
def test_who_wants_no_deletes_gets_none(log: str, changed: dict[str, Any]) -> None:
    data = database(a=some(2))
    made = config(new_name(), **changed)
    run_to_end(log, made, data)
    data.commit(Truncate("a"), Step("a", 9, "y"))
    run_to_end(log, made, data)
    assert ops(records(log, f"{made.name}.a")).replace("t", "") == "rrc"


def test_rows_that_a_filter_has_let_pass_are_deleted(log: str) -> None:
    data = database(a={1: "keep", 2: "drop"})
    made = config(new_name(), filters={"a": "row.text == 'keep'"}, tombstones=False)
    run_to_end(log, made, data)
    data.commit(Truncate("a"))
    run_to_end(log, made, data)
    rows = records(log, f"{made.name}.a")
    assert [(event["op"], parsed(row.key)["id"]) for row, event in zip(rows, events(rows),
            strict=True)] == [("r", 1), ("d", 1)]  # fmt: skip


def test_tables_that_share_a_topic(log: str) -> None:
    """Only those rows are deleted whose last event is of the table."""
    name = new_name()
    data = database(a={1: "x", 2: "x"}, b={3: "x", 4: "x"})
    made = config(name, topics={"*": f"{name}.all"})
    run_to_end(log, made, data)
    data.commit(Step("b", 2, "y"), Truncate("a"))
    run_to_end(log, made, data)
    assert rebuilt(records(log, f"{name}.all")) == {2: "y", 3: "x", 4: "x"}
    data.commit(Truncate("b"), Step("a", 1, "z"))
    run_to_end(log, made, data)
    assert rebuilt(records(log, f"{name}.all")) == {1: "z"}


def test_another_table_in_the_topic_of_a_table(log: str) -> None:
    """Also one whose columns have the names of fields of a source block."""
    name = new_name()
    data = database(a={1: "x"})
    columns = (TableColumn("id", INT, optional=False), TableColumn("table", STRING))
    data.create("audit", Table("", "", "audit", columns, ("id",)))
    data.commit(Step("audit", 7, "a"), Step("audit", 8, "b"))
    made = config(name, topics={"audit": f"{name}.a"})
    run_to_end(log, made, data)
    data.commit(Truncate("a"))
    it = run_to_end(log, made, data)
    rows = records(log, f"{name}.a")
    assert [parsed(row.key)["id"] for row in rows[3:]] == [1, 1]
    assert it.status().error == ""


def test_a_database_that_was_renamed(log: str) -> None:
    """Its name is not in the topic's: the rows are what they were."""
    data = database(a={1: "x", 2: "y"})
    made = config(new_name())
    run_to_end(log, made, data)
    data.name = "shop-live"
    data.commit(Step("a", 3, "z"))
    data.commit(Truncate("a"))
    it = run_to_end(log, made, data)
    rows = records(log, f"{made.name}.a")
    assert ops(rows) == "rrc" + "d-d-d-"
    assert it.status().error == ""


@pytest.mark.parametrize("snapshot", ["initial", "always"])
def test_two_captures_with_one_topic(log: str, snapshot: str) -> None:
    """Each deletes its own rows only: when a table is truncated, and after a snapshot."""
    names = new_name(), new_name()
    topic = f"{names[0]}.all"
    ours, theirs = database(a={1: "x", 2: "x"}), database(a={101: "y", 102: "y"})
    ours.server, theirs.server = names
    mine, other = (config(name, topics={"*": topic}, snapshot=snapshot) for name in names)
    run_to_end(log, mine, ours)
    run_to_end(log, other, theirs)
    assert rebuilt(records(log, topic)) == {1: "x", 2: "x", 101: "y", 102: "y"}
    ours.commit(Truncate("a"))
    it = run_to_end(log, mine, ours)
    assert rebuilt(records(log, topic)) == {101: "y", 102: "y"}
    assert it.status().error == ""


def test_rows_of_another_capture_in_a_topic_that_is_not_shared(log: str) -> None:
    """It was set otherwise, or another one is: nobody may take its rows for ours, or be silent."""
    name = new_name()
    data, theirs = database(a={1: "x", 2: "x"}), database(b={9: "y", 2: "y"})
    run_to_end(log, config(new_name(), topics={"*": f"{name}.a"}), theirs)
    it = run_to_end(log, config(name), data)
    assert rebuilt(records(log, f"{name}.a")) == {1: "x", 2: "x", 9: "y"}
    assert "holds 1 rows that do not look like its table's own" in it.status().error
    data.commit(Truncate("a"))
    it = run_to_end(log, config(name), data)
    rows = records(log, f"{name}.a")
    assert ops(rows[4:]) == "d-d-t"
    assert "expanded" not in parsed(rows[-1].value)
    assert "holds 1 rows that do not look like its own" in it.status().error


def test_what_was_masked_since_is_not_told_again(log: str) -> None:
    data = database(a={1: "secret", 2: "x" * 100})
    name = new_name()
    run_to_end(log, config(name), data)
    masked = config(name, columns={"mask": {"a.text": "***"}})
    data.commit(Truncate("a"))
    run_to_end(log, masked, data)
    gone = [event["before"] for event in events(records(log, f"{name}.a"))[2:]]
    assert gone == [{"id": 1, "text": None}, {"id": 2, "text": None}]


def test_what_nothing_tells_apart_is_told_as_a_truncate(log: str) -> None:
    """Without a key, or with one that several rows have: whoever keeps the rows must know."""
    data = Database()
    columns = (TableColumn("id", INT, optional=False), TableColumn("text", STRING))
    data.create("loose", Table("", "", "loose", columns, ()))
    data.create("keyed", Table("", "", "keyed", columns, ()))
    data.create("a")
    data.commit(Step("loose", 1, "x"), Step("keyed", 1, "x"), Step("a", 1, "x"))
    made = config(new_name(), keys={"a": ["text"], "keyed": ["text"]})
    run_to_end(log, made, data)
    data.commit(Truncate("loose"), Truncate("keyed"), Truncate("a"))
    it = run_to_end(log, made, data)
    for table, key in (("loose", None), ("keyed", b"null"), ("a", b"null")):
        rows = records(log, f"{made.name}.{table}")
        assert ops(rows) == "rt"
        assert (rows[-1].key, "expanded" in parsed(rows[-1].value)) == (key, False)
    assert "does not tell its rows apart" in it.status().error


def test_a_topic_that_has_forgotten_rows_is_told_of_the_truncate_too(log: str) -> None:
    data = database(a=some(10))
    made = config(new_name())
    topic = f"{made.name}.a"
    with Cluster(log) as cluster:
        create(cluster, topic, config={"cleanup.policy": "compact,delete"})
        run_to_end(log, made, data)
        assert cluster.any().call(delete_records(topic, 4)).topics[0].partitions[0].error_code == 0
    data.commit(Truncate("a"), Step("a", 7, "y"), Truncate("a"))
    it = run_to_end(log, made, data)
    rows = records(log, topic)
    assert ops(rows) == "r" * 6 + "d-" * 6 + "tc" + "d-"
    assert "expanded" not in parsed(rows[-4].value)
    assert "has forgotten some of its rows" in it.status().error


def test_in_avro_it_is_tombstones(log: str) -> None:
    name = new_name()
    data = database(a={1: "x", 2: "y"}, b={1: "x"})
    made = config(name, format="avro", skip=["none"])
    run_to_end(log, made, data)
    data.commit(Truncate("a"), Truncate("a"), Step("a", 2, "z"))
    run_to_end(log, made, data)
    with Cluster(log) as cluster:
        schemas = schema_texts(last_values(cluster, "__penstock_schemas").values())
    told = [
        (read(schemas, row.key), row.value and read(schemas, row.value)["op"])
        for row in records(log, f"{name}.a")
    ]
    both = [({"id": 1}, "r"), ({"id": 2}, "r"), ({"id": 1}, None), ({"id": 2}, None)]
    assert told == [*both, (None, "t"), (None, "t"), ({"id": 2}, "c")]


@pytest.mark.parametrize(
    ("changed", "wanted"),
    [({"topics": {"b": "PREFIX.a"}}, "rrt"), ({"topics": {"b": "other"}}, "rt")],
)
def test_in_avro_a_topic_that_others_may_share_is_told_of_the_truncate(
    log: str, changed: dict[str, Any], wanted: str
) -> None:
    """Nobody looks into its events there."""
    name = new_name()
    topics = {table: topic.replace("PREFIX", name) for table, topic in changed["topics"].items()}
    data = database(a={1: "x"}, b={2: "y"})
    made = config(name, format="avro", topics=topics)
    run_to_end(log, made, data)
    data.commit(Truncate("a"))
    run_to_end(log, made, data)
    with Cluster(log) as cluster:
        schemas = schema_texts(last_values(cluster, "__penstock_schemas").values())
    rows = records(log, f"{name}.a")
    assert "".join((row.value and read(schemas, row.value)["op"]) or "-" for row in rows) == wanted


def test_several_partitions_and_what_another_has_open(log: str) -> None:
    data = database(a=some(500))
    made = config(new_name(), partitions=3)
    run_to_end(log, made, data)
    topic = f"{made.name}.a"
    with Cluster(log) as cluster, LogWriter(cluster, transactional_id=new_name()) as other:
        other.begin()
        for partition in range(3):
            other.write(topic, [b'{"id":77777}'], [b"{}"], partition=partition)
        other.flush()
        data.commit(*(Step("a", id_, "y") for id_ in range(450, 550)))
        run_to_end(log, made, data)
        # What was committed since is beyond what readers see.
        data.commit(Step("a", 600, "z"), Truncate("a"), Step("a", 1, "new"))
        run_to_end(log, made, data)
        other.abort()
    assert rebuilt(records(log, topic)) == {1: "new"}


def test_a_topic_that_does_not_exist_yet(log: str) -> None:
    data = database(a={})
    made = config(new_name())
    run_to_end(log, made, data)
    data.commit(Truncate("a"))
    run_to_end(log, made, data)
    assert records(log, f"{made.name}.a") == []


def test_large_values_are_not_taken_from_before_a_truncate(log: str) -> None:
    data = database(a={1: "x", 2: "y"})
    made = config(new_name(), unavailable="fill")
    run_to_end(log, made, data)
    data.commit(Truncate("a"), Step("a", 1, "z"), Truncate("a"))
    run_to_end(log, made, data)
    assert ops(records(log, f"{made.name}.a")) == "rr" + "d-d-" + "c" + "d-"


# ---- much of it --------------------------------------------------------------------------


@pytest.fixture
def in_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emptying, "_DRAIN_KEYS", 10)


@pytest.mark.usefixtures("in_small_steps")
def test_progress_is_told(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = database(a=some(95))
    made = config(new_name(), status_ms=10)
    run_to_end(log, made, data)
    seen: list[Progress | None] = []
    did = emptying.Emptying._did

    def spy(self: emptying.Emptying, count: int) -> None:
        did(self, count)
        seen.append(self.progress())

    monkeypatch.setattr(emptying.Emptying, "_did", spy)
    data.commit(Truncate("a"))
    it = run_to_end(log, made, data)
    done = [item for item in seen if item is not None]
    assert len(done) == len(seen) >= 10
    assert {(item.table, item.is_truncate) for item in done} == {("a", True)}
    assert [item.rows for item in done] == sorted(item.rows for item in done)
    assert done[-1].estimate is not None
    assert done[0].rows < done[-1].rows <= done[-1].estimate
    assert it.status().snapshot is None


@pytest.mark.usefixtures("in_small_steps")
def test_stopped_in_the_middle_it_is_done_again_as_a_whole(
    log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = database(a=some(95))
    made = config(new_name())
    run_to_end(log, made, data)
    stop, did = threading.Event(), emptying.Emptying._did

    def halt(self: emptying.Emptying, count: int) -> None:
        progress = self.progress()
        if progress is not None and progress.rows > 120:
            stop.set()
        did(self, count)

    with monkeypatch.context() as patched:
        patched.setattr(emptying.Emptying, "_did", halt)
        data.commit(Step("a", 5, "y"))
        data.commit(Truncate("a"), Step("a", 1, "new"))
        it = capture(log, made, data)
        thread, failures = on_thread(lambda: it.run(stop))
        thread.join(60)
    assert (thread.is_alive(), failures) == (False, [])
    assert rebuilt(records(log, f"{made.name}.a")) == {**some(95), 5: "y"}
    run_to_end(log, made, data)
    rows = records(log, f"{made.name}.a")
    assert ops(rows) == "r" * 95 + "u" + "d-" * 95 + "c"
    assert rebuilt(rows) == {1: "new"}


def test_the_next_one_reads_only_what_came_since(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = database(a=some(300))
    made = config(new_name())
    counts: list[int] = []
    did = emptying.Emptying._did

    def spy(self: emptying.Emptying, count: int) -> None:
        counts.append(count)
        did(self, count)

    monkeypatch.setattr(emptying.Emptying, "_did", spy)
    stop = threading.Event()
    it: Capture = capture(log, made, data)
    thread, failures = on_thread(lambda: it.run(stop))
    topic = f"{made.name}.a"
    eventually(lambda: rebuilt(records(log, topic)) == some(300))
    for number in range(3):
        data.commit(Truncate("a"))
        data.commit(Step("a", number, "y"))
        wanted = {number: "y"}
        eventually(partial(lambda wanted: rebuilt(records(log, topic)) == wanted, wanted))
    stop.set()
    thread.join(60)
    assert failures == []
    # All rows; then their deletes and tombstones, and the row; then those of that one, and a row.
    assert counts == [300, 601, 3]


@pytest.mark.usefixtures("in_small_steps")
def test_many_deletes_are_not_read_again(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = database(a=some(95))
    made = config(new_name())
    run_to_end(log, made, data)
    counts: list[int] = []
    load = Ghosts.load

    def spy(self: Ghosts, topic: str, records: Any, **more: Any) -> None:
        found = list(records)
        counts.append(len(found))
        load(self, topic, found, **more)

    monkeypatch.setattr(Ghosts, "load", spy)
    data.commit(Step("a", 1, "y"), Truncate("a"), Truncate("a"), Step("a", 2, "z"))
    data.commit(Truncate("a"))
    run_to_end(log, made, data)
    assert counts == [96, 0, 1]
    assert rebuilt(records(log, f"{made.name}.a")) == {}


def test_large_rows_are_not_gathered(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emptying, "_DRAIN_BYTES", 10_000)
    data = database(a=some(50, "x" * 1_000))
    made = config(new_name())
    run_to_end(log, made, data)
    counts: list[int] = []
    put = Log.put

    def spy(self: Log, batch: Batch) -> None:
        counts.append(batch.count)
        put(self, batch)

    monkeypatch.setattr(Log, "put", spy)
    data.commit(Truncate("a"))
    run_to_end(log, made, data)
    assert sum(counts) == 100
    assert max(counts) <= 20
    assert rebuilt(records(log, f"{made.name}.a")) == {}


def test_more_than_fit_into_a_transaction(log: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(emptying, "_ROWS_PER_S", 10)
    data = database(a=some(50))
    made = config(new_name(), transaction_timeout_ms=2_000, batch_changes=10)
    run_to_end(log, made, data)
    data.commit(Step("a", 99, "y"), Truncate("a"), Step("a", 7, "z"))
    it = run_to_end(log, made, data)
    rows = records(log, f"{made.name}.a")
    assert ops(rows) == "r" * 50 + "ctc"
    assert "expanded" not in parsed(rows[-2].value)
    assert "holds 51 rows, more than are deleted within" in it.status().error
    # What it advises: in transactions of the usual size.
    longest: list[int] = []
    commit = Log.commit

    def spy(self: Log, state: State) -> None:
        longest.append(self.records)
        commit(self, state)

    with monkeypatch.context() as patched:
        patched.setattr(Log, "commit", spy)
        run_to_end(log, config(made.name, snapshot="always", batch_changes=10), data)
    assert rebuilt(records(log, f"{made.name}.a")[53:]) == {7: "z"}
    assert ops(records(log, f"{made.name}.a")[53:]).count("d") == 50
    assert max(longest) <= 20
    # Without transactions nothing hurries.
    data.commit(*(Step("a", id_, "y") for id_ in range(50)))
    data.commit(Truncate("a"))
    run_to_end(log, config(made.name, transactions=False, transaction_timeout_ms=2_000), data)
    assert rebuilt(records(log, f"{made.name}.a")[53:]) == {}


def test_the_folder_for_files(log: str, tmp_path: Path) -> None:
    """It is made; where that cannot be, it is named."""
    data = database(a=some(3))
    name = new_name()
    run_to_end(log, config(name), data)
    data.commit(Truncate("a"))
    (tmp_path / "file").touch()
    with pytest.raises(CaptureError, match=str(tmp_path / "file")) as failed:
        run_to_end(log, config(name, state_dir=str(tmp_path / "file" / "deep")), data)
    assert "state_dir" in failed.value.advice
    assert ops(records(log, f"{name}.a")) == "rrr"
    run_to_end(log, config(name, state_dir=str(tmp_path / "new" / "deep")), data)
    assert ops(records(log, f"{name}.a")) == "rrr" + "d-d-d-"
    assert list((tmp_path / "new" / "deep").iterdir()) == []


def test_what_others_have_put_into_the_topic_is_left_alone(log: str) -> None:
    data = database(a={1: "x"})
    made = config(new_name())
    run_to_end(log, made, data)
    with Cluster(log) as cluster, LogWriter(cluster) as other:
        values = [b"no json", b"[]", b'{"source":{"table":"other"}}', b'{"payload":7}']
        other.write(f"{made.name}.a", [b"p", b"q", b"r", b"s"], values)
    data.commit(Truncate("a"))
    it = run_to_end(log, made, data)
    rows = records(log, f"{made.name}.a")[5:]
    assert [row.key for row in rows] == [b'{"id":1}', b'{"id":1}', b"null"]
    # Whether they were the table's once, nobody knows.
    assert "expanded" not in parsed(rows[-1].value)
    assert "holds 4 rows that do not look like its own" in it.status().error
