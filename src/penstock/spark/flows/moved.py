"""A flow in another cluster than it has read: its offsets translated, where `penstock migrate` says
how.

Spark has written down in the checkpoint up to which offsets the last micro-batches have read. In
another cluster the same records have other offsets. The map of a migration lies in the target; with
it the newest two files are written anew: that of the last micro-batch, and the one before, from
which it began, should it have to be run again. What stood there is kept in the flow's record until
all of it is done, so a kill in between is taken up again.

State is kept as it is. Where it has offsets in it, as rows of a pattern that wait, they would be
compared with others: such a flow is rebuilt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import orjson

from penstock.client.connection import Cluster
from penstock.client.migration_map import Move
from penstock.spark.flows.errors import IncompatibleError, TopicChangedError
from penstock.spark.flows.folder import Fingerprint, Folder, Record
from penstock.spark.flows.offsets import FOLDER
from penstock.spark.flows.trouble import RESET_ADVICE
from penstock.spark.state.files import Files

_KEPT: Final = 2
_HEAD_LINES: Final = 2


def check(flow: str, known: Fingerprint) -> None:
    """IncompatibleError if what a flow keeps has offsets in it."""
    if any("_offset" in each or each.startswith("pattern") for each in known.operators):
        raise IncompatibleError(
            f"flow {flow!r} was moved to another cluster, and keeps rows by their offsets in the "
            "one before",
            advice=RESET_ADVICE.format(name=flow),
        )


def carry(
    folder: Folder,
    record: Record,
    generation: int,
    checkpoint: str,
    cluster: Cluster,
    moves: Mapping[str, Move],
) -> Record:
    """Translate the offsets of a checkpoint; the record to be written when that is done."""
    files = Files(f"{checkpoint.rstrip('/')}/{FOLDER}")
    key = str(generation)
    texts = record.moving.get(key)
    if texts is None:
        numbers = sorted((int(name) for name in files.names() if name.isdecimal()), reverse=True)
        texts = {str(number): bytes(files.read(str(number))).decode() for number in numbers[:_KEPT]}
        record = replace(record, moving={**record.moving, key: texts})
        folder.write(record)
    for name, text in texts.items():
        files.write(name, _translated(record.name, text, cluster, moves).encode())
        # Of Spark's own file system: it would not fit any more.
        files.remove(f".{name}.crc")
    left = {other: each for other, each in record.moving.items() if other != key}
    return replace(record, moving=left)


def _translated(flow: str, text: str, cluster: Cluster, moves: Mapping[str, Move]) -> str:
    lines = text.splitlines()
    head, sources = lines[:_HEAD_LINES], lines[_HEAD_LINES:]
    return "\n".join([*head, *(_source(flow, each, cluster, moves) for each in sources)])


def _source(flow: str, line: str, cluster: Cluster, moves: Mapping[str, Move]) -> str:
    """The offsets of one source: `{"orders": {"0": 12}}`."""
    found: Any = orjson.loads(line)
    if not isinstance(found, dict):
        return line
    told = {}
    for topic, parts in found.items():
        move = moves.get(topic)
        if move is None:
            told[topic] = parts
            continue
        offsets = {int(part): int(at) for part, at in parts.items()}
        missing = move.missing(offsets)
        if missing:
            part, at = next(iter(missing.items()))
            raise TopicChangedError(
                f"flow {flow!r} has read {topic}-{part} up to offset {at} in the cluster before, "
                f"of which {move.positions.get(part, 0)} were moved here",
                advice="Run `penstock migrate` once more, with the flow stopped, and start again.",
            )
        there = move.translated(cluster, offsets)
        told[topic] = {str(part): at for part, at in sorted(there.items())}
    return orjson.dumps(told).decode()
