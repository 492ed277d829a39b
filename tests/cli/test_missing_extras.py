"""Commands where packages are missing: one message with what to install, and never a traceback.

The optional packages are hidden, and Penstock is imported anew without them: this is what
`pip install penstock` gives. The broker that the commands talk to runs without them, too.
"""

from __future__ import annotations

import re
import sqlite3
import sys
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from unittest.mock import patch

import pytest
import typer

from penstock import extras
from penstock.cli.main import make_app
from tests.cli.runner import Ran, run
from tests.cli.uses import BASE, NEEDS, PROJECT
from tools.generate_cli_docs import commands

ROOT = Path(__file__).resolve().parents[2]
OTHERS = {"doctor"}


@contextmanager
def hidden(modules: Sequence[str]) -> Iterator[None]:
    """The machine as if these were not installed, with Penstock imported anew."""
    roots = {"penstock", *modules}
    before = {name: module for name, module in sys.modules.items() if name.split(".")[0] in roots}
    try:
        for name in before:
            del sys.modules[name]
        sys.modules.update(dict.fromkeys(modules))  # type: ignore[arg-type]
        with patch("tests.cli.runner.main", import_module("penstock.cli.main").main):
            yield
    finally:
        for name in [name for name in sys.modules if name.split(".")[0] in roots]:
            del sys.modules[name]
        sys.modules.update(before)


@pytest.fixture(scope="module")
def base_install() -> Iterator[dict[str, str]]:
    """The base install with two brokers in it: their addresses, the data directory of one."""
    optional = sorted({module for modules in extras.EXTRAS.values() for module in modules})
    with hidden(optional):
        new = import_module("penstock.testing.broker").Broker
        with new() as broker, new() as other:
            yield {"at": broker.bootstrap, "other": other.bootstrap, "data": broker.data}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("project")
    (made / "penstock.toml").write_text(PROJECT)
    (made / "flows.py").write_text("import penstock\n")
    sqlite3.connect(made / "shop.db").close()
    return made


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)


def installed_by(ran: Ran) -> str:
    """The extras that the message says to install."""
    found = re.findall(r"pip install 'penstock\[(.+?)\]'", ran.err)
    assert len(found) == 1, ran.err
    return str(found[0])


@pytest.fixture
def brokers(base_install: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("PENSTOCK_BOOTSTRAP", base_install["at"])
    return base_install


def test_what_the_base_install_can_do(brokers: dict[str, str]) -> None:
    for use in BASE:
        ran = run(*use.format(**brokers).split(), stdin=b"some\nlines\n")
        assert ran.status == (1 if " absent" in use else 0), (use, ran.err)
        assert "not installed" not in ran.err, (use, ran.err)


@pytest.mark.parametrize(("use", "wanted"), NEEDS, ids=[use for use, _ in NEEDS])
def test_what_needs_more(use: str, wanted: str, brokers: dict[str, str]) -> None:
    ran = run(*(each.replace("%", " ") for each in use.split()))
    assert ran.status == (2 if use.startswith("verify") else 1)
    assert ran.err.count("error:") == 1
    assert installed_by(ran) == wanted


def test_every_command_is_among_them() -> None:
    root = typer.main.get_command(make_app())
    leaves = {" ".join(path[1:]) for path, each in commands(root, ("penstock",))
              if not hasattr(each, "commands")}  # fmt: skip
    uses = [*BASE, *(use for use, _ in NEEDS)]
    tried = {name for name in leaves for use in uses if f"{use} ".startswith(f"{name} ")}
    assert leaves - tried == OTHERS


def test_the_doctor_tells_all_that_is_missing(brokers: dict[str, str]) -> None:
    ran = run("doctor", "--json")
    found = {each["what"]: each for each in ran.json}
    assert ran.status == 1
    failing = {what for what, each in found.items() if each["level"] == "failure"}
    extra = {f"extra {each}" for each in ("capture", "spark", "postgres", "search")}
    parts = {"capture shop", "capture pg", "sink orders", "sink words"}
    assert failing == extra | parts
    for each in failing:
        assert "pip install 'penstock[" in found[each]["remedy"]
    # One command is enough for the whole project.
    remedies = {found[each]["remedy"] for each in extra}
    assert remedies == {"pip install 'penstock[postgres,search]'"}
    assert "penstock[search]" in found["sink words"]["remedy"]
    assert found["broker"]["level"] == "ok"


def test_what_extras_bring_is_what_the_package_declares() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, others in extras.INCLUDED.items():
        listed: set[str] = set()
        new = {extra}
        while new:
            texts = (each for name in new for each in declared["optional-dependencies"][name])
            parts = (re.fullmatch(r"penstock\[(.+)\]", each) for each in texts)
            new = {name for part in parts if part for name in part[1].split(",")}
            listed |= new
        assert set(others) - {"capture"} == listed - {"capture"}, extra


def test_a_package_that_no_extra_brings_is_not_explained() -> None:
    assert extras.explain(ModuleNotFoundError("No module named 'x'", name="x")) is None
    told = extras.explain(ModuleNotFoundError("No module named 'pyarrow.x'", name="pyarrow.x"))
    assert told is not None
    assert told.advice == "Install it: pip install 'penstock[columnar]'"
