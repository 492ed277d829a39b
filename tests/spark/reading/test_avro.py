"""Avro values: fastavro writes them, and what was written is what is read."""

from __future__ import annotations

import io
import random
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import fastavro
import pytest
from pyspark.sql import SparkSession

from penstock.spark import reading
from tests.spark.reading.topics import frame

SCHEMA: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "name", "type": ["null", "string"], "default": None},
        {"name": "price", "type": "double"},
        {"name": "state", "type": {"type": "enum", "name": "State", "symbols": ["NEW", "PAID"]}},
        {"name": "old", "type": ["null", "State"], "default": None},
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "day", "type": {"type": "int", "logicalType": "date"}},
        {
            "name": "total",
            "type": {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2},
        },
        {"name": "uid", "type": {"type": "string", "logicalType": "uuid"}},
        {
            "name": "lines",
            "type": {
                "type": "array",
                "items": {
                    "type": "record",
                    "name": "Line",
                    "fields": [{"name": "sku", "type": "string"}, {"name": "n", "type": "int"}],
                },
            },
        },
        {"name": "tags", "type": {"type": "map", "values": "string"}},
    ],
}
NEWER: dict[str, Any] = {
    "type": "record",
    "name": "Order",
    "fields": [
        {"name": "id", "type": "long"},
        {"name": "note", "type": "string", "default": "-"},
    ],
}
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def encode(schema: Any, row: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), row)
    return out.getvalue()


def order(rng: random.Random) -> dict[str, Any]:
    return {
        "id": rng.randrange(1 << 62),
        "name": rng.choice([None, "x", "größe"]),
        "price": rng.random(),
        "state": rng.choice(["NEW", "PAID"]),
        "old": rng.choice([None, "NEW"]),
        "at": EPOCH + timedelta(milliseconds=rng.randrange(1 << 40)),
        "day": date(2026, 1, 1) + timedelta(days=rng.randrange(1000)),
        "total": Decimal(rng.randrange(1 << 29)).scaleb(-2),
        "uid": UUID(int=rng.getrandbits(128)),
        "lines": [{"sku": f"s{n}", "n": n} for n in range(rng.randrange(3))],
        "tags": {f"t{n}": "v" for n in range(rng.randrange(3))},
    }


def shown(row: Any) -> dict[str, Any]:
    found: dict[str, Any] = {name: row[name] for name in (f["name"] for f in SCHEMA["fields"])}
    found["at"] = found["at"].replace(tzinfo=UTC)
    found["uid"] = UUID(found["uid"])
    found["lines"] = [line.asDict() for line in found["lines"]]
    return found


def test_what_was_written_is_read_and_the_rest_is_said(spark: SparkSession, seed: int) -> None:
    rng = random.Random(seed)
    orders = [order(rng) for _ in range(500)]
    values: list[bytes | None] = [encode(SCHEMA, each) for each in orders]
    cut = values[0]
    assert cut is not None
    values += [cut[: rng.randrange(len(cut))], cut + b"\x00", b"", None, b"\xff" * 30]
    rows = {row.offset: row for row in reading.avro(frame(spark, values), SCHEMA).collect()}
    for number, expected in enumerate(orders):
        assert rows[number]._error is None
        assert shown(rows[number]) == expected
    assert len(rows) == len(values) - 1
    for number in (500, 501, 502, 504):
        assert rows[number]._error
        assert rows[number]._raw.value == values[number]
    assert "1 bytes follow" in rows[501]._error


def test_schema_ids_lead_to_the_schema_of_each_value(spark: SparkSession, seed: int) -> None:
    rng = random.Random(seed)
    row = order(rng)
    values = [
        b"\x00\x00\x00\x00\x07" + encode(SCHEMA, row),
        b"\x00\x00\x00\x00\x08" + encode(NEWER, {"id": 5, "note": "n"}),
        b"\x00\x00\x00\x00\x09" + encode(NEWER, {"id": 5, "note": "n"}),
        encode(NEWER, {"id": 5, "note": "n"}),
        b"\x00\x00",
    ]
    rows = reading.avro(frame(spark, values), NEWER, writers_by_id={7: SCHEMA, 8: NEWER}).collect()
    assert [(each.id, each.note) for each in rows[:2]] == [(row["id"], "-"), (5, "n")]
    assert "schema id 9" in rows[2]._error
    assert rows[3]._error
    assert rows[4]._error


def test_a_value_that_arrow_cannot_hold_is_an_error_of_its_own(spark: SparkSession) -> None:
    schema = {
        "type": "record",
        "name": "T",
        "fields": [{"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}}],
    }
    plain = {"type": "record", "name": "T", "fields": [{"name": "at", "type": "long"}]}
    values = [encode(plain, {"at": 1000}), encode(plain, {"at": 1 << 62})]
    rows = reading.avro(frame(spark, values), schema).collect()
    assert rows[0]._error is None
    assert rows[1]._error is not None


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ('"string"', "not a record"),
        ("{", "not an Avro schema"),
        (
            {
                "type": "record",
                "name": "R",
                "fields": [{"name": "x", "type": ["string", "long"]}],
            },
            "several types",
        ),
        (
            {
                "type": "record",
                "name": "R",
                "fields": [{"name": "next", "type": ["null", "R"]}],
            },
            "contains itself",
        ),
    ],
)
def test_schemas_that_cannot_be_columns(spark: SparkSession, schema: Any, words: str) -> None:
    with pytest.raises(reading.ReadingError, match=words):
        reading.avro(frame(spark, []), schema)
