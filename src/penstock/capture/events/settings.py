"""What a user may choose about events; frozen, and checked by whoever makes it from text.

Tables are named as `Table.full_name` names them, columns as that name, a dot and the column; `*`
and `?` are wildcards. Where several patterns fit, the first one counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Final, TypeVar

T = TypeVar("T")

JSON, AVRO = "json", "avro"
MARK, FILL = "mark", "fill"
ERROR, WARN = "error", "warn"
HEADER, ENVELOPE = "header", "envelope"
DELETES, SKIP = "deletes", "skip"
OPERATIONS: Final = ("c", "u", "d", "t", "r", "m")
ALGORITHMS: Final = {"sha256": "SHA-256", "sha512": "SHA-512", "sha1": "SHA-1", "md5": "MD5"}


@dataclass(frozen=True, slots=True)
class Hash:
    """A column's text is replaced by a digest of salt and text, in hexadecimal (Debezium's v2)."""

    algorithm: str = "sha256"
    salt: str = ""


@dataclass(frozen=True, slots=True)
class Route:
    """Topics whose whole name fits the pattern are renamed; `\\1` stands for its first group."""

    pattern: re.Pattern[str]
    replacement: str


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a further column of the outbox goes: a header, or the envelope around the payload."""

    column: str
    place: str
    alias: str


@dataclass(frozen=True, slots=True)
class OutboxSettings:
    """A table whose rows are events for other services (Debezium's outbox layout)."""

    table: str
    id: str = "id"
    key: str = "aggregateid"
    route_by: str = "aggregatetype"
    payload: str = "payload"
    # `${routedByValue}` stands for what the column `route_by` holds.
    topic: str = "outbox.event.${routedByValue}"
    additional: tuple[Placement, ...] = ()
    # Text that holds a JSON object or array is written as such, not as a JSON string.
    expand_json: bool = False
    # An empty payload becomes a tombstone.
    tombstone_on_empty: bool = False
    # Rows of an outbox are never updated; if one is: stop, or leave it out and say so.
    on_update: str = WARN


@dataclass(frozen=True, slots=True)
class EventSettings:
    """How changes become records."""

    # Topics are `prefix.schema.table`; it is the `name` of source blocks too.
    prefix: str
    format: str = JSON
    # JSON with the schema in every record, as Kafka Connect's converter writes it.
    schemas: bool = False
    # Tables' schemas go into the log, and each JSON event (without `schemas`) names its own by id.
    publish_schemas: bool = True
    tombstones: bool = True
    # Operations that leave no event; Debezium too leaves TRUNCATE out unless asked.
    skip: frozenset[str] = frozenset("t")
    # What a TRUNCATE becomes beside its event: a delete of each row that the topic holds, or none.
    truncates: str = DELETES
    # A large value that an UPDATE did not touch: marked, or filled in from the topic.
    unavailable: str = MARK
    keys: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    column_include: tuple[str, ...] = ()
    column_exclude: tuple[str, ...] = ()
    # A text, or a number of asterisks.
    mask: Mapping[str, str | int] = field(default_factory=dict)
    hash: Mapping[str, Hash] = field(default_factory=dict)
    truncate: Mapping[str, int] = field(default_factory=dict)
    filters: Mapping[str, str] = field(default_factory=dict)
    routes: tuple[Route, ...] = ()
    topics: Mapping[str, str] = field(default_factory=dict)
    transaction_metadata: bool = False
    outbox: OutboxSettings | None = None


def first_match(patterns: Mapping[str, T], name: str) -> T | None:
    """What the first pattern that fits a name leads to; None if none does."""
    for pattern, value in patterns.items():
        if fnmatchcase(name, pattern):
            return value
    return None


def matches_any(patterns: tuple[str, ...], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
