"""Standing queries over DataFrames: documents spread over all shards, queries in each of them.

**What is matched with what.** A document is matched against the queries that the log has delivered
up to and including its micro-batch. So a query that was written before a document is asked of it
unless the topic of queries is behind; what is asked of documents read earlier stays as it was.

**Queries** come from a topic whose key is the query's name and whose value is the query, as text or
as JSON, {"query": "..."}; the last value of a key counts, and one without a value removes it. What
cannot be understood matches nothing, replaces what had its name, and is told by `bad_queries`; the
others go on.

**State.** Each shard keeps all queries, as text, the same in all. Their index is kept in each
worker's memory, one for all shards, for as long as the queries do not change.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

from penstock.spark.flows.errors import DeclarationError
from penstock.spark.places import before
from penstock.spark.standing.index import Found, Index
from penstock.spark.standing.query import KINDS, Kind, Node, QueryError, parse
from penstock.spark.state import Batch, Shard, apply, current
from penstock.spark.state.context import DEFAULT_SHARDS
from penstock.spark.state.schemas import arrow_schema

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

QUERY: Final = "query"
MATCHED: Final = "matched"
_LANE: Final = "_lane"
_ID: Final = "_id"
_TEXT: Final = "_text"
_PLACES: Final = ("_topic", "_partition", "_offset")
_KEPT: Final = pa.schema([(_ID, pa.string()), (_TEXT, pa.string())])
_QUERIES: Final = "queries"
# Which queries there are: a digest of all changes so far.
_STAMP: Final = "stamp"
# So many changes are always kept beside the index.
_FEW: Final = 64
# Indexes that a worker keeps.
_MAX_INDEXES: Final = 2
_TYPES: Final = {
    "text": (T.StringType,),
    "keyword": (T.StringType, T.BooleanType, T.IntegralType),
    "number": (T.NumericType,),
    "time": (T.TimestampType, T.TimestampNTZType, T.DateType),
}
BAD_SCHEMA: Final = "query string, text string, error string, position int"


def match(
    documents: DataFrame,
    queries: DataFrame,
    *,
    fields: Mapping[str, Kind],
    id: str = "key",
    query: str = "value",
    name: str | None = None,
) -> DataFrame:
    """Each document with each query that it matches.

    `fields` are the columns that queries may look at, and how: "text", by its words; "keyword", as
    a whole; "number"; "time". `id` and `query` are the columns of the queries with their names and
    texts, as stream(TOPIC, text=True) has them. The rows have the columns `query`, the name, and
    `matched`, what of the query holds, beside those of the document.
    """
    where = before()
    _check(documents, fields, where)
    for each in (QUERY, MATCHED):
        if each in documents.columns:
            raise DeclarationError(
                f"{where}match: the documents have a column {each!r} already",
                advice=f'Rename it, as in documents.withColumnRenamed("{each}", "{each}_").',
            )
    context = current()
    lanes = _lanes(context.shards if isinstance(context, Batch) else DEFAULT_SHARDS)
    places = [each for each in _PLACES if each in documents.columns] or documents.columns
    spread = F.pmod(F.xxhash64(*(F.col(f"`{each}`") for each in places)), F.lit(len(lanes)))
    # Under other names, for their order is of no use, and sorting takes time.
    sent = documents.select(
        *(F.col(f"`{each}`").alias(f"_d_{each}") for each in documents.columns),
        F.get(_array(lanes), spread.cast("int")).alias(_LANE),
    )
    told = _queries(queries, id, query, where).withColumn(_LANE, F.explode(_array(lanes)))
    out = T.StructType(
        [T.StructField(QUERY, T.StringType()), T.StructField(MATCHED, _strings())]
        + [T.StructField(each.name, each.dataType, True) for each in documents.schema.fields]
    )
    operator = Matching(tuple(fields.items()), tuple(documents.columns), arrow_schema(out))
    inputs = {"documents": sent, "queries": told}
    return apply(inputs, operator, key=[_LANE], schema=out, name=name)


def bad_queries(
    queries: DataFrame, *, fields: Mapping[str, Kind], id: str = "key", query: str = "value"
) -> DataFrame:
    """The queries that cannot be understood: `query`, the name, `text`, `error` and `position`."""
    rows = _queries(queries, id, query, before()).select(_ID, _TEXT).where(f"{_TEXT} is not null")
    return rows.mapInArrow(_Judge(tuple(fields.items())), BAD_SCHEMA)


@dataclass(frozen=True, slots=True)
class Matching:
    """Documents against all queries."""

    fields: tuple[tuple[str, Kind], ...]
    columns: tuple[str, ...]
    out: pa.Schema

    @property
    def kind(self) -> str:
        return "standing"

    @property
    def describes(self) -> str:
        return "standing queries by name"

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        changes, documents = inputs.get("queries"), inputs.get("documents")
        stamp = shard.state.value(_STAMP)
        before = digest = b"" if stamp is None else bytes(stamp["digest"][0].as_py())
        last = dict[str, str | None]()
        if changes is not None:
            last = dict(zip(changes[_ID].to_pylist(), changes[_TEXT].to_pylist(), strict=True))
            digest = _digest(before, last)
            shard.state.keep(_STAMP, pa.table({"digest": pa.array([digest], pa.binary())}))
            shard.state.keep(_QUERIES, _changed(shard.state.value(_QUERIES), last))
        if documents is None or not digest:
            return self.out.empty_table()
        asked = _asked(_Wanted(digest, self.fields), before, last, shard.state.value(_QUERIES))
        names = [each.removeprefix("_d_") for each in documents.column_names]
        documents = documents.rename_columns(names)
        parts = []
        for ids, found in asked.match(documents):
            rows = documents.select(list(self.columns)).take(pa.array(found.documents))
            columns = [ids.take(pa.array(found.queries)), found.matched, *rows.columns]
            parts.append(pa.table(columns, names=self.out.names).cast(self.out))
        return pa.concat_tables(parts)


@dataclass(frozen=True, slots=True)
class _Judge:
    """Tells which queries cannot be understood."""

    fields: tuple[tuple[str, Kind], ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            rows = []
            for name, text in zip(*(each.to_pylist() for each in batch.columns), strict=True):
                found = parsed(text, self.fields)
                if isinstance(found, QueryError):
                    rows.append((name, text, str(found), found.position))
            columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
            kinds = (pa.string(), pa.string(), pa.string(), pa.int32())
            yield pa.RecordBatch.from_arrays(
                [pa.array(each, kind) for each, kind in zip(columns, kinds, strict=True)],
                names=["query", "text", "error", "position"],
            )


@lru_cache(maxsize=100_000)
def parsed(text: str, fields: tuple[tuple[str, Kind], ...]) -> Node | QueryError:
    """A query from the value of its record; what is wrong with it if it is none."""
    try:
        return parse(_said(text), dict(fields))
    except QueryError as error:
        # Without what it holds on to.
        return error.with_traceback(None)


def _said(text: str) -> str:
    """The query itself: a value may be JSON."""
    if not text.lstrip().startswith("{"):
        return text
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise QueryError(f"neither a query nor JSON: {error.msg}", text, error.pos) from None
    query = found.get("query") if isinstance(found, dict) else None
    if not isinstance(query, str):
        raise QueryError('JSON without a text under "query"', text, 0)
    return query


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Which queries, and how they are understood."""

    digest: bytes
    fields: tuple[tuple[str, Kind], ...]


class _Asked:
    """All queries, ready to be asked: most in one index, and those that changed since in another.

    To make an index takes much longer than to ask a few documents, and queries come one by one.
    """

    def __init__(self, fields: tuple[tuple[str, Kind], ...], rows: pa.Table) -> None:
        self._fields = fields
        texts = dict(zip(rows[_ID].to_pylist(), rows[_TEXT].to_pylist(), strict=True))
        self._base, self._ids = self._made(texts)
        # What has changed since: texts, None for what is gone.
        self._changes: dict[str, str | None] = {}
        self._others, self._other_ids = self._made({})
        self._hidden = np.zeros(len(self._ids), np.bool_)

    def _made(self, texts: Mapping[str, str | None]) -> tuple[Index, pa.Array]:
        nodes, ids = list[Node](), list[str]()
        for name, text in texts.items():
            node = None if text is None else parsed(text, self._fields)
            if node is not None and not isinstance(node, QueryError):
                nodes.append(node)
                ids.append(name)
        return Index(dict(self._fields), nodes), pa.array(ids, pa.string())

    def changed(self, changes: Mapping[str, str | None]) -> _Asked | None:
        """The same after some changes; None if it is better made anew."""
        every = self._changes | dict(changes)
        if len(every) > max(_FEW, len(self._ids) // 8):
            return None
        made = copy(self)
        made._changes = every
        made._others, made._other_ids = self._made(every)
        named = pa.array(list(every), pa.string())
        hidden = pc.is_in(self._ids, value_set=named)
        made._hidden = hidden.to_numpy(zero_copy_only=False)
        return made

    def match(self, documents: pa.Table) -> Iterator[tuple[pa.Array, Found]]:
        """What is found, by the names of queries."""
        found = self._base.match(documents)
        if self._changes:
            shown = ~self._hidden[found.queries]
            found = Found(
                found.documents[shown], found.queries[shown], found.matched.filter(pa.array(shown))
            )
        yield self._ids, found
        if self._changes:
            yield self._other_ids, self._others.match(documents)


# What this worker has in memory.
_indexes: OrderedDict[_Wanted, _Asked] = OrderedDict()


def _asked(
    wanted: _Wanted, before: bytes, changes: Mapping[str, str | None], rows: pa.Table
) -> _Asked:
    """The queries of `rows`, which are those of the digest `before` after some changes."""
    found = _indexes.pop(wanted, None)
    if found is None:
        known = _indexes.get(_Wanted(before, wanted.fields))
        found = known.changed(changes) if known is not None else None
    if found is None:
        found = _Asked(wanted.fields, rows)
    _indexes[wanted] = found
    while len(_indexes) > _MAX_INDEXES:
        _indexes.popitem(last=False)
    return found


def _changed(known: pa.Table | None, changes: Mapping[str, str | None]) -> pa.Table:
    """The queries after changes, by name: the same in each shard."""
    put = [(each, text) for each, text in changes.items() if text is not None]
    columns = [[each for each, _ in put], [text for _, text in put]]
    fresh = pa.table([pa.array(each, pa.string()) for each in columns], schema=_KEPT)
    if known is not None:
        named = pa.array(list(changes), pa.string())
        others = known.filter(pc.invert(pc.is_in(known[_ID], value_set=named)))
        fresh = pa.concat_tables([others.cast(_KEPT), fresh])
    return fresh.sort_by(_ID).combine_chunks()


def _digest(before: bytes, changes: Mapping[str, str | None]) -> bytes:
    """Says which queries there are after changes to those that another digest says.

    Each shard is told the same changes, so that they all come to the same.
    """
    told = hashlib.sha256(before)
    told.update(orjson.dumps(sorted(changes.items())))
    return told.digest()


# ---- declaring ---------------------------------------------------------------------------


def _check(documents: DataFrame, fields: Mapping[str, Kind], where: str) -> None:
    if not fields:
        raise DeclarationError(
            f"{where}match: fields= is empty", advice='Name some, as in {"title": "text"}.'
        )
    for name, kind in fields.items():
        if kind not in KINDS:
            raise DeclarationError(
                f"{where}match: field {name!r} is {kind!r}", advice=f"Use {', '.join(KINDS)}."
            )
        if name not in documents.columns:
            raise DeclarationError(
                f"{where}match: the documents have no column {name!r}; there are "
                f"{', '.join(each for each in documents.columns if not each.startswith('_'))}"
            )
        found = documents.schema[name].dataType
        if not isinstance(found, _TYPES[kind]):
            raise DeclarationError(
                f"{where}match: the column {name!r} is {found.simpleString()}, which cannot be "
                f"searched as {kind}"
            )


def _queries(queries: DataFrame, id: str, query: str, where: str) -> DataFrame:
    for each in (id, query):
        if each not in queries.columns:
            raise DeclarationError(
                f"{where}the queries have no column {each!r}; there are "
                f"{', '.join(queries.columns)}",
                advice='Declare them as stream("TOPIC", text=True), or say id= and query=.',
            )
    places = [F.col(each) for each in _PLACES if each in queries.columns]
    name = F.col(f"`{id}`").cast("string").alias(_ID)
    text = F.col(f"`{query}`").cast("string").alias(_TEXT)
    return queries.select(name, text, *places).where(F.col(_ID).isNotNull())


def _strings() -> T.ArrayType:
    return T.ArrayType(T.StringType())


def _array(lanes: tuple[int, ...]) -> Column:
    return F.array(*(F.lit(each).cast("bigint") for each in lanes))


@lru_cache
def _lanes(shards: int) -> tuple[int, ...]:
    """Keys of which each belongs to another shard: the one of its place."""
    found: dict[int, int] = {}
    lane = 0
    while len(found) < shards:
        found.setdefault(_hash(lane) % shards, lane)
        lane += 1
    return tuple(found[shard] for shard in range(shards))


def _hash(value: int) -> int:
    """Spark's xxhash64 of a bigint that is not negative."""
    with np.errstate(over="ignore"):
        one, two, three, four, five = (
            np.uint64(each)
            for each in (
                0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9, 0x85EBCA77C2B2AE63,
                0x27D4EB2F165667C5,
            )
        )  # fmt: skip
        found = np.uint64(42) + five + np.uint64(8)
        found ^= _turned(np.uint64(value) * two, 31) * one
        found = _turned(found, 27) * one + four
        found = (found ^ (found >> np.uint64(33))) * two
        found = (found ^ (found >> np.uint64(29))) * three
        found ^= found >> np.uint64(32)
    return int(found.astype(np.int64))


def _turned(value: Any, bits: int) -> Any:
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))
