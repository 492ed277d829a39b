"""`penstock verify` where records cannot be read: they are differences, and are counted."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from uuid import uuid4

import pytest
from confluent_kafka import Producer

from penstock.cli.project import load
from penstock.cli.verifying import verify
from penstock.cli.verifying.flow_graph import FlowGraph
from penstock.client.connection import Cluster
from penstock.client.topics import create
from penstock.client.writer import LogWriter
from penstock.spark.flows.declare import stream
from penstock.spark.flows.folder import Folder, Record
from penstock.spark.flows.manager import _describe
from penstock.spark.sinking.letters import HEADER_PREFIX, Letter, Letters
from tests.cli.runner import run
from tests.cli.test_verify import Feeder

COUNT = 300
BAD = b'{"id": "not a number"}'


class Topic:
    """A topic of rows, and a sink `s` of it."""

    def __init__(self, at: str, folder: Path) -> None:
        self.at, self.name = at, f"t-{uuid4().hex[:8]}"
        with Cluster(at) as cluster:
            create(cluster, self.name, partitions=2)
        (folder / "penstock.toml").write_text(
            f'[sinks.s]\ntopic = "{self.name}"\nurl = "sqlite:///s.db"\nkey = "id"\n'
            'fields = "id bigint, n bigint"\nformat = "json"\n'
        )

    def write(self, *records: tuple[int, bytes | None]) -> None:
        producer = Producer({"bootstrap.servers": self.at})
        for key, value in records:
            producer.produce(self.name, value, json.dumps({"id": key}))
        assert producer.flush(60) == 0


def row(key: int, number: int = 0) -> tuple[int, bytes]:
    return key, json.dumps({"id": key, "n": number}).encode()


@pytest.fixture
def rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> Topic:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)
    return Topic(at, tmp_path)


def test_a_sink_of_nothing_but_dead_letters_is_not_equal(rows: Topic) -> None:
    rows.write(*((key, b'{"id": 1, "n": "many"}') for key in range(COUNT)))
    Feeder("s", rows.at).once()
    ran = run("verify", f"topic:{rows.name}", "s", "--json", "--limit", "5")
    assert ran.status == 1, ran.err
    found = ran.json
    assert (found["equal"], found["empty"], found["rows"]) == (False, False, 0)
    assert (found["different"], found["set_aside"]) == (COUNT, COUNT)
    assert len(found["differences"]) == 5
    assert found["differences"][0]["kind"] == "aside"
    assert "field n is not int64: 'many'" in found["differences"][0]["reason"]
    assert found["dead_letters"] == [
        {"of": "sink s", "topic": f"{rows.name}.dead", "count": COUNT,
         "command": f"penstock consume {rows.name}.dead --json"}
    ]  # fmt: skip
    ran = run("verify", f"topic:{rows.name}", "s", "--limit", "5")
    assert ran.status == 1
    assert "0 rows compared, 300 keys set aside" in ran.err
    assert f"dead letters of sink s: 300 in {rows.name}.dead; penstock consume" in ran.err
    # The command that it names shows them.
    assert len(run("consume", f"{rows.name}.dead", "--json").ok().json_lines) == COUNT


def test_a_later_record_of_the_key_makes_it_good(rows: Topic) -> None:
    rows.write(row(1), row(2), row(3), (2, BAD), (3, BAD), (4, BAD), (5, BAD))
    Feeder("s", rows.at).once()
    rows.write(row(3, 7), (5, None))
    Feeder("s", rows.at).once()
    report = verify(load(), f"topic:{rows.name}", "s", timeout_s=60, bootstrap=rows.at)
    # The store has of 2 what was good before, of 4 nothing.
    told = {(each.kind, json.loads(each.key["key"])["id"]) for each in report.differences}
    assert told == {("aside", 2), ("aside", 4)}
    assert (report.rows, report.stored_rows, report.set_aside, report.count) == (3, 3, 2, 2)
    rows.write(row(2), row(4))
    Feeder("s", rows.at).once()
    report = verify(load(), f"topic:{rows.name}", "s", timeout_s=60, bootstrap=rows.at)
    assert (report.equal, report.rows, report.set_aside) == (True, 4, 0)
    # That there were some is told all the same.
    assert [each.count for each in report.dead_letters] == [4]


def test_records_keyed_otherwise_count_one_by_one(rows: Topic) -> None:
    # The record's key says nothing about the row.
    rows.write((9, json.dumps({"id": 1, "n": 1}).encode()), (9, BAD), (9, BAD),
               (9, json.dumps({"id": 2, "n": 1}).encode()))  # fmt: skip
    Feeder("s", rows.at).once()
    report = verify(load(), f"topic:{rows.name}", "s", timeout_s=60, bootstrap=rows.at)
    assert (report.rows, report.set_aside, report.count) == (2, 2, 2)


def test_two_empty_sides_are_said_to_be_empty(rows: Topic) -> None:
    rows.write((1, None))
    Feeder("s", rows.at).once()
    ran = run("verify", f"topic:{rows.name}", "s").ok()
    assert "both are empty, nothing was compared" in ran.err
    assert run("verify", f"topic:{rows.name}", "s", "--json").ok().json["empty"]
    with closing(sqlite3.connect("s.db")) as store, store:
        store.execute("INSERT INTO s (id, n) VALUES (1, 1)")
    ran = run("verify", f"topic:{rows.name}", "s", "--json")
    assert (ran.status, ran.json["empty"]) == (1, False)


def test_letters_of_the_flow_that_wrote_the_topic(rows: Topic, tmp_path: Path) -> None:
    rows.write(row(1))
    Feeder("s", rows.at).once()
    source = f"{rows.name}.in"
    orders = stream(source, json="id bigint, price decimal(10,2)", dead_letters=f"{source}.aside")
    record = Record("made", inputs=(_describe(orders),), outputs=(f"topic {rows.name}",))
    Folder(tmp_path / ".penstock" / "flows").write(record)
    (flow,) = FlowGraph(tmp_path / ".penstock" / "flows").upstream(rows.name)
    assert (flow.streams, flow.dead_letters) == ((source,), (f"{source}.aside",))
    assert FlowGraph(tmp_path / "nothing").upstream(rows.name) == []
    with Cluster(rows.at) as cluster:
        letter = Letter(source, 0, 0, "bad", b"k", b"v")
        Letters(cluster, f"{source}.aside", "other").write([letter], as_they_are=True)
        with LogWriter(cluster) as writer:
            # As a flow writes them.
            told = [("mine", b"x"), (f"{HEADER_PREFIX}topic", source.encode())]
            for name in ("made", "made", "other", ""):
                headers = [*told, (f"{HEADER_PREFIX}flow", name.encode())] if name else told
                writer.write(f"{source}.aside", [b"k"], [b"v"], headers=[headers])
            writer.flush()
    report = verify(load(), f"topic:{rows.name}", "s", timeout_s=60, bootstrap=rows.at)
    found = [(each.writer, each.topic, each.count) for each in report.dead_letters]
    assert found == [("sink s", f"{rows.name}.dead", 0), ("flow made", f"{source}.aside", 3)]
