"""Whether what is derived in the demo is what its source says.

A table that a sink keeps is compared row by row with the table of the database. What flows compute
is compared with the same query, asked of the database itself: a foreign oracle. While all of it
drains that is done by hand, once it is equal by `penstock verify`, which has the last word.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import PenstockError

if TYPE_CHECKING:
    from penstock.cli import project
    from penstock.sinks.spec import SinkSpec

SCHEMA: Final = "penstock_shop"
SHOWN: Final = 5
_PAID: Final = "status <> 'cancelled'"
# For each sink what the database would answer, in the order of the sink's key and columns.
QUERIES: Final[Mapping[str, str]] = {
    "search": "SELECT id, title, description, category, price_cents, stock FROM {at}products",
    "cache": "SELECT id, name, email, country FROM {at}customers",
    "warehouse": (
        "SELECT id, customer_id, product_id, quantity, amount_cents, status, placed_ms "
        "FROM {at}orders"
    ),
    "revenue_by_country": (
        "SELECT country, count(*) AS orders, sum(amount_cents) AS cents FROM {at}orders AS o "
        f"JOIN {{at}}customers AS c ON o.customer_id = c.id WHERE {_PAID} GROUP BY country"
    ),
    "revenue_by_minute": (
        "SELECT placed_ms - placed_ms % 60000 AS minute_ms, count(*) AS orders, "
        f"sum(amount_cents) AS cents FROM {{at}}orders WHERE {_PAID} "
        "GROUP BY placed_ms - placed_ms % 60000"
    ),
}
SOURCES: Final = {
    "search": "table products",
    "cache": "table customers",
    "warehouse": "table orders",
    "revenue_by_country": "query over orders, customers",
    "revenue_by_minute": "query over orders",
}


# What they are fed from, where that is a captured table; else it is the topic of a flow.
_TABLES: Final = {"search": "products", "cache": "customers", "warehouse": "orders"}
_CAPTURE: Final = "shop"
VERIFY_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Found:
    """What a comparison came to."""

    sink: str
    store: str
    source: str
    rows: int
    # Keys that are missing, too many, or have another row.
    differing: tuple[str, ...] = ()
    error: str = ""

    @property
    def is_equal(self) -> bool:
        return not self.differing and not self.error

    @property
    def verdict(self) -> str:
        if self.error:
            return self.error
        if not self.differing:
            return "equal"
        shown = ", ".join(self.differing[:SHOWN])
        more = f", and {len(self.differing) - SHOWN} more" if len(self.differing) > SHOWN else ""
        return f"DIFFERS at {shown}{more}"


def compare(spec: SinkSpec, database: str) -> Found:
    """A derived store with its source; both should be at rest."""
    source = SOURCES.get(spec.name, "")
    try:
        names, rows = asked(database, QUERIES[spec.name].format(at=""))
        width = len(spec.key)
        expected = {_normal(row[:width]): _normal(row) for row in rows}
        found = _stored(spec, names, width)
    except PenstockError as error:
        return Found(spec.name, spec.shown, source, 0, error=str(error))
    differing = [
        " ".join(map(str, key))
        for key in sorted({*expected, *found}, key=str)
        if expected.get(key) != found.get(key)
    ]
    return Found(spec.name, spec.shown, source, len(found), tuple(differing))


def verified(
    found: Found, at: project.Project, bootstrap: str, flows: Path, *, postgres: bool
) -> Found:
    """The same with what `penstock verify` says, which holds the log's position against both;
    `flows` is their data folder."""
    from penstock.cli.verifying import verify
    from penstock.client.connection import Cluster

    schema = f"{SCHEMA}." if postgres else ""
    table = _TABLES.get(found.sink)
    query = QUERIES[found.sink].format(at=schema) if table is None else ""
    source = _CAPTURE if table is None else f"{_CAPTURE}.{schema}{table}"
    try:
        with Cluster(bootstrap, client_id="penstock-demo") as cluster:
            report = verify(at, source, found.sink, cluster=cluster, timeout_s=VERIFY_S,
                            query=query, data=flows)  # fmt: skip
    except PenstockError as error:
        return replace(found, error=f"not verified: {error}")
    if report.equal:
        return found
    keys = (" ".join(map(str, each.key.values())) for each in report.differences)
    return replace(found, differing=tuple({*found.differing, *keys}))


def _stored(
    spec: SinkSpec, names: Sequence[str], width: int
) -> dict[tuple[Any, ...], tuple[Any, ...]]:
    found = {}
    with spec.sink() as sink:
        if sink.stored_schema() is None:
            return {}
        for batch in sink.scan():
            for row in batch.select(list(names)).to_pylist():
                values = _normal(tuple(row[name] for name in names))
                found[values[:width]] = values
    return found


def _normal(row: Sequence[Any]) -> tuple[Any, ...]:
    """Numbers as whole ones: a database may give a sum as a decimal."""
    return tuple(
        value if value is None or isinstance(value, str | int) else int(value) for value in row
    )


def asked(database: str, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The columns and rows of a query to the shop's database."""
    try:
        connection: Any
        if database.startswith("sqlite:///"):
            import sqlite3

            connection = sqlite3.connect(database.removeprefix("sqlite:///"), timeout=30)
        else:
            import psycopg

            connection = psycopg.connect(
                database, autocommit=True, options=f"-c search_path={SCHEMA}"
            )
        with closing(connection):
            cursor = connection.execute(sql)
            return [each[0] for each in cursor.description], [tuple(row) for row in cursor]
    except PenstockError:
        raise
    except Exception as error:
        raise PenstockError(f"the shop's database does not answer: {error}") from error
