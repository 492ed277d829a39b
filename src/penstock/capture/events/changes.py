"""The door of this folder: items of a source in, records for the log out.

`Events` finds the composer of each Table object, makes it where it is new (after an ALTER TABLE the
object is another one), and keeps count. One belongs to one session of a capture: what it remembers
(schemas that were registered, last values) is what the log of that session will hold.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from penstock.capture.blocks import Block, segments_of
from penstock.capture.events.avro import AvroEncoder
from penstock.capture.events.batch import Batch
from penstock.capture.events.composer import Composer, Emptier, Orders
from penstock.capture.events.encoding import Encoder, Moment
from penstock.capture.events.filling import LastValues, Read, SchemaOf
from penstock.capture.events.json import JsonEncoder
from penstock.capture.events.messages import COLLECTION, MessageEncoder
from penstock.capture.events.metadata import Metadata
from penstock.capture.events.naming import MESSAGE_SUFFIX
from penstock.capture.events.outbox import OutboxComposer
from penstock.capture.events.registry import SchemaRegistry
from penstock.capture.events.settings import AVRO, FILL, JSON, EventSettings, matches_any
from penstock.capture.events.shape import Shape, shape_of
from penstock.capture.events.table_schemas import (
    SchemaVersion,
    differences,
    table_schema,
    table_subject,
)
from penstock.capture.source import (
    MESSAGE,
    READ,
    CaptureError,
    Change,
    Fragment,
    Part,
    Row,
    Table,
)
from penstock.client.table_schemas import (
    JSON_SCHEMA,
    SCHEMAS_TOPIC,
    SchemaError,
    TableSchema,
    UnknownSchemaError,
)

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
        publish: Callable[[], None] | None = None,
        schema: SchemaOf | None = None,
        altered: Callable[[SchemaVersion], None] = lambda version: None,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """`publish` puts what the registry has pending into the log, before the events; without it
        the schemas are in the batch with the events. `schema` finds those that were published
        before, and `altered` hears of tables whose schema is another one now."""
        self.settings = settings
        self.kind = kind
        self.moment = Moment(clock_ns)
        self.registry = registry or SchemaRegistry()
        self._partitions = partitions
        self._emptier = emptier
        self._publish = publish
        self._schema = schema
        self._altered = altered
        # By table, what its events are written with now. Another thread may look.
        self.schemas: dict[str, SchemaVersion] = {}
        # By id, those that this session has met.
        self._met: dict[int, TableSchema] = {}
        self._composers: dict[Table, Composer | OutboxComposer] = {}
        self._metadata = (
            Metadata(settings.prefix, schemas=settings.schemas)
            if settings.transaction_metadata
            else None
        )
        self._messages = MessageEncoder(
            kind, settings.prefix, self.moment, schemas=settings.schemas
        )
        self._last_values: LastValues | None = None
        if settings.unavailable == FILL and read is not None:
            self._last_values = LastValues(read, folder, self._schema_of)

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

    def introduce(self, tables: Iterable[Table]) -> None:
        """Publish the schemas of tables that have none yet: there may be no event for a long while.
        What the events of others are written with is seen when they come."""
        if not self._publishes:
            return
        for table in tables:
            # What does not fit the settings is told when its first event comes.
            with suppress(CaptureError):
                shape = None if self._is_outbox(table) else shape_of(self.settings, table)
                if shape is not None and table.columns:
                    self._register(shape, only_new=True)
        self._publish_pending()

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
        settings, values = self.settings, self._last_values
        if settings.outbox is not None and self._is_outbox(table):
            return OutboxComposer(settings, settings.outbox, table)
        shape = shape_of(settings, table)
        schema_id = None
        # Of a table that is gone only the truncate may still come.
        if self._publishes and table.columns:
            schema_id = self._register(shape)
        encoder = self._encoder(shape, source, None if settings.schemas else schema_id)
        self._publish_pending()
        return Composer(
            shape,
            encoder,
            settings,
            partitions=self._partitions,
            filler=None if values is None else values.prepare(shape, schema_id),
            emptier=self._emptier,
        )

    def _is_outbox(self, table: Table) -> bool:
        outbox = self.settings.outbox
        return outbox is not None and matches_any((outbox.table,), table.full_name)

    def _encoder(self, shape: Shape, source: Fragment, schema_id: int | None) -> Encoder:
        settings, kind, moment = self.settings, self.kind, self.moment
        if settings.format == AVRO:
            return AvroEncoder(shape, settings, kind, source, moment, self.registry)
        return JsonEncoder(shape, settings, kind, source, moment, schema_id)

    # ---- schemas -------------------------------------------------------------------------

    @property
    def _publishes(self) -> bool:
        return self.settings.publish_schemas and self.settings.format == JSON

    def _register(self, shape: Shape, *, only_new: bool = False) -> int:
        """The id of the schema of a shape's events, which is registered where it is new."""
        subject = table_subject(shape, self.settings.prefix)
        schema = table_schema(shape, self.kind)
        before = self.registry.latest(subject)
        if before is None or not only_new:
            self.registry.id_of(subject, schema.as_json_schema(), JSON_SCHEMA)
        version, id_ = self.registry.latest(subject) or (0, 0)
        if not only_new or before is None:
            self._meet(id_, schema)
        changes = ""
        if before is not None and before[1] != id_:
            # It may have been one of Avro, or none of ours.
            with suppress(SchemaError):
                changes = differences(self._schema_of(before[1]), schema)
        name = shape.table.full_name
        last = self.schemas.get(name)
        if last is not None and last.id == id_ and not changes:
            # Another object of the same table.
            return id_
        # Those that were altered last stand at the end.
        self.schemas.pop(name, None)
        made = self.schemas[name] = SchemaVersion(name, shape.topic, version, id_, changes)
        if changes:
            self._altered(made)
        return id_

    def _schema_of(self, id_: int) -> TableSchema:
        met = self._met.get(id_)
        if met is not None:
            return met
        if self._schema is None:
            raise UnknownSchemaError(f"schema {id_} is unknown")
        return self._schema(id_)

    def _meet(self, id_: int, schema: TableSchema) -> None:
        while len(self._met) >= COMPOSERS_MAX:
            del self._met[next(iter(self._met))]
        self._met[id_] = schema

    def _publish_pending(self) -> None:
        if self._publish is not None and self.registry.pending:
            self._publish()

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
            for record in self.registry.take_pending():
                run.add(*record.encode())


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
