"""What an ALTER TABLE has changed, told by two published schemas of a table."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.client.table_schemas import TableColumn, TableSchema


@dataclass(frozen=True, slots=True)
class TableChange:
    """The difference of two schemas of a table."""

    table: str
    added: tuple[TableColumn, ...] = ()
    gone: tuple[TableColumn, ...] = ()
    # As they were, and as they are.
    retyped: tuple[tuple[TableColumn, TableColumn], ...] = ()
    old_key: tuple[str, ...] = ()
    key: tuple[str, ...] = ()

    @property
    def lost(self) -> frozenset[str]:
        """Columns that do not have the values any more that they had."""
        return frozenset(
            [*(each.name for each in self.gone), *(new.name for _, new in self.retyped)]
        )

    def __str__(self) -> str:
        """In the words of the database."""
        parts = [f"column {_shown(each)} is new" for each in self.added]
        renamed = self._renamed()
        parts += [
            f"column {each.name} is gone"
            + (f" (renamed to {renamed[each.name]}?)" if each.name in renamed else "")
            for each in self.gone
        ]
        parts += [
            f"column {new.name} was {_type(old)} and is {_type(new)}" for old, new in self.retyped
        ]
        if self.key != self.old_key:
            parts.append(f"its key was ({', '.join(self.old_key)}) and is ({', '.join(self.key)})")
        return f"table {self.table} was altered: {', '.join(parts)}"

    def _renamed(self) -> dict[str, str]:
        """What may be a column under another name: one that went as one of its type came."""
        if len(self.gone) != 1 or len(self.added) != 1:
            return {}
        [old], [new] = self.gone, self.added
        return {old.name: new.name} if (old.type, old.native) == (new.type, new.native) else {}

    @property
    def snapshot_advice(self) -> str:
        """How rows that have got a value by a default come into the log; empty if there are none.

        A database gives such rows their value without changing them, so no event tells of it. They
        are those that have a value in the new column.
        """
        if not self.added:
            return ""
        where = " OR ".join(f"{each.name} IS NOT NULL" for each in self.added)
        return (
            "Rows that were there have null in it here. If it has a default, read those rows "
            f'again: `penstock capture snapshot {self.table} --where "{where}"`.'
        )


def compare(old: TableSchema, new: TableSchema) -> TableChange | None:
    """What has changed for readers; None if nothing has."""
    before = {each.name: each for each in old.columns}
    after = {each.name: each for each in new.columns}
    change = TableChange(
        new.table,
        tuple(each for each in new.columns if each.name not in before),
        tuple(each for each in old.columns if each.name not in after),
        tuple(
            (each, after[each.name])
            for each in old.columns
            if each.name in after and _differs(each, after[each.name])
        ),
        old.key,
        new.key,
    )
    return change if change.added or change.lost or old.key != new.key else None


def _differs(old: TableColumn, new: TableColumn) -> bool:
    return old.type != new.type or bool(old.native and new.native and old.native != new.native)


def _type(column: TableColumn) -> str:
    return column.native or str(column.type)


def _shown(column: TableColumn) -> str:
    return f"{column.name} ({_type(column)})"
