"""Logical messages: what an application put into the database's log without any table."""

from __future__ import annotations

import base64
from typing import Any

import orjson

from penstock import __version__
from penstock.capture.events.encoding import Moment, Order
from penstock.capture.events.json import order_json
from penstock.capture.events.schema import (
    TRANSACTION,
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

    def __init__(self, kind: str, prefix: str, moment: Moment, *, schemas: bool) -> None:
        self._kind = kind
        self._prefix = prefix
        self._moment = moment
        self._schemas = schemas

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
        if self._schemas:
            key = _wrapped(_key_schema(), key)
            value = _wrapped(_value_schema(self._kind, source), value)
        return key, value


def _wrapped(schema: dict[str, Any], payload: bytes) -> bytes:
    return b'{"schema":%b,"payload":%b}' % (orjson.dumps(schema), payload)


def _key_schema() -> dict[str, Any]:
    fields = [type_schema(_STRING, optional=True, field="prefix")]
    name = "io.debezium.connector.postgresql.MessageKey"
    return struct_schema(fields, name, optional=False, version=1)


def _value_schema(kind: str, source: Fragment) -> dict[str, Any]:
    message = [
        type_schema(_STRING, optional=True, field="prefix"),
        type_schema(ValueType("bytes"), optional=True, field="content"),
    ]
    base = "io.debezium.connector.postgresql.Message"
    fields = [
        type_schema(_STRING, optional=False, field="op"),
        type_schema(ValueType("int64"), optional=True, field="ts_ms"),
        block_schema(
            source_fields(kind, source), source_name(kind), optional=False, field="source"
        ),
        block_schema(TRANSACTION, "event.block", optional=True, field="transaction"),
        struct_schema(message, base, optional=False, version=1, field="message"),
    ]
    return struct_schema(fields, f"{base}Value", optional=False, version=1)
