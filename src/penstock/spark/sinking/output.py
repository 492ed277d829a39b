"""A sink as the output of a flow: the rows of each micro-batch go to a table, a cache, an index.

    from penstock.spark import flow, store, stream

    @flow(inputs=[orders], output=store("sqlite:///shop.db?table=totals", key="customer"),
          mode="update")
    def totals(orders):
        return orders.groupBy("customer").sum("amount")

A row replaces the one with the same key. With a column `_deleted` (boolean) a row that has it true
is taken out instead. Of several rows with the same key in a micro-batch any one is taken, unless
they have the columns `_partition` and `_offset`, as rows of a stream do: then the last.

A row that the store cannot take goes to the topic `dead_letters` (FLOW.dead, unless said otherwise)
as JSON, with the reason in its headers.

The position in the store is the flow's generation and the number of its micro-batch. A batch that
runs again after a failure is known by it, and skipped; a store that lacks batches, because it was
put back from a backup or removed, is an error.

A flow that is reset fills a second store beside the old one, which takes its place when the rebuild
has caught up: no row is left that only the old code made. What cannot be built beside itself, a
webhook, gets the rows again; and so does a table that several flows write, which is not one's own.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.errors import ConfigError
from penstock.sinks import Changes, Position, Refused, Schema, Sink, open_sink
from penstock.sinks.contract import ORIGIN
from penstock.sinks.schema import is_json
from penstock.sinks.stores import parse
from penstock.spark.sinking.errors import FeedingError
from penstock.spark.sinking.letters import Letter, Letters, packed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from penstock.spark.flows.declare import Batch
    from penstock.spark.flows.inputs import Place

DELETED: Final = "_deleted"
_ORDER: Final = ("_partition", "_offset")
_MAX_SHOWN: Final = 3


class RefusedRowsError(FeedingError):
    """A store cannot take rows that a flow has made."""

    advice = "Change the flow so that it leaves such rows out, or makes them fit."


@dataclass(frozen=True, slots=True)
class SinkOutput:
    """What `store` gives: an output of a flow."""

    url: str = field(repr=False)
    key: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    dead_letters: str = ""

    @property
    def target(self) -> str:
        address = parse(self.url, self.options)
        table = address.option("table")
        return f"sink {address.shown}{f' {table}' if table else ''}"

    def write(self, rows: DataFrame, batch: Batch) -> int:
        """Write a micro-batch; the same one again is skipped. How many rows were taken."""
        table = rows.toArrow()
        kept = [name for name in table.column_names if not name.startswith("_")]
        try:
            schema = Schema.of([table.schema.field(name) for name in kept], self.key)
        except ConfigError as error:
            raise FeedingError(f"flow {batch.flow!r}: {error}", advice=error.advice) from error
        place = (f"flow:{batch.flow}:{_generation(batch)}", 0)
        changes = _changes(table, schema, Position({place: batch.batch_id + 1}))
        with self._opened(batch, place) as sink:
            at = sink.open(schema)
            behind = at.offsets.get(place, 0)
            if behind > batch.batch_id + 1:
                raise FeedingError(
                    f"{sink.target} has batch {behind - 1} of flow {batch.flow!r}, whose "
                    f"checkpoint is at batch {batch.batch_id}: it is older than the store",
                    advice=f"`penstock flows reset {batch.flow}` builds it from the log.",
                )
            if behind < batch.batch_id:
                raise FeedingError(
                    f"{sink.target} lacks batches {behind} to {batch.batch_id - 1} of flow "
                    f"{batch.flow!r}: it was put back from a backup, or removed",
                    advice=f"`penstock flows reset {batch.flow}` builds it from the log.",
                )
            return sink.apply(changes, partial(self._aside, batch, changes)).rows

    def _opened(self, batch: Batch, place: tuple[str, int]) -> Sink:
        """The store to write to: of a rebuild the one beside, until that has taken its place."""
        live = open_sink(self.url, self.options, name=batch.flow)
        if not getattr(batch, "is_rebuild", False) or not live.rebuildable:
            return live
        at = live.position()
        if at is not None and (place in at.offsets or not _is_own(at, batch.flow)):
            return live
        with live:
            beside = live.beside()
            built = beside.position()
            if built is not None and place not in built.offsets:
                # Of a rebuild that was given up.
                beside.close()
                beside = live.beside(fresh=True)
            return beside

    def switch(self, flow: str, generation: int) -> None:
        """Let what a rebuild has filled take the place of the store; again does no harm."""
        place = (f"flow:{flow}:g{generation}", 0)
        with open_sink(self.url, self.options, name=flow) as live:
            if not live.rebuildable:
                return
            with live.beside() as beside:
                built, schema = beside.position(), beside.stored_schema()
                if built is not None and schema is not None and place in built.offsets:
                    beside.open(schema)
                    beside.switch()

    def _aside(self, batch: Batch, changes: Changes, refused: Sequence[Refused]) -> None:
        place: Place | None = getattr(batch, "place", None)
        if place is None:
            _refuse(refused)
            return
        names = changes.deletes.column_names
        wanted = {each.key for each in refused}
        keys = zip(*(changes.upserts.column(name).to_pylist() for name in names), strict=True)
        rows = {
            key: packed(changes.upserts.slice(at, 1).to_pylist()[0])
            for at, key in enumerate(keys)
            if key in wanted
        }
        with place.cluster() as cluster:
            letters = Letters(cluster, self.dead_letters or f"{batch.flow}.dead", batch.flow)
            letters.write(
                (
                    Letter(each.topic, each.partition, each.offset, each.reason,
                           packed(dict(zip(names, each.key, strict=True))), rows.get(each.key))
                    for each in refused
                ),
                as_they_are=True,
            )  # fmt: skip


def store(
    url: str,
    *,
    key: str | Sequence[str],
    options: Mapping[str, Any] | None = None,
    dead_letters: str = "",
) -> SinkOutput:
    """A derived store as the output of a flow; see the module. The columns are those of the rows,
    without those that begin with `_`."""
    parse(url, options)
    keys = (key,) if isinstance(key, str) else tuple(key)
    return SinkOutput(url, keys, dict(options or {}), dead_letters)


def _is_own(at: Position, flow: str) -> bool:
    """Whether nobody but a flow has written what a store has."""
    return all(name.startswith(f"flow:{flow}:") for name, _ in at.offsets)


def _generation(batch: Batch) -> str:
    """Batches are counted anew in each generation of a flow, which its checkpoint's path tells."""
    found = re.findall(r"/(g\d+)(?=/|$)", str(getattr(batch, "checkpoint", "")))
    return found[-1] if found else "g1"


def _refuse(refused: Sequence[Refused]) -> None:
    told = "; ".join(f"{each.key}: {each.reason}" for each in refused[:_MAX_SHOWN])
    raise RefusedRowsError(f"the store refuses {len(refused)} rows of the flow: {told}")


def _changes(table: pa.Table, schema: Schema, position: Position) -> Changes:
    table = _last_of_each(table, list(schema.key))
    gone = pa.nulls(table.num_rows, pa.bool_())
    if DELETED in table.column_names:
        gone = table.column(DELETED)
    is_gone = pc.fill_null(gone, False)
    upserts, deletes = table.filter(pc.invert(is_gone)), table.filter(is_gone)
    ((name, number), until) = next(iter(position.offsets.items()))
    origin = {"topic": name, "partition": number, "offset": until - 1,
              "timestamp": dt.datetime.now(dt.UTC)}  # fmt: skip
    return Changes(
        pa.table([_cast(upserts.column(f.name), f) for f in schema.fields], schema=schema.arrow),
        deletes.select(list(schema.key)).cast(schema.key_arrow),
        position,
        Position(),
        pa.Table.from_pylist([origin] * upserts.num_rows, schema=ORIGIN),
        pa.Table.from_pylist([origin] * deletes.num_rows, schema=ORIGIN),
    )


def _cast(column: pa.ChunkedArray, wanted: pa.Field) -> pa.ChunkedArray:
    if is_json(wanted) and pa.types.is_nested(column.type):
        import orjson

        texts = [
            None if value is None else orjson.dumps(value, default=str).decode()
            for value in column.to_pylist()
        ]
        return pa.chunked_array([pa.array(texts, pa.string())])
    return column.cast(wanted.type)


def _last_of_each(table: pa.Table, key: list[str]) -> pa.Table:
    """One row of each key: the last by its place in the log, if rows say where they stood."""
    order = [(name, "ascending") for name in _ORDER if name in table.column_names]
    if order:
        table = table.sort_by(order)
    numbered = table.select(key).append_column(
        "_number", pa.array(range(table.num_rows), pa.int64())
    )
    last = numbered.group_by(key, use_threads=False).aggregate([("_number", "max")])
    if last.num_rows == table.num_rows:
        return table
    return table.take(last.column("_number_max"))
