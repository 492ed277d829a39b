"""Names: the topic of a table, and names of schemas that Avro accepts."""

from __future__ import annotations

import re
from typing import Final

from penstock.capture.events.settings import EventSettings, first_match
from penstock.capture.source import CaptureError, Table

TOPIC_LENGTH_MAX: Final = 249
TRANSACTION_SUFFIX: Final = ".transaction"
MESSAGE_SUFFIX: Final = ".message"

_NO_TOPIC: Final = re.compile(r"[^a-zA-Z0-9._-]")
_NO_SCHEMA: Final = re.compile(r"[^a-zA-Z0-9_.]")
_NO_START: Final = re.compile(r"(^|\.)(?=[0-9.]|$)")


def topic_of(settings: EventSettings, table: Table) -> str:
    """The topic of a table: as it is set for it, else `prefix.schema.table`, routed."""
    chosen = first_match(settings.topics, table.full_name)
    if chosen is not None:
        return checked_topic(chosen, f"table {table.full_name}")
    return routed(settings, f"{settings.prefix}.{table.full_name}", f"table {table.full_name}")


def routed(settings: EventSettings, name: str, what: str) -> str:
    """A topic's name after the routes; characters that no topic may have become `_`."""
    for route in settings.routes:
        if route.pattern.fullmatch(name):
            name = route.pattern.sub(route.replacement, name, count=1)
            break
    return checked_topic(_NO_TOPIC.sub("_", name), what)


def checked_topic(name: str, what: str) -> str:
    if not name or name in {".", ".."} or len(name) > TOPIC_LENGTH_MAX or _NO_TOPIC.search(name):
        raise CaptureError(
            f"{what}: {name!r} cannot be the name of a topic",
            advice="Letters, digits, '.', '_' and '-', at most 249; set topics or routes.",
        )
    return name


def schema_name(name: str) -> str:
    """A full name that Avro accepts: what it does not becomes `_`, as Debezium does it."""
    return _NO_START.sub(r"\1_", _NO_SCHEMA.sub("_", name))


def field_name(name: str) -> str:
    """A field's name that Avro accepts."""
    return schema_name(name).replace(".", "_")
