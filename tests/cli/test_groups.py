"""`penstock groups` on Penstock's own broker, and what does not need one."""

from __future__ import annotations

import asyncio
import os
import pty
import re
import select
import signal
import subprocess
import sys
from time import monotonic

import pytest
import typer
from confluent_kafka.admin import AdminClient

from penstock.cli.group_reset import Goal, Place, Wanted, parse_topics, plan
from penstock.cli.kafka import BrokerError, complete_groups
from penstock.cli.protocol import peer, reachable
from penstock.client.connection import ClientError
from penstock.testing.broker import Broker
from penstock.wire.messages.describe_acls import DescribeAclsRequest
from tests.cli import group_scenarios
from tests.cli.group_scenarios import SCENARIOS
from tests.cli.runner import run

READY_TIMEOUT_S = 30.0


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_penstock(name: str, at: str) -> None:
    SCENARIOS[name](at)


def test_no_groups_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with Broker() as empty:
        ran = run("groups", "list", "--bootstrap", empty.bootstrap).ok()
        assert ran.out == ""
        assert "a consumer with a group.id makes one" in ran.err


def test_names_are_completed(at: str) -> None:
    place = group_scenarios.Place(at)
    place.commit(1, 1)
    assert complete_groups(place.group[:6]) == [place.group]
    assert complete_groups("no-such") == []


def test_the_broker_and_the_command_agree(at: str, broker: Broker) -> None:
    place = group_scenarios.Place(at, retention_ms="86400000")
    place.commit(4, 10)
    look = asyncio.run_coroutine_threadsafe(broker.server.lag_watch.look(), broker.server.loop)
    look.result(READY_TIMEOUT_S)
    lags = broker.call(lambda server: dict(server.lag_watch.lags))
    for part in place.described()["partitions"]:
        lag = lags[place.group, place.topic, part["partition"]]
        assert lag.bytes is not None
        assert lag.seconds is not None
        assert (part["records"], part["missed"]) == (lag.records, lag.missed)
        # The broker counts the whole batch that the record is in, and takes the batch's time.
        assert part["bytes"] <= lag.bytes
        assert part["seconds"] <= lag.seconds + 5 * 60 + 30
        assert (part["time_to_loss_seconds"] is None) == (lag.time_to_loss_s is None)


def test_completion_is_silent_without_a_broker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_BOOTSTRAP", "127.0.0.1:1")
    assert complete_groups("") == []


def test_a_topic_that_was_deleted_does_not_hide_the_others(at: str) -> None:
    place, other = group_scenarios.Place(at), group_scenarios.Place(at)
    other.group = place.group
    place.commit(1, 2)
    other.commit(3, 4)
    run("topics", "delete", other.topic, "--yes", "--bootstrap", at).ok()
    assert {part["topic"] for part in place.described()["partitions"]} >= {place.topic}
    assert len(place.plan("--to-latest", "-t", place.topic)) == 2


@pytest.mark.parametrize(
    "args",
    [
        ("reset", "g"),
        ("reset", "g", "--to-earliest", "--to-latest"),
        ("reset", "g", "--to-time", "noon"),
        ("reset", "g", "--by-duration", "long"),
        ("reset", "g", "--to-offset", "-1"),
        ("reset", "g", "--to-latest", "-t", "t:x"),
        ("reset", "g", "--to-latest", "-t", "t:"),
        ("describe",),
        ("describe", "g", "--sample", "often"),
        ("delete", "g"),
    ],
)
@pytest.mark.usefixtures("at")
def test_wrong_use_ends_with_2(args: tuple[str, ...]) -> None:
    ran = run("groups", *args)
    assert ran.status == 2, ran.err
    assert "Traceback" not in ran.err


# ---- the plan, without a broker --------------------------------------------------------------


def test_topics_are_parsed() -> None:
    assert parse_topics(["a", "b:1,0", "b:2", "c:1", "c"]) == [
        Wanted("a"), Wanted("b", (0, 1, 2)), Wanted("c"),
    ]  # fmt: skip
    for wrong in ("", ":1", "a:", "a:x", "a:1,", "a:-1"):
        with pytest.raises(typer.BadParameter):
            parse_topics([wrong])


def test_a_plan_stays_within_the_log() -> None:
    place = Place("t", 0, committed=50, earliest=20, latest=80)
    for goal, new in (
        (Goal("earliest"), 20),
        (Goal("latest"), 80),
        (Goal("offset", 5), 20),
        (Goal("offset", 500), 80),
        (Goal("offset", 30), 30),
        (Goal("shift", -40), 20),
        (Goal("shift", 10), 60),
        (Goal("time", 1), 80),
    ):
        (step,) = plan(goal, [place])
        assert (step.old, step.new, step.change) == (50, new, new - 50)
        clamped = goal.kind in ("offset", "shift") and new in (20, 80)
        assert bool(step.note) == (clamped or goal.kind == "time")
    (step,) = plan(Goal("time", 1), [Place("t", 0, None, 20, 80, at_time=33)])
    assert (step.old, step.new, step.change, step.note) == (None, 33, None, "")
    with pytest.raises(BrokerError, match="no offset"):
        plan(Goal("shift", 1), [Place("t", 0, None, 20, 80)])


# ---- asking without librdkafka ---------------------------------------------------------------


def test_a_broker_that_does_not_know_the_request(broker: Broker) -> None:
    host, port = broker.bootstrap.rsplit(":", 1)
    with peer(host, int(port), {}) as asked:
        with pytest.raises(ClientError, match="has no DescribeAcls"):
            asked.call(DescribeAclsRequest())
    with pytest.raises(ClientError):
        peer("127.0.0.1", 1, {})


def test_passwords_are_not_for_us() -> None:
    assert reachable({})
    assert reachable({"security.protocol": "SSL"})
    assert not reachable({"security.protocol": "SASL_SSL"})


# ---- live ------------------------------------------------------------------------------------


def watching(place: group_scenarios.Place, *args: str) -> list[str]:
    return [
        sys.executable, "-m", "penstock.cli", "groups", "describe", place.group, "--watch",
        "--sample", "50ms", "--bootstrap", place.at, *args,
    ]  # fmt: skip


def read_until(descriptor: int, pattern: str) -> str:
    text, deadline = "", monotonic() + READY_TIMEOUT_S
    while not re.search(pattern, text, re.DOTALL):
        ready, _, _ = select.select([descriptor], [], [], max(0, deadline - monotonic()))
        data = os.read(descriptor, 65536) if ready else b""
        assert data, f"no {pattern!r} in {text!r}"
        text += data.decode()
    return text


def test_watching_for_programs(at: str) -> None:
    place = group_scenarios.Place(at)
    place.commit(4, 6)
    process = subprocess.Popen(
        watching(place, "--json"), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    try:
        read_until(process.stdout.fileno(), r'"committed":4.*\n.*"committed":4.*\n')
        place.commit(9, 6)
        read_until(process.stdout.fileno(), r'"committed":9.*\n')
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=READY_TIMEOUT_S)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, err) == (130, b"")


def test_watching_at_a_terminal(at: str) -> None:
    place = group_scenarios.Place(at)
    place.commit(4, 6)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    process = subprocess.Popen(
        watching(place), stdout=theirs, stderr=subprocess.PIPE, env=environment
    )
    os.close(theirs)
    try:
        read_until(ours, "10 records behind")
        place.commit(9, 9)
        read_until(ours, "2 records behind")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=READY_TIMEOUT_S)
    finally:
        process.kill()
        process.communicate()
        os.close(ours)
    assert (process.returncode, err) == (130, b"")


def test_a_group_that_goes_away_is_waited_for() -> None:
    with Broker() as broker:
        place = group_scenarios.Place(broker.bootstrap)
        place.commit(4, 6)
        ours, theirs = pty.openpty()
        process = subprocess.Popen(
            watching(place, "-X", "socket.timeout.ms=1000"), stdout=theirs, stderr=theirs,
            env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
        )  # fmt: skip
        os.close(theirs)
        try:
            read_until(ours, "10 records behind")
            # The group is gone, and then it is there again.
            admin = AdminClient({"bootstrap.servers": broker.bootstrap})
            for future in admin.delete_consumer_groups([place.group]).values():
                future.result(READY_TIMEOUT_S)
            read_until(ours, "trying again")
            place.commit(9, 9)
            read_until(ours, "2 records behind")
            process.send_signal(signal.SIGINT)
            assert process.wait(READY_TIMEOUT_S) == 130
        finally:
            process.kill()
            process.wait()
            os.close(ours)
