"""`penstock flows cleanup`, and what is told at rest of sinks whose topic was rebuilt."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition

from penstock.client.connection import Cluster
from penstock.client.metadata import Metadata
from penstock.client.topics import create
from penstock.sinks import Position, Schema
from penstock.sinks.fields import from_text
from penstock.sinks.spec import SinkSpec
from penstock.sinks.webhook import WebhookSink
from penstock.spark.flows.folder import Fingerprint, Folder, Record
from penstock.spark.sinking.folder import SinkFolder
from penstock.testing.sinks import changes, never
from tests.cli.runner import run


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, topic: str) -> Folder:
    """A project whose flow was rebuilt twice; versions 1 to 3 of its topic are there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)
    found = Folder(tmp_path / ".penstock" / "flows")
    prints = {str(number): Fingerprint().as_dict() for number in (1, 2, 3)}
    found.write(
        Record("visiting", topics=(topic,), asides=(f"{topic}.late",), generation=3,
               fingerprints=prints)
    )  # fmt: skip
    return found


def topics(at: str, name: str) -> set[str]:
    with Cluster(at) as cluster:
        return set(Metadata(cluster).topics(pattern=f"{name}.*"))


def make(at: str, *names: str) -> None:
    with Cluster(at) as cluster:
        for name in names:
            create(cluster, name, partitions=1)


def test_a_list_first_and_then_it_is_deleted(folder: Folder, at: str, topic: str) -> None:
    made = {topic, f"{topic}.v2", f"{topic}.v3", f"{topic}.late.v2", f"{topic}.other"}
    make(at, *made)
    (folder.path / "visiting" / "g2").mkdir()
    consumer = Consumer({"bootstrap.servers": at, "group.id": f"g-{topic}"})
    consumer.commit(offsets=[TopicPartition(topic, 0, 0)], asynchronous=False)
    consumer.close()
    listed = run("flows", "cleanup", "--json").ok().json
    assert {each["name"]: each["kept"] for each in listed} == {
        topic: f"group g-{topic} has read it (--force)",
        f"{topic}.v2": "",
        f"{topic}.late.v2": "",
        ".penstock/flows/visiting/g2": "",
    }
    assert "nothing was deleted; --yes deletes 3 items" in run("flows", "cleanup").ok().err
    assert topics(at, topic) == made
    run("flows", "cleanup", "visiting", "--yes").ok()
    assert topics(at, topic) == {topic, f"{topic}.v3", f"{topic}.other"}
    assert not (folder.path / "visiting" / "g2").exists()
    assert folder.record("visiting").cleaned == (2,)
    run("flows", "cleanup", "--yes", "--force").ok()
    assert topics(at, topic) == {f"{topic}.v3", f"{topic}.other"}
    assert "there is nothing to clean up" in run("flows", "cleanup").ok().err
    # A topic of this name is another one by now.
    make(at, topic)
    run("flows", "cleanup", "--yes", "--force").ok()
    assert topic in topics(at, topic)


def test_checkpoints_at_a_url_are_cleaned_up(
    folder: Folder, at: str, topic: str, tmp_path: Path
) -> None:
    url = f"file://{tmp_path}/far"
    folder.write(replace(folder.record("visiting"), checkpoints=url))
    for number in (2, 3):
        (tmp_path / "far" / "visiting" / f"g{number}" / "offsets").mkdir(parents=True)
    [listed] = run("flows", "cleanup", "--json").ok().json
    assert (listed["name"], listed["kind"]) == (f"{url}/visiting/g2", "checkpoint")
    run("flows", "cleanup", "--yes").ok()
    assert [each.name for each in (tmp_path / "far" / "visiting").iterdir()] == ["g3"]
    Folder(folder.path, url).forget_checkpoint("visiting", 3)
    assert not list((tmp_path / "far" / "visiting").iterdir())


def test_a_sink_in_an_old_version_does_not_look_healthy(
    folder: Folder, at: str, topic: str, tmp_path: Path
) -> None:
    make(at, topic, f"{topic}.v3")
    section = f'[sinks.visits]\ntopic = "{topic}"\nurl = "sqlite:///shop.db"\nkey = "id"\n'
    (tmp_path / "penstock.toml").write_text(section)
    spec = SinkSpec("visits", topic, f"sqlite:///{tmp_path}/shop.db", ("id",), "id bigint")
    with spec.sink() as sink:
        schema = Schema.of(from_text("id bigint"), "id")
        sink.open(schema)
        some = changes(schema, [{"id": 1}], [], since=0, until=5)
        sink.apply(replace(some, position=Position({(topic, 0): 5})), never)
    [found] = run("sinks", "list", "--json").ok().json
    assert found["error"] == f"it was filled from {topic}, whose place {topic}.v3 has taken"
    assert "rebuilds it from there" in found["advice"]
    assert found["alarming"]
    # What it was filled from is kept until it has followed.
    [kept] = run("flows", "cleanup", "--json").ok().json
    assert (kept["name"], kept["kept"]) == (topic, "sink visits was filled from it")


def test_a_webhook_begins_anew_where_it_is_told(
    folder: Folder, at: str, topic: str, tmp_path: Path
) -> None:
    (tmp_path / "penstock.toml").write_text(
        f'[sinks.hook]\ntopic = "{topic}"\nurl = "webhook+http://127.0.0.1:9/"\n'
    )
    ran = run("sinks", "rebuild", "hook", "--yes")
    assert ran.status == 1
    assert "cannot be built beside itself" in ran.err
    assert "--from beginning" in ran.err
    run("sinks", "rebuild", "hook", "--yes", "--from", "end").ok()
    record = SinkFolder(Path(".penstock") / "sinks").sink("hook")
    assert (record.anew, record.paused) == ("end", False)
    assert not WebhookSink.rebuildable
