"""Tables that change: enrichment from one, a view over two."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Literal

import numpy as np
from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812

from benchmarks.frame import Asked, Cells
from benchmarks.processing.feeding import Numbers, mixed, rows, times, write, write_keyed
from benchmarks.processing.harness import Bench, Case, Nowhere, bench, measure, note
from benchmarks.processing.timed import STEP_US, size, timed
from penstock.spark import flow, stream, views
from penstock.spark.flows.declare import Flow
from penstock.spark.joins import enrich

SALE: Final = "product bigint, amount bigint, at timestamp"
PRODUCT: Final = "id bigint, name string, price bigint"
# For a hundred events one row of the table changes.
EVENTS_OF_CHANGE: Final = 100
LOADED_AT_ONCE: Final = 500_000


def table_size(asked: Asked) -> int:
    return 100_000 if asked.quick else 1_000_000


# ---- enrichment --------------------------------------------------------------------------


def _products(bench: Bench, ids: Numbers, version: int, at_us: Numbers) -> None:
    price = mixed(ids, 5 + version, 10_000)
    name = [f"product {each}" for each in ids.tolist()]
    write_keyed(bench, "products", ids, rows(id=ids, name=name, price=price), at_us)


def _enriched(asked: Asked, version: Literal["latest", "as_of"]) -> Case:
    per_batch = size(asked, 400_000)
    known = table_size(asked)

    def prepare(bench: Bench) -> None:
        bench.topics("sales", "products")
        ids = np.arange(known, dtype=np.int64)
        _products(bench, ids, 0, np.zeros(known, dtype=np.int64))
        if version == "latest":
            _note_static(bench, known)

    def feed(bench: Bench, first: int, batches: int) -> None:
        n = np.arange(first * per_batch, (first + batches) * per_batch, dtype=np.int64)
        sold = rows(product=mixed(n, 1, known), amount=mixed(n, 2, 100), at=times(n * STEP_US))
        write(bench, "sales", sold)
        changed = n[::EVENTS_OF_CHANGE]
        _products(bench, mixed(changed, 3, known), 1, changed * STEP_US)

    def ours(limit: int, changes: int | None = None) -> Flow:
        inputs = [
            timed("sales", SALE, limit),
            stream(
                "products",
                changelog=PRODUCT,
                time="_timestamp",
                lateness="1 second",
                idle="1 hour",
                options={"maxOffsetsPerTrigger": str(changes or limit // EVENTS_OF_CHANGE)},
            ),
        ]

        @flow(inputs=inputs, output=Nowhere(), name=f"enrich_{version}")
        def enriched(sales: DataFrame, products: DataFrame) -> DataFrame:
            return enrich(
                sales,
                products,
                on={"product": "id"},
                columns=["name", "price"],
                version=version,
            )

        return enriched

    def plain(bench: Bench, limit: int) -> DataFrame:
        sales = bench.read("sales", SALE, limit)
        return sales.join(bench.spark.table("static_products"), F.expr("product = id"), "left")

    return Case(
        f"enrich_{version}",
        per_batch,
        prepare,
        feed,
        ours,
        plain if version == "latest" else None,
        loading=lambda: ours(per_batch, LOADED_AT_ONCE),
    )


def _note_static(bench: Bench, known: int) -> None:
    """For Spark the same table, read before and kept in memory; it does not change."""
    found = bench.spark.range(known).select(
        "id",
        F.concat(F.lit("product "), "id").alias("name"),
        (F.abs(F.xxhash64("id")) % 10_000).alias("price"),
    )
    bench.spark.catalog.dropTempView("static_products")
    found.persist().createTempView("static_products")
    found.count()


def latest(asked: Asked) -> Case:
    """Sales with the product of a table, as it is now."""
    return _enriched(asked, "latest")


def as_of(asked: Asked) -> Case:
    """Sales with the product as it was at their time."""
    return _enriched(asked, "as_of")


# ---- a view ------------------------------------------------------------------------------

ORDER: Final = "id bigint, customer bigint, amount bigint"
CUSTOMER: Final = "id bigint, country string, rank bigint"
COUNTRIES: Final = 200
_SQL: Final = (
    "SELECT country, count(*) AS n, sum(amount) AS total, max(amount) AS most "
    "FROM orders JOIN customers ON orders.customer = customers.id GROUP BY country"
)


def _orders(bench: Bench, ids: Numbers, known: int, version: int) -> None:
    write_keyed(bench, "orders", ids, rows(
        id=ids,
        customer=mixed(ids, 1, known),
        amount=mixed(ids + 7 * version, 2, 100_000),
    ))  # fmt: skip


def _customers(bench: Bench, ids: Numbers, version: int) -> None:
    country = [f"country {each}" for each in mixed(ids + 7 * version, 3, COUNTRIES).tolist()]
    write_keyed(bench, "customers", ids, rows(id=ids, country=country, rank=mixed(ids, 4, 9)))


def view(asked: Asked) -> Cells:
    """Orders joined with customers and summed by country: a million rows each, then changes."""
    known = table_size(asked)
    sizes = {"view_20k": 20_000, "view_200k": 200_000}
    if asked.quick:
        sizes = {"view_20k": 20_000}

    def prepare(bench: Bench) -> None:
        bench.topics("orders", "customers")
        ids = np.arange(known, dtype=np.int64)
        _orders(bench, ids, known, 0)
        _customers(bench, ids, 0)

    def feeding(per_batch: int, salt: int) -> Callable[[Bench, int, int], None]:
        def feed(bench: Bench, first: int, batches: int) -> None:
            n = np.arange(first * per_batch, (first + batches) * per_batch, dtype=np.int64)
            changed = mixed(n, salt, known)
            _orders(bench, changed[::2], known, first + 1)
            _customers(bench, changed[1::2], first + 1)

        return feed

    def ours(limit: int) -> Flow:
        half = {"maxOffsetsPerTrigger": str(limit // 2)}
        inputs = [
            stream("orders", changelog=ORDER, options=half),
            stream("customers", changelog=CUSTOMER, options=half),
        ]

        # One for each core, as docs/flows.md says.
        @flow(inputs=inputs, output=Nowhere(), name="view", shards=os.cpu_count() or 2)
        def by_country(orders: DataFrame, customers: DataFrame) -> DataFrame:
            return views.sql(
                _SQL,
                keys={"orders": "id", "customers": "id"},
                orders=orders,
                customers=customers,
            ).changes()

        return by_country

    cells: Cells = {}
    with bench("view") as one:
        prepare(one)
        one.writer.flush()
        note("view", "penstock", one.ours(ours(LOADED_AT_ONCE)), warming=True)
        fed = 0
        for salt, (name, per_batch) in enumerate(sizes.items()):
            case = Case(name, per_batch, prepare, feeding(per_batch, salt + 20), ours)
            if per_batch == 20_000:
                # As long as others: four of these are two seconds, and chance. Java goes on
                # compiling for a minute, beside work that takes both cores.
                case = replace(case, batches=20, warming=160)
            found, fed = measure(case, asked, one, fed=fed)
            cells.update(found)
    return cells
