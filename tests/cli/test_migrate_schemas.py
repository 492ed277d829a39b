"""`penstock migrate` brings the schemas along that events name."""

from __future__ import annotations

import orjson

from penstock.client.connection import Cluster
from penstock.client.table_schemas import PublishedSchemas, TableColumn, TableSchema, ValueType
from penstock.testing.broker import Broker
from tests.cli.migrating import (
    clients,  # noqa: F401
    create,
    fill,
    short_waits,  # noqa: F401
    values,
)
from tests.cli.runner import run
from tests.client.test_published_schemas import publish, record, schema_of


def test_what_events_name_is_found_in_the_target() -> None:
    """Also where the target has schemas of its own; a second run adds nothing."""
    with Broker() as source, Broker() as target:
        old, new = (record("shop.orders-value", n, schema_of("orders", *"ab"[:n])) for n in (1, 2))
        with Cluster(source.bootstrap) as cluster:
            publish(cluster, old, new)
        own = TableSchema("orders", "mysql", (TableColumn("id", ValueType("int32")),), ("id",))
        with Cluster(target.bootstrap) as cluster:
            publish(cluster, record("shop.orders-value", 1, own))
        create(source.bootstrap, "shop.orders")
        fill(
            source.bootstrap,
            "shop.orders",
            [orjson.dumps({"schema_id": each.id, "op": "c"}) for each in (old, new)],
        )
        arguments = ("migrate", "--from", source.bootstrap, "--to", target.bootstrap)
        assert "2 schemas of captured tables" in run(*arguments).ok().err
        assert "schemas of captured tables" not in run(*arguments).ok().err
        events = [orjson.loads(value or b"") for value in values(target.bootstrap, "shop.orders")]
        with Cluster(target.bootstrap) as cluster:
            schemas = PublishedSchemas(cluster)
            found = [schemas.by_id(event["schema_id"]) for event in events]
            assert [len(schema.columns) for schema in found] == [1, 2]
            latest = schemas.latest("shop.orders")
            assert latest is not None
            assert latest.id == new.id
            assert own in [each.schema for each in schemas.history("shop.orders")]
