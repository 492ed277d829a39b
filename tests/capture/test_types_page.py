"""docs/types.md, cell by cell: real databases store each value, and a capture tells it as the page
says, with the type that it says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.capture.events.settings import EventSettings
from penstock.capture.events.shape import shape_of
from penstock.capture.events.table_schemas import table_schema
from penstock.capture.sources import open_source
from penstock.client.table_schemas import ValueType
from tests.capture.kit import databases
from tests.capture.kit.databases import Database
from tests.capture.kit.following import settings_of

PAGE = Path(__file__).parents[2] / "docs" / "types.md"
HEADINGS = {"postgresql": "PostgreSQL", "mysql": "MariaDB and MySQL", "sqlite": "SQLite"}
BEFORE = {
    "postgresql": (
        "CREATE TYPE mood AS ENUM ('sad', 'ok')",
        "CREATE TYPE pair AS (a int, b text)",
        "CREATE DOMAIN cents AS numeric(10,2)",
    ),
    "mysql": ("SET time_zone = '+00:00'",),
    "sqlite": (),
}
_CODE = re.compile(r"`([^`]*)`")


def cells(kind: str) -> list[list[str]]:
    """The rows of a database's table: its type, a value, the event's, the type in the schema."""
    section = PAGE.read_text(encoding="utf-8").split(f"\n## {HEADINGS[kind]}\n")[1]
    lines = section.split("\n## ")[0].splitlines()
    rows = [line.strip().strip("|").split("|") for line in lines if line.startswith("| `")]
    return [[cell.strip() for cell in row] for row in rows]


def code(cell: str) -> str:
    found = _CODE.match(cell)
    assert found, cell
    return found[1]


def type_cell(kind: ValueType) -> str:
    """A type as the page has it."""
    words = f"`{kind.name}`"
    if kind.semantic:
        words += f" `{kind.semantic.removeprefix('io.debezium.')}`"
    if kind.items is not None:
        words += f" of {type_cell(kind.items)}"
    if kind.fields:
        words += f" ({', '.join(f'{name} {inner.name}' for name, inner in kind.fields)})"
    if kind.parameters:
        words += " " + ", ".join(f"`{name}={value}`" for name, value in kind.parameters.items())
    return words


def told(database: Database, rows: list[list[str]]) -> list[list[str]]:
    """What the capture tells of columns of these types with these values."""
    columns = ", ".join(f"c{number} {code(row[0])}" for number, row in enumerate(rows))
    values = ", ".join(code(row[1]) for row in rows)
    with database.connect() as session:
        for statement in BEFORE[database.kind]:
            session.run(statement)
        session.run(f"CREATE TABLE kinds (id INTEGER PRIMARY KEY, {columns})")
        session.run(f"INSERT INTO kinds VALUES (1, {values})")
    # As a capture is set up by default.
    settings = settings_of(database, options={})
    with open_source(settings) as source:
        source.setup()
        with source.snapshot() as snapshot:
            (table,) = snapshot.tables
            ((_, *fragments),) = [row for some in snapshot.rows(table) for row in some]
        source.remove()
    schema = table_schema(shape_of(EventSettings("shop"), table), database.kind)
    return [
        [*row[:2], f"`{fragment.decode()}`", type_cell(column.type)]
        for row, fragment, column in zip(rows, fragments, schema.columns[1:], strict=True)
    ]


@pytest.mark.parametrize(
    "each",
    [pytest.param(kind, marks=databases.MARKS[kind]) for kind in databases.KINDS],
    indirect=True,
)
def test_each_cell_is_so(each: Database) -> None:
    rows = cells(each.kind)
    assert len(rows) > 10
    for row, wanted in zip(rows, told(each, rows), strict=True):
        assert row[:4] == wanted
