"""The SQL of triggers and changelogs.

For each change a trigger takes the next number of the one sequence (a row of `changes`) and writes
the values under it into the table's own changelog, whose columns have no type: each value is kept
as it is. Nothing in a trigger can fail by what the user writes: no constraint, no conversion.

`known` is 1 if at that moment the table's definition was the one that the trigger was made for.
Rows that were written after an ALTER TABLE and before the triggers were made anew are told apart
by it, to the row.

INSERT OR REPLACE and UPDATE OR REPLACE remove rows that are in the way of a UNIQUE constraint, and
run no delete trigger for them. So before such a table is changed, the rows that agree with the new
one in a unique index are noted down in `victims`; afterwards those that are really gone are logged
as deleted. (With no index but the key there are none: the new row has the key of the old, unless
the key has a collation or no type, so that SQLite takes different keys for the same.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from penstock.capture.sqlite.tables import Definition, literal, quoted

OP_INSERT: Final = 0
OP_UPDATE: Final = 1
OP_DELETE: Final = 2
# A row that was read again: what it was before is not known.
OP_REREAD: Final = 3


@dataclass(frozen=True, slots=True)
class Names:
    """What things are called: everything of one capture begins with the same prefix."""

    prefix: str

    @property
    def changes(self) -> str:
        return f"{self.prefix}changes"

    @property
    def meta(self) -> str:
        return f"{self.prefix}meta"

    @property
    def tables(self) -> str:
        return f"{self.prefix}tables"

    def log(self, version: int) -> str:
        return f"{self.prefix}log_{version}"

    def victims(self, version: int) -> str:
        return f"{self.prefix}victims_{version}"

    def trigger(self, version: int, what: str) -> str:
        return f"{self.prefix}{version}_{what}"


@dataclass(frozen=True, slots=True)
class Written:
    """The SQL for one version of one table."""

    names: Names
    version: int
    definition: Definition

    def tables(self) -> list[str]:
        """The changelog, and where it is needed the list of victims."""
        olds = [quoted(f"old_{name}") for name, *_ in self.definition.columns]
        news = [quoted(f"new_{name}") for name, *_ in self.definition.columns]
        made = [
            (
                f"CREATE TABLE {self._log} (seq INTEGER PRIMARY KEY, op, at, known, "
                f"{', '.join(olds)}, {', '.join(news)})"
            )
        ]
        if self._has_victims:
            made.append(f"CREATE TABLE {self._victims} (n INTEGER PRIMARY KEY, {', '.join(olds)})")
        return made

    def triggers(self) -> dict[str, str]:
        """Triggers by name."""
        made = {
            "insert": ("AFTER INSERT", self._gone() + self._log_row(OP_INSERT, new=True)),
            "update": ("AFTER UPDATE", self._gone() + self._log_row(OP_UPDATE, old=True, new=True)),
            "delete": ("AFTER DELETE", self._not_victim() + self._log_row(OP_DELETE, old=True)),
        }
        if self._has_victims:
            columns = {name for index in self.definition.unique for name, _ in index.columns}
            listed = ", ".join(quoted(name) for name in sorted(columns))
            made["before_insert"] = ("BEFORE INSERT", self._candidates())
            made["before_update"] = (f"BEFORE UPDATE OF {listed}", self._candidates())
        table = quoted(self.definition.name)
        return {
            self.names.trigger(self.version, what): (
                f"CREATE TRIGGER {quoted(self.names.trigger(self.version, what))} {when} "
                f"ON {table} BEGIN {' '.join(f'{step};' for step in steps)} END"
            )
            for what, (when, steps) in made.items()
        }

    # ---- parts -----------------------------------------------------------------------------

    @property
    def _log(self) -> str:
        return quoted(self.names.log(self.version))

    @property
    def _victims(self) -> str:
        return quoted(self.names.victims(self.version))

    @property
    def _changes(self) -> str:
        return quoted(self.names.changes)

    @property
    def _has_victims(self) -> bool:
        return any(index.columns for index in self.definition.unique)

    @property
    def _known(self) -> str:
        of = self.definition
        return (
            f"(SELECT sql = {literal(of.sql)} FROM sqlite_master WHERE rowid = {of.schema_rowid})"
        )

    def _log_row(self, op: int, *, old: bool = False, new: bool = False) -> list[str]:
        columns, values = [], []
        for wanted, side in ((old, "old"), (new, "new")):
            if wanted:
                for name, *_ in self.definition.columns:
                    columns.append(quoted(f"{side}_{name}"))
                    values.append(self.definition.expression(name, side))
        return [
            f"INSERT INTO {self._changes} (t) VALUES ({self.version})",
            (
                f"INSERT INTO {self._log} (seq, op, at, known, {', '.join(columns)}) VALUES "
                f"(last_insert_rowid(), {op}, julianday('now'), {self._known}, {', '.join(values)})"
            ),
        ]

    def _candidates(self) -> list[str]:
        """Note down which rows a REPLACE might remove."""
        of = self.definition
        names = [name for name, *_ in of.columns]
        olds = ", ".join(quoted(f"old_{name}") for name in names)
        picked = ", ".join(of.expression(name, "x") for name in names)
        noted = self._same_key("v", "x")
        steps = [f"DELETE FROM {self._victims}"]
        for index in of.unique:
            if index.columns:
                same = " AND ".join(
                    f"x.{quoted(name)} = new.{quoted(name)} COLLATE {quoted(collation)}"
                    for name, collation in index.columns
                )
                steps.append(
                    f"INSERT INTO {self._victims} ({olds}) SELECT {picked} FROM {quoted(of.name)} "
                    f"AS x WHERE {same} AND NOT EXISTS "
                    f"(SELECT 1 FROM {self._victims} AS v WHERE {noted})"
                )
        return steps

    def _gone(self) -> list[str]:
        """Log the candidates that are no longer there."""
        if not self._has_victims:
            return []
        of = self.definition
        olds = [quoted(f"old_{name}") for name, *_ in of.columns]
        there = self._same_key(self._victims, "x")
        picked = ", ".join(f"v.{old}" for old in olds)
        # Not last_insert_rowid(), which moves with every row that is inserted.
        return [
            (
                f"DELETE FROM {self._victims} WHERE EXISTS "
                f"(SELECT 1 FROM {quoted(of.name)} AS x WHERE {there})"
            ),
            f"INSERT INTO {self._changes} (t) SELECT {self.version} FROM {self._victims}",
            (
                f"INSERT INTO {self._log} (seq, op, at, known, {', '.join(olds)}) SELECT "
                f"(SELECT max(seq) FROM {self._changes}) - "
                f"(SELECT count(*) FROM {self._victims} AS w WHERE w.n > v.n), {OP_DELETE}, "
                f"julianday('now'), {self._known}, {picked} FROM {self._victims} AS v"
            ),
            f"DELETE FROM {self._victims}",
        ]

    def _not_victim(self) -> list[str]:
        """With recursive_triggers on SQLite does run the delete trigger: once is enough."""
        if not self._has_victims:
            return []
        same = self._same_key(self._victims, "old")
        return [f"DELETE FROM {self._victims} WHERE {same}"]

    def _same_key(self, victims: str, table: str) -> str:
        noted = [f"{victims}.{quoted(f'old_{name}')}" for name in self.definition.key]
        return self.definition.same_key(table, noted)
