"""`penstock doctor`: a line for each thing, a remedy for what is missing, a status for scripts."""

from __future__ import annotations

import re
import socket
import sqlite3
import sys
import tomllib
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from penstock.cli import doctor
from penstock.cli.needs import of_sinks
from penstock.cli.project import Project
from penstock.extras import EXTRAS, package_of
from penstock.sinks.stores import KINDS
from penstock.spark.views import definitions
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


@pytest.mark.java
def test_a_machine_that_has_everything(at: str) -> None:
    ran = run("doctor").ok()
    assert "Java" in ran.out
    assert "everything needed is there" in ran.err
    found = findings()
    assert {each["level"] for each in found.values()} <= {"ok", "warning"}
    assert at in found["broker"]["found"]
    assert "answers" in found["broker"]["found"]


def test_every_extra_is_listed_with_its_packages() -> None:
    root = Path(__file__).resolve().parents[2]
    declared = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = {**declared["optional-dependencies"]}
    for whole in ("all", "dev"):
        del extras[whole]
    found = findings()
    for extra, packages in extras.items():
        line = found[f"extra {extra}"]["found"].lower()
        names = [re.split(r"[\[<>=]", each)[0].lower() for each in packages]
        # Those that it takes from another are listed there.
        assert all(f"{name} " in line for name in names if name != "penstock"), extra
        assert line


def test_every_kind_of_sink_asks_for_all_of_its_packages() -> None:
    root = Path(__file__).resolve().parents[2]
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]

    def packages(extra: str) -> set[str]:
        found: set[str] = set()
        for each in extras[extra]:
            if own := re.fullmatch(r"penstock\[(.+)\]", each):
                found |= {name for part in own[1].split(",") for name in packages(part)}
            else:
                found.add(re.split(r"[\[<>=]", each)[0])
        return found

    for scheme, kind in KINDS.items():
        known = Project(data={"sinks": {"s": {"url": f"{scheme}://x/y"}}})
        asked = {package_of(name) for each in of_sinks(known) for name in EXTRAS[each]}
        assert asked == packages("spark") | (packages(kind.extra) if kind.extra else set()), scheme


def test_a_package_that_the_project_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    assert findings()["extra capture"]["level"] == "ok"
    project(tmp_path, '[capture.shop]\nurl = "sqlite:///shop.db"\n')
    found = findings()["extra capture"]
    assert found["level"] == "failure"
    assert "numba" in found["found"]
    assert "penstock[capture]" in found["remedy"]


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
    # All that is wrong, though captures and sinks have no findings of their own then.
    project(tmp_path, '[broker]\nbootstrp = "x:1"\n\n[capture.shop]\nurll = "sqlite:///a"\n')
    found = findings()["project"]
    assert "line 2" in found["found"]
    assert "line 5" in found["found"]


@pytest.mark.parametrize("section", ["sinks", "capture", "views"])
def test_a_section_that_is_no_table(tmp_path: Path, section: str) -> None:
    for value in ("5", '"x"', "[1]"):
        project(tmp_path, f"{section} = {value}\n")
        found = findings()
        assert found["project"]["level"] == "failure"
        assert f"line 1: {section} must be a table" in found["project"]["found"]
        # The rest is looked at all the same.
        assert "disk" in found


def test_sinks_that_share_a_table(tmp_path: Path) -> None:
    text = '[sinks.{}]\ntopic = "t"\nurl = "sqlite:///x.db?table=t"\n'
    project(tmp_path, text.format("a") + text.format("b"))
    assert "line 6: sinks.b.url: sinks.a (line 3)" in findings()["project"]["found"]


def test_a_webhook_is_not_said_to_be_reached(tmp_path: Path) -> None:
    url = "webhook+http://127.0.0.1:1/hook"
    project(tmp_path, f'[sinks.hook]\ntopic = "t"\nurl = "{url}"\n'
            'options = { secret = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw" }\n')  # fmt: skip
    assert "not asked" in findings()["sink hook"]["found"]


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


VIEW = "-- table o = {topic}(id bigint, cents bigint) key id\nSELECT id, cents FROM o\n"


def test_views_are_read_and_their_tables_looked_for(tmp_path: Path, at: str) -> None:
    orders, other = f"orders-{uuid4().hex[:8]}", f"other-{uuid4().hex[:8]}"
    run("topics", "create", orders).ok()
    folder = tmp_path / "views"
    folder.mkdir()
    (folder / "paid.sql").write_text(f"-- topic {other}\n{VIEW.format(topic=orders)}")
    # The topic of another view is made by it.
    (folder / "above.sql").write_text(
        VIEW.format(topic=other).replace(") key id", ") key id changelog")
    )
    (folder / "lost.sql").write_text(VIEW.format(topic=f"{orders}.gone"))
    (folder / "wrong.sql").write_text(VIEW.format(topic=orders).replace("cents FROM", "euros FROM"))
    found = findings()
    assert found["view paid"]["level"] == found["view above"]["level"] == "ok"
    assert found["view paid"]["found"] == f"topic {other} by id, not made yet"
    assert found["view lost"]["level"] == "warning"
    assert f"waits for {orders}.gone" in found["view lost"]["found"]
    assert found["view wrong"]["level"] == "failure"
    assert "euros" in found["view wrong"]["found"]
    assert "views" not in found
    run("topics", "create", other).ok()
    (folder / "again.sql").write_text((folder / "paid.sql").read_text())
    told = findings()["views"]
    assert told["level"] == "failure"
    assert f"both write topic '{other}'" in told["found"]


def test_views_without_a_broker(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    project(
        tmp_path,
        f'[broker]\nbootstrap = "127.0.0.1:{port}"\n[views.tables]\no = "o(id int) keyid"\n',
    )
    (tmp_path / "views").mkdir()
    (tmp_path / "views" / "paid.sql").write_text(VIEW.format(topic="orders"))
    told = findings()["views"]
    assert told["level"] == "failure"
    assert "line 4" in told["found"]
    project(tmp_path, f'[broker]\nbootstrap = "127.0.0.1:{port}"\n')
    found = findings()["view paid"]
    assert found["level"] == "ok"
    assert "no broker" in found["found"]


def test_views_are_looked_for_where_they_are_kept() -> None:
    assert f"{definitions.FOLDER}/*{definitions.SUFFIX}" == doctor.VIEW_FILES
    assert "spark" in doctor._needed_extras(Project(data={"views": {"tables": {"o": "o"}}}))
