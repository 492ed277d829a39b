"""Sections of captures written into the project file, and taken out again, the rest untouched."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError


def add_section(path: Path, name: str, settings: Mapping[str, Any]) -> None:
    """Put `[capture.NAME]` at the end of the file; it is made if it is not there."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    lines = [f"[capture.{name}]", *(f"{key} = {_value(item)}" for key, item in settings.items())]
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


def _value(item: Any) -> str:
    # Texts and lists of texts are written in TOML as in JSON.
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
