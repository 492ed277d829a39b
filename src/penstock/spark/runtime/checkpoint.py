"""The checkpoint of a flow whose micro-batches are run by our own loop: Spark's own files.

    CHECKPOINT/metadata          the id of the query
    CHECKPOINT/offsets/BATCH     up to where each stream is read in a micro-batch
    CHECKPOINT/commits/BATCH     that it is done

A micro-batch is written to `offsets` before it begins, to `commits` when all of it is in the log
and in its stores. So after a kill the one that was not done is run again, with the same records.
The files are those that a streaming query of Spark's writes, so that a flow goes on from a
checkpoint whichever of the two has written it.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson

from penstock.spark.flows.errors import FlowError
from penstock.spark.runtime.spark_internals import HadoopFiles, local_path
from penstock.spark.state.files import Files

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

# As the source gives them: topic, partition, offset.
Offsets = Mapping[str, Mapping[str, int]]

OFFSETS: Final = "offsets"
COMMITS: Final = "commits"
_METADATA: Final = "metadata"
_VERSION: Final = b"v1"
_HEAD_LINES: Final = 2
_NOTHING: Final = b"-"
# As many as Spark keeps.
KEPT: Final = 100
# Old files are looked for once in so many micro-batches.
_SWEPT_EVERY: Final = 10


class CheckpointError(FlowError):
    """The checkpoint of a flow cannot be read."""

    advice = "Rebuild the flow from the log, with `penstock flows reset`."


class CheckpointGoneError(CheckpointError):
    """A flow that has run before has no checkpoint: it would write all of its output again."""

    advice = (
        "If the checkpoint is elsewhere, start with that folder or URL (--checkpoints), with the "
        "same fs.defaultFS as before. If it is lost, `penstock flows reset` rebuilds the flow from "
        "the log."
    )


class ConcurrentRunError(FlowError):
    """Two processes run one flow."""

    advice = "Run a flow once at a time; this process has stopped it, and the other goes on."


@dataclass(frozen=True, slots=True)
class Planned:
    """A micro-batch: up to where each stream is read, and where that begins."""

    batch_id: int
    # None of a stream that has no offset yet.
    starts: Sequence[Offsets | None]
    ends: Sequence[Offsets]


class Store(Protocol):
    """A folder of small files."""

    def write(
        self, name: str, data: bytes, *, durable: bool = True, replaces: bool = True
    ) -> None: ...

    def read(self, name: str) -> Any:
        """What `bytes` takes; FileNotFoundError if it is not there."""

    def names(self) -> Iterable[str]: ...

    def remove(self, name: str) -> None: ...

    def sweep(self) -> None:
        """Remove what writers that were killed have left half done, long ago."""


class Checkpoint:
    """The files of one flow."""

    def __init__(self, folder: str, files: Callable[[str], Store] = Files) -> None:
        self.folder = folder.rstrip("/")
        self._files = files(self.folder)
        self._offsets = files(f"{self.folder}/{OFFSETS}")
        self._commits = files(f"{self.folder}/{COMMITS}")

    @property
    def is_begun(self) -> bool:
        """Whether a query has ever begun here."""
        return _METADATA in self._files.names()

    def query_id(self) -> str:
        """The id of the query, which marks in the log name; made at the first start."""
        try:
            found = orjson.loads(bytes(self._files.read(_METADATA)))
            return str(found["id"])
        except FileNotFoundError:
            made = str(uuid.uuid4())
            self._files.write(_METADATA, orjson.dumps({"id": made}))
            return made
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.folder}/{_METADATA} is damaged: {error}") from error

    def last(self, streams: int) -> tuple[Planned | None, bool]:
        """The newest micro-batch that was begun, and whether it is done."""
        begun = _numbers(self._offsets)
        if not begun:
            return None, False
        newest = begun[-1]
        ends = self._read(newest, streams)
        before: Sequence[Offsets | None] = [None] * streams
        if newest - 1 in begun:
            before = self._read(newest - 1, streams)
        elif newest > 0:
            raise CheckpointError(
                f"{self.folder}/{OFFSETS} has micro-batch {newest} and not the one before"
            )
        is_done = newest in _numbers(self._commits)
        return Planned(newest, before, [each or {} for each in ends]), is_done

    def begin(self, planned: Planned) -> None:
        """Write down what a micro-batch reads, before it begins.

        ConcurrentRunError if somebody else has: it would be another one under the same number.
        """
        told = {"batchWatermarkMs": 0, "batchTimestampMs": int(time.time() * 1000), "conf": {}}
        lines = [_VERSION, orjson.dumps(told), *map(orjson.dumps, planned.ends)]
        try:
            self._offsets.write(str(planned.batch_id), b"\n".join(lines), replaces=False)
        except FileExistsError as error:
            raise ConcurrentRunError(
                f"micro-batch {planned.batch_id} was begun by another process meanwhile, in "
                f"{self.folder}"
            ) from error

    def done(self, batch_id: int) -> None:
        """Write down that all of a micro-batch is where it should be."""
        # If it is lost, the micro-batch is run again, and recognised as written.
        text = _VERSION + b"\n" + orjson.dumps({"nextBatchWatermarkMs": 0})
        self._commits.write(str(batch_id), text, durable=False)
        if batch_id % _SWEPT_EVERY == 0:
            for files in (self._offsets, self._commits):
                files.sweep()
                for number in _numbers(files):
                    if number <= batch_id - KEPT:
                        files.remove(str(number))
                        files.remove(f".{number}.crc")

    def _read(self, number: int, streams: int) -> list[Offsets | None]:
        try:
            lines = bytes(self._offsets.read(str(number))).splitlines()
            if lines[0] != _VERSION:
                raise ValueError(f"its format is {lines[0].decode(errors='replace')}, not v1")
            found: list[Any] = [
                None if line == _NOTHING else orjson.loads(line) for line in lines[_HEAD_LINES:]
            ]
        except (ValueError, IndexError) as error:
            raise CheckpointError(
                f"{self.folder}/{OFFSETS}/{number} is damaged: {error}"
            ) from error
        if len(found) != streams:
            raise CheckpointError(
                f"{self.folder}/{OFFSETS}/{number} is of {len(found)} streams, and the flow has "
                f"{streams}"
            )
        return found


def opened(spark: SparkSession, folder: str, flow: str, *, has_run: bool) -> Checkpoint:
    """The checkpoint of a flow, by Spark's own means where it is not on this machine.

    CheckpointGoneError if the flow has run before and there is none.
    """
    here = local_path(spark, folder)
    found = Checkpoint(folder, partial(HadoopFiles, spark)) if here is None else Checkpoint(here)
    if has_run and not found.is_begun:
        raise CheckpointGoneError(
            f"flow {flow!r} has run before, and there is no checkpoint of it at {folder}"
        )
    return found


def _numbers(files: Store) -> list[int]:
    return sorted(int(name) for name in files.names() if name.isdecimal())
