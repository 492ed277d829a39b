"""What is known of sinks when nothing runs: a file for each, in the folder of the process.

    .penstock/sinks/run.lock, run.json     who runs them, as with flows
    .penstock/sinks/orders/sink.json       paused, being rebuilt, what went wrong last
    .penstock/sinks/orders/checkpoint      Spark's own, emptied at each start

The position is not here: the store has it.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import orjson

from penstock.spark.flows.errors import CheckpointError
from penstock.spark.flows.folder import Folder

DEFAULT_DATA: Final = Path(".penstock") / "sinks"
SINK_FILE: Final = "sink.json"


@dataclass(frozen=True, slots=True)
class SinkRecord:
    """What is remembered of a sink."""

    name: str
    topic: str = ""
    # Without its password.
    store: str = ""
    bootstrap: str = ""
    # What tells the topic from one of the same name before or after it.
    topic_id: str = ""
    # The same of clusters.
    cluster_id: str = ""
    paused: bool = False
    # It is being built anew beside, or is to be at the next start.
    rebuilding: bool = False
    # Where one that cannot be rebuilt is to begin anew, "beginning" or "end"; empty if nowhere.
    anew: str = ""
    state: str = "new"
    error: str = ""
    advice: str = ""
    updated_ms: int = 0


class SinkFolder(Folder):
    """A data folder of sinks."""

    def place(self, sink: str, *, rebuild: bool = False) -> Path:
        """Spark's checkpoint."""
        return (self.path / sink / ("rebuild" if rebuild else "checkpoint")).resolve()

    def sinks(self) -> list[SinkRecord]:
        """All sinks that ever ran here."""
        if not self.path.is_dir():
            return []
        names = sorted(each.name for each in self.path.iterdir() if (each / SINK_FILE).is_file())
        return [self.sink(name) for name in names]

    def sink(self, name: str) -> SinkRecord:
        """What is known of a sink; nothing but its name, if it never ran."""
        file = self.path / name / SINK_FILE
        try:
            found = orjson.loads(file.read_bytes())
            known = {key: found[key] for key in SinkRecord.__slots__ if key in found}
            return SinkRecord(**known)
        except FileNotFoundError:
            return SinkRecord(name)
        except (orjson.JSONDecodeError, TypeError) as error:
            raise CheckpointError(
                f"{file} is damaged: {error}",
                advice=f"Remove it: the position of the sink is in its store, not there ({file}).",
            ) from error

    def write_sink(self, record: SinkRecord) -> None:
        """Replace what is known of a sink, in one step."""
        file = self.path / record.name / SINK_FILE
        beside = file.with_suffix(".new")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            with beside.open("wb") as out:
                out.write(orjson.dumps(asdict(record), option=orjson.OPT_INDENT_2))
                out.flush()
                os.fsync(out.fileno())
            beside.replace(file)
        except OSError as error:
            raise CheckpointError(
                f"{file} cannot be written: {error.strerror}",
                advice="Choose another folder with --data, or make it writable for you.",
            ) from error

    def forget_sink(self, name: str) -> None:
        shutil.rmtree(self.path / name, ignore_errors=True)
