"""Where nobody answers, or somebody who is no broker or store: one message, and soon."""

from __future__ import annotations

import socket
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

import pytest
import typer

from penstock.capture.source import SourceSettings
from penstock.capture.sources import open_source
from penstock.cli import kafka, project, sinks_reach
from penstock.cli.main import make_app
from penstock.cli.run import _look_on
from penstock.cli.run_reach import AWAY_S, LOOK_S, BrokerWatch
from penstock.cli.sinks_file import declared
from penstock.errors import PenstockError
from penstock.sinks import open_sink
from penstock.sinks.errors import StoreAwayError, StoreUnreachableError
from penstock.spark.flows.supervisor import Failure
from tests.cli.runner import run
from tests.cli.uses import BASE, NEEDS, PROJECT
from tools.generate_cli_docs import commands

FLOWS = """
from penstock.spark import flow, stream, topic

@flow(inputs=stream("orders"), output=topic("out"))
def copied(orders):
    return orders
"""
NOWHERE = "127.0.0.1:1"


@contextmanager
def server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Something that listens and answers in its own way; its address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        kept: list[socket.socket] = []

        def serve() -> None:
            while True:
                try:
                    kept.append(listening.accept()[0])
                except OSError:
                    return
                with suppress(OSError):
                    answer(kept[-1])

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        host, port = listening.getsockname()
        yield f"{host}:{port}"
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        for each in kept:
            each.close()


def hang_up(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.close()


def http(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")


def tls(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.sendall(b"\x15\x03\x03\x00\x02\x02\x46")


def ssh(connection: socket.socket) -> None:
    connection.sendall(b"SSH-2.0-OpenSSH_9.0\r\n")


def noise(connection: socket.socket) -> None:
    connection.recv(1 << 16)
    connection.sendall(b"\x00\x00\x00\x08\x00\x00\x00\x07\x00\x00\x00\x00")


def silent(connection: socket.socket) -> None:
    """Kept open, and never answered."""


def uses_of_brokers() -> list[str]:
    """The uses of all commands that connect to one."""
    root = typer.main.get_command(make_app())
    names = [
        " ".join(path[1:])
        for path, each in commands(root, ("penstock",))
        if any(parameter.name in {"bootstrap", "from_"} for parameter in each.params)
    ]
    uses = [*BASE, *(use for use, _ in NEEDS)]
    # A view whose tables are all known asks nobody; these look at the stores alone.
    without = ("view ", "sinks list", "sinks describe")
    return [
        use
        for use in uses
        if any(f"{use} ".startswith(f"{name} ") for name in names) and not use.startswith(without)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("project")
    (made / "penstock.toml").write_text(PROJECT)
    (made / "flows.py").write_text(FLOWS)
    sqlite3.connect(made / "shop.db").close()
    return made


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)


def test_a_run_with_an_end_ends_when_its_broker_is_gone() -> None:
    now = 0.0

    class Runs:
        """What is looked after, for as long as nobody ends it."""

        why: Failure | None = None

        def step(self) -> bool:
            nonlocal now
            now += 1.0
            return self.why is not None

        def status(self) -> list[Any]:
            return []

        def give_up(self, why: Failure) -> None:
            self.why = why

    class View:
        def show(self, _: object) -> None:
            pass

    with server(silent) as at:
        watch = BrokerWatch(at, clock=lambda: now)
        for _ in range(30):
            now += 1.0
            assert watch.look() is None
    last, runs = now, Runs()
    with patch("penstock.cli.run._STEP_S", 0.0):
        _look_on(cast("Any", runs), View(), None, watch)
    assert now - last < AWAY_S + 2 * LOOK_S
    assert runs.why is not None
    assert runs.why.message.startswith(f"no broker answers at {at} any more, for ")
    assert "run it again when the broker is back" in runs.why.advice


@pytest.mark.parametrize("use", uses_of_brokers())
def test_each_command_with_a_broker_that_is_none(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with server(http) as stranger:
        for at, told in ((NOWHERE, "no broker answers"), (stranger, "it speaks HTTP")):
            monkeypatch.setenv("PENSTOCK_BOOTSTRAP", at)
            words = use.format(at=at, other=at, data="nothing").split()
            ran = run(*(each.replace("%", " ") for each in words))
            assert ran.status == (2 if use.startswith("verify") else 1), ran.err
            assert ran.err.count("error:") == 1, ran.err
            assert told in ran.err
            assert at in ran.err
            assert ("--from" if use.startswith("migrate") else "--bootstrap") in ran.err
            assert ran.out == ""


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (hang_up, "closed the connection"),
        (tls, "it speaks TLS"),
        (ssh, "it sent b'SSH-'"),
        (noise, "it answered another request"),
        (silent, "no answer within"),
    ],
)
def test_what_is_said_of_those_that_are_no_brokers(
    answer: Callable[[socket.socket], None], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "ANSWER_TIMEOUT_S", 0.3)
    with server(answer) as at:
        ran = run("topics", "list", "--bootstrap", at)
    assert ran.status == 1
    assert f"what listens at {at} does not answer as a Kafka broker: " in ran.err
    assert told in ran.err


def test_tls_where_there_is_none() -> None:
    with server(http) as at:
        ran = run("topics", "list", "--bootstrap", at, "-X", "security.protocol=SSL")
    assert ran.status == 1
    assert "TLS failed" in ran.err
    assert "Does the listener speak TLS" in ran.err


@pytest.mark.parametrize(
    "settings",
    [
        {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "GSSAPI"},
        {"security.protocol": "SSL", "ssl.keystore.location": "store.p12"},
        {"security.protocol": "SSL", "ssl.certificate.location": "missing.pem"},
    ],
)
def test_what_only_librdkafka_knows_is_left_to_it(settings: dict[str, str]) -> None:
    with server(silent) as at:
        connection = kafka.connect(at, [f"{name}={value}" for name, value in settings.items()])
    assert connection.bootstrap == at


def test_one_broker_of_several_is_enough(at: str) -> None:
    with server(http) as stranger:
        run("topics", "list", "--bootstrap", f"{NOWHERE},{stranger},{at}").ok()


def test_sinks_are_listed_without_the_broker() -> None:
    ran = run("sinks", "list", "--json", "--bootstrap", NOWHERE).ok()
    assert [each["name"] for each in ran.json] == ["orders", "words"]
    assert ran.err.count("warning: no broker answers") == 1


@pytest.mark.parametrize("use", ["list", "describe", "run", "rebuild --yes", "remove --yes"])
def test_a_store_that_is_silent(
    use: str, at: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(sinks_reach, "ANSWER_S", 0.3)
    with server(silent) as store:
        (tmp_path / "penstock.toml").write_text(
            f'[sinks.cache]\ntopic = "t"\nurl = "redis://{store}/0"\n'
        )
        monkeypatch.chdir(tmp_path)
        name, *options = use.split()
        named = [] if name in {"list", "run"} else ["cache"]
        ran = run("sinks", name, *named, *options)
    assert "does not answer within" in ran.out + ran.err
    assert ran.status == (0 if name in {"list", "describe"} else 1)


def test_a_store_that_answers_is_taken_at_its_word(folder: Path) -> None:
    spec = declared(project.load())[0]
    assert sinks_reach.answer_of(spec, lambda sink: sink.position()) is None
    with pytest.raises(ZeroDivisionError):
        sinks_reach.answer_of(spec, lambda _: 1 // 0)


@pytest.mark.parametrize("url", ["mysql://me:pw@{}/d", "postgresql://me:pw@{}/d"])
def test_a_database_that_is_silent_when_it_should_greet(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.capture.mysql.connection.CONNECT_TIMEOUT_S", 1)
    monkeypatch.setattr("penstock.capture.postgres.connect.CONNECT_TIMEOUT_S", 2)
    monkeypatch.setattr("penstock.sinks.sql.mysql.CONNECT_S", 1)
    monkeypatch.setattr("penstock.sinks.sql.postgresql.CONNECT_S", 2)
    with server(silent) as at:
        with pytest.raises(PenstockError, match=r"does not answer|cannot reach") as refused:
            with open_source(SourceSettings(name="c", url=url.format(at))) as source:
                source.check()
        assert "Is the server running" in refused.value.advice
        with open_sink(f"{url.format(at)}?table=t", name="s") as sink:
            with pytest.raises(StoreUnreachableError):
                sink.position()


@pytest.mark.parametrize("scheme", ["delta+s3", "parquet+s3"])
def test_an_object_store_that_is_not_there_is_told_in_a_line(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    url = f"{scheme}://bucket/t?endpoint=http://{NOWHERE}"
    with open_sink(url, name="s") as sink, pytest.raises(StoreAwayError) as refused:
        sink.position()
    text = str(refused.value)
    assert "Connection refused" in text
    assert NOWHERE in text
    assert text.isprintable()
    assert "max_retries" not in text
