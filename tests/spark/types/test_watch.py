"""A flow says once which columns its table got since it began."""

from __future__ import annotations

import logging

import pytest

from penstock.client.connection import Cluster
from penstock.client.table_schemas import TableColumn, TableSchema, ValueType
from penstock.spark.flows import published
from penstock.spark.flows.declare import Reading, Stream
from penstock.spark.flows.published import SchemaWatch
from penstock.spark.reading import captured
from penstock.testing import Broker
from penstock.testing.captured_rows import publish


def table(*names: str) -> TableSchema:
    columns = tuple(TableColumn(name, ValueType("int64")) for name in names)
    return TableSchema("public.t", "postgresql", columns, ("id",))


def test_new_columns_are_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(published, "WATCH_S", 0.0)
    with Broker() as broker, Cluster(broker.bootstrap) as cluster:
        first = table("id", "a")
        known = captured.as_json({publish(broker.bootstrap, "t", first): first})
        declared = Stream("t", Reading("debezium", "", {"written": False, "schemas": known}))
        by_hand = Stream("t", Reading("debezium", "", {"written": True, "schemas": known}))
        watch = SchemaWatch(cluster, "sums", [("t", declared), ("t", by_hand)])
        with caplog.at_level(logging.WARNING, "penstock"):
            watch.look()
            assert caplog.messages == []
            publish(broker.bootstrap, "t", table("id", "a", "b", "c"))
            watch.look()
            watch.look()
        [message] = caplog.messages
        assert message.startswith("flow sums: the table of t has new columns: b, c. ")
