"""`penstock sinks`: wrong uses, what is told at rest, and a real run that is killed."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import Queue
from threading import Thread
from typing import Any
from uuid import uuid4

import pytest
import typer
from pyspark.sql import SparkSession

from penstock.cli import project
from penstock.cli.sinks_alerts import SinkAlerts
from penstock.cli.sinks_file import declared, read
from penstock.cli.sinks_reach import must_reach_some
from penstock.cli.verifying.origins import log_ends
from penstock.client.connection import Cluster
from penstock.client.topics import create
from penstock.errors import ConfigError
from penstock.sinks import Position, Schema, open_sink
from penstock.sinks.fields import from_text
from penstock.sinks.spec import SinkSpec
from penstock.sinks.webhook import WebhookSink
from penstock.spark.archive import MODE_VARIABLE
from penstock.spark.flows.overseeing import Settings
from penstock.spark.flows.supervisor import Policy, State
from penstock.spark.flows.turns import Turns
from penstock.spark.sinking.folder import SinkFolder, SinkRecord
from penstock.spark.sinking.manager import SinkManager, _Unit
from penstock.testing.sinks import changes, never
from tests.cli.runner import Live, Ran, run, run_until, share_session
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
        ('topic = "a"\nurl = "sqlite:///x.db?foo=1"', "there is no option 'foo'"),
        ('topic = "a"\nurl = "sqlite:///x.db?timeout=x"', "timeout must be a number"),
        ('topic = "a"\nurl = "mysql://h/d?ssl=perhaps"', "ssl must be true or false"),
        ('topic = "a"\nurl = "postgresql://h/d?foo=1"', "there is no option 'foo'"),
        ('topic = "a"\nurl = "redis://h/d"', "a database of Redis is a number"),
        ('topic = "a"\nurl = "webhook+http://h"\noptions.x = 1', "sinks.orders.options.x: "),
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


def test_a_topic_that_is_not_there_is_not_waited_for(folder: Path, at: str, topic: str) -> None:
    declare(folder, GOOD.format(topic=topic))
    schema = Schema.of(from_text("id bigint"), "id")
    with read(project.load(None), "orders").sink() as sink:
        sink.open(schema)
    told = refused("wait", "orders", "--timeout", "10s").err
    assert f"topic {topic} does not exist" in told
    with Cluster(at) as cluster:
        create(cluster, topic, partitions=1)
    run("sinks", "wait", "orders", "--timeout", "10s").ok()


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("sqlite:///x.db?table=t", "sqlite:///x.db?table=t&timeout=3", True),
        ("sqlite:///x.db", "sqlite:///x.db", False),
        ("postgresql://me:a@h/d?table=t", "postgresql://me:b@h/d?table=t", True),
        ("postgresql://h/d?table=t", "postgresql://h/d?table=t&host=other", False),
        ("redis://h/0?prefix=p", "redis://h/0?prefix=p", True),
        ("redis://h/0?prefix=p", "redis://h/1?prefix=p", False),
        ("delta:///w/t", "delta:///w/t", True),
        ("webhook+http://h/x", "webhook+http://h/x", False),
        ("webhook+http://h/x?state=s.db", "webhook+http://h/y?state=s.db", True),
    ],
)
def test_two_sinks_on_one_table(folder: Path, one: str, other: str, same: bool) -> None:
    text = '[sinks.{}]\ntopic = "t"\nurl = "{}"\n'
    declare(folder, text.format("a", one) + text.format("b", other))
    if not same:
        assert len(declared(project.load(None))) == 2
        return
    with pytest.raises(ConfigError, match=r"line 6: sinks\.b\.url: sinks\.a \(line 3\)"):
        project.load(None)


def test_at_rest(folder: Path, at: str, topic: str, seed: int) -> None:
    Changelog(at, topic, seed).feed(10)
    declare(folder, GOOD.format(topic=topic))
    (status,) = run("sinks", "list", "--json").ok().json
    assert (status["name"], status["state"], status["lag"]) == ("orders", "new", None)
    # What nobody has counted is not told as nothing.
    assert (status["put"], status["deleted"]) == (None, None)
    assert run("sinks", "list").ok().out.split("─\n")[1].split()[-6:-1] == ["-"] * 5
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


@pytest.mark.parametrize("scheme", ["postgresql", "mysql", "redis", "webhook+http"])
def test_no_store_answers_when_they_are_to_be_fed(
    folder: Path, at: str, topic: str, scheme: str
) -> None:
    """One message, without Spark; a webhook is not asked before there is something to send."""
    declare(
        folder, f'[sinks.orders]\ntopic = "{topic}"\nurl = "{scheme}://me:secret@127.0.0.1:1/0"'
    )
    if scheme.startswith("webhook"):
        must_reach_some(declared(project.load()), folder / "sinks")
        return
    ran = refused("run", "--once")
    error, remedy = ran.err.splitlines()
    assert error.startswith("error: sink orders: ")
    assert "127.0.0.1:1" in error
    assert "refused" in error
    assert "secret" not in ran.err
    assert "address right?" in remedy
    # With one that answers the other is tried again.
    with (folder / "penstock.toml").open("a") as file:
        file.write(f'\n[sinks.there]\ntopic = "{topic}"\nurl = "sqlite:///shop.db"\n')
    must_reach_some(declared(project.load()), folder / "sinks")
    run("sinks", "pause", "there", "--data", str(folder / "sinks")).ok()
    with pytest.raises(typer.Exit):
        must_reach_some(declared(project.load()), folder / "sinks")


def test_one_that_was_killed_does_not_run(folder: Path, at: str, topic: str) -> None:
    declare(folder, GOOD.format(topic=topic))
    known = SinkFolder(folder / ".penstock/sinks")
    known.write_sink(SinkRecord("orders", topic, state="running"))
    (status,) = run("sinks", "list", "--json").ok().json
    assert status["state"] == "killed"


def test_sinks_whose_java_is_gone_do_not_run(tmp_path: Path) -> None:
    spec = SinkSpec("orders", "t", f"sqlite:///{tmp_path}/s.db")
    spark: Any = None
    settings = Settings("127.0.0.1:1", turns=Turns(2))
    manager = SinkManager(spark, [spec], SinkFolder(tmp_path), settings)
    unit = manager._live["orders"] = _Unit(spec, Policy())
    unit.life.state = "running"
    manager._remember(unit)
    manager._break(ConnectionRefusedError("gone"))
    kept = SinkFolder(tmp_path).sink("orders")
    assert (kept.state, "Java process has ended" in kept.error) == ("failed", True)
    manager.close()


def test_how_far_it_is_behind_when_nothing_feeds_it(
    folder: Path, at: str, topic: str, seed: int
) -> None:
    Changelog(at, topic, seed, partitions=1).feed(10)
    declare(folder, GOOD.format(topic=topic) + 'max_lag = "1ms"\n')
    schema = Schema.of(from_text("id bigint"), "id")
    with open_sink(f"sqlite:///{folder}/shop.db?table=orders") as sink:
        sink.open(schema)
        done = changes(schema, [{"id": 1}], [], since=0, until=3)
        sink.apply(replace(done, position=Position({(topic, 0): 3})), never)
    (status,) = run("sinks", "list", "--json").ok().json
    assert status["lag"] >= 7
    assert 0 <= status["lag_s"] < 600
    assert status["alarming"]


def test_no_password_is_ever_told(folder: Path, at: str, topic: str) -> None:
    for url in (
        "postgresql://me:geheim@127.0.0.1:1/x",
        "mariadb://me:geheim@127.0.0.1:1/x",
        "redis://:geheim@127.0.0.1:1/0",
        "opensearch+http://me:geheim@127.0.0.1:1/x",
        "webhook+http://me:geheim@127.0.0.1:1/x?secret=geheim",
        "postgresql://me:geheim@127.0.0.1:x/x",
        "postgresql://me:geheim/x@127.0.0.1/x",
        "redis://:geheim#@127.0.0.1:1/0",
        "redis://:geheim@127.0.0.1:1/none",
    ):
        declare(folder, f'[sinks.orders]\ntopic = "{topic}"\nurl = "{url}"\n')
        _no_password_is_told(url)
    # URLs where none are wanted.
    for text in (
        'sinks = "{}"',
        '[sinks]\norders = "{}"',
        '[sinks.orders]\nurl = ["{}"]',
        '[sinks.orders]\ntopic = "t"\nurl = "sqlite:///x"\nalert_webhook = ["{}"]',
        'capture = "{}"',
        '[capture]\nshop = "{}"',
    ):
        declare(folder, text.format("redis://:geheim@127.0.0.1:1/0"))
        _no_password_is_told(text)


def _no_password_is_told(text: str) -> None:
    for command in (
        ["sinks", "list"],
        ["sinks", "describe", "orders"],
        ["sinks", "wait", "orders", "--record", "0:0", "--timeout", "10ms"],
        ["doctor"],
    ):
        ran = run(*command)
        assert "geheim" not in ran.out + ran.err, (text, command)
        assert "Traceback" not in ran.err


def test_webhooks_remember_in_the_folder_of_the_project(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for option, wanted in (("", "orders.webhook.db"), ("?state=sent.db", "sent.db")):
        url = f"webhook+http://127.0.0.1:1/x{option}"
        declare(folder, f'[sinks.orders]\ntopic = "t"\nurl = "{url}"\n')
        (folder / "elsewhere").mkdir(exist_ok=True)
        monkeypatch.chdir(folder / "elsewhere")
        with read(project.load(None), "orders").sink() as sink:
            assert isinstance(sink, WebhookSink)
            assert sink._file == folder / wanted


def test_alarms_are_sent(tmp_path: Path) -> None:
    got: Queue[dict[str, Any]] = Queue()

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Receiver)
    thread = Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        alerts = SinkAlerts({"orders": f"http://127.0.0.1:{server.server_port}/x", "other": ""})
        spec = SinkSpec("orders", "t", f"sqlite:///{tmp_path}/s.db", max_lag_s=5.0)
        spark: Any = None
        settings = Settings("127.0.0.1:1", turns=Turns(2))
        manager = SinkManager(spark, [spec], SinkFolder(tmp_path), settings)
        manager.on_alarm = alerts
        unit = manager._live["orders"] = _Unit(spec, Policy())
        steps: list[tuple[float, State]] = [(1.0, "running"), (6.0, "running"), (9.0, "running"),
                             (0.0, "running"), (0.0, "failed")]  # fmt: skip
        for lag_s, state in steps:
            unit.lag, unit.lag_s, unit.life.state = int(lag_s), lag_s, state
            unit.applied.position = Position()
            manager._watch_lag(unit)
        told = [got.get(timeout=60) for _ in range(3)]
        assert [(each["alert"], each["state"]) for each in told] == [
            ("sink-lag", "firing"), ("sink-lag", "ended"), ("sink-failed", "firing"),
        ]  # fmt: skip
        assert told[0]["text"] == "sink orders is 6 records and 6 s behind t"
        assert got.empty()
        manager.close()
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


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


@pytest.mark.java
@pytest.mark.timeout(400)
def test_killed_and_started_again_it_is_what_the_topic_says(
    folder: Path, at: str, seed: int, penstock_spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed as the process that it is; started again in this one."""
    topic = f"t-{uuid4().hex[:8]}"
    log = Changelog(at, topic, seed)
    log.feed(1000)
    declare(folder, GOOD.format(topic=topic) + "max_records = 400\n")

    def told() -> dict[str, Any]:
        (status,) = run("sinks", "list", "--json").ok().json
        return dict(status)

    with feeding(folder, at) as process:
        # It is killed, most likely in the middle of something.
        eventually(lambda: process.poll() is None and told()["put"], WAIT_S)
        assert told()["state"] == "running", (folder / "run.log").read_text()
    log.feed(100)

    def look(_: Live) -> None:
        with Cluster(at) as cluster, read(project.load(None), "orders").sink() as sink:
            sink.wait_for(log_ends(cluster, topic), WAIT_S)
        assert rows(folder) == table(at, topic)

    share_session(penstock_spark, monkeypatch)
    run_until(look, "sinks", "run", "--bootstrap", at, "--plain", stop=signal.SIGTERM).ok()
    run("sinks", "wait", "orders", "--timeout", "10s").ok()
    assert rows(folder) == table(at, topic)
    assert told()["state"] == "stopped"
