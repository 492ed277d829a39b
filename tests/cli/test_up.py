"""`penstock up`: ready, stopped cleanly, or refused with a reason.

One test runs it as the process that it is in production; the others run it in this one.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic, ResourceType

from penstock.log.store import LogStore
from penstock.log.verify import verify
from tests.broker import requests as rq
from tests.broker.raw import RawClient
from tests.cli.runner import Live, Ran, run, run_until
from tests.waiting import eventually, read_until

COMMAND = (sys.executable, "-m", "penstock.cli", "up")
TIMEOUT_S = 60.0
QUIET_READY = r"^(\S+)\n"
STOPPED = "stopped cleanly; everything is on disk\n"


def printed(live: Live, pattern: str) -> re.Match[str]:
    """What matches in the command's output, once it is there."""
    match = eventually(lambda: re.search(pattern, live.out, re.DOTALL), TIMEOUT_S)
    assert match is not None
    return match


def nothing(_: Live) -> None:
    """Stop it as soon as it is ready."""


def up(
    data: Path,
    *args: str,
    look: Callable[[Live], None] = nothing,
    stop: signal.Signals = signal.SIGTERM,
) -> Ran:
    """`penstock up` in this process: once `look` returns, it is told to stop."""
    return run_until(look, "up", "--data", str(data), "--listen", "127.0.0.1:0", *args, stop=stop)


def write(address: str, value: bytes) -> None:
    with RawClient(address) as client:
        client.call(rq.metadata("greetings", create_missing=True))
        assert not rq.one(client.call(rq.produce("greetings", rq.batch(value)), 12)).error_code


def read(address: str) -> list[bytes | None]:
    with RawClient(address) as client:
        return rq.values_of(rq.one(client.call(rq.fetch("greetings"), 12)).records)


def check_greeting(text: str, data: Path) -> None:
    assert str(data) in text
    assert re.search(r"cluster +\S{22}\n", text)
    assert "durability  disk: " in text
    assert re.search(r"penstock consume greetings --bootstrap \S+\n", text)


def check_clean_stop(data: Path) -> None:
    report = verify(str(data))
    assert (report.clean_stop, report.findings) == (True, [])


@pytest.mark.processes
def test_as_a_process_it_says_where_it_is_and_stops_cleanly(tmp_path: Path) -> None:
    data = tmp_path / "data"
    command = [*COMMAND, "--data", str(data), "--listen", "127.0.0.1:0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert process.stdout is not None
        text = read_until(process.stdout.fileno(), r"penstock consume greetings \S+ \S+\n")
        check_greeting(text, data)
        match = re.search(r"ready at (\S+)", text)
        assert match is not None
        run("produce", "greetings", "-b", match[1], "-v", "hello").ok()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        process.communicate()
    assert (process.returncode, err.decode()) == (0, STOPPED)
    check_clean_stop(data)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_says_where_it_is_and_stops_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    data = tmp_path / "data"

    def look(live: Live) -> None:
        write(printed(live, r"ready at (\S+) ")[1], b"hello")

    ran = up(data, look=look, stop=number)
    assert (ran.status, ran.err) == (0, STOPPED)
    check_greeting(ran.out, data)
    check_clean_stop(data)


def test_records_are_there_after_a_restart(tmp_path: Path) -> None:
    for number in range(2):

        def look(live: Live) -> None:
            address = printed(live, QUIET_READY)[1]
            write(address, b"%d" % number)  # noqa: B023 - called in this round
            assert read(address) == [b"%d" % n for n in range(number + 1)]  # noqa: B023

        ran = up(tmp_path / "data", "--quiet", look=look)
        assert (ran.status, ran.err) == (0, "")


def test_defaults_for_topics_come_from_options(tmp_path: Path) -> None:
    def look(live: Live) -> None:
        admin = AdminClient({"bootstrap.servers": printed(live, QUIET_READY)[1], "log_level": 0})
        admin.create_topics([NewTopic("t")])["t"].result(TIMEOUT_S)
        resource = ConfigResource(ResourceType.TOPIC, "t")
        settings = admin.describe_configs([resource])[resource].result(TIMEOUT_S)
        assert settings["durability"].value == "os"
        assert settings["retention.ms"].value == "5000"
        assert len(admin.list_topics("t", timeout=TIMEOUT_S).topics["t"].partitions) == 3

    options = ("-q", "--durability", "os", "-c", "retention.ms=5000", "--partitions", "3")
    up(tmp_path / "data", *options, look=look).ok()


def test_clients_are_told_the_advertised_address(tmp_path: Path) -> None:
    def look(live: Live) -> None:
        with RawClient(printed(live, QUIET_READY)[1]) as client:
            (node,) = client.call(rq.metadata("t"), 12).brokers
        assert (node.host, node.port) == ("broker.example", 1234)

    up(tmp_path / "data", "-q", "--advertise", "broker.example:1234", look=look).ok()


def test_a_taken_port_is_explained(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ran = run("up", "--data", str(tmp_path / "data"), "--listen", f"127.0.0.1:{port}")
    assert ran.status == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ran.err
    assert "--listen" in ran.err


def test_a_failed_start_leaves_nothing_of_its_own_behind(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for option in ("--listen", "--metrics"):
            data = tmp_path / "new" / "data"
            assert run("up", "--data", str(data), "--listen", "0", option, port).status == 1
            assert not (tmp_path / "new").exists()
        # What was there before stays, empty or not.
        (tmp_path / "empty").mkdir()
        run("up", "--data", str(tmp_path / "empty"), "--listen", port)
        assert (tmp_path / "empty").exists()

        def look(live: Live) -> None:
            write(printed(live, QUIET_READY)[1], b"hello")

        up(tmp_path / "data", "-q", look=look).ok()
        assert run("up", "--data", str(tmp_path / "data"), "--listen", port).status == 1
    check_clean_stop(tmp_path / "data")
    assert (tmp_path / "data" / "greetings-0").is_dir()


def test_a_new_directory_that_another_broker_took_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = tmp_path / "data"
    store = LogStore(str(data))

    def quicker(*_: object) -> bool:
        if data.exists() and not store.cluster_id:
            store.open()
        return True

    monkeypatch.setattr(os, "access", quicker)
    assert "in use by another broker" in run("up", "--data", str(data), "--listen", "0").err
    store.close()
    assert (data / "meta.properties").exists()


def test_a_port_alone_is_one_of_this_machine(tmp_path: Path) -> None:
    for where in ("0", ":0"):
        ran = up(tmp_path / "data", "-q", "--listen", where).ok()
        assert re.fullmatch(r"127\.0\.0\.1:\d+\n", ran.out)
    for option in ("--listen", "--metrics"):
        ran = run("up", "--data", str(tmp_path / "data"), option, "abc")
        assert ran.status == 2
        assert "[HOST:]PORT, as in 9092" in ran.err


def test_a_directory_in_use_is_explained(tmp_path: Path) -> None:
    store = LogStore(str(tmp_path / "data"))
    store.open()
    ran = run("up", "--data", str(tmp_path / "data"), "--listen", "127.0.0.1:0")
    store.close()
    assert ran.status == 1
    assert "in use by another broker" in ran.err
    assert "--data" in ran.err


def test_a_directory_that_cannot_be_made_is_explained(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    ran = run("up", "--data", str(tmp_path / "file" / "data"))
    assert ran.status == 1
    assert "cannot be made" in ran.err


def test_an_unwritable_directory_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For root, as which tests may run, every directory is writable.
    monkeypatch.setattr(os, "access", lambda *_: False)
    ran = run("up", "--data", str(tmp_path / "data"))
    assert ran.status == 1
    assert "not writable" in ran.err


def test_a_foreign_directory_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    ran = run("up", "--data", str(tmp_path), "--listen", "127.0.0.1:0")
    assert ran.status == 1
    assert "not a Penstock data directory" in ran.err
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize(
    "args",
    [
        ("--listen", "nowhere"),
        ("--listen", "127.0.0.1:99999"),
        ("--durability", "paper"),
        ("--partitions", "0"),
        ("-c", "retention.ms"),
        ("-c", "durability=os"),
        ("--log-level", "loud"),
    ],
)
def test_wrong_use_ends_with_2(tmp_path: Path, args: tuple[str, ...]) -> None:
    assert run("up", "--data", str(tmp_path / "data"), *args).status == 2


def test_an_unknown_topic_setting_is_explained(tmp_path: Path) -> None:
    ran = run("up", "--data", str(tmp_path / "data"), "-c", "no.such.setting=1")
    assert ran.status == 1
    assert "no.such.setting" in ran.err


def test_an_open_address_brings_a_warning(tmp_path: Path) -> None:
    ran = up(tmp_path / "data", "--listen", "0.0.0.0:0", "-q").ok()
    assert re.fullmatch(r"0\.0\.0\.0:\d+\n", ran.out)
    assert "there is no authentication" in ran.err


def test_a_project_that_names_another_broker_brings_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "penstock.toml"
    monkeypatch.setenv("PENSTOCK_PROJECT", str(file))
    file.write_text("[broker]\nbootstrap = '127.0.0.1:1'\n")
    ran = up(tmp_path / "data").ok()
    assert "commands in this folder use the broker at 127.0.0.1:1," in ran.err
    ready = re.search(r"ready at 127.0.0.1:(\d+)", ran.out)
    assert ready is not None
    file.write_text(f"[broker]\nbootstrap = 'localhost:{ready[1]}'\n")
    ran = up(tmp_path / "data", "--advertise", f"127.0.0.1:{ready[1]}").ok()
    assert ran.err == STOPPED


def test_log_lines_can_be_json(tmp_path: Path) -> None:
    def look(live: Live) -> None:
        write(printed(live, QUIET_READY)[1], b"x")

    ran = up(tmp_path / "data", "-q", "--log-level", "info", "--log-json", look=look).ok()
    lines = [orjson.loads(line) for line in ran.err.splitlines() if line.startswith("{")]
    assert any("created topic greetings" in line["message"] for line in lines)
