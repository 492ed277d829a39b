"""Looking at state from outside: operators, shards, sizes, rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import orjson
import pyarrow as pa

from penstock.spark.state import layout, store
from penstock.spark.state.files import Files, StateError
from penstock.spark.state.operator import SET_ASIDE
from penstock.spark.state.store import State

OPERATOR: Final = "operator.json"
NEWEST: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """One shard of an operator, as its newest version says."""

    operator: str
    shard: int
    version: int
    rows: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Kept:
    """A table of a shard."""

    shard: int
    name: str
    rows: pa.Table


def operators(found: layout.Layout) -> list[str]:
    """The names of the operators that keep state."""
    return sorted(name for name in Files(found.folder).names() if name != layout.TIME)


def note_key(folder: str, operator: str, key: Sequence[tuple[str, str]]) -> None:
    """Write down by which columns, of which types of Spark, an operator's rows are spread."""
    files = Files(f"{folder}/{operator}")
    if not files.is_there(OPERATOR):
        files.write(OPERATOR, orjson.dumps({"key": key}))


def key_of(folder: str, operator: str) -> list[tuple[str, str]] | None:
    """The same, read; None if it was not written down."""
    files = Files(f"{folder}/{operator}")
    if not files.is_there(OPERATOR):
        return None
    found = orjson.loads(bytes(files.read(OPERATOR)))
    return [(str(name), str(kind)) for name, kind in found["key"]]


def opened_shard(
    found: layout.Layout, operator: str, shard: int, before: int = NEWEST
) -> tuple[int, State] | None:
    """The newest version of a shard before a number, and its state; None if there is none."""
    files = Files(f"{found.folder}/{operator}/{shard}")
    name = store.newest_before(files, before)
    if name is None:
        return None
    return int(name.split("-")[0]), store.read(files, name)


def summary(found: layout.Layout) -> Iterator[ShardInfo]:
    """All shards of all operators."""
    for operator in operators(found):
        for shard in range(found.shards):
            got = opened_shard(found, operator, shard)
            if got is None:
                yield ShardInfo(operator, shard, -1, 0, 0)
                continue
            version, state = got
            rows = sum(len(each) for each in state.tables.values())
            rows += sum(len(each) for each in state.values.values())
            size = sum(section.size for _, section in state.saved.values())
            yield ShardInfo(operator, shard, version, rows, size)


def tables(found: layout.Layout, operator: str) -> Iterator[Kept]:
    """What an operator keeps, shard by shard."""
    known = operators(found)
    if operator not in known:
        raise StateError(
            f"no operator {operator!r} keeps state here",
            advice=f"There {'are' if len(known) != 1 else 'is'} {', '.join(known) or 'none'}.",
        )
    for shard in range(found.shards):
        got = opened_shard(found, operator, shard)
        if got is None:
            continue
        for name, rows in got[1].values.items():
            yield Kept(shard, name, rows)
        for name, table in got[1].tables.items():
            yield Kept(shard, name, table.scan())


def set_aside(found: layout.Layout, before: int = NEWEST) -> Iterator[Kept]:
    """The rows that operators have set aside, in the state before a version."""
    for operator in operators(found):
        for shard in range(found.shards):
            files = Files(f"{found.folder}/{operator}/{shard}")
            name = store.newest_before(files, before)
            if name is None:
                continue
            for title, rows in store.tables_of(files, name, SET_ASIDE).items():
                yield Kept(shard, title, rows)


def count_set_aside(found: layout.Layout, before: int = NEWEST) -> int:
    """How many these are."""
    return sum(len(each.rows) for each in set_aside(found, before))


def chosen(kept: Iterator[Kept], key: Mapping[str, str], limit: int) -> Iterator[dict[str, Any]]:
    """Rows as dicts, those whose columns are as asked for, by their text."""
    left = limit
    for each in kept:
        if any(name not in each.rows.column_names for name in key):
            continue
        for batch in each.rows.to_batches(max_chunksize=10_000):
            for row in batch.to_pylist():
                if any(str(row[name]) != text for name, text in key.items()):
                    continue
                if left <= 0:
                    return
                left -= 1
                yield {"_shard": each.shard, "_table": each.name, **row}
