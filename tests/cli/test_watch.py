"""`--watch`: looks in place at a terminal, one after the other elsewhere, until Ctrl-C."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from penstock.cli import watch as module
from penstock.errors import PenstockError
from penstock.spark.sinking.folder import SinkFolder
from tests.cli.runner import Live, run

PROJECT = '[sinks.orders]\ntopic = "t"\nurl = "sqlite:///orders.db"\n'


class Pauses:
    """In the place of the pauses: a look each, and Ctrl-C after the last."""

    def __init__(self, *between: Callable[[], None]) -> None:
        self.between = list(between)

    def __call__(self) -> Pauses:
        return self

    def wait(self, _: float) -> None:
        if not self.between:
            raise KeyboardInterrupt
        self.between.pop(0)()


class Terminal(io.TextIOWrapper):
    """Output that says of itself that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)
    (tmp_path / "penstock.toml").write_text(PROJECT)
    return tmp_path


def pauses(monkeypatch: pytest.MonkeyPatch, *between: Callable[[], None]) -> None:
    class Threading:
        Event = Pauses(*between)

    monkeypatch.setattr(module, "threading", Threading)


def nothing() -> None:
    pass


def test_for_a_program_a_line_each_time(
    folder: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage() -> None:
        (folder / "orders.db").write_text("no database")

    pauses(monkeypatch, nothing, damage)
    ran = run("sinks", "list", "--watch", "--json")
    assert (ran.status, ran.err) == (130, "")
    errors = [each["error"] for (each,) in ran.json_lines]
    assert errors[:2] == ["", ""]
    assert "orders.db" in errors[2]


def test_elsewhere_one_table_after_the_other(
    folder: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ("sinks", "flows"):
        pauses(monkeypatch, nothing)
        ran = run(command, "list", "-w")
        assert (ran.status, ran.err) == (130, "")
        assert "\x1b" not in ran.out
        told = "sqlite:///" if command == "sinks" else "no flows have run"
        assert ran.out.count(told) == 2


def test_at_a_terminal_in_place(folder: Path, at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for command in ("sinks", "flows"):
        pauses(monkeypatch, nothing, nothing)
        live = Live()
        monkeypatch.setattr(live, "out_text", Terminal(live.out_bytes, write_through=True))
        ran = run(command, "list", "--watch", live=live)
        assert (ran.status, ran.err) == (130, "")
        # Each look goes back over the one before, and at the end the cursor is there again.
        assert ran.out.count("as of") >= 3
        assert ran.out.count("\x1b[1A") >= 2
        assert ran.out.rstrip().endswith("\x1b[?25h")


def test_a_broker_that_is_away_is_told_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses(monkeypatch, nothing, nothing)
    ran = run("sinks", "list", "--watch", "--bootstrap", "127.0.0.1:1")
    assert ran.err.count("no broker answers") == 1
    assert ran.out.count("sqlite:///") == 3


def test_what_goes_away_is_waited_for(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[str | PenstockError] = [
        "one",
        PenstockError("gone"),
        PenstockError("gone"),
        "two",
    ]

    def look() -> str:
        found = answers.pop(0)
        if isinstance(found, PenstockError):
            raise found
        return found

    pauses(monkeypatch, nothing, nothing, nothing)
    with pytest.raises(KeyboardInterrupt):
        module.watch(look, str, str, json=False)
    out, err = capfd.readouterr()
    assert out.split() == ["one", "two"]
    assert err.count("gone; trying again") == 1
    answers.append(PenstockError("never there"))
    with pytest.raises(PenstockError, match="never there"):
        module.watch(look, str, str, json=False)


def test_whoever_has_read_enough_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(_: str) -> str:
        raise BrokenPipeError

    silenced: list[bool] = []
    monkeypatch.setattr("penstock.cli.output.silence_stdout", lambda: silenced.append(True))
    with pytest.raises(typer.Exit) as ended:
        module.watch(lambda: "x", gone, gone, json=False)
    assert (ended.value.exit_code, silenced) == (0, [True])


def test_a_second_run_of_the_same_sinks_is_refused(
    folder: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From wherever in the project it is started, before Spark or any store is asked."""
    (folder / "inside").mkdir()
    known = SinkFolder(folder / ".penstock" / "sinks")
    with known.locked():
        known.write_run({"pid": 1234, "socket": str(folder / "none")})
        for place in (folder, folder / "inside"):
            monkeypatch.chdir(place)
            ran = run("sinks", "run", "--once")
            assert ran.status == 1
            assert ran.err.count("error:") == 1
            assert "fed already, by another process (process 1234)" in ran.err
            assert "Stop that process first" in ran.err


def test_what_is_paused_is_so_from_everywhere_in_the_project(
    folder: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "inside").mkdir()
    monkeypatch.chdir(folder / "inside")
    run("sinks", "pause", "orders").ok()
    monkeypatch.chdir(folder)
    assert [each["state"] for each in run("sinks", "list", "--json").ok().json] == ["paused"]
    assert not (folder / "inside" / ".penstock").exists()
