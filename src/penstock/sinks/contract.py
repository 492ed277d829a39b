"""The contract between whoever reads the log and a derived store; in words: see the package."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Event
from typing import Any, ClassVar, Final, Self

import pyarrow as pa

from penstock.sinks.errors import NotReachedError, OutOfStepError, TooManyRefusedError
from penstock.sinks.schema import Schema

MAX_REFUSED: Final = 1000
MAX_SHOWN: Final = 200
SCAN_ROWS: Final = 10_000
_POLL_S: Final = 0.02
_POLL_MAX_S: Final = 0.5
# Of a topic, among the numbers of its partitions in what stores keep.
_ID: Final = "id"

Place = tuple[str, int]
"""A partition: its topic and its number."""
Key = tuple[Any, ...]
"""The values of a row's key columns, in the key's order, as Python has them."""

# Where each row of a table of changes stood in the log, row by row.
ORIGIN: Final = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", "UTC")),
    ]
)


@dataclass(frozen=True, slots=True)
class Position:
    """How far the log was read: the next offset of each partition. Partitions that are not named
    were not read at all.

    Offsets mean something in one topic only: `ids` has the id of each topic that was read, as far
    as it is known. One of the same name that was made anew, or is elsewhere, has another.
    """

    offsets: Mapping[Place, int] = field(default_factory=dict)
    ids: Mapping[str, str] = field(default_factory=dict, compare=False)

    def reaches(self, other: Position) -> bool:
        """Whether all that `other` has read was read here too."""
        return all(self.offsets.get(place, 0) >= at for place, at in other.offsets.items())

    def merged(self, other: Position) -> Position:
        """The further of both, in each partition; of ids those of `other`."""
        places = {*self.offsets, *other.offsets}
        return Position(
            {at: max(self.offsets.get(at, 0), other.offsets.get(at, 0)) for at in sorted(places)},
            {**self.ids, **other.ids},
        )

    def __hash__(self) -> int:
        return hash(frozenset(self.offsets.items()))

    def as_json(self) -> dict[str, dict[str, int]]:
        """{"orders": {"0": 12}}, as Spark writes offsets too."""
        found: dict[str, dict[str, int]] = {}
        for (topic, partition), offset in sorted(self.offsets.items()):
            found.setdefault(topic, {})[str(partition)] = offset
        return found

    def text(self) -> str:
        """For a store to keep: {"orders": {"0": 12, "id": "..."}}."""
        found: dict[str, dict[str, Any]] = {**self.as_json()}
        for topic, told in self.ids.items():
            if topic in found:
                found[topic] = {**found[topic], _ID: told}
        return json.dumps(found, separators=(",", ":"))

    @classmethod
    def from_json(cls, found: Mapping[str, Mapping[str, Any]] | str | bytes) -> Position:
        """Back from `as_json`, or from `text`."""
        data = json.loads(found) if isinstance(found, str | bytes) else found
        return cls(
            {
                (str(topic), int(partition)): int(offset)
                for topic, places in data.items()
                for partition, offset in places.items()
                if partition != _ID
            },
            {str(topic): str(places[_ID]) for topic, places in data.items() if _ID in places},
        )

    def __str__(self) -> str:
        told = [f"{topic}-{number} at {at}" for (topic, number), at in sorted(self.offsets.items())]
        return ", ".join(told) or "the beginning"


@dataclass(frozen=True, slots=True)
class Changes:
    """What has changed in a table between two positions, reduced to the last change of each key.

    `upserts` has the columns of the schema (those of an older schema may be missing), `deletes`
    those of its key. No key is in both, nor twice in one. `upserted_at` and `deleted_at` tell for
    each of their rows where in the log it stood (columns of `ORIGIN`): what stores use as a
    version, or as the id of a message.
    """

    upserts: pa.Table
    deletes: pa.Table
    position: Position
    since: Position
    upserted_at: pa.Table
    deleted_at: pa.Table

    @property
    def rows(self) -> int:
        return int(self.upserts.num_rows + self.deletes.num_rows)


@dataclass(frozen=True, slots=True)
class Refused:
    """A row that the store cannot take."""

    key: Key
    reason: str
    topic: str
    partition: int
    offset: int


@dataclass(frozen=True, slots=True)
class Applied:
    """What `apply` has done: rows written or taken out, and those that were put aside."""

    rows: int
    refused: tuple[Refused, ...] = ()


Aside = Callable[[Sequence[Refused]], None]
"""Makes refused rows durable before it returns."""


def follows(changes: Changes, stored: Position, store: str) -> bool:
    """Whether changes are to be applied to a store that is at `stored`: False if it has them.

    OutOfStepError if they leave a gap, or go back.
    """
    if stored.reaches(changes.position):
        return False
    if not stored.reaches(changes.since):
        raise OutOfStepError(
            f"{store} is at {stored}; changes since {changes.since} would leave a gap"
        )
    for place, at in changes.position.offsets.items():
        if at < stored.offsets.get(place, 0):
            raise OutOfStepError(
                f"{store} is at {stored}; changes up to {changes.position} would go back"
            )
    return True


def refusing(refused: Sequence[Refused], store: str, most: int = MAX_REFUSED) -> None:
    """TooManyRefusedError if these are more than can be the fault of rows."""
    if len(refused) > most:
        first = refused[0]
        raise TooManyRefusedError(
            f"{store} refuses more than {most} rows of one batch, first {first.key}: "
            f"{first.reason[:MAX_SHOWN]}"
        )


class Sink(ABC):
    """A derived store; see the package for what it promises.

    Not for several threads at once, except that each may have a sink of its own for reading.
    """

    # Whether `scan` can read back what was written.
    readable: ClassVar[bool] = True
    # Whether it can be built anew `beside` itself.
    rebuildable: ClassVar[bool] = True
    # Rows are gone so long after the time of their last record; 0: they stay.
    lifetime_s: int = 0
    # More rows than so many that it cannot take, in one go, are not the fault of rows.
    max_refused: int = MAX_REFUSED
    # What is written to, for people: the URL without the password.
    target: str = ""

    @abstractmethod
    def open(self, schema: Schema) -> Position:
        """Become the writer: make the store or add columns to it, fence who wrote before.

        The position that the store is at; empty if it was never written to.
        """

    @abstractmethod
    def position(self) -> Position | None:
        """How far the store is; None if there is no store yet."""

    @abstractmethod
    def stored_schema(self) -> Schema | None:
        """What `scan` gives; None if there is no store yet."""

    @abstractmethod
    def apply(self, changes: Changes, aside: Aside) -> Applied:
        """Bring the store to `changes.position`; `open` was called before."""

    @abstractmethod
    def scan(
        self, low: Key | None = None, high: Key | None = None, *, batch_rows: int = SCAN_ROWS
    ) -> Iterator[pa.RecordBatch]:
        """The rows from `low` up to before `high`, ordered by key, as of one moment if the store
        can."""

    @abstractmethod
    def beside(self, *, fresh: bool = False) -> Sink:
        """A sink for the same table under another name; `fresh` throws away one that was begun."""

    @abstractmethod
    def switch(self) -> None:
        """Of a sink that `beside` gave: take the place of the table, whose writer is fenced."""

    @abstractmethod
    def remove(self) -> None:
        """Take everything out of the store that this sink has put there; nothing if it is gone."""

    def relocate(self, position: Position) -> bool:
        """Take another position for the one that the store is at: the same records, which have
        other offsets by now. `open` was called before. False if the store cannot, and has not."""
        return False

    @abstractmethod
    def close(self) -> None:
        """Give connections back. May be called twice."""

    def now_s(self) -> float:
        """The time by the clock that rows lapse by, in seconds since 1970."""
        return time.time()

    def wait_for(self, position: Position, timeout_s: float) -> Position:
        """Wait until the store has reached the position; NotReachedError after the timeout."""
        deadline = time.monotonic() + timeout_s
        pause, pause_s = Event(), _POLL_S
        while True:
            at = self.position()
            if at is not None and at.reaches(position):
                return at
            left = deadline - time.monotonic()
            if left <= 0:
                raise NotReachedError(
                    f"{self.target} has not reached {position} in {timeout_s:g} s; it is at "
                    f"{at if at is not None else 'nothing: there is no store yet'}"
                )
            pause.wait(min(pause_s, left))
            pause_s = min(_POLL_MAX_S, pause_s * 1.5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
