"""Patterns, and queries that stand: Spark has nothing in their place."""

from __future__ import annotations

from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import DataFrame

from benchmarks.frame import Asked
from benchmarks.processing.feeding import Numbers, mixed, rows, times, write, write_keyed
from benchmarks.processing.harness import Bench, Case, Nowhere
from benchmarks.processing.timed import KEYS, STEP_US, size, timed
from penstock.spark import flow, pattern, stream
from penstock.spark.flows.declare import Flow
from penstock.spark.standing import match

EVENT: Final = "card bigint, kind bigint, amount bigint, at timestamp"
STEPS: Final = (
    pattern.begin("small", "kind = 1 and amount < 500")
    .then("other", "kind = 2 and amount > small.amount")
    .then("large", "kind = 3 and amount > 2 * small.amount")
    .within("2 seconds")
)


def pattern_of_three(asked: Asked) -> Case:
    """Three steps within two seconds, by card, of ten thousand; kinds are four."""
    per_batch = size(asked, 100_000)

    def feed(bench: Bench, first: int, batches: int) -> None:
        n = np.arange(first * per_batch, (first + batches) * per_batch, dtype=np.int64)
        write(bench, "payments", rows(
            card=mixed(n, 1, KEYS), kind=mixed(n, 2, 4), amount=mixed(n, 3, 1000),
            at=times(n * STEP_US),
        ))  # fmt: skip

    def ours(limit: int) -> Flow:
        @flow(inputs=timed("payments", EVENT, limit), output=Nowhere(), name="pattern")
        def alarms(payments: DataFrame) -> DataFrame:
            return STEPS.match(
                payments, by="card", measures={"first": "small.amount", "last": "large.amount"}
            )

        return alarms

    return Case("pattern", per_batch, lambda bench: bench.topics("payments"), feed, ours, batches=6)


# ---- standing queries --------------------------------------------------------------------

OFFER: Final = "title string, price bigint, brand string"
WORDS: Final = 20_000
BRANDS: Final = 200
TITLE_WORDS: Final = 10


def _words(n: Numbers, salt: int) -> pa.Array:
    """Words, some of which are frequent: the product of two even numbers."""
    number = mixed(n, salt, WORDS) * mixed(n, salt + 50, 1000) // 1000
    return pc.binary_join_element_wise("w", pa.array(number).cast(pa.string()), "")


def _queries(count: int) -> pa.Array:
    n = np.arange(count, dtype=np.int64)
    one, two, three = (_words(n + 10**9, salt).to_pylist() for salt in (31, 32, 33))
    price, brand = mixed(n, 34, 900).tolist(), mixed(n, 35, BRANDS).tolist()
    kinds = (
        lambda at: f"title:{one[at]} AND title:{two[at]}",
        lambda at: f'title:"{one[at]} {two[at]}" OR title:{three[at]}',
        lambda at: f"{one[at]} {two[at]} price:[{price[at]} TO {price[at] + 100}]",
        lambda at: f"brand:b{brand[at]} AND (title:{one[at]} OR title:{two[at]})",
    )
    return pa.array([kinds[at % 4](at) for at in range(count)]).cast(pa.binary())


def standing(asked: Asked) -> Case:
    """Offers of ten words against ten thousand queries."""
    per_batch = size(asked, 60_000)
    queries = 1_000 if asked.quick else 10_000

    def prepare(bench: Bench) -> None:
        bench.topics("offers", "queries")
        write_keyed(bench, "queries", np.arange(queries), _queries(queries))

    def feed(bench: Bench, first: int, batches: int) -> None:
        n = np.arange(first * per_batch, (first + batches) * per_batch, dtype=np.int64)
        words = [_words(n, salt) for salt in range(TITLE_WORDS)]
        brand = pc.binary_join_element_wise("b", pa.array(mixed(n, 11, BRANDS)).cast("string"), "")
        title = pc.binary_join_element_wise(*words, " ")
        write(bench, "offers", rows(title=title, price=mixed(n, 12, 1000), brand=brand))

    def ours(limit: int) -> Flow:
        offers = stream("offers", json=OFFER, options={"maxOffsetsPerTrigger": str(limit)})

        @flow(inputs=[offers, stream("queries", text=True)], output=Nowhere(), name="standing")
        def alerts(offers: DataFrame, queries: DataFrame) -> DataFrame:
            fields = {"title": "text", "price": "number", "brand": "keyword"}
            return match(offers, queries, fields=fields)  # type: ignore[arg-type]

        return alerts

    return Case("standing", per_batch, prepare, feed, ours)
