"""All chosen tables as they were at one position.

A temporary slot is made only for its exported snapshot: what it shows is exactly what was committed
before the slot's consistent point, and the capture's own slot streams exactly what was committed
from there on. So a snapshot can be taken at any time, for the first time or again.

Tables are read by COPY in transactions that take over the exported snapshot, in parallel, a large
table in ranges of its pages. Each of them holds an ACCESS SHARE lock on all tables from the start,
which stops no write; only ALTER, DROP and TRUNCATE wait for the end of it. Later than that none may
ask for a lock: it would wait behind a TRUNCATE that waits for another of them, for ever. A table
that was rewritten in the instant before the locks would look empty under the older snapshot: that
is found, and the snapshot refused, to be taken again.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from time import time_ns
from typing import Any, Final
from uuid import uuid4

import psycopg
from psycopg import sql

from penstock.capture.blocks import in_blocks
from penstock.capture.postgres.assembly import SourceBlocks
from penstock.capture.postgres.catalog import Catalog, TableInfo
from penstock.capture.postgres.connect import (
    Connection,
    PostgresUrl,
    TableLockedError,
    as_bytes,
    cancelled_after,
    explained,
)
from penstock.capture.postgres.decoders import Relation
from penstock.capture.postgres.pgoutput import parse_lsn
from penstock.capture.postgres.setup import held_up, qualified
from penstock.capture.source import (
    CaptureError,
    Position,
    Row,
    Snapshot,
    Table,
)

BATCH_ROWS: Final = 4000
BATCH_BYTES: Final = 8 << 20
# Larger tables are read in ranges of pages, so that a lost connection does not lose much.
RANGE_PAGES: Final = 32_768


class ChangedMeanwhileError(CaptureError):
    """A table was rewritten in the instant in which the snapshot began."""

    retriable = True
    advice = "Take the snapshot again."


class PostgresSnapshot(Snapshot):
    """Made by the source; `close` ends it."""

    def __init__(
        self,
        url: PostgresUrl,
        application: str,
        blocks: SourceBlocks,
        make_position: Any,
        workers: int,
        timeout_ms: int,
    ) -> None:
        self._url = url
        self._application = application
        self._blocks = blocks
        self._ts_us = time_ns() // 1000
        self._exporter: Connection = url.connect(application=application, replication=True)
        self._workers = max(1, workers)
        # Connections that are not reading now, and how many there are.
        self._readers: SimpleQueue[Connection | None] = SimpleQueue()
        self._open: set[Connection] = set()
        self._lock = threading.Lock()
        self._estimates: dict[int, int | None] = {}
        self._relations: dict[Table, tuple[Relation, TableInfo]] = {}
        self._closed = False
        try:
            self._name, self._lsn = self._export(timeout_ms)
            self.position: Position = make_position(self._lsn)
        except BaseException:
            self._exporter.close()
            raise

    def _export(self, timeout_ms: int) -> tuple[str, int]:
        slot = f"penstock_snapshot_{uuid4().hex[:16]}"
        with explained("cannot take a snapshot"):
            try:
                with cancelled_after(self._exporter, timeout_ms / 1000):
                    row = self._exporter.execute(
                        sql.SQL(
                            "CREATE_REPLICATION_SLOT {} TEMPORARY LOGICAL pgoutput EXPORT_SNAPSHOT"
                        ).format(sql.Identifier(slot))
                    ).fetchone()
            except psycopg.errors.QueryCanceled as error:
                with self._url.connect(application=self._application) as connection:
                    raise held_up(connection, timeout_ms) from error
        assert row is not None
        _, consistent_point, name, _ = row
        return name, parse_lsn(consistent_point)

    def load(
        self,
        catalog_of: Any,
        wanted: Any,
        columns: Mapping[str, Collection[str] | None],
    ) -> None:
        """Lock the tables, and learn what they look like at the position."""
        first = self._join()
        self._add(first)
        with explained("cannot take a snapshot"):
            catalog: Catalog = catalog_of(first)
            infos = [info for info in catalog.tables() if wanted(info)]
            if infos:
                first.execute(_lock_tables(infos))
                self._check_rewritten(first, infos)
            for info in infos:
                relation = catalog.relation(info, columns.get(info.full_name))
                self._relations[relation.table] = (relation, info)
                self._estimates[info.oid] = _estimate(first, info)
        self.tables: Sequence[Table] = list(self._relations)
        self._add_readers(infos)

    def _add(self, connection: Connection) -> None:
        self._open.add(connection)
        self._readers.put(connection)

    def _add_readers(self, infos: Sequence[TableInfo]) -> None:
        """More of them, as long as the locks can be had without waiting."""
        for _ in range(min(self._workers, len(infos)) - 1):
            connection = self._join()
            try:
                with explained("cannot take a snapshot"):
                    connection.execute(_lock_tables(infos) + sql.SQL(" NOWAIT"))
            except TableLockedError:
                connection.close()
                return
            self._add(connection)

    def _check_rewritten(self, connection: Connection, infos: Sequence[TableInfo]) -> None:
        """The snapshot's file of each table is its present one."""
        oids = [info.oid for info in infos]
        rows = connection.execute(
            """SELECT c.oid::regclass::text
               FROM pg_catalog.pg_class c
               WHERE (c.oid = ANY(%s::oid[])
                      OR c.oid IN (SELECT t.relid FROM unnest(%s::oid[]) r(oid),
                                   pg_catalog.pg_partition_tree(r.oid) t))
                 AND c.relkind = 'r' AND c.relfilenode <> 0
                 AND pg_catalog.pg_relation_filenode(c.oid) IS DISTINCT FROM c.relfilenode""",
            (oids, oids),
        ).fetchall()
        if rows:
            raise ChangedMeanwhileError(f"{rows[0][0]} was rewritten while the snapshot began")

    def _join(self) -> Connection:
        """A connection whose transaction sees what the snapshot sees."""
        if self._closed:
            raise CaptureError("the snapshot is closed")
        connection = self._url.connect(application=self._application)
        try:
            with explained("cannot read under the snapshot"):
                connection.execute("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY")
                connection.execute(
                    sql.SQL("SET TRANSACTION SNAPSHOT {}").format(sql.Literal(self._name))
                )
        except BaseException:
            connection.close()
            raise
        return connection

    def rows(self, table: Table, *, where: str = "") -> Iterator[Sequence[Row]]:
        relation, info = self._relations[table]
        connection = self._readers.get()
        if connection is None:
            # For the next who asks.
            self._readers.put(None)
            raise CaptureError("the snapshot is closed, or was broken off")
        try:
            for condition in _ranges(connection, info):
                clauses = [f"({clause})" for clause in (condition, where) if clause]
                query = select(relation.table, info, " AND ".join(clauses))
                for lines in copy_lines(connection, query, table.full_name):
                    yield from decode_blocks(relation, lines)
        except BaseException:
            # In the middle of a COPY it is of no use any more.
            self._drop(connection)
            raise
        self._readers.put(connection)

    def _drop(self, connection: Connection) -> None:
        with self._lock:
            self._open.discard(connection)
            is_last = not self._open
        with suppress(psycopg.Error):
            connection.close()
        if is_last:
            self._readers.put(None)

    def source(self, table: Table) -> bytes:
        return self._blocks.whole(table, self._lsn, ts_us=self._ts_us, snapshot="true")

    def estimate(self, table: Table) -> int | None:
        _, info = self._relations[table]
        return self._estimates.get(info.oid)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self._readers.put(None)
        with self._lock:
            connections = [*self._open, self._exporter]
            self._open.clear()
        for connection in connections:
            with suppress(psycopg.Error):
                connection.close()


def _lock_tables(infos: Sequence[TableInfo]) -> sql.Composed:
    return sql.SQL("LOCK TABLE {} IN ACCESS SHARE MODE").format(
        sql.SQL(", ").join(map(qualified, infos))
    )


def _estimate(connection: Connection, info: TableInfo) -> int | None:
    """Rows per page when it was last counted, times the pages of now."""
    if info.rows_estimate < 0 or info.pages == 0:
        return None
    row = connection.execute(
        """SELECT coalesce((SELECT sum(pg_catalog.pg_relation_size(t.relid))
                            FROM pg_catalog.pg_partition_tree(%s::oid::regclass) t),
                           pg_catalog.pg_relation_size(%s::oid::regclass))
                  / current_setting('block_size')::bigint""",
        (info.oid, info.oid),
    ).fetchone()
    pages = row[0] if row is not None and row[0] is not None else info.pages
    return round(info.rows_estimate / info.pages * float(pages))


def select(table: Table, info: TableInfo, where: str = "", tail: str = "") -> sql.Composed:
    """The query for COPY; `where` and `tail` are SQL."""
    columns = sql.SQL(", ").join(sql.Identifier(column.name) for column in table.columns)
    # Rows of tables that inherit from it are theirs; those of partitions are its own.
    return sql.SQL("COPY (SELECT {} FROM {} {} {}{}) TO STDOUT").format(
        columns,
        sql.SQL("" if info.is_partitioned else "ONLY"),
        qualified(info),
        sql.SQL(f"WHERE {where} " if where else ""),
        sql.SQL(tail),
    )


def _ranges(connection: Connection, info: TableInfo) -> list[str]:
    """Conditions that together are the whole table, in the order of its pages."""
    if info.is_partitioned:
        return [""]
    with explained(f"cannot read {info.full_name}"):
        row = connection.execute(
            "SELECT pg_catalog.pg_relation_size(%s::oid::regclass)"
            " / current_setting('block_size')::bigint",
            (info.oid,),
        ).fetchone()
    pages = int(row[0]) if row is not None and row[0] is not None else 0
    if pages <= RANGE_PAGES:
        return [""]
    starts = range(0, pages, RANGE_PAGES)
    return [
        f"ctid >= '({start},0)'::tid"
        + (f" AND ctid < '({start + RANGE_PAGES},0)'::tid" if start != starts[-1] else "")
        for start in starts
    ]


def copy_lines(connection: Connection, query: sql.Composed, what: str) -> Iterator[list[bytes]]:
    """The lines of a COPY, a batch at a time."""
    lines: list[bytes] = []
    size = 0
    with explained(f"cannot read {what}"):
        raw = as_bytes(connection)
        if raw:
            connection.execute("SET client_encoding TO 'SQL_ASCII'")
        with connection.cursor() as cursor, cursor.copy(query) as copy:
            read = copy.read
            while data := read():
                line = bytes(data)
                lines.append(line[:-1])
                size += len(line)
                if len(lines) >= BATCH_ROWS or size > BATCH_BYTES:
                    yield lines
                    lines = []
                    size = 0
        if raw:
            connection.execute("SET client_encoding TO 'UTF8'")
    if lines:
        yield lines


def decode_blocks(relation: Relation, lines: Sequence[bytes]) -> Iterator[Sequence[Row]]:
    """Rows in blocks, where they are ordinary; the others in lists, in their place."""
    blocks = relation.blocks
    if blocks is None:
        return iter((decode_lines(relation, lines),))
    return in_blocks(lines, blocks.lines, lambda some: decode_lines(relation, some))


def decode_lines(relation: Relation, lines: Sequence[bytes]) -> list[Row]:
    return list(map(relation.line, lines))
