"""How the inputs of a flow become columns."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.flows.declare import Stream, Table, stream, table
from penstock.spark.flows.errors import DeclarationError
from penstock.spark.flows.inputs import check_schema
from penstock.spark.flows.table_inputs import captured_key

pytestmark = pytest.mark.timeout(600)

# A key as it is in the log, and what a flow sees of it.
HERE = "tests/spark/flows/test_inputs.py"
KEYS = {
    '{"id":"ann"}': "ann",
    '{"id": "a \\"b\\" é"}': 'a "b" é',
    '{"id":7}': "7",
    '{"id":12345678901234567890}': "12345678901234567890",
    '{"id":true}': "true",
    '{"id":null}': None,
    '{"shop":1,"id":"ann"}': '{"shop":1,"id":"ann"}',
    '{"schema":{"type":"struct"},"payload":{"id":"ann"}}': "ann",
    '{"schema":{"type":"struct"},"payload":{"shop":1,"id":"a"}}': '{"shop":1,"id":"a"}',
    # Columns that are only named like that.
    '{"schema":"x","payload":"y"}': '{"schema":"x","payload":"y"}',
    # No JSON objects.
    "ann": "ann",
    "7": "7",
    '"ann"': '"ann"',
    '["ann"]': '["ann"]',
    "{": "{",
    "{}": "{}",
    "": "",
}


def test_a_captured_key_of_one_column_is_its_value(spark: SparkSession) -> None:
    rows = spark.createDataFrame([(key,) for key in KEYS], "key string")
    found = rows.select("key", captured_key(F.col("key")).alias("seen")).collect()
    assert {row["key"]: row["seen"] for row in found} == KEYS


@pytest.mark.usefixtures("spark")
def test_a_schema_that_cannot_be_read_is_said_with_its_place() -> None:
    wrong: dict[str, Stream | Table] = {
        """stream 'clicks', json='user string, page strng': .*"STRNG\"""": stream(
            "clicks", json="user string, page strng"
        ),
        "table 'shop.customers', debezium='id': .*Syntax error": table(
            "shop.customers", debezium="id"
        ),
        "table 'people', avro='{': not an Avro schema": table("people", avro="{"),
        "stream 'clicks', json=' ': it has no fields": stream("clicks", json=" "),
        "stream 'clicks', time='when': there is no such column": stream(
            "clicks", json="user string, at timestamp", time="when"
        ),
        "stream 'clicks', time='at.x': there is no such column": stream(
            "clicks", json="user string, at timestamp", time="at.x"
        ),
    }
    for words, declared in wrong.items():
        with pytest.raises(DeclarationError, match=rf"^{HERE}:\d+: {words}") as caught:
            check_schema(declared)
        assert "\n" not in str(caught.value)
        assert "SQLSTATE" not in str(caught.value)
        assert "`penstock run`" in caught.value.advice
    for good in (
        stream("clicks", json="user string"),
        stream("clicks"),
        stream("clicks", text=True),
        table("people", debezium="id bigint not null, tags array<string>"),
        table("people", avro='{"type":"record","name":"r","fields":[{"name":"a","type":"int"}]}'),
    ):
        check_schema(good)


@pytest.mark.usefixtures("spark")
def test_the_time_of_a_changelog_is_not_that_of_its_rows() -> None:
    with pytest.raises(DeclarationError, match="no such column") as caught:
        check_schema(stream("names", changelog="id bigint, at timestamp", time="at"))
    assert "_after.at" in caught.value.advice
    for good in ("_after.at", "_timestamp", "_AFTER.At"):
        check_schema(stream("names", changelog="id bigint, at timestamp", time=good))
