"""The project file: found, read, its variables put in, and wrong settings told with their line."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.capture.delivery.config import CaptureConfig
from penstock.cli import project
from penstock.errors import ConfigError

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
    assert project.load().path == file
    assert set(project.load().named("capture")) == {"shop"}


def test_it_can_be_named(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv(project.VARIABLE, str(file))
    assert project.load().path == file
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
        project.load(file)
    monkeypatch.setenv("SECRET", "p$$w")
    assert project.load(file).named("capture")["a"]["url"] == "x://me:p$$w@h/$1"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[broker\n", r"penstock.toml: .*line 1"),
        ("[brokers]\n", r"line 1: brokers is no section"),
        ("capture = 3\n", r"line 1: capture must be a table"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / project.FILE_NAME
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        project.load(file).section("capture")


def test_errors_of_the_rooms_get_a_line(file: Path) -> None:
    found = project.load(file)
    with pytest.raises(ConfigError, match=r"^penstock.toml, line \d+: capture.shop"):
        with found.explained():
            CaptureConfig.from_mapping("shop", found.named("capture")["shop"])
