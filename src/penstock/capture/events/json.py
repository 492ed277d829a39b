"""Debezium's envelope in JSON, put together from fragments; with or without its schema."""

from __future__ import annotations

import base64
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final

import orjson

from penstock.capture.events.encoding import Moment, Order
from penstock.capture.events.schema import envelope_schema, key_schema
from penstock.capture.events.settings import EventSettings
from penstock.capture.events.shape import Shape
from penstock.capture.source import (
    DELETE,
    NULL,
    TRUNCATE,
    UNAVAILABLE,
    Fragment,
    Row,
)
from penstock.client.table_schemas import SCHEMA_ID, TableColumn, ValueType, event_schema_id

# The field of a truncate's envelope that tells that the deletes of the rows stand before it.
EXPANDED: Final = b"expanded"

_VALUE: Final = b'"before":%b,"after":%b,"source":%b,"transaction":%b,"op":"%b",%b'
_OPS: Final = {op: op.encode() for op in "cudrtm"}
_MARKER: Final = orjson.loads(UNAVAILABLE)
_INTEGERS: Final = frozenset(("int8", "int16", "int32", "int64"))


def opening(schema_id: int | None) -> bytes:
    """How an event begins."""
    return b"{" if schema_id is None else b'{"%b":%d,' % (SCHEMA_ID.encode(), schema_id)


def template(columns: tuple[TableColumn, ...]) -> bytes:
    """An object with a place for each column's fragment."""
    names = (orjson.dumps(column.name).replace(b"%", b"%%") for column in columns)
    return b"{" + b",".join(name + b":%b" for name in names) + b"}"


def picker(places: tuple[int, ...]) -> Callable[[Row], Row]:
    """A function that takes the fragments at these places out of a row."""
    if len(places) == 1:
        place = places[0]
        return lambda row: (row[place],)
    if not places:
        return lambda row: ()
    return itemgetter(*places)


def order_json(order: Order) -> bytes:
    return b'{"id":%b,"total_order":%d,"data_collection_order":%d}' % (
        orjson.dumps(order.id),
        order.total,
        order.in_table,
    )


def marker(column: ValueType) -> Fragment:
    """The unavailable value, in the form in which Debezium gives it for a type."""
    if column.name == "bytes":
        return b'"%b"' % base64.b64encode(_MARKER.encode())
    if column.name == "array":
        items = column.items or ValueType("string")
        if items.name == "string":
            return b"[" + UNAVAILABLE + b"]"
        if items.name in _INTEGERS:
            return orjson.dumps(list(_MARKER.encode()))
    return UNAVAILABLE


class JsonEncoder:
    """The events of one table in JSON."""

    def __init__(
        self,
        shape: Shape,
        settings: EventSettings,
        kind: str,
        source: Fragment,
        moment: Moment,
        schema_id: int | None = None,
    ) -> None:
        self.moment = moment
        self.schema_id = schema_id
        self._pick_key = picker(shape.key)
        self._key = template(shape.key_columns)
        self._row = template(shape.columns)
        self._names = [column.name for column in shape.columns]
        self._hidden = {shape.columns[at].name for at, _ in shape.changes}
        self._markers = [marker(column.type) for column in shape.columns]
        self._head, self._tail = opening(schema_id), b""
        self.whole_key = NULL
        if settings.schemas:
            self._key = _with_schema(key_schema(shape, settings.prefix), self._key)
            schema = envelope_schema(shape, settings.prefix, kind, source)
            self._head, self._tail = b'{"schema":%b,"payload":{' % orjson.dumps(schema), b"}"
            self.whole_key = b'{"schema":null,"payload":null}'

    def key(self, row: Row) -> bytes:
        return self._key % self._pick_key(row)

    def row(self, shown: Row) -> bytes:
        return self._row % shown

    def value(
        self,
        op: str,
        before: bytes | None,
        after: bytes | None,
        source: Fragment,
        order: Order | None,
    ) -> bytes:
        made = _VALUE % (
            NULL if before is None else before,
            NULL if after is None else after,
            source,
            NULL if order is None else order_json(order),
            _OPS[op],
            self.moment.json,
        )
        return self._head + made + self._tail

    def unavailable(self, place: int) -> Fragment:
        return self._markers[place]

    def templates(self) -> tuple[bytes, bytes, bytes]:
        """What stands before a value, the row, and what stands behind, to be formatted."""
        return self._head.replace(b"%", b"%%"), self._row, self._tail

    def key_template(self) -> bytes:
        """The key, to be formatted."""
        return self._key

    def truncate(self, source: Fragment, order: Order | None, *, is_expanded: bool) -> bytes:
        value = self.value(TRUNCATE, None, None, source, order)
        if not is_expanded:
            return value
        end = len(value) - len(self._tail) - 1
        return value[:end] + b',"%b":true' % EXPANDED + value[end:]

    def gone(
        self, key: bytes, event: bytes, source: Fragment, orders: Callable[[], Order] | None
    ) -> bytes | None:
        # A row of another schema stays one: its values may not be what the columns hold now. With
        # the schema around each event there is no other, so only the key is told.
        id_ = event_schema_id(event)
        is_other = id_ is not None and id_ != self.schema_id
        told = _document(event) if event and not (is_other and self._tail) else None
        known = told.get("after") if isinstance(told, dict) else None
        if isinstance(known, dict):
            row = self._row_as_it_was(known) if is_other else self._row_of(known)
        else:
            known = _document(key)
            if not isinstance(known, dict):
                return None
            row = self._row_of(known)
        made = self.value(DELETE, row, None, source, None if orders is None else orders())
        if id_ == self.schema_id or self._tail:
            return made
        return opening(id_) + made[len(self._head) :]

    def _row_of(self, known: dict[str, Any]) -> bytes:
        """A row of these columns, null where nothing is known. So is what is masked, hashed or cut:
        it may have been written before that was asked for."""
        shown = known.keys() - self._hidden
        return self._row % tuple(
            orjson.dumps(known[name]) if name in shown else NULL for name in self._names
        )

    def _row_as_it_was(self, known: dict[str, Any]) -> bytes:
        """A row with the columns that it had; null what is not shown any more."""
        shown = set(self._names) - self._hidden
        return orjson.dumps({name: known[name] if name in shown else None for name in known})


def _document(data: bytes) -> Any:
    """What a key or a value says, without the schema that may be around it; None if nothing."""
    try:
        told = orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
    # `schemas` may have been set otherwise when it was written.
    is_wrapped = isinstance(told, dict) and "payload" in told and "schema" in told
    return told["payload"] if is_wrapped else told


def _with_schema(schema: dict[str, Any], payload: bytes) -> bytes:
    """A template with the schema around it."""
    return b'{"schema":%b,"payload":%b}' % (orjson.dumps(schema).replace(b"%", b"%%"), payload)
