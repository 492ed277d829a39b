"""What the process has imported that others are forked from.

It is one for each process of the tests, `multiprocessing` starts it when it is first needed, and
what it has imported by then need not be imported by any of those that it forks.
"""

from __future__ import annotations

import multiprocessing
from typing import Final

_MODULES: Final = [
    "penstock.capture.delivery.capture",
    "penstock.capture.mysql.source",
    "penstock.capture.postgres.source",
    "penstock.capture.sqlite.source",
    "penstock.sinks.cache",
    "penstock.sinks.delta",
    "penstock.sinks.opensearch",
    "penstock.sinks.parquet",
    "penstock.sinks.search",
    "penstock.sinks.sql.duckdb",
    "penstock.sinks.sql.mysql",
    "penstock.sinks.sql.postgresql",
    "penstock.sinks.sql.sqlite",
    "penstock.sinks.webhook",
    "penstock.testing.sinks",
    "tests.capture.kit.capturing",
    "tests.capture.kit.warm",
]


def preload() -> None:
    """Say what it imports; it must be said before the first process is forked."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(_MODULES)
