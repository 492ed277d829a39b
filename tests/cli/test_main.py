"""The command as a whole: help, version, completion, errors, and how soon it is there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock import __version__
from penstock.cli import main as module
from penstock.cli.main import make_app
from penstock.spark.flows.folder import Folder, Record
from tests.cli.runner import run
from tools import demo
from tools.generate_cli_docs import TARGET, commands, render

ROOT = typer.main.get_command(make_app())
ALL = [(path, command) for path, command in commands(ROOT, ("penstock",)) if len(path) > 1]
LEAVES = [(path, command) for path, command in ALL if not hasattr(command, "commands")]


def test_the_version() -> None:
    assert run("--version").ok().out == f"penstock {__version__}\n"


def test_without_a_command_there_is_help() -> None:
    ran = run()
    assert "penstock up" in ran.out + ran.err


@pytest.mark.parametrize(("path", "command"), ALL, ids=[" ".join(path) for path, _ in ALL])
def test_every_command_has_help(path: tuple[str, ...], command: Any) -> None:
    shown = " ".join(run(*path[1:], "--help").ok().out.split())
    assert command.help.strip().splitlines()[0] in shown


@pytest.mark.parametrize(("path", "command"), LEAVES, ids=[" ".join(path) for path, _ in LEAVES])
def test_every_example_is_a_right_use(path: tuple[str, ...], command: Any) -> None:
    examples = re.findall(r"penstock [^|<#\n]+", command.help.partition("Examples:")[2])
    assert any(example.startswith(" ".join(path)) for example in examples)
    for example in examples:
        current: Any = ROOT
        args = shlex.split(example)[1:]
        while hasattr(current, "commands"):
            current = current.commands[args.pop(0)]
        current.make_context("penstock", args)


def test_every_option_says_what_it_is_for() -> None:
    silent = [
        (" ".join(path), parameter.name)
        for path, command in LEAVES
        for parameter in command.params
        if not parameter.help
    ]
    assert silent == []


def test_numbers_and_durations_have_their_units() -> None:
    for path, _ in LEAVES:
        shown = " ".join(run(*path[1:], "--help").ok().out.split())
        # What typer would put there says nothing.
        assert not re.search(r"<(int|float|str)( range)?>", shown.partition("Options:")[2]), path
    durations = [
        parameter
        for _, command in LEAVES
        for parameter in command.params
        if "DURATION" in str(parameter.metavar)
    ]
    assert durations
    for parameter in durations:
        assert re.search(r"such as \d+(ms|s|m|h)", parameter.help), parameter.opts


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("topcs list", "topics"),
        ("topics lst", "list"),
        ("capture snapshots", "snapshot"),
        ("topics list --jsn", "--json"),
        ("sinks run --onec", "--once"),
        ("--versoin", "--version"),
    ],
)
def test_what_is_misspelt_is_a_wrong_use_with_the_near_one(typed: str, meant: str) -> None:
    ran = run(*typed.split())
    assert ran.status == 2
    wrong = next(word for word in reversed(typed.split()) if word != "list" or "lst" in typed)
    told = ran.err.rpartition("Error: ")[2]
    assert meant in told.replace(wrong, "", 1)


def test_the_help_tells_the_statuses() -> None:
    shown = " ".join(run("--help").ok().out.split())
    assert "status is 0 if it is done, 1 if it failed" in shown
    assert "2 if the command was used wrongly, 130 after Ctrl-C" in shown


@pytest.mark.parametrize("use", ["flows reset f", "sinks remove a", "sinks rebuild a"])
def test_a_no_is_not_done(use: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a script does not go on as if it were."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "penstock.toml").write_text('[sinks.a]\ntopic = "t"\nurl = "sqlite:///a.db"\n')
    Folder(tmp_path / ".penstock" / "flows").write(Record("f"))
    ran = run(*use.split(), stdin=b"n\n")
    assert ran.status == 1
    assert "nothing was changed" in ran.err


def test_the_reference_is_what_the_commands_say() -> None:
    assert TARGET.read_text(encoding="utf-8") == render(), "run: python -m tools.generate_cli_docs"


def test_ctrl_c_ends_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "make_app", lambda _only: interrupted)
    ran = run("topics", "list")
    assert (ran.status, ran.out, ran.err) == (130, "", "")


COMPLETED = {
    "penstock to": "topics", "penstock topics de": "delete", "penstock consume --fo": "--follow",
}  # fmt: skip


@pytest.mark.parametrize("words", COMPLETED)
def test_words_are_completed(words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in completion(words).items():
        monkeypatch.setenv(name, value)
    assert COMPLETED[words] in run().out.split()


@pytest.mark.processes
def test_the_shell_completes() -> None:
    words = "penstock topics de"
    code = "from penstock.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **completion(words)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert COMPLETED[words] in done.stdout.split()


def completion(words: str) -> dict[str, str]:
    """What the shell tells the command."""
    return {
        "_PENSTOCK_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split()) - 1),
    }


@pytest.mark.processes
def test_help_does_not_wait_for_heavy_libraries() -> None:
    """Time is measured elsewhere; what takes it is the loading of these."""
    code = (
        "import sys\n"
        "from penstock.cli.main import main\n"
        "for args in ['--help'], ['up', '--help'], ['consume', '--help']:\n"
        "    sys.argv = ['penstock', *args]\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as ended:\n"
        "        assert not ended.code\n"
        "    print('LOADED', *args, ':', *sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("LOADED")]
    assert len(lines) == 3
    heavy = {"confluent_kafka", "rich", "asyncio", "penstock.broker", "penstock.log", "orjson"}
    for line in lines:
        assert set(line.split()) & heavy == set(), line.partition(":")[0]


@pytest.mark.parametrize(("ends", "wanted"), [(130, 0), (1, 1), (0, 0), (None, 0)])
def test_make_hears_of_no_error_when_the_demo_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, ends: int | None, wanted: int
) -> None:
    """Else it says "Error 130" below whatever the demo has said."""

    def penstock() -> None:
        assert sys.argv == ["penstock", "demo", "--seconds", "1"]
        if ends is None:
            raise KeyboardInterrupt
        sys.exit(ends)

    monkeypatch.setattr(module, "main", penstock)
    monkeypatch.setattr(sys, "argv", ["tools/demo.py", "--seconds", "1"])
    try:
        demo.main()
        status = 0
    except SystemExit as ended:
        status = int(ended.code or 0)
    assert status == wanted


def test_make_runs_the_demo_in_that_way() -> None:
    text = (Path(demo.__file__).parent.parent / "Makefile").read_text()
    assert "\t@exec $(BIN)/python -m tools.demo $(ARGS)\n" in text
