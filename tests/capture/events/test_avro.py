"""Avro events, read by fastavro with the schemas of the registry."""

from __future__ import annotations

import base64
import io
import struct
from collections.abc import Mapping
from typing import Any

import fastavro
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capture.events.batch import Batch
from penstock.capture.events.changes import Events
from penstock.capture.source import UNAVAILABLE, CaptureError, Table
from penstock.client.table_schemas import SCHEMAS_TOPIC, TableColumn, ValueType
from tests.capture.events.samples import (
    ANNE,
    CUSTOMERS,
    NOW_NS,
    SOURCE,
    SOURCE_BYTES,
    STRING,
    change,
    events,
    part,
    records,
    schema_texts,
)

TOPIC = "PostgreSQL_server.public.customers"


def read(schemas: Mapping[int, str], data: bytes | None) -> Any:
    assert data is not None
    magic, id_ = struct.unpack(">bi", data[:5])
    assert magic == 0
    schema = fastavro.parse_schema(orjson.loads(schemas[id_]))
    stream = io.BytesIO(data[5:])
    value = fastavro.schemaless_reader(stream, schema)
    assert stream.read() == b""
    return value


def made(events_: Events, *changes: Any) -> tuple[dict[int, str], list[Any]]:
    """The records of one topic, and the schemas as a reader of the log has them."""
    batch = Batch()
    events_.part(part(*changes), batch)
    topics = records(batch)
    schemas = schema_texts(value for _, value, _ in topics.pop(SCHEMAS_TOPIC))
    (found,) = topics.values()
    return schemas, found


def test_fastavro_reads_what_debezium_would_have_written() -> None:
    schemas, (created, gone, tombstone) = made(
        events(format="avro", tombstones=True),
        change("c", None, ANNE),
        change("d", ANNE, None),
    )
    row = {"id": 1, "first_name": "Anne", "last_name": "Kretchmar", "email": "annek@noanswer.org"}
    assert read(schemas, created[0]) == {"id": 1}
    assert read(schemas, created[1]) == {
        "before": None,
        "after": row,
        "source": {**SOURCE, "origin": None, "origin_lsn": None},
        "transaction": None,
        "op": "c",
        "ts_ms": NOW_NS // 1_000_000,
        "ts_us": NOW_NS // 1_000,
        "ts_ns": NOW_NS,
    }
    assert read(schemas, gone[1])["before"] == row
    assert tombstone[1] is None


def test_an_order_in_the_transaction_and_a_truncate() -> None:
    batch = Batch()
    made_ = events(format="avro", transaction_metadata=True, skip=frozenset())
    made_.part(part(change("c", None, ANNE), change("t", None, None)), batch)
    topics = records(batch)
    schemas = schema_texts(value for _, value, _ in topics.pop(SCHEMAS_TOPIC))
    created, truncated, *_ = topics[TOPIC]
    assert read(schemas, created[1])["transaction"] == {
        "id": "555",
        "total_order": 1,
        "data_collection_order": 1,
    }
    assert read(schemas, truncated[0]) is None
    assert read(schemas, truncated[1])["op"] == "t"


INTS = {
    name: st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    for name, bits in (("int8", 8), ("int16", 16), ("int32", 32), ("int64", 64))
}
PLAIN: list[tuple[ValueType, st.SearchStrategy[Any]]] = [
    *((ValueType(name), values) for name, values in INTS.items()),
    (ValueType("boolean"), st.booleans()),
    (ValueType("double"), st.floats(allow_nan=False, allow_infinity=False)),
    (ValueType("float"), st.floats(width=32, allow_nan=False, allow_infinity=False)),
    (STRING, st.text()),
    (ValueType("bytes"), st.binary()),
    (ValueType("array", items=STRING), st.lists(st.none() | st.text(), max_size=4)),
    (
        ValueType("struct", "a.Point", fields=(("x", ValueType("int64")), ("y", STRING))),
        st.fixed_dictionaries({"x": INTS["int64"], "y": st.none() | st.text()}),
    ),
]


@given(st.data())
def test_values_of_all_types_come_back(data: st.DataObject) -> None:
    chosen = data.draw(st.lists(st.sampled_from(PLAIN), min_size=1, max_size=6))
    optional = data.draw(st.lists(st.booleans(), min_size=len(chosen), max_size=len(chosen)))
    columns = tuple(
        TableColumn(f"c{at}", kind, optional=free)
        for at, ((kind, _), free) in enumerate(zip(chosen, optional, strict=True))
    )
    values = [
        data.draw(st.none() | strategy if free else strategy)
        for (_, strategy), free in zip(chosen, optional, strict=True)
    ]
    row = tuple(
        orjson.dumps(base64.b64encode(value).decode() if isinstance(value, bytes) else value)
        for value in values
    )
    table = Table("d", "s", "t", columns, ("c0",))
    schemas, (record,) = made(events(format="avro"), change("r", None, row, table))
    names = [column.name for column in columns]
    assert read(schemas, record[1])["after"] == dict(zip(names, values, strict=True))
    assert read(schemas, record[0]) == {"c0": values[0]}


def test_decimals_are_avros_own() -> None:
    kind = ValueType(
        "bytes",
        "org.apache.kafka.connect.data.Decimal",
        1,
        {"scale": "2", "connect.decimal.precision": "10"},
    )
    table = Table("d", "s", "t", (TableColumn("id", STRING), TableColumn("price", kind)), ("id",))
    fragment = b'"%b"' % base64.b64encode((1234).to_bytes(2, "big", signed=True))
    schemas, (record,) = made(events(format="avro"), change("c", None, (b'"a"', fragment), table))
    assert str(read(schemas, record[1])["after"]["price"]) == "12.34"


@pytest.mark.parametrize("word", ["NaN", "Inf", "-Inf"])
@pytest.mark.parametrize("is_scaled", [True, False])
def test_a_decimal_that_is_not_a_number_stops_the_capture(word: str, is_scaled: bool) -> None:
    """Avro has no word for it, and null is what the database does not have."""
    number = ValueType("bytes", "org.apache.kafka.connect.data.Decimal", 1, {"scale": "2"})
    fields = (("scale", ValueType("int32")), ("value", ValueType("bytes")))
    variable = ValueType("struct", "io.debezium.data.VariableScaleDecimal", fields=fields)
    kind = number if is_scaled else variable
    table = Table("d", "s", "t", (TableColumn("id", STRING), TableColumn("price", kind)), ("id",))
    fragment = f'"{word}"' if is_scaled else f'{{"scale":0,"value":"{word}"}}'
    row = (b'"a"', fragment.encode())
    with pytest.raises(CaptureError, match=r"s\.t\.price: Avro's decimal cannot say") as caught:
        made(events(format="avro"), change("c", None, row, table))
    assert "decimal.handling.mode" in caught.value.advice


def test_unavailable_values_have_the_type_of_their_column() -> None:
    columns = (
        *CUSTOMERS.columns,
        TableColumn("data", ValueType("bytes")),
        TableColumn("n", ValueType("array", items=ValueType("int32"))),
    )
    table = Table("postgres", "public", "customers", columns, ("id",))
    row = (*ANNE[:3], UNAVAILABLE, UNAVAILABLE, UNAVAILABLE)
    schemas, (record,) = made(events(format="avro"), change("u", None, row, table))
    told = read(schemas, record[1])["after"]
    marker = "__debezium_unavailable_value"
    assert (told["email"], told["data"], told["n"]) == (marker, marker.encode(), None)


def test_a_value_that_is_not_of_its_type_is_named() -> None:
    with pytest.raises(CaptureError, match=r'public\.customers\.id: "x" is no int32'):
        made(events(format="avro"), change("c", None, (b'"x"', *ANNE[1:])))
    batch = Batch()
    made_ = events(format="avro")
    made_.rows(CUSTOMERS, [ANNE], SOURCE_BYTES, batch)
    with pytest.raises(CaptureError, match="source block"):
        made_.rows(CUSTOMERS, [ANNE], b'{"version":1}', batch)
