"""Which captured tables have updates without the old row, as their database says."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from penstock.cli import project
from penstock.cli.capture_project import configured

log = logging.getLogger(__name__)

_CONNECT_S = 5
_IDENTITY = """SELECT c.relreplident FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE n.nspname = %s AND c.relname = %s"""


def without_old_rows(topics: Sequence[str]) -> dict[str, list[str]]:
    """By topic: the tables whose replica identity is not full. Only what the captures of the
    project tell within a few seconds; it is a hint, and no reason to fail."""
    found: dict[str, list[str]] = {}
    try:
        loaded = project.load()
        for name in loaded.named("capture"):
            _look(loaded, name, set(topics), found)
    except Exception as error:  # whatever a database or a driver says
        log.debug("replica identities cannot be looked at: %s", error)
    return found


def _look(
    loaded: project.Project, name: str, topics: set[str], found: dict[str, list[str]]
) -> None:
    config = configured(loaded, name)
    if not config.source.url.startswith(("postgresql://", "postgres://")):
        return
    import psycopg

    from penstock.capture.events.changes import Events
    from penstock.capture.sources import open_source

    # First, for it has a limit.
    with psycopg.connect(config.source.url, connect_timeout=_CONNECT_S) as connection:
        source = open_source(config.source)
        try:
            events = Events(config.events, source.kind)
            for table in source.tables():
                topic = str(getattr(events.composer(table, b"{}"), "topic", ""))
                if topic not in topics:
                    continue
                schema, _, bare = table.full_name.partition(".")
                row = connection.execute(_IDENTITY, (schema, bare)).fetchone()
                if row is not None and row[0] not in {"f", b"f"}:
                    found.setdefault(topic, []).append(table.full_name)
        finally:
            source.close()
