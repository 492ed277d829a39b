"""The SQL of triggers and changelogs.

For each change a trigger takes the next number of the one sequence (a row of `changes`) and writes
the values under it into the table's own changelog, whose columns have no type: each value is kept
as it is. Nothing in a trigger can fail by what the user writes: no constraint, no conversion.

`known` is 1 if at that moment the table's definition was the one that the trigger was made for.
Rows that were written after an ALTER TABLE and before the triggers were made anew are told apart
by it, to the row.

A trigger logs what is in the table at this moment, not what the statement meant to write: the row
as it is now, a delete only if no row has the key. For users have triggers too, which change the
same row again, and whose changes may be logged first: SQLite runs the newest trigger first.
Whatever the order, the last that is logged of a key is then what the table holds.

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
            "insert": ("AFTER INSERT", [*self._gone(), *self._inserted()]),
            "update": ("AFTER UPDATE", [*self._gone(), *self._updated()]),
            "delete": ("AFTER DELETE", [*self._not_victim(), *self._deleted()]),
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

    def _logged(self, op: str, sides: dict[str, str], rest: str) -> list[str]:
        """The next number, and under it the values: `sides` says of what old and new ones are."""
        names = [name for name, *_ in self.definition.columns]
        columns = [quoted(f"{side}_{name}") for side in sides for name in names]
        values = [self.definition.expression(name, of) for of in sides.values() for name in names]
        return [
            f"INSERT INTO {self._changes} (t) VALUES ({self.version})",
            (
                f"INSERT INTO {self._log} (seq, op, at, known, {', '.join(columns)}) SELECT "
                f"last_insert_rowid(), {op}, julianday('now'), {self._known}, "
                f"{', '.join(values)} {rest}"
            ),
        ]

    def _inserted(self) -> list[str]:
        return self._logged(
            str(OP_INSERT), {"new": "x"}, f"FROM {self._table} AS x WHERE {self._is_new_row}"
        )

    def _updated(self) -> list[str]:
        of = self.definition
        missing = f"x.{of.row_name or quoted(of.key[0])} IS NULL"
        same = of.same_key("old", [of.expression(name, "new") for name in of.key])
        op = (
            f"CASE WHEN {missing} THEN {OP_DELETE} "
            f"WHEN NOT ({same}) AND {self._old_is_there} THEN {OP_REREAD} ELSE {OP_UPDATE} END"
        )
        return self._logged(
            op,
            {"old": "old", "new": "x"},
            f"FROM (SELECT 1) LEFT JOIN {self._table} AS x ON {self._is_new_row} "
            f"WHERE NOT ({missing} AND {self._old_is_there})",
        )

    def _deleted(self) -> list[str]:
        return self._logged(str(OP_DELETE), {"old": "old"}, f"WHERE NOT {self._old_is_there}")

    @property
    def _table(self) -> str:
        return quoted(self.definition.name)

    @property
    def _is_new_row(self) -> str:
        of = self.definition
        if of.row_name:
            return f"x.{of.row_name} = new.{of.row_name}"
        return of.same_key("x", [of.expression(name, "new") for name in of.key])

    @property
    def _old_is_there(self) -> str:
        of = self.definition
        same = of.same_key("y", [of.expression(name, "old") for name in of.key])
        return f"EXISTS (SELECT 1 FROM {self._table} AS y WHERE {same})"

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
