"""Logical messages: what an application put into the database's log without any table."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import orjson

from penstock import __version__
from penstock.capture.events.avro import plain_record
from penstock.capture.events.encoding import Moment, Order
from penstock.capture.events.json import order_json
from penstock.capture.events.naming import MESSAGE_SUFFIX
from penstock.capture.events.registry import SchemaRegistry
from penstock.capture.events.schema import (
    TRANSACTION,
    Field,
    block_schema,
    source_fields,
    source_name,
    struct_schema,
    type_schema,
)
from penstock.capture.source import NULL, Fragment, Part
from penstock.client.table_schemas import ValueType

# What Debezium counts messages under, in a transaction's counts by table.
COLLECTION = "LOGICAL_DECODING_MESSAGE"

_STRING = ValueType("string")
_BASE = "io.debezium.connector.postgresql.Message"
_KEY_NAME = f"{_BASE}Key"
_KEY_FIELDS = (Field("prefix", _STRING, True),)


def source_block(kind: str, prefix: str, part: Part) -> Fragment:
    """The source of a message: its transaction, and no table."""
    us = part.commit_ts_us
    return orjson.dumps(
        {
            "version": __version__,
            "connector": kind,
            "name": prefix,
            "ts_ms": us // 1_000,
            "snapshot": "false",
            "db": "",
            "sequence": None,
            "ts_us": us,
            "ts_ns": us * 1_000,
            "schema": "",
            "table": "",
            "txId": int(part.transaction) if part.transaction.isdecimal() else None,
            "lsn": None,
            "xmin": None,
        }
    )


class MessageEncoder:
    """Messages as Debezium's `m` events."""

    def __init__(
        self,
        kind: str,
        prefix: str,
        moment: Moment,
        *,
        schemas: bool,
        registry: SchemaRegistry | None = None,
    ) -> None:
        """In Avro if there is a registry, else in JSON, with schemas or without."""
        self._kind = kind
        self._prefix = prefix
        self._moment = moment
        self._schemas = schemas
        self._registry = registry

    def record(
        self, part: Part, message: tuple[str, bytes], order: Order | None
    ) -> tuple[bytes, bytes]:
        prefix, content = message
        source = source_block(self._kind, self._prefix, part)
        block = orjson.dumps({"prefix": prefix, "content": base64.b64encode(content).decode()})
        key = orjson.dumps({"prefix": prefix})
        ms = self._moment.ns // 1_000_000
        value = b'{"op":"m","ts_ms":%d,"source":%b,"transaction":%b,"message":%b}' % (
            ms,
            source,
            NULL if order is None else order_json(order),
            block,
        )
        if self._registry is not None:
            topic = self._prefix + MESSAGE_SUFFIX
            key_schema, write_key = plain_record(_KEY_NAME, _KEY_FIELDS)
            value_schema, write_value = _avro_value(self._kind, source)
            return (
                self._registry.head(f"{topic}-key", key_schema) + write_key({"prefix": prefix}),
                self._registry.head(f"{topic}-value", value_schema)
                + write_value(orjson.loads(value)),
            )
        if self._schemas:
            key = _wrapped(_key_schema(), key)
            value = _wrapped(_value_schema(self._kind, source), value)
        return key, value


def _wrapped(schema: dict[str, Any], payload: bytes) -> bytes:
    return b'{"schema":%b,"payload":%b}' % (orjson.dumps(schema), payload)


def _key_schema() -> dict[str, Any]:
    fields = [type_schema(item.type, optional=True, field=item.name) for item in _KEY_FIELDS]
    return struct_schema(fields, _KEY_NAME, optional=False, version=1)


def _avro_value(
    kind: str, source: Fragment
) -> tuple[dict[str, Any], Callable[[Mapping[str, Any]], bytes]]:
    """As `_value_schema`, in Avro: its schema, and what writes one."""

    def block(name: str, fields: Iterable[Field]) -> ValueType:
        listed = tuple((item.name, item.type) for item in fields)
        return ValueType("struct", name, 1, fields=listed)

    content = (Field("prefix", _STRING), Field("content", ValueType("bytes")))
    return plain_record(
        f"{_BASE}Value",
        (
            Field("op", _STRING),
            Field("ts_ms", ValueType("int64"), True),
            Field("source", block(source_name(kind), source_fields(kind, source))),
            Field("transaction", block("event.block", TRANSACTION), True),
            Field("message", block(_BASE, content)),
        ),
    )


def _value_schema(kind: str, source: Fragment) -> dict[str, Any]:
    message = [
        type_schema(_STRING, optional=True, field="prefix"),
        type_schema(ValueType("bytes"), optional=True, field="content"),
    ]
    fields = [
        type_schema(_STRING, optional=False, field="op"),
        type_schema(ValueType("int64"), optional=True, field="ts_ms"),
        block_schema(
            source_fields(kind, source), source_name(kind), optional=False, field="source"
        ),
        block_schema(TRANSACTION, "event.block", optional=True, field="transaction"),
        struct_schema(message, _BASE, optional=False, version=1, field="message"),
    ]
    return struct_schema(fields, f"{_BASE}Value", optional=False, version=1)
