"""Connections: the URL, what the server is, and its errors in our words.

    mysql://user:password@host:3306/database?ssl_mode=verify_identity&ssl_ca=/path/ca.pem

A database in the URL narrows the capture to it. `ssl_mode` is one of disabled, preferred, required,
verify_ca and verify_identity, as MySQL's own clients have it; without it TLS is used where the
server offers it, verified where there is an `ssl_ca`, and not at all on the loopback.

Every session speaks UTF-8 and UTC, so that the text of a value is the same wherever it is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import parse_qsl, unquote, urlsplit

import pymysql

from penstock.capture.mysql.charsets import Charsets
from penstock.capture.source import CaptureError, DatabaseBusyError, DatabaseUnreachableError
from penstock.connecting import mysql_away

MARIADB: Final = "mariadb"
MYSQL: Final = "mysql"
CONNECT_TIMEOUT_S: Final = 10
WRITE_TIMEOUT_S: Final = 60
READ_TIMEOUT_S: Final = 600

if TYPE_CHECKING:
    Connection: TypeAlias = pymysql.Connection[Any]
else:
    # Only its types know it as generic.
    Connection = pymysql.Connection

# The server is gone, going, or full: the same call may work later.
_UNREACHABLE: Final = frozenset(
    {1040, 1053, 1152, 1158, 1159, 1160, 1161, 1184, 1203, 1205, 1213, 1317, 1927, 2002, 2003, 2006,
     2013, 2014, 2055, 4031}
)  # fmt: skip
# Of these: it is there, but full, or something else is in the way.
_BUSY: Final = frozenset({1040, 1053, 1203, 1205, 1213, 1317})
# The definition is newer than the snapshot, or the column or table is gone.
_CHANGED: Final = frozenset({1412, 1054, 1146})
_DENIED: Final = frozenset({1044, 1045, 1142, 1143, 1227, 1698})
_URL_OPTIONS: Final = frozenset({"ssl_ca", "ssl_cert", "ssl_key", "ssl_mode"})
_SSL_MODES: Final = ("disabled", "preferred", "required", "verify_ca", "verify_identity")
_LOOPBACK: Final = frozenset({"localhost", "127.0.0.1", "::1"})
_SESSION: Final = (
    "SET SESSION time_zone = '+00:00', sql_mode = '', wait_timeout = 86400,"
    " net_write_timeout = 3600, net_read_timeout = 3600"
)


class TableChangedError(CaptureError):
    """A table was altered between two looks at it."""

    retriable = True
    advice = "Try again; a snapshot needs a moment without ALTER TABLE."


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is, and as whom to go there."""

    host: str
    port: int
    user: str
    password: str
    # Empty: all databases.
    database: str
    options: Mapping[str, str]

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"

    @classmethod
    def of(cls, url: str) -> Address:
        """The parts of a URL."""
        try:
            parts = urlsplit(url)
            port = parts.port or 3306
        except ValueError as error:
            raise CaptureError(f"this is not a URL: {error}", advice=_URL_ADVICE) from None
        if parts.scheme not in ("mysql", "mariadb") or not parts.hostname:
            raise CaptureError(
                "this is not the URL of a MySQL or MariaDB server", advice=_URL_ADVICE
            )
        options = dict(parse_qsl(parts.query))
        unknown = set(options) - _URL_OPTIONS
        if unknown:
            raise CaptureError(
                f"the URL has unknown options: {', '.join(sorted(unknown))}",
                advice=f"Known are {', '.join(sorted(_URL_OPTIONS))}.",
            )
        mode = options.get("ssl_mode", "preferred")
        if mode not in _SSL_MODES:
            raise CaptureError(
                f"ssl_mode is {mode!r}", advice=f"It may be {', '.join(_SSL_MODES)}."
            )
        return cls(
            parts.hostname,
            port,
            unquote(parts.username or "root"),
            unquote(parts.password or ""),
            unquote(parts.path.lstrip("/")),
            options,
        )


_URL_ADVICE: Final = "Write it as mysql://user:password@host:3306/database."


@contextmanager
def explained(where: object) -> Iterator[None]:
    """What PyMySQL and the socket raise, in our words."""
    try:
        yield
    except pymysql.MySQLError as error:
        code = error.args[0] if error.args and isinstance(error.args[0], int) else 0
        text = str(error.args[1]) if len(error.args) > 1 else str(error)
        if code in _CHANGED:
            raise TableChangedError(f"{where}: {text}") from error
        if code in _DENIED:
            user = where.user if isinstance(where, Address) else "user"
            raise CaptureError(f"{where}: {text}", advice=_GRANT.format(user)) from error
        if code in _UNREACHABLE or isinstance(error, pymysql.err.InterfaceError):
            if code in _BUSY:
                raise DatabaseBusyError(f"{where} cannot do it now: {text}") from error
            raise DatabaseUnreachableError(
                f"{where} does not answer: {mysql_away(text) or text}", advice=_REACH
            ) from error
        raise CaptureError(f"{where}: {text} (error {code})") from error
    except OSError as error:
        raise DatabaseUnreachableError(
            f"{where} does not answer: {error}", advice=_REACH
        ) from error


_REACH: Final = "Is the server running, and are host and port in the URL right?"
_GRANT: Final = (
    "Check user and password; the user needs: GRANT SELECT, REPLICATION SLAVE, REPLICATION CLIENT"
    " ON *.* TO '{}'@'%';"
)


def connect(address: Address, *, read_timeout_s: float = READ_TIMEOUT_S) -> Connection:
    """A connection with autocommit."""
    with explained(address):
        connection: Connection = pymysql.connect(
            host=address.host,
            port=address.port,
            user=address.user,
            password=address.password,
            charset="utf8mb4",
            autocommit=True,
            connect_timeout=CONNECT_TIMEOUT_S,
            # The server speaks first: one that is silent now is none, or does not work.
            read_timeout=CONNECT_TIMEOUT_S,
            write_timeout=WRITE_TIMEOUT_S,
            init_command=_SESSION,
            **_ssl(address),
        )
        inside: Any = connection
        inside._read_timeout = read_timeout_s
        # Who follows the binlog reads from the socket itself.
        inside._sock.settimeout(read_timeout_s)
        return connection


def _ssl(address: Address) -> dict[str, Any]:
    files = {name: value for name, value in address.options.items() if name != "ssl_mode"}
    mode = address.options.get("ssl_mode")
    if mode is None:
        mode = "verify_ca" if files else "preferred"
        if not files and address.host in _LOOPBACK:
            mode = "disabled"
    if mode == "disabled":
        return {"ssl_disabled": True}
    if mode == "preferred":
        return {}
    if mode == "required" and not files:
        return {"ssl": {"verify_mode": False}}
    verify = mode in ("verify_ca", "verify_identity")
    return {**files, "ssl_verify_cert": verify, "ssl_verify_identity": mode == "verify_identity"}


def query(connection: Connection, sql: str, parameters: object = None) -> list[tuple[Any, ...]]:
    with connection.cursor() as cursor:
        cursor.execute(sql, parameters)
        return list(cursor.fetchall())


def rows_by_name(connection: Connection, sql: str) -> list[dict[str, Any]]:
    """Rows whose columns differ between versions; names in lower case."""
    with connection.cursor() as cursor:
        cursor.execute(sql)
        names = [d[0].lower() for d in cursor.description or ()]
        # MySQL leaves the last field of SHOW SLAVE HOSTS out where a replica has no UUID.
        return [dict(zip(names, row, strict=False)) for row in cursor.fetchall()]


@dataclass(frozen=True, slots=True)
class Server:
    """What a server is."""

    flavour: str
    version: tuple[int, ...]
    spelled: str
    server_id: int
    # Tells servers apart, whatever their address.
    uid: str

    @property
    def is_mariadb(self) -> bool:
        return self.flavour == MARIADB


def server_of(connection: Connection) -> Server:
    """Ask a server what it is."""
    known = variables(connection)
    spelled = known.get("version", "")
    flavour = MARIADB if "mariadb" in spelled.lower() else MYSQL
    found = re.match(r"(?:5\.5\.5-)?(\d+)\.(\d+)\.(\d+)", spelled)
    version = tuple(map(int, found.groups())) if found else (0, 0, 0)
    server_id = int(known.get("server_id", "0"))
    uid = known.get("server_uuid") or known.get("server_uid") or f"id {server_id}"
    return Server(flavour, version, spelled, server_id, uid)


def variables(connection: Connection) -> dict[str, str]:
    """The server's global settings."""
    found = query(connection, "SHOW GLOBAL VARIABLES")
    return {str(name).lower(): str(value) for name, value in found}


def binlog_end(connection: Connection, server: Server) -> tuple[str, int, str]:
    """File, position and GTIDs up to which the binlog is written."""
    modern = not server.is_mariadb and server.version >= (8, 2, 0)
    rows = rows_by_name(connection, f"SHOW {'BINARY LOG' if modern else 'MASTER'} STATUS")
    if not rows:
        raise CaptureError(
            "the server writes no binlog",
            advice="In my.cnf under [mysqld]: log_bin=binlog, server_id=1; then restart it.",
        )
    gtid = str(rows[0].get("executed_gtid_set") or "").replace("\n", "")
    if server.is_mariadb:
        gtid = str(query(connection, "SELECT @@gtid_binlog_pos")[0][0] or "")
    return str(rows[0]["file"]), int(rows[0]["position"]), gtid


def charsets_of(connection: Connection) -> Charsets:
    """The character sets of a server; what a byte means is asked when it is needed."""
    collations = {
        int(number): str(name)
        for name, number in query(
            connection, "SELECT character_set_name, id FROM information_schema.collations"
        )
        if number is not None and name is not None
    }
    try:
        # Collations of newer MariaDB stand for several character sets, each with its own number.
        for name, number in query(
            connection,
            "SELECT character_set_name, id"
            " FROM information_schema.collation_character_set_applicability",
        ):
            collations[int(number)] = str(name)
    except pymysql.MySQLError:
        pass

    def ask(charset: str) -> dict[int, str]:
        if not re.fullmatch(r"\w+", charset):
            raise CaptureError(f"character set {charset} is not known")
        codes = ", ".join(f"CONVERT(_{charset} X'{i:02X}' USING utf8mb4)" for i in range(256))
        # A control character is itself, whatever the server thinks of it.
        found = query(connection, f"SELECT {codes}")[0]
        return {i: str(text) for i, text in enumerate(found) if text}

    return Charsets(collations, ask)
