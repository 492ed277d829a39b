"""Sinks under a manager, for as long as a test needs them."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from penstock.sinks.spec import SinkSpec
from penstock.spark.flows.overseeing import Settings
from penstock.spark.flows.supervisor import Policy
from penstock.spark.sinking.folder import SinkFolder
from penstock.spark.sinking.manager import SinkManager
from penstock.testing import Broker
from tests.spark.sinking.changelog import Row
from tests.waiting import eventually


def rows_in(path: Path, name: str = "orders") -> dict[int, Row]:
    """The rows of a table of SQLite, by their id."""
    with closing(sqlite3.connect(path)) as connection:
        connection.row_factory = sqlite3.Row
        return {row["id"]: dict(row) for row in connection.execute(f"SELECT * FROM {name}")}


@contextmanager
def managed(
    spark: SparkSession,
    broker: Broker,
    folder: Path,
    specs: list[SinkSpec],
    *,
    once: bool = False,
    tries: int = 3,
) -> Iterator[SinkManager]:
    """Sinks that run, and are stopped in the end."""
    policy = Policy(first_pause_s=0.1, longest_pause_s=0.2, max_tries=tries)
    settings = Settings(broker.bootstrap, once=once, policy=policy)
    manager = SinkManager(spark, specs, SinkFolder(folder), settings)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop()
        eventually(manager.step)
        manager.close()


def until(manager: SinkManager, check: Callable[[], Any]) -> None:
    """Look after the sinks until something is so."""

    def is_so() -> bool:
        manager.step()
        return bool(check())

    eventually(is_so, timeout_s=120)
