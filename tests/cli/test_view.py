"""`penstock view`: made from SQL, kept as files of the project, refused with the place."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from pyspark import SparkContext
from pyspark.sql import SparkSession

from penstock.capture.events.registry import SchemaRegistry
from penstock.client.table_schemas import (
    JSON_SCHEMA,
    SCHEMAS_TOPIC,
    TableColumn,
    TableSchema,
    ValueType,
    subject_of,
)
from penstock.spark.flows.declare import Stream
from penstock.spark.views import definitions
from tests.cli.runner import Ran, run

ORDERS = "orders=shop.orders(id bigint, customer bigint, amount decimal(10,2)) key id"
CUSTOMERS = "customers=shop.customers(id bigint, country string) key id"
REVENUE = """revenue AS SELECT country, sum(amount) AS revenue
FROM orders o JOIN customers c ON o.customer = c.id GROUP BY country"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "penstock.toml"
    file.write_text(f'[views.tables]\ncustomers = "{CUSTOMERS.split("=", 1)[1]}"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)
    return tmp_path


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """The types are not checked: that would start Spark."""
    monkeypatch.setenv("JAVA_HOME", os.devnull)


def refused(*args: str) -> Ran:
    ran = run("view", *args)
    assert ran.status == 1
    assert "Traceback" not in ran.err
    return ran


@pytest.mark.usefixtures("no_java")
def test_a_view_is_made_shown_and_dropped(project: Path) -> None:
    assert "no views" in run("view", "list").ok().err
    made = run("view", "create", REVENUE, "-t", ORDERS).ok()
    assert "by country" in made.err
    [view] = run("view", "list", "--json").ok().json
    assert (view["topic"], view["key"], view["columns"]) == (
        "revenue", ["country"], ["country", "revenue"],
    )  # fmt: skip
    assert [each["topic"] for each in view["tables"]] == ["shop.orders", "shop.customers"]
    assert "inner join on o.customer = c.id" in run("view", "describe", "revenue").ok().out
    assert "already" in refused("create", REVENUE, "-t", ORDERS).err
    run("view", "create", REVENUE, "-t", ORDERS, "--replace", "--topic", "r2").ok()
    # As a flow, it reads the tables and writes the topic.
    [flow] = definitions.flows(project)
    assert [each.topic for each in flow.inputs] == ["shop.orders", "shop.customers"]
    assert all(isinstance(e, Stream) and e.reading.format == "debezium" for e in flow.inputs)
    assert [(each.name, each.compacted) for each in flow.topics] == [("r2", True)]
    assert flow.where == f"{project / 'views' / 'revenue.sql'}:1"
    run("view", "drop", "revenue", "--yes").ok()
    assert "has no view 'revenue'" in refused("describe", "revenue").err


def test_what_cannot_be_maintained_is_told_with_its_place(
    project: Path, penstock_spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The session of all tests goes on telling what it told.
    monkeypatch.setattr(penstock_spark.sparkContext, "setLogLevel", lambda _: None)
    checked = run("view", "check", REVENUE, "-t", ORDERS).ok()
    assert "asking Spark whether the types fit" in checked.err
    told = refused("check", "top AS SELECT id\nFROM orders ORDER BY id LIMIT 3", "-t", ORDERS).err
    assert "2:13: ORDER BY cannot be maintained" in told
    assert "  FROM orders ORDER BY id LIMIT 3\n              ^\n" in told
    assert not (project / "views").exists()
    told = refused("create", "n AS SELECT id,\n  upperr(id) AS u FROM orders", "-t", ORDERS).err
    assert "2:3: there is no function upperr" in told
    assert not (project / "views").exists()
    assert "a view is NAME AS SELECT" in refused("check", "SELECT 1").err
    wrong = "t=shop.orders(id bigint) key idd"
    assert "no column 'idd'" in refused("check", "a AS SELECT id FROM t", "-t", wrong).err
    assert "is no table" in refused("check", "a AS SELECT id FROM t", "-t", "(").err
    (project / "penstock.toml").write_text("[views]\nother = 1\n")
    assert "line 2" in refused("check", "a AS SELECT id FROM t", "-t", ORDERS).err


def test_a_spark_that_was_started_for_the_types_is_stopped(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[bool] = []
    context = SimpleNamespace(setLogLevel=lambda _: None)
    spark = SimpleNamespace(sparkContext=context, stop=lambda: stopped.append(True))
    monkeypatch.setattr("penstock.spark.session", lambda *_, **__: spark)
    monkeypatch.setattr("penstock.spark.java.find_java", lambda: None)
    # There may be one of other tests in this process.
    monkeypatch.setattr(SparkContext, "_active_spark_context", None)
    monkeypatch.setattr(definitions.Definition, "check_types", lambda *_: None)
    run("view", "check", REVENUE, "-t", ORDERS).ok()
    assert stopped == [True]


def test_run_wants_something_to_run(project: Path) -> None:
    ran = run("run", "--views")
    assert ran.status == 1
    assert "the project has no views" in ran.err
    assert "no FILE" in run("run").err


@pytest.mark.usefixtures("no_java")
def test_columns_are_read_from_the_topic(project: Path, at: str) -> None:
    topic = f"shop-{uuid4().hex[:8]}"
    producer = Producer({"bootstrap.servers": at, "log_level": 0})

    def change(**row: Any) -> bytes:
        return json.dumps({"op": "c", "before": None, "after": row}).encode()

    run("topics", "create", topic, "--bootstrap", at).ok()
    assert "no records" in refused("check", f"v AS SELECT id FROM `{topic}`", "--bootstrap", at).err
    for number, value in enumerate([change(id=1, a=None, f=1), change(id=2, a="x", f=1.5), None]):
        producer.produce(topic, value, json.dumps({"id": number}).encode())
    producer.flush(60)
    args = ("check", "v AS SELECT a, f FROM t", "-t", f"t={topic}", "--bootstrap", at)
    told = run("view", *args).ok()
    assert f"t = {topic}(id bigint, a string, f double) key id" in told.err
    assert "_t_id" in told.out
    # What a capture has published counts for more than what the records look like.
    published = SchemaRegistry()
    columns = (TableColumn("id", ValueType("int64"), optional=False),
               TableColumn("day", ValueType("int32", "io.debezium.time.Date")))  # fmt: skip
    schema = TableSchema("public.t", "postgresql", columns, ("id",))
    published.id_of(subject_of(topic), schema.as_json_schema(), JSON_SCHEMA)
    for record in published.take_pending():
        key, value = record.encode()
        producer.produce(SCHEMAS_TOPIC, value, key)
    producer.flush(60)
    told = run("view", "check", "v AS SELECT day FROM t", *args[2:]).ok()
    assert f"t = {topic}(id bigint, day date) key id" in told.err
