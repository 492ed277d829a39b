"""Source transactions told of: where they begin and end, and each event's place in them."""

from __future__ import annotations

from typing import Any

import orjson

from penstock.capture.events.composer import Orders
from penstock.capture.events.encoding import Order
from penstock.capture.events.naming import TRANSACTION_SUFFIX
from penstock.capture.events.schema import Field, struct_schema, type_schema
from penstock.capture.source import Part
from penstock.client.table_schemas import ValueType

_BASE = "io.debezium.connector.common.TransactionMetadata"
_COUNT = ValueType(
    "struct",
    "event.collection",
    1,
    fields=(("data_collection", ValueType("string")), ("event_count", ValueType("int64"))),
)
_FIELDS = (
    Field("status", ValueType("string")),
    Field("id", ValueType("string")),
    Field("event_count", ValueType("int64"), True),
    Field("data_collections", ValueType("array", items=_COUNT), True),
    Field("ts_ms", ValueType("int64")),
)


def _schema(fields: tuple[Field, ...], name: str) -> dict[str, Any]:
    made = [type_schema(item.type, optional=item.optional, field=item.name) for item in fields]
    return struct_schema(made, name, optional=False, version=1)


_KEY_SCHEMA = _schema((Field("id", ValueType("string")),), f"{_BASE}Key")
_VALUE_SCHEMA = _schema(_FIELDS, f"{_BASE}Value")


class Metadata:
    """Counts the events of the transaction that is under way, and tells of its boundaries."""

    def __init__(self, prefix: str, *, schemas: bool) -> None:
        self.topic = prefix + TRANSACTION_SUFFIX
        self._schemas = schemas
        self._id = ""
        self._total = 0
        self._counts: dict[str, int] = {}

    def begin(self, part: Part) -> tuple[bytes, bytes]:
        self._id = part.transaction
        self._total = 0
        self._counts = {}
        return self._record("BEGIN", part, None, None)

    def end(self, part: Part) -> tuple[bytes, bytes]:
        collections = [
            {"data_collection": name, "event_count": count} for name, count in self._counts.items()
        ]
        return self._record("END", part, self._total, collections)

    def orders(self, table: str) -> Orders:
        """What numbers the events of one table."""

        def next_order() -> Order:
            self._total += 1
            count = self._counts[table] = self._counts.get(table, 0) + 1
            return Order(self._id, self._total, count)

        return next_order

    def _record(
        self, status: str, part: Part, count: int | None, collections: list[Any] | None
    ) -> tuple[bytes, bytes]:
        key: dict[str, Any] = {"id": self._id}
        value: dict[str, Any] = {
            "status": status,
            "id": self._id,
            "event_count": count,
            "data_collections": collections,
            "ts_ms": part.commit_ts_us // 1_000,
        }
        if self._schemas:
            key = {"schema": _KEY_SCHEMA, "payload": key}
            value = {"schema": _VALUE_SCHEMA, "payload": value}
        return orjson.dumps(key), orjson.dumps(value)
