"""How many dead letters there are: of a sink, and of the flow that wrote its topic."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.client.connection import Cluster
from penstock.client.metadata import Metadata
from penstock.client.reading import read_batches
from penstock.spark.sinking.letters import HEADER_PREFIX

_SINK: Final = f"{HEADER_PREFIX}sink"
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
        names, values = headers
        mine = pc.equal(names, _SINK)
        if sink:
            mine = pc.and_(mine, pc.equal(values, pa.scalar(sink.encode(), values.type)))
        count += int(pc.sum(mine).as_py() or 0)
    return DeadLetters(f"sink {sink}" if sink else "sinks", topic, count)


def of_flow(cluster: Cluster, topic: str, flow: str, streams: Collection[str]) -> DeadLetters:
    """The dead letters there that came from a flow's streams, and not from a sink."""
    count = 0
    wanted = [each.encode() for each in streams]
    for names, values in _headers(cluster, topic):
        of_sinks = pc.sum(pc.equal(names, _SINK)).as_py() or 0
        is_in = pc.is_in(values, value_set=pa.array(wanted, values.type))
        count += int(pc.sum(pc.and_(pc.equal(names, _TOPIC), is_in)).as_py() or 0)
        count -= int(of_sinks)
    return DeadLetters(f"flow {flow}", topic, max(count, 0))


def _headers(cluster: Cluster, topic: str) -> Iterator[tuple[pa.Array, pa.Array]]:
    """The names and values of all headers of a topic's records, some at a time."""
    if not Metadata(cluster).topics([topic]):
        return
    for _, batch in read_batches(cluster, topic, headers=True):
        flat = batch.column("headers").flatten()
        if len(flat):
            yield pc.cast(pc.struct_field(flat, 0), pa.string()), pc.struct_field(flat, 1)
