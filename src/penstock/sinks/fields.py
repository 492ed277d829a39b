"""The columns of a sink: given as text, told by Debezium's schema block, or guessed from records.

A column says, beside its type, how its values stand in JSON: `how` is one of the words below, and
only for times, dates, decimals and bytes is it of any importance.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from penstock.errors import ConfigError
from penstock.sinks.schema import is_json, json_field

PLAIN: Final = ""
# Whole numbers of a time: their unit. Decimals as Connect writes them: base64 of the digits.
UNITS: Final = {"s": 1_000_000, "ms": 1000, "us": 1}
PRECISE: Final = "precise"
# JSON that stands in a string, as databases give it.
JSON_TEXT: Final = "json text"

_TYPES: Final[Mapping[str, pa.DataType]] = {
    "boolean": pa.bool_(), "bool": pa.bool_(),
    "tinyint": pa.int8(), "byte": pa.int8(), "smallint": pa.int16(), "short": pa.int16(),
    "int": pa.int32(), "integer": pa.int32(), "bigint": pa.int64(), "long": pa.int64(),
    "float": pa.float32(), "real": pa.float32(), "double": pa.float64(),
    "string": pa.string(), "text": pa.string(), "varchar": pa.string(),
    "binary": pa.binary(), "bytes": pa.binary(), "date": pa.date32(), "time": pa.time64("us"),
    "timestamp": pa.timestamp("us", "UTC"), "timestamp_ltz": pa.timestamp("us", "UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}  # fmt: skip
# One for each type, in the words of this package's pages.
_WORDS: Final = {
    word: _TYPES[word]
    for word in ("boolean", "tinyint", "smallint", "int", "bigint", "float", "double", "string",
                 "binary", "date", "time", "timestamp", "timestamp_ntz")
}  # fmt: skip
# Kept as JSON, whatever it is.
ANY_JSON: Final = ("json", "variant")
_NESTED: Final = ("struct", "array", "map", *ANY_JSON)
_DECIMAL: Final = re.compile(r"(?:decimal|numeric|dec)(?:\(\s*(\d+)\s*(?:,\s*(\d+)\s*)?\))?")
_FIELD: Final = re.compile(r"\s*(`[^`]+`|[^\s:`]+)(?:\s*:\s*|\s+)(.+?)\s*$", re.DOTALL)

_DEBEZIUM: Final[Mapping[str, tuple[pa.DataType, str]]] = {
    "io.debezium.time.Date": (pa.date32(), PLAIN),
    "org.apache.kafka.connect.data.Date": (pa.date32(), PLAIN),
    "io.debezium.time.Time": (pa.time64("us"), "ms"),
    "org.apache.kafka.connect.data.Time": (pa.time64("us"), "ms"),
    "io.debezium.time.MicroTime": (pa.time64("us"), "us"),
    "io.debezium.time.Timestamp": (pa.timestamp("us"), "ms"),
    "org.apache.kafka.connect.data.Timestamp": (pa.timestamp("us"), "ms"),
    "io.debezium.time.MicroTimestamp": (pa.timestamp("us"), "us"),
    "io.debezium.time.ZonedTimestamp": (pa.timestamp("us", "UTC"), PLAIN),
}
_CONNECT: Final[Mapping[str, pa.DataType]] = {
    "int8": pa.int8(), "int16": pa.int16(), "int32": pa.int32(), "int64": pa.int64(),
    "float": pa.float32(), "double": pa.float64(), "float32": pa.float32(),
    "float64": pa.float64(), "boolean": pa.bool_(), "string": pa.string(), "bytes": pa.binary(),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Column:
    """A column and how its values stand in JSON."""

    field: pa.Field
    how: str = PLAIN
    # The type that was said of what is kept as JSON, such as "array<int>".
    nested: str = ""

    @property
    def name(self) -> str:
        return str(self.field.name)


def from_text(text: str) -> list[pa.Field]:
    """Columns from "id bigint, name string, price decimal(10,2), tags json"; ConfigError if it
    cannot be read."""
    found = []
    for part in split(text):
        match = _FIELD.match(part)
        if match is None:
            raise ConfigError(
                f"{part.strip()!r} is no column", advice='A column is as in "id bigint".'
            )
        found.append(_field(match[1].strip("`"), match[2]))
    if not found:
        raise ConfigError("there are no columns")
    return found


def as_word(field: pa.Field) -> str:
    """The type of a column as `from_text` takes it."""
    if is_json(field):
        return "json"
    if pa.types.is_decimal(field.type):
        return f"decimal({field.type.precision},{field.type.scale})"
    return next(word for word, kind in _WORDS.items() if kind == field.type)


def split(text: str) -> list[str]:
    """A list of columns or types, at the commas that stand in no brackets."""
    parts, depth, at = [], 0, 0
    for place, letter in enumerate(text):
        depth += (letter in "<(") - (letter in ">)")
        if letter == "," and depth == 0:
            parts.append(text[at:place])
            at = place + 1
    return [part for part in (*parts, text[at:]) if part.strip()]


def nested_types(text: str) -> dict[str, str]:
    """Of such a list the types of the columns that are structs, arrays or maps."""
    parts = [match for part in split(text) if (match := _FIELD.match(part)) is not None]
    return {match[1].strip("`"): match[2].strip() for match in parts if "<" in match[2]}


def _field(name: str, text: str) -> pa.Field:
    kind = re.sub(r"\s+not\s+null$", "", text.strip().lower())
    if kind.startswith(_NESTED):
        return json_field(name)
    decimal = _DECIMAL.fullmatch(kind)
    if decimal is not None:
        precision, scale = int(decimal[1] or 10), int(decimal[2] or 0)
        if not 1 <= precision <= 38 or scale > precision:
            raise ConfigError(f"column {name!r}: {text} has more than 38 digits, or too few")
        return pa.field(name, pa.decimal128(precision, scale))
    if kind not in _TYPES:
        raise ConfigError(
            f"column {name!r}: no type is called {text!r}",
            advice=f"There are {', '.join(_TYPES)}, decimal(P,S) and json.",
        )
    return pa.field(name, _TYPES[kind])


def columns_of(
    fields: Iterable[pa.Field], *, unit: str, precise: bool, json_text: bool
) -> list[Column]:
    """Columns whose values stand in JSON as this sink has it."""
    found = []
    for field in fields:
        how = PLAIN
        if pa.types.is_timestamp(field.type) or pa.types.is_time(field.type):
            how = unit
        elif pa.types.is_decimal(field.type) and precise:
            how = PRECISE
        elif is_json(field) and json_text:
            how = JSON_TEXT
        found.append(Column(field, how))
    return found


def from_block(block: Mapping[str, Any]) -> list[Column]:
    """Columns from the schema block of a change event, or of a row."""
    fields: Sequence[Mapping[str, Any]] = block.get("fields") or ()
    inner = {str(each.get("field")): each for each in fields}
    if "after" in inner and "op" in inner:
        return from_block(inner["after"])
    return [_of_block(each) for each in fields]


def _of_block(told: Mapping[str, Any]) -> Column:
    name, semantic, kind = str(told["field"]), str(told.get("name") or ""), str(told.get("type"))
    if semantic in _DEBEZIUM:
        found, how = _DEBEZIUM[semantic]
        return Column(pa.field(name, found), how)
    if semantic == "org.apache.kafka.connect.data.Decimal":
        given = told.get("parameters") or {}
        scale = int(given.get("scale", 0))
        digits = min(38, int(given.get("connect.decimal.precision", 38)))
        if 0 <= scale <= digits:
            return Column(pa.field(name, pa.decimal128(digits, scale)), PRECISE)
    if semantic == "io.debezium.data.Json":
        return Column(json_field(name), JSON_TEXT)
    if kind in _CONNECT:
        return Column(pa.field(name, _CONNECT[kind]))
    return Column(json_field(name))


def guessed(values: Iterable[Any], name: str) -> pa.Field | None:
    """The column that holds these values; None if all of them are null."""
    kinds = {type(value) for value in values} - {type(None)}
    if not kinds:
        return None
    if kinds == {bool}:
        return pa.field(name, pa.bool_())
    if kinds == {int}:
        return pa.field(name, pa.int64())
    if kinds <= {int, float}:
        return pa.field(name, pa.float64())
    if kinds == {str}:
        return pa.field(name, pa.string())
    return json_field(name)


def from_samples(rows: Sequence[Mapping[str, Any]]) -> list[pa.Field]:
    """Columns from rows, in the order in which they appear; those that are always null are text."""
    names = dict.fromkeys(name for row in rows for name in row)
    return [
        guessed((row.get(name) for row in rows), name) or pa.field(name, pa.string())
        for name in names
    ]
