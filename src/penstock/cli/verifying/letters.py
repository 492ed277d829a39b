"""How many dead letters there are: of a sink, and of the flow that wrote its topic."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from penstock.client.connection import Cluster
from penstock.client.metadata import Metadata
from penstock.client.reading import read_batches
from penstock.spark.sinking.letters import HEADER_PREFIX

_SINK: Final = f"{HEADER_PREFIX}sink"
_FLOW: Final = f"{HEADER_PREFIX}flow"
_TOPIC: Final = f"{HEADER_PREFIX}topic"


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """What stands in a dead-letter topic on behalf of one sink or flow."""

    # "sink orders", "flow revenue".
    writer: str
    topic: str
    count: int

    @property
    def command(self) -> str:
        """What lists them."""
        return f"penstock consume {self.topic} --json"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "of": self.writer, "topic": self.topic, "count": self.count, "command": self.command,
        }  # fmt: skip


def of_sink(cluster: Cluster, topic: str, sink: str) -> DeadLetters:
    """The dead letters that a sink has written there; of any sink, if its name is not known."""
    count = 0
    for headers in _headers(cluster, topic):
        count += len(headers.records(_SINK, (sink,) if sink else ()))
    return DeadLetters(f"sink {sink}" if sink else "sinks", topic, count)


def of_flow(cluster: Cluster, topic: str, flow: str, streams: Collection[str]) -> DeadLetters:
    """The dead letters there that a flow has written; of those that do not say who did, and are
    not from a sink, all that came from its streams."""
    count = 0
    for headers in _headers(cluster, topic):
        unsigned = np.setdiff1d(headers.records(_TOPIC, streams), headers.records(_FLOW))
        count += len(headers.records(_FLOW, (flow,)))
        count += len(np.setdiff1d(unsigned, headers.records(_SINK)))
    return DeadLetters(f"flow {flow}", topic, count)


@dataclass(frozen=True, slots=True)
class _Headers:
    """The headers of some records."""

    names: pa.Array
    values: pa.Array
    # Which record each is of.
    parents: pa.Array

    def records(self, name: str, values: Collection[str] = ()) -> NDArray[np.int64]:
        """The records that have a header, with one of these values if any are given."""
        chosen = pc.equal(self.names, name)
        if values:
            wanted = pa.array([each.encode() for each in values], self.values.type)
            chosen = pc.and_(chosen, pc.is_in(self.values, value_set=wanted))
        found: NDArray[np.int64] = np.unique(self.parents.filter(chosen).to_numpy())
        return found


def _headers(cluster: Cluster, topic: str) -> Iterator[_Headers]:
    """The headers of all records of a topic, some at a time."""
    if not Metadata(cluster).topics([topic]):
        return
    for _, batch in read_batches(cluster, topic, headers=True):
        column = batch.column("headers")
        flat = pc.list_flatten(column)
        if len(flat):
            yield _Headers(
                pc.cast(pc.struct_field(flat, 0), pa.string()),
                pc.struct_field(flat, 1),
                pc.list_parent_indices(column),
            )
