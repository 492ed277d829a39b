"""Dead letters of flows and sinks from the command line: shown, and sent back once."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from penstock.cli import dead_letters
from penstock.client.connection import Cluster
from penstock.client.topics import create
from penstock.client.writer import LogWriter
from penstock.spark.flows.folder import Folder, Record
from penstock.spark.sinking.letters import Letter as Aside
from penstock.spark.sinking.letters import Letters
from penstock.testing.broker import Broker
from penstock.testing.reading import read_topic
from tests.cli.runner import Ran, run

SINK = """
[sinks.orders]
topic = "{topic}"
url = "sqlite:///shop.db"
key = "id"
fields = "id bigint, total double"
"""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dead_letters, "_POLL_S", 0.02)


@pytest.fixture
def source(at: str, broker: Broker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A topic whose records 1 and 3 a flow and a sink have put aside."""
    topic = f"orders-{uuid4().hex[:8]}"
    monkeypatch.chdir(tmp_path)
    Path("penstock.toml").write_text(SINK.format(topic=topic))
    Folder(Path("flows")).write(Record("totals", dead_letters=(f"{topic}.dead",)))
    with Cluster(broker.bootstrap) as cluster:
        create(cluster, topic)
        create(cluster, f"{topic}.dead")
        with LogWriter(cluster) as writer:
            keys = [b"%d" % number for number in range(4)]
            headers = [[("trace", b"%d" % number)] for number in range(4)]
            writer.write(topic, keys, [b"{%d" % number for number in range(4)], headers=headers)
            writer.flush()
            flow = {"topic": topic, "partition": "0", "offset": "1", "timestamp": "5",
                    "reason": "field total is not double", "flow": "totals"}  # fmt: skip
            told = [(f"penstock.error.{name}", each.encode()) for name, each in flow.items()]
            writer.write(f"{topic}.dead", [b"1"], [b"{1"], headers=[[("trace", b"1"), *told]])
            writer.flush()
        letters = Letters(cluster, f"{topic}.dead", "orders")
        letters.write([Aside(topic, 0, 3, "field total is not double: 'x'", b"3", b"{3")])
    return topic


def flows(*words: str) -> Ran:
    return run("flows", *words, "--data", "flows")


def test_letters_are_shown_with_position_and_reason(source: str) -> None:
    shown = flows("dead-letters", "totals", "--json").ok().json
    assert shown["dead_letters"] == [{"topic": source, "count": 1}]
    (letter,) = shown["letters"]
    assert (letter["topic"], letter["partition"], letter["offset"]) == (source, 0, 1)
    assert letter["message"] == "field total is not double"
    assert letter["headers"] == {"trace": "1"}
    table = run("sinks", "dead-letters", "orders").ok().out
    assert f"{source}-0@3" in table
    assert "field total is not double: 'x'" in table
    assert f"{source}-0@1" not in table


def test_letters_go_back_once(broker: Broker, source: str) -> None:
    assert flows("redrive", "totals", "--json").ok().json["sent"] == 1
    assert len(read_topic(broker.bootstrap, source)) == 4
    assert flows("redrive", "totals", "--execute", "--json").ok().json["sent"] == 1
    again = flows("redrive", "totals", "--execute", "--json").ok().json
    assert (again["sent"], again["sent_before"]) == (0, 1)
    run("sinks", "redrive", "orders", "--execute").ok()
    records = read_topic(broker.bootstrap, source)[4:]
    assert [(each.key, each.value) for each in records] == [(b"1", b"{1"), (b"3", b"{3")]
    # As they were: what was said of them stays behind.
    assert [list(each.headers) for each in records] == [["trace"], ["trace"]]


def test_a_flow_without_letters_says_so(source: str) -> None:
    Folder(Path("flows")).write(Record("quiet"))
    found = flows("dead-letters", "quiet")
    assert found.status == 1
    assert "has no topic for dead letters" in found.err
    Folder(Path("flows")).write(Record("other", dead_letters=(f"{source}.dead",)))
    assert flows("dead-letters", "other", "--json").ok().json["letters"] == []
