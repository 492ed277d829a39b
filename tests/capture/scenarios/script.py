"""Scenarios: what users do to a database, as files of SQL.

Statements end with `;` at the end of a line, in SQL that all databases understand, with `$int`,
`$text` and the like for types (`kit.databases`). Lines that begin with `--` and a word say more:

    -- on postgresql mysql        the next statement is for these only
    -- repeat 100                 the next statement so many times, with {i} from 1 on
    -- capture KEY = JSON         a setting of the capture; @table is a table's full name
    -- stream                     the capture starts here; what is before it is its snapshot
    -- then                       a good moment to be killed
    -- expect TABLE: c u d        the changes that its topic tells, in order
    -- expect sqlite TABLE: ...   the same on one database only
    -- records TOPIC: KEY VALUE   a record of another topic of the capture, in order
    -- skip sqlite: REASON        not on this database

Other comments are for people. At the end every table of the database is what its topic tells.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import orjson

from tests.capture.kit.databases import KINDS

FOLDER: Final = Path(__file__).parent


@dataclass
class Scenario:
    """One file, as it reads for one kind of database."""

    name: str
    kind: str
    # Statements before the capture starts, and then between moments at which it may be killed.
    sections: list[list[str]] = field(default_factory=lambda: [[]])
    settings: dict[str, str] = field(default_factory=dict)
    expected: dict[str, str] = field(default_factory=dict)
    records: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    skipped: str = ""

    def capture(self, full_name: Callable[[str], str], prefix: str) -> dict[str, Any]:
        """The capture's settings, with tables named as this database names them."""

        def named(match: re.Match[str]) -> str:
            return full_name(match[1])

        return {
            key: orjson.loads(re.sub(r"@(\w+)", named, value).replace("PREFIX", prefix))
            for key, value in self.settings.items()
        }


def load(path: Path, kind: str) -> Scenario:
    """Read a file."""
    made = Scenario(path.stem, kind)
    own: dict[str, str] = {}
    kinds, repeat, statement = set(KINDS), 1, ""
    for line in path.read_text(encoding="utf-8").splitlines():
        text = line.strip()
        if statement or (text and not text.startswith("--")):
            statement = f"{statement}\n{text}".strip()
            if text.endswith(";"):
                if kind in kinds:
                    made.sections[-1] += [
                        statement[:-1].replace("{i}", str(i + 1)) for i in range(repeat)
                    ]
                kinds, repeat, statement = set(KINDS), 1, ""
            continue
        match text.removeprefix("--").split(maxsplit=2):
            case ["on", *names]:
                kinds = set(" ".join(names).split())
                assert kinds <= set(KINDS), text
            case ["repeat", count]:
                repeat = int(count)
            case ["stream"] | ["then"]:
                made.sections.append([])
            case ["capture", key, value]:
                made.settings[key] = value.removeprefix("= ")
            case ["expect", table, ops] if table in KINDS:
                name, _, ops = ops.partition(": ")
                if table == kind:
                    own[name] = ops
            case ["expect", table, *ops]:
                made.expected[table.removesuffix(":")] = " ".join(ops)
            case ["records", topic, record]:
                key, _, value = record.partition(" ")
                made.records.setdefault(topic.removesuffix(":"), []).append((key, value))
            case ["skip", name, reason] if name.removesuffix(":") == kind:
                made.skipped = reason
    assert not statement, f"{path}: a statement has no end: {statement}"
    made.expected |= own
    return made


def scenarios() -> list[str]:
    """The names of all."""
    return sorted(path.stem for path in FOLDER.glob("*.sql"))
