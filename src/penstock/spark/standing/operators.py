"""What the tasks of standing queries do: documents of one shard against all queries.

`Latest` asks a document the queries that the log has delivered up to and including its micro-batch.

`AsOf` asks it those that were valid at its own time. Documents and changes wait until the watermark
has passed them, so that what is released is complete. The changes of a name, by time, then cut the
span that is released into versions, each valid from its own time until that of the next; the query
of before is valid until the first. All are asked at once: those of before by the index that is
there already, the versions by a small one of their own, only such as a document can fall into; then
pairs whose document is not of the time of their query are left out. Afterwards the last version of
each name is the query of before. What an index holds never depends on how many changes a
micro-batch has, and where none is released it is the one of the micro-batch before.

**State.** Each shard keeps all queries as text, and the changes that wait, the same in all shards;
of the documents that wait, its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.standing.asking import (
    ID,
    TEXT,
    Fields,
    Standing,
    asked,
    follow,
    indexed,
    only,
)
from penstock.spark.standing.index import Found
from penstock.spark.state import Shard
from penstock.spark.state.numbering import numbered
from penstock.spark.state.schemas import shown
from penstock.spark.state.waiting import micros, released
from penstock.spark.windows.clock import Clock

LANE: Final = "_lane"
TIME: Final = "_time"
_SENT: Final = "_d_"
_WAITING: Final = "documents"
_COMING: Final = "changes"
_FOREVER: Final = np.iinfo(np.int64).max

Results = Iterable[tuple[pa.Array, Found]]


def sent_name(column: str) -> str:
    """What a column of the documents is called on its way: unsorted, for order is of no use."""
    return f"{_SENT}{column}"


@dataclass(frozen=True, slots=True)
class Shape:
    """What is looked at, what goes in and what comes out."""

    fields: Fields
    # Of the documents.
    columns: tuple[str, ...]
    # The name of the query, what matched, and the columns of the document.
    out: pa.Schema

    def named(self, documents: pa.Table) -> pa.Table:
        """Documents under the names that their columns have outside."""
        return documents.select([sent_name(each) for each in self.columns]).rename_columns(
            list(self.columns)
        )

    def result(self, documents: pa.Table, results: Results) -> pa.Table:
        parts = []
        for ids, found in results:
            rows = documents.take(pa.array(found.documents))
            columns = [ids.take(pa.array(found.queries)), found.matched, *rows.columns]
            parts.append(pa.table(columns, names=self.out.names).cast(self.out))
        return pa.concat_tables(parts)


@dataclass(frozen=True, slots=True)
class Latest:
    """Documents against the queries that are there now."""

    shape: Shape

    @property
    def kind(self) -> str:
        return "standing"

    @property
    def describes(self) -> str:
        return "standing queries by name"

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        shape = self.shape
        changes, documents = inputs.get("queries"), inputs.get("documents")
        standing = Standing.of(shard.state)
        if changes is not None:
            last = dict(zip(changes[ID].to_pylist(), changes[TEXT].to_pylist(), strict=True))
            before, standing = standing, standing.changed(shard.state, last)
            if documents is not None:
                follow(shape.fields, before, last, standing)
        if documents is None or not standing.digest:
            return shape.out.empty_table()
        documents = shape.named(documents)
        return shape.result(documents, asked(shape.fields, standing).match(documents))


@dataclass(frozen=True, slots=True)
class AsOf:
    """Documents against the queries of their own time, once the watermark has passed it."""

    shape: Shape
    # In batch: all there is is here, unless the rows say up to when.
    everything: bool

    @property
    def kind(self) -> str:
        return "standing"

    @property
    def describes(self) -> str:
        # Documents that wait have all their columns.
        columns = list(self.shape.out)[2:]
        return f"standing queries by name, as of documents of {shown(columns)}"

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        shape = self.shape
        documents, changes = self._released(shard, inputs)
        if documents is not None:
            documents = shape.named(documents)
        before = Standing.of(shard.state)
        if changes is None:
            if documents is None or not before.digest:
                return shape.out.empty_table()
            return shape.result(documents, asked(shape.fields, before).match(documents))
        course = _Course.of(changes)
        after = before.changed(shard.state, course.last)
        if documents is None:
            follow(shape.fields, before, course.last, after)
            return shape.out.empty_table()
        times = micros(documents[TIME])
        if times.min() >= course.since.max():
            # All of them count for all documents.
            follow(shape.fields, before, course.last, after)
            return shape.result(documents, asked(shape.fields, after).match(documents))
        result = shape.result(documents, course.match(shape.fields, before, documents, times))
        # Only now, when the queries of before are in memory.
        follow(shape.fields, before, course.last, after)
        return result

    def _released(
        self, shard: Shard, inputs: Mapping[str, pa.Table]
    ) -> tuple[pa.Table | None, pa.Table | None]:
        """Documents and changes that the watermark has passed; None if there are none."""
        documents, changes = inputs.get("documents"), inputs.get("queries")
        told = dict[str, pa.Table]()
        if documents is not None:
            told["documents"] = self.shape.named(documents)
        if changes is not None:
            # What is kept of them has to be the same in each shard.
            told["queries"] = changes = changes.drop_columns([LANE])
        clock = Clock.of(shard, told, whole=self.everything)
        for each in told.values():
            # What has no time was always there.
            clock.refuse_strays(micros(each[TIME].drop_null()))
        clock.keep(shard)
        passed = clock.watermark_us
        there = released(shard, _WAITING, documents, sent_name(TIME), passed)
        known = released(shard, _COMING, changes, TIME, passed)
        documents, changes = (
            None if each is None or not len(each) else each for each in (there, known)
        )
        return documents, changes


@dataclass(frozen=True, slots=True)
class _Course:
    """The versions of queries in the span that is released: by name, and of each name by time."""

    names: pa.Array
    texts: list[str | None]
    # From when, and until when, which is not of it.
    since: Any
    until: Any
    # Whether a version is the first, or the last, of its name.
    is_first: Any
    is_last: Any

    @classmethod
    def of(cls, changes: pa.Table) -> _Course:
        """Of changes in the order of the log."""
        at = micros(changes[TIME])
        numbers, _ = numbered([changes[ID]], len(changes))
        # Stable, so that of changes at the same time the last in the log counts.
        order = np.lexsort((at, numbers))
        changes, since, own = changes.take(pa.array(order)), at[order], numbers[order]
        ends = own[1:] != own[:-1]
        until = np.append(np.where(ends, _FOREVER, since[1:]), _FOREVER)
        names = changes[ID].combine_chunks()
        texts = changes[TEXT].to_pylist()
        return cls(names, texts, since, until, np.append(True, ends), np.append(ends, True))

    @property
    def last(self) -> dict[str, str | None]:
        """What holds at the end."""
        at = np.flatnonzero(self.is_last)
        names = self.names.take(pa.array(at)).to_pylist()
        return dict(zip(names, (self.texts[each] for each in at.tolist()), strict=True))

    def match(
        self, fields: Fields, before: Standing, documents: pa.Table, times: Any
    ) -> Iterable[tuple[pa.Array, Found]]:
        """What is found by the queries of before, until they change, and by those of the span."""
        if before.digest:
            first = np.flatnonzero(self.is_first)
            changing = self.names.take(pa.array(first))
            # Behind them, for what does not change.
            ends = np.append(self.since[first], _FOREVER)
            for ids, found in asked(fields, before).match(documents):
                places = pc.index_in(ids, value_set=changing).fill_null(len(first))
                until = ends[places.to_numpy(zero_copy_only=False)]
                yield ids, only(found, times[found.documents] < until[found.queries])
        # Without those that no document falls into: which are also those of the same time.
        low, high = (np.searchsorted(np.sort(times), each) for each in (self.since, self.until))
        wanted = np.flatnonzero(high > low)
        index, places = indexed(fields, [self.texts[at] for at in wanted.tolist()])
        wanted = wanted[places.to_numpy(zero_copy_only=False)]
        found = index.match(documents)
        at, which = times[found.documents], wanted[found.queries]
        valid = (self.since[which] <= at) & (at < self.until[which])
        yield self.names.take(pa.array(wanted)), only(found, valid)
