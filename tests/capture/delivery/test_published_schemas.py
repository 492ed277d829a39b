"""Schemas of real databases' tables in a real log: published before the first event, a new version
with each ALTER TABLE, and what was written under an old one is read with it."""

from __future__ import annotations

import logging
import sqlite3
from base64 import b64decode
from contextlib import closing
from decimal import Decimal
from pathlib import Path
from typing import Any

import orjson
import pytest

from penstock.capture.delivery.capture import Capture
from penstock.capture.delivery.control import send, snapshot_signal
from penstock.capture.delivery.schemas import SchemaTopic
from penstock.capture.source import CaptureError
from penstock.client import topics
from penstock.client.connection import Cluster
from penstock.client.errors import BusyError, refused
from penstock.client.reading import Row
from penstock.client.table_schemas import (
    SCHEMAS_TOPIC,
    AmbiguousSchemaError,
    PublishedSchemas,
    TableSchema,
    ValueType,
    event_schema_id,
)
from penstock.testing.broker import Broker
from penstock.testing.postgres import PostgresServer
from penstock.wire.errors import ErrorCode
from tests.capture.delivery.running import new_name, records
from tests.capture.delivery.test_end_to_end import config, running
from tests.capture.kit.databases import MARKS, Database, Postgres
from tests.waiting import eventually

# How each database changes the column's type, and what it says of it; SQLite only adds a column.
ALTERED = {
    "postgresql": (
        "ALTER TABLE t ALTER amount TYPE numeric(14,4)",
        "amount: numeric(12,2) is now numeric(14,4)",
    ),
    "mysql": (
        "ALTER TABLE t MODIFY amount DECIMAL(14,4)",
        "amount: decimal(12,2) is now decimal(14,4)",
    ),
    "sqlite": ("ALTER TABLE t ADD COLUMN note TEXT", "added note TEXT"),
}


def events(log: str, topic: str) -> list[tuple[int, dict[str, Any]]]:
    """The events of a topic, each with the id of its schema."""
    return [
        (event_schema_id(row.value) or 0, orjson.loads(row.value))
        for row in records(log, topic)
        if row.value is not None
    ]


def amount(row: dict[str, Any], schema: TableSchema) -> Decimal:
    """The amount of a row, read by its schema."""
    (column,) = (each for each in schema.columns if each.name == "amount")
    if column.type.name != "bytes":
        return Decimal(str(row["amount"]))
    number = int.from_bytes(b64decode(row["amount"]), "big", signed=True)
    return Decimal(number).scaleb(-int(column.type.parameters["scale"]))


def schema_records(log: str) -> list[Row]:
    return records(log, SCHEMAS_TOPIC)


@pytest.mark.parametrize(
    "each", [pytest.param(kind, marks=marks) for kind, marks in MARKS.items()], indirect=True
)
def test_an_alter_table_in_the_middle(
    each: Database, log: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock")
    statement, words = ALTERED[each.kind]
    each.run(
        "CREATE TABLE t (id $int PRIMARY KEY, amount DECIMAL(12,2))",
        "CREATE TABLE empty (id $int PRIMARY KEY)",
        "INSERT INTO t VALUES (1, 1.25), (2, -0.5)",
    )
    made = config(each.url)
    topic, name = f"{made.name}.{each.full_name('t')}", each.full_name("t")
    with Cluster(log) as cluster:
        schemas = PublishedSchemas(cluster)
        with running(log, made) as capture:
            eventually(lambda: len(events(log, topic)) == 2)
            # A table without rows has a schema, too.
            latest = schemas.latest(f"{made.name}.{each.full_name('empty')}")
            assert latest is not None
            assert [column.name for column in latest.schema.columns] == ["id"]
            first = schemas.latest(topic)
            assert first is not None
            assert (first.version, first.schema.table, first.schema.key) == (1, name, ("id",))
            assert first.schema.kind == each.kind
            each.run("INSERT INTO t VALUES (3, 7)", statement)
            each.run("INSERT INTO t (id, amount) VALUES (4, 2.75)")
            each.run("UPDATE t SET amount = 8 WHERE id = 3")
            eventually(lambda: len(events(log, topic)) == 5)
            second = schemas.latest(topic)
            assert second is not None
            assert (second.version, second.schema.key) == (2, ("id",))
            ids = [id_ for id_, _ in events(log, topic)]
            assert ids == [first.id] * 3 + [second.id] * 2
            (told,) = (item for item in capture.status().tables if item.table == name)
            assert (told.topic, told.version, told.id) == (topic, 2, second.id)
            assert told.changes == words
            assert f"table {name} has changed: {words}; its events in {topic}" in caplog.text
            # A snapshot beside the stream is written with the schema of now.
            send(cluster, made.name, snapshot_signal(name))
            eventually(lambda: len(events(log, topic)) == 9)
        assert {id_ for id_, _ in events(log, topic)[5:]} == {second.id}
        published = schema_records(log)
        # Another session finds everything as it is.
        _restarted(each, log, made, topic, second.id)
        assert schema_records(log) == published
        for id_, event in events(log, topic):
            schema = schemas.by_id(id_)
            for row in filter(None, (event["before"], event["after"])):
                assert set(row) == {column.name for column in schema.columns}
                wanted = {1: "1.25", 2: "-0.5", 4: "2.75", 5: "0.01"}.get(row["id"])
                assert row["amount"] is None or amount(row, schema) in (
                    map(Decimal, [wanted] if wanted else ["7", "8"])
                )


def _restarted(each: Database, log: str, made: Any, topic: str, id_: int) -> None:
    """Insert, and delete all rows at once: those of the old schema keep it in their deletes."""
    with running(log, made):
        each.run("INSERT INTO t (id, amount) VALUES (5, 0.01)")
        eventually(lambda: len(events(log, topic)) == 10)
        assert events(log, topic)[-1][0] == id_
        each.run("$truncate t")
        eventually(lambda: sum(event["op"] == "d" for _, event in events(log, topic)) == 5)


def test_deletes_of_a_truncate_have_the_schema_of_their_row(
    log: str, shared_postgres: PostgresServer
) -> None:
    """No event of theirs came since the ALTER TABLE: a decimal of two digits is not read as one of
    four."""
    database = Postgres(shared_postgres)
    database.run("CREATE TABLE t (id int PRIMARY KEY, amount numeric(12,2))")
    database.run("INSERT INTO t VALUES (1, 1.25)")
    made = config(database.url)
    topic = f"{made.name}.public.t"
    with running(log, made), Cluster(log) as cluster:
        eventually(lambda: len(events(log, topic)) == 1)
        database.run("ALTER TABLE t ALTER amount TYPE numeric(14,4)")
        database.run("INSERT INTO t VALUES (2, 2.5)", "TRUNCATE t")
        eventually(lambda: len(events(log, topic)) == 4)
        found = events(log, topic)
        gone = {event["before"]["id"]: (id_, event["before"]) for id_, event in found[2:]}
        schemas = PublishedSchemas(cluster)
        assert gone[1][0] == found[0][0] != found[1][0] == gone[2][0]
        assert amount(gone[1][1], schemas.by_id(gone[1][0])) == Decimal("1.25")
        assert amount(gone[2][1], schemas.by_id(gone[2][0])) == Decimal("2.5")
    database.close()


@pytest.fixture
def shop(tmp_path: Path) -> str:
    """A database with two tables of different columns."""
    path = tmp_path / "shop.db"
    with closing(sqlite3.connect(path)) as sql:
        sql.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, item TEXT)")
        sql.execute("CREATE TABLE returns (id INTEGER PRIMARY KEY, why TEXT, day DATE)")
        sql.execute("INSERT INTO orders VALUES (1, 'tea')")
        sql.execute("INSERT INTO returns VALUES (1, 'cold', '2026-11-19')")
        sql.commit()
    return f"sqlite:///{path}"


def new_records(log: str, topic: str, known: int) -> list[Row]:
    """What comes after the records that were known."""
    return eventually(lambda: records(log, topic)[known:])


def columns(schema: TableSchema) -> list[str]:
    return [column.name for column in schema.columns]


def test_tables_that_share_a_topic(log: str, shop: str) -> None:
    made = config(shop, snapshot="initial_only", topics={"*": f"{new_name()}-all"})
    topic = made.events.topics["*"]
    Capture(made, log).run()
    with Cluster(log) as cluster:
        schemas = PublishedSchemas(cluster)
        for id_, event in events(log, topic):
            assert columns(schemas.by_id(id_)) == list(event["after"])
        with pytest.raises(AmbiguousSchemaError, match="orders, returns"):
            schemas.latest(topic)
        assert {each.schema.table for each in schemas.history(topic)} == {"orders", "returns"}


def test_a_topic_with_another_name_and_another_key(log: str, shop: str) -> None:
    """What is published is what events show: the key of the settings, masks, excluded columns."""
    made = config(
        shop,
        snapshot="initial_only",
        include=["returns"],
        routes=[{"pattern": r"(.*)\.returns", "replacement": r"\1-back"}],
        keys={"returns": ["day", "id"]},
        columns={"exclude": ["returns.day"], "mask": {"returns.why": "-"}},
    )
    Capture(made, log).run()
    topic = f"{made.name}-back"
    with Cluster(log) as cluster:
        latest = PublishedSchemas(cluster).latest(topic)
    assert latest is not None
    assert latest.subject == f"{topic}-{made.name}.returns.Envelope"
    ((id_, event),) = events(log, topic)
    assert id_ == latest.id
    assert columns(latest.schema) == list(event["after"]) == ["id", "why"]
    assert latest.schema.columns[1].type == ValueType("string", parameters={"masked": "true"})
    assert latest.schema.key == ("day", "id")
    assert [column.type.name for column in latest.schema.key_columns] == ["string", "int64"]
    (row,) = records(log, topic)
    assert list(orjson.loads(row.key or b"")) == ["day", "id"]


def test_formats_share_the_topic_of_schemas(log: str, shop: str) -> None:
    """The same capture in JSON, in Avro, and in JSON again."""
    found: list[list[Row]] = [[]]
    names: dict[str, Any] = {"snapshot": "always", "include": ["orders"]}
    made = config(shop, **names)
    topic = f"{made.name}.orders"
    for more in ({}, {"format": "avro"}, {}, {"schemas": True}, {"publish_schemas": False}):
        known = sum(map(len, found))
        settings = type(made).from_mapping(
            made.name, {"url": shop, "idle_ms": 10, "control_ms": 10, **names, **more}
        )
        with running(log, settings):
            found.append(new_records(log, topic, known))
    json, avro, again, inline, bare = (rows[-1].value or b"" for rows in found[1:])
    assert event_schema_id(json) == event_schema_id(again)
    assert avro[:1] == b"\0"
    assert list(orjson.loads(inline)) == ["schema", "payload"]
    assert next(iter(orjson.loads(bare))) == "before"
    with Cluster(log) as cluster:
        schemas = PublishedSchemas(cluster)
        latest = schemas.latest(f"{made.name}.orders")
        assert latest is not None
        assert latest.id == event_schema_id(again)
        assert int.from_bytes(avro[1:5], "big") != latest.id
        assert columns(schemas.by_id(latest.id)) == ["id", "item"]


def test_what_is_wrong_with_the_topic_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """One that forgets, and one that may not be used; each with the remedy."""
    with Broker() as broker, Cluster(broker.bootstrap) as cluster:
        topics.create(cluster, SCHEMAS_TOPIC, partitions=1)
        SchemaTopic(cluster, lambda: None)
        assert "cleanup.policy=delete: it will forget schemas" in caplog.text
        assert f"penstock topics alter {SCHEMAS_TOPIC} -c cleanup.policy=compact" in caplog.text

        def refuse() -> None:
            raise refused("making a topic", ErrorCode.TOPIC_AUTHORIZATION_FAILED)

        with pytest.raises(CaptureError, match="TOPIC_AUTHORIZATION_FAILED") as caught:
            SchemaTopic(cluster, refuse)
        assert "publish_schemas = false" in caught.value.advice

        def be_busy() -> None:
            raise refused("making a topic", ErrorCode.NOT_CONTROLLER)

        with pytest.raises(BusyError):
            SchemaTopic(cluster, be_busy)
