"""What must hold before a PostgreSQL database can be captured, each with the fixing command."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from psycopg import sql

from penstock.capture.postgres.catalog import TableInfo
from penstock.capture.postgres.connect import Connection
from penstock.capture.postgres.options import PostgresOptions
from penstock.capture.postgres.setup import is_own, published, qualified, slot_state
from penstock.capture.source import Check

MIN_VERSION: Final = 140000
# The capture's own slot, and one for the time of a snapshot.
_SLOTS_NEEDED: Final = 2
_SENDERS_NEEDED: Final = 2


def server_checks(connection: Connection, options: PostgresOptions) -> list[Check]:
    """The server and the role."""
    version = connection.info.server_version
    shown = f"{version // 10000}.{version % 10000}"
    user = connection.info.user
    checks = [
        Check(
            "server version",
            version >= MIN_VERSION,
            shown,
            "" if version >= MIN_VERSION else "Upgrade to PostgreSQL 14 or newer.",
        )
    ]
    level = _setting(connection, "wal_level")
    checks.append(
        Check(
            "wal_level",
            level == "logical",
            level,
            ""
            if level == "logical"
            else "ALTER SYSTEM SET wal_level = 'logical'; then restart the server",
        )
    )
    standby = _one(connection, "SELECT pg_catalog.pg_is_in_recovery()")
    checks.append(
        Check(
            "primary",
            not standby,
            "a standby" if standby else "a primary",
            "Use the URL of the primary." if standby else "",
        )
    )
    checks += _room(connection, options)
    may = bool(
        _one(
            connection,
            "SELECT rolsuper OR rolreplication FROM pg_catalog.pg_roles WHERE rolname=current_user",
        )
    )
    role = sql.Identifier(user).as_string(None)
    checks.append(
        Check(
            "REPLICATION privilege",
            may,
            f"role {user} {'has it' if may else 'lacks it'}",
            "" if may else f"ALTER ROLE {role} REPLICATION",
        )
    )
    return checks


def _room(connection: Connection, options: PostgresOptions) -> list[Check]:
    """Free slots and free senders; what this capture has already is not needed again."""
    used = int(_one(connection, "SELECT count(*) FROM pg_catalog.pg_replication_slots"))
    has = slot_state(connection, options.slot)
    slots = int(_setting(connection, "max_replication_slots"))
    need = _SLOTS_NEEDED - (has is not None)
    checks = [
        Check(
            "max_replication_slots",
            slots - used >= need,
            f"{slots}, {used} in use",
            ""
            if slots - used >= need
            else f"ALTER SYSTEM SET max_replication_slots = {used + need + 2}; then restart",
        )
    ]
    senders = int(_setting(connection, "max_wal_senders"))
    busy = int(_one(connection, "SELECT count(*) FROM pg_catalog.pg_stat_replication"))
    need = _SENDERS_NEEDED - (has is not None and has.active_pid is not None)
    checks.append(
        Check(
            "max_wal_senders",
            senders - busy >= need,
            f"{senders}, {busy} in use",
            ""
            if senders - busy >= need
            else f"ALTER SYSTEM SET max_wal_senders = {busy + need + 2}; then restart",
        )
    )
    if has is not None and has.wal_status == "lost":
        checks.append(
            Check(
                f"slot {options.slot}",
                False,
                "lost: the server has thrown away what it needed",
                f"SELECT pg_drop_replication_slot('{options.slot}'); then take a new snapshot",
            )
        )
    limit = _setting(connection, "max_slot_wal_keep_size")
    checks.append(
        Check(
            "max_slot_wal_keep_size",
            limit != "-1",
            "no bound: a capture that stands still fills the disk" if limit == "-1" else limit,
            "ALTER SYSTEM SET max_slot_wal_keep_size = '50GB'; SELECT pg_reload_conf()"
            if limit == "-1"
            else "",
            required=False,
        )
    )
    return checks


def table_checks(
    connection: Connection, options: PostgresOptions, tables: Sequence[TableInfo]
) -> list[Check]:
    """The chosen tables: there, readable, publishable, with something to tell rows apart."""
    checks = [
        Check(
            "tables",
            bool(tables),
            f"{len(tables)} chosen",
            "" if tables else "No table fits --include and --exclude; look at the patterns.",
            required=False,
        )
    ]
    publication = sql.Identifier(options.publication).as_string(None)
    known = published(connection, options.publication)
    own = known is None or is_own(connection, options.publication)
    superuser = bool(
        _one(connection, "SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user")
    )
    if known is None:
        checks.append(_may_publish(connection))
        if options.all_tables and not superuser:
            checks.append(
                Check(
                    "publication of all tables",
                    False,
                    "only a superuser may make one",
                    f"As a superuser: CREATE PUBLICATION {publication} FOR ALL TABLES "
                    "WITH (publish_via_partition_root = true)",
                )
            )
    if known is not None:
        checks += _truncates(connection, options.publication)
    for info in tables:
        checks += _one_table(connection, options, info, own=own and not superuser)
        if not own and known is not None and info.full_name not in known:
            name = qualified(info).as_string(None)
            checks.append(
                Check(
                    f"{info.full_name}: published",
                    False,
                    f"not in the publication {options.publication}, which is not ours to change",
                    f"ALTER PUBLICATION {publication} ADD TABLE {name}",
                )
            )
    return checks


def _truncates(connection: Connection, publication: str) -> list[Check]:
    """A warning if the publication, perhaps the user's own, leaves truncates out."""
    query = "SELECT pubtruncate FROM pg_catalog.pg_publication WHERE pubname = %s"
    row = connection.execute(query, (publication,)).fetchone()
    if row is None or row[0]:
        return []
    return [
        Check(
            "truncates",
            False,
            f"not in the publication {publication}: topics keep the rows of truncated tables",
            f"ALTER PUBLICATION {sql.Identifier(publication).as_string(None)} "
            "SET (publish = 'insert, update, delete, truncate')",
            required=False,
        )
    ]


def _may_publish(connection: Connection) -> Check:
    may = bool(
        _one(
            connection,
            "SELECT pg_catalog.has_database_privilege(current_database(), 'CREATE')",
        )
    )
    database = sql.Identifier(connection.info.dbname).as_string(None)
    role = sql.Identifier(connection.info.user).as_string(None)
    return Check(
        "CREATE privilege",
        may,
        "the role may make a publication" if may else "the role may not make a publication",
        "" if may else f"GRANT CREATE ON DATABASE {database} TO {role}",
    )


def _one_table(
    connection: Connection, options: PostgresOptions, info: TableInfo, *, own: bool
) -> list[Check]:
    name = qualified(info).as_string(None)
    role = sql.Identifier(connection.info.user).as_string(None)
    row = connection.execute(
        """SELECT pg_catalog.has_table_privilege(c.oid, 'SELECT')
                  AND pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE'),
                  pg_catalog.pg_has_role(c.relowner, 'USAGE'),
                  pg_catalog.pg_get_userbyid(c.relowner), c.relrowsecurity
                  AND pg_catalog.row_security_active(c.oid)
           FROM pg_catalog.pg_class c WHERE c.oid = %s""",
        (info.oid,),
    ).fetchone()
    if row is None:
        return []
    may_read, owns, owner, hides_rows = row
    schema = sql.Identifier(info.schema).as_string(None)
    checks = [
        Check(
            f"{info.full_name}: SELECT",
            may_read,
            "may be read" if may_read else "may not be read",
            ""
            if may_read
            else f"GRANT USAGE ON SCHEMA {schema} TO {role}; GRANT SELECT ON {name} TO {role}",
        )
    ]
    if hides_rows:
        checks.append(
            Check(
                f"{info.full_name}: row security",
                False,
                "a policy hides rows from the role",
                f"ALTER ROLE {role} BYPASSRLS",
            )
        )
    if own and not owns and not options.all_tables:
        checks.append(
            Check(
                f"{info.full_name}: owner",
                False,
                f"only its owner {owner} may publish it",
                f"GRANT {sql.Identifier(owner).as_string(None)} TO {role}",
            )
        )
    return [*checks, *_identity(connection, info)]


def _identity(connection: Connection, info: TableInfo) -> list[Check]:
    """A published table without a replica identity makes UPDATE and DELETE on it fail."""
    leaves = unidentified(connection, info)
    checks = [
        Check(
            f"{info.full_name}: replica identity",
            not leaves,
            "can be published"
            if not leaves
            else "none: once published, every UPDATE and DELETE of it would fail",
            "; ".join(f"ALTER TABLE {leaf} REPLICA IDENTITY FULL" for leaf in leaves),
        )
    ]
    if not leaves and not info.key:
        checks.append(
            Check(
                f"{info.full_name}: key",
                False,
                "no primary key: its events have no key, and it cannot be read in chunks",
                f"ALTER TABLE {qualified(info).as_string(None)} ADD PRIMARY KEY (...)",
                required=False,
            )
        )
    return checks


def unidentified(connection: Connection, info: TableInfo) -> list[str]:
    """The table or those of its partitions that have no replica identity."""
    if not info.is_partitioned:
        return [] if info.can_update else [qualified(info).as_string(None)]
    rows = connection.execute(
        """SELECT c.oid::regclass::text
           FROM pg_catalog.pg_partition_tree(%s::oid::regclass) t
           JOIN pg_catalog.pg_class c ON c.oid = t.relid
           WHERE t.isleaf AND c.relkind = 'r' AND NOT (
               c.relreplident = 'f'
               OR (c.relreplident = 'd' AND EXISTS (
                   SELECT 1 FROM pg_catalog.pg_index i WHERE i.indrelid = c.oid AND i.indisprimary))
               OR (c.relreplident = 'i' AND EXISTS (
                   SELECT 1 FROM pg_catalog.pg_index i
                   WHERE i.indrelid = c.oid AND i.indisreplident)))
           ORDER BY 1""",
        (info.oid,),
    ).fetchall()
    found = [str(row[0]) for row in rows]
    # Future partitions take after the root.
    if not info.can_update:
        found.insert(0, qualified(info).as_string(None))
    return found


def _one(connection: Connection, query: str) -> Any:
    row = connection.execute(query.encode()).fetchone()
    return row[0] if row is not None else None


def _setting(connection: Connection, name: str) -> str:
    row = connection.execute("SELECT pg_catalog.current_setting(%s)", (name,)).fetchone()
    return str(row[0]) if row is not None else ""
