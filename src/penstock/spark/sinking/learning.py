"""How a sink's records are to be read: from what its user says, and from the records themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

import orjson
import pyarrow as pa

from penstock.client.connection import Cluster
from penstock.client.metadata import EARLIEST, LATEST, Metadata, offsets
from penstock.client.reading import read_batches
from penstock.client.table_schemas import (
    AmbiguousSchemaError,
    PublishedSchema,
    PublishedSchemas,
    TableSchema,
)
from penstock.errors import ConfigError
from penstock.sinks.fields import (
    JSON_TEXT,
    PRECISE,
    Column,
    columns_of,
    from_block,
    from_samples,
    from_text,
    nested_types,
)
from penstock.sinks.schema import Schema, is_json
from penstock.sinks.spec import SinkSpec
from penstock.spark.reading.captured import history_of
from penstock.spark.reading.wire_values import stored_field
from penstock.spark.sinking import captured
from penstock.spark.sinking.errors import NothingToLearnFromError
from penstock.spark.sinking.nested import fault_of
from penstock.spark.sinking.parsing import Format, Parser, told_by

SAMPLES: Final = 500
LAST: Final = 50
# The first byte of records whose schema is in a registry.
_AVRO: Final = b"\0"


def parser_of(spec: SinkSpec, cluster: Cluster, topic: str, stored: Schema | None) -> Parser:
    """The parser for a sink; `stored` is the schema that its store has, if there is one."""
    published = history_of(cluster, topic) if spec.format != "json" else ()
    if published:
        return _published(spec, cluster, topic, stored, published)
    known = bool(spec.fields) and bool(spec.key) and bool(spec.format)
    samples = [] if known else list(_samples(cluster, topic))
    values = [value for _, value in samples if value is not None]
    if values and all(value[:1] == _AVRO for value in values):
        raise ConfigError(
            f"sink {spec.name!r}: the records of {topic} are Avro, or other bytes, and not JSON",
            advice="Capture the table as JSON, or let a flow read the Avro and write to the store.",
        )
    documents = [document for document in map(_json, values) if isinstance(document, dict)]
    rows, wrapped = _rows(documents)
    format_: Format = cast("Format", spec.format or ("debezium" if rows is not None else "json"))
    if format_ == "json":
        rows = [_payload(document) for document in documents]
    key = spec.key or _key(samples, stored, spec)
    later = [] if spec.fields else _told_last(cluster, topic)
    columns = _columns(spec, format_, rows or [], wrapped, later, stored)
    _check_key(spec, topic, key, columns)
    return Parser(_normal(columns, key), key, format_, grows=not spec.fields,
                  is_guessed=not spec.fields and wrapped is None)  # fmt: skip


def _published(
    spec: SinkSpec,
    cluster: Cluster,
    topic: str,
    stored: Schema | None,
    history: Sequence[PublishedSchema],
) -> Parser:
    """The parser for a topic of a captured table whose schemas are published."""
    # Several tables may share a topic, if the user says which columns are wanted.
    table = history[-1].schema if spec.fields else _latest(spec, cluster, topic)
    key = spec.key or (stored.key if stored is not None else table.key)
    if not key:
        raise ConfigError(
            f"sinks.{spec.name}.key is missing, and table {table.table} has none",
            advice='Say which column tells its rows apart: key = "id".',
        )
    if spec.fields:
        columns = columns_of(from_text(spec.fields), **_settings(spec, "debezium"))
        captured.check(columns, table, spec.name)
    elif stored is not None:
        columns = captured.merged(stored, table, f"sink {spec.name!r}")
    else:
        columns = captured.columns_of(table)
        names = {column.name for column in columns}
        hidden = [each for each in table.key_only if each.name not in names]
        columns += [Column(stored_field(each.name, each.type)) for each in hidden]
    _check_key(spec, topic, key, columns)
    return Parser(
        _normal(columns, key),
        key,
        "debezium",
        grows=not spec.fields,
        schemas={each.id: each.schema for each in history},
        is_published=not spec.fields,
    )


def _latest(spec: SinkSpec, cluster: Cluster, topic: str) -> TableSchema:
    try:
        latest = PublishedSchemas(cluster).latest(topic)
    except AmbiguousSchemaError as error:
        raise ConfigError(
            f"sink {spec.name!r}: {error}",
            advice='Say which columns are wanted, fields = "id bigint, ...", or give each table a '
            "topic of its own.",
        ) from error
    assert latest is not None
    return latest.schema


def _check_key(spec: SinkSpec, topic: str, key: Sequence[str], columns: Sequence[Column]) -> None:
    missing = [name for name in key if name not in {each.name for each in columns}]
    if missing:
        raise ConfigError(
            f"sink {spec.name!r}: the key {missing[0]!r} is none of the columns of {topic}",
            advice=f"They are {[each.name for each in columns]}; say which with key = and fields =",
        )


def _normal(columns: Sequence[Column], key: Sequence[str]) -> tuple[Column, ...]:
    """The columns with types as stores know them."""
    normal = Schema.of([each.field for each in columns], key)
    return tuple(replace(each, field=f) for each, f in zip(columns, normal.fields, strict=True))


def _settings(spec: SinkSpec, format_: Format) -> dict[str, Any]:
    """How values stand in JSON where nothing else says it."""
    # Of rows seconds, as flows and views read them.
    unit = spec.time_unit or ("us" if format_ == "debezium" else "s")
    precise = (spec.decimals or ("precise" if format_ == "debezium" else "text")) == PRECISE
    return {"unit": unit, "precise": precise, "json_text": format_ == "debezium"}


def _columns(
    spec: SinkSpec,
    format_: Format,
    rows: Sequence[Mapping[str, Any]],
    wrapped: Mapping[str, Any] | None,
    later: Sequence[Column],
    stored: Schema | None,
) -> list[Column]:
    settings = _settings(spec, format_)
    if spec.fields:
        nested = nested_types(spec.fields)
        found = columns_of(from_text(spec.fields), **settings)
        for kind in nested.values():
            # Only to see that it can be read.
            fault_of(kind, lambda value, kind: None)
        return [replace(each, nested=nested.get(each.name, "")) for each in found]
    if wrapped is not None:
        found = list(told_by(wrapped).values()) or from_block(wrapped)
    else:
        found = [Column(each) for each in from_samples(rows)]
    # Columns that came later: how their values stand is told by the records that have them.
    names = {each.name for each in found}
    found = [*found, *(each for each in later if each.name not in names)]
    if stored is None:
        if not found:
            raise NothingToLearnFromError(
                f"sink {spec.name!r}: topic {spec.topic} has no rows yet to tell the columns by"
            )
        return found
    # What the store has was learned before, from records that may be gone by now.
    learned = {each.name: each for each in found}
    kept = [_kept(each, learned.pop(each.name, None), settings) for each in stored.fields]
    return [*kept, *learned.values()]


def _kept(stored: pa.Field, learned: Column | None, settings: Mapping[str, Any]) -> Column:
    """A column of the store; of what was learned anew it takes how its values are written."""
    if learned is not None:
        if stored.type == learned.field.type and is_json(stored) == is_json(learned.field):
            return learned
        if pa.types.is_integer(stored.type) and pa.types.is_integer(learned.field.type):
            # The wider of both, which opening the store makes of it.
            return max(Column(stored), learned, key=lambda each: int(each.field.type.bit_width))
    column = columns_of([stored], **settings)[0]
    # Guessed columns of JSON were written from values, not from text.
    return replace(column, how="") if column.how == JSON_TEXT and learned is None else column


def _samples(cluster: Cluster, topic: str) -> Iterator[tuple[bytes | None, bytes | None]]:
    """Some of the first records of each partition."""
    total = 0
    for number in Metadata(cluster).partitions(topic):
        taken = 0
        # One after the other, or what follows in one would be read while another has few.
        for _, batch in read_batches(cluster, topic, partitions=[number]):
            part = batch.slice(0, SAMPLES - taken)
            taken += part.num_rows
            yield from zip(
                part.column("key").to_pylist(), part.column("value").to_pylist(), strict=True
            )
            if taken >= SAMPLES:
                break
        total += taken
        if total >= 2 * SAMPLES:
            return


def _told_last(cluster: Cluster, topic: str) -> list[Column]:
    """The columns that the last schema block of each partition tells; none if there are none."""
    metadata = Metadata(cluster)
    places = [(topic, number) for number in metadata.partitions(topic)]
    first, ends = (
        offsets(
            cluster, dict.fromkeys(places, which), isolation="read_committed", metadata=metadata
        )
        for which in (EARLIEST, LATEST)
    )
    start = {place[1]: max(first[place], ends[place] - LAST) for place in places}
    blocks: dict[int, Any] = {}
    for number, batch in read_batches(cluster, topic, start=start):
        for value in reversed(batch.column("value").to_pylist()):
            document = _json(value) if value is not None and b'"payload"' in value else None
            if isinstance(document, dict) and isinstance(document.get("schema"), dict):
                blocks[number] = document["schema"]
                break
    return list({k: v for block in blocks.values() for k, v in told_by(block).items()}.values())


def _json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


def _payload(document: dict[str, Any]) -> dict[str, Any]:
    inner = document.get("payload")
    return inner if isinstance(inner, dict) and "schema" in document else document


def _rows(
    documents: Sequence[dict[str, Any]],
) -> tuple[list[Mapping[str, Any]] | None, Mapping[str, Any] | None]:
    """The rows of change events, None if these are no such, and the newest schema block."""
    blocks = [each["schema"] for each in documents if isinstance(each.get("schema"), dict)]
    block = blocks[-1] if blocks and "payload" in documents[-1] else None
    inner = [_payload(each) for each in documents]
    changes = [each for each in inner if isinstance(each.get("op"), str) and "after" in each]
    if not changes:
        return None, block
    return [each["after"] for each in changes if isinstance(each["after"], dict)], block


def _key(
    samples: Sequence[tuple[bytes | None, bytes | None]], stored: Schema | None, spec: SinkSpec
) -> tuple[str, ...]:
    if stored is not None:
        return stored.key
    for key, _ in samples:
        told = _json(key) if key is not None else None
        if isinstance(told, dict):
            found = tuple(_payload(told))
            if found:
                return found
    if not samples:
        raise NothingToLearnFromError(
            f"sink {spec.name!r}: topic {spec.topic} has no records yet to tell the key by"
        )
    raise ConfigError(
        f"sinks.{spec.name}.key is missing, and the keys of {spec.topic} do not tell it",
        advice='Say which column is the key: key = "id".',
    )
