"""All sections of the project file, checked by the rooms that they are for, without connecting.

A room tells of one mistake at a time. To find the others, what it has told of is taken out of the
settings (or replaced by something harmless, if there must be something), and it is asked again.

What a room cannot check without heavy company is left to it: Spark would have to be loaded for the
text of `[views.tables]`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from typing import Any, Final

from penstock.cli.project import VIEWS, Project, SettingError, line_of, steps
from penstock.errors import ConfigError, PenstockError

# In one section; more are told the next time.
MOST: Final = 20
_HARMLESS: Final = {"url": "sqlite:///file.db", "topic": "topic"}


def mistakes(found: Project) -> list[ConfigError]:
    """All that is wrong, each with its line."""
    return _all(found, captures_wrong, sinks_wrong, views_wrong)


def mistakes_around(found: Project) -> list[ConfigError]:
    """What is wrong beside the settings of single captures and sinks."""

    def no_table(found: Project) -> Iterator[ConfigError]:
        found.section("capture")
        yield from ()

    return _all(found, no_table, stores_shared, views_wrong)


def _all(found: Project, *checks: Callable[[Project], Iterator[ConfigError]]) -> list[ConfigError]:
    wrong: list[ConfigError] = []
    for check in checks:
        try:
            wrong += check(found)
        except ConfigError as error:
            wrong.append(error)
    return wrong


def captures_wrong(found: Project) -> Iterator[ConfigError]:
    """What is wrong with the captures."""
    captures = found.named("capture")
    if captures:
        from penstock.cli.capture_project import configured

        for name in captures:
            # What needs a variable that is not set is told of to whoever uses it.
            if found.unset_in("capture", name):
                continue
            yield from _wrong(found, f"capture.{name}", partial(configured, name=name))


def sinks_wrong(found: Project) -> Iterator[ConfigError]:
    """What is wrong with the sinks."""
    if not found.named("sinks"):
        return
    try:
        from penstock.cli.sinks_file import read

        for name in found.named("sinks"):
            if found.unset_in("sinks", name):
                continue
            yield from _wrong(found, f"sinks.{name}", partial(read, name=name))
        yield from stores_shared(found)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("penstock"):
            raise
        # A broker without Arrow: whoever is to feed the sinks says what is missing for it.


def stores_shared(found: Project) -> Iterator[ConfigError]:
    """Sinks that write to the table of another: each would take it from the other in turn."""
    from penstock.cli.sinks_file import read

    first: dict[tuple[str, ...], str] = {}
    for name in found.named("sinks"):
        try:
            place = read(found, name).place
        except (PenstockError, ModuleNotFoundError):
            # It is wrong in another way, or cannot be fed from here.
            continue
        other = first.setdefault(place, name)
        if other != name:
            line = line_of(found.text, f"sinks.{other}.url")
            yield found.error(
                f"sinks.{name}.url",
                f"sinks.{name}.url: sinks.{other} (line {line}) writes to the same: {place[0]}",
                "Give one of them a table of its own, as in ?table=NAME, or take one away.",
            )


def views_wrong(found: Project) -> Iterator[ConfigError]:
    """What is wrong with the settings of views."""
    yield from found.unknown("views", VIEWS)
    tables = found.section("views").get("tables", {})
    if not isinstance(tables, Mapping):
        yield found.error("views.tables", f"views.tables must be a table, not {tables!r}")
        return
    for name, text in tables.items():
        if found.unset_in("views", "tables", name):
            continue
        path = f"views.tables.{name}"
        if not isinstance(text, str):
            yield found.error(path, f"{path} must be a text, not {text!r}")


def _wrong(
    found: Project, section: str, read: Callable[[Project], object]
) -> Iterator[ConfigError]:
    """What a room says of a section, until it has nothing more to say."""
    told: dict[str, ConfigError] = {}
    left = found
    while len(told) < MOST:
        try:
            read(left)
        except ConfigError as error:
            path = error.path if isinstance(error, SettingError) else ""
            again = path in told
            told.setdefault(path, error)
            if again or not path.startswith(f"{section}."):
                break
            left = _without(left, path)
        else:
            break
    group, _, name = section.partition(".")
    there = found.named(group)[name]
    for path, mistake in told.items():
        setting = path.removeprefix(f"{section}.")
        # Written wrong it is missing too, which is one mistake.
        is_meant = any(f"Did you mean {setting}?" in each.advice for each in told.values())
        if not (is_meant and setting not in there):
            yield mistake


def _without(found: Project, path: str) -> Project:
    """The project as if a setting were not there, or right."""
    data: Any = deepcopy(dict(found.data))
    at, above, left = data, 0, steps(path)
    while len(left) > 1 and (found_at := _inside(at, left)) is not None:
        at, count = found_at
        above, left = above + 1, left[count:]
    last = ".".join(left)
    if above == 2 and last in _HARMLESS and isinstance(at, dict):
        at[last] = _HARMLESS[last]
        if last == "url":
            # They belong to it.
            at.pop("options", None)
    elif isinstance(at, dict):
        at.pop(last, None)
    return Project(found.path, data, found.text)


def _inside(at: Any, left: list[str]) -> tuple[Any, int] | None:
    """What the first steps lead to, and how many they are: a name with dots takes several."""
    if isinstance(at, list):
        there = left[0].isdigit() and int(left[0]) < len(at)
        return (at[int(left[0])], 1) if there else None
    if not isinstance(at, dict):
        return None
    names = ((".".join(left[:count]), count) for count in range(len(left) - 1, 0, -1))
    return next(((at[name], count) for name, count in names if name in at), None)
