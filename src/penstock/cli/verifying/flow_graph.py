"""Which flows write which topics, and how far each has read: the data folder of `penstock run`.

    DATA/NAME/flow.json                  what the flow reads and writes
    CHECKPOINT/commits/BATCH             the micro-batch is done, its output is committed
    CHECKPOINT/offsets/BATCH             up to where it has read each stream

The folder must be on this machine, or its checkpoints in a store that this machine reaches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Final

import orjson

from penstock.cli.verifying.report import VerifyError
from penstock.client.connection import Cluster
from penstock.client.metadata import EARLIEST, Metadata, offsets
from penstock.client.reading import read_batches
from penstock.sinks.contract import Position
from penstock.spark.flows.folder import Folder, Record
from penstock.spark.flows.versions import physical
from penstock.spark.state.files import Files

_STREAM: Final = re.compile(r"stream (?P<topic>[A-Za-z0-9._-]+) \(")
_LETTERS: Final = re.compile(r".*, unreadable ones to (?P<topic>[A-Za-z0-9._-]+)", re.DOTALL)
_TOPIC: Final = "topic "
_POLL_S: Final = 0.1
# The version, and what Spark says of the micro-batch; then a line for each source.
_HEAD_LINES: Final = 2
# Of a source that had nothing yet.
_NOTHING: Final = b"-"


@dataclass(frozen=True, slots=True)
class KnownFlow:
    """A flow that has run with the data folder."""

    name: str
    # As they are declared: what they read of a flow that was reset is another version.
    streams: tuple[str, ...]
    # By the name that is declared, the topic that counts: after a reset another version.
    topics: Mapping[str, str]
    # Where its records go that it cannot read.
    dead_letters: tuple[str, ...]
    checkpoint: str

    @classmethod
    def of(cls, record: Record, folder: Folder) -> KnownFlow:
        streams = [each for each in map(_STREAM.match, record.inputs) if each]
        letters = [each for each in map(_LETTERS.fullmatch, record.inputs) if each]
        outputs = [e.removeprefix(_TOPIC) for e in record.outputs if e.startswith(_TOPIC)]
        version = physical("", record.generation)
        return cls(
            record.name,
            tuple(each["topic"] for each in streams),
            {each.removesuffix(version): each for each in outputs},
            tuple(dict.fromkeys(each["topic"] for each in letters)),
            Folder(folder.path, record.checkpoints or None).checkpoint(
                record.name, record.generation
            ),
        )

    def read(self) -> Position:
        """Up to where it has read its streams, with all that follows from that committed."""
        return committed(Files(self.checkpoint)) or Position()


class FlowGraph:
    """The flows of a data folder, by the topics that they write."""

    def __init__(self, data: Path) -> None:
        self.data = data
        folder = Folder(data)
        self._flows = [KnownFlow.of(each, folder) for each in folder.intact()]

    def writer(self, topic: str) -> KnownFlow | None:
        """The flow that writes a topic, by its declared or its present name; None if none does."""
        return next(
            (flow for flow in self._flows
             if topic in flow.topics or topic in flow.topics.values()),
            None,
        )  # fmt: skip

    def resolve(self, topic: str) -> str:
        """The version of a topic that counts."""
        writer = self.writer(topic)
        return topic if writer is None else writer.topics.get(topic, topic)

    def upstream(self, topic: str) -> list[KnownFlow]:
        """The flows between captured topics and this one, in the order of the data."""
        found: list[KnownFlow] = []

        def add(target: str, inside: tuple[str, ...]) -> None:
            flow = self.writer(target)
            if flow is None or flow in found or flow.name in inside:
                return
            for each in flow.streams:
                add(each, (*inside, flow.name))
            found.append(flow)

        add(topic, ())
        return found


def wait_for_flow(
    cluster: Cluster, flow: KnownFlow, wanted: Position, left_s: Callable[[], float]
) -> None:
    """Return when a flow has read all records up to a position; VerifyError when the time is up."""
    pause = Event()
    while True:
        at = flow.read()
        behind = {place: end for place, end in wanted.offsets.items()
                  if at.offsets.get(place, 0) < end}  # fmt: skip
        if not behind or not _has_records(cluster, at, behind):
            return
        if left_s() <= 0:
            raise VerifyError(
                f"flow {flow.name} has not read {Position(behind)} in time; it is at {at}",
                advice="Does it run? `penstock flows list` tells; --timeout gives it more time.",
            )
        pause.wait(_POLL_S)


def _has_records(cluster: Cluster, at: Position, behind: Mapping[tuple[str, int], int]) -> bool:
    """Whether what was not read has records: the end of a transaction is none."""
    metadata = Metadata(cluster)
    first = offsets(cluster, dict.fromkeys(behind, EARLIEST), metadata=metadata)
    for (topic, number), end in behind.items():
        start = max(at.offsets.get((topic, number), 0), first[topic, number])
        if start >= end:
            continue
        for _, batch in read_batches(cluster, topic, partitions=[number], start={number: start}):
            if batch.column("offset")[0].as_py() < end:
                return True
            break
    return False


def committed(checkpoint: Files) -> Position | None:
    """How far the micro-batches go that are done; None before the first."""
    try:
        done = [int(name) for name in checkpoint.names("commits") if name.isdecimal()]
        lines = bytes(checkpoint.read(f"offsets/{max(done)}")).splitlines()
        at = Position()
        for source in lines[_HEAD_LINES:]:
            if source != _NOTHING:
                at = at.merged(Position.from_json(orjson.loads(source)))
    except (OSError, ValueError, AttributeError):
        # Nothing yet, or it is just being written.
        return None
    return at
