"""Schemas and their ids, as a capture gives them out.

There is no registry to ask, so the log is it: the topic `__penstock_schemas` has the layout of the
topic that Confluent's Schema Registry keeps its schemas in (which can therefore be pointed at it,
and serve them). A schema's id is taken from its own text, so that two captures which meet the same
schema at the same time agree without talking to each other; where two texts would have the same
id, the second one takes the next that is free.

The last version of a JSON subject is the schema that events are written with now: a table that gets
back columns which it had before has a new version with the id of then. Avro subjects have each id
once.

What is new is in `pending` until `learn` has seen it in the log. Two captures may give the same
version of a subject to different schemas at the same time; whichever of the two records lies
first, and would fall to compaction, is registered anew under another version.

Texts are not kept, only their digests: a database may have thousands of tables.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from typing import Any, Final

import orjson

from penstock.client.table_schemas import AVRO_SCHEMA, JSON_SCHEMA, SchemaError, SchemaRecord

_HEAD: Final = struct.Struct(">bi").pack
_ID_BITS: Final = 0x7FFFFFFF


class SchemaRegistry:
    """What is known of schemas; whoever owns it writes `pending` to the log before the events."""

    def __init__(self, stored: Iterable[SchemaRecord] = ()) -> None:
        self._digests: dict[int, bytes] = {}
        self._subjects: dict[str, dict[int, int]] = {}
        self.pending: dict[tuple[str, int], SchemaRecord] = {}
        for record in stored:
            self._know(record)

    def head(self, subject: str, schema: Any) -> bytes:
        """What stands before data of this Avro schema; it is registered where it is new."""
        return _HEAD(0, self.id_of(subject, schema))

    def id_of(self, subject: str, schema: Any, kind: str = AVRO_SCHEMA) -> int:
        """The id of a schema, which is registered where it is new."""
        text = orjson.dumps(schema).decode()
        id_ = self._free_or_same(text)
        if kind == JSON_SCHEMA:
            last = self.latest(subject)
            is_known = last is not None and last[1] == id_
        else:
            is_known = id_ in self._subjects.get(subject, {}).values()
        if not is_known:
            self._add(subject, id_, text, kind)
        return id_

    def latest(self, subject: str) -> tuple[int, int] | None:
        """The last version of a subject, and its id."""
        versions = self._subjects.get(subject)
        if not versions:
            return None
        version = max(versions)
        return version, versions[version]

    def learn(self, records: Iterable[SchemaRecord]) -> None:
        """Take in what has come into the log: what is pending is not any more when it is there."""
        overwritten: list[SchemaRecord] = []
        seen: dict[tuple[str, int], SchemaRecord] = {}
        for record in records:
            at = record.subject, record.version
            others = self.pending.pop(at, None), seen.get(at)
            overwritten += [other for other in others if other and other.id != record.id]
            seen[at] = record
            self._know(record)
        for record in overwritten:
            if record.id not in self._subjects[record.subject].values():
                self._add(record.subject, record.id, record.text, record.kind)

    def adopt(self, record: SchemaRecord) -> None:
        """Register a version as another cluster has it, with its id, unless it is there."""
        if self._digests.get(record.id, _digest(record.text)) != _digest(record.text):
            raise SchemaError(
                f"schema {record.id} of {record.subject} is another one here",
                advice="Move the topics to a cluster of their own.",
            )
        versions = self._subjects.get(record.subject, {})
        if versions.get(record.version) == record.id:
            return
        if record.version not in versions:
            self._know(record)
            self.pending[record.subject, record.version] = record
        elif record.id not in versions.values():
            self._add(record.subject, record.id, record.text, record.kind)

    def take_pending(self) -> list[SchemaRecord]:
        """What is to be written; it counts as written from now on."""
        taken, self.pending = list(self.pending.values()), {}
        return taken

    def _know(self, record: SchemaRecord) -> None:
        self._digests.setdefault(record.id, _digest(record.text))
        self._subjects.setdefault(record.subject, {})[record.version] = record.id

    def _add(self, subject: str, id_: int, text: str, kind: str) -> None:
        version = max(self._subjects.get(subject, {}), default=0) + 1
        record = SchemaRecord(subject, version, id_, text, kind)
        self._know(record)
        self.pending[subject, version] = record

    def _free_or_same(self, text: str) -> int:
        digest = _digest(text)
        id_ = int.from_bytes(digest[:4], "big") & _ID_BITS or 1
        while self._digests.get(id_, digest) != digest:
            id_ = (id_ + 1) & _ID_BITS or 1
        return id_


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()
