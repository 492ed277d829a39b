"""Changes of one table into records: what each operation becomes.

| change | records |
|---|---|
| insert, snapshot row | `c`, `r` |
| update | `u` |
| update of the key | `d` of the old key, a tombstone, `c` of the new; headers name the other key |
| delete | `d`, and a tombstone so that compaction forgets the row |
| truncate | `d` and a tombstone for each row that the topic has; `t` where it is not skipped |

A table without a key has null keys, in a topic that is not compacted. The key of `t` is the JSON
value null rather than none at all, since a compacted topic takes no record without a key.

The deletes of a truncate are for whoever follows the topic row by row, and for compaction; `t`
goes into every partition. Where nothing tells rows apart, or the topic has forgotten some by its
retention, or for another reason the deletes are not all there, `t` is written although it is
skipped, so that who keeps the rows learns of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from penstock.capture.blocks import Block, RowBlock
from penstock.capture.events.batch import Batch, Run
from penstock.capture.events.columns import AddBlock, AddRows, quick_blocks, quick_row_blocks
from penstock.capture.events.encoding import Encoder, Order
from penstock.capture.events.json import JsonEncoder, picker
from penstock.capture.events.quick import AddAll, Rows, quick_changes, quick_rows
from penstock.capture.events.settings import AVRO, DELETES, EventSettings
from penstock.capture.events.shape import Shape
from penstock.capture.source import (
    CREATE,
    DELETE,
    NULL,
    READ,
    TRUNCATE,
    UNAVAILABLE,
    UPDATE,
    CaptureError,
    Change,
    Fragment,
    Row,
)

NEW_KEY, OLD_KEY = "__debezium.newkey", "__debezium.oldkey"

# Gives the next place in the source transaction to an event of this table; None where nobody asks.
Orders = Callable[[], Order]


class Filler(Protocol):
    """The last values of a topic's rows, for what the database did not send."""

    def fill(self, topic: str, key: bytes, shown: Row) -> Row:
        """The row with what is known put in for what is unavailable."""
        ...

    def keep(self, topic: str, key: bytes, shown: Row) -> None:
        """This is the last value now."""
        ...

    def forget(self, topic: str, key: bytes) -> None: ...

    def forget_all(self, topic: str) -> None: ...


class Emptier(Protocol):
    """Knows which rows a topic holds, to delete them one by one."""

    def rows(self, shape: Shape, source: Fragment, batch: Batch) -> Iterator[tuple[bytes, bytes]]:
        """The keys of the table's rows in its topic, as it is with all that was written and with
        what is in the batch, and the last event of each, or nothing where it is not known. Whatever
        is put into the batch on the way may be written at once."""
        ...

    def may_leave_rows(self, shape: Shape) -> bool:
        """Whether rows may be left that `rows` has not told: the topic has forgotten them, or they
        look like somebody else's, or they are too many."""
        ...

    def cannot(self, shape: Shape) -> None:
        """A truncate came of a table whose rows nothing tells apart."""
        ...


class Composer:
    """Makes records of the changes of one Table object."""

    def __init__(
        self,
        shape: Shape,
        encoder: Encoder,
        settings: EventSettings,
        *,
        partitions: Callable[[str], int],
        filler: Filler | None = None,
        emptier: Emptier | None = None,
    ) -> None:
        self.shape = shape
        self.topic = shape.topic
        self.is_keyed = bool(shape.key)
        self._encoder = encoder
        self._key: Callable[[Row], bytes | None] = (
            encoder.key if self.is_keyed else lambda row: None
        )
        self._pick = picker(shape.shown)
        self._key_of = picker(shape.key)
        self._tombstones = settings.tombstones
        self._skip = settings.skip
        self._passes = shape.passes
        self._partitions = partitions
        self._filler = filler if self.is_keyed else None
        self._emptier = emptier if settings.truncates == DELETES else None
        # In Avro nobody looks whose an event is.
        self._is_told_apart = shape.tells_rows and not (shape.may_share and settings.format == AVRO)
        # Nothing is looked at but the fragments themselves: the common case, made quick.
        self._plain = shape.is_plain and filler is None
        self._quick: AddAll | None = None
        self._quick_rows: Rows | None = None
        self._quick_block: AddBlock | None = None
        self._quick_row_block: AddRows | None = None
        if self._plain and isinstance(encoder, JsonEncoder) and shape.passes is None:
            self._make_quick(encoder)

    def _make_quick(self, encoder: JsonEncoder) -> None:
        head, row, tail = encoder.templates()
        if READ not in self._skip:
            self._quick_rows = quick_rows(head, row, tail, b"r", encoder.moment)
            if self.is_keyed:
                self._quick_row_block = quick_row_blocks(
                    self.topic,
                    (head, row, tail),
                    encoder.key_template(),
                    self.shape.key,
                    b"r",
                    encoder.moment,
                )
        if self.is_keyed and not self.shape.own_key and not self._skip & {CREATE, UPDATE, DELETE}:
            self._quick = quick_changes(
                self.topic,
                head,
                row,
                tail,
                encoder.key,
                self._key_of,
                encoder.moment,
                self.add,
                tombstones=self._tombstones,
            )
            self._quick_block = quick_blocks(
                self.topic,
                (head, row, tail),
                encoder.key_template(),
                self.shape.key,
                encoder.moment,
                tombstones=self._tombstones,
            )

    def add_all(self, changes: Sequence[Change], batch: Batch) -> int:
        """Put the events of several changes into the batch, in order; how many envelopes."""
        if self._quick_block is not None and isinstance(changes, Block):
            return self._quick_block(changes, batch)
        if self._quick is not None:
            return self._quick(changes, batch)
        return sum([self.add(change, batch) for change in changes])

    def add(self, change: Change, batch: Batch, orders: Orders | None = None) -> int:
        """Put a change's events into the batch; how many envelopes it became."""
        table, op, before, after, source, _ = change
        if op == TRUNCATE:
            return self._truncate(source, batch, orders)
        if op in self._skip:
            return 0
        if after is not None and UNAVAILABLE in after and before is not None:
            after = available(before, after)
        if self._passes is not None and not self._passes(op, before, after):
            return 0
        run = batch.run(self.topic, compacted=self.is_keyed)
        if op in (CREATE, READ) and after is not None:
            self._write(run, op, None, after, source, orders)
            return 1
        if op == UPDATE and after is not None:
            return self._update(run, before, after, source, orders)
        if op == DELETE:
            self._delete(run, before, source, orders)
            return 1
        raise CaptureError(f"table {table.full_name}: a change {op!r} without its row")

    def rows(self, rows: Sequence[Row], source: Fragment, batch: Batch, op: str = READ) -> int:
        """Put rows of a snapshot into the batch; how many passed."""
        if op in self._skip or not rows:
            return 0
        if self._quick_row_block is not None and isinstance(rows, RowBlock) and op == READ:
            self._quick_row_block(rows, source, batch)
            return len(rows)
        if self._passes is not None:
            passes = self._passes
            rows = [row for row in rows if passes(op, None, row)]
        run = batch.run(self.topic, compacted=self.is_keyed)
        if self._quick_rows is not None and op == READ:
            key = self._key
            run.keys += [key(row) for row in rows]
            run.values += self._quick_rows(rows, source)
        else:
            for row in rows:
                self._write(run, op, None, row, source, None)
        return len(rows)

    def keys_of(self, rows: Sequence[Row]) -> list[bytes]:
        """The keys of rows, of a table that has one."""
        key = self._encoder.key
        return [key(row) for row in rows]

    def gone(
        self,
        key: bytes,
        source: Fragment,
        batch: Batch,
        orders: Orders | None = None,
        event: bytes = b"",
    ) -> None:
        """A row of which only the key is known, or its last event, is not there any more."""
        run = batch.run(self.topic)
        value = self._encoder.gone(key, event, source, orders)
        if value is not None:
            run.add(key, value)
        if self._tombstones or value is None:
            run.add(key, None)
        if self._filler is not None:
            self._filler.forget(self.topic, key)

    # ---- operations ----------------------------------------------------------------------

    def _write(
        self,
        run: Run,
        op: str,
        before: Row | None,
        after: Row,
        source: Fragment,
        orders: Orders | None,
        old_key: bytes | None = None,
    ) -> None:
        """An event with a row after it; `old_key` is where the row was until now, if elsewhere."""
        key = self._key(after)
        encode = self._encoder.row
        if self._plain and UNAVAILABLE not in after:
            made = encode(after)
            past = None if before is None else encode(before)
        else:
            made = encode(self._shown(after, key, old_key or key))
            past = None if before is None else encode(self._shown_before(before))
        order = None if orders is None else orders()
        headers = () if old_key is None else ((OLD_KEY, old_key),)
        run.add(key, self._encoder.value(op, past, made, source, order), headers)

    def _update(
        self, run: Run, before: Row | None, after: Row, source: Fragment, orders: Orders | None
    ) -> int:
        key_of = self._key_of
        if (
            before is None
            or key_of(before) == key_of(after)
            or (self.shape.own_key and self._is_partial(before))
        ):
            self._write(run, UPDATE, before, after, source, orders)
            return 1
        old_key, new_key = self._encoder.key(before), self._encoder.key(after)
        # The new row may lack what only the old one's last event still tells.
        shown = self._shown(after, new_key, old_key)
        order = None if orders is None else orders()
        past = self._encoder.row(self._shown_before(before))
        gone = self._encoder.value(DELETE, past, None, source, order)
        run.add(old_key, gone, ((NEW_KEY, new_key),))
        if self._tombstones:
            run.add(old_key, None)
        if self._filler is not None:
            self._filler.forget(self.topic, old_key)
        order = None if orders is None else orders()
        made = self._encoder.value(CREATE, None, self._encoder.row(shown), source, order)
        run.add(new_key, made, ((OLD_KEY, old_key),))
        return 2

    def _delete(
        self, run: Run, before: Row | None, source: Fragment, orders: Orders | None
    ) -> None:
        order = None if orders is None else orders()
        if before is None:
            if self.is_keyed:
                raise self._no_old_row("a delete does not tell which row is gone")
            run.add(None, self._encoder.value(DELETE, None, None, source, order))
            return
        if self.shape.own_key and self._is_partial(before):
            raise self._no_old_row("a delete does not tell the columns that are set as its key")
        key = self._key(before)
        past = self._encoder.row(self._shown_before(before))
        run.add(key, self._encoder.value(DELETE, past, None, source, order))
        if key is None:
            return
        if self._tombstones:
            run.add(key, None)
        if self._filler is not None:
            self._filler.forget(self.topic, key)

    def _truncate(self, source: Fragment, batch: Batch, orders: Orders | None) -> int:
        count, is_expanded, is_needed = 0, False, TRUNCATE not in self._skip
        emptier = self._emptier
        if emptier is not None and not self._is_told_apart:
            emptier.cannot(self.shape)
            is_needed = True
        elif emptier is not None and DELETE not in self._skip and self.shape.takes_deletes:
            for key, event in emptier.rows(self.shape, source, batch):
                if key != self._encoder.whole_key:
                    self.gone(key, source, batch, orders, event)
                    count += 1
            is_expanded = not emptier.may_leave_rows(self.shape)
            is_needed |= not is_expanded
        if not is_needed:
            return count
        order = None if orders is None else orders()
        value = self._encoder.truncate(source, order, is_expanded=is_expanded)
        if self.is_keyed or self._is_told_apart:
            partitions = self._partitions(self.topic)
            batch.everywhere(self.topic, partitions, self._encoder.whole_key, value)
            if self._filler is not None and not is_expanded:
                self._filler.forget_all(self.topic)
        else:
            batch.run(self.topic, compacted=False).add(None, value)
        return count + 1

    # ---- rows ----------------------------------------------------------------------------

    def _shown(self, row: Row, key: bytes | None, last_key: bytes | None) -> Row:
        """What is shown of a new row, complete as far as can be."""
        shown = self._changed(row)
        if self._filler is not None and key is not None and last_key is not None:
            if UNAVAILABLE in shown:
                shown = self._filler.fill(self.topic, last_key, shown)
            self._filler.keep(self.topic, key, shown)
        return self._marked(shown)

    def _shown_before(self, row: Row) -> Row:
        return self._marked(self._changed(row))

    def _changed(self, row: Row) -> Row:
        shown = self._pick(row)
        if not self.shape.changes:
            return shown
        parts = list(shown)
        for place, change in self.shape.changes:
            parts[place] = change(parts[place])
        return tuple(parts)

    def _marked(self, shown: Row) -> Row:
        if UNAVAILABLE not in shown:
            return shown
        mark = self._encoder.unavailable
        return tuple(
            mark(place) if part == UNAVAILABLE else part for place, part in enumerate(shown)
        )

    def _is_partial(self, before: Row) -> bool:
        """Whether an old row seems to hold no more than what the database calls the key."""
        table = self.shape.table
        known = set(table.key)
        return all(
            part == NULL
            for part, column in zip(before, table.columns, strict=True)
            if column.name not in known
        )

    def _no_old_row(self, reason: str) -> CaptureError:
        name = self.shape.table.full_name
        return CaptureError(
            f"table {name}: {reason}",
            advice=f"Have the database log whole rows (PostgreSQL: ALTER TABLE {name} REPLICA "
            "IDENTITY FULL; MySQL: binlog_row_image=FULL), or take the key out of the settings.",
        )


def available(before: Row, after: Row) -> Row:
    """The new row, with what the old one knows put in for what is unavailable."""
    return tuple(
        old if new == UNAVAILABLE and old != NULL else new
        for old, new in zip(before, after, strict=True)
    )
