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

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from penstock.spark.flows.declare import flow, stream, table, topic
from penstock.spark.registering import register

# After it the name means the function, no longer the module of the same name.
from penstock.spark.session import session
from penstock.spark.source.lag import Lag, lag

if TYPE_CHECKING:
    from penstock.spark import asking, joins, standing, views, windows
    from penstock.spark import patterns as pattern
    from penstock.spark.joins import enrich, within
    from penstock.spark.patterns import match_recognize
    from penstock.spark.sink import write, write_stream
    from penstock.spark.sinking.output import store
    from penstock.spark.state import corrected, marked
    from penstock.spark.state.bounds import UnboundedStateWarning

__all__ = [
    "Lag",
    "UnboundedStateWarning",
    "asking",
    "corrected",
    "enrich",
    "flow",
    "joins",
    "lag",
    "marked",
    "match_recognize",
    "pattern",
    "register",
    "session",
    "standing",
    "store",
    "stream",
    "table",
    "topic",
    "views",
    "windows",
    "within",
    "write",
    "write_stream",
]


# What is loaded when it is used: tasks that read need none of it.
_LAZY: Final = {
    "UnboundedStateWarning": "penstock.spark.state.bounds",
    "corrected": "penstock.spark.state",
    "enrich": "penstock.spark.joins",
    "marked": "penstock.spark.state",
    "match_recognize": "penstock.spark.patterns",
    "pattern": "penstock.spark.patterns",
    "store": "penstock.spark.sinking.output",
    "within": "penstock.spark.joins",
    "write": "penstock.spark.sink",
    "write_stream": "penstock.spark.sink",
}


def __getattr__(name: str) -> Any:
    if name in {"asking", "joins", "standing", "views", "windows"}:
        return import_module(f"penstock.spark.{name}")
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)
