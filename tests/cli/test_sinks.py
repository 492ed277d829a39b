"""`penstock sinks`: wrong uses, what is told at rest, and a real run that is killed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from penstock.spark.archive import MODE_VARIABLE
from penstock.spark.sinking.folder import SinkFolder
from tests.cli.runner import Ran, run
from tests.spark.sinking.changelog import Changelog, Row, table
from tests.waiting import eventually

WAIT_S = 200.0


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder, which is the current one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)
    return tmp_path


def declare(folder: Path, text: str) -> None:
    (folder / "penstock.toml").write_text(text)


def refused(*args: str) -> Ran:
    ran = run("sinks", *args)
    assert ran.status == 1
    assert "Traceback" not in ran.err
    return ran


GOOD = '[sinks.orders]\ntopic = "{topic}"\nurl = "sqlite:///shop.db"\nkey = "id"\n'


def test_wrong_settings_are_told_with_their_line(folder: Path, at: str) -> None:
    for line, told in (
        ('topic = "a"', "sinks.orders.url is missing"),
        ('topic = "a"\nurl = "nosql:///x"', "no kind of store is called 'nosql'"),
        ('topic = "a"\nurl = "sqlite:///x.db"\nfields = "id wrong"', "no type is called 'wrong'"),
        ('topic = "a"\nurl = "sqlite:///x.db"\nkeys = "id"', "sinks.orders.keys is no setting"),
        ('topic = "a b"\nurl = "sqlite:///x.db"', "sinks.orders.topic cannot be 'a b'"),
        ('topic = "a"\nurl = "sqlite:///x.db"\nmax_lag = "x"', "must be a duration"),
        ('topic = "a"\nurl = "sqlite:///x.db"\nkey = "b"\nfields = "id int"', "'b' is none of"),
    ):
        declare(folder, f"[sinks.orders]\n{line}\n")
        ran = refused("list")
        assert told in ran.err
        assert "penstock.toml, line" in ran.err


def test_what_is_not_there(folder: Path, at: str) -> None:
    assert "there are no sinks" in run("sinks", "list").ok().err
    assert "there are no sinks to feed" in refused("run").err
    declare(folder, GOOD.format(topic="some"))
    for command in ("describe", "pause", "resume", "rebuild", "remove", "wait"):
        ran = refused(command, "other")
        assert "no sink 'other'" in ran.err
        assert "There are: orders." in ran.err
    assert run("sinks", "wait", "orders", "--record", "x").status == 2


def test_at_rest(folder: Path, at: str, topic: str, seed: int) -> None:
    Changelog(at, topic, seed).feed(10)
    declare(folder, GOOD.format(topic=topic))
    (status,) = run("sinks", "list", "--json").ok().json
    assert (status["name"], status["state"], status["lag"]) == ("orders", "new", None)
    assert status["store"] == f"sqlite:///{folder}/shop.db"
    run("sinks", "pause", "orders").ok()
    assert SinkFolder(folder / ".penstock/sinks").sink("orders").paused
    (status,) = run("sinks", "list", "--json").ok().json
    assert status["state"] == "paused"
    run("sinks", "resume", "orders").ok()
    run("sinks", "rebuild", "orders", "--yes").ok()
    assert SinkFolder(folder / ".penstock/sinks").sink("orders").rebuilding
    assert "orders" in run("sinks", "describe", "orders").ok().out
    assert "has not reached" in refused("wait", "orders", "--timeout", "50ms").err
    run("sinks", "remove", "orders", "--yes").ok()
    assert not SinkFolder(folder / ".penstock/sinks").sink("orders").rebuilding


def test_a_store_that_is_not_there(folder: Path, at: str, topic: str) -> None:
    declare(folder, f'[sinks.orders]\ntopic = "{topic}"\nurl = "postgresql://127.0.0.1:1/x"\n')
    (status,) = run("sinks", "list", "--json").ok().json
    assert "127.0.0.1:1" in status["error"]


@contextmanager
def feeding(folder: Path, at: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "run.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli", "sinks", "run", "--master", "local[2]",
             "--bootstrap", at, "--conf", "spark.ui.enabled=false", "--conf",
             "spark.driver.extraJavaOptions=-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"],
            stdout=log, stderr=log, cwd=folder, start_new_session=True,
            # An archive is used where there is one; to make one would take time from the tests.
            env={**os.environ, MODE_VARIABLE: "use"},
        )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def rows(folder: Path) -> dict[int, Row]:
    with closing(sqlite3.connect(folder / "shop.db")) as connection:
        connection.row_factory = sqlite3.Row
        return {row["id"]: dict(row) for row in connection.execute("SELECT * FROM orders")}


@pytest.mark.timeout(400)
def test_killed_and_started_again_it_is_what_the_topic_says(
    folder: Path, at: str, seed: int
) -> None:
    topic = f"t-{uuid4().hex[:8]}"
    log = Changelog(at, topic, seed)
    log.feed(1000)
    declare(folder, GOOD.format(topic=topic) + "max_records = 400\n")
    with feeding(folder, at):
        eventually(lambda: _position(folder), timeout_s=WAIT_S)
    # It was killed, most likely in the middle of something.
    log.feed(100)
    with feeding(folder, at) as process:
        run("sinks", "wait", "orders", "--timeout", f"{WAIT_S:.0f}s").ok()
        assert rows(folder) == table(at, topic), (folder / "run.log").read_text()
        (status,) = run("sinks", "list", "--json").ok().json
        assert status["state"] == "running"
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0, (folder / "run.log").read_text()


def _position(folder: Path) -> bool:
    if not (folder / "shop.db").exists():
        return False
    ran = run("sinks", "list", "--json")
    return any(each["position"] for each in ran.json) if ran.status == 0 else False
