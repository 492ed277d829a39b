"""`penstock queue`: what it shows, and that dead letters go back once."""

from __future__ import annotations

from uuid import uuid4

import pytest

from penstock.cli import dead_letters
from penstock.cli.dead_letters import LetterKind
from penstock.testing.broker import Broker
from penstock.wire.messages.share_group_heartbeat import ShareGroupHeartbeatRequest
from tests.broker.overload.guarded import commit
from tests.broker.raw import RawClient
from tests.broker.requests import create, fetch, one, records_of
from tests.broker.shares.members import REJECT, RELEASE, Taker, fill, numbered
from tests.broker.waits import wait_until
from tests.cli.runner import run


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer waits until it has as many letters as it is asked for, or until time is over."""
    monkeypatch.setattr(dead_letters, "_POLL_S", 0.02)


@pytest.fixture
def group(at: str) -> str:
    """A group that reads from the beginning and has a dead-letter topic."""
    name = f"g-{uuid4().hex[:8]}"
    run(
        "queue", "alter", name,
        "-c", "share.auto.offset.reset=earliest",
        "-c", "share.delivery.count.limit=1",
        "-c", f"errors.deadletterqueue.topic.name=dlq.{name}",
    ).ok()  # fmt: skip
    return name


def made(broker: Broker, topic: str, partitions: int = 1) -> str:
    with RawClient(broker.bootstrap) as client:
        client.call(create(topic, partitions))
    return topic


def kill(broker: Broker, group: str, topic: str, kinds: list[int], partition: int = 0) -> None:
    """Deliver as many records as there are answers, and answer so; wait for the letters."""
    fill(broker, topic, *numbered(len(kinds)), key=b"k", partition=partition)
    before = size(broker, f"dlq.{group}")
    with Taker(broker, group, topic) as taker:
        got = taker.fetch_all(partitions=[partition])[partition]
        first, last = got.offsets[0], got.offsets[-1]
        assert taker.acknowledge((first, last, kinds), partition=partition) == "NONE"
    wait_until(broker, lambda _: size_of(broker, f"dlq.{group}") == before + len(kinds))


def size_of(broker: Broker, topic: str) -> int:
    partition = broker.server.partition(topic, 0)
    return 0 if partition is None else partition.visible


def size(broker: Broker, topic: str, partition: int = 0) -> int:
    def look(_: object) -> int:
        found = broker.server.partition(topic, partition)
        return 0 if found is None else found.visible

    return broker.call(look)


def test_queues_are_shown(broker: Broker, group: str, topic: str) -> None:
    made(broker, topic)
    kill(broker, group, topic, [REJECT, RELEASE, REJECT])
    fill(broker, topic, *numbered(4))
    shown = run("queue", "inspect", group, "--json").ok().json
    assert shown["unfinished"] == 4
    assert shown["partitions"] == [{"topic": topic, "partition": 0, "start": 3, "unfinished": 4}]
    assert shown["settings"]["share.delivery.count.limit"] == "1"
    assert shown["dead_letters"] == [
        {"topic": topic, "reason": "limit", "count": 1},
        {"topic": topic, "reason": "rejected", "count": 2},
    ]
    assert [letter["value"] for letter in shown["letters"]] == ["0", "1", "2"]
    assert shown["letters"][1]["deliveries"] == 1
    text = run("queue", "inspect", group, "--letters", "1").ok()
    assert f"{topic}-0@2" in text.out
    assert f"{topic}-0@1" not in text.out


def test_dead_letters_go_back_once(broker: Broker, group: str, topic: str) -> None:
    made(broker, topic, partitions=3)
    kill(broker, group, topic, [REJECT, RELEASE, REJECT], partition=2)
    planned = run("queue", "redrive", group, "--json").ok().json
    assert (planned["executed"], planned["sent"]) == (False, 3)
    assert size(broker, topic, 2) == 3
    done = run("queue", "redrive", group, "--reason", "rejected", "--execute", "--json").ok().json
    assert (done["executed"], done["sent"]) == (True, 2)
    # In the same partition, as it was, without what the letter said.
    with RawClient(broker.bootstrap) as client:
        records = records_of(one(client.call(fetch(topic, {2: 0}), 12)).records)[3:]
    sent = [record for record in records if record.key == b"k"]
    assert [(record.value, record.headers) for record in sent] == [(b"0", ()), (b"2", ())]
    # What was sent is not sent again; what was not, is.
    rest = run("queue", "redrive", group, "--execute", "--json").ok().json
    assert (rest["sent"], rest["sent_before"]) == (1, 2)
    again = run("queue", "redrive", group, "--execute").ok()
    assert "sent back 0 dead letters" in again.err
    assert "3 were sent back before" in again.err


def test_some_letters_and_elsewhere(broker: Broker, group: str, topic: str) -> None:
    made(broker, topic)
    other = made(broker, f"{topic}-other")
    kill(broker, group, topic, [REJECT] * 5)
    args = ("queue", "redrive", group, "--execute", "--json", "--to", other)
    assert run(*args, "--from", "elsewhere").ok().json["sent"] == 0
    assert run(*args, "--limit", "2").ok().json["sent"] == 2
    assert run(*args, "--from", topic).ok().json["sent"] == 3
    with RawClient(broker.bootstrap) as client:
        records = records_of(one(client.call(fetch(other), 12)).records)
    assert [record.value for record in records if record.key == b"k"] == numbered(5)
    assert size(broker, topic) == 5


def test_letters_without_their_record_cannot_go_back(
    broker: Broker, group: str, topic: str
) -> None:
    made(broker, topic)
    run("queue", "alter", group, "-c", "errors.deadletterqueue.copy.record.enable=false").ok()
    kill(broker, group, topic, [REJECT])
    said = run("queue", "redrive", group, "--execute").ok()
    assert "1 say only where their record is" in said.err
    assert size(broker, topic) == 1


def test_wrong_use_is_explained(broker: Broker, at: str, group: str) -> None:
    assert run("queue", "alter", group).status == 2
    assert run("queue", "redrive", group, "--reason", "boredom").status == 2
    assert "no topic" in run("queue", "redrive", group).err
    assert "there is no share group 'another'" in run("queue", "redrive", "another").err
    run("queue", "alter", group, "--unset", "errors.deadletterqueue.topic.name").ok()
    bare = run("queue", "redrive", group).err
    assert "no dead-letter topic" in bare
    assert f"queue alter {group} -c errors.deadletterqueue.topic.name=dlq.{group}" in bare
    refused = run("queue", "alter", group, "-c", "share.delivery.count.limit=0")
    assert refused.status == 1
    assert "from 1 to" in refused.err
    missing = run("queue", "inspect", "another")
    assert missing.status == 1
    assert "penstock queue list" in missing.err


def test_settings_wait_for_a_consumer(broker: Broker, group: str) -> None:
    told = run("queue", "inspect", group).ok()
    assert "no consumer has come yet" in told.err
    assert "share.delivery.count.limit" in told.out
    shown = run("queue", "inspect", group, "--json").ok().json
    assert (shown["state"], shown["partitions"], shown["members"]) == ("new", [], [])


def test_settings_that_are_not_there_are_refused(broker: Broker, group: str) -> None:
    refused = run("queue", "alter", group, "--unset", "nosuch")
    assert (refused.status, "share.delivery.count.limit" in refused.err) == (1, True)
    close = run("queue", "alter", group, "-c", "share.delivery.count.limits=3")
    assert (close.status, "'share.delivery.count.limit'?" in close.err) == (1, True)
    assert close.err.count("changed") == 0


def test_a_group_that_is_no_queue_is_told_of(broker: Broker, group: str, topic: str) -> None:
    reader = f"{group}-reader"
    made(broker, topic)
    with RawClient(broker.bootstrap) as client:
        commit(client, topic, 0, group=reader)
    told = run("queue", "alter", reader, "-c", "share.delivery.count.limit=3").ok()
    assert f"{reader} is a classic group" in told.err
    assert run("queue", "inspect", reader).status == 1
    assert run("queue", "delete", reader, "--yes").status == 1
    assert "warning" not in run("queue", "alter", group, "-c", "share.ordered.by.key=true").ok().err


def test_a_queue_begins_anew_where_it_is_told(broker: Broker, group: str, topic: str) -> None:
    made(broker, topic)
    kill(broker, group, topic, [REJECT] * 4)
    assert run("queue", "reset", group).status == 2
    assert run("queue", "reset", "another", "--to-earliest").status == 1
    planned = run("queue", "reset", group, "--to-offset", "2", "--json").ok().json
    assert planned["partitions"] == [
        {"topic": topic, "partition": 0, "old": 4, "new": 2, "change": -2, "note": ""}
    ]
    assert run("queue", "inspect", group, "--json").ok().json["unfinished"] == 0
    run("queue", "reset", group, "--to-earliest", "--topic", topic, "--execute").ok()
    with Taker(broker, group, topic) as taker:
        assert taker.fetch().values == numbered(4)


def test_a_queue_is_deleted_and_keeps_its_settings(broker: Broker, group: str, topic: str) -> None:
    made(broker, topic)
    kill(broker, group, topic, [REJECT])
    assert run("queue", "delete", group).status == 2
    run("queue", "delete", group, "--yes").ok()
    shown = run("queue", "inspect", group, "--json").ok().json
    assert (shown["state"], shown["partitions"]) == ("new", [])
    assert shown["settings"]["share.delivery.count.limit"] == "1"
    assert run("queue", "delete", group, "--yes").status == 1


def test_settings_are_taken_back(broker: Broker, group: str, topic: str) -> None:
    run("queue", "alter", group, "--unset", "share.delivery.count.limit").ok()
    made(broker, topic)
    fill(broker, topic, b"x")
    with Taker(broker, group, topic) as taker:
        taker.fetch()
    shown = run("queue", "inspect", group, "--json").ok().json
    assert "share.delivery.count.limit" not in shown["settings"]


def test_the_list_of_queues(broker: Broker, group: str, topic: str) -> None:
    made(broker, topic)
    fill(broker, topic, *numbered(3))
    with Taker(broker, group, topic) as taker, RawClient(broker.bootstrap) as client:
        answer = client.call(
            ShareGroupHeartbeatRequest(
                group_id=group,
                member_id=taker.member,
                member_epoch=0,
                subscribed_topic_names=[topic],
            )
        )
        assert not answer.error_code
        taker.fetch()
        listed = run("queue", "list", "--json").ok().json
        assert {"group": group, "state": "stable", "topics": [topic], "lag": 3} in listed
        assert group in run("queue", "list").ok().out
        (member,) = run("queue", "inspect", group, "--json").ok().json["members"]
        assert (member["id"], member["partitions"]) == (taker.member, 1)
        assert member["host"] == "127.0.0.1"
        assert f"{group}: stable, 1 consumer " in run("queue", "inspect", group).ok().out


def test_how_far_a_kind_was_sent_back_is_never_taken_for_another() -> None:
    one = LetterKind("orders.eu", "v1", "limit")
    other = LetterKind("orders", "eu.v1", "limit")
    assert one.progress_group != other.progress_group
