"""What a shard keeps, by version: values, which are whole tables, and tables by key.

    FOLDER/OPERATOR/SHARD/VERSION.state

A version is one file, written beside its name and moved there, so that it is whole or not there.
The newest before the version that is asked for counts. A worker that still has the version it
needs in memory does not read it again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyarrow as pa

KEPT_VERSIONS: Final = 3
_SUFFIX: Final = ".state"


@dataclass(frozen=True, slots=True)
class Place:
    """Where the shards of one operator are."""

    folder: str


@dataclass(slots=True)
class State:
    """The state of one shard, while a task has it."""

    values: dict[str, pa.Table] = field(default_factory=dict)
    tables: dict[str, KeyedTable] = field(default_factory=dict)

    def value(self, name: str) -> pa.Table | None:
        """A table that is kept whole: right for what is small, or changes wholly."""
        return self.values.get(name)

    def keep(self, name: str, rows: pa.Table) -> None:
        """Keep a table in the place of what had the name."""
        self.values[name] = rows

    def table(self, name: str, schema: pa.Schema, key: Sequence[str]) -> KeyedTable:
        """A table by key, of which each version writes only what has changed."""
        found = self.tables.get(name)
        if found is None:
            found = self.tables[name] = KeyedTable(schema, tuple(key), schema.empty_table())
        return found


@dataclass(slots=True)
class KeyedTable:
    """Rows by a key of one or more columns, looked up and changed by the thousand."""

    schema: pa.Schema
    key: tuple[str, ...]
    rows: pa.Table

    def get(self, keys: pa.Table) -> pa.Table:
        """For each row of `keys` the row that is kept, in the same order; nulls where none is.

        A column `_found` says whether there is one.
        """
        # Only keys are joined: the other columns may be of types that Arrow cannot join, as lists.
        names = list(self.key)
        asked = keys.select(names).append_column("_at", _numbers(len(keys)))
        kept = self.rows.select(names).append_column("_row", _numbers(len(self.rows)))
        at = asked.join(kept, keys=names, join_type="left outer").sort_by("_at")["_row"]
        columns = [self.rows[each].take(at) for each in self.schema.names]
        return pa.table([*columns, at.is_valid()], names=[*self.schema.names, "_found"])

    def put(self, rows: pa.Table) -> None:
        """Keep rows, of which no two have the same key, in the place of those with their keys."""
        self.delete(rows)
        self.rows = pa.concat_tables([self.rows, rows.select(self.schema.names).cast(self.schema)])

    def delete(self, keys: pa.Table) -> None:
        """Forget the rows with these keys, as far as they are there."""
        names = list(self.key)
        kept = self.rows.select(names).append_column("_row", _numbers(len(self.rows)))
        left = kept.join(keys.select(names), keys=names, join_type="left anti")
        self.rows = self.rows.take(left["_row"])

    def scan(self) -> pa.Table:
        """All rows, in no order."""
        return self.rows

    def __len__(self) -> int:
        return len(self.rows)


def _numbers(count: int) -> pa.Array:
    return pa.array(range(count), pa.int64())


# What this worker process has in memory, by folder and shard: the version and the state.
_warm: dict[tuple[str, int], tuple[int, State]] = {}


@contextmanager
def opened(place: Place | None, shard: int, version: int) -> Iterator[State]:
    """The state before a version; what it is at the end becomes that version."""
    if place is None:
        yield State()
        return
    folder = Path(place.folder) / str(shard)
    known = _warm.pop((place.folder, shard), None)
    newest = max((each for each in _versions(folder) if each < version), default=-1)
    if known is not None and known[0] == newest:
        state = known[1]
    else:
        state = _read(folder / f"{newest}{_SUFFIX}") if newest >= 0 else State()
    yield state
    _write(folder / f"{version}{_SUFFIX}", state)
    for old in sorted(each for each in _versions(folder) if each < version)[:-KEPT_VERSIONS]:
        (folder / f"{old}{_SUFFIX}").unlink(missing_ok=True)
    _warm[place.folder, shard] = (version, state)


def is_whole(place: Place, shards: int, version: int) -> bool:
    """Whether all shards of an operator have written a version."""
    folder = Path(place.folder)
    return all((folder / str(at) / f"{version}{_SUFFIX}").exists() for at in range(shards))


def _versions(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return [int(each.stem) for each in folder.iterdir() if each.suffix == _SUFFIX]


def _write(file: Path, state: State) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.{os.getpid()}")
    parts = [("value", name, "", rows) for name, rows in state.values.items()]
    parts += [("table", n, ",".join(t.key), t.rows) for n, t in state.tables.items()]
    with pa.OSFile(str(beside), "wb") as out:
        for kind, name, key, rows in parts:
            told = {"kind": kind, "name": name, "key": key}
            with pa.ipc.new_stream(out, rows.schema.with_metadata(told)) as writer:
                writer.write_table(rows.replace_schema_metadata(told))
    beside.replace(file)


def _read(file: Path) -> State:
    state = State()
    with pa.memory_map(str(file)) as data:
        size = data.size()
        while data.tell() < size:
            with pa.ipc.open_stream(data) as reader:
                rows = reader.read_all()
            told = {key.decode(): value.decode() for key, value in rows.schema.metadata.items()}
            rows = rows.replace_schema_metadata(None)
            if told["kind"] == "value":
                state.values[told["name"]] = rows
            else:
                key = tuple(told["key"].split(","))
                state.tables[told["name"]] = KeyedTable(rows.schema, key, rows)
    return state
