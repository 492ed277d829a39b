"""How many rows of the streams of a flow go from Java to Python at once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from penstock.client import topics

if TYPE_CHECKING:
    from penstock.spark.flows.declare import Stream
    from penstock.spark.flows.inputs import Place

_AT_ONCE_BYTES: Final = 1 << 30
_AT_ONCE_ROWS: Final = 1000
_LARGEST: Final = "max.message.bytes"


def rows_at_once(place: Place, streams: Iterable[Stream]) -> int:
    """How many rows go from Java to Python at once: by the largest records of the topics."""
    with place.cluster() as cluster:
        found = [
            topics.configs(cluster, place.resolve(each.topic)).get(_LARGEST) for each in streams
        ]
    largest = max((int(each) for each in found if each), default=1)
    return max(1, min(_AT_ONCE_ROWS, _AT_ONCE_BYTES // largest))
