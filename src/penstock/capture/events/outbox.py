"""The outbox: rows of one table are events for other services, written as what they carry.

An application inserts an event into its outbox table in the transaction that makes the event true;
here the row becomes a record on the topic of its aggregate, keyed by the aggregate's id, with the
event's id as the header `id`, so that readers can tell a repetition. Deletes are left out: an
application may empty its outbox at once. The layout is the one of Debezium's outbox event router.
"""

from __future__ import annotations

import base64
import logging
from collections.abc import Sequence

import orjson

from penstock.capture.events.batch import Batch
from penstock.capture.events.composer import Orders
from penstock.capture.events.naming import checked_topic, routed
from penstock.capture.events.settings import ERROR, HEADER, EventSettings, OutboxSettings
from penstock.capture.source import (
    NULL,
    READ,
    UPDATE,
    CaptureError,
    Change,
    Fragment,
    Row,
    Table,
)

_LOGGER = logging.getLogger(__name__)
_ROUTED = "${routedByValue}"


class OutboxComposer:
    """Makes records of the rows of one outbox Table object."""

    def __init__(self, settings: EventSettings, outbox: OutboxSettings, table: Table) -> None:
        self._settings = settings
        self._outbox = outbox
        self.table = table
        places = {column.name: place for place, column in enumerate(table.columns)}
        needed = [outbox.id, outbox.key, outbox.route_by, outbox.payload]
        for name in needed + [item.column for item in outbox.additional]:
            if name not in places:
                raise CaptureError(
                    f"outbox table {table.full_name} has no column {name!r}",
                    advice="Name its columns by outbox.id, key, route_by, payload and additional; "
                    f"there are {', '.join(places)}.",
                )
        self._id, self._key, self._route, self._payload = (places[name] for name in needed)
        self._is_binary = table.columns[self._payload].type.name == "bytes"
        self._headers = [
            (item.alias, places[item.column]) for item in outbox.additional if item.place == HEADER
        ]
        self._envelope = [
            (orjson.dumps(item.alias), places[item.column])
            for item in outbox.additional
            if item.place != HEADER
        ]
        self._topics: dict[bytes, str] = {}

    def add_all(self, changes: Sequence[Change], batch: Batch) -> int:
        return sum([self.add(change, batch) for change in changes])

    def add(self, change: Change, batch: Batch, orders: Orders | None = None) -> int:
        if change.op == UPDATE:
            text = f"a row of the outbox table {self.table.full_name} was updated"
            if self._outbox.on_update == ERROR:
                raise CaptureError(text, advice="Insert events only; outbox.on_update = 'warn'.")
            _LOGGER.warning("%s: left out", text)
            return 0
        if change.after is None:
            return 0
        return self.rows([change.after], change.source, batch, change.op)

    def rows(self, rows: Sequence[Row], source: Fragment, batch: Batch, op: str = READ) -> int:
        for row in rows:
            key = None if row[self._key] == NULL else _text(row[self._key])
            headers = [("id", _text(row[self._id]))]
            headers += [(name, _text(row[place])) for name, place in self._headers]
            run = batch.run(self._topic(row[self._route]), compacted=False)
            run.add(key, self._value(row), headers)
        return len(rows)

    def _topic(self, route: Fragment) -> str:
        found = self._topics.get(route)
        if found is None:
            if route == NULL:
                raise CaptureError(
                    f"a row of the outbox table {self.table.full_name} has no "
                    f"{self._outbox.route_by}, so no topic",
                    advice=f"Make the column {self._outbox.route_by} NOT NULL.",
                )
            name = self._outbox.topic.replace(_ROUTED, _text(route).decode())
            what = f"outbox table {self.table.full_name}"
            found = checked_topic(routed(self._settings, name, what), what)
            # As many as there are kinds of aggregates; a column misused must not fill memory.
            if len(self._topics) < 10_000:
                self._topics[route] = found
        return found

    def _value(self, row: Row) -> bytes | None:
        payload = row[self._payload]
        if self._outbox.tombstone_on_empty and (payload == NULL or not _text(payload).strip()):
            return None
        if self._is_binary and not self._envelope:
            return None if payload == NULL else base64.b64decode(orjson.loads(payload))
        if self._outbox.expand_json:
            payload = _expanded(payload)
        if not self._envelope:
            return None if payload == NULL else payload
        parts = [b'"payload":' + payload]
        parts += [name + b":" + row[place] for name, place in self._envelope]
        return b"{" + b",".join(parts) + b"}"


def _text(fragment: Fragment) -> bytes:
    """A value as plain text: a string without its quotes, anything else as it stands."""
    if fragment[:1] != b'"':
        return b"" if fragment == NULL else fragment
    text: str = orjson.loads(fragment)
    return text.encode()


def _expanded(payload: Fragment) -> Fragment:
    """The JSON that a text holds, or the text, if it holds none."""
    inner = _text(payload).strip()
    if inner[:1] not in {b"{", b"["}:
        return payload
    try:
        orjson.loads(inner)
    except orjson.JSONDecodeError:
        _LOGGER.warning("the payload of an outbox row looks like JSON but is none: kept as text")
        return payload
    return inner
