"""What is known of sinks when nothing runs: a file for each, in the folder of the process.

    .penstock/sinks/run.lock, run.json     who runs them, as with flows
    .penstock/sinks/orders/sink.json       paused, being rebuilt, what went wrong last
    .penstock/sinks/orders/counts.json     rows and dead letters so far
    .penstock/sinks/orders/checkpoint      Spark's own, emptied at each start
    .penstock/sinks/orders/fed.json        when the store was at which position

The position to go on from is not here: the store has it.
"""

from __future__ import annotations

import os
import shutil
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import orjson

from penstock.sinks.contract import Position
from penstock.spark.flows.errors import AlreadyRunningError, CheckpointError
from penstock.spark.flows.folder import COUNTS_FILE, Folder

DEFAULT_DATA: Final = Path(".penstock") / "sinks"
SINK_FILE: Final = "sink.json"
FED_FILE: Final = "fed.json"
FED_EVERY_S: Final = 10.0
FED_KEPT: Final = 100


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

    def _taken(self) -> AlreadyRunningError:
        # Another folder would be no remedy: the two would throw each other out of the stores.
        return AlreadyRunningError(
            f"the sinks of {self.path} are fed already, by another process{self._who()}",
            advice="`penstock sinks list` shows how they get on. Stop that process first, with "
            "Ctrl-C or SIGTERM.",
        )

    def fed(self, sink: str) -> tuple[tuple[Position, float], ...]:
        """When a store was at which position, in seconds since 1970, as far as it is known."""
        try:
            found = orjson.loads((self.path / sink / FED_FILE).read_bytes())
            return tuple((Position.from_json(text), float(at_s)) for text, at_s in found)
        except (OSError, ValueError, TypeError, AttributeError):
            # Then nobody knows.
            return ()

    def note_fed(self, sink: str, position: Position) -> None:
        """A store is at this position now. Written down every ten seconds at most."""
        known, now = self.fed(sink), time.time()
        if known and now - known[-1][1] < FED_EVERY_S:
            return
        kept = [(text.text(), at_s) for text, at_s in known[-FED_KEPT:] if text != position]
        file = self.path / sink / FED_FILE
        beside = file.with_suffix(".new")
        with suppress(OSError):
            beside.write_bytes(orjson.dumps([*kept, (position.text(), now)]))
            beside.replace(file)

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

    def _counts_file(self, name: str, generation: int) -> Path:
        return self.path / name / COUNTS_FILE

    def forget_sink(self, name: str) -> None:
        shutil.rmtree(self.path / name, ignore_errors=True)
