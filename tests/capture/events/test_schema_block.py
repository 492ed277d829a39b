"""The schema block compared with what Kafka Connect's converter writes for Debezium's schemas."""

from __future__ import annotations

from typing import Any

import orjson

from penstock.capture.source import Table
from penstock.client.table_schemas import TableColumn, ValueType
from tests.capture.events.samples import ANNE, change, composed, events, parsed


def field(kind: str, field: str, optional: bool = False, **more: Any) -> dict[str, Any]:
    return {"type": kind, "optional": optional, **more, "field": field}


ROW = [
    field("int32", "id"),
    field("string", "first_name"),
    field("string", "last_name"),
    field("string", "email"),
]
NAME = "PostgreSQL_server.public.customers"
SNAPSHOTS = "true,first,first_in_data_collection,last_in_data_collection,last,false,incremental"
SOURCE_FIELDS = [
    field("string", "version"),
    field("string", "connector"),
    field("string", "name"),
    field("int64", "ts_ms"),
    {
        "type": "string",
        "optional": True,
        "name": "io.debezium.data.Enum",
        "version": 1,
        "parameters": {"allowed": SNAPSHOTS},
        "default": "false",
        "field": "snapshot",
    },
    field("string", "db"),
    field("string", "sequence", True),
    field("int64", "ts_us", True),
    field("int64", "ts_ns", True),
    field("string", "schema"),
    field("string", "table"),
    field("int64", "txId", True),
    field("int64", "lsn", True),
    field("int64", "xmin", True),
    field("string", "origin", True),
    field("int64", "origin_lsn", True),
]


def test_the_value_carries_its_schema() -> None:
    (record,) = composed(events(schemas=True), change("c", None, ANNE))
    told = parsed(record)
    assert list(told) == ["schema", "payload"]
    assert told["payload"]["after"]["first_name"] == "Anne"
    row = {"type": "struct", "fields": ROW, "optional": True, "name": f"{NAME}.Value"}
    assert told["schema"] == {
        "type": "struct",
        "fields": [
            {**row, "field": "before"},
            {**row, "field": "after"},
            {
                "type": "struct",
                "fields": SOURCE_FIELDS,
                "optional": False,
                "name": "io.debezium.connector.postgresql.Source",
                "version": 1,
                "field": "source",
            },
            {
                "type": "struct",
                "fields": [
                    field("string", "id"),
                    field("int64", "total_order"),
                    field("int64", "data_collection_order"),
                ],
                "optional": True,
                "name": "event.block",
                "version": 1,
                "field": "transaction",
            },
            field("string", "op"),
            field("int64", "ts_ms", True),
            field("int64", "ts_us", True),
            field("int64", "ts_ns", True),
        ],
        "optional": False,
        "name": f"{NAME}.Envelope",
        "version": 2,
    }


def test_the_key_carries_its_schema() -> None:
    (record,) = composed(events(schemas=True), change("c", None, ANNE))
    assert orjson.loads(record[0] or b"") == {
        "schema": {
            "type": "struct",
            "fields": [field("int32", "id")],
            "optional": False,
            "name": f"{NAME}.Key",
        },
        "payload": {"id": 1},
    }


def test_types_of_all_kinds() -> None:
    decimal = ValueType("bytes", "org.apache.kafka.connect.data.Decimal", 1, {"scale": "2"})
    table = Table(
        "d",
        "s-1",
        "1t",
        (
            TableColumn("id", ValueType("int64"), optional=False),
            TableColumn("at", ValueType("int64", "io.debezium.time.MicroTimestamp")),
            TableColumn("tags", ValueType("array", items=ValueType("string"))),
            TableColumn("price", decimal),
            TableColumn(
                "point",
                ValueType(
                    "struct",
                    "io.debezium.data.geometry.Point",
                    fields=(("x", ValueType("double")), ("y", ValueType("double"))),
                ),
            ),
        ),
        ("id",),
    )
    row = (b"1", b"2", b'["a"]', b'"AA=="', b'{"x":1.0,"y":2.0}')
    (record,) = composed(events(schemas=True), change("c", None, row, table))
    told = parsed(record)["schema"]
    assert told["name"] == "PostgreSQL_server.s_1._1t.Envelope"
    assert told["fields"][1]["fields"][1:] == [
        field("int64", "at", True, name="io.debezium.time.MicroTimestamp", version=1),
        {
            "type": "array",
            "items": {"type": "string", "optional": True},
            "optional": True,
            "field": "tags",
        },
        field(
            "bytes",
            "price",
            True,
            name="org.apache.kafka.connect.data.Decimal",
            version=1,
            parameters={"scale": "2"},
        ),
        {
            "type": "struct",
            "fields": [field("double", "x", True), field("double", "y", True)],
            "optional": True,
            "name": "io.debezium.data.geometry.Point",
            "version": 1,
            "field": "point",
        },
    ]
