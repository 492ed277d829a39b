"""An operator over DataFrames: rows brought together by key, one task for each shard.

Several inputs travel as one frame, each in a column of its own, and part again in the task. With
them travels one row for each shard that says its number: a task cannot know it otherwise, for in a
union its partitions are counted on from those of others, and Spark leaves out tasks for which there
is nothing at all, though time may have passed for their keys.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

import pyarrow as pa
from pyspark.sql import types as T  # noqa: N812
from pyspark.sql.pandas.types import to_arrow_schema

from penstock.spark import sql
from penstock.spark.reading.decoding import PACKED
from penstock.spark.source.workers import settle
from penstock.spark.state import packing
from penstock.spark.state.context import DEFAULT_SHARDS, Batch, Planning, current
from penstock.spark.state.files import StateError
from penstock.spark.state.operator import Operator, Shard, processed
from penstock.spark.state.packing import KEYS, PLAIN, Packing, unpacked
from penstock.spark.state.store import Place, opened

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_INPUT: Final = "_penstock_input"
_SHARD: Final = "_penstock_shard"
# Rows are sorted by these, as far as an input has them: their place in the log.
ORDER: Final = ("_topic", "_partition", "_offset")
MOST_SHARDS: Final = 4096
_NAME: Final = re.compile(r"[A-Za-z0-9][\w .-]{0,99}", re.ASCII)
# The input of the rows that only say which shard it is.
_HERALD: Final = -1


@dataclass(frozen=True, slots=True)
class Direct:
    """An input that is a frame's columns under other names: if a stream's, the source packs it."""

    rows: DataFrame
    # New names, and what they are called in the frame.
    columns: Mapping[str, str]


def apply(
    inputs: Mapping[str, DataFrame],
    operator: Operator,
    *,
    key: Sequence[str] | Mapping[str, Sequence[str]],
    schema: str | T.StructType,
    name: str | None = None,
    direct: Mapping[str, Direct] | None = None,
    waits: bool = False,
) -> DataFrame:
    """What an operator gives for the rows of its inputs.

    `key` names the columns by which rows belong together, for all inputs or for each: the values
    of all keys must have the same types in all inputs. `schema` is that of the rows that come out.
    `name` tells two operators of the same kind in a flow apart even if their order is changed.
    `direct` says of which frames inputs are no more than columns. Whoever `waits` keeps rows until
    the watermark has passed them: a flow in which it may stand still is warned of then.
    """
    wanted = T.StructType.fromDDL(schema) if isinstance(schema, str) else schema
    assert isinstance(wanted, T.StructType)
    context = current()
    title = name or (operator.kind if context is None else context.name(operator.kind))
    if not _NAME.fullmatch(title):
        raise StateError(
            f"{title!r} is no name for an operator: its state is kept in a folder of that name",
            advice="Use letters, digits, spaces, dots, dashes and underscores.",
        )
    keys = {each: list(key[each] if isinstance(key, Mapping) else key) for each in inputs}
    _check_keys(title, inputs, keys)
    if isinstance(context, Planning):
        if any(each.startswith(f"{title}: ") for each in context.operators):
            raise StateError(
                f"two operators are named {title!r}", advice="Give one another name, with name=."
            )
        context.operators.append(f"{title}: {operator.describes}")
        context.waiting += [title] if waits else []
    shards = context.shards if isinstance(context, Batch) else DEFAULT_SHARDS
    assert 1 <= shards <= MOST_SHARDS
    names = tuple(inputs)
    packed: dict[str, DataFrame] = {}
    for each, taken in (direct or {}).items():
        if (stream := _stream_of(context, taken, inputs[each], keys[each])) is not None:
            packed[each] = stream
    frames = [
        _passed_on(packed[each], number)
        if each in packed
        else tagged(rows, number, _shard_of(keys[each], shards))
        for number, (each, rows) in enumerate(inputs.items())
    ]
    is_prepared = isinstance(context, Batch) and context.prepared
    heralds = 1 if is_prepared else shards
    whole = united(frames, heralds=0 if isinstance(context, Planning) else heralds)
    spread = whole.coalesce(1) if is_prepared else whole.repartitionById(shards, _SHARD)
    place = Place(f"{context.folder}/{title}") if isinstance(context, Batch) else None
    task = _Task(
        operator,
        names,
        shards,
        place,
        context.batch_id if isinstance(context, Batch) else 0,
        context.watermark_us if isinstance(context, Batch) else None,
        to_arrow_schema(wanted, timezone="UTC"),
        frozenset(packed),
        all_shards=is_prepared,
    )
    rows = spread.mapInArrow(task, wanted)
    if isinstance(context, Batch):
        first = next(iter(inputs))
        kinds = dict(inputs[first].dtypes)
        context.keys[title] = [(each, kinds[each]) for each in keys[first]]
        rows = context.made[title] = rows.alias(title_of(title))
    return rows


def _stream_of(
    context: Planning | Batch | None, taken: Direct, sent: DataFrame, key: Sequence[str]
) -> DataFrame | None:
    """What stands for an input that the source packs; None if it comes as rows."""
    if context is None:
        return None
    known = [at for at, each in enumerate(context.streams) if each is taken.rows]
    kinds = dict(sent.dtypes)
    if not known or not set(kinds.values()) <= PLAIN or not key:
        return None
    if not {kinds[each] for each in key} <= KEYS:
        return None
    (number,) = known
    if isinstance(context, Planning):
        context.packed.add(number)
        return None
    if number not in context.packable or number in context.packings:
        return None
    if context.shards > packing.MOST_SHARDS:
        return None
    mine = dict(taken.rows.dtypes)
    longs = [
        new for new, old in taken.columns.items() if kinds[new] == "bigint" != mine[old]
    ]  # fmt: skip
    context.packings[number] = Packing(tuple(taken.columns.items()), tuple(key), tuple(longs))
    return context.packable[number]


def title_of(name: str) -> str:
    """How a plan calls what an operator gives."""
    return f"_penstock_{name}"


def _check_keys(
    title: str, inputs: Mapping[str, DataFrame], keys: Mapping[str, Sequence[str]]
) -> None:
    """StateError if keys of inputs differ in type: the same value would have other hashes."""
    kinds = {}
    for each, rows in inputs.items():
        known = dict(rows.dtypes)
        kinds[each] = [known.get(name, "") for name in keys[each]]
    first = next(iter(inputs))
    for each, found in kinds.items():
        if found != kinds[first]:
            raise StateError(
                f"operator {title!r}: the key of {first!r} is {', '.join(kinds[first])}, that of "
                f"{each!r} is {', '.join(found)}",
                advice="Cast the columns to the same types.",
            )


def _shard_of(key: Sequence[str], shards: int) -> str:
    """In SQL."""
    if not key:
        return "0"
    return f"CAST(pmod(xxhash64({', '.join(map(sql.quoted, key))}), {shards}) AS int)"


def _column(number: int) -> str:
    return f"_penstock_rows_{number}"


def tagged(rows: DataFrame, number: int, shard: str) -> DataFrame:
    """The rows of one input, as they travel with those of others."""
    whole = sql.struct(rows.columns)
    return sql.select(rows, {_SHARD: shard, _INPUT: str(number), _column(number): whole})


def united(frames: Sequence[DataFrame], *, heralds: int) -> DataFrame:
    """All inputs as one frame, with a row for each of so many shards that says its number."""
    parts = list(frames)
    if heralds:
        numbers = frames[0].sparkSession.range(0, heralds, 1, 1)
        parts.append(sql.select(numbers, {_SHARD: "CAST(id AS int)", _INPUT: str(_HERALD)}))
    return reduce(lambda a, b: a.unionByName(b, allowMissingColumns=True), parts)


def part_of(whole: pa.Table, number: int, *, is_packed: bool = False) -> pa.Table | None:
    """The rows of one input again, in the order of the log; None if there is none."""
    is_of = pa.compute.equal(whole[_INPUT], number)
    column = whole[_column(number)].filter(is_of)
    if not len(column):
        return None
    return in_order(unpacked(column) if is_packed else _flat(column))


def _passed_on(rows: DataFrame, number: int) -> DataFrame:
    """What the source has packed."""
    wanted = {_SHARD: f"{PACKED}.shard", _INPUT: str(number), _column(number): f"{PACKED}.rows"}
    return sql.select(rows, wanted)


@dataclass(frozen=True, slots=True)
class _Task:
    """What runs in a task: one shard of one micro-batch."""

    operator: Operator
    names: tuple[str, ...]
    shards: int
    # None in batch: nothing is kept.
    place: Place | None
    version: int | Callable[[], int]
    watermark_us: int | Callable[[], int] | None
    schema: pa.Schema
    # The inputs that come packed.
    packed: frozenset[str] = frozenset()
    # Whether all shards come to this task, one after the other.
    all_shards: bool = False

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        settle(self.operator.kind)
        whole = pa.Table.from_batches(list(batches))
        told = self.version
        version = told() if callable(told) else told
        if self.all_shards:
            for number in range(self.shards):
                own = whole.filter(pa.compute.equal(whole[_SHARD], number))
                yield from self._shard(number, own, version)
            return
        numbers = pa.compute.unique(whole[_SHARD]).to_pylist()
        assert len(numbers) == 1, f"shards {numbers} came to one task"
        yield from self._shard(numbers[0], whole, version)

    def _shard(self, number: int, whole: pa.Table, version: int) -> Iterator[pa.RecordBatch]:
        parted = {
            name: part_of(whole, at, is_packed=name in self.packed)
            for at, name in enumerate(self.names)
        }
        inputs = {name: rows for name, rows in parted.items() if rows is not None}
        told = self.watermark_us
        watermark_us = told() if callable(told) else told
        with opened(self.place, number, version) as state:
            shard = Shard(number, self.shards, version, watermark_us, state)
            rows = processed(self.operator, shard, inputs)
        yield from rows.cast(self.schema).to_batches(max_chunksize=65_536)


def _flat(column: pa.ChunkedArray) -> pa.Table:
    # What Spark knows never to be null may come from a state in which nobody knew.
    fields = [each.with_nullable(True) for each in column.type.fields]
    batches = [
        pa.RecordBatch.from_arrays(chunk.flatten(), schema=pa.schema(fields))
        for chunk in column.chunks
        if len(chunk)
    ]
    rows = pa.Table.from_batches(batches, schema=pa.schema(fields)).combine_chunks()
    # Spark names the time zone of the session; the instants are the same, and state has one name.
    wanted = pa.schema([each.with_type(_in_utc(each.type)) for each in fields])
    return rows if rows.schema.equals(wanted) else rows.cast(wanted)


def _in_utc(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return pa.timestamp(kind.unit, "UTC")
    if pa.types.is_struct(kind):
        return pa.struct([each.with_type(_in_utc(each.type)) for each in kind.fields])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_in_utc(kind.value_type)))
    return kind


def in_order(rows: pa.Table) -> pa.Table:
    """Rows in the order of the log, as far as they say where they stand."""
    order = [(each, "ascending") for each in ORDER if each in rows.column_names]
    return rows.sort_by(order) if order else rows


Rows = Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]
