"""`penstock up` as the process that it is: ready, stopped cleanly, or refused with a reason."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest

from penstock.log.store import LogStore
from penstock.log.verify import verify
from tests.cli.runner import run
from tests.waiting import read_until

COMMAND = (sys.executable, "-m", "penstock.cli", "up")
READY_TIMEOUT_S = 60.0


class Up:
    """A running `penstock up`."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.printed = ""

    def wait_for(self, pattern: str) -> re.Match[str]:
        """Read what it prints until the pattern is there."""
        assert self.process.stdout is not None
        self.printed = read_until(self.process.stdout.fileno(), pattern, self.printed)
        match = re.search(pattern, self.printed, re.DOTALL)
        assert match is not None
        return match

    def stop(self, number: signal.Signals = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=READY_TIMEOUT_S)
        return self.process.returncode, err.decode()


@contextmanager
def up(data: Path, *args: str) -> Iterator[Up]:
    command = [*COMMAND, "--data", str(data), "--listen", "127.0.0.1:0", *args]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield Up(process)
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.processes
def test_it_says_where_it_is_and_stops_cleanly(tmp_path: Path, number: signal.Signals) -> None:
    data = tmp_path / "data"
    with up(data) as running:
        address = running.wait_for(r"ready at (\S+)")[1]
        running.wait_for(r"penstock consume greetings --bootstrap \S+\n")
        assert str(data) in running.printed
        assert re.search(r"cluster +\S{22}\n", running.printed)
        assert "durability  disk: " in running.printed
        run("produce", "greetings", "-b", address, "-v", "hello").ok()
        status, err = running.stop(number)
    assert (status, err) == (0, "stopped cleanly; everything is on disk\n")
    report = verify(str(data))
    assert (report.clean_stop, report.findings) == (True, [])


@pytest.mark.processes
def test_records_are_there_after_a_restart(tmp_path: Path) -> None:
    for number in range(2):
        with up(tmp_path / "data", "--quiet") as running:
            address = running.wait_for(r"(\S+)\n")[1]
            run("produce", "greetings", "-b", address, "-v", str(number)).ok()
            out = run("consume", "greetings", "-b", address, "--value-only").ok().lines
            assert out == [str(n) for n in range(number + 1)]
            assert running.stop() == (0, "")


@pytest.mark.processes
def test_defaults_for_topics_come_from_options(tmp_path: Path) -> None:
    options = ("-q", "--durability", "os", "-c", "retention.ms=5000", "--partitions", "3")
    with up(tmp_path / "data", *options) as running:
        address = running.wait_for(r"(\S+)\n")[1]
        run("topics", "create", "t", "-b", address).ok()
        topic = run("topics", "describe", "t", "-b", address, "--json").ok().json[0]
        settings = {item["name"]: item["value"] for item in topic["settings"]}
        assert (settings["durability"], settings["retention.ms"]) == ("os", "5000")
        assert len(topic["partitions"]) == 3
        running.stop()


@pytest.mark.processes
def test_clients_are_told_the_advertised_address(tmp_path: Path) -> None:
    from confluent_kafka.admin import AdminClient

    with up(tmp_path / "data", "-q", "--advertise", "broker.example:1234") as running:
        address = running.wait_for(r"(\S+)\n")[1]
        admin = AdminClient({"bootstrap.servers": address, "log_level": 0})
        (node,) = admin.list_topics("t", timeout=60).brokers.values()
        assert f"{node.host}:{node.port}" == "broker.example:1234"
        running.stop()


def test_a_taken_port_is_explained(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        ran = run("up", "--data", str(tmp_path / "data"), "--listen", f"127.0.0.1:{port}")
    assert ran.status == 1
    assert f"cannot listen on 127.0.0.1:{port}" in ran.err
    assert "--listen" in ran.err


@pytest.mark.processes
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
        with up(tmp_path / "data", "-q") as running:
            address = running.wait_for(r"(\S+)\n")[1]
            run("produce", "greetings", "-b", address, "-v", "hello").ok()
            running.stop()
        assert run("up", "--data", str(tmp_path / "data"), "--listen", port).status == 1
    report = verify(str(tmp_path / "data"))
    assert (report.clean_stop, report.findings) == (True, [])
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


@pytest.mark.processes
def test_a_port_alone_is_one_of_this_machine(tmp_path: Path) -> None:
    for where in ("0", ":0"):
        with up(tmp_path / "data", "-q", "--listen", where) as running:
            running.wait_for(r"127\.0\.0\.1:\d+\n")
            running.stop()
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


@pytest.mark.processes
def test_an_open_address_brings_a_warning(tmp_path: Path) -> None:
    with up(tmp_path / "data", "--listen", "0.0.0.0:0", "-q") as running:
        running.wait_for(r"0\.0\.0\.0:\d+\n")
        status, err = running.stop()
    assert status == 0
    assert "there is no authentication" in err


@pytest.mark.processes
def test_a_project_that_names_another_broker_brings_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "penstock.toml"
    monkeypatch.setenv("PENSTOCK_PROJECT", str(file))
    file.write_text("[broker]\nbootstrap = '127.0.0.1:1'\n")
    with up(tmp_path / "data") as running:
        own = running.wait_for(r"ready at 127.0.0.1:(\d+)")[1]
        _, err = running.stop()
    assert "commands in this folder use the broker at 127.0.0.1:1," in err
    file.write_text(f"[broker]\nbootstrap = 'localhost:{own}'\n")
    with up(tmp_path / "data", "--advertise", f"127.0.0.1:{own}") as running:
        running.wait_for("ready at")
        _, err = running.stop()
    assert err == "stopped cleanly; everything is on disk\n"


@pytest.mark.processes
def test_log_lines_can_be_json(tmp_path: Path) -> None:
    with up(tmp_path / "data", "-q", "--log-level", "info", "--log-json") as running:
        address = running.wait_for(r"(\S+)\n")[1]
        run("topics", "create", "t", "-b", address).ok()
        status, err = running.stop()
    assert status == 0
    lines = [orjson.loads(line) for line in err.splitlines() if line.startswith("{")]
    assert any("created topic t" in line["message"] for line in lines)
