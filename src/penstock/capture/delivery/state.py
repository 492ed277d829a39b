"""What a capture remembers, as one record of the log: written with the events it speaks of.

The record lies in a compacted topic of the capture's own, `__penstock_capture.NAME`. Whoever begins
anew reads the last committed one and goes on exactly there. The topic is not shared, since a reader
of committed records sees nothing beyond a transaction that is open: another capture that hangs in
the middle of one would hide what we have written after it.

What is told to people lies in the topic `__penstock_capture`, under each capture's name, written
outside of transactions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any, Final

import orjson

from penstock.capture.source import CaptureError, Position, Row

CAPTURE_TOPIC: Final = "__penstock_capture"
VERSION: Final = 1


def state_topic(name: str) -> str:
    return f"{CAPTURE_TOPIC}.{name}"


# The first snapshot: not begun, under way, done; or to be taken again although it was done.
NONE, RUNNING, DONE, WANTED = "none", "running", "done", "wanted"


@dataclass(slots=True)
class TableSnapshot:
    """An incremental snapshot of one table: asked for, or under way."""

    id: str
    table: str
    where: str = ""
    # The key of the last row that is in the log, as texts of fragments; None: none yet.
    after: list[str] | None = None
    rows: int = 0
    chunks: int = 0
    # How many rows there are about, if anybody knows.
    estimate: int | None = None
    started_ms: int = 0

    @property
    def cursor(self) -> Row | None:
        return None if self.after is None else tuple(part.encode() for part in self.after)


@dataclass(slots=True)
class State:
    """Where a capture stands."""

    # Where the stream goes on; None before there is one.
    position: Position | None = None
    snapshot: str = NONE
    # Tables that were read by a snapshot, or need none.
    tables: list[str] = field(default_factory=list)
    paused: bool = False
    # Incremental snapshots: the first is under way, the others wait.
    queue: list[TableSnapshot] = field(default_factory=list)
    queue_paused: bool = False
    # The next signal to be read; None: whatever comes from now on.
    signals: int | None = None
    # Events since the beginning of time.
    events: int = 0
    # When it was written.
    ts_ms: int = 0

    def encode(self) -> bytes:
        position = None if self.position is None else dict(self.position)
        queue = [asdict(item) for item in self.queue]
        told = {name: getattr(self, name) for name in self.__slots__}
        try:
            return orjson.dumps({"version": VERSION, **told, "position": position, "queue": queue})
        except TypeError as error:
            raise CaptureError(f"a position that is no plain JSON: {position}") from error

    @classmethod
    def decode(cls, data: bytes) -> State:
        try:
            told: dict[str, Any] = orjson.loads(data)
            version = told.pop("version")
            if version != VERSION:
                raise CaptureError(
                    f"the log's record of this capture has the version {version}",
                    advice=f"This Penstock knows version {VERSION}: use one that is as new.",
                )
            told["queue"] = [TableSnapshot(**item) for item in told["queue"]]
            return cls(**told)
        except (orjson.JSONDecodeError, KeyError, TypeError) as error:
            raise CaptureError(
                f"the record of this capture in the log cannot be read: {error}",
                advice="Remove the capture and add it again; that takes a new snapshot.",
            ) from error
