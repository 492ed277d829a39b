"""A sink without `fields` follows its table: wider types and new columns while it runs."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pyspark.sql import SparkSession

from penstock.sinks.spec import SinkSpec
from penstock.spark.flows.overseeing import Settings
from penstock.spark.flows.supervisor import Policy
from penstock.spark.sinking.folder import SinkFolder
from penstock.spark.sinking.manager import SinkManager
from penstock.testing.broker import Broker
from penstock.testing.postgres import PostgresServer
from tests.capture.delivery.running import records
from tests.spark.types.tables import captured
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(600)


def test_a_sink_follows_an_alter(
    penstock_spark: SparkSession, shared_postgres: PostgresServer, tmp_path: Path
) -> None:
    url = shared_postgres.create_database()
    with psycopg.connect(url, autocommit=True) as sql, Broker() as broker:
        sql.execute("CREATE TABLE t (id int PRIMARY KEY, price numeric(10,2), n smallint, x date)")
        sql.execute("INSERT INTO t VALUES (1, 1.25, 7, '2026-01-02'), (2, 2.5, 8, 'infinity')")
        with captured(broker.bootstrap, url, "public.t", 2) as topic:
            spec = SinkSpec("t", topic, f"parquet:///{tmp_path}/t")
            policy = Policy(first_pause_s=0.1, longest_pause_s=0.2, max_tries=0)
            manager = SinkManager(
                penstock_spark, [spec], SinkFolder(tmp_path / "data"),
                Settings(broker.bootstrap, policy=policy),
            )  # fmt: skip

            def rows() -> dict[int, Any]:
                manager.step()
                with spec.sink() as sink:
                    if sink.position() is None:
                        return {}
                    found = [row for batch in sink.scan() for row in batch.to_pylist()]
                return {row["id"]: row for row in found}

            def reasons() -> list[bytes | None]:
                manager.step()
                letters = records(broker.bootstrap, f"{topic}.dead")
                return [dict(each.headers)["penstock.error.reason"] for each in letters]

            manager.start()
            try:
                first = {"id": 1, "price": Decimal("1.25"), "n": 7, "x": dt.date(2026, 1, 2)}
                eventually(lambda: rows() == {1: first}, timeout_s=240)
                eventually(lambda: len(reasons()) == 1, timeout_s=60)
                assert reasons() == [b"field x does not fit date32[day]: infinity"]
                sql.execute("ALTER TABLE t ALTER price TYPE numeric(14,4), ALTER n TYPE bigint, "
                            "ADD at timestamptz, DROP x")  # fmt: skip
                sql.execute("INSERT INTO t VALUES (3, 1234567890.1239, 5000000000, "
                            "'2026-11-17 00:00:00.5+01')")  # fmt: skip
                at = dt.datetime(2026, 11, 16, 23, 0, 0, 500_000, dt.UTC)
                third = {"id": 3, "price": Decimal("1234567890.1239"), "n": 5_000_000_000,
                         "x": None, "at": at}  # fmt: skip
                wanted = {1: {**first, "at": None}, 3: third}
                eventually(lambda: rows() == wanted, timeout_s=240)
                sql.execute("ALTER TABLE t ALTER price TYPE text")
                sql.execute("INSERT INTO t VALUES (4, 'much')")

                def failed() -> bool:
                    manager.step()
                    return bool(manager.failed)

                eventually(failed, timeout_s=240)
                [status] = manager.status()
                assert status.error == (
                    "sink 't': column 'price' of table public.t is text; the store has it as "
                    "decimal128(14, 4), which cannot become string"
                )
                assert "penstock sinks rebuild" in status.advice
            finally:
                manager.stop()
                eventually(manager.step, timeout_s=60)
                manager.close()
