"""docs/types.md, the half from the event to flows and stores, cell by cell."""

from __future__ import annotations

import datetime as dt
import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pytest
from deltalake import Schema as DeltaSchema
from pyspark.sql.pandas.types import from_arrow_type

from penstock.client.table_schemas import ValueType
from penstock.sinks import Schema
from penstock.sinks.fields import from_text
from penstock.sinks.rows import encoded_rows
from penstock.sinks.schema import is_json
from penstock.sinks.sql.base import SqlSink
from penstock.sinks.stores import open_sink
from penstock.spark.reading.wire_values import conversion, flow_type, stored_field, wire_type

PAGE = Path(__file__).parents[3] / "docs" / "types.md"
_CODE = re.compile(r"`([^`]*)`")
_KIND = re.compile(
    r"`(?P<name>\w+)`(?: `(?P<semantic>[a-z]+\.[\w.]+)`)?"
    r"(?: \((?P<fields>[^)]*)\))?(?P<parameters>(?:,? `\w[\w.]*=[^`]*`)*)"
)


def cells(heading: str) -> list[list[str]]:
    section = PAGE.read_text(encoding="utf-8").split(f"\n{heading}\n")[1]
    lines = re.split(r"\n#+ ", section)[0].splitlines()
    rows = [
        re.split(r"(?<!\\)\|", line.strip().strip("|")) for line in lines if line.startswith("| `")
    ]
    return [[cell.strip() for cell in row] for row in rows]


def kind_of(cell: str) -> ValueType:
    """The type that a cell of the column "in the schema" says."""
    outer, _, items = cell.partition(" of ")
    if items:
        return ValueType(_CODE.findall(outer)[0], items=kind_of(items))
    found = _KIND.fullmatch(cell)
    assert found, cell
    semantic = found["semantic"]
    if semantic is not None and not semantic.startswith("org."):
        semantic = f"io.debezium.{semantic}"
    parameters = dict(each.split("=", 1) for each in _CODE.findall(found["parameters"]))
    fields = [each.split() for each in (found["fields"] or "").split(", ") if each]
    return ValueType(
        found["name"],
        semantic,
        parameters=parameters,
        fields=tuple((name, ValueType(kind)) for name, kind in fields),
    )


def shown(value: Any) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(shown, value))}]"
    if isinstance(value, dict):
        return f"({', '.join(map(shown, value.values()))})"
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    if isinstance(value, dt.datetime):
        return value.isoformat().replace("+00:00", "Z")
    if isinstance(value, bool | None):
        return "null" if value is None else str(value).lower()
    return format(value, "f") if isinstance(value, Decimal) else str(value)


NAMES = {
    pa.bool_(): "boolean", pa.int8(): "tinyint", pa.int16(): "smallint", pa.int32(): "int",
    pa.int64(): "bigint", pa.float32(): "float", pa.float64(): "double", pa.string(): "string",
    pa.binary(): "binary", pa.date32(): "date", pa.time64("us"): "time",
    pa.timestamp("us"): "timestamp_ntz", pa.timestamp("us", "UTC"): "timestamp",
}  # fmt: skip


def store_name(field: pa.Field) -> str:
    if is_json(field):
        return "json"
    if pa.types.is_decimal(field.type):
        return f"decimal({field.type.precision},{field.type.scale})"
    return NAMES[field.type]


def read(kind: ValueType, value: Any, into: pa.DataType, *, as_json: bool = False) -> Any:
    convert = conversion(kind, into, json=as_json)
    assert convert is not None
    if kind.name in ("float", "double") and isinstance(value, str):
        value = float(value)
    made, unfit = convert(pa.array([value], wire_type(kind)))
    return "dead letter" if unfit is not None else made[0].as_py()


@pytest.mark.parametrize("row", cells("## In flows and stores"), ids=lambda row: row[0])
def test_what_flows_and_stores_have(row: list[str]) -> None:
    kind = kind_of(row[0])
    event = orjson.loads(_CODE.findall(row[1])[0])
    field = stored_field("c", kind)
    native, stored = flow_type(kind), read(kind, event, field.type, as_json=is_json(field))
    value = read(kind, event, native)
    assert row[2:6] == [
        f"`{from_arrow_type(native).simpleString()}`",
        "dead letter" if value == "dead letter" else f"`{shown(value)}`",
        f"`{store_name(field)}`",
        "dead letter" if stored == "dead letter" else f"`{shown(stored)}`",
    ]


@pytest.mark.parametrize("row", cells("### What stores make of it"), ids=lambda row: row[0])
def test_what_stores_make_of_it(row: list[str], tmp_path: Path) -> None:
    [field] = Schema.of(
        [pa.field("id", pa.int64()), *from_text(f"c {_CODE.findall(row[0])[0]}")], "id"
    ).fields[1:]
    found = []
    urls = (
        f"sqlite:///{tmp_path}/x.db",
        "postgresql://x/y",
        "mariadb://x/y",
        f"duckdb:///{tmp_path}/y",
    )
    for url in urls:
        with open_sink(url, {}, name="t") as sink:
            assert isinstance(sink, SqlSink)
            # What MariaDB and MySQL say only when they are connected to.
            sink.__dict__["_collation"] = ""
            found.append(
                re.sub(r" CHARACTER SET.*| COLLATE.*", "", sink._type(field, is_key=False))
            )
    from penstock.sinks.delta import _stored

    delta = DeltaSchema.from_arrow(_stored(Schema((pa.field("c", field.type),), ())))
    found.append(str(json.loads(delta.to_json())["fields"][0]["type"]))
    value = (
        SAMPLES[field.type if not is_json(field) else "json"]
        if not pa.types.is_decimal(field.type)
        else Decimal("1.10")
    )
    [encoded] = encoded_rows(pa.table({"c": pa.array([value], field.type)}))
    text = json.dumps(json.loads(encoded)["c"])
    assert row[1:] == [*(f"`{each}`" for each in found), f"`{field.type}`", f"`{text}`"]


AT = dt.datetime(2026, 11, 17, 10, 11, 12, 345678, dt.UTC)
SAMPLES: dict[Any, Any] = {
    pa.bool_(): True, pa.int16(): 7, pa.int32(): 7, pa.int64(): 7, pa.float32(): 1.5,
    pa.float64(): 1.5, pa.string(): "tea", "json": '{"a":1.50}', pa.binary(): b"\x00\xff",
    pa.date32(): AT.date(), pa.time64("us"): AT.time(), pa.timestamp("us"): AT.replace(tzinfo=None),
    pa.timestamp("us", "UTC"): AT,
}  # fmt: skip
