"""What is installed in the database, and how it follows what the user does to tables.

`meta` has one row: who this changelog is, up to where it was trimmed, and the schema as it was last
looked at. `tables` has a row for each *version* of a captured table. A version has triggers and a
changelog of its own, so that what was written under an old definition is read with it, however
much later. When the definition changes, the version ends and another begins, in one transaction:

- The triggers are still there (a column was added or renamed, an index made): what they logged
  after the change (`known` is not 1) is taken out of the old changelog, and the rows concerned are
  read again into the new one. Nothing is told under wrong names, and no value is lost.
- The triggers are gone (the table was dropped and made anew) or the table is new: what happened
  meanwhile is nowhere, so the table is read again from the beginning, see `resync`.
- The rowid is the key, and VACUUM has numbered the rows anew: the same.
- A unique index has come, and rows were written since we last looked: the same. A REPLACE may have
  removed any row by that index, and the triggers did not look for it.

Everything runs under the write lock, so no change comes in between.
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
from dataclasses import dataclass
from typing import Any, Final
from uuid import uuid4

from penstock.capture.source import CaptureError, SourceSettings, Table
from penstock.capture.sqlite.location import transaction
from penstock.capture.sqlite.tables import (
    OURS,
    Definition,
    definitions,
    from_json,
    quoted,
)
from penstock.capture.sqlite.triggers import (
    OP_DELETE,
    OP_INSERT,
    OP_REREAD,
    OP_UPDATE,
    Names,
    Written,
)

# What must be done when the stream reaches the beginning of a version.
NOTHING, READ_ALL, TRUNCATE_AND_READ = 0, 1, 2
# All of it is trimmed away; only the name is kept, to know the table should it come back.
_GONE: Final = -1
_FORMAT: Final = 1


def names_of(capture: str) -> Names:
    """What this capture's things are called. Two underscores end its name, so that no name can
    be the beginning of another."""
    slug = re.sub(r"[^A-Za-z0-9]+", "_", capture).strip("_").lower()
    if slug != capture:
        slug = f"{slug}_{hashlib.sha256(capture.encode()).hexdigest()[:8]}".strip("_")
    return Names(f"{OURS}{slug}__")


@dataclass(frozen=True, slots=True)
class Version:
    """A captured table from one change of its definition to the next."""

    id: int
    definition: Definition
    table: Table
    # The place in the sequence where it began, and ended if it has.
    since: int
    ended: int | None
    resync: int


@dataclass(frozen=True, slots=True)
class Meta:
    """Who the changelog is, and how much of it is gone."""

    id: str
    trimmed: int
    schema_version: int
    digest: str


class Catalog:
    """What one capture has installed. It keeps no state but the objects of versions, so that a
    table is the same object as long as its definition is the same."""

    def __init__(self, settings: SourceSettings) -> None:
        self.settings = settings
        self.names = names_of(settings.name)
        self._versions: dict[int, Version] = {}

    # ---- looking ---------------------------------------------------------------------------

    def is_installed(self, connection: sqlite3.Connection) -> bool:
        found = connection.execute(
            "SELECT 1 FROM sqlite_schema WHERE type = 'table' AND name = ?", (self.names.meta,)
        )
        return found.fetchone() is not None

    def meta(self, connection: sqlite3.Connection) -> Meta:
        row = connection.execute(
            f"SELECT id, trimmed, schema_version, digest FROM {quoted(self.names.meta)}"
        ).fetchone()
        return Meta(*row)

    def top(self, connection: sqlite3.Connection) -> int:
        """The last number of the sequence."""
        row = connection.execute(f"SELECT max(seq) FROM {quoted(self.names.changes)}").fetchone()
        return row[0] or 0

    def versions(self, connection: sqlite3.Connection) -> dict[int, Version]:
        """All that are not yet trimmed away, by their numbers."""
        found = {}
        for (
            id_,
            name,
            sql,
            schema_rowid,
            rootpage,
            text,
            since,
            ended,
            resync,
        ) in connection.execute(
            "SELECT id, name, sql, schema_rowid, rootpage, definition, since, ended, resync "
            f"FROM {quoted(self.names.tables)} WHERE resync != {_GONE} ORDER BY id"
        ):
            known = self._versions.get(id_)
            if known is None or known.ended != ended:
                definition = from_json(name, sql, schema_rowid, rootpage, text)
                table = definition.table if known is None else known.table
                known = Version(id_, definition, table, since, ended, resync)
            found[id_] = known
        self._versions = found
        return found

    def active(self, connection: sqlite3.Connection) -> list[Version]:
        return [v for v in self.versions(connection).values() if v.ended is None]

    # ---- following -------------------------------------------------------------------------

    def install(self, connection: sqlite3.Connection) -> None:
        """Make everything that is missing; what is there is brought up to date."""
        with transaction(connection):
            if self.is_installed(connection) and self._is_seen(connection):
                return
        with transaction(connection, "IMMEDIATE"):
            first = not self.is_installed(connection)
            if first:
                self._create(connection)
            self._follow(connection, first=first)

    def follow(self, connection: sqlite3.Connection, told: int = 0) -> int:
        """Bring triggers up to date with the tables; the schema version for which this holds.

        The write lock is taken only if there is something to do. What has been `told`, up to this
        number, was written while triggers and tables agreed.
        """
        with transaction(connection):
            version = schema_version(connection)
            if self._is_seen(connection):
                return version
        with transaction(connection, "IMMEDIATE"):
            return self._follow(connection, first=False, told=told)

    def alter(self, connection: sqlite3.Connection, statement: str) -> None:
        """Run the user's statement with the triggers out of its way, and nothing in between."""
        if not re.match(r"\s*ALTER\s+TABLE\s", statement, re.IGNORECASE):
            raise CaptureError(f"only ALTER TABLE is run so, not: {statement[:80]}")
        with transaction(connection, "IMMEDIATE"):
            self._follow(connection, first=False)
            before = self.active(connection)
            for version in before:
                self._drop_triggers(connection, version)
            connection.execute(statement)
            now = {found.name: found for found in definitions(connection, self.settings)}
            for version in before:
                self._end(connection, version)
                definition = now.pop(version.definition.name, None)
                if definition is not None:
                    # Where rows kept their place, what was told of them still holds.
                    same = definition.schema_rowid == version.definition.schema_rowid
                    resync = NOTHING if same else TRUNCATE_AND_READ
                    self._begin(connection, definition, resync)
            for definition in now.values():
                self._begin(connection, definition, READ_ALL)
            self._note_schema(connection)

    def _create(self, connection: sqlite3.Connection) -> None:
        names = self.names
        connection.execute(
            f"CREATE TABLE {quoted(names.meta)} "
            "(id TEXT, format INTEGER, trimmed INTEGER, schema_version INTEGER, digest TEXT)"
        )
        connection.execute(
            f"INSERT INTO {quoted(names.meta)} VALUES (?, ?, 0, 0, '')", (uuid4().hex, _FORMAT)
        )
        connection.execute(f"CREATE TABLE {quoted(names.changes)} (seq INTEGER PRIMARY KEY, t)")
        connection.execute(
            f"CREATE TABLE {quoted(names.tables)} (id INTEGER PRIMARY KEY, name TEXT, sql TEXT, "
            "schema_rowid INTEGER, rootpage INTEGER, definition TEXT, since INTEGER, "
            "ended INTEGER, resync INTEGER)"
        )

    def _follow(self, connection: sqlite3.Connection, *, first: bool, told: int = 0) -> int:
        meta = self.meta(connection)
        version_now = schema_version(connection)
        digest = self._digest(connection)
        if not first and self._is_seen(connection):
            return version_now
        # Nothing but the version has changed: that is what VACUUM does.
        vacuumed = meta.digest == digest and meta.schema_version != version_now
        now = {found.name: found for found in definitions(connection, self.settings)}
        listed = connection.execute(f"SELECT DISTINCT name FROM {quoted(self.names.tables)}")
        ever = {name for (name,) in listed}
        existing = self._existing_triggers(connection)
        for version in self.active(connection):
            definition = now.get(version.definition.name)
            if definition is None:
                self._drop_triggers(connection, version)
                self._forget_unknown(connection, version)
                self._end(connection, version)
                continue
            wanted = Written(self.names, version.id, definition).triggers()
            found = existing.get(version.id, {})
            moved = bool(definition.rowid_name) and (
                vacuumed or definition.rootpage != version.definition.rootpage
            )
            del now[definition.name]
            if {name: sql for name, (sql, _) in found.items()} != wanted or moved:
                self._renew(connection, version, definition, found, moved=moved, told=told)
        for definition in now.values():
            resync = TRUNCATE_AND_READ if definition.name in ever else READ_ALL
            self._begin(connection, definition, NOTHING if first else resync)
        return self._note_schema(connection)

    def _renew(
        self,
        connection: sqlite3.Connection,
        version: Version,
        definition: Definition,
        found: dict[str, tuple[str, str]],
        *,
        moved: bool,
        told: int,
    ) -> None:
        """End a version and begin the next."""
        old = version.definition
        needed = {self.names.trigger(version.id, what) for what in ("insert", "update", "delete")}
        attached = needed <= {name for name, (_, on) in found.items() if on == definition.name}
        rebuilt = definition.sql != old.sql and definition.schema_rowid != old.schema_rowid
        in_place = attached and not rebuilt and not moved and len(old.key) == len(definition.key)
        if in_place and definition.has_new_unique(old):
            in_place = not self._has_written(connection, version, told)
        self._drop_triggers(connection, version)
        if in_place:
            after = self._begin(connection, definition, NOTHING)
            self._read_again(connection, version, after)
        self._forget_unknown(connection, version)
        self._end(connection, version)
        if not in_place:
            self._begin(connection, definition, TRUNCATE_AND_READ)

    def _is_seen(self, connection: sqlite3.Connection) -> bool:
        """Whether the schema is as it was when we last looked, and the same tables are chosen."""
        meta = self.meta(connection)
        if meta.schema_version != schema_version(connection):
            return False
        if meta.digest != self._digest(connection):
            return False
        wanted = {found.name for found in definitions(connection, self.settings)}
        return wanted == {v.definition.name for v in self.active(connection)}

    def _existing_triggers(
        self, connection: sqlite3.Connection
    ) -> dict[int, dict[str, tuple[str, str]]]:
        """Our triggers as SQLite has them: by version, name -> (SQL, table)."""
        found: dict[int, dict[str, tuple[str, str]]] = {}
        for name, sql, on in connection.execute(
            "SELECT name, sql, tbl_name FROM sqlite_schema WHERE type = 'trigger'"
        ).fetchall():
            number = name.removeprefix(self.names.prefix).partition("_")[0]
            if name.startswith(self.names.prefix) and number.isdigit():
                found.setdefault(int(number), {})[name] = (sql, on)
        return found

    # ---- versions --------------------------------------------------------------------------

    def _begin(
        self, connection: sqlite3.Connection, definition: Definition, resync: int
    ) -> Version:
        cursor = connection.execute(
            f"INSERT INTO {quoted(self.names.tables)} "
            "(name, sql, schema_rowid, rootpage, definition, since, resync) "
            "VALUES (?, ?, ?, ?, ?, ?, ?)",
            (
                *(definition.name, definition.sql, definition.schema_rowid, definition.rootpage),
                *(definition.to_json(), self.top(connection), resync),
            ),
        )
        id_ = cursor.lastrowid or 0
        if resync != NOTHING:
            # A place of its own in the sequence, which the stream comes to.
            marked = connection.execute(
                f"INSERT INTO {quoted(self.names.changes)} (t) VALUES (?)", (id_,)
            ).lastrowid
            connection.execute(
                f"UPDATE {quoted(self.names.tables)} SET since = ? WHERE id = ?", (marked, id_)
            )
        written = Written(self.names, id_, definition)
        for statement in (*written.tables(), *written.triggers().values()):
            connection.execute(statement)
        return self.versions(connection)[id_]

    def _end(self, connection: sqlite3.Connection, version: Version) -> None:
        connection.execute(
            f"UPDATE {quoted(self.names.tables)} SET ended = ? WHERE id = ?",
            (self.top(connection), version.id),
        )

    def _drop_triggers(self, connection: sqlite3.Connection, version: Version) -> None:
        for name in self._existing_triggers(connection).get(version.id, {}):
            connection.execute(f"DROP TRIGGER {quoted(name)}")
        connection.execute(f"DROP TABLE IF EXISTS {quoted(self.names.victims(version.id))}")

    def _has_written(self, connection: sqlite3.Connection, version: Version, told: int) -> bool:
        """Whether rows were written since, maybe in the place of others."""
        found = connection.execute(
            f"SELECT 1 FROM {quoted(self.names.log(version.id))} "
            f"WHERE seq > ? AND op IN ({OP_INSERT}, {OP_UPDATE}) LIMIT 1",
            (told,),
        )
        return found.fetchone() is not None

    def _forget_unknown(self, connection: sqlite3.Connection, version: Version) -> None:
        """Take out what was logged under another definition than the version's."""
        log = quoted(self.names.log(version.id))
        connection.execute(f"DELETE FROM {log} WHERE known IS NOT 1")

    def _read_again(self, connection: sqlite3.Connection, old: Version, new: Version) -> None:
        """Log the present state of all rows that were changed under an unknown definition."""
        log, keys = quoted(self.names.log(old.id)), "temp._penstock_keys"
        places = range(len(old.definition.key))
        listed = ", ".join(f"k{at}" for at in places)
        connection.execute(f"DROP TABLE IF EXISTS {keys}")
        connection.execute(f"CREATE TABLE {keys} (n INTEGER PRIMARY KEY, {listed})")
        sides = []
        for side in ("old", "new"):
            picked = ", ".join(quoted(f"{side}_{name}") for name in old.definition.key)
            ops = f"op != {OP_DELETE}" if side == "new" else "op != 0"
            sides.append(f"SELECT {picked} FROM {log} WHERE known IS NOT 1 AND {ops}")
        connection.execute(f"INSERT INTO {keys} ({listed}) {' UNION '.join(sides)}")
        of, target = new.definition, quoted(self.names.log(new.id))
        top = self.top(connection)
        connection.execute(
            f"INSERT INTO {quoted(self.names.changes)} (seq, t) SELECT ? + n, ? FROM {keys}",
            (top, new.id),
        )
        same = of.same_key("x", [f"k.k{at}" for at in places])
        source = f"{keys} AS k JOIN {quoted(of.name)} AS x ON {same}"
        names = [name for name, *_ in of.columns]
        news = ", ".join(quoted(f"new_{name}") for name in names)
        picked = ", ".join(of.expression(name, "x") for name in names)
        connection.execute(
            f"INSERT INTO {target} (seq, op, at, known, {news}) "
            f"SELECT ? + k.n, {OP_REREAD}, julianday('now'), 1, {picked} FROM {source}",
            (top,),
        )
        olds = ", ".join(quoted(f"old_{name}") for name in of.key)
        connection.execute(
            f"INSERT INTO {target} (seq, op, at, known, {olds}) "
            f"SELECT ? + k.n, {OP_DELETE}, julianday('now'), 1, {listed} FROM {keys} AS k "
            f"WHERE NOT EXISTS (SELECT 1 FROM {quoted(of.name)} AS x WHERE {same})",
            (top,),
        )
        connection.execute(f"DROP TABLE {keys}")

    # ---- the schema ------------------------------------------------------------------------

    def _digest(self, connection: sqlite3.Connection) -> str:
        """Of all definitions but our own."""
        found = hashlib.sha256()
        for row in connection.execute(
            "SELECT type, name, sql FROM sqlite_schema WHERE tbl_name NOT GLOB ? "
            "AND name NOT GLOB ? ORDER BY type, name",
            (f"{self.names.prefix}*", f"{self.names.prefix}*"),
        ):
            found.update(repr(row).encode("utf-8", "surrogatepass"))
        return found.hexdigest()

    def _note_schema(self, connection: sqlite3.Connection) -> int:
        version = schema_version(connection)
        connection.execute(
            f"UPDATE {quoted(self.names.meta)} SET schema_version = ?, digest = ?",
            (version, self._digest(connection)),
        )
        return version

    # ---- letting go ------------------------------------------------------------------------

    def trim(self, connection: sqlite3.Connection, upto: int, pieces: int) -> bool:
        """Delete what is confirmed, so many at most; whether more is left. The last number stays:
        SQLite goes on counting from it."""
        with transaction(connection, "IMMEDIATE"):
            meta = self.meta(connection)
            upto = min(upto, self.top(connection))
            until = min(upto, meta.trimmed + pieces)
            if until <= meta.trimmed:
                return False
            for version in list(self.versions(connection).values()):
                log = quoted(self.names.log(version.id))
                connection.execute(f"DELETE FROM {log} WHERE seq <= ?", (until,))
                # Not if it ended right here: a reading that is under way looks for its heir.
                if version.ended is not None and version.ended < until:
                    self._drop_version(connection, version)
            changes = quoted(self.names.changes)
            connection.execute(
                f"DELETE FROM {changes} WHERE seq <= ? AND seq < (SELECT max(seq) FROM {changes})",
                (until,),
            )
            connection.execute(f"UPDATE {quoted(self.names.meta)} SET trimmed = ?", (until,))
            return until < upto

    def _drop_version(self, connection: sqlite3.Connection, version: Version) -> None:
        before = schema_version(connection)
        connection.execute(f"DROP TABLE IF EXISTS {quoted(self.names.log(version.id))}")
        tables, name = quoted(self.names.tables), version.definition.name
        connection.execute(f"DELETE FROM {tables} WHERE name = ? AND resync = {_GONE}", (name,))
        connection.execute(f"UPDATE {tables} SET resync = {_GONE} WHERE id = ?", (version.id,))
        # Our own doing: nobody need look at the tables because of it.
        connection.execute(
            f"UPDATE {quoted(self.names.meta)} SET schema_version = ? WHERE schema_version = ?",
            (schema_version(connection), before),
        )

    def remove(self, connection: sqlite3.Connection) -> list[str]:
        """Take everything away; what it was."""
        gone: list[str] = []
        with transaction(connection, "IMMEDIATE"):
            for kind in ("trigger", "table"):
                found: list[Any] = connection.execute(
                    "SELECT name FROM sqlite_schema WHERE type = ? AND substr(name, 1, ?) = ?",
                    (kind, len(self.names.prefix), self.names.prefix),
                ).fetchall()
                for (name,) in found:
                    connection.execute(f"DROP {kind.upper()} {quoted(name)}")
                    gone.append(f"{kind} {name}")
        self._versions = {}
        return gone


def schema_version(connection: sqlite3.Connection) -> int:
    """Another number whenever any definition has changed."""
    row = connection.execute("PRAGMA main.schema_version").fetchone()
    return int(row[0])
