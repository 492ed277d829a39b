"""Tables and changes for tests of events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import orjson

from penstock.capture.events.batch import Batch, Headers
from penstock.capture.events.changes import Events
from penstock.capture.events.composer import Emptier
from penstock.capture.events.registry import SchemaRegistry
from penstock.capture.events.settings import AVRO, EventSettings
from penstock.capture.events.shape import Shape
from penstock.capture.source import (
    NULL,
    Change,
    Part,
    Row,
    Table,
)
from penstock.client.table_schemas import SchemaRecord, TableColumn, ValueType

NOW_NS = 1_559_033_904_863_841_257
STRING = ValueType("string")

CUSTOMERS = Table(
    "postgres",
    "public",
    "customers",
    (
        TableColumn("id", ValueType("int32"), optional=False),
        TableColumn("first_name", STRING, optional=False),
        TableColumn("last_name", STRING, optional=False),
        TableColumn("email", STRING, optional=False),
    ),
    ("id",),
)
ANNE: Row = (b"1", b'"Anne"', b'"Kretchmar"', b'"annek@noanswer.org"')
KEYLESS = Table("postgres", "public", "notes", (TableColumn("text", STRING),), ())

SOURCE: dict[str, Any] = {
    "version": "3.0.0",
    "connector": "postgresql",
    "name": "PostgreSQL_server",
    "ts_ms": 1559033904863,
    "snapshot": "false",
    "db": "postgres",
    "sequence": '["24023119","24023128"]',
    "ts_us": 1559033904863123,
    "ts_ns": 1559033904863123000,
    "schema": "public",
    "table": "customers",
    "txId": 555,
    "lsn": 24023128,
    "xmin": None,
}
SOURCE_BYTES = orjson.dumps(SOURCE)

Record = tuple[bytes | None, bytes | None, Headers]


def change(op: str, before: Row | None, after: Row | None, table: Table = CUSTOMERS) -> Change:
    return Change(table, op, before, after, SOURCE_BYTES, 1559033904863123)


def part(*changes: Change, **more: Any) -> Part:
    return Part("555", list(changes), {"lsn": 1}, 1559033904863123, **more)


def events(emptier: Emptier | None = None, /, **settings: Any) -> Events:
    """With Avro the schemas are in the batch; with JSON they count as published at once."""
    made = EventSettings(**{"prefix": "PostgreSQL_server", **settings})
    registry = SchemaRegistry()
    return Events(
        made,
        "postgresql",
        clock_ns=lambda: NOW_NS,
        partitions=lambda topic: 3,
        emptier=emptier,
        registry=registry,
        publish=None if made.format == AVRO else registry.pending.clear,
    )


def schema_texts(values: Iterable[bytes | None]) -> dict[int, str]:
    """The schemas in records of their topic, by id."""
    found = map(SchemaRecord.decode, values)
    return {record.id: record.text for record in found if record is not None}


class Holding:
    """A topic that holds these rows: keys, and their last events."""

    def __init__(self, rows: dict[bytes, bytes]) -> None:
        self.known = rows

    def rows(self, shape: Shape, source: bytes, batch: Batch) -> Iterator[tuple[bytes, bytes]]:
        yield from self.known.items()

    def may_leave_rows(self, shape: Shape) -> bool:
        return False

    def cannot(self, shape: Shape) -> None:
        raise AssertionError(shape)


def records(batch: Batch) -> dict[str, list[Record]]:
    """What is in a batch, by topic, in order."""
    found: dict[str, list[Record]] = {}
    for run in filter(lambda item: item.keys, batch.runs):
        headers = run.header_list() or [()] * len(run.keys)
        found.setdefault(run.topic, []).extend(zip(run.keys, run.values, headers, strict=True))
    return found


def composed(made: Events, *changes: Change) -> list[Record]:
    """The records of changes that all go to one topic."""
    batch = Batch()
    made.part(part(*changes), batch)
    topics = records(batch)
    assert len(topics) <= 1
    return next(iter(topics.values()), [])


def parsed(record: Record) -> Any:
    assert record[1] is not None
    return orjson.loads(record[1])


def row_of(table: Table, **values: Any) -> Row:
    """A row with these values, null elsewhere."""
    return tuple(
        orjson.dumps(values[column.name]) if column.name in values else NULL
        for column in table.columns
    )
