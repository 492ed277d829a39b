"""The flows of the shop: `penstock run flows.py`.

Each is a function from DataFrames to DataFrames; where they come from and go to is declared. They
start in this order, two at a time on two cores: what takes least is first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql import functions as F  # noqa: N812

from penstock.spark import enrich, flow, pattern, standing, stream, topic, views
from penstock.spark import windows as w

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock.spark.standing.query import Kind

CUSTOMER = "id bigint, name string, email string, country string"
PRODUCT = (
    "id bigint, title string, description string, category string, price_cents bigint, stock bigint"
)
ORDER = (
    "id bigint, customer_id bigint, product_id bigint, quantity bigint, amount_cents bigint, "
    "status string, placed_ms bigint"
)
CLICK = "customer_id bigint, product_id bigint, kind string, at timestamp"
PAYMENT = "card string, customer_id bigint, cents bigint, at timestamp"

# Captured tables, as streams of changes.
customers = stream("shop.customers", debezium=CUSTOMER)
products = stream("shop.products", debezium=PRODUCT)
orders = stream("shop.orders", debezium=ORDER)
# Events, by when they happened. Time passes also when nobody clicks or pays.
clicks = stream("shop.clicks", json=CLICK, time="at", lateness="1 second", idle="30 seconds")
payments = stream("shop.payments", json=PAYMENT, time="at", lateness="1 second", idle="30 seconds")
# Searches that stand: the key is a name, the value a query.
searches = stream("shop.searches", text=True)

SHARDS = 2


@flow(
    inputs=payments,
    output=topic("shop.payments.suspicious", key="card"),
    every="1 second",
    shards=SHARDS,
)
def suspicious(payments: DataFrame) -> DataFrame:
    """A card that is tried with small amounts, and then used for a large one."""
    tried = (
        pattern.begin("small", "cents < 200", times=2)
        .then("large", "cents > 50000")
        .within("30 seconds")
    )
    return tried.match(
        payments,
        by="card",
        measures={"customer_id": "large.customer_id", "cents": "large.cents"},
        events=False,
    )


FIELDS: dict[str, Kind] = {
    "title": "text",
    "category": "keyword",
    "price_cents": "number",
    "stock": "number",
}


@flow(
    inputs=[products, searches],
    outputs={
        "found": topic("shop.searches.found", key="query"),
        "bad": topic("shop.searches.bad", key="query"),
    },
    every="1 second",
    shards=SHARDS,
)
def found(products: DataFrame, searches: DataFrame) -> dict[str, DataFrame]:
    """Products that begin to be what somebody looks for."""
    offered = products.where("_op <> 'd'").select(
        F.col("_after.id").alias("product_id"),
        *(F.col(f"_after.{name}").alias(name) for name in FIELDS),
        "_topic",
        "_partition",
        "_offset",
    )
    hits = standing.match(offered, searches, fields=FIELDS)
    return {
        "found": hits.select("query", "product_id", "title", "price_cents", "stock"),
        "bad": standing.bad_queries(searches, fields=FIELDS),
    }


@flow(
    inputs=[clicks, customers],
    outputs={
        "enriched": topic("shop.clicks.enriched", key="customer_id"),
        "top": topic("shop.top", key="window_start"),
        "abandoned": topic("shop.carts.abandoned", key="customer_id"),
    },
    every="1 second",
    shards=SHARDS,
)
def browsing(clicks: DataFrame, customers: DataFrame) -> dict[str, DataFrame]:
    """Clicks with who clicked; what is looked at most; carts that nobody came back to."""
    known = enrich(clicks, customers, on={"customer_id": "id"}, columns=["name", "country"])
    top = w.tumbling(
        clicks.where("kind = 'view'"),
        "10 seconds",
        values={"top": w.top_k("product_id", 5), "views": w.count()},
    )
    left = (
        pattern.begin("filled", "kind = 'cart'")
        .not_followed_by("ordered", "kind = 'order'")
        .within("10 seconds")
    )
    return {
        "enriched": known.select("customer_id", "name", "country", "product_id", "kind", "at"),
        "top": top,
        "abandoned": left.match(
            clicks, by="customer_id", measures={"product_id": "filled.product_id"}, events=False
        ),
    }


@flow(
    inputs=[orders, customers],
    outputs={
        "country": topic("shop.revenue.country", key="_key", compacted=True),
        "minute": topic("shop.revenue.minute", key="_key", compacted=True),
    },
    every="1 second",
    shards=SHARDS,
)
def revenue(orders: DataFrame, customers: DataFrame) -> dict[str, DataFrame]:
    """What each country has paid, and what came in in each minute.

    Right also when orders are cancelled or deleted, and when customers move.
    """
    country = views.sql(
        "SELECT country, count(*) AS orders, sum(amount_cents) AS cents FROM orders "
        "JOIN customers ON orders.customer_id = customers.id WHERE status <> 'cancelled' "
        "GROUP BY country",
        keys={"orders": "id", "customers": "id"},
        orders=orders,
        customers=customers,
    )
    minute = views.sql(
        "SELECT placed_ms - placed_ms % 60000 AS minute_ms, count(*) AS orders, "
        "sum(amount_cents) AS cents FROM orders WHERE status <> 'cancelled' "
        "GROUP BY placed_ms - placed_ms % 60000",
        keys={"orders": "id"},
        orders=orders,
    )
    return {"country": country.changes(), "minute": minute.changes()}
