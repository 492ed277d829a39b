"""State in another number of shards: written anew beside the old, which counts until all is done.

Rows belong to the shard that Spark's own hash of the operator's key says, so Spark computes it.
What is known of an operator from outside is by which columns its inputs are spread. The columns of
its tables and values that hold the same are found by name, or are `_k0`, `_k1` and so on (see
`operator`), or else those at the front of the table's key; whether it was the right guess shows the
state itself: by it each row must belong to the shard in which it is now. Values without the key are
the same in all shards, and so in the new ones. What cannot be told is refused: then the outputs are
to be rebuilt from the log, which gives any number of shards.

Only what Spark has noted down as done is taken. A micro-batch that was under way is run again then,
from the state before it, and writes its own anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from uuid import uuid4

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.state import inspecting, layout, store
from penstock.spark.state.files import Files, StateError
from penstock.spark.state.layout import Layout
from penstock.spark.state.operator import HINT, NULLS
from penstock.spark.state.store import State
from penstock.spark.state.time import TimesFolder

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

REBUILD: Final = (
    "Say shards= of the flow as you want it, and rebuild it from the log: `penstock flows reset`."
)
# With so many rows in their places a guess is no guess any more.
_PROOF: Final = 24

Key = Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Rescaled:
    """What became of it."""

    version: int
    operators: int
    rows: int


def rescale(spark: SparkSession, checkpoint: str, shards: int) -> Rescaled:
    """Rewrite the state of a flow that does not run; StateError if it cannot be divided."""
    old = layout.find(checkpoint)
    if old is None:
        raise StateError(
            f"there is no state at {checkpoint}",
            advice="Say shards= of the flow: it counts when the flow first runs.",
        )
    version = committed(checkpoint)
    new = Layout(checkpoint, shards, f"s{shards}-{uuid4().hex[:8]}")
    rows = 0
    names = inspecting.operators(old)
    try:
        for name in names:
            rows += _rescale_operator(spark, old, new, name, version)
        times = TimesFolder(f"{old.folder}/{layout.TIME}").before(version + 1)
        if times is not None:
            TimesFolder(f"{new.folder}/{layout.TIME}").write(version, times)
    except BaseException:
        Files(new.folder).remove_folder("")
        raise
    layout.use(new)
    Files(old.folder).remove_folder("")
    return Rescaled(version, len(names), rows)


def committed(checkpoint: str) -> int:
    """The last micro-batch that Spark has noted down as done; -1 if none is."""
    names = Files(f"{checkpoint.rstrip('/')}/commits").names()
    return max((int(name) for name in names if name.isdigit()), default=-1)


def _rescale_operator(
    spark: SparkSession, old: Layout, new: Layout, name: str, version: int
) -> int:
    key = inspecting.key_of(old.folder, name)
    if key is None:
        raise StateError(f"operator {name!r} has not said by what it is divided", advice=REBUILD)
    states = []
    for shard in range(old.shards):
        got = inspecting.opened_shard(old, name, shard, version + 1)
        states.append(State() if got is None else got[1])
    fresh = [State() for _ in range(new.shards)]
    rows = 0
    for title in sorted({title for state in states for title in state.values}):
        if not title.startswith(HINT):
            rows += _spread_value(spark, name, title, key, states, fresh)
    for title in sorted({title for state in states for title in state.tables}):
        rows += _spread_table(spark, name, title, key, states, fresh)
    if version >= 0:
        for shard, state in enumerate(fresh):
            store.write(Files(f"{new.folder}/{name}/{shard}"), version, state)
    inspecting.note_key(new.folder, name, key)
    return rows


def _spread_value(
    spark: SparkSession, name: str, title: str, key: Key, states: list[State], fresh: list[State]
) -> int:
    there = [(at, state.values[title]) for at, state in enumerate(states) if title in state.values]
    found = [rows for _, rows in there]
    columns = _named(found[0], key)
    if columns is not None:
        whole = pa.concat_tables(found, promote_options="permissive").combine_chunks()
        where = np.repeat([at for at, _ in there], [len(each) for each in found])
        hashes = _spark_hashes(spark, _with_nulls(whole, columns), key)
        if (np.mod(hashes, len(states)) == where).all():
            for at, state in enumerate(fresh):
                mine = np.mod(hashes, len(fresh)) == at
                state.keep(title, whole.filter(pa.array(mine)).combine_chunks())
            return len(whole)
    if len(found) == len(states) and all(each.equals(found[0]) for each in found):
        for state in fresh:
            state.keep(title, found[0])
        return 0
    raise StateError(
        f"operator {name!r} keeps {title!r} as a whole in each shard: it cannot be divided "
        "otherwise from outside",
        advice=REBUILD,
    )


def _named(rows: pa.Table, key: Key) -> list[str] | None:
    """The columns that hold the operator's key, by their names; None if they cannot be told."""
    for names in ([each for each, _ in key], [f"_k{at}" for at in range(len(key))]):
        if all(each in rows.column_names for each in names):
            return names
    return None


def _with_nulls(rows: pa.Table, columns: Sequence[str]) -> pa.Table:
    """The columns of a key, null where `_nulls` says so."""
    chosen = rows.select(list(columns))
    if NULLS not in rows.column_names or list(columns) != [f"_k{at}" for at in range(len(columns))]:
        return chosen
    bits = rows[NULLS].combine_chunks().to_numpy(zero_copy_only=False)
    for at, each in enumerate(columns):
        missing = pa.array((bits >> at) & 1 == 1)
        nothing = pa.scalar(None, chosen.schema.field(each).type)
        chosen = chosen.set_column(at, each, pc.if_else(missing, nothing, chosen[each]))
    return chosen


def _spread_table(
    spark: SparkSession,
    name: str,
    title: str,
    key: Key,
    states: list[State],
    fresh: list[State],
) -> int:
    tables = [(at, state.tables[title]) for at, state in enumerate(states) if title in state.tables]
    scans = [table.scan() for _, table in tables]
    whole = pa.concat_tables(scans).combine_chunks()
    where = np.repeat([at for at, _ in tables], [len(each) for each in scans])
    columns = _named(whole, key)
    if columns is None:
        # Named otherwise: the front of the table's key, if the state itself says so.
        columns = list(tables[0][1].key[: len(key)])
        if len(columns) < len(key) or len(whole) < _PROOF or len(states) == 1:
            raise StateError(
                f"operator {name!r} does not say where the rows of {title!r} belong", advice=REBUILD
            )
    hashes = _spark_hashes(spark, _with_nulls(whole, columns), key)
    if not (np.mod(hashes, len(states)) == where).all():
        raise StateError(
            f"operator {name!r} divides {title!r} by something else than {', '.join(columns)}",
            advice=REBUILD,
        )
    target = np.mod(hashes, len(fresh))
    for at, state in enumerate(fresh):
        part = whole.filter(pa.array(target == at))
        state.table(title, tables[0][1].schema, tables[0][1].key).put(part)
    return len(whole)


def _spark_hashes(spark: SparkSession, rows: pa.Table, key: Key) -> npt.NDArray[np.int64]:
    """Spark's hash of each row's key, in their order."""
    if not key or not len(rows):
        return np.zeros(len(rows), np.int64)
    names = [f"c{at}" for at in range(len(key))]
    numbered = rows.rename_columns(names).append_column("_at", pa.array(np.arange(len(rows))))
    frame = spark.createDataFrame(numbered)
    try:
        columns = [F.col(c).cast(kind) for c, (_, kind) in zip(names, key, strict=True)]
        hashed = frame.select("_at", F.xxhash64(*columns).alias("hash")).toArrow().sort_by("_at")
    except Exception as error:
        raise StateError(
            f"the key {', '.join(rows.column_names)} is not as Spark had it: {error}",
            advice=REBUILD,
        ) from error
    return np.asarray(hashed["hash"].combine_chunks()).astype(np.int64)
