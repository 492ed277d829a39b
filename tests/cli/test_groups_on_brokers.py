"""`penstock groups` on Penstock's broker and on Apache Kafka, with Kafka's own tool beside it."""

from __future__ import annotations

import re
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pytest
from confluent_kafka import Producer, ShareConsumer, TopicPartition
from confluent_kafka.admin import AdminClient

from penstock.testing.apache_kafka import SMALL_JVM_OPTIONS, ApacheKafka
from penstock.testing.broker import Broker
from penstock.testing.java import java_command, kafka_home
from penstock.wire import Message
from penstock.wire.errors import ErrorCode
from penstock.wire.messages.find_coordinator import FindCoordinatorRequest
from tests.broker.groups.streams_members import StreamsClient, settle, stateless
from tests.broker.raw import RawClient
from tests.broker.requests import new_name
from tests.cli.runner import run
from tests.cli.topic_and_group import FIRST_MS, STEP_MS, TIMEOUT_S, TopicAndGroup
from tests.waiting import eventually

NOT_YET = {
    ErrorCode.COORDINATOR_NOT_AVAILABLE,
    ErrorCode.COORDINATOR_LOAD_IN_PROGRESS,
    ErrorCode.NOT_COORDINATOR,
}
TOOL = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"


@pytest.fixture(params=["penstock", pytest.param("kafka", marks=pytest.mark.java)])
def bootstrap(request: pytest.FixtureRequest) -> str:
    """The address of each broker in turn."""
    if request.param == "penstock":
        own: Broker = request.getfixturevalue("broker")
        return own.bootstrap
    kafka: ApacheKafka = request.getfixturevalue("apache_kafka")
    return kafka.bootstrap


# ---- list and describe -----------------------------------------------------------------------


def test_a_group_is_listed_with_its_state(bootstrap: str) -> None:
    place = TopicAndGroup(bootstrap)
    place.commit(3, 4)
    listed = {row["group"]: row for row in place.groups("list", "--json").ok().json}
    assert listed[place.group] == {"group": place.group, "kind": "classic", "state": "empty"}
    assert place.group in place.groups("list").ok().out


def test_describe_says_how_far_behind(bootstrap: str) -> None:
    place = TopicAndGroup(bootstrap, retention_ms="86400000")
    place.commit(4, 10)
    view = place.described()
    assert (view["state"], view["kind"], view["members"]) == ("empty", "classic", [])
    first, second = view["partitions"]
    assert (first["committed"], first["start"], first["end"]) == (4, 0, 10)
    assert (first["records"], first["missed"], first["beyond"]) == (6, 0, 0)
    # Ten records of a hundred bytes and a little more, in one or several batches.
    assert 6 * 100 < first["bytes"] < 6 * 250
    age_s = time.time() - (FIRST_MS + 4 * STEP_MS) / 1000
    assert age_s - 60 < first["seconds"] <= age_s + 1
    assert 86400 - age_s - 60 < first["time_to_loss_seconds"] < 86400 - age_s + 60
    assert (second["records"], second["bytes"], second["seconds"]) == (0, 0, 0.0)
    assert second["time_to_loss_seconds"] is None
    assert view["total"]["records"] == 6
    shown = place.groups("describe", place.group, "--sample", "10ms").ok().out
    assert "empty, classic group, 0 members, 6 records behind" in shown


def test_describe_knows_the_age_in_every_partition(bootstrap: str) -> None:
    place = TopicAndGroup(
        bootstrap, partitions=6, records=10_000, step_ms=1, retention_ms="86400000"
    )
    place.commit(0, 0, 1, 5_000, 9_999, 10_000)
    *behind, last = place.described()["partitions"]
    for part in behind:
        assert part["seconds"] is not None
        age_s = time.time() - (FIRST_MS + part["committed"]) / 1000
        assert age_s - 60 < part["seconds"] <= age_s
        assert part["time_to_loss_seconds"] is not None
        assert part["time_to_loss_known"]
    assert (last["seconds"], last["time_to_loss_seconds"]) == (0.0, None)
    shown = place.groups("describe", place.group, "--sample", "0").ok().out
    assert "?" not in shown


def test_markers_of_transactions_cannot_be_lost(bootstrap: str) -> None:
    place = TopicAndGroup(bootstrap, partitions=1, records=0, retention_ms="86400000")
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": place.group})
    producer.init_transactions(TIMEOUT_S)
    for _ in range(2):
        producer.begin_transaction()
        producer.produce(place.topic, b"x", timestamp=FIRST_MS)
        producer.commit_transaction(TIMEOUT_S)
    for offset, is_left in ((1, True), (3, False)):
        place.commit(offset)
        (part,) = place.described()["partitions"]
        assert part["records"] == 4 - offset
        assert (part["seconds"] is not None) == is_left
        assert (part["time_to_loss_seconds"] is not None) == is_left
        assert part["time_to_loss_known"]


def test_describe_says_how_many_were_missed(bootstrap: str) -> None:
    place = TopicAndGroup(bootstrap, partitions=1)
    place.commit(2)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    futures = admin.delete_records([TopicPartition(place.topic, 0, 7)])
    for future in futures.values():
        future.result(TIMEOUT_S)
    (part,) = place.described()["partitions"]
    assert (part["start"], part["missed"], part["records"]) == (7, 5, 3)
    shown = place.groups("describe", place.group, "--sample", "0").ok().out
    assert "5 records missed; offset 2 was removed, the log starts at 7" in shown


def test_describe_shows_members_and_their_partitions(bootstrap: str) -> None:
    place = TopicAndGroup(bootstrap)
    with place.member():
        view = place.described()
        assert view["state"] == "stable"
        (member,) = view["members"]
        assert member["client"] == "reader"
        assert member["partitions"] == [
            {"topic": place.topic, "partition": number} for number in (0, 1)
        ]
        # Nothing is committed yet: there is no lag to speak of, but who reads what.
        assert [part["committed"] for part in view["partitions"]] == [None, None]
        assert {part["member"] for part in view["partitions"]} == {member["member"]}
        shown = place.groups("describe", place.group, "--sample", "0").ok().out
        assert "1 member" in shown
        assert f"{place.topic}: 0, 1" in shown


def test_describe_knows_the_newer_protocol(bootstrap: str) -> None:
    place = TopicAndGroup(bootstrap)
    with place.member(group_protocol="consumer"):
        view = place.described()
        assert (view["kind"], view["protocol"], len(view["members"])) == ("consumer", "uniform", 1)
        assert len(view["members"][0]["partitions"]) == 2
        ran = place.reset("--to-latest", "-t", place.topic, "--execute")
        assert ran.status == 1
        assert "has 1 member (reader)" in ran.err
        listed = {row["group"]: row for row in place.groups("list", "--json").ok().json}
        assert listed[place.group]["kind"] == "consumer"


def test_groups_of_kafka_streams(bootstrap: str) -> None:
    place, app = TopicAndGroup(bootstrap), new_name("app")
    with RawClient(bootstrap) as connection:
        one = StreamsClient(partial(asked, connection), app, "one", stateless(place.topic))
        one.beat()
        settle(one, tasks=2)
        listed = {row["group"]: row for row in place.groups("list", "--json").ok().json}
        assert listed[app] == {"group": app, "kind": "streams", "state": "stable"}
        (view,) = place.groups("describe", app, "--json", "--sample", "10ms").ok().json
        (member,) = view["members"]
        assert (view["kind"], view["state"], member["member"]) == ("streams", "stable", "one")
        assert [part["partition"] for part in member["partitions"]] == [0, 1]
        assert "Stop its consumers first" in place.groups("delete", app, "--yes").err
        one.leave()
        place.groups("delete", app, "--yes").ok()
        assert app not in place.groups("list").ok().out


def asked(connection: RawClient, request: Message) -> Any:
    """What is answered once there is a coordinator: Kafka makes it when it is first looked for."""

    def answered() -> Any:
        answer = connection.call(request)
        if answer.error_code not in NOT_YET:
            return answer
        connection.call(FindCoordinatorRequest(key_type=0, coordinator_keys=["any"]), 4)
        return None

    return eventually(answered)


def test_a_group_that_is_not_there(bootstrap: str) -> None:
    for command in (
        # It is not waited for rates of what is not there.
        ("describe", "no-such-group", "--sample", "1h"),
        ("reset", "no-such-group", "--to-latest"),
    ):
        ran = run("groups", *command, "--bootstrap", bootstrap)
        assert ran.status == 1
        assert "there is no group no-such-group" in ran.err
        assert "penstock groups list" in ran.err
    ran = run("groups", "delete", "no-such-group", "--yes", "--bootstrap", bootstrap)
    assert ran.status == 1
    assert ran.err.startswith("error: ")


# ---- reset -----------------------------------------------------------------------------------


def test_a_reset_is_first_only_a_plan(bootstrap: str) -> None:
    place = TopicAndGroup(bootstrap)
    place.commit(4, 6)
    ran = place.reset("--to-earliest").ok()
    assert "--execute" in ran.err
    assert [part["committed"] for part in place.described()["partitions"]] == [4, 6]
    done = place.reset("--to-earliest", "--execute").ok()
    assert "2 offsets set" in done.err
    assert [part["committed"] for part in place.described()["partitions"]] == [0, 0]


def test_every_way_to_say_where_to(bootstrap: str) -> None:
    place = TopicAndGroup(bootstrap)
    place.commit(4, 6)
    minute_5 = str(FIRST_MS + 5 * STEP_MS)
    ago_ms = int(time.time() * 1000) - (FIRST_MS + 2 * STEP_MS)
    for args, new in (
        (("--to-earliest",), (0, 0)),
        (("--to-latest",), (10, 10)),
        (("--to-offset", "3"), (3, 3)),
        (("--to-offset", "99"), (10, 10)),
        (("--to-time", minute_5), (5, 5)),
        (("--to-time", str(FIRST_MS + 5 * STEP_MS - 1)), (5, 5)),
        (("--to-time", "now"), (10, 10)),
        (("--by-duration", f"{ago_ms + 30_000}ms"), (2, 2)),
        (("--by-duration", "52w"), (0, 0)),
        (("--shift-by", "-3"), (1, 3)),
        (("--shift-by", "-5"), (0, 1)),
        (("--shift-by", "100"), (10, 10)),
    ):
        assert place.plan(*args) == [(0, 4, new[0]), (1, 6, new[1])], args
    rows = place.reset("--shift-by", "-5", "--json").ok().json["partitions"]
    assert [row["change"] for row in rows] == [-4, -5]
    assert "-1 is before the first record" in rows[0]["note"]
    assert rows[1]["note"] == ""


def test_topics_and_partitions_can_be_chosen(bootstrap: str) -> None:
    place = TopicAndGroup(bootstrap, partitions=3)
    place.commit(4, 5, 6)
    assert place.plan("--to-offset", "1", "-t", f"{place.topic}:0,2") == [(0, 4, 1), (2, 6, 1)]
    assert place.plan("--to-offset", "1", "--topic", place.topic, "--execute") == [
        (0, 4, 1), (1, 5, 1), (2, 6, 1),
    ]  # fmt: skip
    for wrong, reason in (
        (f"{place.topic}:7", f"{place.topic} has no partition 7"),
        (f"{place.topic}-x", f"there is no topic {place.topic}-x"),
    ):
        ran = place.reset("--to-latest", "--topic", wrong, "--execute")
        assert ran.status == 1
        assert reason in ran.err


def test_a_new_group_can_be_given_offsets(bootstrap: str) -> None:
    place = TopicAndGroup(bootstrap)
    ran = place.reset("--to-offset", "5", "-t", place.topic, "--execute").ok()
    assert "is a new group" in ran.err
    assert [part["committed"] for part in place.described()["partitions"]] == [5, 5]
    other = place.groups("reset", f"{place.group}-x", "--shift-by", "1", "-t", place.topic)
    assert other.status == 1
    assert "no offset" in other.err


def test_a_group_with_members_is_left_alone(bootstrap: str) -> None:
    place = TopicAndGroup(bootstrap)
    place.commit(4, 6)
    with place.member():
        ran = place.reset("--to-earliest", "--execute")
        assert ran.status == 1
        assert "has 1 member (reader)" in ran.err
        assert "Stop its consumers first" in ran.err
        assert "must be stopped" in place.reset("--to-earliest").ok().err
        ran = place.groups("delete", place.group, "--yes")
        assert ran.status == 1
        assert "Stop its consumers first" in ran.err
        assert [part["committed"] for part in place.described()["partitions"]] == [4, 6]
    assert place.plan("--to-earliest", "--execute") == [(0, 4, 0), (1, 6, 0)]


def test_consumers_go_on_where_a_reset_put_them(bootstrap: str) -> None:
    place = TopicAndGroup(bootstrap, partitions=1)
    place.commit(10)
    place.reset("--to-offset", "7", "--execute").ok()
    with place.member() as next_record:
        offsets: list[int | None] = []
        deadline = time.monotonic() + TIMEOUT_S
        while len(offsets) < 3:
            assert time.monotonic() < deadline
            message = next_record()
            if message is not None and message.error() is None:
                offsets.append(message.offset())
        assert offsets == [7, 8, 9]


# ---- delete ----------------------------------------------------------------------------------


def test_a_group_is_deleted_with_its_offsets(bootstrap: str) -> None:
    place = TopicAndGroup(bootstrap)
    place.commit(4, 6)
    ran = place.groups("delete", place.group, "no-such-group", "--yes")
    assert ran.status == 1
    assert f"deleted {place.group}" in ran.err
    names = [row["group"] for row in place.groups("list", "--json").ok().json]
    assert place.group not in names


# ---- queues ----------------------------------------------------------------------------------


def test_share_groups_are_pointed_to_their_own_command(bootstrap: str) -> None:
    place = TopicAndGroup(bootstrap)
    consumer = ShareConsumer({"bootstrap.servers": bootstrap, "group.id": place.group})
    try:
        consumer.subscribe([place.topic])
        deadline = time.monotonic() + TIMEOUT_S
        while (place.group, "share", "stable") not in listed(bootstrap):
            assert time.monotonic() < deadline
            consumer.poll(0.1)
        for args in (
            ("describe", place.group, "--sample", "1h"),
            ("reset", place.group, "--to-latest"),
        ):
            ran = place.groups(*args)
            assert ran.status == 1
            assert "is a share group" in ran.err
            assert "penstock queue" in ran.err
        assert "Stop its consumers first" in place.groups("delete", place.group, "--yes").err
    finally:
        consumer.close()
    assert (place.group, "share", "empty") in listed(bootstrap)
    place.groups("delete", place.group, "--yes").ok()
    assert place.group not in {name for name, _, _ in listed(bootstrap)}


def listed(bootstrap: str) -> set[tuple[str, str, str]]:
    rows = run("groups", "list", "--json", "--bootstrap", bootstrap).ok().json
    return {(row["group"], row["kind"], row["state"]) for row in rows}


# ---- beside Kafka's own tool ------------------------------------------------------------------


def tool(place: TopicAndGroup, *args: str) -> list[tuple[int, int]]:
    """What Kafka's own tool would set: partitions and new offsets."""
    command = [
        *java_command(kafka_home(), SMALL_JVM_OPTIONS, TOOL),
        "--bootstrap-server", place.at, "--group", place.group,
        "--reset-offsets", "--all-topics", "--dry-run", *args,
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = re.findall(rf"^{place.group}\s+{place.topic}\s+(\d+)\s+(\d+)", done.stdout, re.MULTILINE)
    assert rows, done.stdout + done.stderr
    return sorted((int(partition), int(offset)) for partition, offset in rows)


def test_resets_are_what_kafkas_own_tool_makes_of_them(apache_kafka: ApacheKafka) -> None:
    place = TopicAndGroup(apache_kafka.bootstrap)
    place.commit(4, 6)
    at_ms = FIRST_MS + 5 * STEP_MS - 1
    moment = datetime.fromtimestamp(at_ms / 1000, UTC).isoformat(timespec="milliseconds")
    pairs = [
        (("--to-offset", "99"), ("--to-offset", "99")),
        (("--shift-by", "-5"), ("--shift-by", "-5")),
        (("--to-time", str(at_ms)), ("--to-datetime", moment.replace("+00:00", "Z"))),
    ]
    ours = [[(number, new) for number, _, new in place.plan(*args)] for args, _ in pairs]
    with ThreadPoolExecutor(2) as threads:
        theirs = list(threads.map(lambda pair: tool(place, *pair[1]), pairs))
    assert ours == theirs
