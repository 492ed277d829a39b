"""What must hold before a server can be captured, each with what mends it. Changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

import pymysql

from penstock.capture.mysql.connection import (
    Address,
    Connection,
    Server,
    binlog_end,
    connect,
    explained,
    query,
    rows_by_name,
    server_of,
    variables,
)
from penstock.capture.mysql.replication import Dump
from penstock.capture.mysql.schema import Chooser, KnownTable, known_tables
from penstock.capture.mysql.types import Modes
from penstock.capture.source import CaptureError, Check, DatabaseUnreachableError

_MARIADB_MIN: Final = (10, 6, 0)
_MYSQL_MIN: Final = (8, 0, 1)
_EXPIRY_MIN_S: Final = 3600
_TRANSACTIONAL: Final = frozenset({"innodb", "rocksdb", "tokudb"})


def checks(address: Address, chooser: Chooser, modes: Modes, replica_id: int) -> list[Check]:
    """Every check, in the order in which one would mend them."""
    try:
        connection = connect(address)
    except DatabaseUnreachableError:
        # It may answer later: a capture that runs tries again.
        raise
    except CaptureError as error:
        return [Check("connection", False, str(error), error.advice or _REACH)]
    try:
        with explained(address):
            server = server_of(connection)
            known = variables(connection)
            out = [Check("connection", True, str(address))]
            out.append(_version(server))
            out += _settings(server, known)
            out += _privileges(address, connection, server, replica_id)
            out += _replica_id(connection, server, replica_id)
            out += _expiry(known)
            out += _tables(address, connection, chooser, modes)
        return out
    finally:
        connection.close()


_REACH: Final = "Start the server, or mend host and port in the URL."


def _version(server: Server) -> Check:
    least = _MARIADB_MIN if server.is_mariadb else _MYSQL_MIN
    need = ".".join(map(str, least[:2]))
    name = "MariaDB" if server.is_mariadb else "MySQL"
    ok = server.version >= least
    return Check("version", ok, server.spelled, "" if ok else f"Upgrade to {name} {need} or newer.")


def _global(name: str, value: str) -> str:
    return f"SET GLOBAL {name} = '{value}'; and in my.cnf under [mysqld]: {name}={value}"


def _settings(server: Server, known: dict[str, str]) -> Iterator[Check]:
    binlog = known.get("log_bin", "OFF")
    remedy = "In my.cnf under [mysqld]: log_bin=binlog and server_id=1; then restart the server."
    yield Check("log_bin", binlog == "ON", binlog, "" if binlog == "ON" else remedy)
    wanted = {"binlog_format": "ROW", "binlog_row_image": "FULL", "binlog_row_metadata": "FULL"}
    for name, value in wanted.items():
        found = known.get(name, "(unknown to this version)")
        ok = found.upper() == value
        yield Check(name, ok, found, "" if ok else _global(name, value))
    partial = known.get("binlog_row_value_options", "")
    if not server.is_mariadb:
        remedy = "" if not partial else _global("binlog_row_value_options", "")
        yield Check("binlog_row_value_options", not partial, partial or "(empty)", remedy)
    filters = {n: known[n] for n in ("binlog_do_db", "binlog_ignore_db") if known.get(n)}
    if filters:
        found = ", ".join(f"{n}={v}" for n, v in filters.items())
        remedy = (
            "Take the filters out of my.cnf and restart: filtered databases are not in the binlog."
        )
        yield Check("binlog filters", False, found, remedy, required=False)
    server_id = known.get("server_id", "0")
    remedy = "" if server_id != "0" else _global("server_id", "1")
    yield Check("server_id", server_id != "0", server_id, remedy)


def _tried(name: str, attempt: Callable[[], object], grant: str, user: str) -> Check:
    try:
        attempt()
    except (pymysql.MySQLError, CaptureError) as error:
        text = str(error.args[1]) if len(error.args) > 1 else str(error)
        return Check(name, False, text, f"GRANT {grant} TO '{user}'@'%';")
    return Check(name, True, "granted")


def _privileges(
    address: Address, connection: Connection, server: Server, replica_id: int
) -> Iterator[Check]:
    monitor = "BINLOG MONITOR" if server.is_mariadb else "REPLICATION CLIENT"
    user = address.user
    yield _tried(monitor, lambda: binlog_end(connection, server), f"{monitor} ON *.*", user)
    yield _tried(
        "REPLICATION SLAVE",
        lambda: _try_replica(address, server, replica_id),
        "REPLICATION SLAVE ON *.*",
        user,
    )
    if not server.is_mariadb:
        yield _tried("RELOAD", lambda: _has_reload(connection), "RELOAD ON *.*", user)


def _try_replica(address: Address, server: Server, replica_id: int) -> None:
    # A number next to ours: an id that is in use would throw a running capture out.
    dump = Dump(address, server, replica_id + 1)
    try:
        dump.register()
    finally:
        dump.dispose()


def _has_reload(connection: Connection) -> None:
    grants = " ".join(str(row[0]).upper() for row in query(connection, "SHOW GRANTS"))
    if "RELOAD" not in grants and "ALL PRIVILEGES ON *.*" not in grants:
        raise CaptureError("the user has no RELOAD, which a snapshot of MySQL needs for a moment")


def _replica_id(connection: Connection, server: Server, replica_id: int) -> Iterator[Check]:
    clash = server.server_id == replica_id
    advice = "Give the capture another number with the option server_id."
    found = f"{replica_id}, the server's own" if clash else str(replica_id)
    modern = not server.is_mariadb and server.version >= (8, 0, 22)
    try:
        listed = rows_by_name(connection, f"SHOW {'REPLICAS' if modern else 'SLAVE HOSTS'}")
    except pymysql.MySQLError:
        listed = []
    for row in listed:
        number = row.get("server_id")
        if not clash and number is not None and int(number) == replica_id:
            host = str(row.get("host") or "")
            # Our own capture, running, registers under this name.
            if host != "penstock":
                clash, found = True, f"{replica_id}, in use by a replica {host}".rstrip()
    yield Check("replica id", not clash, found, advice if clash else "")


def _expiry(known: dict[str, str]) -> Iterator[Check]:
    seconds = float(known.get("binlog_expire_logs_seconds", "0") or 0)
    seconds = seconds or 86400 * float(known.get("expire_logs_days", "0") or 0)
    if not seconds:
        return
    ok = seconds >= _EXPIRY_MIN_S
    remedy = "" if ok else _global("binlog_expire_logs_seconds", "604800")
    found = f"after {seconds:.0f} s; a capture that is down for longer needs a new snapshot"
    yield Check("binlog expiry", ok, found, remedy, required=False)


def _tables(
    address: Address, connection: Connection, chooser: Chooser, modes: Modes
) -> Iterator[Check]:
    try:
        found = known_tables(connection, chooser, modes)
    except CaptureError as error:
        remedy = error.advice or f"GRANT SELECT ON *.* TO '{address.user}'@'%';"
        yield Check("tables", False, str(error), remedy)
        return
    remedy = (
        "Mend the patterns or the database in the URL, or let the user see the tables: "
        f"GRANT SELECT ON `{address.database or '*'}`.* TO '{address.user}'@'%';"
    ).replace("`*`", "*")
    yield Check("tables", bool(found), f"{len(found)} tables", "" if found else remedy)
    for known in found:
        yield from _table(address, connection, known)


def _table(address: Address, connection: Connection, known: KnownTable) -> Iterator[Check]:
    name = known.table.full_name
    if not known.table.key:
        yield Check(
            f"key of {name}",
            False,
            "no primary key: events have no key, and it cannot be read in chunks",
            f"ALTER TABLE {known.place} ADD PRIMARY KEY (...);",
            required=False,
        )
    if known.engine.lower() not in _TRANSACTIONAL:
        yield Check(
            f"engine of {name}",
            False,
            f"{known.engine} takes no part in snapshots: rows written meanwhile may come twice",
            f"ALTER TABLE {known.place} ENGINE=InnoDB;",
            required=False,
        )
    grant = f"SELECT ON {known.place}"
    tried = _tried(
        f"SELECT on {name}",
        lambda: query(connection, f"SELECT 1 FROM {known.place} LIMIT 0"),
        grant,
        address.user,
    )
    if not tried.ok:
        yield tried
