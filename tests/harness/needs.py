"""Which tests need more than their own process: Java, a database server, any other process.

The marks `java` and `databases` follow from the fixtures that a test uses; a test that starts such
a process in another way carries the mark itself, and one that starts any other process is marked
`processes`. `make check` runs the tests with none of the three marks.

A guard keeps the marks true: a test that starts what it is not marked for fails. Tests marked
`proof` may start anything: `make check` never runs them.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import PurePath
from typing import Any, Final

import pytest

from penstock.testing.mysql import mysql_home

JAVA: Final = "java"
DATABASES: Final = "databases"
PROCESSES: Final = "processes"
PROOF: Final = "proof"
SPARK_FIXTURES: Final = frozenset({"penstock_spark"})
FIXTURES: Final = {
    JAVA: SPARK_FIXTURES | {"kafka_tools", "apache_kafka", "opensearch"},
    DATABASES: frozenset({"postgres_of", "shared_mariadb", "shared_mysql", "shared_redis"}),
}
PROGRAMS: Final = {
    "java": JAVA,
    "spark-submit": JAVA,
    "spark-class": JAVA,
    "postgres": DATABASES,
    "initdb": DATABASES,
    "mariadbd": DATABASES,
    "mysqld": DATABASES,
    "redis-server": DATABASES,
    "redis-check-rdb": DATABASES,
}

# `scripts/mysql-server.sh` fetches MySQL for Linux on x86-64 alone. There it must not be missing.
_HAS_MYSQL: Final = sys.platform == "linux" and platform.machine() == "x86_64"
where_mysql_is: Final = pytest.mark.skipif(
    not _HAS_MYSQL and mysql_home() is None, reason="MySQL is fetched for Linux on x86-64 alone"
)


def add_marks(items: list[pytest.Item]) -> None:
    """Mark the tests whose fixtures need Java or a database server."""
    for item in items:
        fixtures = set(getattr(item, "fixturenames", ()))
        for mark, names in FIXTURES.items():
            if fixtures & names:
                item.add_marker(mark)


def needs_of(item: pytest.Item) -> frozenset[str]:
    """Those of `java`, `databases` and `processes` that the test is marked with."""
    marks = (JAVA, DATABASES, PROCESSES)
    return frozenset(mark for mark in marks if item.get_closest_marker(mark))


def uses_spark(item: pytest.Item) -> bool:
    """Whether the test uses the Spark session of its process."""
    return not SPARK_FIXTURES.isdisjoint(getattr(item, "fixturenames", ()))


class Guard:
    """Refuses to start what the running test does not say that it needs.

    An audit hook cannot be removed, so there is one for the process, which asks this object.
    """

    def __init__(self) -> None:
        self._item: pytest.Item | None = None
        self._installed = False

    def watch(self, item: pytest.Item | None) -> None:
        """The test that runs now."""
        if not self._installed:
            sys.addaudithook(self._audit)
            self._installed = True
        self._item = item

    def require(self, mark: str, what: str) -> None:
        """Raise unless the running test is marked."""
        item = self._item
        if item is None or item.get_closest_marker(PROOF):
            return
        marks = needs_of(item)
        # Whatever starts a server may start other processes too.
        if mark not in marks and not (mark == PROCESSES and marks):
            raise MissingMarkError(
                f"{item.nodeid} starts {what}: mark it with @pytest.mark.{mark}, "
                "so that `make check` leaves it out"
            )

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and self._item is not None:
            program = PurePath(os.fsdecode(arguments[0] or arguments[1][0])).name
            self.require(PROGRAMS.get(program, PROCESSES), program)


class MissingMarkError(Exception):
    """A test starts a process and does not say so."""


GUARD: Final = Guard()


def hide_java() -> None:
    """Make sure that child processes find no Java either: `make check` must pass without one."""
    os.environ["JAVA_HOME"] = os.devnull
