"""The project file: found, read, its variables put in, and wrong settings told with their line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer

from penstock.capture.delivery.config import CaptureConfig
from penstock.cli import project
from penstock.cli.kafka import BOOTSTRAP_VARIABLE
from penstock.cli.main import make_app
from penstock.cli.output import MOST_MISTAKES
from penstock.cli.up import DEFAULT_LISTEN
from penstock.errors import ConfigError, SeveralMistakesError
from penstock.testing.broker import Broker
from tests.cli.runner import run

TEXT = """\
# A shop.
[broker]
bootstrap = "127.0.0.1:9092"

[capture.shop]
url = "sqlite:///shop.db"
partitions = 4

[capture.shop.delivery]
linger_ms = "soon"

[[capture.shop.routes]]
topic = "a"

[[capture.shop.routes]]
topic = "b"

[capture.shop.keys]
"public.orders" = ["id"]

[sinks."shop.orders"]
topic = "t"
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / project.FILE_NAME
    path.write_text(TEXT)
    return path


@pytest.mark.parametrize(
    ("path", "line"),
    [
        ("capture.shop.partitions", 7),
        ("capture.shop.delivery.linger_ms", 10),
        ("capture.shop.routes[1].topic", 16),
        ("capture.shop.routes[1].pattern", 15),
        ("capture.shop.nothing", 5),
        ("broker.bootstrap", 3),
        ("capture.shop.keys.public.orders", 19),
        ("sinks.shop.orders.topic", 22),
        ("sinks.shop.orders.nothing", 21),
        ("sinks.shop.orders", 21),
        ("nowhere.at.all", 0),
    ],
)
def test_a_setting_has_a_line(path: str, line: int) -> None:
    assert project.line_of(TEXT, path) == line


def test_it_is_found_from_below(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = file.parent / "a" / "b"
    below.mkdir(parents=True)
    monkeypatch.delenv(project.VARIABLE, raising=False)
    monkeypatch.chdir(below)
    found = project.load(whole=False)
    assert found.path == file
    assert set(found.named("capture")) == {"shop"}


def test_it_can_be_named(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv(project.VARIABLE, str(file))
    assert project.load(whole=False).path == file
    monkeypatch.setenv(project.VARIABLE, str(tmp_path / "none.toml"))
    with pytest.raises(ConfigError, match="No such file"):
        project.load()


def test_without_one_nothing_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(project.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    found = project.load()
    assert found.path is None
    assert found.named("capture") == {}


def test_variables_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / project.FILE_NAME
    file.write_text('[capture.a]\nurl = "x://${WHO}:${SECRET}@h/$$1"\n')
    monkeypatch.setenv("WHO", "me")
    with pytest.raises(ConfigError, match=r"line 2: capture.a.url needs the variable SECRET"):
        project.load(file).need("capture", "a")
    monkeypatch.setenv("SECRET", "p$$w")
    assert project.load(file).named("capture")["a"]["url"] == "x://me:p$$w@h/$1"


def test_a_variable_matters_to_the_part_that_needs_it(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(project.VARIABLE, raising=False)
    (tmp_path / project.FILE_NAME).write_text(
        '[capture.shop]\nurl = "postgresql://me:${UNSET}@127.0.0.1:1/x"\n'
        '[capture.other]\nurl = "sqlite:///other.db"\n'
        '[sinks.a]\ntopic = "t"\nurl = "sqlite:///a.db"\n'
        '[sinks.b]\ntopic = "t"\nurl = "redis://:${NO_SUCH}@127.0.0.1:1/0"\n'
    )
    listed = run("sinks", "list", "--json").ok()
    assert [each["name"] for each in listed.json] == ["a"]
    assert "line 10: sinks.b.url needs the variable NO_SUCH" in listed.err
    run("sinks", "pause", "a").ok()
    run("sinks", "describe", "a").ok()
    statuses = {each["name"]: each for each in run("capture", "status", "--json").ok().json}
    assert "UNSET" in statuses["shop"]["database"]["problem"]
    assert "there is no" in statuses["other"]["database"]["problem"]
    for use, name in (
        ("sinks describe b", "NO_SUCH"),
        ("sinks run", "NO_SUCH"),
        ("capture run shop", "UNSET"),
        ("up --listen 127.0.0.1:0", "UNSET"),
    ):
        ran = run(*use.split())
        assert ran.status == 1
        assert f"needs the variable {name} of the environment, which is not set" in ran.err
        assert f"export {name}=..." in ran.err
    found = {each["what"]: each for each in run("doctor", "--json").json}
    assert found["project"]["level"] == "ok"
    assert "NO_SUCH" in found["sink b"]["found"]
    assert found["sink a"]["level"] == "ok"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[broker\n", r"penstock.toml: .*line 1"),
        ("[brokers]\n", r"line 1: brokers is no section"),
        ("capture = 3\n", r"line 1: capture must be a table"),
        ("# here\n[broker]\nbootstap = 'a:1'\n", r"line 3: broker.bootstap is no setting"),
        ("[broker]\nbootstrap = 9092\n", r"line 2: broker.bootstrap must be a text"),
        ("[capture.a]\nurl = 'sqlite:///x'\ninclud = ['t']\n", r"line 3: capture.a.includ is no"),
        (
            "[sinks.a]\ntopic = 't'\nurl = 'sqlite:///x'\nfeilds = 'id int'\n",
            r"line 4: sinks.a.feilds is no",
        ),
        ("[sinks.a]\nurl = 'sqlite:///x'\n", r"line 1: sinks.a.topic is missing"),
        ("[views]\ntabels = {}\n", r"line 2: views.tabels is no setting"),
        ("[views.tables]\norders = 3\n", r"line 2: views.tables.orders must be a text"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / project.FILE_NAME
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        project.load(file).section("capture")


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("[brokers]\n", "broker"),
        ("[broker]\nbootstap = 'a:1'\n", "bootstrap"),
        ("[capture.a]\nurl = 'sqlite:///x'\ninclud = ['t']\n", "include"),
        ("[sinks.a]\ntopic = 't'\nurl = 'sqlite:///x'\nfeilds = 'id int'\n", "fields"),
        ("[views]\ntabels = {}\n", "tables"),
        # It is missing as well: that is one mistake, not two.
        ("[capture.a]\nurll = 'sqlite:///x'\n", "url"),
        ("[sinks.a]\ntopik = 't'\nurl = 'sqlite:///x'\n", "topic"),
    ],
)
def test_what_may_have_been_meant_is_told(tmp_path: Path, text: str, meant: str) -> None:
    file = tmp_path / project.FILE_NAME
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        project.load(file)
    assert f"Did you mean {meant}?" in caught.value.advice


MANY = """\
[broker]
bootstap = "a:1"
[brokers]
[capture.a]
url = "sqlite:///x.db"
includ = ["t"]
partitions = 0
[capture.b]
partitions = "many"
[sinks.a]
topic = "a b"
url = "nosql:///x"
max_lag = "soon"
key = 3
[sinks.b]
topic = "t"
url = "sqlite:///x.db?foo=1"
[sinks.c]
topic = "t"
url = "sqlite:///x.db"
options = { timeout = "long" }
[views]
tabels = {}
tables = { orders = 3 }
"""
# What is missing is told where it should be.
MISTAKES = (2, 3, 6, 7, 8, 9, 11, 12, 13, 14, 17, 21, 23, 24)


# Settings that are missing because they are written wrong, and one that is there, though wrong too.
MEANT = """\
[capture.a]
urll = "sqlite:///x.db"
includ = ["t"]
[sinks.a]
topik = "t"
ul = "sqlite:///y.db"
[sinks.b]
topic = "t"
url = 3
urll = "sqlite:///z.db"
[sinks."c.d"]
uri = "sqlite:///z.db"
"""


# Names with dots in them; options that a store complains of in its own words.
ODD = """\
[sinks."shop.orders"]
topic = "a b"
url = "nosql:///x"
max_lag = "soon"
[sinks.hook]
topic = "t"
url = "webhook+http://h/"
options.attempts = 3
options.secret = "short"
[sinks.many]
topic = "t"
url = "sqlite:///y.db"
[sinks.many.options]
timeout = 3
table = "50%"
"""


@pytest.mark.parametrize(
    ("text", "wanted"),
    [(MANY, MISTAKES), (ODD, (2, 3, 4, 9, 15)), (MEANT, (2, 3, 5, 6, 9, 10, 11, 12))],
)
def test_all_mistakes_are_told_at_once(tmp_path: Path, text: str, wanted: tuple[int, ...]) -> None:
    file = tmp_path / project.FILE_NAME
    file.write_text(text)
    with pytest.raises(SeveralMistakesError) as caught:
        project.load(file)
    each = [str(mistake) for mistake in caught.value.each]
    lines = [re.match(r"penstock.toml, line (\d+): ", text) for text in each]
    assert [int(line[1]) for line in lines if line] == list(wanted), each
    assert len(each) == len(set(each))


def test_only_some_of_many_mistakes_are_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / project.FILE_NAME).write_text(MANY)
    ran = run("sinks", "list")
    assert ran.status == 1
    assert ran.err.count("error: penstock.toml, line ") == MOST_MISTAKES
    assert ran.err.splitlines()[-1].strip() == f"and {len(MISTAKES) - MOST_MISTAKES} more"
    assert "Did you mean bootstrap?" in ran.err
    mended = "\n".join(MANY.splitlines()[9:])
    (tmp_path / project.FILE_NAME).write_text(mended)
    ran = run("sinks", "list")
    assert ran.err.count("error: penstock.toml, line ") == 8
    assert "more" not in ran.err.splitlines()[-1]


def test_all_variables_that_are_not_set_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / project.FILE_NAME
    file.write_text("[capture.a]\nurl = 'x://${NO_USER}:${NO_WORD}@h/d'\n")
    found = project.load(file)
    with pytest.raises(SeveralMistakesError) as caught:
        found.need("capture")
    first, second = map(str, caught.value.each)
    assert "line 2" in first
    assert "NO_USER" in first
    assert "NO_WORD" in second
    found.need("sinks")


CAPTURE = "[capture.a]\nurl = 'sqlite:///x.db'\n"
SINK = "[sinks.a]\ntopic = 't'\nurl = 'sqlite:///x.db'\n"


@pytest.mark.parametrize(
    "command",
    [
        ("up", "--data", "data", "--listen", "127.0.0.1:0"),
        ("run", "flows.py", "--no-sinks"),
        ("sinks", "list"),
        ("capture", "status"),
        ("view", "check", "n AS SELECT count(*) AS n FROM t"),
    ],
    ids=lambda command: command[0],
)
@pytest.mark.parametrize("text", [f"{CAPTURE}wrong = 1\n{SINK}", f"{CAPTURE}{SINK}wrong = 1\n"])
def test_whoever_reads_the_file_has_all_of_it_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str, command: tuple[str, ...], text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / project.FILE_NAME).write_text(text)
    (tmp_path / "flows.py").write_text(
        "from penstock.spark import flow, stream, topic\n\n\n"
        "@flow(inputs=stream('a', text=True), output=topic('b'))\n"
        "def made(a):\n    return a\n"
    )
    ran = run(*command)
    assert ran.status == 1
    line = text[: text.index("wrong")].count("\n") + 1
    assert f"penstock.toml, line {line}: " in ran.err
    assert "wrong is no setting" in ran.err
    assert not (tmp_path / "data").exists()


# ---- where the broker is -----------------------------------------------------------------

NOWHERE = "127.0.0.1:1"


def ways(tmp_path: Path, address: str) -> None:
    """A project that names a broker, and has something that only others need."""
    (tmp_path / project.FILE_NAME).write_text(
        f"[broker]\nbootstrap = '{address}'\n\n[capture.a]\nurl = 'sqlite:///${{NEVER_SET}}'\n"
    )


def test_the_option_comes_before_the_environment_and_that_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broker: Broker
) -> None:
    monkeypatch.chdir(tmp_path)
    below = tmp_path / "below"
    below.mkdir()
    here = broker.bootstrap
    ways(tmp_path, NOWHERE)
    monkeypatch.setenv("PENSTOCK_BOOTSTRAP", NOWHERE)
    run("topics", "list", "--bootstrap", here).ok()
    monkeypatch.setenv("PENSTOCK_BOOTSTRAP", here)
    run("topics", "list").ok()
    ways(tmp_path, here)
    # The default, if somebody asks for it, is as good as any other.
    default = run("topics", "list", "--bootstrap", NOWHERE)
    assert default.status == 1
    assert f"no broker answers at {NOWHERE}" in default.err
    monkeypatch.delenv("PENSTOCK_BOOTSTRAP")
    run("topics", "list").ok()
    monkeypatch.chdir(below)
    run("topics", "list").ok()


def test_the_broker_of_the_project_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broker: Broker
) -> None:
    there, elsewhere = tmp_path / "there", tmp_path / "elsewhere"
    for folder, address in ((there, broker.bootstrap), (elsewhere, NOWHERE)):
        folder.mkdir()
        (folder / project.FILE_NAME).write_text(f"[broker]\nbootstrap = '{address}'\n")
    monkeypatch.chdir(elsewhere)
    named = str(there / project.FILE_NAME)
    refused = run("capture", "status")
    assert f"no broker answers at {NOWHERE}" in refused.err
    for place in (("capture", "status", "--project", named), ("topics", "list")):
        monkeypatch.setenv(project.VARIABLE, named if "--project" not in place else "")
        run(*place).ok()


def test_the_broker_that_is_checked_is_the_one_that_commands_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broker: Broker
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / project.FILE_NAME).write_text(f"[broker]\nbootstrap = '{NOWHERE}'\n")
    monkeypatch.setenv("PENSTOCK_BOOTSTRAP", broker.bootstrap)
    found = {each["what"]: each for each in run("doctor", "--json").json}
    assert f"{broker.bootstrap} answers" in found["broker"]["found"]


def test_all_commands_look_for_the_broker_in_one_way() -> None:
    asked = []
    todo: list[tuple[str, Any]] = [("penstock", typer.main.get_command(make_app()))]
    while todo:
        name, command = todo.pop()
        todo += [(f"{name} {at}", each) for at, each in getattr(command, "commands", {}).items()]
        asked += [(name, each) for each in command.params if each.envvar == BOOTSTRAP_VARIABLE]
    assert len(asked) > 30
    # By the callback; `verify` does it itself, for its own exit status.
    without = {name for name, option in asked if option.callback is None}
    assert without == {"penstock verify"}


def test_errors_of_the_rooms_get_a_line(file: Path) -> None:
    found = project.load(file, whole=False)
    with pytest.raises(ConfigError, match=r"^penstock.toml, line \d+: capture.shop"):
        with found.explained():
            CaptureConfig.from_mapping("shop", found.named("capture")["shop"])


@pytest.mark.parametrize(
    ("bootstrap", "listen"),
    [
        ("127.0.0.1:19093", "127.0.0.1:19093"),
        ("localhost", "localhost:9092"),
        ("kafka-1:9092, [::1]:19094", "[::1]:19094"),
        ("kafka-1:9092", DEFAULT_LISTEN),
        (None, DEFAULT_LISTEN),
    ],
)
def test_the_broker_listens_where_the_commands_look_for_it(
    bootstrap: str | None, listen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(project.VARIABLE, raising=False)
    if bootstrap is not None:
        (tmp_path / project.FILE_NAME).write_text(f'[broker]\nbootstrap = "{bootstrap}"\n')
    up = typer.main.get_command(make_app("up")).commands["up"]  # type: ignore[attr-defined]
    assert up.make_context("up", []).params["listen"] == listen
    assert up.make_context("up", ["--listen", "127.0.0.1:0"]).params["listen"] == "127.0.0.1:0"
    monkeypatch.setenv("PENSTOCK_LISTEN", "127.0.0.1:7")
    assert up.make_context("up", []).params["listen"] == "127.0.0.1:7"
