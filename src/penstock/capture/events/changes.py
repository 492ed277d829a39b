"""The door of this folder: items of a source in, records for the log out.

`Events` finds the composer of each Table object, makes it where it is new (after an ALTER TABLE the
object is another one), and keeps count. One belongs to one session of a capture: what it remembers
(schemas that were registered, last values) is what the log of that session will hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from penstock.capture.blocks import Block, segments_of
from penstock.capture.events.avro import AvroEncoder
from penstock.capture.events.batch import Batch
from penstock.capture.events.composer import Composer, Emptier, Orders
from penstock.capture.events.encoding import Encoder, Moment
from penstock.capture.events.filling import LastValues, Read
from penstock.capture.events.json import JsonEncoder
from penstock.capture.events.messages import COLLECTION, MessageEncoder
from penstock.capture.events.metadata import Metadata
from penstock.capture.events.naming import MESSAGE_SUFFIX
from penstock.capture.events.outbox import OutboxComposer
from penstock.capture.events.registry import SCHEMAS_TOPIC, SchemaRegistry
from penstock.capture.events.settings import AVRO, FILL, EventSettings, matches_any
from penstock.capture.events.shape import Shape, shape_of
from penstock.capture.source import MESSAGE, READ, Change, Fragment, Part, Row, Table

# Table objects that are kept in mind; one more pushes the oldest out.
COMPOSERS_MAX: Final = 10_000
_SAME_MAX: Final = 4


class Events:
    """Makes events of one database's changes."""

    def __init__(
        self,
        settings: EventSettings,
        kind: str,
        *,
        partitions: Callable[[str], int] = lambda topic: 1,
        registry: SchemaRegistry | None = None,
        read: Read | None = None,
        folder: str | Path | None = None,
        emptier: Emptier | None = None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self.settings = settings
        self.kind = kind
        self.moment = Moment(clock_ns)
        self.registry = registry or SchemaRegistry()
        self._partitions = partitions
        self._emptier = emptier
        self._composers: dict[Table, Composer | OutboxComposer] = {}
        avro = self.registry if settings.format == AVRO else None
        self._metadata = (
            Metadata(settings.prefix, schemas=settings.schemas, registry=avro)
            if settings.transaction_metadata
            else None
        )
        self._messages = MessageEncoder(
            kind, settings.prefix, self.moment, schemas=settings.schemas, registry=avro
        )
        self._last_values: LastValues | None = None
        if settings.unavailable == FILL and read is not None:
            self._last_values = LastValues(read, folder)

    def close(self) -> None:
        if self._last_values is not None:
            self._last_values.close()

    @property
    def missed(self) -> int:
        """Unavailable values that the log did not have either."""
        return 0 if self._last_values is None else self._last_values.missed

    def part(self, part: Part, batch: Batch) -> int:
        """The events of a part of a transaction; how many envelopes."""
        if self._metadata is not None:
            return self._told_part(part, batch, self._metadata)
        composers = self._composers
        count = 0
        for segment in segments_of(part.changes):
            if isinstance(segment, Block):
                table = segment.table
                composer = composers.get(table) or self.composer(table, segment[0].source)
                count += composer.add_all(segment, batch)
                continue
            for changes in _by_table(segment):
                table, _, _, _, source, _ = changes[0]
                composer = composers.get(table) or self.composer(table, source)
                count += composer.add_all(changes, batch)
        if part.messages:
            count += self._add_messages(part, batch, None)
        self._add_schemas(batch)
        return count

    def rows(
        self, table: Table, rows: Sequence[Row], source: Fragment, batch: Batch, op: str = READ
    ) -> int:
        """The events of rows of a snapshot; how many."""
        composer = self._composers.get(table) or self.composer(table, source)
        count = composer.rows(rows, source, batch, op)
        self._add_schemas(batch)
        return count

    def change(self, change: Change, batch: Batch) -> int:
        """The events of a change outside of any transaction; how many."""
        composer = self._composers.get(change.table) or self.composer(change.table, change.source)
        count = composer.add(change, batch)
        self._add_schemas(batch)
        return count

    def composer(self, table: Table, source: Fragment) -> Composer | OutboxComposer:
        """What makes events of this table, made where it is new."""
        found = self._composers.get(table)
        if found is not None:
            return found
        # Old objects of the same table do not come again; the stream and a snapshot may each have
        # one of their own for a while.
        name = table.full_name
        for other in [item for item in self._composers if item.full_name == name][: 1 - _SAME_MAX]:
            del self._composers[other]
        while len(self._composers) >= COMPOSERS_MAX:
            del self._composers[next(iter(self._composers))]
        made = self._composers[table] = self._make(table, source)
        return made

    def _make(self, table: Table, source: Fragment) -> Composer | OutboxComposer:
        settings = self.settings
        outbox = settings.outbox
        if outbox is not None and matches_any((outbox.table,), table.full_name):
            return OutboxComposer(settings, outbox, table)
        shape = shape_of(settings, table)
        return Composer(
            shape,
            self._encoder(shape, source),
            settings,
            partitions=self._partitions,
            filler=None if self._last_values is None else self._last_values.prepare(shape),
            emptier=self._emptier,
        )

    def _encoder(self, shape: Shape, source: Fragment) -> Encoder:
        settings, kind, moment = self.settings, self.kind, self.moment
        if settings.format == AVRO:
            return AvroEncoder(shape, settings, kind, source, moment, self.registry)
        return JsonEncoder(shape, settings, kind, source, moment)

    def _told_part(self, part: Part, batch: Batch, metadata: Metadata) -> int:
        """A part of a transaction that is told of: with its boundaries and each event's place."""
        run = batch.run(metadata.topic, compacted=False)
        if part.is_first:
            run.add(*metadata.begin(part))
        count = 0
        orders: dict[Table, Orders] = {}
        for change in part.changes:
            table = change.table
            composer = self._composers.get(table) or self.composer(table, change.source)
            order = orders.get(table)
            if order is None:
                order = orders[table] = metadata.orders(table.full_name)
            count += composer.add(change, batch, order)
        if part.messages:
            count += self._add_messages(part, batch, metadata.orders(COLLECTION))
        if part.is_last:
            batch.run(metadata.topic, compacted=False).add(*metadata.end(part))
        self._add_schemas(batch)
        return count

    def _add_messages(self, part: Part, batch: Batch, orders: Orders | None) -> int:
        if MESSAGE in self.settings.skip:
            return 0
        run = batch.run(self.settings.prefix + MESSAGE_SUFFIX, compacted=False)
        for message in part.messages:
            order = None if orders is None else orders()
            run.add(*self._messages.record(part, message, order))
        return len(part.messages)

    def _add_schemas(self, batch: Batch) -> None:
        if self.registry.pending:
            run = batch.run(SCHEMAS_TOPIC)
            for key, value in self.registry.take_pending():
                run.add(key, value)


def _by_table(changes: Sequence[Change]) -> Iterator[Sequence[Change]]:
    """Changes in their order, in runs of the same table."""
    if not changes:
        return
    start, table = 0, changes[0].table
    for at, change in enumerate(changes):
        if change.table is not table:
            yield changes[start:at]
            start, table = at, change.table
    yield changes[start:] if start else changes
