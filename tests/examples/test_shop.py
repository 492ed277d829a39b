"""The shop, as users run it: all derived systems are right at the end, also after each process was
killed; and what stands in the way of a start is told in one message."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import orjson
import pytest
from confluent_kafka.admin import NewTopic

from penstock.capture.events.naming import routed
from penstock.cli import project
from penstock.cli.capture_project import configured
from penstock.cli.demo import MARK, Plan, adapted
from penstock.cli.demo_drain import ends_at, unread
from penstock.cli.demo_parts import Crew, PartError, last_error, last_warning, memory_bytes
from penstock.cli.demo_view import RESULTS, Seen, Shopkeeper, Watcher, told
from penstock.cli.examples import files_of
from penstock.cli.kafka import Connection
from penstock.cli.sinks_file import declared
from penstock.spark.flows.control import ask
from penstock.spark.flows.errors import FlowError
from penstock.spark.sinking.folder import SinkFolder
from penstock.testing import Broker
from penstock.testing.apache_kafka import ApacheKafka
from penstock.testing.postgres import PostgresServer
from penstock.testing.redis import RedisServer
from penstock.testing.spark_cluster import SparkCluster
from tests.cli.runner import run
from tests.harness.profiles import DEMO_KILLS, some
from tests.waiting import eventually

SINKS = ("search", "cache", "warehouse", "revenue_by_country", "revenue_by_minute")
START_S = 600.0


class Demo:
    """`penstock demo` in a process of its own."""

    def __init__(self, data: Path, *options: str) -> None:
        self.data = data
        self.log = data.parent / f"{data.name}.log"
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "penstock.cli", "demo", "--data", str(data),
                 "--listen", "127.0.0.1:0", "--rate", "10", *options],
                stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    @property
    def told(self) -> str:
        return self.log.read_text(errors="replace")

    def parts(self) -> dict[str, int]:
        try:
            found: dict[str, int] = orjson.loads((self.data / "parts.json").read_bytes())
        except FileNotFoundError:
            return {}
        return found

    def sinks(self) -> dict[str, dict[str, Any]]:
        try:
            found = ask(SinkFolder(self.data / ".penstock" / "sinks"), {"do": "list"})
        except (FlowError, OSError):
            return {}
        return {each["name"]: each for each in found}

    def running(self) -> bool:
        """Whether it is still there; so that nobody waits for what has failed."""
        assert self.process.poll() is None, self.told
        return True

    def is_feeding(self) -> bool:
        """Whether something has come through to each derived system since its start."""
        assert self.running()
        sinks = self.sinks()
        return len(sinks) == len(SINKS) and all(each["put"] for each in sinks.values())

    def has_begun(self) -> bool:
        """Whether something has come through to any derived system."""
        assert self.running()
        return any(each["put"] for each in self.sinks().values())

    def kill(self, part: str) -> None:
        """And wait until it is there again."""
        pid = self.parts()[part]
        os.kill(pid, signal.SIGKILL)
        eventually(lambda: self.running() and self.parts().get(part, pid) != pid, START_S)

    def end(self) -> None:
        if self.process.poll() is None:
            pids = list(self.parts().values())
            for pid in (self.process.pid, *pids):
                try:
                    os.killpg(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
        self.process.wait()


def equal(told: str) -> set[str]:
    """The derived systems that the summary calls equal."""
    words = [line.split() for line in told.splitlines()]
    return {line[0] for line in words if line and line[0] in SINKS and line[-1] == "equal"}


@pytest.mark.java
@pytest.mark.independent
@pytest.mark.timeout(2400)
def test_whoever_is_killed_all_is_equal_in_the_end(tmp_path: Path) -> None:
    """All at once, the demo itself first, so that the next run goes on; then one by one."""
    first = Demo(tmp_path / "shop")
    try:
        eventually(first.has_begun, START_S, poll_s=0.5)
        assert set(first.parts()) == {"shop", "capture", "broker", "flows"}
    finally:
        first.end()
    before = first.told
    demo = Demo(tmp_path / "shop", "--keep")
    try:
        eventually(demo.is_feeding, START_S, poll_s=0.5)
        for part in ["capture", "flows", "broker", "shop"][:DEMO_KILLS]:
            demo.kill(part)
        eventually(demo.is_feeding, START_S, poll_s=0.5)
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(START_S) == 0, demo.told
        said = demo.told[len(before) :]
        assert equal(said) == set(SINKS), demo.told
        assert "had ended; it is started again" in said
        assert demo.parts() == {}
    finally:
        demo.end()


@pytest.mark.proof
@pytest.mark.java
@pytest.mark.independent
@pytest.mark.timeout(2400)
def test_the_next_run_goes_on_with_what_is_there(tmp_path: Path) -> None:
    """Also after all was killed at once, the demo itself first."""
    first = Demo(tmp_path / "shop")
    try:
        eventually(first.is_feeding, START_S, poll_s=0.5)
        pids = first.parts()
        assert set(pids) == {"shop", "capture", "broker", "flows"}
    finally:
        first.end()
    before = first.told
    again = Demo(tmp_path / "shop", "--keep", "--seconds", "1")
    try:
        assert again.process.wait(START_S) == 0, again.told
        assert equal(again.told[len(before) :]) == set(SINKS), again.told
    finally:
        again.end()


@pytest.mark.java
@pytest.mark.databases
@pytest.mark.independent
@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    "cluster", [False, pytest.param(True, marks=pytest.mark.proof)], ids=["local", "cluster"]
)
def test_servers_in_the_place_of_all_that_is_embedded(tmp_path: Path, cluster: bool) -> None:
    with ExitStack() as stack:
        postgres = stack.enter_context(PostgresServer())
        kafka = stack.enter_context(ApacheKafka())
        redis = stack.enter_context(RedisServer())
        options = ["--postgres", postgres.url(), "--kafka", kafka.bootstrap, "--redis", redis.url]
        if cluster:
            spark = stack.enter_context(SparkCluster(1, cores=2, memory="2g"))
            options += ["--master", spark.master]
        demo = Demo(tmp_path / "shop", *options)
        stack.callback(demo.end)
        eventually(demo.is_feeding, START_S, poll_s=0.5)
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(START_S) == 0, demo.told
        assert equal(demo.told) == set(SINKS), demo.told
        assert redis.url in demo.told


# ---- what stands in the way of a start -------------------------------------------------------


def refused(data: Path, *options: str) -> str:
    """What a start that fails says."""
    ran = run("demo", "--data", str(data), *options)
    assert ran.status == 1, ran.out + ran.err
    assert "Traceback" not in ran.err
    assert ran.err.count("error:") == 1
    assert not (data / "parts.json").exists()
    return ran.err


@pytest.mark.java
@pytest.mark.independent
def test_an_occupied_port(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = refused(tmp_path / "shop", "--listen", f"127.0.0.1:{port}")
    assert f"cannot listen at 127.0.0.1:{port}" in told
    assert "--listen" in told


def test_no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    told = refused(tmp_path / "shop")
    assert "JAVA_HOME" in told
    assert not (tmp_path / "shop").exists()


@pytest.mark.java
@pytest.mark.independent
def test_a_database_that_is_not_there(tmp_path: Path) -> None:
    told = refused(tmp_path / "shop", "--postgres", "postgresql://me:secret@127.0.0.1:1/test")
    assert "cannot reach PostgreSQL at 127.0.0.1:1/test" in told
    assert "Is the server running" in told
    assert "secret" not in told


@pytest.mark.java
@pytest.mark.independent
def test_a_database_that_does_not_let_us_in(
    tmp_path: Path, shared_postgres: PostgresServer
) -> None:
    url = shared_postgres.url().replace(":secret@", ":mistaken@")
    told = refused(tmp_path / "shop", "--postgres", url)
    assert "password authentication failed" in told
    assert "mistaken" not in told


@pytest.mark.java
@pytest.mark.independent
def test_a_log_that_is_not_there(tmp_path: Path) -> None:
    told = refused(tmp_path / "shop", "--kafka", "127.0.0.1:1")
    assert "no broker answers at 127.0.0.1:1" in told
    assert "--kafka" in told


@pytest.mark.java
@pytest.mark.independent
def test_a_start_that_fails_deletes_nothing(tmp_path: Path) -> None:
    data = tmp_path / "shop"
    data.mkdir()
    (data / MARK).touch()
    (data / "shop.db").write_text("of the last time")
    for option, url in (("--kafka", "127.0.0.1:1"), ("--redis", "redis://127.0.0.1:1/0")):
        refused(data, option, url, "--listen", "127.0.0.1:0")
    assert (data / "shop.db").read_text() == "of the last time"


@pytest.mark.java
@pytest.mark.independent
@pytest.mark.parametrize("last", some(["capture", "flows"], test=1))
def test_a_second_signal_leaves_nothing_running(tmp_path: Path, last: str) -> None:
    demo = Demo(tmp_path / "shop")
    try:
        eventually(lambda: demo.running() and last in demo.parts(), START_S)
        pids = list(demo.parts().values())
        demo.process.send_signal(signal.SIGINT)
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.wait(START_S) == 130, demo.told
        eventually(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()])
        assert demo.parts() == {}
    finally:
        demo.end()


@pytest.mark.java
@pytest.mark.independent
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("mine")
    assert "not of a demo" in refused(tmp_path)
    assert (tmp_path / "precious").read_text() == "mine"


# ---- the parts -------------------------------------------------------------------------------


@pytest.mark.processes
def test_what_fails_before_it_is_ready_is_not_tried_again(tmp_path: Path) -> None:
    crew = Crew(tmp_path, os.environ)
    crew.start("part", [sys.executable, "-c", "import sys; sys.exit('error: no\\n       so do')"])
    with pytest.raises(PartError, match="no\n       so do"):
        eventually(crew.look)
    crew.end_all(["part"], 5)
    assert crew.parts == {}


@pytest.mark.processes
def test_what_is_killed_is_started_again(tmp_path: Path) -> None:
    crew = Crew(tmp_path, os.environ)
    part = crew.start("part", [sys.executable, "-c", "import signal; signal.pause()"])
    assert part.process is not None
    first = part.process.pid
    os.kill(first, signal.SIGKILL)
    assert eventually(crew.look) == ["part"]
    pids: dict[str, int] = orjson.loads((tmp_path / "parts.json").read_bytes())
    assert pids["part"] != first
    crew.end_all(["part"], 5)
    with pytest.raises(ProcessLookupError):
        os.kill(pids["part"], 0)


def test_the_last_error_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_error(log) == "it has ended without a word"
    log.write_text("starting\nerror: first\nerror: second\n       remedy\nafter\n")
    assert last_error(log) == "second\n       remedy"
    log.write_text("Traceback\nValueError: x\n\n")
    assert last_error(log) == "ValueError: x"


def test_counts_go_on_over_restarts() -> None:
    seen = Seen()
    keeper = Shopkeeper(seen)
    keeper.hear('{"insert": 5}')
    keeper.started()
    keeper.hear("no JSON")
    keeper.hear('{"insert": 2, "click": 1}')
    assert seen.done == {"insert": 7, "click": 1}


def test_what_is_not_known_is_not_told() -> None:
    seen = Seen()
    fresh: dict[str, Any] = {"lag": None, "lag_s": None}
    for sinks in ([], [fresh]):
        seen.sinks = sinks
        assert "sinks have not read anything yet" in told(seen)
        assert " behind" not in told(seen)
    seen.sinks = [fresh, {"lag": 12, "lag_s": None}]
    assert "sinks 12 records behind" in told(seen)
    seen.sinks = [{"lag": 12, "lag_s": 3.0}, {"lag": 1, "lag_s": 4.5}]
    assert "sinks 12 records, 4.5 s behind" in told(seen)
    seen.sinks = [{"lag": 0, "lag_s": 0.0}]
    assert "sinks up to date" in told(seen)


def test_a_closed_shop_has_no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Seen()
    keeper = Shopkeeper(seen)
    for inserts in (5, 25):
        keeper.hear(f'{{"insert": {inserts}}}')
    assert seen.rates["insert"] > 0
    assert "changes/s" in told(seen)
    keeper.closed()
    assert seen.rates == {}
    assert "changes/s" not in told(seen)
    assert "the shop is closed" in told(seen)
    assert seen.done == {"insert": 25}


def test_flows_are_waited_for_until_they_have_read_all(tmp_path: Path) -> None:
    ends = {("clicks", 0): 10, ("clicks", 1): 4, ("customers", 0): 7, ("other", 0): 99}
    flow: dict[str, Any] = {
        "name": "browsing", "generation": 1, "rebuilding": False, "state": "running",
    }  # fmt: skip
    checkpoint = tmp_path / ".penstock/flows/browsing/g1/checkpoint"

    def batch(number: int, *sources: str, done: bool = True) -> list[str]:
        for name, text in (("offsets", "\n".join(["v1", "{}", *sources])), ("commits", "v1\n{}")):
            (checkpoint / name).mkdir(parents=True, exist_ok=True)
            if name == "offsets" or done:
                (checkpoint / name / str(number)).write_text(text)
                (checkpoint / name / f".{number}.crc").write_text("")
        return unread(tmp_path, [flow], ends)

    assert unread(tmp_path, [flow], ends) == ["browsing"]
    assert batch(0, '{"clicks": {"0": 3, "1": 4}}', "-") == ["browsing"]
    # Begun is not done, and the tenth is later than the ninth.
    assert batch(9, '{"clicks": {"0": 9, "1": 4}}', '{"customers": {"0": 7}}') == ["browsing"]
    all_of_it = ('{"clicks": {"0": 10, "1": 4}}', '{"customers": {"0": 8}}')
    assert batch(10, *all_of_it, done=False) == ["browsing"]
    assert batch(10, *all_of_it) == []
    for gone in ("failed", "stopped"):
        assert unread(tmp_path, [{**flow, "name": "none", "state": gone}], ends) == []


def test_results_are_counted_to_their_ends(tmp_path: Path) -> None:
    with Broker() as broker:
        connection = Connection(broker.bootstrap, {})
        made = connection.admin().create_topics([NewTopic(name, 1) for name in RESULTS])
        for future in made.values():
            future.result(60)
        producer = connection.producer({"transactional.id": "results"})
        producer.init_transactions(60)
        seen = Seen()
        with Watcher(seen, tmp_path, broker.bootstrap, [], lambda: 0, 0.0) as watcher:
            for count in (3, 5):
                producer.begin_transaction()
                for _ in range(count):
                    producer.produce(RESULTS[0], b"{}")
                producer.commit_transaction(60)
                # The last offset is that of the transaction's end.
                ends = ends_at(broker.bootstrap, RESULTS)
                eventually(partial(watcher.has_counted, ends))
            assert seen.results[RESULTS[0]] == 8


def test_the_last_warning_of_a_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert last_warning(log) == ""
    log.write_text("starting\nwarning: first\nwarning: second\nafter\n")
    assert last_warning(log) == "second"


def test_servers_that_are_named_stand_in_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those with passwords by variables, never as they are."""
    plan = Plan(
        data=tmp_path, seconds=None, rate=50, keep=False, listen="", master="local[2]", plain=True,
        postgres="postgresql://me:secret@db/shop", kafka="kafka-1:9092", redis="redis://:secret@r/0",
    )  # fmt: skip
    text = adapted(files_of("shop")["penstock.toml"], plan)
    assert "secret" not in text
    (tmp_path / "penstock.toml").write_text(text)
    for name, value in plan.secrets.items():
        monkeypatch.setenv(name, value)
    found = project.load(tmp_path / "penstock.toml")
    assert found.section("broker")["bootstrap"] == "kafka-1:9092"
    config = configured(found, "shop")
    assert config.source.url == plan.postgres
    # Topics are called as with SQLite, so that flows and sinks stay as they are.
    assert routed(config.events, "shop.penstock_shop.orders", "") == "shop.orders"
    urls = {each.name: each.url for each in declared(found)}
    assert urls["cache"] == plan.redis


@pytest.mark.processes
def test_the_memory_of_a_tree_of_processes() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        alone, both = memory_bytes([child.pid]), memory_bytes([os.getpid()])
        assert 0 < alone < both or not Path("/proc/self/smaps_rollup").exists()
    finally:
        child.communicate(b"\n")
