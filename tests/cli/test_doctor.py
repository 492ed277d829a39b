"""`penstock doctor`: a line for each thing, a remedy for what is missing, a status for scripts."""

from __future__ import annotations

import socket
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from tests.cli.runner import run


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)


def findings(*args: str) -> dict[str, dict[str, Any]]:
    ran = run("doctor", "--json", *args)
    return {each["what"]: each for each in ran.json}


def project(tmp_path: Path, text: str) -> None:
    (tmp_path / "penstock.toml").write_text(text)


def test_a_machine_that_has_everything(at: str) -> None:
    ran = run("doctor").ok()
    assert "Java" in ran.out
    assert "everything needed is there" in ran.err
    found = findings()
    assert {each["level"] for each in found.values()} <= {"ok", "warning"}
    assert at in found["broker"]["found"]
    assert "answers" in found["broker"]["found"]


def test_a_port_that_something_else_has(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        project(tmp_path, f'[broker]\nbootstrap = "127.0.0.1:{port}"\n')
        # It takes the call and hangs up.
        taken.settimeout(60)
        found = findings()["broker"]
    assert found["level"] == "failure"
    assert "taken by something else" in found["found"]


def test_java_that_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    found = findings()["Java"]
    assert found["level"] == "failure"
    assert "JAVA_HOME" in found["found"]
    assert "Install a Java runtime" in found["remedy"]
    assert run("doctor").status == 1


def test_a_project_file_that_is_wrong(tmp_path: Path) -> None:
    project(tmp_path, '[broker]\nbootstrap = "x:1"\n\n[captures.shop]\nurl = "sqlite:///a"\n')
    found = findings()["project"]
    assert found["level"] == "failure"
    assert "penstock.toml, line 4" in found["found"]


def test_databases_of_the_project(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "shop.db") as database:
        database.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, note TEXT)")
    database.close()
    project(
        tmp_path,
        '[capture.shop]\nurl = "sqlite:///shop.db"\n\n'
        '[capture.gone]\nurl = "postgresql://nobody:wrong@127.0.0.1:1/none"\n',
    )
    found = findings()
    mine = {what: each for what, each in found.items() if what.startswith("capture shop")}
    assert mine
    assert {each["level"] for each in mine.values()} <= {"ok", "warning"}
    gone = [each for what, each in found.items() if what.startswith("capture gone")]
    assert any(each["level"] == "failure" for each in gone)
    assert found["extra postgres"]["level"] == "ok"


def test_sinks_are_read_as_when_they_are_fed(
    tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    project(tmp_path, '[sinks.good]\ntopic = "t"\nurl = "sqlite:///shop.db"\n\n'
            '[sinks.wrong]\ntopic = "t"\nurl = "sqlite:///x.db"\nfields = "id nothing"\n\n'
            '[sinks.other]\nurl = "sqlite:///x.db"\n')  # fmt: skip
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    found = findings()
    # A relative path is meant from where the project file is.
    assert str(tmp_path / "shop.db") in found["sink good"]["found"]
    assert found["sink good"]["level"] == "ok"
    assert found["sink wrong"]["level"] == "failure"
    assert "no type is called 'nothing'" in found["sink wrong"]["found"]
    assert "line 8" in found["sink wrong"]["found"]
    assert "sinks.other.topic is missing" in found["sink other"]["found"]
