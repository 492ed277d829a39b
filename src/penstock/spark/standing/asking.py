"""The queries as a worker has them in memory: one index for all shards, made as seldom as can be.

To make an index takes much longer than to ask a few documents, and queries come one by one. So most
of them are in one index, and those that have changed since in a small one beside it; when these
become too many, all are put into one again. Which queries there are says a digest of all changes so
far: the same in each shard, so that whoever comes first makes what the others find.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.standing.index import Found, Index
from penstock.spark.standing.query import Kind, Node, QueryError, parse
from penstock.spark.state import State

ID: Final = "_id"
TEXT: Final = "_text"
Fields = tuple[tuple[str, Kind], ...]

_KEPT: Final = pa.schema([(ID, pa.string()), (TEXT, pa.string())])
_QUERIES: Final = "queries"
# Which queries there are: a digest of all changes so far.
_STAMP: Final = "stamp"
# So many changes are always kept beside the index.
_FEW: Final = 64
# Indexes that a worker keeps: those before and after some changes, of two operators.
_MAX_INDEXES: Final = 4


# ---- what is kept ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Standing:
    """The queries of a shard: by name as text, and a digest that says which they are."""

    digest: bytes
    rows: pa.Table | None

    @classmethod
    def of(cls, state: State) -> Standing:
        stamp = state.value(_STAMP)
        digest = b"" if stamp is None else bytes(stamp["digest"][0].as_py())
        return cls(digest, state.value(_QUERIES))

    def changed(self, state: State, changes: Mapping[str, str | None]) -> Standing:
        """The same after changes, None for what is gone; kept from now on."""
        made = Standing(_digest(self.digest, changes), _changed(self.rows, changes))
        state.keep(_STAMP, pa.table({"digest": pa.array([made.digest], pa.binary())}))
        state.keep(_QUERIES, made.rows)
        return made


def _changed(known: pa.Table | None, changes: Mapping[str, str | None]) -> pa.Table:
    """The queries after changes, by name: the same in each shard."""
    put = [(each, text) for each, text in changes.items() if text is not None]
    columns = [[each for each, _ in put], [text for _, text in put]]
    fresh = pa.table([pa.array(each, pa.string()) for each in columns], schema=_KEPT)
    if known is not None:
        named = pa.array(list(changes), pa.string())
        others = known.filter(pc.invert(pc.is_in(known[ID], value_set=named)))
        fresh = pa.concat_tables([others.cast(_KEPT), fresh])
    return fresh.sort_by(ID).combine_chunks()


def _digest(before: bytes, changes: Mapping[str, str | None]) -> bytes:
    """Says which queries there are after changes to those that another digest says.

    Each shard is told the same changes, so that they all come to the same.
    """
    told = hashlib.sha256(before)
    told.update(orjson.dumps(sorted(changes.items())))
    return told.digest()


# ---- what is in memory -------------------------------------------------------------------


@lru_cache(maxsize=100_000)
def parsed(text: str, fields: Fields) -> Node | QueryError:
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


def indexed(fields: Fields, texts: Sequence[str | None]) -> tuple[Index, pa.Array]:
    """Those that can be understood, and which of the texts they are."""
    nodes, places = list[Node](), list[int]()
    for at, text in enumerate(texts):
        node = None if text is None else parsed(text, fields)
        if node is not None and not isinstance(node, QueryError):
            nodes.append(node)
            places.append(at)
    return Index(dict(fields), nodes), pa.array(places, pa.int64())


def only(found: Found, kept: Any) -> Found:
    """Those of the pairs that are marked."""
    matched = found.matched.filter(pa.array(kept))
    return Found(found.documents[kept], found.queries[kept], matched)


class Asked:
    """All queries, ready: most in one index, and those that have changed since in another."""

    def __init__(self, fields: Fields, rows: pa.Table) -> None:
        self._fields = fields
        self._base, self._ids = self._made(rows[ID].to_pylist(), rows[TEXT].to_pylist())
        # What has changed since: texts, None for what is gone.
        self._changes: dict[str, str | None] = {}
        self._others, self._other_ids = self._made([], [])
        self._hidden = np.zeros(len(self._ids), np.bool_)

    def _made(self, names: Sequence[str], texts: Sequence[str | None]) -> tuple[Index, pa.Array]:
        index, places = indexed(self._fields, texts)
        return index, pa.array(names, pa.string()).take(places)

    def changed(self, changes: Mapping[str, str | None]) -> Asked | None:
        """The same after some changes; None if it is better made anew."""
        every = self._changes | dict(changes)
        if len(every) > max(_FEW, len(self._ids) // 8):
            return None
        made = copy(self)
        made._changes = every
        made._others, made._other_ids = self._made(list(every), list(every.values()))
        named = pa.array(list(every), pa.string())
        hidden = pc.is_in(self._ids, value_set=named)
        made._hidden = hidden.to_numpy(zero_copy_only=False)
        return made

    def match(self, documents: pa.Table) -> Iterator[tuple[pa.Array, Found]]:
        """What is found, by the names of queries."""
        found = self._base.match(documents)
        yield self._ids, only(found, ~self._hidden[found.queries]) if self._changes else found
        if self._changes:
            yield self._other_ids, self._others.match(documents)


# What this worker has in memory, by the digest of the queries and how they are understood.
_indexes: OrderedDict[tuple[bytes, Fields], Asked] = OrderedDict()


def asked(fields: Fields, standing: Standing) -> Asked:
    """The queries, as they were left in memory or made anew."""
    wanted = (standing.digest, fields)
    found = _indexes.pop(wanted, None)
    _remember(wanted, Asked(fields, standing.rows) if found is None else found)
    return _indexes[wanted]


def follow(
    fields: Fields, before: Standing, changes: Mapping[str, str | None], after: Standing
) -> None:
    """Put into memory what comes of some changes, if what they change is there and they are few."""
    wanted = (after.digest, fields)
    found = _indexes.pop(wanted, None)
    if found is None:
        known = _indexes.get((before.digest, fields))
        found = known.changed(changes) if known is not None else None
    if found is not None:
        _remember(wanted, found)


def _remember(wanted: tuple[bytes, Fields], found: Asked) -> None:
    _indexes[wanted] = found
    while len(_indexes) > _MAX_INDEXES:
        _indexes.popitem(last=False)
