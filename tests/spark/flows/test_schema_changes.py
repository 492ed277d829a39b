"""ALTER TABLE of a captured table, for the flows and sinks that read it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from penstock.client.table_schemas import PublishedSchema, TableColumn, TableSchema, ValueType
from penstock.spark.flows import published
from penstock.spark.flows.declare import Flow, flow, stream, topic
from penstock.spark.flows.errors import DeclarationError
from penstock.spark.flows.manager import Manager, _describe
from penstock.spark.flows.schema_changes import compare
from penstock.testing.flows import FlowTester
from tests.spark.flows.test_manager import WAIT_S, running, status, wait_for
from tests.waiting import eventually

OLD = "id bigint, total bigint, note string"


def column(name: str, kind: str = "string", native: str = "text") -> TableColumn:
    return TableColumn(name, ValueType(kind), True, native)


def table(*columns: TableColumn, key: tuple[str, ...] = ("id",)) -> TableSchema:
    return TableSchema("public.orders", "postgresql", columns, key)


def test_a_change_is_told_in_the_words_of_the_database() -> None:
    id_, note = column("id", "int64", "bigint"), column("note")
    total = column("total", "int32", "integer")
    assert compare(table(id_, total), table(id_, total)) is None
    added = compare(table(id_), table(id_, note))
    assert added is not None
    assert str(added) == "table public.orders was altered: column note (text) is new"
    assert added.lost == frozenset()
    assert (
        '`penstock capture snapshot public.orders --where "note IS NOT NULL"`'
        in added.snapshot_advice
    )
    wider = compare(table(id_, total), table(id_, column("total", "int64", "bigint")))
    assert wider is not None
    assert str(wider).endswith("column total was integer and is bigint")
    assert (wider.lost, wider.snapshot_advice) == (frozenset({"total"}), "")
    renamed = compare(table(id_, note), table(id_, column("remark")))
    assert renamed is not None
    assert "column note is gone (renamed to remark?)" in str(renamed)
    assert renamed.lost == {"note"}
    other = compare(table(id_, note), table(id_, total))
    assert other is not None
    assert "renamed" not in str(other)
    keyed = compare(table(id_, note), table(id_, note, key=("id", "note")))
    assert keyed is not None
    assert str(keyed).endswith("its key was (id) and is (id, note)")


def test_a_policy_that_is_not_known_is_refused() -> None:
    with pytest.raises(DeclarationError, match="on_schema_change='stay' is not known"):
        stream("shop.orders", on_schema_change="stay")  # type: ignore[arg-type]


def picking(policy: Any, column: str, name: str, schema: str | None = None) -> Flow:
    """A flow that reads a column, of all of them or of those that it says."""

    @flow(
        inputs=stream(
            "shop.orders", debezium=schema, on_schema_change=policy, dead_letters=f"{name}.dead"
        ),
        output=topic(name),
        name=name,
    )
    def made(orders: DataFrame) -> DataFrame:
        return orders.select("_after.id", f"_after.{column}")

    return made


def noted(manager: Manager, name: str) -> Any:
    """The status of a flow that runs, once there is something to say of it."""
    found = status(manager, name)
    return found if found is not None and found.error and found.state == "running" else None


@pytest.mark.timeout(900)
def test_an_alter_while_flows_run(
    tester: FlowTester, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(published, "WATCH_S", 0.1)

    def feed(schema: str, **row: Any) -> None:
        tester.feed_table("shop.orders", [row], key="id", schema=schema)

    feed(OLD, id=1, total=5, note="a")
    flows = (
        picking("stop", "note", "notes"),
        picking("stop", "total", "totals", "id bigint, total bigint"),
        picking("ignore", "note", "kept"),
    )
    with caplog.at_level(logging.WARNING), running(tester, *flows) as manager:
        for each in flows:
            eventually(lambda name=each.name: len(tester.rows(name)) == 1, WAIT_S)  # type: ignore[misc]
        # note is dropped, and extra comes.
        feed("id bigint, total bigint, extra int", id=2, total=6, extra=7)
        failed = wait_for(manager, "notes", "failed")
        assert "column note is gone" in failed.error
        assert 'on_schema_change="ignore"' in failed.advice
        # Nothing was written that the flow did not mean.
        assert tester.rows("notes") == [{"id": 1, "note": "a"}]
        # Those that do not read it go on, and say what is new.
        eventually(lambda: len(tester.rows("totals")) == 2, WAIT_S)
        going = eventually(lambda: noted(manager, "totals"), WAIT_S)
        assert "column extra (int) is new, column note is gone" in going.error
        assert '--where "extra IS NOT NULL"' in going.advice
        assert "It gets what is new" in noted(manager, "kept").advice
        # Who chose so goes on without it.
        eventually(lambda: len(tester.rows("kept")) == 2, WAIT_S)
        assert tester.rows("kept")[1] == {"id": 2, "note": None}
    told = [each.getMessage() for each in caplog.records]
    assert sum("flow 'totals': table" in each for each in told) == 1


def test_dead_letters_of_a_stream_that_follows_its_table_are_known() -> None:
    """Before it is known whether it has a schema: who lists them asks what was written down."""

    @flow(inputs=stream("shop.orders"), output=topic("out"))
    def read(orders: DataFrame) -> DataFrame:
        return orders

    assert read.dead_letter_topics == {"shop.orders.dead"}
    assert read.of_generation(2).dead_letter_topics == {"shop.orders.dead.v2"}
    assert _describe(read.streams[0]).endswith("unreadable ones to shop.orders.dead")


def test_a_column_that_went_while_nothing_ran_is_told_at_the_start(
    penstock_spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> None:
    id_ = column("id", "int64", "bigint")
    history = [
        PublishedSchema(number, number, "shop.orders-value", table(id_, column(name)))
        for number, name in enumerate(("note", "remark"), 1)
    ]
    declared = stream("shop.orders", debezium="id bigint, note string")
    published._check(declared, history, history[-1])
    assert "table public.orders has no column note any more: it is null in rows" in caplog.text
    assert "its columns are id, remark" in caplog.text
    caplog.clear()
    published._check(declared, history[:1], history[0])
    assert caplog.text == ""
