"""The slot and the publication of a capture: made, kept up to date, found damaged, removed.

The publication comes first and the slot after it, because decoding a change asks for the
publication as it was at that change. A table that no UPDATE could be published of (no primary key,
no replica identity) is refused: to publish it would make the user's own UPDATEs fail.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

import psycopg
from psycopg import sql

from penstock.capture.postgres.catalog import TableInfo
from penstock.capture.postgres.connect import Connection, cancelled_after, explained
from penstock.capture.postgres.options import PostgresOptions
from penstock.capture.postgres.pgoutput import format_lsn, parse_lsn
from penstock.capture.source import CaptureError, PositionLostError

COMMENT: Final = "made by Penstock for the capture "
PLUGIN: Final = "pgoutput"


class WriterHoldsUpError(CaptureError):
    """A transaction that has been writing for long keeps a slot from being made."""

    retriable = True


@dataclass(frozen=True, slots=True)
class SlotState:
    """A row of pg_replication_slots."""

    confirmed_lsn: int | None
    restart_lsn: int | None
    wal_status: str | None
    safe_wal_bytes: int | None
    active_pid: int | None
    database: str | None
    plugin: str | None


def slot_state(connection: Connection, slot: str) -> SlotState | None:
    row = connection.execute(
        """SELECT confirmed_flush_lsn::text, restart_lsn::text, wal_status, safe_wal_size,
                  active_pid, database, plugin
           FROM pg_catalog.pg_replication_slots WHERE slot_name = %s""",
        (slot,),
    ).fetchone()
    if row is None:
        return None
    confirmed, restart, status, safe, pid, database, plugin = row
    return SlotState(
        parse_lsn(confirmed) if confirmed else None,
        parse_lsn(restart) if restart else None,
        status,
        safe,
        pid,
        database,
        plugin,
    )


def published(connection: Connection, publication: str) -> dict[str, set[str] | None] | None:
    """The tables of a publication by full name, with their columns where the server tells them
    (15 and newer); None if there is no such publication."""
    if (
        connection.execute(
            "SELECT 1 FROM pg_catalog.pg_publication WHERE pubname = %s", (publication,)
        ).fetchone()
        is None
    ):
        return None
    columns = "attnames::text[]" if connection.info.server_version >= 150000 else "NULL::text[]"
    rows = connection.execute(
        f"""SELECT schemaname || '.' || tablename, {columns}
            FROM pg_catalog.pg_publication_tables WHERE pubname = %s""".encode(),
        (publication,),
    ).fetchall()
    return {name: None if names is None else set(names) for name, names in rows}


def is_own(connection: Connection, publication: str) -> bool:
    """Whether we made it, and may change and drop it."""
    row = connection.execute(
        """SELECT pg_catalog.obj_description(oid, 'pg_publication')
           FROM pg_catalog.pg_publication WHERE pubname = %s""",
        (publication,),
    ).fetchone()
    return row is not None and (row[0] or "").startswith(COMMENT)


def create_publication(
    connection: Connection, options: PostgresOptions, name: str, tables: Sequence[TableInfo]
) -> None:
    """For the tables that can be published, or for all there will ever be."""
    settings = "publish_via_partition_root = true"
    if connection.info.server_version >= 180000:
        settings += ", publish_generated_columns = stored"
    if options.all_tables:
        target: sql.Composable = sql.SQL("FOR ALL TABLES")
    elif tables:
        target = sql.SQL("FOR TABLE {}").format(sql.SQL(", ").join(map(qualified, tables)))
    else:
        target = sql.SQL("")
    identifier = sql.Identifier(options.publication)
    with explained(f"cannot create the publication {options.publication}"):
        with connection.transaction():
            connection.execute(
                sql.SQL("CREATE PUBLICATION {} {} WITH (" + settings + ")").format(
                    identifier, target
                )
            )
            connection.execute(
                sql.SQL("COMMENT ON PUBLICATION {} IS {}").format(
                    identifier, sql.Literal(COMMENT + name)
                )
            )


def add_tables(connection: Connection, publication: str, tables: Collection[TableInfo]) -> None:
    with explained(f"cannot add tables to the publication {publication}"), connection.transaction():
        # The stream waits for this; a table that is being altered can join a little later.
        connection.execute("SET LOCAL lock_timeout = '2s'")
        connection.execute(
            sql.SQL("ALTER PUBLICATION {} ADD TABLE {}").format(
                sql.Identifier(publication), sql.SQL(", ").join(map(qualified, tables))
            )
        )


def create_slot(connection: Connection, slot: str, timeout_ms: int) -> None:
    with explained(f"cannot create the replication slot {slot}"):
        try:
            with cancelled_after(connection, timeout_ms / 1000):
                connection.execute(
                    "SELECT pg_catalog.pg_create_logical_replication_slot(%s, %s)", (slot, PLUGIN)
                )
        except psycopg.errors.QueryCanceled as error:
            raise held_up(connection, timeout_ms) from error


def held_up(connection: Connection, timeout_ms: int) -> CaptureError:
    """A slot could not be made because transactions that write did not end."""
    rows = connection.execute(
        """SELECT pid, usename, date_trunc('second', clock_timestamp() - xact_start)::text
           FROM pg_catalog.pg_stat_activity WHERE backend_xid IS NOT NULL
           ORDER BY xact_start LIMIT 3"""
    ).fetchall()
    shown = ", ".join(f"process {pid} of {user} for {age}" for pid, user, age in rows)
    return WriterHoldsUpError(
        f"a replication slot waits for the transactions that write to end, {timeout_ms / 1000:g} s "
        f"by now; still open: {shown or 'none any more'}",
        advice="End them: SELECT pg_terminate_backend(PROCESS); or wait longer: slot.timeout.ms.",
    )


def check_position(
    connection: Connection, slot: str, lsn: int, system: str | None, system_now: str
) -> None:
    """PositionLostError unless the slot still has everything after the position."""
    if system is not None and system != system_now:
        raise PositionLostError(
            f"the position is one of another database cluster ({system}, this is {system_now})"
        )
    state = slot_state(connection, slot)
    if state is None:
        raise PositionLostError(f"the replication slot {slot} is gone")
    if state.plugin != PLUGIN:
        raise CaptureError(
            f"the slot {slot} is one of {state.plugin or 'physical replication'}, not of {PLUGIN}",
            advice="Choose another with the option slot.",
        )
    if state.database != connection.info.dbname:
        raise CaptureError(
            f"the slot {slot} belongs to the database {state.database}",
            advice="Choose another with the option slot.",
        )
    if state.wal_status == "lost" or state.restart_lsn is None:
        raise PositionLostError(
            f"the server has thrown away what the slot {slot} needed "
            "(max_slot_wal_keep_size was passed)"
        )
    if state.confirmed_lsn is not None and state.confirmed_lsn > lsn:
        raise PositionLostError(
            f"the slot {slot} has moved on to {format_lsn(state.confirmed_lsn)}, "
            f"past the position {format_lsn(lsn)}"
        )
    row = connection.execute("SELECT pg_catalog.pg_current_wal_flush_lsn()::text").fetchone()
    if row is not None and parse_lsn(row[0]) < lsn:
        raise PositionLostError(
            f"the position {format_lsn(lsn)} lies in the future of this server, which is at "
            f"{row[0]}: it was restored from an older state"
        )


def drop_slot(connection: Connection, slot: str) -> bool:
    """Whether there was one; whoever reads it is disconnected."""
    with explained(f"cannot drop the replication slot {slot}"):
        while (state := slot_state(connection, slot)) is not None:
            if state.active_pid is not None:
                connection.execute(
                    "SELECT pg_catalog.pg_terminate_backend(%s, 5000)", (state.active_pid,)
                )
            try:
                connection.execute("SELECT pg_catalog.pg_drop_replication_slot(%s)", (slot,))
            except psycopg.errors.ObjectInUse:
                continue
            except psycopg.errors.UndefinedObject:
                return False
            return True
    return False


def drop_publication(connection: Connection, publication: str) -> bool:
    """Whether there was one of ours."""
    if not is_own(connection, publication):
        return False
    with explained(f"cannot drop the publication {publication}"):
        connection.execute(
            sql.SQL("DROP PUBLICATION IF EXISTS {}").format(sql.Identifier(publication))
        )
    return True


def qualified(table: TableInfo) -> sql.Composable:
    return sql.Identifier(table.schema, table.name)
