"""What a table is: columns, their types, and the key, as a capture has published them, or as the
last records of its topic show them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import orjson

from penstock.cli.kafka import REQUEST_TIMEOUT_S, Connection, broker_error, translated
from penstock.client.table_schemas import PublishedSchemas, TableSchema
from penstock.errors import PenstockError
from penstock.spark.reading.captured import history_of, row_of
from penstock.spark.views.definitions import TableSpec

if TYPE_CHECKING:
    from confluent_kafka import Consumer

# Of each partition.
RECORDS: Final = 200
_READ_S: Final = 30.0
_ADVICE: Final = "Say it: --table 'NAME=TOPIC(id bigint, amount double) key id'."


class NotInferredError(PenstockError):
    """The records of a topic do not show what its table is."""


def inferred(connection: Connection, spec: TableSpec) -> TableSpec:
    """The table with what its records show in the place of what was not said."""
    table = None if spec.format == "changelog" else _published(connection, spec.topic)
    if table is not None:
        return _of_published(spec, table)
    records = _last(connection, spec.topic)
    values = [value for _, value in records if value is not None]
    if not values:
        raise NotInferredError(
            f"the columns of table {spec.name!r} are not known, and topic {spec.topic!r} has no "
            "records that would show them",
            advice=_ADVICE,
        )
    events = [event for event in map(_event, values) if event is not None]
    is_events = len(events) == len(values)
    rows = [row for event in events for row in (event.get("before"), event.get("after"))
            if isinstance(row, dict)] if is_events else values  # fmt: skip
    columns = _columns(rows)
    if not columns:
        raise NotInferredError(f"the records of topic {spec.topic!r} show no columns",
                               advice=_ADVICE)  # fmt: skip
    ddl = spec.ddl or ", ".join(f"{_quoted(name)} {kind}" for name, kind in columns.items())
    key = spec.key or _key((key for key, _ in records), columns)
    if not key:
        raise NotInferredError(
            f"the key of table {spec.name!r} is not known, and the keys of topic {spec.topic!r} "
            "do not show it",
            advice=_ADVICE,
        )
    return replace(
        spec, ddl=ddl, key=key, format=spec.format or ("debezium" if is_events else "changelog")
    )


def _published(connection: Connection, topic: str) -> TableSchema | None:
    """The table that is captured into a topic, if its schema is published."""
    from penstock.cli.protocol import cluster, reachable

    if not reachable(connection.settings):
        return None
    with cluster(connection.bootstrap, connection.settings) as brokers:
        if not history_of(brokers, topic):
            return None
        latest = PublishedSchemas(brokers).latest(topic)
        return None if latest is None else latest.schema


def _of_published(spec: TableSpec, table: TableSchema) -> TableSpec:
    key = spec.key or table.key
    if not key:
        raise NotInferredError(
            f"the key of table {spec.name!r} is not known: {table.table} has none", advice=_ADVICE
        )
    types = row_of(table)
    ddl = spec.ddl or ", ".join(
        f"{_quoted(field.name)} {field.dataType.simpleString()}" for field in types
    )
    return replace(spec, ddl=ddl, key=key, format="debezium")


def _quoted(name: str) -> str:
    return name if name.isidentifier() else f"`{name}`"


def _event(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """A change event, which may stand under `payload`."""
    inner = value.get("payload")
    event = inner if isinstance(inner, dict) and "op" in inner else value
    return event if "op" in event and ("after" in event or "before" in event) else None


def _columns(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    found: dict[str, str] = {}
    for row in rows:
        for name, value in row.items():
            kind = _kind(value)
            before = found.get(name, "")
            if not kind or before == kind:
                found.setdefault(name, kind)
            elif not before:
                found[name] = kind
            else:
                found[name] = "double" if {before, kind} == {"bigint", "double"} else "string"
    # What was always null may be anything; every value has a text.
    return {name: kind or "string" for name, kind in found.items()}


def _kind(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return "bigint"
    return "double" if isinstance(value, float) else "string"


def _key(keys: Iterable[bytes | None], columns: Mapping[str, str]) -> tuple[str, ...]:
    """The columns that a key of JSON names; of others `id`, if there is such a column."""
    for each in keys:
        value = _json(each)
        if isinstance(value, dict):
            inner = value.get("payload")
            names = tuple(inner if isinstance(inner, dict) else value)
            return names if all(name in columns for name in names) else ()
        if each is not None:
            return ("id",) if "id" in columns else ()
    return ()


def _json(data: bytes | None) -> Any:
    try:
        return orjson.loads(data) if data else None
    except orjson.JSONDecodeError:
        return None


def _last(connection: Connection, topic: str) -> list[tuple[bytes | None, dict[str, Any] | None]]:
    """The keys and values of the last records of each partition, as far as these are objects."""
    from confluent_kafka import TopicPartition

    consumer = connection.consumer({"isolation.level": "read_committed"})
    doing = f"reading {topic}"
    try:
        with translated(doing):
            known = consumer.list_topics(topic, timeout=REQUEST_TIMEOUT_S).topics[topic]
            if known.error is not None:
                raise broker_error(known.error, doing)
            places = []
            for number in known.partitions:
                place = TopicPartition(topic, number)
                low, high = consumer.get_watermark_offsets(place, timeout=REQUEST_TIMEOUT_S)
                if high > low:
                    places.append(TopicPartition(topic, number, max(low, high - RECORDS)))
            consumer.assign(places)
            return _read(consumer, {place.partition for place in places}, doing)
    finally:
        consumer.close()


def _read(
    consumer: Consumer, left: set[int], doing: str
) -> list[tuple[bytes | None, dict[str, Any] | None]]:
    from confluent_kafka import KafkaError

    found = []
    deadline = time.monotonic() + _READ_S
    while left and time.monotonic() < deadline:
        message = consumer.poll(0.5)
        if message is None:
            continue
        error = message.error()
        if error is not None:
            if error.code() != KafkaError._PARTITION_EOF:
                raise broker_error(error, doing)
            left.discard(message.partition() or 0)
            continue
        key: Any = message.key()
        value = _json(message.value())
        found.append((key, value if isinstance(value, dict) else None))
    return found
