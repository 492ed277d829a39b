"""Spark over the log: sessions, the columnar source, and what flows are made of.

from penstock.spark import session

spark = session()
orders = (
    spark.readStream.format("penstock")
    .option("kafka.bootstrap.servers", "127.0.0.1:9092")
    .option("subscribe", "orders")
    .load()
)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from penstock.spark.flows.declare import flow, stream, table, topic
from penstock.spark.registering import register

# After it the name means the function, no longer the module of the same name.
from penstock.spark.session import session
from penstock.spark.source.lag import Lag, lag

if TYPE_CHECKING:
    from penstock.spark.sink import write, write_stream

__all__ = [
    "Lag",
    "flow",
    "lag",
    "register",
    "session",
    "stream",
    "table",
    "topic",
    "write",
    "write_stream",
]


def __getattr__(name: str) -> Any:
    """What writes is loaded when it is used: tasks that read need none of it."""
    if name not in {"write", "write_stream"}:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from penstock.spark import sink

    return getattr(sink, name)
