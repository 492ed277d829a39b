"""The queries of NEXMark, each a function from DataFrames to a DataFrame.

They run as they are over streams, in a flow (`flows.py`), and over what was read in batch. Times
are event times: `_time`, which `stream(..., time="date_time")` or `marked` gives.

| query | what it asks | made of |
|---|---|---|
| q0, q1, q2 | bids as they are; in euros; on some auctions | plain Spark |
| q3 | who sells what in some states | a view over two tables |
| q4 | the average winning price of a category | two views, one over the other |
| q5 | the auctions with the most bids, every two seconds | hopping window, top_k |
| q6 | the average price of a seller's last ten sales | operators of its own (`selling.py`) |
| q7 | the highest bid of each ten seconds | tumbling window |
| q8 | people who opened an auction as soon as they had come | join of streams, deduplication |
| q11 | bids of a person in one go | session window |
| q12 | bids of a person in ten seconds of the log's own time | tumbling window |
| q13 | bids with something known about their auction | enrichment |
| q14, q21, q22 | computed columns | plain Spark |
| q15, q16, q17 | bids of a day: how many, by whom, by rank of price | tumbling windows, distinct |
| q20 | bids with their auction, of one category | enrichment |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import selling  # type: ignore[import-not-found]
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark import enrich, views, within
from penstock.spark import windows as w

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

BID = "auction bigint, bidder bigint, price bigint, channel string, url string, date_time timestamp"
AUCTION = (
    "id bigint, item_name string, initial_bid bigint, reserve bigint, date_time timestamp, "
    "expires timestamp, seller bigint, category bigint"
)
PERSON = (
    "id bigint, name string, email string, credit_card string, city string, state string, "
    "date_time timestamp"
)
DOLLARS_TO_EUROS = 0.908
CENTS_OF_RANKS = (10_000, 1_000_000)


# ---- one row at a time -----------------------------------------------------------------------


def q0(bids: DataFrame) -> DataFrame:
    """Bids as they are: what the way through costs."""
    return bids.select("auction", "bidder", "price", "date_time")


def q1(bids: DataFrame) -> DataFrame:
    """Prices in euros."""
    price = (F.col("price") * DOLLARS_TO_EUROS).alias("price")
    return bids.select("auction", "bidder", price, "date_time")


def q2(bids: DataFrame) -> DataFrame:
    """Bids on every 123rd auction."""
    return bids.where("auction % 123 = 0").select("auction", "price")


def q14(bids: DataFrame) -> DataFrame:
    """Prices in euros, those of the middle, by the time of day."""
    hour = F.hour("date_time")
    price = F.col("price") * DOLLARS_TO_EUROS
    time = (
        F.when((hour >= 8) & (hour <= 18), "day").when((hour <= 6) | (hour >= 20), "night")
    ).otherwise("other")
    return bids.select(
        "auction", "bidder", price.alias("price"), time.alias("bid_time"), "date_time"
    ).where("price > 1000000 and price < 50000000")


def q21(bids: DataFrame) -> DataFrame:
    """The number of a bid's channel: known ones by name, others from the address."""
    known = F.create_map(
        *(F.lit(each) for pair in (("apple", "0"), ("google", "1"), ("facebook", "2"),
                                   ("baidu", "3")) for each in pair)
    )  # fmt: skip
    found = F.regexp_extract("url", r"(?:&|^)channel_id=([^&]*)", 1)
    channel = F.coalesce(known[F.lower("channel")], F.when(found != "", found))
    return bids.select("auction", "bidder", "price", "channel", channel.alias("channel_id")).where(
        "channel_id is not null"
    )


def q22(bids: DataFrame) -> DataFrame:
    """The folders of a bid's address."""
    parts = F.split("url", "/")
    return bids.select(
        "auction", "bidder", "price", "channel",
        *(F.get(parts, F.lit(at)).alias(f"dir{at - 2}") for at in (3, 4, 5)),
    )  # fmt: skip


# ---- windows ---------------------------------------------------------------------------------


def q5(bids: DataFrame) -> DataFrame:
    """The auctions with the most bids of ten seconds, every two."""
    return w.hopping(bids, "10 seconds", "2 seconds", values={"hot": w.top_k("auction", 1)})


def q7(bids: DataFrame) -> DataFrame:
    """The highest bid of each ten seconds."""
    return w.tumbling(bids, "10 seconds", values={"price": w.max("price"), "bids": w.count()})


def q11(bids: DataFrame) -> DataFrame:
    """How many bids a person made in one go, without ten seconds' pause."""
    return w.session(bids, "10 seconds", by=["bidder"], values={"bids": w.count()})


def q12(bids: DataFrame) -> DataFrame:
    """The same by the clock, ten seconds each: let the stream's time be the record's own."""
    return w.tumbling(bids, "10 seconds", by=["bidder"], values={"bids": w.count()})


def _by_rank(bids: DataFrame) -> DataFrame:
    low, high = CENTS_OF_RANKS
    rank = F.when(F.col("price") < low, 1).when(F.col("price") < high, 2).otherwise(3)
    ranked = bids.withColumn("_rank", rank)
    for number in (1, 2, 3):
        mine = F.col("_rank") == number
        ranked = ranked.withColumn(f"_bid{number}", F.when(mine, F.lit(1)))
        ranked = ranked.withColumn(f"_bidder{number}", F.when(mine, F.col("bidder")))
        ranked = ranked.withColumn(f"_auction{number}", F.when(mine, F.col("auction")))
    return ranked


def _statistics() -> dict[str, w.Aggregate]:
    found: dict[str, w.Aggregate] = {"total_bids": w.count()}
    for number in (1, 2, 3):
        found[f"rank{number}_bids"] = w.count(f"_bid{number}")
    found["total_bidders"] = w.distinct("bidder")
    for number in (1, 2, 3):
        found[f"rank{number}_bidders"] = w.distinct(f"_bidder{number}")
    found["total_auctions"] = w.distinct("auction")
    for number in (1, 2, 3):
        found[f"rank{number}_auctions"] = w.distinct(f"_auction{number}")
    return found


def q15(bids: DataFrame) -> DataFrame:
    """Bids of a day: how many, by how many, on how many auctions, in all and by rank of price."""
    return w.tumbling(_by_rank(bids), "1 day", values=_statistics())


def q16(bids: DataFrame) -> DataFrame:
    """The same for each channel."""
    return w.tumbling(_by_rank(bids), "1 day", by=["channel"], values=_statistics())


def q17(bids: DataFrame) -> DataFrame:
    """Bids of a day for each auction, and the prices of them."""
    prices: dict[str, w.Aggregate] = {
        "total_bids": w.count(),
        **{f"rank{number}_bids": w.count(f"_bid{number}") for number in (1, 2, 3)},
        "min_price": w.min("price"),
        "max_price": w.max("price"),
        "avg_price": w.avg("price"),
        "sum_price": w.sum("price"),
    }
    return w.tumbling(_by_rank(bids), "1 day", by=["auction"], values=prices)


# ---- joins -----------------------------------------------------------------------------------


def q3(auctions: DataFrame, people: DataFrame) -> DataFrame:
    """Who sells something of category 10 and lives in one of three states."""
    return views.sql(
        "SELECT people.name, people.city, people.state, auctions.id FROM auctions "
        "JOIN people ON auctions.seller = people.id WHERE auctions.category = 10 "
        "AND people.state IN ('OR', 'ID', 'CA')",
        keys={"auctions": "id", "people": "id"}, auctions=auctions, people=people,
    ).changes()  # fmt: skip


def winning(auctions: DataFrame, bids: DataFrame) -> DataFrame:
    """The highest bid of each auction among those in its time: the first half of q4."""
    numbered = bids.withColumn("id", F.concat_ws("-", "_partition", "_offset"))
    return views.sql(
        "SELECT auctions.id, auctions.category, max(bids.price) AS final FROM auctions "
        "JOIN bids ON auctions.id = bids.auction WHERE bids.date_time >= auctions.date_time "
        "AND bids.date_time <= auctions.expires GROUP BY auctions.id, auctions.category",
        keys={"auctions": "id", "bids": "id"}, auctions=auctions, bids=numbered,
    ).changes()  # fmt: skip


def q4(winning: DataFrame) -> DataFrame:
    """The average winning price of each category, over the view of winning bids."""
    return views.sql(
        "SELECT category, avg(final) AS price, count(*) AS auctions FROM winning GROUP BY category",
        keys={"winning": ["id", "category"]}, winning=winning,
    ).changes()  # fmt: skip


def q6(auctions: DataFrame, bids: DataFrame) -> DataFrame:
    """The average price of the last ten auctions of a seller, each time that one has closed."""
    prices: DataFrame = selling.last_prices(selling.closed(auctions, bids))
    return prices


def q8(people: DataFrame, auctions: DataFrame) -> DataFrame:
    """People who opened an auction within the ten seconds, by the clock, in which they came."""
    sellers = auctions.select(F.col("seller").alias("id"), "_time", "_topic", "_partition",
                              "_offset")  # fmt: skip
    who = people.select("id", "name", "_time", "_topic", "_partition", "_offset")
    pairs = within(who, sellers, on=["id"], bound=("-10 seconds", "10 seconds"))
    same = pairs.withColumn("starttime", _start("_time")).where(
        F.col("starttime") == _start("right__time")
    )
    return same.select("id", "name", "starttime")


def _start(time: str) -> Column:
    """When the ten seconds of a time began."""
    size_us = 10_000_000
    return F.timestamp_micros(F.floor(F.unix_micros(time) / size_us) * size_us)


def q13(bids: DataFrame, known: DataFrame) -> DataFrame:
    """Bids with what a table knows about their auction."""
    found = enrich(bids, known, on={"auction": "id"}, columns={"category": "known"})
    return found.select("auction", "bidder", "price", "date_time", "known")


def q20(bids: DataFrame, auctions: DataFrame) -> DataFrame:
    """Bids with their auction, of category 10."""
    found = enrich(
        bids, auctions, on={"auction": "id"}, how="inner",
        columns=["item_name", "initial_bid", "reserve", "expires", "seller", "category"],
    )  # fmt: skip
    return found.where("category = 10").select(
        "auction", "bidder", "price", "item_name", "reserve", "seller", "category"
    )
