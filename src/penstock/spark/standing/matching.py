"""Standing queries over DataFrames: documents spread over all shards, queries in each of them.

**Queries** come from a topic whose key is the query's name and whose value is the query, as text or
as JSON, {"query": "..."}; the last value of a key counts, and one without a value removes it. What
cannot be understood matches nothing, replaces what had its name, and is told by `bad_queries`; the
others go on.

**latest** asks a document at once, by the queries that the log has delivered up to and including
its micro-batch. So a query that was written before a document is asked of it unless the topic of
queries is behind, and a replay may answer otherwise; what is asked of documents read earlier stays
as it was.

**as_of** asks a document the queries that were valid at its own time, and the same in every replay
and in batch: it waits until the watermark has passed its time, so that all changes up to then are
known. A change counts from its own time on, for documents of the same time too; of several at the
same time the last in the log counts. Both streams must have a time, so that the watermark speaks
for both. Kept are the queries, and what is newer than the watermark.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Literal

import numpy as np
import pyarrow as pa
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql import types as T  # noqa: N812

from penstock.spark.flows.errors import DeclarationError
from penstock.spark.places import before
from penstock.spark.standing.asking import ID, TEXT, Fields, parsed
from penstock.spark.standing.operators import LANE, TIME, AsOf, Latest, Shape, sent_name
from penstock.spark.standing.query import KINDS, Kind, QueryError
from penstock.spark.state import Batch, Operator, apply, current
from penstock.spark.state.context import DEFAULT_SHARDS
from penstock.spark.state.schemas import arrow_schema
from penstock.spark.state.spreading import shards_of_columns
from penstock.spark.state.time import END

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

Version = Literal["latest", "as_of"]

QUERY: Final = "query"
MATCHED: Final = "matched"
# Of streams of changes.
AFTER: Final = "_after"
KEY: Final = "_key"
_PLACES: Final = ("_topic", "_partition", "_offset")
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
    id: str | None = None,
    query: str | None = None,
    version: Version = "latest",
    name: str | None = None,
) -> DataFrame:
    """Each document with each query that it matches.

    `fields` are the columns that queries may look at, and how: "text", by its words; "keyword", as
    a whole; "number"; "time". `id` and `query` are the columns of the queries with their names and
    texts, if they are no stream(TOPIC, text=True) or stream(TOPIC, changelog="query string"). For
    `version` see the module. The rows have the columns `query`, the name, and `matched`, what of
    the query holds, beside those of the document.
    """
    where = before()
    _check(documents, fields, where)
    for each in (QUERY, MATCHED):
        if each in documents.columns:
            raise DeclarationError(
                f"{where}match: the documents have a column {each!r} already",
                advice=f'Rename it, as in documents.withColumnRenamed("{each}", "{each}_").',
            )
    _check_version(documents, queries, version, where)
    times = (TIME, END) if version == "as_of" else ()
    rows = _queries(queries, id, query, where, (*_PLACES, *times))
    context = current()
    lanes = _lanes(context.shards if isinstance(context, Batch) else DEFAULT_SHARDS)
    places = [each for each in _PLACES if each in documents.columns] or documents.columns
    spread = F.pmod(F.xxhash64(*(F.col(f"`{each}`") for each in places)), F.lit(len(lanes)))
    # Under other names, for their order is of no use, and sorting takes time.
    sent = documents.select(
        *(F.col(f"`{each}`").alias(sent_name(each)) for each in documents.columns),
        F.get(_array(lanes), spread.cast("int")).alias(LANE),
    )
    told = rows.withColumn(LANE, F.explode(_array(lanes)))
    out = T.StructType(
        [T.StructField(QUERY, T.StringType()), T.StructField(MATCHED, _strings())]
        + [T.StructField(each.name, each.dataType, True) for each in documents.schema.fields]
    )
    shape = Shape(tuple(fields.items()), tuple(documents.columns), arrow_schema(out))
    operator: Operator = Latest(shape)
    if version == "as_of":
        operator = AsOf(shape, context is None)
    inputs = {"documents": sent, "queries": told}
    waits = version == "as_of"
    return apply(inputs, operator, key=[LANE], schema=out, name=name, waits=waits)


def bad_queries(
    queries: DataFrame,
    *,
    fields: Mapping[str, Kind],
    id: str | None = None,
    query: str | None = None,
) -> DataFrame:
    """The queries that cannot be understood: `query`, the name, `text`, `error` and `position`."""
    rows = _queries(queries, id, query, before()).where(f"{TEXT} is not null")
    return rows.mapInArrow(_Judge(tuple(fields.items())), BAD_SCHEMA)


@dataclass(frozen=True, slots=True)
class _Judge:
    """Tells which queries cannot be understood."""

    fields: Fields

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


def _check_version(documents: DataFrame, queries: DataFrame, version: Version, where: str) -> None:
    if version not in {"latest", "as_of"}:
        raise DeclarationError(
            f"{where}match: version={version!r} is not known",
            advice='version is "latest" or "as_of".',
        )
    if version == "latest":
        return
    for rows, whose, why, stream in (
        (documents, "documents", "the queries of their time are wanted", '..., time="at"'),
        (
            queries,
            "queries",
            "nobody can say from when on they count",
            'changelog="query string", time="_timestamp", idle="30 seconds"',
        ),
    ):
        advice = f'Say which column is their time, as in stream("TOPIC", {stream}).'
        if TIME not in rows.columns:
            raise DeclarationError(
                f"{where}match: the {whose} have no time, and {why}", advice=advice
            )
        found = rows.schema[TIME].dataType
        if not isinstance(found, T.TimestampType):
            raise DeclarationError(
                f"{where}match: {TIME!r} of the {whose} is {found.simpleString()}, not a time",
                advice=advice,
            )


def _queries(
    queries: DataFrame, id: str | None, query: str | None, where: str, others: Sequence[str] = ()
) -> DataFrame:
    """Names and texts of queries, and what else is wanted of them as far as it is there."""
    text: Column | None = None
    if query is None and _is_changelog(queries):
        # What is there and says no query is none that can be understood; what is gone has no text.
        said = F.coalesce(f"{AFTER}.{QUERY}", F.lit(""))
        id, text = id or KEY, F.when(F.col(AFTER).isNotNull(), said)
    id, query = id or "key", query or "value"
    for each in (id,) if text is not None else (id, query):
        if each not in queries.columns:
            raise DeclarationError(
                f"{where}the queries have no column {each!r}; there are "
                f"{', '.join(queries.columns)}",
                advice='Declare them as stream("TOPIC", text=True), or say id= and query=.',
            )
    if text is None:
        text = F.col(f"`{query}`").cast("string")
    name = F.col(f"`{id}`").cast("string").alias(ID)
    more = [F.col(each) for each in others if each in queries.columns]
    return queries.select(name, text.alias(TEXT), *more).where(F.col(ID).isNotNull())


def _is_changelog(queries: DataFrame) -> bool:
    """Whether the queries are rows of a table, with a column of their name."""
    row = queries.schema[AFTER].dataType if AFTER in queries.columns else None
    return isinstance(row, T.StructType) and QUERY in row.names


def _strings() -> T.ArrayType:
    return T.ArrayType(T.StringType())


def _array(lanes: tuple[int, ...]) -> Column:
    return F.array(*(F.lit(each).cast("bigint") for each in lanes))


@lru_cache
def _lanes(shards: int) -> tuple[int, ...]:
    """Keys of which each belongs to another shard: the one of its place."""
    found: dict[int, int] = {}
    start, step = 0, 16 * shards
    while len(found) < shards:
        lanes = np.arange(start, start + step)
        owners = shards_of_columns([pa.array(lanes, pa.int64())], shards)
        for shard, lane in zip(owners.tolist(), lanes.tolist(), strict=True):
            found.setdefault(shard, lane)
        start += step
    return tuple(found[shard] for shard in range(shards))
