"""Schemas of tables: what is published is what is read."""

from __future__ import annotations

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.client.table_schemas import (
    SchemaError,
    TableColumn,
    TableSchema,
    ValueType,
)
from tests.harness.profiles import examples

PRIMITIVES = (
    "int8", "int16", "int32", "int64", "float", "double", "boolean", "string", "bytes",
)  # fmt: skip

TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
SEMANTICS = st.none() | st.sampled_from(
    ["io.debezium.time.Date", "org.apache.kafka.connect.data.Decimal", "io.debezium.data.Json"]
)
PARAMETERS = st.dictionaries(TEXTS, TEXTS, max_size=3)
VERSIONS = st.integers(1, 3)


def _nested(inner: st.SearchStrategy[ValueType]) -> st.SearchStrategy[ValueType]:
    fields = st.lists(st.tuples(TEXTS, inner), max_size=4, unique_by=lambda item: item[0])
    return st.builds(
        ValueType, st.just("array"), SEMANTICS, VERSIONS, PARAMETERS, st.none() | inner
    ) | st.builds(
        ValueType,
        st.just("struct"),
        SEMANTICS,
        VERSIONS,
        PARAMETERS,
        st.none(),
        fields.map(tuple),
    )


TYPES = st.recursive(
    st.builds(ValueType, st.sampled_from(PRIMITIVES), SEMANTICS, VERSIONS, PARAMETERS),
    _nested,
    max_leaves=6,
)
COLUMNS = st.lists(
    st.builds(TableColumn, TEXTS, TYPES, st.booleans(), TEXTS),
    max_size=6,
    unique_by=lambda column: column.name,
).map(tuple)


@st.composite
def schemas(draw: st.DrawFn) -> TableSchema:
    columns, key_only = draw(COLUMNS), draw(COLUMNS)
    names = list(dict.fromkeys(column.name for column in (*columns, *key_only)))
    key = draw(st.lists(st.sampled_from(names), unique=True)) if names else []
    kind = draw(st.sampled_from(["postgresql", "mysql", "mariadb", "sqlite"]))
    return TableSchema(draw(TEXTS), kind, columns, tuple(key), key_only)


@given(schemas())
@settings(max_examples=examples(40))
def test_a_schema_survives_its_text(schema: TableSchema) -> None:
    document = orjson.loads(orjson.dumps(schema.as_json_schema()))
    assert TableSchema.from_json_schema(document) == schema


@given(schemas())
@settings(max_examples=examples(30))
def test_the_order_of_properties_is_not_lost_in_a_store_that_sorts(
    schema: TableSchema,
) -> None:
    """Confluent's registry may write a schema's entries in another order."""
    text = orjson.dumps(schema.as_json_schema(), option=orjson.OPT_SORT_KEYS)
    assert TableSchema.from_json_schema(orjson.loads(text)) == schema


@pytest.mark.parametrize(
    ("column", "written"),
    [
        (
            TableColumn("id", ValueType("int32"), optional=False),
            {"type": "integer", "connect.type": "int32", "connect.index": 0},
        ),
        (
            TableColumn(
                "amount",
                ValueType(
                    "bytes",
                    "org.apache.kafka.connect.data.Decimal",
                    parameters={"scale": "2", "connect.decimal.precision": "12"},
                ),
            ),
            {
                "oneOf": [
                    {"type": "null"},
                    {
                        "type": "string",
                        "title": "org.apache.kafka.connect.data.Decimal",
                        "connect.type": "bytes",
                        "connect.version": 1,
                        "connect.parameters": {"scale": "2", "connect.decimal.precision": "12"},
                    },
                ],
                "connect.index": 0,
            },
        ),
        (
            TableColumn("tags", ValueType("array", items=ValueType("string")), optional=False),
            {
                "type": "array",
                "items": {"oneOf": [{"type": "null"}, {"type": "string"}]},
                "connect.index": 0,
            },
        ),
    ],
    ids=["int", "decimal", "array"],
)  # fmt: skip
def test_it_is_written_as_confluents_converter_writes_it(
    column: TableColumn, written: dict[str, object]
) -> None:
    document = TableSchema("public.t", "postgresql", (column,), ()).as_json_schema()
    assert document["definitions"]["Value"]["properties"] == {column.name: written}


def test_the_key_has_its_own_types() -> None:
    """A masked column is text in rows and a number in the key."""
    masked = TableColumn("id", ValueType("string"))
    number = TableColumn("id", ValueType("int64"), optional=False)
    schema = TableSchema("t", "sqlite", (masked,), ("id",), (number,))
    assert schema.key_columns == (number,)
    assert TableSchema("t", "sqlite", (masked,), ("id",)).key_columns == (masked,)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"type": "object", "properties": {}},
        {"x-penstock": None},
        {"x-penstock": {"table": "t", "kind": "k", "key": []}, "definitions": {"Value": []}},
        {
            "x-penstock": {"table": "t", "kind": "k", "key": [], "native": {"a": ""}},
            "definitions": {"Value": {"properties": {"a": {"type": "date", "connect.index": 0}}}},
        },
    ],
)
def test_another_schema_is_refused(document: dict[str, object]) -> None:
    with pytest.raises(SchemaError):
        TableSchema.from_json_schema(document)
