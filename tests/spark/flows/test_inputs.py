"""How the inputs of a flow become columns."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.flows.inputs import captured_key

pytestmark = pytest.mark.timeout(600)

# A key as it is in the log, and what a flow sees of it.
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
