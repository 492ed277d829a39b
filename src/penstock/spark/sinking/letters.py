"""What could not be read or taken, to the dead-letter topic: the record as it was, its headers, and
in further headers where it stood and why."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
import pyarrow as pa

from penstock.client.connection import Cluster
from penstock.client.errors import ClientError
from penstock.client.reading import read_batches
from penstock.client.topics import create
from penstock.client.writer import LogWriter
from penstock.sinks.contract import Refused

log = logging.getLogger(__name__)

HEADER_PREFIX: Final = "penstock.error."
MAX_REASON_CHARACTERS: Final = 1000

Header = tuple[str, bytes | None]
Spot = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Letter:
    """One that goes aside: where it stood, and why. `key` and `value` are for a record that is not
    in the log any more."""

    topic: str
    partition: int
    offset: int
    reason: str
    key: bytes | None = None
    value: bytes | None = None


@dataclass(frozen=True, slots=True)
class _Original:
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    time_ms: int


class Letters:
    """Writes to one dead-letter topic, which is made when the first is written."""

    def __init__(self, cluster: Cluster, topic: str, sink: str) -> None:
        self._cluster = cluster
        self._topic = topic
        self._sink = sink
        self._is_made = False
        self.written = 0

    def unread(self, letters: pa.Table) -> None:
        """Records that could not be read."""
        names = ("topic", "partition", "offset", "reason", "key", "value")
        self.write([Letter(*(row[name] for name in names)) for row in letters.to_pylist()])

    def refused(self, refused: Sequence[Refused], names: Sequence[str]) -> None:
        """Rows that the store could not take; `names` are the columns of their key."""
        self.write(
            Letter(each.topic, each.partition, each.offset, each.reason,
                   packed(dict(zip(names, each.key, strict=True))))
            for each in refused
        )  # fmt: skip

    def write(self, letters: Iterable[Letter], *, as_they_are: bool = False) -> None:
        """Write letters; they are there for good on return.

        With `as_they_are` no record is looked for in the log: key and value are what there is.
        """
        told = list(letters)
        if not told:
            return
        if not self._is_made:
            create(self._cluster, self._topic, exists_ok=True)
            self._is_made = True
        found = {} if as_they_are else self._originals(told)
        keys, values, headers = [], [], []
        for each in told:
            was = found.get((each.partition, each.offset))
            was = was or _Original(each.key, each.value, (), -1)
            keys.append(was.key)
            values.append(was.value)
            headers.append([*was.headers, *self._headers(each, was.time_ms)])
        with LogWriter(self._cluster) as writer:
            writer.write(self._topic, keys, values, headers=headers)
            writer.flush()
        self.written += len(keys)

    def _originals(self, letters: Sequence[Letter]) -> dict[Spot, _Original]:
        """The records as they stand in the log, as far as they still do."""
        wanted: dict[int, set[int]] = {}
        for each in letters:
            wanted.setdefault(each.partition, set()).add(each.offset)
        last = {number: max(some) for number, some in wanted.items()}
        found: dict[Spot, _Original] = {}
        try:
            batches = read_batches(
                self._cluster, letters[0].topic, partitions=sorted(wanted), headers=True,
                start={number: min(some) for number, some in wanted.items()},
            )  # fmt: skip
            for number, batch in batches:
                offsets = batch.column("offset").to_pylist()
                for at, offset in enumerate(offsets):
                    if offset in wanted[number]:
                        found[number, offset] = _original(batch, at)
                if offsets[-1] >= last.get(number, offsets[-1] + 1):
                    del last[number]
                    if not last:
                        break
        except ClientError as error:
            log.warning("sink %s: some dead letters are without their headers: %s",
                        self._sink, error)  # fmt: skip
        return found

    def _headers(self, letter: Letter, time_ms: int) -> list[Header]:
        told = {
            "topic": letter.topic,
            "partition": letter.partition,
            "offset": letter.offset,
            "timestamp": None if time_ms < 0 else time_ms,
            "reason": letter.reason[:MAX_REASON_CHARACTERS],
            "sink": self._sink,
        }
        return [
            (f"{HEADER_PREFIX}{name}", str(value).encode())
            for name, value in told.items()
            if value is not None
        ]


def _original(batch: pa.RecordBatch, at: int) -> _Original:
    (row,) = batch.slice(at, 1).to_pylist()
    # What another sink or flow said when it put the record aside is not said of this time.
    headers = tuple(
        (str(each["key"]), each["value"])
        for each in row["headers"] or ()
        if not str(each["key"]).startswith(HEADER_PREFIX)
    )
    return _Original(row["key"], row["value"], headers, int(row["timestamp"].timestamp() * 1000))


def packed(value: Mapping[str, Any]) -> bytes:
    """A row, or a key, as JSON."""
    return orjson.dumps(
        {name: item.hex() if isinstance(item, bytes) else item for name, item in value.items()},
        default=str,
        option=orjson.OPT_NON_STR_KEYS,
    )
