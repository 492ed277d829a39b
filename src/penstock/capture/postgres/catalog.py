"""What the catalog says of tables and types, now.

The stream says by itself which columns a row has and of which types. The catalog adds what the
stream does not tell (NOT NULL, the labels of enums, the primary key of a table with full replica
identity) and is asked by name and type: where it no longer fits the stream it is not believed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Final

import orjson

from penstock.capture.postgres.connect import Connection
from penstock.capture.postgres.decoders import Relation, StaleError
from penstock.capture.postgres.pgoutput import RelationMessage, TypeMessage
from penstock.capture.postgres.types import Coding, NativeType, TypeModes, coding, native_name
from penstock.capture.source import Table
from penstock.client.table_schemas import TableColumn

# Everything below is made by people or extensions.
FIRST_USER_OID: Final = 16384

_TABLES: Final = """
SELECT c.oid, n.nspname, c.relname, c.relkind, c.relreplident, c.reltuples, c.relpages,
       c.relfilenode
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND NOT c.relispartition
  AND n.nspname NOT IN ('pg_catalog', 'information_schema') AND n.nspname NOT LIKE 'pg\\_toast%'
  AND n.nspname NOT LIKE 'pg\\_temp%'
ORDER BY n.nspname, c.relname
"""
_ONE_TABLE: Final = """
SELECT c.oid, n.nspname, c.relname, c.relkind, c.relreplident, c.reltuples, c.relpages,
       c.relfilenode
FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.oid = {oid}
"""
_COLUMNS: Final = """
SELECT a.attrelid, a.attname, a.atttypid, a.atttypmod, a.attnotnull, a.attgenerated,
       pg_catalog.format_type(a.atttypid, a.atttypmod)
FROM pg_catalog.pg_attribute a
WHERE a.attrelid = ANY('{{{oids}}}'::oid[]) AND a.attnum > 0 AND NOT a.attisdropped
ORDER BY a.attrelid, a.attnum
"""
_INDEXES: Final = """
SELECT i.indrelid, i.indisprimary, i.indisreplident, array_agg(a.attname::text ORDER BY k.place),
       bool_and(a.attnotnull)
FROM pg_catalog.pg_index i,
     unnest(i.indkey::int2[]) WITH ORDINALITY AS k(number, place), pg_catalog.pg_attribute a
WHERE i.indrelid = ANY('{{{oids}}}'::oid[]) AND i.indisunique AND i.indisvalid AND i.indimmediate
  AND i.indpred IS NULL AND i.indexprs IS NULL AND k.place <= i.indnkeyatts
  AND a.attrelid = i.indrelid AND a.attnum = k.number
GROUP BY i.indrelid, i.indexrelid, i.indisprimary, i.indisreplident
ORDER BY i.indrelid, i.indisprimary DESC, i.indexrelid
"""
_TYPES: Final = """
SELECT t.oid, n.nspname, t.typname, t.typtype::text, t.typelem, t.typbasetype,
       t.typtypmod, t.typdelim::text, t.typsubscript::text,
       array(SELECT e.enumlabel::text FROM pg_catalog.pg_enum e WHERE e.enumtypid = t.oid
             ORDER BY e.enumsortorder)
FROM pg_catalog.pg_type t JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
WHERE t.oid = ANY('{{{oids}}}'::oid[])
"""


@dataclass(frozen=True, slots=True)
class ColumnInfo:
    name: str
    type_oid: int
    typmod: int
    not_null: bool
    # "" or how it is generated: s stored, v virtual.
    generated: str
    native: str


@dataclass(frozen=True, slots=True)
class TableInfo:
    """A table as the catalog has it."""

    oid: int
    schema: str
    name: str
    is_partitioned: bool
    # d default, f full, i index, n nothing
    identity: str
    rows_estimate: float
    pages: int
    filenode: int
    columns: tuple[ColumnInfo, ...]
    # In the order of their index.
    primary_key: tuple[str, ...]
    identity_index: tuple[str, ...]
    # Of a unique index on columns that are NOT NULL, if there is no primary key.
    unique_key: tuple[str, ...]

    @property
    def full_name(self) -> str:
        return f"{self.schema}.{self.name}"

    @property
    def key(self) -> tuple[str, ...]:
        """What the stream can tell rows apart by, in the order of an index."""
        if self.identity == "i":
            return self.identity_index
        if self.identity == "f":
            return self.primary_key or self.unique_key
        return self.primary_key

    @property
    def can_update(self) -> bool:
        """Whether a published UPDATE of it works."""
        if self.identity == "d":
            return bool(self.primary_key)
        return self.identity == "f" or (self.identity == "i" and bool(self.identity_index))


class Catalog:
    """Asks one connection."""

    def __init__(self, connection: Connection, database: str, modes: TypeModes) -> None:
        self._connection = connection
        self.database = database
        self._modes = modes
        # Types that are built in never change.
        self._builtin: dict[int, NativeType] = {}

    def tables(self) -> list[TableInfo]:
        """All tables that could be captured; of partitioned ones the root."""
        return self._described(self._connection.execute(_TABLES).fetchall())

    def table(self, oid: int) -> TableInfo | None:
        found = self._connection.execute(_ONE_TABLE.format(oid=int(oid)).encode()).fetchall()
        return next(iter(self._described(found)), None)

    def _described(self, found: Sequence[tuple[Any, ...]]) -> list[TableInfo]:
        if not found:
            return []
        oids = ",".join(str(int(row[0])) for row in found)
        columns: dict[int, list[ColumnInfo]] = {}
        for oid, *values in self._connection.execute(_COLUMNS.format(oids=oids).encode()):
            columns.setdefault(oid, []).append(ColumnInfo(*values))
        keys: dict[int, dict[str, tuple[str, ...]]] = {}
        for oid, primary, identity, names, not_null in self._connection.execute(
            _INDEXES.format(oids=oids).encode()
        ):
            known = keys.setdefault(oid, {})
            if primary:
                known["primary"] = tuple(names)
            if identity:
                known["identity"] = tuple(names)
            if not_null and not primary:
                known.setdefault("unique", tuple(names))
        return [
            TableInfo(
                oid=oid,
                schema=schema,
                name=name,
                is_partitioned=kind == "p",
                identity=identity,
                rows_estimate=rows,
                pages=pages,
                filenode=filenode,
                columns=tuple(columns.get(oid, ())),
                primary_key=keys.get(oid, {}).get("primary", ()),
                identity_index=keys.get(oid, {}).get("identity", ()),
                unique_key=keys.get(oid, {}).get("unique", ()),
            )
            for oid, schema, name, kind, identity, rows, pages, filenode in found
        ]

    def types(self, oids: Iterable[int]) -> dict[int, NativeType]:
        """These types, and those that they are made of."""
        known: dict[int, NativeType] = {}
        gone: set[int] = set()
        wanted = set(oids)
        while wanted:
            missing = ",".join(str(int(oid)) for oid in wanted - self._builtin.keys())
            if missing:
                for row in self._connection.execute(_TYPES.format(oids=missing).encode()):
                    native = _native_type(row)
                    known[native.oid] = native
                    if native.oid < FIRST_USER_OID:
                        self._builtin[native.oid] = native
            known.update({oid: self._builtin[oid] for oid in wanted if oid in self._builtin})
            gone |= wanted - known.keys()
            wanted = {native.of for native in known.values() if native.of} - known.keys() - gone
        return known

    def relation(self, info: TableInfo, columns: Collection[str] | None = None) -> Relation:
        """A table as it is now; of its columns those that are published."""
        # Before 18 generated columns are not in the stream, whatever the publication lists.
        generated = self._connection.info.server_version >= 180000
        chosen = [
            column
            for column in info.columns
            if (columns is None or column.name in columns)
            and (not column.generated or (generated and column.generated == "s"))
        ]
        types = self.types(column.type_oid for column in chosen)
        return self._make(
            info.oid,
            (info.schema, info.name),
            [_Wanted(c.name, c.type_oid, c.typmod, not c.not_null) for c in chosen],
            info.key,
            info.identity,
            types,
        )

    def streamed(
        self, message: RelationMessage, named: Mapping[int, TypeMessage], before: Relation | None
    ) -> Relation:
        """A table as the stream says that it is; `before` is what it was."""
        types = self.types(column.type_oid for column in message.columns)
        for column in message.columns:
            if column.type_oid not in types and column.type_oid in named:
                base = named[column.type_oid]
                types[column.type_oid] = NativeType(column.type_oid, base.schema, base.name)
        info = self.table(message.oid)
        now = {(c.name, c.type_oid): c for c in info.columns} if info is not None else {}
        wanted = []
        for column in message.columns:
            same = now.get((column.name, column.type_oid))
            sure = column.is_key and message.identity in "di"
            wanted.append(
                _Wanted(
                    column.name,
                    column.type_oid,
                    column.typmod,
                    not (sure or (same is not None and same.not_null)),
                )
            )
        key = _streamed_key(message, info, before)
        made = self._make(
            message.oid, (message.schema, message.name), wanted, key, message.identity, types
        )
        if before is not None and _same(made, before):
            return before
        return made

    def mended(self, relation: Relation, error: StaleError) -> Relation:
        """The relation with what a value has shown of a column."""
        codings = list(relation.codings)
        columns = list(relation.table.columns)
        at = error.column
        if error.label is None:
            columns[at] = replace(columns[at], optional=True)
        else:
            old = codings[at]
            labels = {**(old.labels or {}), error.label: orjson.dumps(_text(error.label))}
            allowed = ",".join(_text(label) for label in labels)
            kind = replace(old.type, parameters={**old.type.parameters, "allowed": allowed})
            codings[at] = replace(old, type=kind, labels=labels)
            columns[at] = replace(columns[at], type=kind)
        table = replace(relation.table, columns=tuple(columns))
        return Relation(relation.oid, table, codings, relation.identity)

    def _make(
        self,
        oid: int,
        name: tuple[str, str],
        wanted: Sequence[_Wanted],
        key: Sequence[str],
        identity: str,
        types: Mapping[int, NativeType],
    ) -> Relation:
        codings: list[Coding] = [
            coding(column.type_oid, column.typmod, types, self._modes) for column in wanted
        ]
        columns = tuple(
            TableColumn(
                column.name,
                made.type,
                column.optional,
                native_name(column.type_oid, column.typmod, types),
            )
            for column, made in zip(wanted, codings, strict=True)
        )
        # The key in the order of the columns, which is what the stream tells.
        names = [column.name for column in wanted]
        usable = all(part in names for part in key)
        ordered = tuple(part for part in names if part in key) if usable else ()
        table = Table(self.database, name[0], name[1], columns, ordered)
        return Relation(oid, table, codings, identity)


@dataclass(frozen=True, slots=True)
class _Wanted:
    name: str
    type_oid: int
    typmod: int
    optional: bool


def chosen(full_name: str, include: Sequence[str], exclude: Sequence[str]) -> bool:
    """Whether the patterns choose a table; one without a dot means the schema `public`."""

    def matches(pattern: str) -> bool:
        return fnmatchcase(full_name, pattern) or (
            "." not in pattern and fnmatchcase(full_name, f"public.{pattern}")
        )

    return any(map(matches, include)) and not any(map(matches, exclude))


def _streamed_key(
    message: RelationMessage, info: TableInfo | None, before: Relation | None
) -> tuple[str, ...]:
    """The key columns: what the stream flags, or with full identity what the catalog says."""
    if message.identity in "di":
        return tuple(column.name for column in message.columns if column.is_key)
    names = [column.name for column in message.columns]
    if info is not None:
        key = info.key
        if all(name in names for name in key):
            return key
        # Renamed since: same columns otherwise, so their places tell which is which.
        now = [c for c in info.columns if not c.generated]
        if [c.type_oid for c in now] == [c.type_oid for c in message.columns]:
            places = [c.name for c in now]
            return tuple(names[places.index(name)] for name in key if name in places)
    if before is not None and all(name in names for name in before.table.key):
        return before.table.key
    return ()


def _same(one: Relation, other: Relation) -> bool:
    return (one.identity, one.table.schema, one.table.name, one.table.columns, one.table.key) == (
        other.identity,
        other.table.schema,
        other.table.name,
        other.table.columns,
        other.table.key,
    )


def _native_type(row: tuple[Any, ...]) -> NativeType:
    oid, schema, name, kind, element, base, typmod, delimiter, subscript, labels = row
    is_array = bool(element) and str(subscript) == "array_subscript_handler"
    return NativeType(
        oid=oid,
        schema=schema,
        name=name,
        kind=kind,
        of=base if kind == "d" else element if is_array else 0,
        is_array=is_array,
        delimiter=delimiter,
        typmod=typmod,
        labels=tuple(labels),
    )


def _text(value: bytes) -> str:
    return value.decode(errors="replace")
