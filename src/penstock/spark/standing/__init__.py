"""Search on streams: queries that stand, and documents that flow past them.

A search engine keeps documents and is asked queries. Here it is the other way round: the queries
are kept, in a topic, and come and go while the flow runs; each document is matched against all.

    @flow(inputs=[stream("offers", json="title string, price double, brand string"),
                  stream("queries", text=True)],
          outputs={"alerts": topic("alerts", key="query"), "bad": topic("bad", key="query")})
    def alerts(offers, queries):
        fields = {"title": "text", "price": "number", "brand": "keyword"}
        return {"alerts": match(offers, queries, fields=fields),
                "bad": bad_queries(queries, fields=fields)}

`query` is the language, `index` how ten thousand queries are asked at once, `asking` which of them
a worker has in memory, `operators` what a task does, `matching` all of it over DataFrames.
"""

from __future__ import annotations

from penstock.spark.standing.matching import bad_queries, match
from penstock.spark.standing.query import QueryError

__all__ = ["QueryError", "bad_queries", "match"]
