"""Parquet files, in a folder or on S3-compatible storage: every change, appended.

    parquet:///data/orders
    parquet+s3://bucket/orders?endpoint=http://localhost:9000

A file of `changes/` holds the changes of one batch: the columns of the table, and `_op` ("u" for a
row put in, "d" for one taken out, of which only the key is there) with `_topic`, `_partition`,
`_offset` and `_timestamp`. Nothing is ever rewritten by a change, so this takes far more changes a
second than Delta and keeps all of them (one for each key and batch); the table as it is now is the
last change of each key, as `scan` gives it:

    SELECT * FROM 'orders/changes/*.parquet'
    QUALIFY row_number() OVER (PARTITION BY id ORDER BY _seq DESC) = 1 AND _op = 'u'   -- DuckDB

`_seq` is the number of the batch. A commit is a file `_penstock/commits/live/<number>.json`: it
names the files that count, the position and the writer, and is made only if there is none with its
number, so of two writers one finds out. A file that no commit names was left by a writer that was
killed; the next one removes it. When `compact_files` (64) small files have gathered, they become
one; who reads the old ones just then begins again with the newest commit.

In a folder, a file is on the disk before the commit that names it is begun, and the commit is
before anyone is told of it. So a newest commit that cannot be read is one that a power loss has
prevented: the one before it counts. In a bucket objects are there as a whole, or not at all.
"""

from __future__ import annotations

import io
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

import obstore
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
from obstore.exceptions import AlreadyExistsError, BaseError

from penstock.errors import ConfigError
from penstock.sinks import rows as coding
from penstock.sinks.contract import (
    SCAN_ROWS,
    Applied,
    Aside,
    Changes,
    Key,
    Position,
    Sink,
    follows,
)
from penstock.sinks.errors import FencedError, StoreError, StoreUnreachableError
from penstock.sinks.objects import OPTIONS, Folder, explain
from penstock.sinks.schema import Schema
from penstock.sinks.stores import Address

ATTEMPTS: Final = 8
SMALL_ROWS: Final = 1_000_000
_COMMITS: Final = "_penstock/commits"
_CHANGES: Final = "changes"
_KEPT_COMMITS: Final = 10
_OWN: Final = pa.schema(
    [
        pa.field("_op", pa.string()),
        pa.field("_seq", pa.int64()),
        pa.field("_topic", pa.string()),
        pa.field("_partition", pa.int32()),
        pa.field("_offset", pa.int64()),
        pa.field("_timestamp", pa.timestamp("us", "UTC")),
    ]
)


@dataclass(frozen=True, slots=True)
class _Commit:
    """What one of `commits/` says. An empty schema: removed, or not yet there."""

    number: int
    token: str
    position: Position
    schema: Schema | None
    # The names of the files and their rows, oldest first.
    files: tuple[tuple[str, int], ...]

    def text(self) -> bytes:
        return orjson.dumps(
            {
                "token": self.token,
                "position": self.position.text(),
                "schema": None if self.schema is None else self.schema.as_json(),
                "files": self.files,
            }
        )

    @classmethod
    def read(cls, number: int, text: bytes) -> _Commit:
        found = orjson.loads(text)
        schema = None if found["schema"] is None else Schema.from_json(found["schema"])
        files = tuple((name, rows) for name, rows in found["files"])
        position = Position.from_json(found["position"])
        return cls(number, found["token"], position, schema, files)


class ParquetSink(Sink):
    """A table as Parquet files; see the module."""

    def __init__(self, address: Address, slot: str = "live") -> None:
        self._address = address
        self._slot = slot
        self._folder = Folder.of(address)
        self._compact_files = address.number("compact_files", 64)
        self._compression = address.option("compression", "zstd")
        if self._compression not in {"zstd", "snappy", "none"}:
            raise ConfigError(f"{address.shown}: compression is zstd, snappy or none")
        self._opened: Any = None
        self._token: str | None = None
        self._schema: Schema | None = None
        self.target = f"parquet {self._folder.uri}{'' if slot == 'live' else f' ({slot})'}"

    # ---- writing

    def open(self, schema: Schema) -> Position:
        taken = [name for name in _OWN.names if name in schema.names]
        if taken:
            raise ConfigError(f"{self.target}: no column may be called {taken[0]!r}")
        with self._talking():
            for _ in range(ATTEMPTS):
                old = self._latest()
                before = None if old is None else old.schema
                wanted = schema if before is None else before.evolved(schema, self.target)
                token = secrets.token_hex(8)
                new = replace(old or _NOTHING, token=token, schema=wanted)
                if self._commit(new):
                    self._token, self._schema = token, wanted
                    self._sweep()
                    return new.position
        raise StoreUnreachableError(f"{self.target}: others keep committing to it")

    def apply(self, changes: Changes, aside: Aside) -> Applied:
        assert self._schema is not None, "open it first"
        with self._talking():
            held = self._held()
            if not follows(changes, held.position, self.target):
                return Applied(0)
            files = list(held.files)
            if changes.rows:
                table = _rows(changes, self._schema, held.number + 1)
                files.append(self._put(table, held.number + 1))
            position = held.position.merged(changes.position)
            new = replace(held, position=position, files=tuple(files))
            if not self._commit(new):
                raise self._fenced()
            if self._compact_files:
                self._compact(replace(new, number=held.number + 1))
            return Applied(changes.rows)

    def _held(self) -> _Commit:
        found = self._latest()
        if found is None or self._token is None or found.token != self._token:
            raise self._fenced()
        return found

    def _fenced(self) -> FencedError:
        return FencedError(f"{self.target} has another writer, or was built anew")

    def _put(self, table: pa.Table, number: int) -> tuple[str, int]:
        name = f"{number:012d}-{self._token}-{secrets.token_hex(4)}.parquet"
        out = io.BytesIO()
        pq.write_table(table, out, compression=self._compression)
        obstore.put(self._store(), f"{_CHANGES}/{name}", out.getvalue())
        self._folder.keep(f"{_CHANGES}/{name}")
        return name, table.num_rows

    def _compact(self, held: _Commit) -> None:
        """Make the small files at the end into one, if they are many."""
        small = list(held.files)
        while small and small[0][1] >= SMALL_ROWS:
            small.pop(0)
        if len(small) < self._compact_files or sum(rows for _, rows in small) > 4 * SMALL_ROWS:
            return
        schema = pa.schema([*self._known(held).fields, *_OWN])
        try:
            tables = [_shaped(self._get(name), schema) for name, _ in small]
        except FileNotFoundError as error:
            # A new writer may have compacted them already.
            self._held()
            raise self._incomplete(error) from error
        made = self._put(pa.concat_tables(tables), held.number + 1)
        kept = held.files[: len(held.files) - len(small)]
        if self._commit(replace(held, files=(*kept, made))):
            self._delete([f"{_CHANGES}/{name}" for name, _ in small])

    def _known(self, held: _Commit) -> Schema:
        assert held.schema is not None
        return held.schema

    # ---- reading

    def position(self) -> Position | None:
        with self._talking():
            found = self._latest()
        return None if found is None or found.schema is None else found.position

    def stored_schema(self) -> Schema | None:
        with self._talking():
            found = self._latest()
        return None if found is None else found.schema

    def scan(
        self, low: Key | None = None, high: Key | None = None, *, batch_rows: int = SCAN_ROWS
    ) -> Iterator[pa.RecordBatch]:
        with self._talking():
            table = self._table(low, high)
            yield from table.combine_chunks().to_batches(max_chunksize=batch_rows)

    def _table(self, low: Key | None, high: Key | None) -> pa.Table:
        """The rows as of the newest commit.

        Its files may be compacted while they are read: then there is a newer one.
        """
        before = -1
        missing: FileNotFoundError | None = None
        for _ in range(ATTEMPTS):
            found = self._latest()
            if found is None or found.schema is None:
                return pa.table({})
            if found.number == before:
                assert missing is not None
                raise self._incomplete(missing) from missing
            try:
                return self._picked(found, found.schema, self._last(found, found.schema, low, high))
            except FileNotFoundError as error:
                before, missing = found.number, error
        raise StoreUnreachableError(f"{self.target}: it is compacted faster than it can be read")

    def _incomplete(self, error: FileNotFoundError) -> StoreError:
        return StoreError(
            f"{self.target} lacks a file that its newest commit names: {str(error)[:1000]}",
            advice="Build it anew: `penstock sinks rebuild NAME`.",
        )

    def _last(
        self, found: _Commit, schema: Schema, low: Key | None, high: Key | None
    ) -> list[tuple[int, int]]:
        """Which row of which file is the last of each key, ordered by key; only keys are read."""
        last: dict[str, tuple[int, int]] = {}
        for at, (name, _) in enumerate(found.files):
            columns = self._get(name, [*schema.key, "_op"])
            keys = coding.sortable_keys(columns, schema)
            for row, (key, op) in enumerate(
                zip(keys, columns.column("_op").to_pylist(), strict=True)
            ):
                if op == "u":
                    last[key] = (at, row)
                else:
                    last.pop(key, None)
        first = None if low is None else coding.sortable_key(low, schema)
        end = None if high is None else coding.sortable_key(high, schema)
        wanted = sorted(
            key for key in last if (first is None or key >= first) and (end is None or key < end)
        )
        return [last[key] for key in wanted]

    def _picked(self, found: _Commit, schema: Schema, places: list[tuple[int, int]]) -> pa.Table:
        """These rows of these files, in this order."""
        by_file: dict[int, list[int]] = {}
        for at, row in places:
            by_file.setdefault(at, []).append(row)
        parts, starts, total = [], {}, 0
        for at, rows in by_file.items():
            table = _shaped(self._get(found.files[at][0]), schema.arrow).take(rows)
            parts.append(table)
            starts[at] = total
            total += len(rows)
        if not parts:
            return schema.arrow.empty_table()
        order = []
        for at, _ in places:
            order.append(starts[at])
            starts[at] += 1
        return pa.concat_tables(parts).take(order)

    # ---- building anew

    def beside(self, *, fresh: bool = False) -> ParquetSink:
        made = ParquetSink(self._address, "beside")
        if fresh:
            made.remove()
        return made

    def switch(self) -> None:
        """One commit of the live table that names the files of this one."""
        assert self._slot == "beside", "only what `beside` gave"
        with self._talking():
            held = self._held()
            live = ParquetSink(self._address)
            live._opened = self._opened
            for _ in range(ATTEMPTS):
                old = live._latest() or _NOTHING
                # Batches must go on being numbered upwards.
                number = max(old.number, held.number)
                if live._commit(replace(held, number=number, token=secrets.token_hex(8))):
                    self._commit(replace(_NOTHING, number=held.number))
                    self._token = None
                    live._sweep()
                    return
        raise StoreUnreachableError(f"{self.target}: others keep committing to it")

    def remove(self) -> None:
        with self._talking():
            for _ in range(ATTEMPTS):
                old = self._latest()
                if old is None or self._commit(replace(_NOTHING, number=old.number)):
                    break
            self._token = None
            self._sweep()

    def _sweep(self) -> None:
        """Take away files that no commit names, and commits that are long past.

        A file with the token of a writer may be on its way into a commit. One that was there
        before we look for the writers, and has the token of none, will never be in any.
        """
        files = self._listed(_CHANGES)
        named: set[str] = set()
        tokens: set[str] = set()
        for slot in ("live", "beside"):
            found = self._latest(slot)
            if found is not None:
                named.update(name for name, _ in found.files)
                tokens.add(found.token)
        gone = [
            path
            for path in files
            if (name := path.rpartition("/")[2]) not in named and not tokens & set(name.split("-"))
        ]
        for slot in ("live", "beside"):
            gone += sorted(self._listed(f"{_COMMITS}/{slot}"))[:-_KEPT_COMMITS]
        self._delete(gone)

    # ---- talking to it

    def _store(self) -> Any:
        if self._opened is None:
            self._opened = self._folder.store()
        return self._opened

    def _listed(self, prefix: str) -> list[str]:
        return [found["path"] for some in obstore.list(self._store(), prefix) for found in some]

    def _latest(self, slot: str | None = None) -> _Commit | None:
        local = self._folder.local
        if local is not None and not local.exists():
            return None
        for _ in range(ATTEMPTS):
            names = sorted(self._listed(f"{_COMMITS}/{slot or self._slot}"), reverse=True)
            if not names:
                return None
            try:
                return self._newest(names)
            except FileNotFoundError:
                # So much was committed meanwhile that it was swept away.
                continue
        return None

    def _newest(self, names: list[str]) -> _Commit:
        """What the first of these commits says that is whole. It has the number of the very first:
        none of the others can be made again."""
        number = _number(names[0])
        for name in names:
            text = bytes(obstore.get(self._store(), name).bytes())
            try:
                return _Commit.read(number, text)
            except (ValueError, KeyError, TypeError) as error:
                if self._folder.local is None:
                    raise self._damaged(name) from error
        if _number(names[-1]) > 1:
            raise self._damaged(names[-1])
        return replace(_NOTHING, number=number)

    def _damaged(self, name: str) -> StoreError:
        return StoreError(
            f"{self.target}: its commit {name} is damaged",
            advice="Delete that file: the commit before it counts then, and the sink goes on from "
            "there. If there is none, delete the folder: it is made again from the log.",
        )

    def _commit(self, new: _Commit) -> bool:
        """Make the commit after `new.number`; False if there is one already."""
        name = f"{_COMMITS}/{self._slot}/{new.number + 1:012d}.json"
        try:
            obstore.put(self._store(), name, new.text(), mode="create", use_multipart=False)
        except AlreadyExistsError:
            return False
        self._folder.keep(name)
        if (new.number + 1) % _KEPT_COMMITS == 0:
            self._delete(sorted(self._listed(f"{_COMMITS}/{self._slot}"))[:-_KEPT_COMMITS])
        return True

    def _get(self, name: str, columns: list[str] | None = None) -> pa.Table:
        data = obstore.get(self._store(), f"{_CHANGES}/{name}").bytes()
        return pq.read_table(pa.BufferReader(bytes(data)), columns=columns)

    def _delete(self, paths: list[str]) -> None:
        for at in range(0, len(paths), 500):
            try:
                obstore.delete(self._store(), paths[at : at + 500])
            except FileNotFoundError:
                # Another has swept too.
                continue

    def close(self) -> None:
        self._opened = None

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except (BaseError, OSError) as error:
            raise explain(self.target, error) from error


_NOTHING: Final = _Commit(0, "", Position(), None, ())


def _number(name: str) -> int:
    """Of a commit, by its path."""
    return int(name.rpartition("/")[2].removesuffix(".json"))


def make(address: Address) -> ParquetSink:
    """The sink for a URL."""
    address.only("compact_files", "compression", *OPTIONS)
    return ParquetSink(address)


def _rows(changes: Changes, schema: Schema, number: int) -> pa.Table:
    """The changes as they are in a file."""
    wanted = pa.schema([*(field.with_nullable(True) for field in schema.fields), *_OWN])
    parts = []
    for table, origin, op in (
        (changes.upserts, changes.upserted_at, "u"),
        (changes.deletes, changes.deleted_at, "d"),
    ):
        rows = table.num_rows
        own = {
            "_op": pa.array([op] * rows, pa.string()),
            "_seq": pa.array([number] * rows, pa.int64()),
            **{f"_{name}": origin.column(name) for name in origin.column_names},
        }
        columns = dict(zip(table.column_names, table.columns, strict=True)) | own
        parts.append(_shaped(pa.table(columns), wanted))
    return pa.concat_tables(parts)


def _shaped(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """With these columns: wider ones cast, those that were not there yet empty."""
    columns = [
        table.column(field.name).cast(field.type)
        if field.name in table.column_names
        else pa.chunked_array([pa.nulls(table.num_rows, field.type)])
        for field in schema
    ]
    return pa.table(columns, schema=schema)
