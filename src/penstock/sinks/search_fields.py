"""What of a row is searched, and how: from the schema and the options to the fields of an index.

Without being told, text is searched word by word (`text`), columns of the key as a whole
(`keyword`), numbers, truth values, dates and times by their value, JSON objects by their parts, and
bytes not at all. Options name columns that are something else: `text`, `keyword`, `facet` (a path
such as `Shoes/Boots`, which a search for `/Shoes` finds too) or `unindexed`.
"""

from __future__ import annotations

import datetime as dt
import math
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import orjson
import pyarrow as pa
import tantivy

from penstock.errors import ConfigError
from penstock.sinks.schema import Schema, is_json
from penstock.sinks.stores import Address

FieldKind = Literal[
    "text", "keyword", "facet", "integer", "number", "boolean", "date", "json", "unindexed"
]
CHOICES: Final[tuple[FieldKind, ...]] = ("text", "keyword", "facet", "unindexed")
LANGUAGES: Final = {"": "default", "en": "en_stem"}
KEY, ROW, ABOUT = "_key", "_row", "_about"
_OWN: Final = frozenset((KEY, ROW, ABOUT))
# What an index can hold: nanoseconds since 1970 in 64 bits.
_DATE_MIN: Final = dt.datetime(1678, 1, 1, tzinfo=dt.UTC)
_DATE_MAX: Final = dt.datetime(2262, 1, 1, tzinfo=dt.UTC)
_TERM_BYTES_MAX: Final = 60_000


def kinds_of(schema: Schema, address: Address) -> dict[str, FieldKind]:
    """The kind of each column; ConfigError if the options do not fit the schema."""
    chosen: dict[str, FieldKind] = {}
    for kind in CHOICES:
        for name in filter(None, address.option(kind).split(",")):
            if name not in schema.names:
                raise ConfigError(
                    f"{address.shown}: {kind} names the column {name!r}, which there is not",
                    advice=f"They are {', '.join(schema.names)}.",
                )
            if name in chosen:
                raise ConfigError(f"{address.shown}: {name!r} is both {chosen[name]} and {kind}")
            textual = pa.types.is_string(schema.field(name).type)
            if kind in {"text", "facet"} and not textual:
                raise ConfigError(f"{address.shown}: {name!r} is no text, and cannot be {kind}")
            chosen[name] = kind
    return {
        field.name: chosen.get(field.name) or _usual(field, is_key=field.name in schema.key)
        for field in schema.fields
    }


def _usual(field: pa.Field, *, is_key: bool) -> FieldKind:
    types, kind = pa.types, field.type
    if field.name in _OWN or not tantivy.SchemaBuilder.is_valid_field_name(field.name):
        return "unindexed"
    if is_json(field):
        return "json"
    usual: tuple[tuple[Callable[[pa.DataType], bool], FieldKind], ...] = (
        (types.is_string, "keyword" if is_key else "text"),
        (types.is_boolean, "boolean"),
        (types.is_integer, "integer"),
        (types.is_floating, "number"),
        (types.is_decimal, "number"),
        (types.is_date32, "date"),
        (types.is_timestamp, "date"),
        (types.is_time64, "keyword"),
    )
    return next((found for test, found in usual if test(kind)), "unindexed")


def index_schema(kinds: Mapping[str, FieldKind], language: str) -> tantivy.Schema:
    """The fields of the index, and our own: the key, the row itself and the position."""
    builder = tantivy.SchemaBuilder()
    builder.add_text_field(KEY, tokenizer_name="raw", index_option="basic")
    builder.add_bytes_field(ROW, stored=True)
    builder.add_text_field(ABOUT, stored=True, tokenizer_name="raw", index_option="basic")
    for name, kind in kinds.items():
        if kind == "text":
            builder.add_text_field(name, tokenizer_name=LANGUAGES[language])
        elif kind == "keyword":
            builder.add_text_field(name, tokenizer_name="raw", index_option="basic", fast=True)
        elif kind == "facet":
            builder.add_facet_field(name)
        elif kind == "integer":
            builder.add_integer_field(name, indexed=True, fast=True)
        elif kind == "number":
            builder.add_float_field(name, indexed=True, fast=True)
        elif kind == "boolean":
            builder.add_boolean_field(name, indexed=True, fast=True)
        elif kind == "date":
            builder.add_date_field(name, indexed=True, fast=True)
        elif kind == "json":
            builder.add_json_field(name)
    return builder.build()


Adder = Callable[[tantivy.Document, str, Any], None]


def _add_text(document: tantivy.Document, name: str, value: Any) -> None:
    document.add_text(name, value)


def _add_keyword(document: tantivy.Document, name: str, value: Any) -> None:
    text = value if isinstance(value, str) else _words(value)
    if len(text) * 4 <= _TERM_BYTES_MAX or len(text.encode()) <= _TERM_BYTES_MAX:
        document.add_text(name, text)


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return value.hex()
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


def _add_facet(document: tantivy.Document, name: str, value: Any) -> None:
    parts = [part for part in value.split("/") if part]
    if parts and "\0" not in value and len(value.encode()) <= _TERM_BYTES_MAX:
        path = "".join("/" + part.replace("\\", "\\\\") for part in parts)
        document.add_facet(name, tantivy.Facet.from_string(path))


def _add_integer(document: tantivy.Document, name: str, value: Any) -> None:
    document.add_integer(name, value)


def _add_number(document: tantivy.Document, name: str, value: Any) -> None:
    number = float(value)
    if math.isfinite(number):
        document.add_float(name, number)


def _add_boolean(document: tantivy.Document, name: str, value: Any) -> None:
    document.add_boolean(name, value)


def _add_date(document: tantivy.Document, name: str, value: Any) -> None:
    moment = value
    if not isinstance(moment, dt.datetime):
        moment = dt.datetime(moment.year, moment.month, moment.day, tzinfo=dt.UTC)
    elif moment.tzinfo is None:
        moment = moment.replace(tzinfo=dt.UTC)
    if _DATE_MIN <= moment <= _DATE_MAX:
        document.add_date(name, moment)


def _add_json(document: tantivy.Document, name: str, value: Any) -> None:
    try:
        found = orjson.loads(value)
    except orjson.JSONDecodeError:
        return
    if isinstance(found, dict):
        document.add_json(name, found)


ADDERS: Final[Mapping[FieldKind, Adder]] = {
    "text": _add_text,
    "keyword": _add_keyword,
    "facet": _add_facet,
    "integer": _add_integer,
    "number": _add_number,
    "boolean": _add_boolean,
    "date": _add_date,
    "json": _add_json,
}
