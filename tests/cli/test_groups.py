"""`penstock groups --watch`, its questions, and what needs no broker.

What the commands do on any broker is in `test_groups_on_brokers.py`.
"""

from __future__ import annotations

import asyncio
import io
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic

import pytest
import typer
from confluent_kafka.admin import AdminClient
from rich.console import Console

from penstock.broker.lag.formulas import Rates, Reading, Retention, lag_of
from penstock.cli.dead_letters import LetterKind
from penstock.cli.group_peek import Unread, first_time, read_singly
from penstock.cli.group_reset import Goal, Place, Wanted, parse_topics, plan
from penstock.cli.group_show import as_json, rendered
from penstock.cli.group_view import Collector, GroupView, PartitionView
from penstock.cli.groups import _Eye
from penstock.cli.kafka import BrokerError, Connection, complete_groups, connect
from penstock.cli.migration.groups import OWN_PREFIX
from penstock.cli.protocol import peer, reachable
from penstock.client.connection import ClientError
from penstock.errors import CorruptBatchError
from penstock.records.batch import patch
from penstock.records.control import Marker, encode_marker
from penstock.records.record import Record, encode
from penstock.testing.broker import Broker
from penstock.wire.messages.describe_acls import DescribeAclsRequest
from tests.cli.runner import Live, Ran, run, run_until
from tests.cli.topic_and_group import FIRST_MS, TopicAndGroup
from tests.harness.profiles import some
from tests.waiting import eventually, read_until

READY_TIMEOUT_S = 60.0


def test_no_groups_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with Broker() as empty:
        ran = run("groups", "list", "--bootstrap", empty.bootstrap).ok()
        assert ran.out == ""
        assert "a consumer with a group.id makes one" in ran.err


def test_names_are_completed(at: str) -> None:
    place = TopicAndGroup(at)
    place.commit(1, 1)
    assert complete_groups(place.group[:6]) == [place.group]
    assert complete_groups("no-such") == []


def test_the_broker_and_the_command_agree(at: str, broker: Broker) -> None:
    place = TopicAndGroup(at, retention_ms="86400000")
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
    place, other = TopicAndGroup(at), TopicAndGroup(at)
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


@pytest.mark.parametrize("name", [LetterKind("g", "t", "limit").progress_group, f"{OWN_PREFIX}x"])
def test_progress_of_commands_is_not_a_reader(name: str, at: str, broker: Broker) -> None:
    place = TopicAndGroup(at)
    place.group = name
    place.commit(1, 2)
    assert name not in {row["group"] for row in place.groups("list", "--json").ok().json}
    assert name in {row["group"] for row in place.groups("list", "--json", "--all").ok().json}
    place.group = f"other-{place.topic}"
    place.commit(1, 2)
    look = asyncio.run_coroutine_threadsafe(broker.server.lag_watch.look(), broker.server.loop)
    look.result(READY_TIMEOUT_S)
    watched = broker.call(lambda server: {group for group, _, _ in server.lag_watch.lags})
    assert name not in watched
    assert place.group in watched


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


# ---- the first unread records ----------------------------------------------------------------


def test_the_first_record_from_an_offset_on() -> None:
    # Offsets 10 to 12, then a marker at 13, then 14 and 15.
    first, second = (bytearray(encode([Record(n, 100 * n, None, b"x") for n in span]))
                     for span in (range(10, 13), range(14, 16)))  # fmt: skip
    marker = encode_marker(Marker(True, 0), 1, 0, 5)
    for at, batch in ((10, first), (13, marker), (14, second)):
        patch(batch, 0, at, 0)
    log = bytes(first + marker + second)
    for front, time_ms in ((10, 1000), (12, 1200), (13, 1400), (15, 1500)):
        assert first_time(log, front)[0] == time_ms
    assert first_time(log, 16) == (None, 16)
    assert first_time(bytes(first + marker), 13) == (None, 14)
    # A batch that was cut off, as the last one in an answer may be.
    assert first_time(log[:-1], 14) == (None, 14)
    assert first_time(b"", 7) == (None, 7)
    old = bytearray(first)
    old[16] = 1
    with pytest.raises(CorruptBatchError):
        first_time(bytes(old), 10)


def test_a_consumer_finds_them_too(at: str) -> None:
    place = TopicAndGroup(at, partitions=4, records=3_000, step_ms=1)
    consumer = connect(at, []).consumer({"fetch.message.max.bytes": 1024})
    unread = {(place.topic, number): Unread(700 * number, 3_000) for number in range(4)}
    try:
        times = read_singly(consumer, unread, monotonic() + READY_TIMEOUT_S)
    finally:
        consumer.close()
    assert times == {(place.topic, number): FIRST_MS + 700 * number for number in range(4)}


def test_what_is_not_known_is_not_shown_as_good_news() -> None:
    lag = lag_of(
        Reading(4, 0, 10, 600, None, 1_000_000), Rates(), Retention(seconds=86400, bytes=None)
    )
    part = PartitionView("orders", 0, 4, 0, 10, lag, age_known=False, loss_known=False)
    view = GroupView("billing", "classic", "empty", "", "", (), (part,))
    console = Console(width=120, file=io.StringIO())
    console.print(rendered([view]))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert re.search(r"600 B +\? +\?", shown)
    assert "could not be read in 1 partition" in shown
    told = as_json(view)
    assert told["partitions"][0]["time_to_loss_known"] is False
    assert told["total"]["time_to_loss_known"] is False


def test_by_size_records_may_be_lost_later_than_by_an_unknown_age() -> None:
    rates, keep = Rates(1, 100, 0, 0), Retention(seconds=86400, bytes=1_000)
    lag = lag_of(Reading(4, 0, 10, 600, None, 1_000_000), rates, keep)
    part = PartitionView("orders", 0, 4, 0, 10, lag, age_known=False, loss_known=False)
    console = Console(width=120, file=io.StringIO())
    console.print(rendered([GroupView("g", "classic", "empty", "", "", (), (part,))]))
    assert isinstance(console.file, io.StringIO)
    assert "<4" in console.file.getvalue()


# ---- asking without librdkafka ---------------------------------------------------------------


def test_a_broker_that_does_not_know_the_request(broker: Broker) -> None:
    host, port = broker.bootstrap.rsplit(":", 1)
    with peer(host, int(port), {}) as asked:
        with pytest.raises(ClientError, match="has no DescribeAcls"):
            asked.call(DescribeAclsRequest())
    with pytest.raises(ClientError):
        peer("127.0.0.1", 1, {})


def test_whom_we_can_ask() -> None:
    assert reachable({})
    assert reachable({"security.protocol": "SSL"})
    password = {"sasl.username": "alice", "sasl.password": "secret"}
    sasl = {"security.protocol": "sasl_ssl", "sasl.mechanism": "SCRAM-SHA-256", **password}
    assert reachable(sasl)
    assert not reachable({**sasl, "sasl.mechanism": "GSSAPI"})
    assert not reachable({"security.protocol": "SASL_SSL"})


# ---- live ------------------------------------------------------------------------------------


def watching(place: TopicAndGroup, *args: str) -> list[str]:
    """The arguments of `penstock` that watch the group."""
    return [
        "groups", "describe", place.group, "--watch", "--sample", "50ms",
        "--bootstrap", place.at, *args,
    ]  # fmt: skip


def watched(
    place: TopicAndGroup, look: Callable[[Live], None], *args: str, terminal: bool = False
) -> Ran:
    """The command in this process, until Ctrl-C after `look`."""
    ran = run_until(
        look, *watching(place, *args), stop=signal.SIGINT, is_handled=False, terminal=terminal
    )
    assert ran.status == 130
    return ran


def shown(live: Live, pattern: str, start: int = 0) -> int:
    """Wait until the pattern is in the output from `start` on; where it ends."""
    match = eventually(lambda: re.compile(pattern, re.DOTALL).search(live.out, start))
    assert match is not None
    return match.end()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rich asks about a terminal that is not there."""
    for name, value in (("TERM", "xterm"), ("COLUMNS", "120"), ("LINES", "40")):
        monkeypatch.setenv(name, value)


@pytest.mark.processes
def test_watching_at_a_terminal_as_a_process(at: str) -> None:
    place = TopicAndGroup(at)
    place.commit(4, 6)
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    command = [sys.executable, "-m", "penstock.cli", *watching(place)]
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.PIPE, env=environment)
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


def test_watching_for_programs(at: str) -> None:
    place = TopicAndGroup(at)
    place.commit(4, 6)

    def look(live: Live) -> None:
        shown(live, r'"committed":4.*\n.*"committed":4.*\n')
        place.commit(9, 6)
        shown(live, r'"committed":9.*\n')

    assert watched(place, look, "--json").err == ""


@pytest.mark.usefixtures("terminal")
def test_a_group_that_goes_away_is_waited_for() -> None:
    with Broker() as broker:
        place = TopicAndGroup(broker.bootstrap)
        place.commit(4, 6)

        def look(live: Live) -> None:
            position = shown(live, "10 records behind")
            # The group is gone, and then it is there again.
            admin = AdminClient({"bootstrap.servers": broker.bootstrap})
            for future in admin.delete_consumer_groups([place.group]).values():
                future.result(READY_TIMEOUT_S)
            position = shown(live, "trying again", position)
            place.commit(9, 9)
            shown(live, "2 records behind", position)

        watched(place, look, "-X", "socket.timeout.ms=1000", terminal=True)


@pytest.mark.usefixtures("terminal")
def test_a_broker_that_goes_away_is_told_of_and_waited_for() -> None:
    with Broker() as broker:
        place = TopicAndGroup(broker.bootstrap)
        place.commit(4, 6)

        def look(live: Live) -> None:
            position = shown(live, "10 records behind")
            broker.crash()
            # The last numbers stay, and it is said that they are old.
            outdated = "out of date, as of .*no broker answers.*10 records behind"
            position = shown(live, outdated, position)
            broker.start()
            place.commit(9, 9)
            shown(live, "2 records behind", position)

        watched(place, look, terminal=True)


def test_a_restart_between_two_looks_is_got_over() -> None:
    with Broker() as broker:
        place = TopicAndGroup(broker.bootstrap)
        place.commit(4, 6)
        collector = Collector(connect(broker.bootstrap, []))
        eye = _Eye(collector, [place.group], lambda: connect(broker.bootstrap, []))
        try:
            eye.look()
            # After an unclean stop leaders have a new epoch, of which a client does not know.
            broker.crash()
            broker.start()
            (view,) = eye.look()
        finally:
            collector.close()
        assert [part.committed for part in view.partitions] == [4, 6]


def test_a_client_that_waits_in_vain_is_followed_by_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.cli.group_view.REQUEST_TIMEOUT_S", 0.5)
    with Broker() as broker, socket.create_server(("127.0.0.1", 0)) as silent:
        place = TopicAndGroup(broker.bootstrap)
        place.commit(4, 6)
        made = []

        def another() -> Connection:
            made.append(connect(broker.bootstrap, []))
            if len(made) > 1:
                # From here on an answer may need its time.
                monkeypatch.undo()
            return made[-1]

        collector = Collector(Connection(f"127.0.0.1:{silent.getsockname()[1]}", {}))
        eye = _Eye(collector, [place.group], another)
        try:
            (view,) = eye.look()
        finally:
            collector.close()
        assert [part.committed for part in view.partitions] == [4, 6]


def test_programs_are_told_too_when_the_broker_goes_away() -> None:
    with Broker() as broker:
        place = TopicAndGroup(broker.bootstrap)
        place.commit(4, 6)

        def look(live: Live) -> None:
            position = shown(live, r'"committed":4')
            broker.crash()
            eventually(lambda: re.search("warning: .*trying again\n", live.err))
            broker.start()
            place.commit(9, 9)
            shown(live, r'"committed":9', position)

        watched(place, look, "--json")


# ---- the question before deleting ------------------------------------------------------------


def await_read(process: subprocess.Popen[bytes]) -> None:
    """Until the process sleeps, as it does when it reads."""
    stat = Path(f"/proc/{process.pid}/stat")
    if stat.exists():
        eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S", READY_TIMEOUT_S)


def interrupt(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C; again if it came in the instant before the read, where Python takes no notice."""
    await_read(process)
    deadline = monotonic() + READY_TIMEOUT_S
    while process.poll() is None and monotonic() < deadline:
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)


STATUS_AFTER = {"ctrl-c": 130, "ctrl-d": 1, "n": 1, "y": 0}
COMMANDS = ("groups", "topics")


def names(what: str, at: str) -> set[str]:
    """The groups or topics that there are."""
    key = "group" if what == "groups" else "name"
    return {row[key] for row in run(what, "list", "--json", "--bootstrap", at).ok().json}


@pytest.mark.parametrize("answer", ["y", "n", "ctrl-d"])
@pytest.mark.parametrize("what", COMMANDS)
def test_the_question_before_deleting(what: str, answer: str, at: str) -> None:
    place = TopicAndGroup(at, records=1)
    place.commit(1, 1)
    name = place.group if what == "groups" else place.topic
    stdin = b"" if answer == "ctrl-d" else f"{answer}\n".encode()
    ran = run(what, "delete", name, "--bootstrap", at, stdin=stdin, asks_terminal=True)
    assert "for good? [y/N]:" in ran.err
    assert ran.status == STATUS_AFTER[answer]
    assert (name in names(what, at)) == (answer != "y")


# Ctrl-C needs a process of its own; one test shows that a terminal is asked.
AT_A_TERMINAL = [(what, answer) for answer in STATUS_AFTER for what in COMMANDS]


@pytest.mark.parametrize(("what", "answer"), some(AT_A_TERMINAL, test=1))
@pytest.mark.processes
def test_the_question_at_a_terminal(what: str, answer: str, at: str) -> None:
    place = TopicAndGroup(at, records=1)
    place.commit(1, 1)
    name = place.group if what == "groups" else place.topic
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock.cli", what, "delete", name, "--bootstrap", at],
        stdin=theirs, stdout=theirs, stderr=theirs, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(theirs)
    try:
        # The last blank is written right before it reads.
        read_until(ours, r"for good\? \[y/N\]: ")
        if answer == "ctrl-c":
            interrupt(process)
        else:
            os.write(ours, b"\x04" if answer == "ctrl-d" else f"{answer}\n".encode())
        assert process.wait(READY_TIMEOUT_S) == STATUS_AFTER[answer]
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert (name in names(what, at)) == (answer != "y")
