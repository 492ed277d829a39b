"""What a comparison tells: on the way, and at its end."""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

from penstock.cli.verifying.letters import DeadLetters
from penstock.errors import PenstockError
from penstock.sinks.contract import Position

Kind = Literal["missing", "extra", "other", "double", "aside"]


class VerifyError(PenstockError):
    """Two sides cannot be compared, or not in time."""


@dataclass(frozen=True, slots=True)
class Difference:
    """A key of which the store does not hold what the source holds.

    `missing`: not in the store. `extra`: only in the store. `other`: with other values. `double`:
    more than once in the store. `aside`: the source's record cannot be read, or its row is one that
    the store's columns cannot hold, so it was set aside.
    """

    kind: Kind
    key: Mapping[str, Any]
    # What differs: (in the source, in the store), by column.
    columns: Mapping[str, tuple[Any, Any]] = field(default_factory=dict)
    reason: str = ""

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        told: dict[str, Any] = {"kind": self.kind, "key": _plain(self.key)}
        if self.columns:
            told["columns"] = {
                name: {"source": _plain(source), "sink": _plain(sink)}
                for name, (source, sink) in self.columns.items()
            }
        if self.reason:
            told["reason"] = self.reason
        return told


@dataclass(frozen=True, slots=True)
class Report:
    """What came out."""

    source: str
    sink: str
    # Rows of the source that were compared, when it was read first.
    rows: int
    # How many keys differ for sure, those set aside included; `differences` has the first of them.
    count: int
    differences: tuple[Difference, ...]
    # What the store had reached when it was compared.
    position: Position
    seconds: float
    # How often something was looked at again because it had changed meanwhile.
    rounds: int = 1
    # Rows of the store, when it was read first.
    stored_rows: int = 0
    # Keys of the source that no store can hold; each is a difference.
    set_aside: int = 0
    dead_letters: tuple[DeadLetters, ...] = ()
    # Columns of the store that a query does not have, or the table any more.
    not_compared: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        return self.count == 0

    @property
    def empty(self) -> bool:
        """Whether there was nothing to compare."""
        return not (self.rows or self.stored_rows or self.count)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "source": self.source,
            "sink": self.sink,
            "equal": self.equal,
            "empty": self.empty,
            "rows": self.rows,
            "stored_rows": self.stored_rows,
            "set_aside": self.set_aside,
            "dead_letters": [each.as_dict() for each in self.dead_letters],
            "not_compared": list(self.not_compared),
            "different": self.count,
            "differences": [each.as_dict() for each in self.differences],
            "position": self.position.as_json(),
            "seconds": round(self.seconds, 3),
            "rounds": self.rounds,
        }


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a comparison is."""

    # "source", "log", "sink" or "changes": what is being read or waited for.
    phase: str
    rows: int
    rows_per_s: float
    # Of this phase, between 0 and 1; None if nobody knows.
    share: float | None
    round: int


OnProgress = Callable[[Progress], None]


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, bytes):
        return {"base64": base64.b64encode(value).decode()}
    if isinstance(value, Decimal | dt.datetime | dt.date | dt.time):
        return str(value)
    return value
