"""`penstock topics` on a real broker."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import Producer

from tests.cli.runner import run

pytestmark = pytest.mark.usefixtures("at")


def test_a_topic_lives_and_goes(topic: str) -> None:
    assert f"created {topic}" in run("topics", "create", topic, "--partitions", "3").ok().err
    described = run("topics", "describe", topic, "--json").ok().json[0]
    assert [part["partition"] for part in described["partitions"]] == [0, 1, 2]
    assert f"deleted {topic}" in run("topics", "delete", topic, "--yes").ok().err
    gone = run("topics", "describe", topic)
    assert gone.status == 1
    assert "penstock topics list" in gone.err


def test_topics_are_listed_with_the_offsets_that_they_span(topic: str, at: str) -> None:
    run("topics", "create", topic, "-p", "2").ok()
    run("produce", topic, stdin=b"a\nb\nc\n").ok()

    def listed() -> dict[str, Any]:
        found = {row["name"]: row for row in run("topics", "list", "--json").ok().json}
        row: dict[str, Any] = found[topic]
        return row

    assert listed() == {"name": topic, "partitions": 2, "offsets": 3}
    # The end of a transaction takes an offset and is no record: nothing here calls it one.
    producer = Producer({"bootstrap.servers": at, "transactional.id": topic})
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(topic, b"d", partition=0)
    producer.commit_transaction(60)
    assert listed() == {"name": topic, "partitions": 2, "offsets": 5}
    for shown in (run("topics", "list").ok().out, run("topics", "describe", topic).ok().out):
        assert topic in shown
        assert "offsets" in shown
        assert "records" not in shown


def test_settings_say_whose_they_are(topic: str) -> None:
    run("topics", "create", topic, "-c", "retention.ms=1000", "-c", "durability=memory").ok()
    described = run("topics", "describe", topic, "--json").ok().json[0]
    settings = {item["name"]: item for item in described["settings"]}
    assert settings["retention.ms"] == {"name": "retention.ms", "value": "1000", "source": "topic"}
    assert settings["segment.bytes"]["source"] != "topic"
    assert "none survives" in described["durability"]


def test_describe_shows_offsets_overrides_and_the_promise(topic: str) -> None:
    run("topics", "create", topic, "-c", "durability=disk", "-c", "retention.ms=86400000").ok()
    run("produce", topic, stdin=b"a\nb\n").ok()
    shown = run("topics", "describe", topic).ok().out
    assert "1 partition, 2 offsets" in shown
    assert "survives a crash of the broker and a loss of power" in shown
    assert "retention.ms" in shown
    assert "1d" in shown
    assert "segment.ms" not in shown
    assert "segment.ms" in run("topics", "describe", topic, "--all").ok().out


def test_settings_and_partitions_change(topic: str) -> None:
    run("topics", "create", topic, "-c", "retention.ms=1000").ok()
    run(
        "topics", "alter", topic, "-c", "segment.ms=5000", "--reset", "retention.ms", "-p", "4"
    ).ok()
    described = run("topics", "describe", topic, "--json").ok().json[0]
    own = {s["name"]: s["value"] for s in described["settings"] if s["source"] == "topic"}
    assert own == {"segment.ms": "5000"}
    assert len(described["partitions"]) == 4


def test_what_the_broker_refuses_is_explained(topic: str) -> None:
    run("topics", "create", topic, "-p", "2").ok()
    again = run("topics", "create", topic)
    assert again.status == 1
    assert "--if-not-exists" in again.err
    assert "already there" in run("topics", "create", topic, "--if-not-exists").ok().err
    for args in (
        ("create", "not a name"),
        ("create", f"{topic}-x", "-c", "no.such.setting=1"),
        ("create", f"{topic}-x", "-c", "retention.ms=often"),
        ("alter", topic, "-p", "1"),
        ("alter", topic, "-c", "durability=paper"),
        ("alter", f"{topic}-none", "-c", "retention.ms=1"),
        ("delete", f"{topic}-none", "--yes"),
    ):
        ran = run("topics", *args)
        assert ran.status == 1, args
        assert ran.err.startswith("error: "), args
        assert "Traceback" not in ran.err


@pytest.mark.parametrize(
    "args",
    [
        ("alter", "t"),
        ("alter", "t", "-c", "a=1", "--reset", "a"),
        ("create", "t", "-c", "retention.ms"),
        ("create", "t", "-p", "0"),
        ("delete", "t"),
        ("list", "-X", "no.such.client.setting=1"),
        ("no-such-command",),
    ],
)
def test_wrong_use_ends_with_2(args: tuple[str, ...]) -> None:
    ran = run("topics", *args)
    assert ran.status == 2
    assert "Traceback" not in ran.err


def test_one_topic_that_cannot_be_deleted_does_not_stop_the_others(topic: str) -> None:
    run("topics", "create", topic).ok()
    ran = run("topics", "delete", f"{topic}-none", topic, "--yes")
    assert ran.status == 1
    assert f"deleted {topic}" in ran.err


def test_without_a_broker_the_message_says_how_to_get_one() -> None:
    ran = run("topics", "list", "--bootstrap", "127.0.0.1:1")
    assert ran.status == 1
    assert "no broker answers at 127.0.0.1:1" in ran.err
    assert "penstock up" in ran.err
