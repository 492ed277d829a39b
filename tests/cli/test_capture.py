"""`penstock capture` as a person uses it, on SQLite: checked, added, run, commanded, removed."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from time import time_ns
from typing import Any
from uuid import uuid4

import pytest

from penstock.capture.delivery.metering import CaptureStatus, TableStatus
from penstock.cli import capture_view
from penstock.cli.capture_file import add_section, drop_section
from penstock.cli.project import load
from penstock.testing.reading import read_topic
from tests.cli.runner import run
from tests.waiting import eventually


@pytest.fixture
def shop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A database in a folder of its own, which is where the commands run."""
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT NOT NULL)")
        database.executemany("INSERT INTO orders VALUES (?, ?)", [(n, f"i{n}") for n in range(5)])
        database.commit()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)
    return path


def change(path: Path, sql: str) -> None:
    with closing(sqlite3.connect(path, timeout=60)) as database:
        database.execute(sql)
        database.commit()


def triggers(path: Path) -> list[str]:
    with closing(sqlite3.connect(path)) as database:
        return [name for (name,) in database.execute("SELECT name FROM sqlite_master "
                                                     "WHERE name LIKE '%penstock%'")]  # fmt: skip


def events(bootstrap: str, topic: str) -> list[dict[str, Any]]:
    """The events of a topic as another client reads them, deletions' tombstones left out."""
    return [each.json() for each in read_topic(bootstrap, topic) if each.value is not None]


def table(found: list[dict[str, Any]]) -> dict[int, str]:
    """What the events say the table holds."""
    rows: dict[int, str] = {}
    for event in found:
        if event["op"] == "d":
            rows.pop(event["before"]["id"], None)
        else:
            rows[event["after"]["id"]] = event["after"]["item"]
    return rows


@contextmanager
def running(at: str, *args: str) -> Iterator[subprocess.Popen[bytes]]:
    """`penstock capture run` in a process of its own."""
    command = [sys.executable, "-m", "penstock.cli", "capture", "run", *args, "-b", at]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def add(name: str) -> None:
    """Declare a capture that tells its status and listens to commands often."""
    run("capture", "add", name, "sqlite:///shop.db").ok()
    with Path("penstock.toml").open("a") as file:
        file.write("\nstatus_ms = 50\ncontrol_ms = 20\nretry_ms = 20\n")


def state(name: str = "shop") -> str:
    (told,) = run("capture", "status", name, "--json").ok().json
    return str(told["state"])


def test_status_shows_which_schemas_the_tables_have(capsys: pytest.CaptureFixture[str]) -> None:
    """All tables of a capture that is named; of others those that were altered."""
    orders = TableStatus("public.orders", "shop.public.orders", 2, 7, "added age integer")
    people = TableStatus("public.people", "shop.public.people", 1, 8)
    status = CaptureStatus(
        "shop", "streaming", ts_ms=time_ns() // 1_000_000, tables=(people, orders), table_count=60
    )

    def shown(*, named: bool) -> str:
        rows = capture_view.status_rows([status], lambda name: {})
        capture_view.show(lambda: rows, watch=False, json=False, schemas=named)
        told = capsys.readouterr()
        return " ".join((told.out + told.err).split())

    assert (
        "shop: public.orders has changed, its events in shop.public.orders have schema version 2: "
        "added age integer"
    ) in shown(named=False)
    assert "public.people" not in shown(named=False)
    named = shown(named=True)
    assert "public.orders shop.public.orders 2 7 added age integer" in named
    assert "public.people shop.public.people 1 8" in named
    assert "and 58 tables more" in named


# ---- before ----------------------------------------------------------------------------------


def test_a_database_is_checked(shop: Path) -> None:
    told = run("capture", "check", "sqlite:///shop.db", "--json").ok().json
    assert told["ok"]
    assert told["tables"] == ["orders"]
    assert "orders" in run("capture", "check", "sqlite:///shop.db").ok().err
    assert triggers(shop) == []


@pytest.mark.parametrize("url", ["sqlite:///missing.db", "oracle://x/y", "shop.db"])
def test_a_wrong_url_is_one_clear_message(shop: Path, url: str) -> None:
    for command in (("check", url), ("add", "shop", url)):
        ran = run("capture", *command)
        assert ran.status == 1
        assert ran.err.startswith("error: ")
        assert "Traceback" not in ran.err
    assert not Path("penstock.toml").exists()


def test_what_is_added_stands_in_the_file(shop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("penstock.toml").write_text('# mine\n[broker]\nbootstrap = "127.0.0.1:1"')
    monkeypatch.setenv("SHOP_FILE", "shop.db")
    run("capture", "add", "shop", "sqlite:///${SHOP_FILE}", "--include", "ord*").ok()
    text = Path("penstock.toml").read_text()
    assert text.startswith("# mine\n[broker]\n")
    assert "${SHOP_FILE}" in text
    assert load().named("capture") == {"shop": {"url": "sqlite:///shop.db", "include": ["ord*"]}}
    again = run("capture", "add", "shop", "sqlite:///shop.db")
    assert again.status == 1
    assert "already" in again.err
    assert triggers(shop) == []


def test_a_name_that_cannot_be_one(shop: Path) -> None:
    ran = run("capture", "add", "My Shop", "sqlite:///shop.db")
    assert ran.status == 1
    assert "cannot be the name" in ran.err


def test_no_capture_to_run(shop: Path, at: str) -> None:
    ran = run("capture", "run")
    assert ran.status == 1
    assert "penstock capture add" in ran.err


def test_sections_come_and_go(tmp_path: Path) -> None:
    file = tmp_path / "penstock.toml"
    file.write_text("[broker]\nbootstrap = 'a:1'\n")
    add_section(file, "a", {"url": 'x"y', "include": ["p", "q"]})
    before = file.read_text()
    add_section(file, "ab", {"url": "z"})
    file.write_text(file.read_text() + "[capture.ab.delivery]\nlinger_ms = 1\n[[capture.ab.x]]\n")
    assert set(load(file, whole=False).named("capture")) == {"a", "ab"}
    drop_section(file, "ab")
    assert file.read_text() == before
    assert load(file).named("capture") == {"a": {"url": 'x"y', "include": ["p", "q"]}}


def test_a_check_knows_no_name_and_what_is_missing_is_warned_of(shop: Path) -> None:
    ran = run("capture", "check", "sqlite:///shop.db").ok()
    assert "made when the capture runs" in ran.out
    assert "run check" not in ran.out + ran.err
    assert "warning" not in ran.out
    change(shop, "CREATE TABLE plain (x)")
    none = run("capture", "add", "none", "sqlite:///shop.db", "--include", "missing").ok()
    assert "no table fits" in none.err
    keyless = run("capture", "add", "keyless", "sqlite:///shop.db").ok()
    assert "key of plain" in keyless.err
    assert "no table fits" not in keyless.err


def test_wrong_settings_stop_the_broker_before_it_starts(shop: Path, at: str) -> None:
    Path("penstock.toml").write_text(
        '[capture.a]\nurl = "sqlite:///shop.db"\n\n'
        '[capture.shop]\nurl = "sqlite:///shop.db"\npartitions = "many"\n'
    )
    ran = run("up", "--listen", "127.0.0.1:0", "--data", "data")
    assert ran.status == 1
    assert "penstock.toml, line 6: capture.shop.partitions" in ran.err
    assert not Path("data").exists()
    Path("penstock.toml").write_text('[capture]\nshop = "sqlite:///shop.db"\n')
    ran = run("up", "--listen", "127.0.0.1:0", "--data", "data")
    assert ran.status == 1
    assert "line 2" in ran.err
    Path("penstock.toml").write_text('[capture."My Shop"]\nurl = "sqlite:///shop.db"\n')
    ran = run("up", "--listen", "127.0.0.1:0", "--data", "data")
    assert "penstock.toml, line 1" in ran.err
    # Without captures nobody looks; the address is in use.
    ran = run("up", "--listen", at, "--data", "data", "--no-captures")
    assert ran.status == 1
    assert "penstock.toml" not in ran.err


def test_several_captures_and_a_snapshot_of_one(shop: Path, at: str) -> None:
    for name in ("one", "two"):
        run("capture", "add", name, "sqlite:///shop.db").ok()
    ran = run("capture", "snapshot", "orders")
    assert ran.status == 1
    assert "--capture NAME" in ran.err


def test_a_capture_of_a_database_that_is_gone_is_removed(shop: Path, at: str) -> None:
    run("capture", "add", "gone", "sqlite:///shop.db").ok()
    shop.unlink()
    declined = run("capture", "remove", "gone")
    assert declined.status == 1
    assert "nobody has answered, so nothing was changed" in declined.err
    refused = run("capture", "remove", "gone", "--yes")
    assert refused.status == 1
    assert "--force" in refused.err
    assert "gone" in load().named("capture")
    forced = run("capture", "remove", "gone", "--yes", "--force").ok()
    assert "may be left" in forced.err
    assert load().named("capture") == {}


def test_what_may_be_left_in_postgres_is_named(shop: Path, at: str) -> None:
    url = "postgresql://nobody@127.0.0.1:1/shop"
    Path("penstock.toml").write_text(f'[capture.far]\nurl = "{url}"\n')
    forced = run("capture", "remove", "far", "--yes", "--force").ok()
    assert "pg_drop_replication_slot('penstock_far')" in forced.err
    assert "DROP PUBLICATION penstock_far" in forced.err


@pytest.mark.parametrize("scheme", ["postgresql", "mysql"])
def test_a_server_that_does_not_answer_is_one_message(shop: Path, at: str, scheme: str) -> None:
    """Not at all waited for: host and port may be wrong. What is left to run later is nothing."""
    url = f"{scheme}://me:secret@127.0.0.1:1/shop"
    name = f"away_{scheme}"
    Path("penstock.toml").write_text(f'[capture.{name}]\nurl = "{url}"\n')
    for command in (("check", url), ("run", name, "--plain")):
        ran = run("capture", *command)
        assert ran.status == 1
        *before, error, remedy = ran.err.splitlines()
        assert error.startswith("error: ")
        assert "127.0.0.1:1" in error
        assert "Connection refused" in error
        assert "secret" not in ran.err
        assert remedy.strip() == "Is the server running, and are host and port in the URL right?"
        assert not any("penstock.capture" in line for line in before)
    assert state(name) == "failed"


# ---- running ---------------------------------------------------------------------------------


@pytest.mark.timeout(300)
@pytest.mark.processes
def test_a_life(shop: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_view, "LOOK_S", 0.02)
    # One second after it was asked, instead of three, it would have begun.
    is_newer = capture_view._is_newer
    monkeypatch.setattr(
        capture_view, "_is_newer", lambda status, begun: is_newer(status, begun - 2)
    )
    add("shop")
    assert state() == "never run"
    empty = shop.parent / "empty.toml"
    empty.write_text("")
    with running(at) as process:
        eventually(lambda: state() == "streaming", poll_s=0.2)
        change(shop, "INSERT INTO orders VALUES (10, 'ten')")
        change(shop, "DELETE FROM orders WHERE id = 2")
        wanted = {0: "i0", 1: "i1", 3: "i3", 4: "i4", 10: "ten"}
        eventually(lambda: table(events(at, "shop.orders")) == wanted, poll_s=0.05)
        count = len(events(at, "shop.orders"))
        assert count == 7
        told = run("capture", "snapshot", "orders")
        assert told.ok().err.rstrip().endswith("is done")
        eventually(lambda: len(events(at, "shop.orders")) == count + 5, poll_s=0.05)
        assert table(events(at, "shop.orders")) == wanted
        missing = run("capture", "snapshot", "nope")
        assert missing.status == 1
        assert "no table 'nope'" in missing.err
        # As another machine would ask, which does not have the project's file.
        unknown = run("capture", "snapshot", "nope", "--capture", "shop", "-p", str(empty))
        assert unknown.status == 1
        assert "no such table" in unknown.err
        again = run("capture", "snapshot", "orders").ok()
        assert "nope" not in again.err
        run("capture", "pause", "shop").ok()
        eventually(lambda: state() == "paused", poll_s=0.2)
        change(shop, "UPDATE orders SET item = 'TEN' WHERE id = 10")
        run("capture", "resume", "shop").ok()
        wanted[10] = "TEN"
        eventually(lambda: table(events(at, "shop.orders")) == wanted, poll_s=0.05)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err.decode()
        assert b"stopped: " in err
    assert triggers(shop)
    run("capture", "remove", "shop", "--yes").ok()
    assert triggers(shop) == []
    assert load().named("capture") == {}
    assert run("capture", "remove", "shop", "--yes").status == 1


@pytest.mark.timeout(300)
@pytest.mark.processes
def test_one_that_runs_is_not_run_again_and_one_that_was_killed_is_silent(
    shop: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"s{uuid4().hex[:8]}"
    add(name)
    with running(at, name) as first:
        eventually(lambda: state(name) == "streaming", poll_s=0.2)
        again = run("capture", "run", name, "--plain")
        assert again.status == 1
        assert "runs already" in again.err
        assert "--take-over" in again.err
        assert first.poll() is None
        first.kill()
        first.wait()
    monkeypatch.setattr(capture_view, "SILENT_MS", 1_000)
    eventually(lambda: state(name) == "silent", poll_s=0.2)
    (told,) = run("capture", "status", name, "--json").ok().json
    assert not told["running"]
    assert told["last_state"] == "streaming"
    assert told["silent_ms"] >= 1_000
    assert "(was streaming)" in run("capture", "status", name).ok().out
    with running(at, name, "--take-over"):
        eventually(lambda: state(name) == "streaming", poll_s=0.2)
        (told,) = run("capture", "status", name, "--json").ok().json
        assert told["running"]


@pytest.mark.timeout(300)
@pytest.mark.processes
def test_captures_run_beside_the_broker_and_end_with_it(shop: Path) -> None:
    """Whether it is stopped or killed; and they come back with it."""
    add("shop")
    address = "127.0.0.1:0"
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PENSTOCK_")}
    for turn, end in enumerate((signal.SIGTERM, signal.SIGKILL, signal.SIGTERM)):
        command = [sys.executable, "-m", "penstock.cli", "up", "--listen", address, "--quiet"]
        change(shop, f"INSERT INTO orders VALUES ({100 + turn}, 'more')")
        # A machine that starts may start the database last.
        away = shop.rename(shop.with_name("away.db")) if turn == 0 else shop
        with (shop.parent / f"up-{turn}.log").open("wb") as log:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=environment)
        try:
            assert process.stdout is not None
            address = process.stdout.readline().decode().strip()
            if away != shop:
                eventually(lambda: b"trying again" in Path("up-0.log").read_bytes(), poll_s=0.1)
                away.rename(shop)
            wanted = {n: f"i{n}" for n in range(5)} | {100 + n: "more" for n in range(turn + 1)}
            _wait_for(address, wanted)
            process.send_signal(end)
            assert process.wait(60) == (0 if end is signal.SIGTERM else -end)
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()
    assert Path("up-0.log").read_text().count("there is no") == 1
    for turn in (1, 2):
        log_text = (shop.parent / f"up-{turn}.log").read_text()
        assert "Traceback" not in log_text
        assert "ERROR" not in log_text


def _wait_for(bootstrap: str, wanted: dict[int, str]) -> None:
    eventually(lambda: table(events(bootstrap, "shop.orders")) == wanted, poll_s=0.1)
