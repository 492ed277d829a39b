"""Operators one after the other in one task: for micro-batches that are not worth a stage for each.

A stage of Spark takes some tens of milliseconds however few rows it has, its plan takes some on the
driver, and rows go through Java on their way to the next operator. So where a micro-batch is small
(`flows.operated` says when) all shards of a chain of operators are worked on in a single task, and
what one gives goes to the next as it is. State is the same, shard by shard and version by version:
the next micro-batch may go through stages again, and either way its rows find their state.

Few records can become many rows, where each of them meets many in a join. A task that has made more
than `MOST_ROWS` gives up, and the micro-batch goes through stages, which write all of it anew.

Between two operators columns can be renamed and left out, and so can rows where a column is null;
whatever else is to be computed there is Spark's, and parts the chain.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema

from penstock.spark import sql
from penstock.spark.source.workers import settle
from penstock.spark.state import applying, spreading
from penstock.spark.state.context import Batch
from penstock.spark.state.files import StateError
from penstock.spark.state.operator import Operator, Shard, processed
from penstock.spark.state.schemas import arrow_schema
from penstock.spark.state.store import Held, Place, hold

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Shards are worked on at a time in threads: what takes time in them is Arrow's and our kernels',
# which both let others run, and the disk's.
_MOST_THREADS: Final = 4
_MOST_WRITERS: Final = 16
# What all operators of a task may give together, about as much as the state that a task may hold.
MOST_ROWS: Final = 5_000_000


class TooMuchError(StateError):
    """One task would hold too many rows."""


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What an operator of a chain gives, with some of its columns under other names."""

    link: Link
    # Names, and what the operator calls them.
    columns: tuple[tuple[str, str], ...]
    # Columns of the operator: rows where one is null are left out.
    present: frozenset[str] = frozenset()

    @property
    def schema(self) -> pa.Schema:
        out = self.link.out
        return pa.schema([out.field(own).with_name(name) for name, own in self.columns])

    def select(self, wanted: Mapping[str, str]) -> Rows:
        """Columns by new names."""
        known = dict(self.columns)
        picked = tuple((name, known[own]) for name, own in wanted.items())
        return Rows(self.link, picked, self.present)

    def where_present(self, names: Iterable[str]) -> Rows:
        known = dict(self.columns)
        return Rows(self.link, self.columns, self.present | {known[name] for name in names})

    def frame(self) -> DataFrame:
        """As a frame: the chain so far, to be computed by one task."""
        rows = _run(self.link)
        if self.present:
            # Not by dropna: for it NaN is null, and a dot parts a name.
            there = [f"{sql.quoted(name)} IS NOT NULL" for name in sorted(self.present)]
            rows = rows.where(" AND ".join(there))
        if [name for name, _ in self.columns] == [own for _, own in self.columns] == rows.columns:
            return rows
        return sql.select(rows, {name: sql.quoted(own) for name, own in self.columns})


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """An operator of a chain."""

    title: str
    operator: Operator
    key: tuple[str, ...]
    out: pa.Schema
    inputs: Mapping[str, DataFrame | Rows]
    batch: Batch


def can_link(inputs: Mapping[str, DataFrame | Rows], key: Sequence[str]) -> bool:
    """Whether rows can be spread by such a key in Python."""
    return all(
        spreading.can_tell(schema_of(rows).field(name).type)
        for rows in inputs.values()
        for name in key
    )


def link(
    inputs: Mapping[str, DataFrame | Rows],
    operator: Operator,
    *,
    key: Sequence[str],
    schema: pa.Schema,
    batch: Batch,
) -> Rows:
    """One more operator: its inputs are frames, or what others of the chain give."""
    spark_types = from_arrow_schema(schema)
    # As it would be if Spark had had it in between.
    out = arrow_schema(spark_types)
    title = batch.name(operator.kind)
    first = schema_of(next(iter(inputs.values())))
    kinds = from_arrow_schema(pa.schema([first.field(name) for name in key]))
    batch.keys[title] = [(each.name, each.dataType.simpleString()) for each in kinds]
    made = Link(title, operator, tuple(key), out, dict(inputs), batch)
    return Rows(made, tuple((name, name) for name in out.names))


def schema_of(rows: DataFrame | Rows) -> pa.Schema:
    return rows.schema if isinstance(rows, Rows) else arrow_schema(rows.schema)


# ---- on the driver -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Feed:
    """Where an input of a step comes from: its number among frames and steps."""

    name: str
    number: int
    columns: tuple[tuple[str, str], ...]
    present: tuple[str, ...]

    def rows(self, made: Sequence[pa.Table | None]) -> pa.Table | None:
        whole = made[self.number]
        if whole is None or not self.columns:
            return whole
        if self.present:
            there = np.ones(len(whole), np.bool_)
            for name in self.present:
                there &= whole[name].is_valid().to_numpy()
            if not there.all():
                whole = whole.filter(pa.array(there))
        own = [whole[name] for _, name in self.columns]
        fields = [whole.schema.field(own).with_name(name) for name, own in self.columns]
        return pa.Table.from_arrays(own, schema=pa.schema(fields))


@dataclass(frozen=True, slots=True)
class _Step:
    """An operator, as it is sent to the task."""

    operator: Operator
    place: Place
    key: tuple[str, ...]
    out: pa.Schema
    feeds: tuple[_Feed, ...]


def _run(last: Link) -> DataFrame:
    """What the last operator of a chain gives."""
    # Each once, should two read the same.
    links = list({id(each): each for each in _in_order(last)}.values())
    frames: list[DataFrame] = []
    numbers: dict[int, int] = {}
    for each in links:
        for rows in each.inputs.values():
            if not isinstance(rows, Rows):
                numbers[id(rows)] = len(frames)
                frames.append(rows)
    for at, each in enumerate(links):
        numbers[id(each)] = len(frames) + at
    batch = last.batch
    steps = tuple(_step(each, numbers) for each in links)
    wanted = from_arrow_schema(last.out)
    task = _Task(
        steps,
        len(frames),
        batch.shards,
        batch.batch_id,
        batch.watermark_us,
        to_arrow_schema(wanted, timezone="UTC"),
        MOST_ROWS,
    )
    parts = [applying.tagged(rows, number, "0") for number, rows in enumerate(frames)]
    whole = applying.united(parts, heralds=1)
    # One task, by a shuffle unless the plan must be free of them.
    whole = whole.coalesce(1) if batch.prepared else whole.repartition(1)
    rows = whole.mapInArrow(task, wanted)
    rows = rows.alias(applying.title_of(last.title))
    for each in links:
        batch.made[each.title] = rows
    return rows


def _in_order(last: Link) -> Iterator[Link]:
    for rows in last.inputs.values():
        if isinstance(rows, Rows):
            yield from _in_order(rows.link)
    yield last


def _step(each: Link, numbers: Mapping[int, int]) -> _Step:
    feeds = []
    for name, rows in each.inputs.items():
        if isinstance(rows, Rows):
            feed = _Feed(name, numbers[id(rows.link)], rows.columns, tuple(sorted(rows.present)))
        else:
            feed = _Feed(name, numbers[id(rows)], (), ())
        feeds.append(feed)
    place = Place(f"{each.batch.folder}/{each.title}")
    return _Step(each.operator, place, each.key, each.out, tuple(feeds))


# ---- in the task -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Task:
    """All shards of all operators in one micro-batch."""

    steps: tuple[_Step, ...]
    frames: int
    shards: int
    version: int | Callable[[], int]
    watermark_us: int | Callable[[], int] | None
    schema: pa.Schema
    most_rows: int

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        settle("+".join(each.operator.kind for each in self.steps))
        whole = pa.Table.from_batches(list(batches))
        made = [applying.part_of(whole, number) for number in range(self.frames)]
        told = self.watermark_us
        watermark_us = told() if callable(told) else told
        version = self.version() if callable(self.version) else self.version
        room = _Room(self.most_rows)
        threads = max(1, min(self.shards, _MOST_THREADS, _cores()))
        # What is done is written while others work: the disk takes one commit for many files.
        # Should the task give up, whoever begins the micro-batch again writes the same anew.
        writers = max(1, min(self.shards * len(self.steps), _MOST_WRITERS))
        with ThreadPoolExecutor(threads) as pool, ThreadPoolExecutor(writers) as disk:
            held: list[Held] = []
            kept = []
            for each in self.steps:
                rows, some = self._given(each, made, version, watermark_us, pool, room)
                made.append(rows)
                kept += [disk.submit(one.keep) for one in some]
                held += some
            for each_kept in kept:
                each_kept.result()
        rows = made[-1]
        assert rows is not None
        yield from rows.cast(self.schema).to_batches(max_chunksize=65_536)
        for one in held:
            one.tidy()

    def _given(
        self,
        step: _Step,
        made: Sequence[pa.Table | None],
        version: int,
        watermark_us: int | None,
        pool: ThreadPoolExecutor,
        room: _Room,
    ) -> tuple[pa.Table, list[Held]]:
        """What an operator gives for all shards, and what is to be kept of it."""
        given = {each.name: each.rows(made) for each in step.feeds}
        inputs = {
            name: spreading.spread(rows, step.key, self.shards)
            for name, rows in given.items()
            if rows is not None
        }

        def work(number: int) -> tuple[pa.Table, Held]:
            own = {name: parts[number] for name, parts in inputs.items() if len(parts[number])}
            held = hold(step.place, number, version)
            shard = Shard(number, self.shards, version, watermark_us, held.state)
            rows = processed(step.operator, shard, own)
            room.take(len(rows))
            return rows.cast(step.out), held

        done = list(pool.map(work, range(self.shards)))
        return pa.concat_tables([rows for rows, _ in done]).combine_chunks(), [h for _, h in done]


class _Room:
    """For so many rows, whichever thread makes them."""

    def __init__(self, rows: int) -> None:
        self._left = rows
        self._lock = threading.Lock()

    def take(self, rows: int) -> None:
        with self._lock:
            self._left -= rows
            if self._left < 0:
                raise TooMuchError(
                    "a task that does the work of all operators has made too many rows",
                    advice="The micro-batch is begun again, in stages: nothing needs to be done.",
                )


def _cores() -> int:
    return os.cpu_count() or 1
