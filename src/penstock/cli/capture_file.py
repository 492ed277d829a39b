"""Sections of captures written into the project file, and taken out again, the rest untouched."""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from penstock.errors import ConfigError

_BARE: Final = re.compile(r"[A-Za-z0-9_-]+")


def add_section(path: Path, name: str, settings: Mapping[str, Any]) -> None:
    """Put `[capture.NAME]` at the end of the file; it is made if it is not there."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [f"[capture.{name}]", *_lines(settings)]
    gap = "\n" if text and not text.endswith("\n\n") else ""
    if text and not text.endswith("\n"):
        gap = "\n\n"
    _replace(path, text + gap + "\n".join(lines) + "\n")


def drop_section(path: Path, name: str) -> None:
    """Take `[capture.NAME]` and what is below it out of the file."""
    mine = re.compile(rf"\s*\[\[?\s*capture\s*\.\s*[\"']?{re.escape(name)}[\"']?\s*(\.[^\]]*)?\]")
    kept: list[str] = []
    dropping = False
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.lstrip().startswith("["):
            dropping = mine.match(line) is not None
        if not dropping:
            kept.append(line)
    _replace(path, "".join(kept).rstrip("\n") + "\n" if "".join(kept).strip() else "")


def given_settings(into: dict[str, Any], given: Sequence[str]) -> None:
    """Put settings that a command has been given, as NAME=VALUE, with those that are there.

    Names and values are written as in the file; a value that would be none there is a text.
    """
    for each in given:
        name, equals, text = each.partition("=")
        if not equals or not name.strip() or "\n" in name:
            raise ConfigError(f"--set {each!r} is not NAME=VALUE, such as partitions=4")
        _merge(into, _setting(name, text), each)


def _setting(name: str, text: str) -> dict[str, Any]:
    for value in (text, json.dumps(text, ensure_ascii=False)):
        # More than one line would be more than one setting.
        if "\n" not in value:
            with suppress(tomllib.TOMLDecodeError):
                return tomllib.loads(f"{name} = {value}")
    raise ConfigError(
        f"--set {name}=...: {name} is no name of a setting",
        advice="What is not letters, digits, _ and - stands in quotes: "
        """--set 'keys."public.orders"=["id"]'.""",
    )


def _merge(into: dict[str, Any], added: Mapping[str, Any], told: str) -> None:
    for name, value in added.items():
        there = into.get(name)
        if isinstance(there, dict) and isinstance(value, Mapping):
            _merge(there, value, told)
        elif name in into:
            raise ConfigError(f"{name} is given twice: --set {told}")
        else:
            into[name] = value


def _lines(settings: Mapping[str, Any], above: str = "") -> Iterator[str]:
    for name, item in settings.items():
        path = f"{above}{_key(name)}"
        if isinstance(item, Mapping) and item:
            yield from _lines(item, f"{path}.")
        else:
            yield f"{path} = {_value(item)}"


def _key(name: str) -> str:
    return name if _BARE.fullmatch(name) else json.dumps(name, ensure_ascii=False)


def _value(item: Any) -> str:
    if isinstance(item, Mapping):
        return (
            "{" + ", ".join(f"{_key(name)} = {_value(each)}" for name, each in item.items()) + "}"
        )
    if isinstance(item, list):
        return "[" + ", ".join(map(_value, item)) + "]"
    # Texts and numbers are written in TOML as in JSON.
    return json.dumps(item, ensure_ascii=False)


def _replace(path: Path, text: str) -> None:
    """Another text in the same file, or the old one: never half of it."""
    try:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            os.chmod(temporary, path.stat().st_mode & 0o7777)
        else:
            os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror or error}") from error
