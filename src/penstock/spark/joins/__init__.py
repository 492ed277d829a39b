"""Joins: streams with streams within a time (`within`), events with tables (`enrich`).

from penstock.spark import joins

joins.within(searches, clicks, on=["user"], bound=("0 s", "10 minutes"))
joins.enrich(sales, rates, on={"country": "code"}, version="as_of")
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from penstock.spark.joins.streams import within
    from penstock.spark.joins.tables import enrich

__all__ = ["enrich", "within"]

# Loaded when it is used: a task needs one of them.
_WHERE: Final = {"enrich": "tables", "within": "streams"}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WHERE[name]}"), name)
