"""Tables of a warehouse: Delta (`delta:`, `delta+s3:`, `s3:`) and Parquet (`parquet:`)."""

from __future__ import annotations

from penstock.sinks.contract import Sink
from penstock.sinks.stores import Address


def make(address: Address) -> Sink:
    """The sink for a URL."""
    if address.scheme.startswith("parquet"):
        from penstock.sinks import parquet

        return parquet.make(address)
    from penstock.sinks import delta

    return delta.make(address)
