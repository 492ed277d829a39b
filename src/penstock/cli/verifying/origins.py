"""What a store is compared with: a table of a captured database, or the table that a topic tells.

An origin gives its rows as the store would have them: events as a capture makes them, read by the
parser that feeds the store. And it tells when the log has all that these rows showed.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pyarrow as pa

from penstock.capture.delivery.config import CaptureConfig
from penstock.capture.events.batch import Batch
from penstock.capture.events.changes import Events
from penstock.capture.events.composer import Composer
from penstock.capture.events.settings import AVRO, MARK
from penstock.capture.events.shape import shape_of
from penstock.capture.events.table_schemas import table_schema
from penstock.capture.source import Position as DatabasePosition
from penstock.capture.source import Row, Snapshot, Source, Table
from penstock.capture.sources import open_source
from penstock.cli.verifying.captured import CaptureProgress
from penstock.cli.verifying.report import VerifyError
from penstock.cli.verifying.set_aside import AsideKeys, SetAside
from penstock.client.connection import Cluster
from penstock.client.metadata import EARLIEST, LATEST, Metadata, offsets
from penstock.client.reading import read_batches
from penstock.errors import ConfigError
from penstock.sinks.contract import Position
from penstock.spark.sinking.parsing import Parsed, Parser


class Origin(ABC):
    """One side of a comparison."""

    # The topic through which its rows come to stores.
    topic: str
    # How a user calls it.
    name: str
    # Of the same key the last row counts.
    is_log = False
    # Its rows are forms already (`values.Form`), and not what a parser gives.
    has_forms = False

    def __init__(self) -> None:
        # Of the last time that the rows were read.
        self.aside = AsideKeys()

    def set_aside(self) -> tuple[int, list[SetAside]]:
        """How many keys have no row that a store could hold, and the first of them."""
        return self.aside.found()

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
        self._progress = CaptureProgress(cluster, config, self._source.kind)
        self._position: DatabasePosition | None = None
        self._estimate: int | None = None
        try:
            self.table = chosen_table(config, self._source.tables(), table)
            self.name = f"{config.name}.{self.table.full_name}"
            self._check()
            events = events_of(config, self._source.kind)
            self.topic = self._composer(events, self.table, b"{}").topic
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
        self._progress.check()

    def _composer(self, events: Events, table: Table, source: bytes) -> Composer:
        composer = events.composer(table, source)
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
            table = chosen_table(self._config, snapshot.tables, self.table.full_name)
            self._estimate = snapshot.estimate(table)
            source = snapshot.source(table)
            events = events_of(self._config, self._source.kind)
            composer = self._composer(events, table, source)
            parser = self._knowing(parser, events, table)
            for rows in self._read(snapshot, table):
                batch = Batch()
                composer.rows(rows, source, batch)
                for run in batch.take():
                    keys, values = run.whole()
                    records = as_records(keys, values, self.topic)
                    parsed = parser.parse(records)
                    self.aside.note(records, parsed)
                    yield parsed

    def _knowing(self, parser: Parser, events: Events, table: Table) -> Parser:
        """The parser that knows the schema of these events: the capture may have yet to publish
        it, where the table was just altered."""
        version = events.schemas.get(table.full_name)
        if version is None:
            return parser
        schema = table_schema(shape_of(events.settings, table), events.kind)
        return replace(parser, schemas={**parser.schemas, version.id: schema})

    def _read(self, snapshot: Snapshot, table: Table) -> Iterator[Sequence[Row]]:
        where = self._config.snapshot.where.get(table.full_name, "")
        yield from snapshot.rows(table, where=where)

    def estimate(self) -> int | None:
        return self._estimate

    def settle(self, deadline: float) -> None:
        """Wait until the capture has written all that was committed before the position."""
        assert self._position is not None
        self._progress.wait(self._position, {self.table.full_name}, deadline)


def events_of(config: CaptureConfig, kind: str) -> Events:
    """What makes events as a capture does, of rows that are read."""
    # They are whole: nothing has to be filled in from the log.
    return Events(replace(config.events, unavailable=MARK), kind)


def chosen_table(config: CaptureConfig, tables: Any, wanted: str) -> Table:
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
