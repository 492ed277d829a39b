"""The project file: `penstock.toml`, read by every command, wrong settings told with their line.

    [broker]
    bootstrap = "127.0.0.1:9092"

    [capture.shop]
    url = "postgresql://capture:${SHOP_PASSWORD}@localhost/shop"

The file is looked for in the folder of the command and above it, or named by `--project` or
PENSTOCK_PROJECT. `${NAME}` in a text stands for the environment's variable, so that secrets need
not be in the file; `$$` is a dollar sign. A variable that is not set matters to the part that needs
it, one capture or one sink, and to nothing else.

What a section means is known to the room that it is for; here is only where it stands. Errors of
those rooms begin with the setting's path
(`capture.shop.partitions must be ...`), which `explained` turns into a place in the file.

Whoever reads the file has all of it checked, also the sections that are for others: a mistake is
told when it is made, and not when somebody comes to the part, and all of them are told at once.
Only who asks for no more than the broker's address looks at `[broker]` alone: that needs no
secrets.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from penstock.errors import ConfigError, SeveralMistakesError

FILE_NAME: Final = "penstock.toml"
VARIABLE: Final = "PENSTOCK_PROJECT"
# Far more than anyone writes by hand.
MAX_BYTES: Final = 4 << 20
# The sections that some room understands.
SECTIONS: Final = ("broker", "capture", "sinks", "views")
# Those of [broker], with what each means.
BROKER: Final[Mapping[str, str]] = {
    "bootstrap": "Where the broker is: `HOST:PORT`, or several with commas between them.",
}
VIEWS: Final = ("tables",)

ProjectFile = Annotated[
    Path | None,
    typer.Option(
        "--project",
        "-p",
        metavar="FILE",
        envvar=VARIABLE,
        # Known before the broker's address is looked for in it.
        is_eager=True,
        help="The project file; else the nearest penstock.toml here or above.",
    ),
]

_HEADER: Final = re.compile(r"\s*\[\[?\s*(?P<name>[^\]]+?)\s*\]\]?\s*(#.*)?$")
_KEY: Final = re.compile(r"\s*(?P<key>[A-Za-z0-9_.\"'-]+(\s*\.\s*[A-Za-z0-9_\"'-]+)*)\s*=")
_PATH: Final = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_*-]+|\[\d+\])+")
_VARIABLE: Final = re.compile(r"\$(?:(?P<dollar>\$)|\{(?P<name>[A-Za-z_][A-Za-z0-9_]*)\})")


class SettingError(ConfigError):
    """A setting of the file is wrong: this one."""

    def __init__(self, message: str, path: str, line: int, advice: str = "") -> None:
        super().__init__(message, advice=advice)
        self.path = path
        self.line = line


@dataclass(frozen=True, slots=True)
class Project:
    """What stands in a project file; without one, nothing does."""

    path: Path | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    text: str = ""
    # Variables of the environment that are not set, each with the setting that needs it.
    unset: tuple[SettingError, ...] = ()

    @property
    def folder(self) -> Path:
        """Relative paths of the file are meant from here."""
        return self.path.parent if self.path is not None else Path()

    def section(self, name: str) -> Mapping[str, Any]:
        """A table at the top; ConfigError if something else stands there."""
        found = self.data.get(name, {})
        if not isinstance(found, Mapping):
            # What stands there may be a URL with its password.
            raise self.error(name, f"{name} must be a table of settings")
        return found

    def named(self, section: str) -> dict[str, Mapping[str, Any]]:
        """The tables `[SECTION.NAME]`, by name."""
        return {str(name): value for name, value in self.section(section).items()}

    def need(self, *path: str) -> None:
        """ConfigError if a part, such as `"capture", "shop"`, needs variables that are not set."""
        raise_all(self.unset_in(*path))

    def unset_in(self, *path: str) -> list[SettingError]:
        """What is not set of all that a part needs."""
        part = steps(".".join(path))
        return [each for each in self.unset if steps(each.path)[: len(part)] == part]

    @property
    def bootstrap(self) -> str:
        """Where the broker is, as far as the file says so."""
        self.need("broker")
        return str(self.section("broker").get("bootstrap", ""))

    def unknown(self, section: str, known: Collection[str]) -> Iterator[SettingError]:
        """An error for each setting in a section that means nothing there."""
        for name in self.section(section):
            if name not in known:
                path = f"{section}.{name}"
                yield self.error(path, f"{path} is no setting", _advice(name, known))

    def error(self, path: str, message: str, advice: str = "") -> SettingError:
        """An error that says where in the file."""
        line = line_of(self.text, path)
        return SettingError(f"{self.place(path)}{message}", path, line, advice)

    def place(self, path: str) -> str:
        """`FILE, line N: ` of a setting, or as near as can be told."""
        if self.path is None:
            return ""
        line = line_of(self.text, path)
        return f"{self.path.name}, line {line}: " if line else f"{self.path.name}: "

    @contextmanager
    def explained(self, path: str = "") -> Iterator[None]:
        """Errors about settings say where in the file they stand; those that name no setting, where
        the path is."""
        try:
            yield
        except ConfigError as error:
            message = str(error)
            found = _PATH.match(message)
            if found is not None and found.group().split(".")[0] in self.data:
                path = found.group()
            if self.path is None or not path:
                raise
            raise self.error(path, message, error.advice) from error


def find(start: Path | None = None) -> Path | None:
    """The file that is meant: the one that was named, or the nearest above."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    folder = (start or Path.cwd()).resolve()
    for place in (folder, *folder.parents):
        if (place / FILE_NAME).is_file():
            return place / FILE_NAME
    return None


def load(path: Path | None = None, *, whole: bool = True) -> Project:
    """The project of this file, or of the one that is found; an empty one if there is none.

    ConfigError, with the line, if anything in it is wrong; if not `whole`, only what must be right
    for any of its sections to be found.
    """
    found, wrong = _read(path)
    if found.path is None:
        return found
    unset: list[SettingError] = []
    data = _fill(found.data, "", os.environ.get, found, unset)
    project = Project(found.path, data, found.text, tuple(unset))
    if whole:
        from penstock.cli.project_check import mistakes

        wrong += mistakes(project)
    raise_all(wrong)
    return project


def load_broker(path: Path | None = None) -> Project:
    """The project with nothing but `[broker]`: what others need may not be there for us."""
    found, wrong = _read(path)
    if wrong:
        # The rest of the file is told with it.
        load(path)
    alone = {"broker": found.section("broker")} if "broker" in found.data else {}
    unset: list[SettingError] = []
    data = _fill(alone, "", os.environ.get, found, unset)
    raise_all(unset)
    return Project(found.path, data, found.text)


def raise_all(wrong: Sequence[ConfigError]) -> None:
    """Raise what was found: in the order of the lines, if it is more than one."""
    if len(wrong) == 1:
        raise wrong[0]
    if wrong:
        raise SeveralMistakesError(sorted(wrong, key=lambda each: getattr(each, "line", 0)))


def _read(path: Path | None) -> tuple[Project, list[ConfigError]]:
    """What stands in the file, variables not yet put in, and what is wrong with its outline."""
    chosen = path or find()
    if chosen is None:
        return Project(), []
    try:
        if chosen.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{chosen} is larger than {MAX_BYTES >> 20} MiB")
        text = chosen.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{chosen}: {error.strerror or error}",
            advice=f"Name a project file by --project or {VARIABLE}.",
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{chosen} is not UTF-8: {error}") from error
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{chosen.name}: {error}", advice="It must be TOML.") from error
    project = Project(chosen, data, text)
    wrong: list[ConfigError] = [
        project.error(name, f"{name} is no section", _advice(name, SECTIONS))
        for name in data
        if name not in SECTIONS
    ]
    try:
        wrong += project.unknown("broker", BROKER)
        for name, value in project.section("broker").items():
            if name in BROKER and (not isinstance(value, str) or not value.strip()):
                path_ = f"broker.{name}"
                told = f"{path_} must be a text, as HOST:PORT, not {value!r}"
                wrong.append(project.error(path_, told))
    except SettingError as error:
        wrong.append(error)
    return project, wrong


def _advice(name: str, known: Collection[str]) -> str:
    near = get_close_matches(name, known, 1)
    there = "There is" if len(known) == 1 else "There are"
    return f"{f'Did you mean {near[0]}? ' if near else ''}{there} {', '.join(known)}."


def filled(data: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Settings that are not in a file yet, with variables of the environment put in."""
    unset: list[SettingError] = []
    found: dict[str, Any] = _fill(dict(data), path, os.environ.get, Project(), unset)
    raise_all(unset)
    return found


def _fill(
    value: Any,
    path: str,
    variable: Callable[[str], str | None],
    project: Project,
    unset: list[SettingError],
) -> Any:
    """The same, with variables of the environment put in; those that are not set are told."""
    if isinstance(value, dict):
        return {
            key: _fill(item, f"{path}.{key}".lstrip("."), variable, project, unset)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [
            _fill(item, f"{path}[{at}]", variable, project, unset) for at, item in enumerate(value)
        ]
    if not isinstance(value, str):
        return value

    def put(match: re.Match[str]) -> str:
        if match["dollar"]:
            return "$"
        found = variable(match["name"])
        if found is None:
            told = f"{path} needs the variable {match['name']} of the environment, which is not set"
            unset.append(project.error(path, told, f"Set it: export {match['name']}=..."))
            return match[0]
        return found

    return _VARIABLE.sub(put, value)


def line_of(text: str, path: str) -> int:
    """The line, from 1, of a setting's path such as `capture.shop.keys[1].table`; of what it is in,
    if it is not there itself; of the first that is in it, if it has no line of its own; else 0.

    Names may have dots in them, in quotes; paths do not have the quotes: both are taken apart at
    all dots.
    """
    wanted = steps(path)
    best, best_depth = 0, 0
    inside = 0
    here: list[str] = []
    arrays: dict[tuple[str, ...], int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.match(line)
        if header is not None:
            here = _split(header["name"])
            if line.lstrip().startswith("[["):
                at = arrays[tuple(here)] = arrays.get(tuple(here), -1) + 1
                here = [*here, str(at)]
            found = here
        elif (key := _KEY.match(line)) is not None:
            found = [*here, *_split(key["key"])]
        else:
            continue
        depth = len(found)
        if depth > best_depth and found == wanted[:depth]:
            best, best_depth = number, depth
        elif not inside and found[: len(wanted)] == wanted:
            inside = number
    return inside if inside and best_depth < len(wanted) else best


def steps(path: str) -> list[str]:
    """A setting's path, taken apart."""
    return _split(re.sub(r"\[(\d+)\]", r".\1", path))


def _split(name: str) -> list[str]:
    return [part.strip() for part in re.findall(r"[^.\"']+", name) if part.strip()]
