"""Signals: records by which others tell a capture what to do.

They lie in the topic `__penstock_signals`, keyed by the capture's name. How far it has listened is
part of a capture's state, so each signal takes effect once, whatever crashes. The layout is that of
Debezium's signals, and its types are understood:

- `execute-snapshot`: the tables in `data-collections` (names or patterns) are read while the stream
  goes on, with the `additional-conditions` that are given; with `type: blocking` and no table all
  of them are read anew, at one position.
- `stop-snapshot`: of the tables in `data-collections`, or of all; `pause-snapshot` and
  `resume-snapshot` hold all of them.
- `pause`, `resume`, `stop`: the capture itself. A paused one stays so when it is started again.
- `log`: `message` is logged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

import orjson

from penstock.capture.source import CaptureError

SIGNALS_TOPIC: Final = "__penstock_signals"

EXECUTE, STOP_SNAPSHOT = "execute-snapshot", "stop-snapshot"
PAUSE_SNAPSHOT, RESUME_SNAPSHOT = "pause-snapshot", "resume-snapshot"
PAUSE, RESUME, STOP, LOG = "pause", "resume", "stop", "log"
TYPES: Final = (
    EXECUTE,
    STOP_SNAPSHOT,
    PAUSE_SNAPSHOT,
    RESUME_SNAPSHOT,
    PAUSE,
    RESUME,
    STOP,
    LOG,
)
INCREMENTAL, BLOCKING = "incremental", "blocking"


class SignalError(CaptureError):
    """A signal that cannot be understood; it is told of and passed over."""


@dataclass(frozen=True, slots=True)
class Signal:
    """Something that a capture is told."""

    type: str
    data: Mapping[str, Any] = field(default_factory=dict)
    id: str = ""

    def encode(self) -> bytes:
        told = {"id": self.id or uuid4().hex, "type": self.type, "data": dict(self.data)}
        return orjson.dumps(told)

    @classmethod
    def decode(cls, data: bytes) -> Signal:
        try:
            told = orjson.loads(data)
            inner = told.get("data") or {}
            if isinstance(inner, str):
                # So it stands in Debezium's signalling table.
                inner = orjson.loads(inner)
            made = cls(str(told["type"]), dict(inner), str(told.get("id") or uuid4().hex))
        except (orjson.JSONDecodeError, KeyError, TypeError, ValueError, AttributeError) as error:
            shown = data[:200].decode(errors="replace")
            raise SignalError(f"a signal that cannot be read: {shown}: {error}") from error
        if made.type not in TYPES:
            raise SignalError(
                f"a signal of the unknown type {made.type!r}", advice="Use " + ", ".join(TYPES)
            )
        return made

    @property
    def tables(self) -> list[str]:
        """The tables that it names, as patterns."""
        named = self.data.get("data-collections") or []
        return [str(item) for item in named] if isinstance(named, list) else [str(named)]

    def where(self, table: str) -> str:
        """The condition that it sets for a table."""
        for item in self.data.get("additional-conditions") or []:
            if isinstance(item, dict) and item.get("data-collection") == table:
                return str(item.get("filter") or "")
        return ""

    @property
    def is_blocking(self) -> bool:
        return str(self.data.get("type") or "").lower() == BLOCKING


def snapshot_signal(*tables: str, where: str = "") -> Signal:
    """Read tables while the stream goes on, with a condition in the database's SQL or without."""
    data: dict[str, Any] = {"data-collections": list(tables), "type": INCREMENTAL}
    if where:
        data["additional-conditions"] = [
            {"data-collection": table, "filter": where} for table in tables
        ]
    return Signal(EXECUTE, data)


def snapshot_all_signal() -> Signal:
    """Read all tables anew, at one position, and go on from there: after a position was lost."""
    return Signal(EXECUTE, {"type": BLOCKING})
