"""`penstock init`: projects that can be read, and nothing overwritten."""

from __future__ import annotations

import json
import re
import signal
import sqlite3
import tomllib
from contextlib import closing
from pathlib import Path

import pytest
from confluent_kafka import Producer
from pyspark.sql import SparkSession

from penstock.cli import examples, project
from penstock.cli.sinks_file import declared
from tests.cli.runner import Live, run, run_until, share_session
from tests.waiting import eventually

WAIT_S = 200.0
ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", examples.NAMES)
def test_a_project_can_be_read(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "place"
    ran = run("init", str(folder), "--example", name).ok()
    found = project.load(folder / "penstock.toml")
    assert declared(found)
    for file in folder.iterdir():
        assert file.read_text() == (ROOT / "examples" / name / file.name).read_text()
        if file.suffix == ".py":
            compile(file.read_text(), file.name, "exec")
    steps = [line for line in ran.err.splitlines() if line.startswith("  ")]
    assert len(steps) == 4
    assert all(f"cd {folder} && " in line for line in steps)


def test_the_flows_of_a_project_are_declared(tmp_path: Path) -> None:
    from penstock.spark.flows.load import load

    run("init", str(tmp_path), "--example", "shop").ok()
    flows = load(tmp_path / "flows.py")
    assert {each.name for each in flows} == {"revenue", "browsing", "suspicious", "found"}


@pytest.mark.timeout(300)
def test_the_steps_that_are_printed_lead_to_a_result(
    tmp_path: Path, at: str, penstock_spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    share_session(penstock_spark, monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)
    run("init", str(tmp_path)).ok()
    store = tmp_path / "derived.db"

    def rows() -> list[tuple[str, int]]:
        with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
            return connection.execute("SELECT text, length FROM lengths").fetchall()

    def derived() -> bool:
        try:
            return rows() == [("hello", 5)]
        except sqlite3.OperationalError:
            return False

    def look(live: Live) -> None:
        # The hastiest order: the flow is there before what it reads, the sink before both.
        eventually(lambda: "flow lengths: waiting" in live.out, WAIT_S)
        producer = Producer({"bootstrap.servers": at, "linger.ms": 0})
        producer.produce("texts", b"hello")
        assert producer.flush(60) == 0
        eventually(derived, WAIT_S)

    ran = run_until(look, "run", "flows.py", "--plain", stop=signal.SIGINT).ok()
    assert json.loads(run("consume", "lengths", "--value-only").ok().out) == {
        "text": "hello", "length": 5,
    }  # fmt: skip
    text = ran.out + ran.err
    assert "running flow lengths, sink lengths;" in text
    # Told once, of the flow; the sink's topic was made for it.
    assert text.count("does not exist") == 1, text
    assert not re.search(r"sink lengths: (waiting|failed)|None|\?", text), text


def test_what_is_there_stays(tmp_path: Path) -> None:
    (tmp_path / "flows.py").write_text("mine")
    ran = run("init", str(tmp_path))
    assert ran.status == 1
    assert "flows.py is there already" in ran.err
    assert [file.name for file in tmp_path.iterdir()] == ["flows.py"]
    assert (tmp_path / "flows.py").read_text() == "mine"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ran = run("init", str(tmp_path / "file" / "below"))
    assert ran.status == 1
    assert "cannot be written" in ran.err


def test_unknown_examples_are_refused() -> None:
    assert run("init", "--example", "nothing").status == 2


def test_a_wheel_carries_the_projects() -> None:
    told = tomllib.loads((ROOT / "pyproject.toml").read_text())
    included = told["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    packaged = Path("penstock/cli/projects")
    assert included == {f"examples/{name}": str(packaged / name) for name in examples.NAMES}
