"""Schemas and their ids, kept in a compacted topic of the log.

There is no registry to ask, so the log is it: the topic `__penstock_schemas` has the layout of the
topic that Confluent's Schema Registry keeps its schemas in (which can therefore be pointed at it,
and serve them). A schema's id is taken from its own text, so that two captures which meet the same
schema at the same time agree without talking to each other; where two texts would have the same
id, the second one takes the next that is free. A schema is written in the same transaction as the
first event that needs it.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any, Final

import orjson

SCHEMAS_TOPIC: Final = "__penstock_schemas"
_HEAD: Final = struct.Struct(">bi").pack
_ID_BITS: Final = 0x7FFFFFFF


class SchemaRegistry:
    """What is known of schemas; whoever owns it writes `pending` to the topic before the events."""

    def __init__(self, stored: Mapping[bytes, bytes] | None = None) -> None:
        self._texts: dict[int, str] = {}
        self._subjects: dict[str, dict[int, int]] = {}
        self.pending: list[tuple[bytes, bytes]] = []
        for value in (stored or {}).values():
            item = orjson.loads(value)
            if "schema" in item:
                self._texts[item["id"]] = item["schema"]
                self._subjects.setdefault(item["subject"], {})[item["id"]] = item["version"]

    def text(self, id_: int) -> str | None:
        """The schema of an id, as JSON."""
        return self._texts.get(id_)

    def head(self, subject: str, schema: Any) -> bytes:
        """What stands before data of this schema; it is registered where it is new."""
        return _HEAD(0, self.id_of(subject, schema))

    def id_of(self, subject: str, schema: Any) -> int:
        text = orjson.dumps(schema).decode()
        id_ = self._free_or_same(text)
        versions = self._subjects.setdefault(subject, {})
        if id_ not in versions:
            self._texts[id_] = text
            versions[id_] = max(versions.values(), default=0) + 1
            self.pending.append(_record(subject, versions[id_], id_, text))
        return id_

    def take_pending(self) -> list[tuple[bytes, bytes]]:
        taken, self.pending = self.pending, []
        return taken

    def _free_or_same(self, text: str) -> int:
        digest = hashlib.sha256(text.encode()).digest()
        id_ = int.from_bytes(digest[:4], "big") & _ID_BITS or 1
        while self._texts.get(id_, text) != text:
            id_ = (id_ + 1) & _ID_BITS or 1
        return id_


def _record(subject: str, version: int, id_: int, text: str) -> tuple[bytes, bytes]:
    key = {"keytype": "SCHEMA", "subject": subject, "version": version, "magic": 1}
    value = {"subject": subject, "version": version, "id": id_, "schema": text, "deleted": False}
    return orjson.dumps(key), orjson.dumps(value)
