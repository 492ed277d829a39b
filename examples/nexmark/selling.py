"""Operators of one's own, for NEXMark's q6: auctions that close, and a seller's last ten prices.

An operator is a plain object. It is given the rows of a micro-batch for one shard of the keys as
Arrow tables, what it kept before, and the watermark: the time before which nothing more is
expected. What it gives may depend on nothing else, so that a replay gives the same.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.state import Shard, apply

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SALES = 10
OPEN = pa.schema([
    ("id", pa.int64()), ("seller", pa.int64()), ("opened_us", pa.int64()),
    ("expires_us", pa.int64()), ("final", pa.int64()),
])  # fmt: skip
BIDS = pa.schema([("id", pa.int64()), ("price", pa.int64()), ("at_us", pa.int64())])
CLOSED = pa.schema([("id", pa.int64()), ("seller", pa.int64()), ("expires_us", pa.int64()),
                    ("final", pa.int64())])  # fmt: skip
PRICES = pa.schema([("seller", pa.int64()), ("id", pa.int64()), ("price", pa.float64())])


def closed(auctions: DataFrame, bids: DataFrame) -> DataFrame:
    """Auctions that were bid on, with the highest bid in their time, once it is over."""
    opened, expires = F.unix_micros("date_time"), F.unix_micros("expires")
    return apply(
        {
            "auctions": auctions.select(
                "id", "seller", opened.alias("opened_us"), expires.alias("expires_us"),
                F.lit(None).cast("bigint").alias("final"),
            ),
            "bids": bids.select(F.col("auction").alias("id"), "price", opened.alias("at_us")),
        },
        Closing(),
        key=["id"],
        schema="id bigint, seller bigint, expires_us bigint, final bigint",
        waits=True,
    )  # fmt: skip


def last_prices(sales: DataFrame) -> DataFrame:
    """For each sale the average price of the seller's last ten, in the order of their ends."""
    return apply(
        {"sales": sales},
        LastPrices(),
        key=["seller"],
        schema="seller bigint, id bigint, price double",
    )


def _all(shard: Shard, name: str, schema: pa.Schema, fresh: pa.Table | None) -> pa.Table:
    """What was kept and what has come."""
    known = [each.select(schema.names).cast(schema) for each in (shard.state.value(name), fresh)
             if each is not None]  # fmt: skip
    return pa.concat_tables(known) if known else schema.empty_table()


@dataclass(frozen=True)
class Closing:
    """Keeps auctions while they are open, and bids on auctions that nobody has told of yet."""

    kind: str = "closing"
    describes: str = "open auctions with their highest bids"

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        known = _all(shard, "auctions", OPEN, inputs.get("auctions"))
        bids = _all(shard, "bids", BIDS, inputs.get("bids"))
        met = bids.join(known.select(["id", "opened_us", "expires_us"]), "id", join_type="inner")
        met = met.filter(
            pc.and_(
                pc.greater_equal(met["at_us"], met["opened_us"]),
                pc.less_equal(met["at_us"], met["expires_us"]),
            )
        )
        best = met.group_by("id").aggregate([("price", "max")])
        known = known.join(best, "id", join_type="left outer")
        highest = pc.max_element_wise(known["final"], known["price_max"])
        known = known.set_column(known.schema.get_field_index("final"), "final", highest)
        strange = bids.join(known.select(["id"]), "id", join_type="left anti")
        if shard.watermark_us is not None:
            over = pc.less(known["expires_us"], shard.watermark_us)
            shard.state.keep("auctions", known.filter(pc.invert(over)).select(OPEN.names))
            # Of an auction that opened before them word would have come by now.
            early = pc.greater_equal(strange["at_us"], shard.watermark_us)
            shard.state.keep("bids", strange.filter(early).select(BIDS.names))
            known = known.filter(over)
        return known.filter(pc.is_valid(known["final"])).select(CLOSED.names)


@dataclass(frozen=True)
class LastPrices:
    """Keeps the last ten sales of each seller."""

    kind: str = "last-prices"
    describes: str = f"the last {SALES} sales of each seller"

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        fresh = inputs.get("sales")
        if fresh is None:
            return PRICES.empty_table()
        # What closes in a later micro-batch ends later: the watermark is between them.
        order = [("expires_us", "ascending"), ("id", "ascending")]
        last: dict[int, deque[dict[str, int]]] = defaultdict(lambda: deque(maxlen=SALES))
        for sale in _all(shard, "sales", CLOSED, None).to_pylist():
            last[sale["seller"]].append(sale)
        found = []
        for sale in fresh.sort_by(order).select(CLOSED.names).to_pylist():
            sales = last[sale["seller"]]
            sales.append(sale)
            price = sum(each["final"] for each in sales) / len(sales)
            found.append({"seller": sale["seller"], "id": sale["id"], "price": price})
        kept = [sale for sales in last.values() for sale in sales]
        shard.state.keep("sales", pa.Table.from_pylist(kept, CLOSED))
        return pa.Table.from_pylist(found, PRICES)
