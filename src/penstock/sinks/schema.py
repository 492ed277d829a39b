"""The schema of a derived table: few types, the same for every store.

The types are bool, int8 to int64, float32, float64, decimal128, string, binary, date32, time64[us],
timestamp[us] with UTC or without a zone. Others become one of these in `Schema.of`: unsigned
numbers the next wider, times of another unit microseconds, lists, structs and maps their JSON as
text. Such a column, and any text column that is declared so, is marked as JSON in its field's
metadata (`is_json`), for stores that have a type for it.

Columns of the key are never null, and neither numbers with a fraction nor JSON.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from penstock.errors import ConfigError
from penstock.sinks.errors import SchemaChangedError, StoreError

JSON_MARK: Final = {b"penstock": b"json"}
MAX_COLUMNS: Final = 1000
_DIGITS_MAX: Final = 38
_WIDER: Final = {
    pa.int8(): (pa.int16(), pa.int32(), pa.int64()),
    pa.int16(): (pa.int32(), pa.int64()),
    pa.int32(): (pa.int64(),),
    pa.float32(): (pa.float64(),),
}
_UNSIGNED: Final = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
}
_PLAIN: Final = frozenset(
    {
        pa.bool_(), pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64(),
        pa.string(), pa.binary(), pa.date32(), pa.time64("us"), pa.timestamp("us"),
        pa.timestamp("us", "UTC"),
    }
)  # fmt: skip


def json_field(name: str) -> pa.Field:
    """A column of JSON, as text."""
    return pa.field(name, pa.string(), metadata=JSON_MARK)


def is_json(field: pa.Field) -> bool:
    return bool((field.metadata or {}).get(b"penstock") == b"json")


@dataclass(frozen=True, slots=True)
class Schema:
    """The columns of a table, and those of its key."""

    fields: tuple[pa.Field, ...]
    key: tuple[str, ...]

    @classmethod
    def of(cls, fields: pa.Schema | Iterable[pa.Field], key: str | Sequence[str]) -> Schema:
        """The schema with these columns, types made those that stores know; ConfigError if none
        fits, or the key is not among the columns."""
        keys = (key,) if isinstance(key, str) else tuple(key)
        known = tuple(_normal(field, is_key=field.name in keys) for field in fields)
        names = [field.name for field in known]
        if not known or len(known) > MAX_COLUMNS:
            raise ConfigError(f"a table has 1 to {MAX_COLUMNS} columns, not {len(known)}")
        if not keys or len(set(keys)) != len(keys):
            raise ConfigError(f"the key must be columns, each once, not {keys!r}")
        doubled = sorted({name for name in names if names.count(name) > 1})
        if doubled:
            raise ConfigError(f"there are two columns {doubled[0]!r}")
        for name in keys:
            if name not in names:
                raise ConfigError(
                    f"the key {name!r} is none of the columns",
                    advice=f"They are {', '.join(names)}.",
                )
        return cls(known, keys)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(field.name for field in self.fields)

    @property
    def arrow(self) -> pa.Schema:
        """What the table of upserts has."""
        return pa.schema(self.fields)

    @property
    def key_arrow(self) -> pa.Schema:
        """What the table of deletes has: the key's columns, in the key's order."""
        return pa.schema([self.field(name) for name in self.key])

    def field(self, name: str) -> pa.Field:
        return next(field for field in self.fields if field.name == name)

    def as_json(self) -> dict[str, Any]:
        """For a store to keep: JSON can say it, `from_json` gives it back."""
        data = self.arrow.serialize().to_pybytes()
        return {"key": list(self.key), "arrow": base64.b64encode(data).decode("ascii")}

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Schema:
        fields = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(found["arrow"])))
        return cls(tuple(fields), tuple(found["key"]))

    def evolved(self, wanted: Schema, store: str) -> Schema:
        """What a store with this schema gets when `wanted` is opened: all columns of both.

        SchemaChangedError, naming the store, if that cannot be.
        """
        if self.key != wanted.key:
            raise SchemaChangedError(
                f"{store} has the key {list(self.key)}, wanted is {list(wanted.key)}"
            )
        new = {field.name: field for field in wanted.fields}
        merged = []
        for field in self.fields:
            other = new.pop(field.name, None)
            is_key = field.name in self.key
            merged.append(field if other is None else wider(field, other, store, is_key=is_key))
        return Schema((*merged, *new.values()), self.key)

    def told_apart(self, wanted: Schema, folded: Callable[[str], str], store: str) -> Schema:
        """This schema, which a store gets when `wanted` is opened, if no two of its columns are one
        to the store, which compares names folded like this.

        StoreError, with the remedy, if it cannot tell those of `wanted` apart; SchemaChangedError
        if it is one that the store has.
        """
        told = "{}: the columns {!r} and {!r} differ only in case, and are one to this store"
        if pair := wanted._alike(folded):
            raise StoreError(
                told.format(store, *pair),
                advice='Name the columns to be stored, without one of the two: fields = "...".',
            )
        if pair := self._alike(folded):
            raise SchemaChangedError(told.format(store, *pair))
        return self

    def _alike(self, folded: Callable[[str], str]) -> tuple[str, str] | None:
        seen: dict[str, str] = {}
        for name in self.names:
            if (other := seen.setdefault(folded(name), name)) != name:
                return other, name
        return None

    def differences(self, old: Schema | None) -> tuple[list[pa.Field], list[pa.Field]]:
        """The columns that this one has more than `old`, and those that are of another type."""
        before = {} if old is None else {field.name: field for field in old.fields}
        added = [field for field in self.fields if field.name not in before]
        changed = [
            field
            for field in self.fields
            if field.name in before and before[field.name].type != field.type
        ]
        return added, changed


def _normal(field: pa.Field, *, is_key: bool) -> pa.Field:
    kind = _normal_type(field.type)
    if kind is None:
        raise ConfigError(
            f"column {field.name!r}: no store knows the type {field.type}",
            advice="Cast it to text, a number, a time, bytes, or what JSON can say.",
        )
    json = is_json(field) or pa.types.is_nested(field.type)
    if is_key and (json or pa.types.is_floating(kind)):
        raise ConfigError(
            f"column {field.name!r}: {field.type} cannot be part of a key",
            advice="A key is made of whole numbers, text, bytes, dates, times or decimals.",
        )
    return json_field(field.name) if json else pa.field(field.name, kind, nullable=not is_key)


def _normal_type(kind: pa.DataType) -> pa.DataType | None:
    types = pa.types
    if kind in _PLAIN or (types.is_decimal128(kind) and kind.scale >= 0):
        return kind
    if kind in _UNSIGNED:
        return _UNSIGNED[kind]
    if types.is_dictionary(kind):
        return _normal_type(kind.value_type)
    if types.is_timestamp(kind):
        return pa.timestamp("us", None if kind.tz is None else "UTC")
    simple = (
        (types.is_null, pa.string()),
        (types.is_nested, pa.string()),
        (types.is_large_string, pa.string()),
        (types.is_large_binary, pa.binary()),
        (types.is_fixed_size_binary, pa.binary()),
        (types.is_date, pa.date32()),
        (types.is_time, pa.time64("us")),
        (types.is_float16, pa.float32()),
    )
    return next((target for test, target in simple if test(kind)), None)


def wider(old: pa.Field, new: pa.Field, store: str, *, is_key: bool = False) -> pa.Field:
    """The type for the values of both: the wider of two numbers.

    A key keeps the digits behind its point: it would be another key.
    """
    if old.type == new.type or new.type in _WIDER.get(old.type, ()):
        return new if is_json(old) == is_json(new) else old
    if old.type in _WIDER.get(new.type, ()):
        return old
    if pa.types.is_decimal128(old.type) and pa.types.is_decimal128(new.type):
        scale = max(old.type.scale, new.type.scale)
        whole = max(each.type.precision - each.type.scale for each in (old, new))
        if old.type.scale == new.type.scale or (whole + scale <= _DIGITS_MAX and not is_key):
            return old.with_type(pa.decimal128(whole + scale, scale))
    raise SchemaChangedError(
        f"{store}: column {old.name!r} is {old.type}, and cannot become {new.type}"
    )
