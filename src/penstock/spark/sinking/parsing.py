"""Records of a changelog to changes of a table: the last of each key, parsed.

A record's key, as bytes, says which row it is of: so only the last record of each key is parsed. A
record that cannot be read is put aside with the reason, and the one before it with the same key
counts: the table is then the same as if each record had been taken by itself, however the log is
cut into batches. (A bad record that a good one replaces in the same batch is not looked at.)

That is so while the records' keys are those of the rows. Where they are not (clicks keyed by
customer, in a table of clicks; or no keys at all) each record is parsed and counts for the row that
it says itself: `by_row`, which is found out from the records.

Formats: `debezium` are change events, with or without Connect's schema around them; `json` are rows
as JSON objects, and null for deleted. Keys are JSON objects of the key's columns, or for a single
column its value as text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, Literal

import numpy as np
import orjson
import pyarrow as pa

from penstock.client.table_schemas import SCHEMA_ID, SchemaError, TableSchema
from penstock.sinks.contract import ORIGIN
from penstock.sinks.fields import Column, from_block, guessed
from penstock.sinks.schema import Schema, is_json
from penstock.spark.reading import connect_blocks
from penstock.spark.reading.captured import PAYLOAD, UNSAID, schema_of_block
from penstock.spark.reading.heartbeat_keys import HEARTBEATS
from penstock.spark.sinking import captured, digits
from penstock.spark.sinking.captured import Told
from penstock.spark.sinking.errors import TruncatedError
from penstock.spark.sinking.values import UNAVAILABLE, column_of

Format = Literal["debezium", "json"]

BAD: Final = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        *ORIGIN,
        pa.field("reason", pa.string()),
    ]
)
_UNAVAILABLE: Final = UNAVAILABLE.encode()
# Messages of the database; truncates whose deletes were told one by one.
_NO_CHANGE: Final = frozenset("mt")
_MAX_NEW: Final = 200


class _BadRecord(Exception):  # noqa: N818 (not an error of ours: it becomes a line of `bad`)
    """Why a record cannot be read."""


class _OtherKey(Exception):  # noqa: N818 (nor is this: records are then read by their rows)
    """A record's key is not that of its row."""


@dataclass(slots=True)
class Parsed:
    """The changes of some records: tables aligned as in `Changes`, and what could not be read."""

    upserts: pa.Table
    upserted_at: pa.Table
    deletes: pa.Table
    deleted_at: pa.Table
    bad: pa.Table
    # Columns that rows have and the table does not.
    new: dict[str, Column] = field(default_factory=dict)
    records: int = 0
    # Whether records count by their rows, and not by their keys.
    by_row: bool = False
    # Ids of schemas that records name and the parser does not know.
    unknown: set[int] = field(default_factory=set)
    # Columns that were taken for whole numbers, and are none: where that is seen.
    fractions: dict[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class _Found:
    """What was read so far: rows and keys, each with the number of its record and what tells the
    record's schema."""

    rows: list[Mapping[str, Any]] = field(default_factory=list)
    rows_at: list[int] = field(default_factory=list)
    rows_by: list[Told] = field(default_factory=list)
    keys: list[Mapping[str, Any]] = field(default_factory=list)
    keys_at: list[int] = field(default_factory=list)
    keys_by: list[Told] = field(default_factory=list)
    bad: dict[int, str] = field(default_factory=dict)
    # The columns that are known; of others the last schema block that tells them.
    known: frozenset[str] = frozenset()
    blocks: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    unknown: set[int] = field(default_factory=set)
    # How the last event began that has its schema around it.
    head: bytes = b""
    # The schema that events must name, or None; -1 is nobody's.
    last: int | None = None
    # The records that may have a number with more digits than a double.
    long: frozenset[int] = frozenset()
    # Of columns that were taken for whole numbers, a record that has a fraction, and that.
    fractions: dict[str, tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class Parser:
    """Reads the records of one sink; goes to the tasks."""

    columns: tuple[Column, ...]
    key: tuple[str, ...]
    format: Format
    # Whether columns that rows have beyond these are looked for.
    grows: bool = False
    # Whether records are keyed by something else than their rows.
    by_row: bool = False
    # The published schemas by id, the newest last; None is one that nobody knows any more.
    schemas: Mapping[int, TableSchema | None] = field(default_factory=dict)
    # Whether the columns are those of the published schema: then an event must say its own.
    is_published: bool = False
    # Whether the types of the columns were found out from values.
    is_guessed: bool = False

    @property
    def schema(self) -> Schema:
        return Schema.of([column.field for column in self.columns], self.key)

    def parse(self, records: pa.Table) -> Parsed:
        """Records in the order of the log: columns key, value, topic, partition, offset and
        timestamp."""
        if not self.by_row:
            try:
                return self._parse(records)
            except _OtherKey:
                pass
        return replace(self, by_row=True)._parse(records)

    def _parse(self, records: pa.Table) -> Parsed:
        keys: list[bytes | None] = records.column("key").to_pylist()
        values = records.column("value")
        found = _Found()
        new: dict[str, Column] = {}
        if self.by_row:
            step = self._step(range(len(keys)), keys, values, found, new)
            return self._parsed(records, [step], found, new)
        last = dict(zip(keys, range(len(keys)), strict=True))
        if None in last:
            raise _OtherKey
        parts: list[tuple[pa.Table, list[int], pa.Table, list[int]]] = []
        pending = sorted(last.values())
        before: dict[bytes, list[int]] | None = None
        while pending:
            step = self._step(pending, keys, values, found, new)
            parts.append(step)
            failed = [at for at in pending if at in found.bad]
            if not failed:
                break
            if before is None:
                before = _places(keys, {keys[at] for at in failed})
            pending = _earlier(failed, keys, before)
        return self._parsed(records, parts, found, new)

    def _step(
        self,
        pending: Sequence[int],
        keys: Sequence[bytes | None],
        values: pa.ChunkedArray,
        told: _Found,
        new: dict[str, Column],
    ) -> tuple[pa.Table, list[int], pa.Table, list[int]]:
        """Read the records with these numbers; those that cannot be are told in `bad`."""
        bad = told.bad
        names = frozenset(column.name for column in self.columns)
        found = _Found(bad=bad, known=names, unknown=told.unknown, fractions=told.fractions)
        found.last = -1 if self.is_published else None
        taken = values.take(pa.array(pending, pa.int64()))
        if self._has_digits:
            found.long = digits.long(taken, pending)
        for at, value in zip(pending, taken.to_pylist(), strict=True):
            key = keys[at]
            if value is None and key in HEARTBEATS:
                continue
            try:
                self._read(at, key, value, found)
            except _BadRecord as why:
                bad[at] = str(why)
        rows = found.rows, found.rows_at, found.rows_by
        upserts, upserts_at = self._table(*rows, self.columns, bad)
        if self.is_guessed:
            self._note_fractions(found)
        wanted = [column for name in self.key for column in self.columns if column.name == name]
        gone = found.keys, found.keys_at, found.keys_by
        deletes, deletes_at = self._table(*gone, wanted, bad)
        if self.grows:
            self._look_for_new(found, new)
        return upserts, upserts_at, deletes, deletes_at

    def _read(self, at: int, key: bytes | None, value: bytes | None, found: _Found) -> None:
        """Sort a record out: a row, a deletion, or neither."""
        row: Mapping[str, Any] | None = None
        old: Mapping[str, Any] = {}
        block: Any = None
        by: Told = None
        if value is None:
            by = self._newest
        else:
            try:
                document = orjson.loads(value)
            except orjson.JSONDecodeError as error:
                what = "Avro, or other bytes" if value[:1] == b"\0" else error
                raise _BadRecord(f"the value is not JSON: {what}") from None
            if not isinstance(document, dict):
                raise _BadRecord("the value is not a JSON object")
            if "payload" in document and "schema" in document and len(document) == 2:
                block, document = document["schema"], document["payload"]
            if self.format == "debezium":
                if document is not None:
                    operation = _operation(document)
                    if operation in _NO_CHANGE:
                        return
                    by = document.get(SCHEMA_ID)
                    # Most often that of the event before: this is done for every record.
                    if block is not None or by != found.last:
                        by = self._schema_told(value, by, block, found)
                    row, old = document.get("after"), document.get("before") or {}
                    if row is None and operation != "d":
                        raise _BadRecord(f"the change has op {operation!r} and no row afterwards")
                    row = None if operation == "d" else row
            else:
                row = document
                if block is not None and row is not None:
                    # A change event that was flattened: its columns stand as they did in it.
                    by = self._schema_told(value, None, block, found)
            if row is not None and not isinstance(row, dict):
                raise _BadRecord("the row is not a JSON object")
            lacks = _UNAVAILABLE in value or (self._may_lack_bytes and _lacks_bytes(value))
            if lacks and row is not None and captured.unavailable(row):
                raise _BadRecord(
                    "the row lacks a value that the database did not send; capture with "
                    'unavailable = "fill"'
                )
            if at in found.long and row is not None:
                row = self._with_digits(row, value, by)
        if row is None:
            self._read_deletion(at, key, old, found, by, is_tombstone=value is None)
            return
        # Loops, not generators: this is done for every record.
        for name in self.key:
            if row.get(name) is None:
                row = {**row, **self._key(key, row)}
                break
        else:
            if not self.by_row and not self._is_of(key, row):
                raise _OtherKey
        if self.by_row and old and any(old.get(name) != row[name] for name in self.key):
            # It was another row before.
            found.keys.append(self._key(None, old))
            found.keys_at.append(at)
            found.keys_by.append(by)
        found.rows.append(row)
        found.rows_at.append(at)
        found.rows_by.append(by)
        if self.grows and isinstance(block, dict) and not found.known.issuperset(row):
            found.blocks.update(dict.fromkeys(row.keys() - found.known, block))

    def _read_deletion(
        self, at: int, key: bytes | None, old: Mapping[str, Any], found: _Found, by: Told, *,
        is_tombstone: bool,
    ) -> None:  # fmt: skip
        is_told = bool(old) and all(old.get(name) is not None for name in self.key)
        if not self.by_row and is_told and not self._is_of(key, old):
            raise _OtherKey
        try:
            found.keys.append(self._key(key, old))
        except _BadRecord:
            if not self.by_row:
                raise _OtherKey from None
            if is_tombstone and self.format == "debezium":
                # The deletion itself came before, and said which row it was.
                return
            raise
        found.keys_at.append(at)
        found.keys_by.append(by)

    @cached_property
    def _has_digits(self) -> bool:
        """Whether there are columns in which a number may have more digits than a double; where
        events say their schema, decimals are no numbers."""
        if self.is_published:
            return False
        kinds = [each.field.type for each in self.columns]
        # Whoever says double has one.
        wide = any(map(pa.types.is_decimal, kinds))
        wide = wide or (self.grows and any(map(pa.types.is_float64, kinds)))
        return wide or any(is_json(each.field) for each in self.columns)

    def _with_digits(self, row: Mapping[str, Any], value: bytes, by: Told) -> Mapping[str, Any]:
        if by is not None and self.format == "debezium":
            # There decimals are no numbers, and the schema says what is a double.
            return row
        own = digits.read(value)
        if "payload" in own and "schema" in own and len(own) == 2:
            own = own["payload"]
        own = own["after"] if self.format == "debezium" else own
        if self.grows and by is None:
            try:
                digits.check(own, self.columns)
            except digits.TooManyDigitsError as error:
                raise _BadRecord(str(error)) from None
        return digits.kept(row, own, self.columns)

    @cached_property
    def _newest(self) -> Told:
        """The schema of what names none: a tombstone has but its key."""
        known = [id_ for id_, schema in self.schemas.items() if schema is not None]
        return known[-1] if known else None

    @cached_property
    def _blocks(self) -> dict[bytes, TableSchema | None]:
        """Schemas that stand around events."""
        return {}

    @cached_property
    def _may_lack_bytes(self) -> bool:
        """Whether a value that the database did not send may be something else than a string."""
        kinds = {each.type.name for schema in self.schemas.values() if schema is not None
                 for each in schema.columns}  # fmt: skip
        return bool(kinds & {"bytes", "array"})

    def _schema_told(self, value: bytes, id_: Any, block: Any, found: _Found) -> Told:
        """What tells the schema of an event; _BadRecord if nothing does that should."""
        if block is not None:
            if not found.head or not value.startswith(found.head):
                end = value.find(PAYLOAD)
                found.head = value[: end + len(PAYLOAD)] if end > 0 else b""
                if found.head and found.head not in self._blocks:
                    try:
                        self._blocks[found.head] = schema_of_block(found.head)
                    except SchemaError:
                        self._blocks[found.head] = None
            return found.head if self._blocks.get(found.head) is not None else None
        if id_ is None:
            if self.is_published:
                raise _BadRecord(UNSAID)
            return None
        if not isinstance(id_, int):
            raise _BadRecord(f"the {SCHEMA_ID} of the event is no number")
        if id_ not in self.schemas:
            found.unknown.add(id_)
        elif self.schemas[id_] is None:
            raise _BadRecord(f"the schema {id_} of the event is not in the log any more")
        else:
            found.last = id_
        return id_

    def _schema_of(self, told: Told) -> TableSchema | None:
        if isinstance(told, bytes):
            return self._blocks.get(told)
        return None if told is None else self.schemas.get(told)

    def _is_of(self, key: bytes | None, row: Mapping[str, Any]) -> bool:
        """Whether a record's key is that of its row, as far as can be told."""
        told = _told(key)
        if isinstance(told, dict):
            if len(told) != len(self.key):
                return False
            for name in self.key:  # noqa: SIM110 (a generator takes longer)
                if name not in told or told[name] != row[name]:
                    return False
            return True
        if len(self.key) > 1 or key is None:
            return False
        value = row[self.key[0]]
        try:
            text = told if isinstance(told, str) else key.decode()
            if type(value) is int:
                return int(text) == value
        except ValueError:
            return False
        return text == value if isinstance(value, str) else True

    def _key(self, key: bytes | None, known: Mapping[str, Any]) -> Mapping[str, Any]:
        """The columns of the key, from the record's key, or from a row."""
        if known and all(known.get(name) is not None for name in self.key):
            return {name: known[name] for name in self.key}
        if key is None:
            raise _BadRecord(f"neither the record's key nor its row tells {self.key[0]}")
        told = _told(key)
        if isinstance(told, dict):
            missing = [name for name in self.key if told.get(name) is None]
            if missing:
                raise _BadRecord(f"the key has no {missing[0]}")
            return {name: told[name] for name in self.key}
        if len(self.key) > 1:
            raise _BadRecord("the key is not a JSON object of the key's columns")
        try:
            # As text: the column knows what it is.
            text = told if isinstance(told, str) else key.decode()
        except UnicodeDecodeError:
            raise _BadRecord("the key is not UTF-8") from None
        return {self.key[0]: text}

    def _note_fractions(self, found: _Found) -> None:
        """Note which columns of whole numbers have others."""
        names = [each.name for each in self.columns
                 if pa.types.is_integer(each.field.type) and each.name not in self.key]  # fmt: skip
        for row, at in zip(found.rows, found.rows_at, strict=True):
            if at not in found.bad:
                continue
            for name in names:
                value = row.get(name)
                if isinstance(value, float) and not value.is_integer():
                    found.fractions.setdefault(name, (at, value))

    def _table(
        self,
        rows: Sequence[Mapping[str, Any]],
        rows_at: list[int],
        rows_by: list[Told],
        columns: Iterable[Column],
        bad: dict[int, str],
    ) -> tuple[pa.Table, list[int]]:
        """Rows as columns, without those that do not fit, and the records that they are from."""
        arrays, names = [], []
        wrong: dict[int, str] = {}
        groups = _groups(rows_by)
        for column in columns:
            name = column.name
            array, unfit = self._column(rows, column, groups)
            if name in self.key and array.null_count:
                for at, there in enumerate(array.is_valid().to_pylist()):
                    if not there:
                        unfit.setdefault(at, f"field {name} of the key is missing or null")
            for at, reason in unfit.items():
                wrong.setdefault(at, reason)
            arrays.append(array)
            names.append(column.field)
        table = pa.table(arrays, schema=pa.schema(names))
        if not wrong:
            return table, rows_at
        bad.update((rows_at[at], reason) for at, reason in wrong.items())
        keep = [at for at in range(len(rows_at)) if at not in wrong]
        return table.take(pa.array(keep, pa.int64())), [rows_at[at] for at in keep]

    def _column(
        self,
        rows: Sequence[Mapping[str, Any]],
        column: Column,
        groups: Mapping[Told, list[int] | None],
    ) -> tuple[pa.Array, dict[int, str]]:
        """One column of rows: those of each schema together."""
        name = column.name
        parts: list[pa.Array] = []
        order: list[int] = []
        wrong: dict[int, str] = {}
        for told, places in groups.items():
            chosen = rows if places is None else [rows[at] for at in places]
            schema = self._schema_of(told)
            if schema is None:
                array, unfit = column_of([row.get(name) for row in chosen], column)
            else:
                own = next((each for each in (*schema.columns, *schema.key_only)
                            if each.name == name), None)  # fmt: skip
                if self.format == "json" and not captured.says_more(own, column):
                    array, unfit = column_of([row.get(name) for row in chosen], column)
                else:
                    array, unfit = captured.column_of(chosen, column, own)
            if places is None:
                return array, unfit
            parts.append(array)
            order += places
            wrong |= {places[at]: why for at, why in unfit.items()}
        if not parts:
            return pa.array([], column.field.type), {}
        at = pa.array(np.argsort(np.array(order, np.int64)))
        return pa.concat_arrays(parts).take(at), wrong

    def _look_for_new(self, found: _Found, new: dict[str, Column]) -> None:
        # What is published tells its columns itself.
        named = {by for by in set(found.rows_by) if isinstance(by, int)}
        guessing = found.rows
        if named:
            both = zip(found.rows, found.rows_by, strict=True)
            guessing = [row for row, by in both if by not in named]
        names = {name for row in guessing for name in row if name not in found.known}
        blocks = {id(block): block for block in found.blocks.values()}
        told = {
            name: column
            for block in blocks.values()
            for name, column in told_by(block).items()
            if found.blocks.get(name) is block
        }
        for name in sorted(names)[:_MAX_NEW]:
            if name in told:
                new.setdefault(name, told[name])
            elif (seen := guessed((row.get(name) for row in guessing), name)) is not None:
                new.setdefault(name, Column(seen))

    def _parsed(
        self,
        records: pa.Table,
        parts: list[tuple[pa.Table, list[int], pa.Table, list[int]]],
        found: _Found,
        new: dict[str, Column],
    ) -> Parsed:
        bad = found.bad
        origin = records.select(ORIGIN.names).cast(ORIGIN)
        upserts = [part[0] for part in parts] or [self.schema.arrow.empty_table()]
        deletes = [part[2] for part in parts] or [self.schema.key_arrow.empty_table()]
        wrong = sorted(bad)
        letters = records.select(["key", "value"]).take(pa.array(wrong, pa.int64()))
        told = [letters.column("key"), letters.column("value")]
        told += origin.take(pa.array(wrong, pa.int64())).columns
        told.append(pa.chunked_array([pa.array([bad[at] for at in wrong], pa.string())]))
        return Parsed(
            pa.concat_tables(upserts).cast(self.schema.arrow),
            origin.take(pa.array([at for part in parts for at in part[1]], pa.int64())),
            pa.concat_tables(deletes).cast(self.schema.key_arrow),
            origin.take(pa.array([at for part in parts for at in part[3]], pa.int64())),
            pa.table(told, schema=BAD),
            new,
            records.num_rows,
            self.by_row,
            found.unknown,
            {name: f"{value!r} at {_place(origin, at)}"
             for name, (at, value) in found.fractions.items()},
        )  # fmt: skip


def _place(origin: pa.Table, at: int) -> str:
    (row,) = origin.slice(at, 1).to_pylist()
    return f"{row['topic']}-{row['partition']}, offset {row['offset']}"


def told_by(block: Mapping[str, Any]) -> dict[str, Column]:
    """The columns that a record's schema block tells; none if it is not what Connect writes."""
    try:
        plain = {column.name: column for column in from_block(block)}
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}
    try:
        exact = captured.columns_of(connect_blocks.columns_of(block))
    except SchemaError:
        return plain
    # How values stand in records that have no such block.
    return {each.name: replace(each, how=plain[each.name].how) for each in exact}


def _groups(rows_by: Sequence[Told]) -> dict[Told, list[int] | None]:
    """The rows of each schema; None for all of them."""
    if len(set(rows_by)) == 1:
        return {rows_by[0]: None}
    found: dict[Told, list[int] | None] = {}
    for at, told in enumerate(rows_by):
        places = found.setdefault(told, [])
        assert places is not None
        places.append(at)
    return found


def _told(key: bytes | None) -> Any:
    """What a record's key says in JSON, None if it is not JSON."""
    try:
        told = orjson.loads(key or b"")
    except orjson.JSONDecodeError:
        return None
    if isinstance(told, dict) and isinstance(told.get("payload"), dict) and "schema" in told:
        return told["payload"]
    return told


def _lacks_bytes(value: bytes) -> bool:
    return any(form in value for form in captured.OTHER_MARKERS)


def _operation(document: Any) -> str:
    if not isinstance(document, dict) or not isinstance(document.get("op"), str):
        raise _BadRecord("the value is no change event: no op")
    operation: str = document["op"]
    if operation == "t" and document.get("expanded") is not True:
        raise TruncatedError(
            "the table was truncated, and its topic does not say which rows that took away"
        )
    return operation


def _places(keys: Sequence[bytes | None], wanted: set[bytes | None]) -> dict[bytes, list[int]]:
    """Where the records of these keys are, in their order."""
    found: dict[bytes, list[int]] = {}
    for at, key in enumerate(keys):
        if key in wanted and key is not None:
            found.setdefault(key, []).append(at)
    return found


def _earlier(
    failed: Iterable[int], keys: Sequence[bytes | None], places: Mapping[bytes, list[int]]
) -> list[int]:
    """The records before those that failed, with the same keys."""
    found = []
    for at in failed:
        key = keys[at]
        assert key is not None
        mine = places[key]
        number = mine.index(at)
        if number > 0:
            found.append(mine[number - 1])
    return sorted(found)
