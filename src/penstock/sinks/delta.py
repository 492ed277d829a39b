"""Delta tables, in a folder or on S3-compatible storage.

    delta:///data/orders?partition_by=country
    delta+s3://bucket/orders?endpoint=http://localhost:9000

Any reader of Delta reads them: Spark, DuckDB, Polars. History is kept: each batch is a version of
the table, until `vacuum` takes away files that only versions older than `retention_hours` (a week)
need; with `vacuum=true` that happens by itself after each `optimize_every` (50) versions, when
small files are made into large ones. A changed row makes its whole file be written again, so feed
a large table in large batches, or partition it by columns of its key.

The position is in the table's log, in the same commit as the rows: one application transaction for
each partition, its version the next offset. Delta keeps these and does not look at them, so we do:
each commit must be the very next version after the one whose writer and position were looked at.
If someone else has committed in between, we look again.

A time of day, which Delta does not have, is text. A table built anew takes the place of the old by
one commit that replaces all rows; the old ones are in the table's history.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from deltalake import (
    CommitProperties,
    DeltaTable,
    Field,
    PostCommitHookProperties,
    QueryBuilder,
    Transaction,
    write_deltalake,
)
from deltalake import Schema as DeltaSchema
from deltalake.exceptions import (
    CommitFailedError,
    DeltaError,
    SchemaMismatchError,
    TableNotFoundError,
)

from penstock.errors import ConfigError
from penstock.sinks import rows as coding
from penstock.sinks.contract import (
    SCAN_ROWS,
    Applied,
    Aside,
    Changes,
    Key,
    Place,
    Position,
    Sink,
    follows,
    refusing,
)
from penstock.sinks.errors import (
    FencedError,
    SchemaChangedError,
    StoreError,
    StoreUnreachableError,
)
from penstock.sinks.objects import OPTIONS, Folder, explain
from penstock.sinks.schema import Schema, is_json, json_field
from penstock.sinks.stores import Address
from penstock.sinks.times import Times

ATTEMPTS: Final = 8
_WRITER: Final = "penstock:writer"
_DELETED: Final = "__penstock_deleted"
_KEY, _MARKS = "penstock.key", "penstock.marks"
_PLACES, _IDS = "penstock.places", "penstock.ids"
_STATS, _STATS_DIGITS = "delta.dataSkippingStatsColumns", 15
_SIMPLE_NAME: Final = re.compile(r"\w+")
# Dates beyond these panic in its library.
_TIMES: Final = Times((-95_000_000, 95_000_000), (-(2**63), 2**63 - 1), "a day that Delta knows")
_WEEK_HOURS: Final = 168
# Python stands still while deltalake waits for a store that does not answer.
_PATIENCE: Final = {"timeout": "20s", "max_retries": "3", "retry_timeout": "20s"}


class DeltaSink(Sink):
    """A Delta table; see the module."""

    def __init__(self, address: Address, folder: Folder, live: Folder | None = None) -> None:
        self._address = address
        self._folder = folder
        self._live = live
        self._storage = None if folder.storage is None else {**folder.storage, **_PATIENCE}
        self._partition_by = [name for name in address.option("partition_by").split(",") if name]
        self._optimize_every = address.number("optimize_every", 50)
        self._retention_hours = address.number("retention_hours", _WEEK_HOURS)
        self._vacuum = address.flag("vacuum", False)
        self._loaded: DeltaTable | None = None
        self._token: int | None = None
        self._schema: Schema | None = None
        self._commits = 0
        self.target = f"delta {folder.uri}"

    # ---- writing

    def open(self, schema: Schema) -> Position:
        missing = [name for name in self._partition_by if name not in schema.names]
        if missing:
            raise ConfigError(f"{self.target}: partition_by names {missing[0]!r}, no column")
        with self._talking():
            for _ in range(ATTEMPTS):
                token = secrets.randbits(62) + 1
                try:
                    wanted = self._prepare(schema, token)
                except CommitFailedError:
                    continue
                self._token, self._schema = token, wanted
                table = self._table()
                assert table is not None
                return _position(table)
        raise StoreUnreachableError(f"{self.target}: others keep committing to it")

    def _prepare(self, schema: Schema, token: int) -> Schema:
        table = self._table()
        if table is None:
            schema.told_apart(schema, str.lower, self.target)
            DeltaTable.create(
                self._folder.uri,
                _stored(schema),
                mode="error",
                partition_by=self._partition_by or None,
                configuration=_properties(schema),
                storage_options=self._storage,
                commit_properties=_commit([Transaction(_WRITER, token)]),
                raise_if_key_not_exists=False,
            )
            return schema
        old = _schema_of(table)
        if old is None:
            raise StoreError(
                f"{self.target} is a table that Penstock has not made",
                advice="Name another folder, or move the table away.",
            )
        wanted = old.evolved(schema, self.target).told_apart(schema, str.lower, self.target)
        parts = list(table.metadata().partition_columns)
        if parts != self._partition_by:
            raise SchemaChangedError(
                f"{self.target} is partitioned by {parts}, wanted is {self._partition_by}"
            )
        # The new writer first: nobody else commits to what is now changed.
        _empty_commit(table, [Transaction(_WRITER, token)])
        added, changed = wanted.differences(old)
        if added or changed:
            self._evolve(table, wanted, added, changed=bool(changed))
        return wanted

    def _evolve(
        self, table: DeltaTable, wanted: Schema, added: Sequence[pa.Field], *, changed: bool
    ) -> None:
        table.update_incremental()
        # What a column means is told before it is there.
        table.alter.set_table_properties(
            _properties(wanted), raise_if_not_exists=False, commit_properties=_commit([])
        )
        if added:
            new = _stored(Schema(tuple(added), ()))
            fields = DeltaSchema.from_arrow(new).fields
            columns = [Field(f.name, f.type, nullable=True) for f in fields]
            table.alter.add_columns(columns, commit_properties=_commit([]))
        if changed:
            # Delta tables of this kind cannot widen a column: all rows are written again.
            rows = pa.table(QueryBuilder().register("t", table).execute("SELECT * FROM t"))
            self._replace(table, rows.select(wanted.names).cast(_stored(wanted)), [])

    def _replace(self, table: DeltaTable, rows: Any, transactions: list[Transaction]) -> None:
        write_deltalake(
            table,
            rows,
            mode="overwrite",
            schema_mode="overwrite",
            commit_properties=_commit(transactions),
            partition_by=self._partition_by or None,
        )

    def apply(self, changes: Changes, aside: Aside) -> Applied:
        assert self._schema is not None, "open it first"
        fit, refused = coding.fitting(changes, self._schema, _TIMES.unfit, self.max_refused)
        refusing(refused, self.target, self.max_refused)
        with self._talking():
            for _ in range(ATTEMPTS):
                table = self._table()
                if table is None or table.transaction_version(_WRITER) != self._token:
                    raise FencedError(f"{self.target} has another writer, or was built anew")
                stored = _position(table)
                if not follows(changes, stored, self.target):
                    return Applied(0)
                if refused:
                    aside(refused)
                try:
                    self._write(table, fit, stored, self._schema)
                except CommitFailedError:
                    # Someone else has committed: look again.
                    continue
                self._tidy(table)
                return Applied(changes.rows - len(refused), tuple(refused))
        raise StoreUnreachableError(f"{self.target}: others keep committing to it")

    def _write(self, table: DeltaTable, changes: Changes, stored: Position, schema: Schema) -> None:
        moved = {
            place: offset
            for place, offset in changes.position.offsets.items()
            if offset > stored.offsets.get(place, 0)
        }
        _know(table, Position(moved, changes.position.ids))
        transactions = [Transaction(_app(place), offset) for place, offset in moved.items()]
        source = _source(changes, schema)
        before = table.version()
        if source.num_rows and not table.file_uris():
            rows = source.filter(pc.invert(source.column(_DELETED))).drop_columns(_DELETED)
            if rows.num_rows:
                write_deltalake(table, rows, mode="append", commit_properties=_commit(transactions))
        elif source.num_rows:
            on = " AND ".join(f"t.{_quoted(name)} = s.{_quoted(name)}" for name in schema.key)
            merge = table.merge(
                source,
                on,
                source_alias="s",
                target_alias="t",
                commit_properties=_commit(transactions),
            )
            gone, kept = f"s.{_DELETED}", f"NOT s.{_DELETED}"
            merge = merge.when_matched_delete(gone).when_matched_update_all(except_cols=[_DELETED])
            merge.when_not_matched_insert_all(kept, except_cols=[_DELETED]).execute()
        # What changes nothing is not committed, but the position is.
        if table.version() == before:
            _empty_commit(table, transactions)

    def _tidy(self, table: DeltaTable) -> None:
        self._commits += 1
        if not self._optimize_every or self._commits % self._optimize_every:
            return
        try:
            table.update_incremental()
            table.optimize.compact(commit_properties=_commit([]))
            if self._vacuum:
                self.vacuum()
        except CommitFailedError:
            # Another time: what is to be tidied is still there then.
            return

    def vacuum(self, *, dry_run: bool = False) -> list[str]:
        """Delete the files that no version of the last `retention_hours` needs; their names."""
        with self._talking():
            table = self._table()
            if table is None:
                return []
            return table.vacuum(
                self._retention_hours, dry_run=dry_run, enforce_retention_duration=False
            )

    def optimize(self) -> None:
        """Make small files into large ones."""
        with self._talking():
            table = self._table()
            if table is not None:
                table.optimize.compact()

    # ---- reading

    def position(self) -> Position | None:
        with self._talking():
            table = self._table()
            return None if table is None else _position(table)

    def stored_schema(self) -> Schema | None:
        with self._talking():
            table = self._table()
            return None if table is None else _schema_of(table)

    def scan(
        self, low: Key | None = None, high: Key | None = None, *, batch_rows: int = SCAN_ROWS
    ) -> Iterator[pa.RecordBatch]:
        with self._talking():
            table = self._table()
            schema = None if table is None else _schema_of(table)
            if table is None or schema is None:
                return
            where = [_bound(low, schema, ">"), _bound(high, schema, "<")]
            sql = "SELECT * FROM t"
            if any(where):
                sql += " WHERE " + " AND ".join(f"({each})" for each in where if each)
            sql += " ORDER BY " + ", ".join(map(_quoted, schema.key))
            for batch in QueryBuilder().register("t", table).execute(sql):
                found = _read(pa.table(batch), schema)
                yield from found.combine_chunks().to_batches(max_chunksize=batch_rows)

    # ---- building anew

    def beside(self, *, fresh: bool = False) -> DeltaSink:
        made = DeltaSink(self._address, self._folder.sibling("-beside"), self._folder)
        if fresh:
            made.remove()
        return made

    def switch(self) -> None:
        assert self._live is not None, "only what `beside` gave"
        with self._talking():
            new = self._table()
            if new is None or new.transaction_version(_WRITER) != self._token:
                raise FencedError(f"{self.target} has another writer")
            schema = _schema_of(new)
            assert schema is not None
            live = DeltaSink(self._address, self._live)
            live._take(new, schema, _position(new))
            self.remove()

    def _take(self, new: DeltaTable, schema: Schema, position: Position) -> None:
        """Become what another table is. If we are killed on the way, it is done once more."""
        for _ in range(ATTEMPTS):
            table = self._table()
            if table is None:
                self._prepare(schema, secrets.randbits(62) + 1)
                continue
            try:
                _know(table, Position(position.offsets))
                before = dict.fromkeys(_position(table).offsets, 0)
                offsets = {**before, **position.offsets}
                moved = [Transaction(_app(place), offset) for place, offset in offsets.items()]
                moved.append(Transaction(_WRITER, secrets.randbits(62) + 1))
                rows = QueryBuilder().register("t", new).execute("SELECT * FROM t")
                reader = pa.RecordBatchReader.from_stream(rows)
                plain = _casting(reader, _stored(schema))
                self._replace(table, plain, moved)
                table.update_incremental()
                table.alter.set_table_properties(_properties(schema), raise_if_not_exists=False)
                # Not before: old rows must not seem to be of this topic.
                _know(table, position)
            except CommitFailedError:
                continue
            return
        raise StoreUnreachableError(f"{self.target}: others keep committing to it")

    def remove(self) -> None:
        with self._talking():
            self._folder.remove()
            self._loaded, self._token = None, None

    def close(self) -> None:
        self._loaded = None

    # ---- talking to it

    def _table(self) -> DeltaTable | None:
        """The table at its newest version."""
        local = self._folder.local
        if local is not None and not (local / "_delta_log").exists():
            self._loaded = None
            return None
        # A table made again under the same name must not be taken for a newer version.
        try:
            self._loaded = DeltaTable(self._folder.uri, storage_options=self._storage)
        except TableNotFoundError:
            self._loaded = None
        return self._loaded

    @contextmanager
    def _talking(self) -> Iterator[None]:
        try:
            yield
        except SchemaMismatchError as error:
            raise StoreError(f"{self.target}: {error}") from error
        except DeltaError as error:
            text = str(error)
            kind = StoreUnreachableError if "object store" in text.lower() else StoreError
            raise kind(f"{self.target}: {text[:1000]}") from error
        except OSError as error:
            raise explain(self.target, error) from error


def make(address: Address) -> DeltaSink:
    """The sink for a URL."""
    address.only("partition_by", "optimize_every", "retention_hours", "vacuum", *OPTIONS)
    return DeltaSink(address, Folder.of(address))


# ---- the table's own log ---------------------------------------------------------------------


def _commit(transactions: list[Transaction]) -> CommitProperties:
    # None but the very next version will do.
    return CommitProperties(max_commit_retries=0, app_transactions=transactions)


def _empty_commit(table: DeltaTable, transactions: list[Transaction]) -> None:
    hooks = PostCommitHookProperties(create_checkpoint=True)
    table.create_write_transaction(
        [],
        "append",
        table.schema(),
        commit_properties=_commit(transactions),
        post_commithook_properties=hooks,
    )
    table.update_incremental()


def _app(place: Place) -> str:
    return f"penstock:{place[0]}:{place[1]}"


def _places(table: DeltaTable) -> list[Place]:
    found = orjson.loads(table.metadata().configuration.get(_PLACES) or "[]")
    return [(topic, partition) for topic, partition in found]


def _ids(table: DeltaTable) -> dict[str, str]:
    found: dict[str, str] = orjson.loads(table.metadata().configuration.get(_IDS) or "{}")
    return found


def _know(table: DeltaTable, position: Position) -> None:
    """Add to the list of partitions whose positions the log may have, and to their topics' ids."""
    known, ids = _places(table), _ids(table)
    new = [place for place in position.offsets if place not in known]
    told = {**ids, **position.ids}
    if new or told != ids:
        texts = {_PLACES: sorted((*known, *new)), _IDS: told}
        # Whoever has committed since the table was looked at may be its new writer.
        table.alter.set_table_properties(
            {name: orjson.dumps(each).decode() for name, each in texts.items()},
            raise_if_not_exists=False,
            commit_properties=_commit([]),
        )


def _position(table: DeltaTable) -> Position:
    found = {place: table.transaction_version(_app(place)) for place in _places(table)}
    return Position({place: offset for place, offset in found.items() if offset}, _ids(table))


# ---- columns ---------------------------------------------------------------------------------


def _stored(schema: Schema) -> pa.Schema:
    """The columns as Delta has them."""
    return pa.schema(
        [
            pa.field(f.name, pa.string() if pa.types.is_time64(f.type) else f.type, f.nullable)
            for f in schema.fields
        ]
    )


def _properties(schema: Schema) -> dict[str, str]:
    marks = {
        f.name: "json" if is_json(f) else "time"
        for f in schema.fields
        if is_json(f) or pa.types.is_time64(f.type)
    }
    # Names may hold what the properties of a table may not.
    packed = {_KEY: _packed(list(schema.key)), _MARKS: _packed(marks)}
    rest = [f.name for f in schema.fields if not _is_long(f.type)]
    if len(rest) == len(schema.fields):
        return packed
    return packed | {_STATS: ",".join(name for name in rest if _SIMPLE_NAME.fullmatch(name))}


def _is_long(kind: pa.DataType) -> bool:
    """Whether it is a decimal that deltalake rounds in the statistics of files, by which files are
    passed over that hold what is looked for."""
    return bool(pa.types.is_decimal(kind) and kind.precision > _STATS_DIGITS)


def _packed(value: Any) -> str:
    return base64.b64encode(orjson.dumps(value)).decode("ascii")


def _unpacked(text: str) -> Any:
    return orjson.loads(base64.b64decode(text))


def _schema_of(table: DeltaTable) -> Schema | None:
    properties = table.metadata().configuration
    if _KEY not in properties:
        return None
    key, marks = _unpacked(properties[_KEY]), _unpacked(properties.get(_MARKS) or _packed({}))
    fields = []
    for field in pa.schema(table.schema().to_arrow()):
        mark = marks.get(field.name)
        if mark == "json":
            fields.append(json_field(field.name))
        elif mark == "time":
            fields.append(pa.field(field.name, pa.time64("us"), field.name not in key))
        else:
            fields.append(pa.field(field.name, field.type, field.name not in key))
    return Schema(tuple(fields), tuple(key))


def _source(changes: Changes, schema: Schema) -> pa.Table:
    """Upserts and deletes as one table, in columns as Delta has them."""
    wanted = _stored(schema)
    nullable = pa.schema([field.with_nullable(True) for field in wanted])
    parts = []
    for table, deleted in ((changes.upserts, False), (changes.deletes, True)):
        columns = [
            table.column(field.name).cast(field.type)
            if field.name in table.column_names
            else pa.nulls(table.num_rows, field.type)
            for field in wanted
        ]
        marks = pa.array([deleted] * table.num_rows, pa.bool_())
        part = pa.table(columns, schema=nullable).append_column(_DELETED, marks)
        parts.append(part)
    return pa.concat_tables(parts).combine_chunks()


def _read(table: pa.Table, schema: Schema) -> pa.Table:
    columns = []
    for field in schema.fields:
        column = table.column(field.name)
        if pa.types.is_time64(field.type):
            texts = [{field.name: text} for text in column.to_pylist()]
            column = coding.table_from(texts, Schema((field,), ())).column(0)
        else:
            column = column.cast(field.type)
        columns.append(column)
    return pa.table(columns, schema=schema.arrow)


def _casting(reader: pa.RecordBatchReader, schema: pa.Schema) -> pa.RecordBatchReader:
    def batches() -> Iterator[pa.RecordBatch]:
        for batch in reader:
            table = pa.Table.from_batches([batch]).select(schema.names).cast(schema)
            yield from table.combine_chunks().to_batches()

    return pa.RecordBatchReader.from_batches(schema, batches())


# ---- SQL -------------------------------------------------------------------------------------


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _bound(key: Key | None, schema: Schema, sign: str) -> str:
    """The rows whose key is after (or equal to) this one, or before it."""
    if key is None:
        return ""
    parts = []
    for at, name in enumerate(schema.key):
        equal = [
            f"{_quoted(n)} = {_literal(v, schema, n)}"
            for n, v in zip(schema.key, key[:at], strict=False)
        ]
        least = sign + ("=" if sign == ">" and at == len(schema.key) - 1 else "")
        each = [*equal, f"{_quoted(name)} {least} {_literal(key[at], schema, name)}"]
        parts.append("(" + " AND ".join(each) + ")")
    return " OR ".join(parts)


def _literal(value: Any, schema: Schema, name: str) -> str:
    kind, types = schema.field(name).type, pa.types
    if types.is_string(kind):
        return "'" + str(value).replace("'", "''") + "'"
    if types.is_binary(kind):
        return f"X'{value.hex()}'"
    if types.is_boolean(kind) or types.is_integer(kind):
        return str(value)
    if types.is_decimal(kind):
        return f"CAST('{value:f}' AS DECIMAL({kind.precision},{kind.scale}))"
    text = str(coding.columns_of(pa.table([pa.array([value], kind)], names=[name]))[0][0])
    if types.is_time64(kind):
        return f"'{text}'"
    if types.is_date32(kind):
        return f"DATE '{text}'"
    zone = "None" if kind.tz is None else 'Some("UTC")'
    return f"arrow_cast('{text}', 'Timestamp(Microsecond, {zone})')"
