"""What a store is compared with: a table of a captured database, or the table that a topic tells.

An origin gives its rows as the store would have them: events as a capture makes them, read by the
parser that feeds the store. And it tells when the log has all that these rows showed.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from threading import Event
from typing import Any, Final

import pyarrow as pa

from penstock.capture.delivery.config import CaptureConfig
from penstock.capture.delivery.control import state_of, status_of
from penstock.capture.delivery.state import DONE, State
from penstock.capture.events.batch import Batch
from penstock.capture.events.changes import Events
from penstock.capture.events.composer import Composer
from penstock.capture.events.settings import AVRO, MARK
from penstock.capture.source import Position as DatabasePosition
from penstock.capture.source import Row, Snapshot, Source, Table
from penstock.capture.sources import open_source
from penstock.cli.capture_view import is_running
from penstock.cli.verifying.report import VerifyError
from penstock.cli.verifying.set_aside import AsideKeys
from penstock.client.connection import Cluster
from penstock.client.metadata import EARLIEST, LATEST, Metadata, offsets
from penstock.client.reading import read_batches
from penstock.errors import ConfigError
from penstock.sinks.contract import Position
from penstock.spark.sinking.parsing import Parsed, Parser

_POLL_S: Final = 0.1
# A capture that has just been started has this long to say so.
_GRACE_S: Final = 5.0


class Origin(ABC):
    """One side of a comparison."""

    # The topic through which its rows come to stores.
    topic: str
    # How a user calls it.
    name: str
    # Of the same key the last row counts.
    is_log = False

    def __init__(self) -> None:
        # Of the last time that the rows were read.
        self.aside = AsideKeys()

    @abstractmethod
    def rows(self, parser: Parser) -> Iterator[Parsed]:
        """The rows as they are now, some at a time."""

    @abstractmethod
    def settle(self, deadline: float) -> None:
        """Return when the log has all that was committed before the rows were read last."""

    @abstractmethod
    def estimate(self) -> int | None:
        """About how many rows there are; None if nobody knows."""

    def close(self) -> None:
        """Give connections back."""
        return


def log_ends(cluster: Cluster, topic: str) -> Position:
    """Where a topic ends, as readers of committed records see it."""
    metadata = Metadata(cluster)
    places = [(topic, number) for number in metadata.partitions(topic)]
    return Position(
        offsets(cluster, dict.fromkeys(places, LATEST), isolation="read_committed",
                metadata=metadata)
    )  # fmt: skip


def records_since(
    cluster: Cluster, topic: str, since: Position | None = None
) -> Iterator[pa.Table]:
    """The records of a topic from there to its present end, as a parser takes them."""
    start = None
    if since is not None:
        start = {number: at for (_, number), at in since.offsets.items()}
    for number, batch in read_batches(cluster, topic, start=start):
        yield as_records(
            batch.column("key"), batch.column("value"), topic, number,
            batch.column("offset"), batch.column("timestamp"),
        )  # fmt: skip


def as_records(
    keys: Any, values: Any, topic: str, partition: int = 0, at: Any = None, timestamp: Any = None
) -> pa.Table:
    """Columns as a parser takes them."""
    count = len(keys)
    stamp = pa.timestamp("us", "UTC")
    if timestamp is None:
        timestamp = pa.nulls(count, stamp)
    elif not pa.types.is_timestamp(timestamp.type):
        timestamp = timestamp.cast(pa.timestamp("ms", "UTC")).cast(stamp)
    return pa.table(
        {
            "key": pa.array(keys, pa.binary()) if isinstance(keys, list) else keys,
            "value": pa.array(values, pa.binary()) if isinstance(values, list) else values,
            "topic": pa.repeat(topic, count),
            "partition": pa.repeat(pa.scalar(partition, pa.int32()), count),
            "offset": pa.array(range(count), pa.int64()) if at is None else at,
            "timestamp": timestamp,
        }
    )


class TopicOrigin(Origin):
    """The table that a topic of changes tells."""

    is_log = True

    def __init__(self, cluster: Cluster, topic: str) -> None:
        super().__init__()
        self.topic = topic
        self.name = f"topic:{topic}"
        self._cluster = cluster
        if topic not in Metadata(cluster).topics([topic]):
            raise VerifyError(
                f"topic {topic} does not exist", advice="`penstock topics list` lists them."
            )

    def rows(self, parser: Parser) -> Iterator[Parsed]:
        self.aside = AsideKeys()
        for records in records_since(self._cluster, self.topic):
            parsed = parser.parse(records)
            self.aside.note(records, parsed)
            yield parsed

    def settle(self, deadline: float) -> None:
        return

    def estimate(self) -> int | None:
        metadata = Metadata(self._cluster)
        places = [(self.topic, number) for number in metadata.partitions(self.topic)]
        ends = offsets(self._cluster, dict.fromkeys(places, LATEST), metadata=metadata)
        starts = offsets(self._cluster, dict.fromkeys(places, EARLIEST), metadata=metadata)
        return sum(ends.values()) - sum(starts.values())


class TableOrigin(Origin):
    """A table of a captured database."""

    def __init__(self, cluster: Cluster, config: CaptureConfig, table: str) -> None:
        super().__init__()
        self._cluster = cluster
        self._config = config
        self._source: Source = open_source(config.source)
        self._position: DatabasePosition | None = None
        self._estimate: int | None = None
        try:
            self.table = _chosen(config, self._source.tables(), table)
            self.name = f"{config.name}.{self.table.full_name}"
            self._check()
            self.topic = self._composer(self.table, b"{}").topic
        except BaseException:
            self._source.close()
            raise

    def close(self) -> None:
        self._source.close()

    def _check(self) -> None:
        if self._config.events.format == AVRO:
            raise VerifyError(
                f"capture {self._config.name} writes Avro, which stores are not fed from",
                advice='Set format = "json".',
            )
        if self._status() is None:
            raise VerifyError(
                f"capture {self._config.name} has never run",
                advice=f"Run it: penstock capture run {self._config.name}",
            )

    def _composer(self, table: Table, source: bytes) -> Composer:
        # Rows that are read are whole: nothing has to be filled in from the log.
        settings = replace(self._config.events, unavailable=MARK)
        composer = Events(settings, self._source.kind).composer(table, source)
        if not isinstance(composer, Composer):
            raise VerifyError(f"{self.name} is an outbox: its rows become messages, not a table")
        if not composer.is_keyed:
            raise VerifyError(
                f"{self.name} has no key to compare rows by",
                advice=f"Give it a primary key, or say which columns are: [capture."
                f'{self._config.name}.keys] "{table.full_name}" = ["..."]',
            )
        return composer

    def rows(self, parser: Parser) -> Iterator[Parsed]:
        self.aside = AsideKeys()
        with self._source.snapshot() as snapshot:
            self._position = dict(snapshot.position)
            table = _chosen(self._config, snapshot.tables, self.table.full_name)
            self._estimate = snapshot.estimate(table)
            source = snapshot.source(table)
            composer = self._composer(table, source)
            for rows in self._read(snapshot, table):
                batch = Batch()
                composer.rows(rows, source, batch)
                for run in batch.take():
                    keys, values = run.whole()
                    records = as_records(keys, values, self.topic)
                    parsed = parser.parse(records)
                    self.aside.note(records, parsed)
                    yield parsed

    def _read(self, snapshot: Snapshot, table: Table) -> Iterator[Sequence[Row]]:
        where = self._config.snapshot.where.get(table.full_name, "")
        yield from snapshot.rows(table, where=where)

    def estimate(self) -> int | None:
        return self._estimate

    def settle(self, deadline: float) -> None:
        """Wait until the capture has written all that was committed before the position."""
        position = self._position
        assert position is not None
        began = time.monotonic()
        pause = Event()
        while True:
            state = state_of(self._cluster, self._config.name)
            if state is not None and self._has(state, position):
                return
            status = self._status()
            now = time.monotonic()
            if (status is None or not is_running(status)) and now - began > _GRACE_S:
                raise VerifyError(
                    f"capture {self._config.name} does not run, and the log lacks changes that "
                    "the database has",
                    advice=f"Run it: penstock capture run {self._config.name}",
                )
            if now >= deadline:
                raise VerifyError(
                    f"capture {self._config.name} has not written in time what the database has; "
                    f"it is at {None if state is None else state.position}, wanted is {position}",
                    advice="Give it more time with --timeout; is the capture behind, or paused?",
                )
            pause.wait(_POLL_S)

    def _has(self, state: State, position: DatabasePosition) -> bool:
        name = self.table.full_name
        if state.snapshot != DONE or state.position is None:
            return False
        if name not in state.tables or any(each.table == name for each in state.queue):
            # Its rows are being read only now.
            return False
        return reached(self._source.kind, state.position, position)

    def _status(self) -> Any:
        return status_of(self._cluster, self._config.name)


def reached(kind: str, at: DatabasePosition, wanted: DatabasePosition) -> bool:
    """Whether a position of a database is that of another, or behind it."""
    identity = {"sqlite": "id", "postgresql": "system", "mysql": "server"}[kind]
    if at.get(identity) != wanted.get(identity):
        raise VerifyError(
            f"the capture is at {dict(at)}, the database at {dict(wanted)}: it is another database",
            advice="Was it made anew? `penstock capture snapshot --all` reads it again.",
        )
    return _order(kind, at) >= _order(kind, wanted)


def _order(kind: str, position: Mapping[str, Any]) -> tuple[int, int]:
    if kind == "sqlite":
        return int(position["seq"]), 0
    if kind == "postgresql":
        return int(position["lsn"]), 0
    # Files of a binlog are numbered: mysql-bin.000042
    return int(str(position["file"]).rpartition(".")[2]), int(position["pos"])


def _chosen(config: CaptureConfig, tables: Any, wanted: str) -> Table:
    """The table of this full name, or the only one of this name."""
    known: list[Table] = list(tables)
    full = [each for each in known if each.full_name == wanted]
    short = [each for each in known if each.name == wanted]
    found = full or short
    if len(found) == 1:
        return found[0]
    names = ", ".join(each.full_name for each in known) or "none"
    problem = "several tables" if found else "no table"
    raise ConfigError(f"capture {config.name} has {problem} {wanted!r}", advice=f"It has: {names}.")
