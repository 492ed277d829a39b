"""A view from SQL: SELECT over changelogs, as a plan; or why it cannot be kept up to date.

Taken are filters, projections, inner and left joins on equality, GROUP BY with count, sum, avg,
min, max and count(DISTINCT), HAVING, DISTINCT, UNION [ALL], derived tables and WITH. Whatever needs
all rows to place one (ORDER BY, LIMIT, windows), or cannot be taken back (now(), rand()), is
refused, with its place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from sqlglot import exp

from penstock.spark.views import unread
from penstock.spark.views.expressions import Expression
from penstock.spark.views.plan import (
    Filter,
    Group,
    Join,
    Node,
    Project,
    Result,
    Table,
    Union,
    column,
    columns,
    flat,
)
from penstock.spark.views.refusing import DIALECT, Text
from penstock.spark.views.scope import Scope, aggregate, conjuncts, placed

# Deeper nesting than anyone writes.
MAX_DEPTH: Final = 50
# Kinds of joins that are not refused for a reason of their own.
_JOINS: Final = frozenset({"", "INNER", "OUTER", "CROSS"})


@dataclass(frozen=True, slots=True)
class Schema:
    """What is known of a table: its columns and its primary key."""

    columns: tuple[str, ...]
    key: tuple[str, ...]


def plan(sql: str | Text, tables: Mapping[str, Schema]) -> Node:
    """The plan of a SELECT over these tables; ViewError, with the place, if it cannot be."""
    text = Text(sql) if isinstance(sql, str) else sql
    try:
        tree = text.query()
        unread.check(text, tree)
        return Planner(text, tables).query(tree, "", {}, 0)
    except RecursionError:
        raise text.too_deep() from None


def tables_in(text: Text) -> list[str]:
    """The tables that a SELECT reads, in the order of their first mention."""
    tree = text.query()
    own = {each.alias.lower() for each in tree.find_all(exp.CTE)}
    found = [_table_name(each) for each in tree.find_all(exp.Table)]
    return [each for each in dict.fromkeys(found) if each.lower() not in own]


def _table_name(table: exp.Table) -> str:
    return ".".join(part.name for part in table.parts)


def _arg(node: Expression, name: str) -> Any:
    """A part of a node; newer parsers write names that Python reserves with an underscore."""
    return node.args.get(name) or node.args.get(f"{name}_")


@dataclass(frozen=True, slots=True)
class _Named:
    """A query of WITH: the names it gives to its columns, if any, and what it may read itself."""

    query: Expression
    alias: Expression
    known: Mapping[str, _Named]


class Planner:
    """Plans the queries of one text."""

    def __init__(self, text: Text, tables: Mapping[str, Schema]) -> None:
        self._text = text
        self._tables = tables

    # ---- queries -------------------------------------------------------------------------

    def query(self, node: Expression, prefix: str, known: Mapping[str, _Named], depth: int) -> Node:
        """A query whose columns are named with a prefix; `known` are those of WITH."""
        if depth > MAX_DEPTH:
            self._text.refuse(node, "queries are nested too deeply", "Make two views of it.")
        known = self._with(node, known)
        if isinstance(node, exp.Subquery):
            return self.query(node.this, prefix, known, depth + 1)
        if isinstance(node, exp.Union):
            return self._union(node, prefix, known, depth)
        if isinstance(node, exp.SetOperation):
            self._text.refuse(node, f"{node.key.upper()} is not taken", "Use a join.")
        if not isinstance(node, exp.Select):
            self._text.refuse(node, "this is no SELECT", "A view is a SELECT over tables.")
        return _Select(self, self._text, node, prefix, known, depth).plan()

    def _with(self, node: Expression, known: Mapping[str, _Named]) -> Mapping[str, _Named]:
        clause = _arg(node, "with")
        if clause is None:
            return known
        if clause.args.get("recursive"):
            self._text.refuse(clause, "recursive queries cannot be maintained")
        for each in clause.expressions:
            # Each may read those before it, and none after it.
            known = {**known, each.alias.lower(): _Named(each.this, each.args["alias"], known)}
        return known

    def _union(
        self,
        node: exp.Union,
        prefix: str,
        known: Mapping[str, _Named],
        depth: int,
    ) -> Node:
        sides = []
        for side in (node.left, node.right):
            made = self.query(side, prefix, known, depth + 1)
            if isinstance(made, Union):
                sides.append(list(made.inputs))
            else:
                sides.append([made if isinstance(made, Project) else _all_of(made, prefix)])
        left, right = sides
        width, other = len(left[0].outputs), len(right[0].outputs)
        if other != width:
            self._text.refuse(
                node.right, f"a UNION has {width} columns on one side and {other} on the other"
            )
        if node.args.get("by_name"):
            right = self._by_name(node, columns(left[0]), right)
        united = Union((*left, *right), prefix)
        return _distinct(united) if node.args.get("distinct") else united

    def _by_name(
        self, node: exp.Union, names: Sequence[str], parts: Sequence[Project]
    ) -> list[Project]:
        """The right side of a union with its columns in the order of the left one's names."""
        own = [name.lower() for name in columns(parts[0])]
        wanted = [name.lower() for name in names]
        if missing := next((name for name in names if name.lower() not in own), None):
            self._text.refuse(node.right, f"this side of UNION BY NAME has no column {missing}",
                              "Give both sides columns of the same names.")  # fmt: skip
        order = [own.index(name) for name in wanted]
        return [replace(each, outputs=tuple(each.outputs[at] for at in order)) for each in parts]

    def table(
        self, node: Expression, known: Mapping[str, _Named], depth: int
    ) -> tuple[str, Node, tuple[str, ...]]:
        """What stands in FROM or JOIN: its alias, its relation and its columns."""
        if isinstance(node, exp.Subquery):
            if not node.alias:
                self._text.refuse(node, "a derived table needs a name", "Write (SELECT ...) AS t.")
            made = self.query(node, node.alias, known, depth + 1)
            return self._renamed(made, node.alias, node.args["alias"])
        if not isinstance(node, exp.Table) or not isinstance(node.this, exp.Identifier):
            self._text.refuse(node, "only tables and derived tables can be read from")
        name = _table_name(node)
        alias = node.alias or node.name
        if (own := known.get(name.lower())) is not None:
            made = self.query(own.query, alias, own.known, depth + 1)
            _, made, _ = self._renamed(made, alias, own.alias)
            return self._renamed(made, alias, node.args.get("alias"))
        found = next((each for each in self._tables if each.lower() == name.lower()), None)
        if found is None:
            there = ", ".join(self._tables) or "none"
            self._text.refuse(node, f"there is no table {name}", f"Known are: {there}.")
        schema = self._tables[found]
        table = Table(found, alias, schema.key, schema.columns)
        return self._renamed(table, alias, node.args.get("alias"))

    def _renamed(
        self, node: Node, alias: str, named: Expression | None
    ) -> tuple[str, Node, tuple[str, ...]]:
        """With the names that an alias gives to columns, as in t(a, b)."""
        own = tuple(each.removeprefix(f"{alias}.") for each in columns(node))
        given = named.args.get("columns") if named is not None else None
        if not given:
            return alias, node, own
        names = tuple(each.name for each in given)
        if len(names) != len(own):
            self._text.refuse(given[0], f"{alias} has {len(own)} columns, and here are "
                              f"{len(names)} names", "Name each of them once.")  # fmt: skip
        if len({each.lower() for each in names}) < len(names):
            self._text.refuse(given[0], "two columns have the same name", "Name each in its way.")
        outputs = ((flat(alias, new), column(flat(alias, old)))
                   for new, old in zip(names, own, strict=True))  # fmt: skip
        return alias, Project(node, tuple(outputs), alias), names


def _all_of(node: Node, prefix: str) -> Project:
    return Project(node, tuple((name, column(name)) for name in columns(node)), prefix)


def _distinct(node: Node) -> Group:
    first = node.inputs[0] if isinstance(node, Union) else node
    written = dict(first.outputs) if isinstance(first, Project) else {}
    by = ((each, placed(column(each), written.get(each, column(each)))) for each in columns(node))
    return Group(node, tuple(by), ())


class _Select:
    """One SELECT on its way to a plan."""

    def __init__(
        self,
        planner: Planner,
        text: Text,
        node: exp.Select,
        prefix: str,
        known: Mapping[str, _Named],
        depth: int,
    ) -> None:
        self._planner = planner
        self._text = text
        self._node = node
        self._prefix = prefix
        self._known = known
        self._depth = depth
        self._scope = Scope(text)
        # Conditions that stay for later, and tables whose rows may be missing (left joins).
        self._later: list[Expression] = []
        self._optional: set[str] = set()
        self._parts: dict[str, Node] = {}

    def plan(self) -> Node:
        node = self._node
        source = _arg(node, "from")
        if source is None:
            self._text.refuse(node, "a view needs a table to read from", "Add FROM.")
        joins = [*(node.args.get("joins") or [])]
        first = self._read(source.this)
        steps = [(each, self._read(each.this)) for each in joins]
        where = node.args.get("where")
        if where is not None:
            self._later += conjuncts(self._scope.resolved(where.this))
        self._optional = {alias for each, alias in steps if each.side == "LEFT"}
        keys = [self._conditions(each, alias, at) for at, (each, alias) in enumerate(steps)]
        self._push_down()
        rows = self._parts[first]
        for (each, alias), on in zip(steps, keys, strict=True):
            how = "left" if each.side == "LEFT" else "inner"
            rows = Join(rows, self._parts[alias], tuple(on), how)  # type: ignore[arg-type]
        for condition in self._later:
            rows = Filter(rows, condition)
        return self._shown(rows)

    def _read(self, node: Expression) -> str:
        alias, rows, names = self._planner.table(node, self._known, self._depth)
        if alias.lower() in map(str.lower, self._parts):
            self._text.refuse(node, f"two tables are called {alias}",
                              "Give one another name, with AS.")  # fmt: skip
        self._parts[alias] = rows
        self._scope.add(alias, names)
        return alias

    # ---- joins ---------------------------------------------------------------------------

    def _conditions(
        self, join: exp.Join, alias: str, at: int
    ) -> list[tuple[Expression, Expression]]:
        """The equalities of a join; its other conditions go where they belong."""
        self._check_join(join)
        before = set(list(self._parts)[: at + 1])
        optional = alias in self._optional
        keys: list[tuple[Expression, Expression]] = []
        if join.args.get("using"):
            for each in join.args["using"]:
                self._scope.merged.add(each.name.lower())
                earlier = Scope(self._text, {a: c for a, c in self._scope.tables.items()
                                             if a in before}, self._scope.merged)  # fmt: skip
                own = Scope(self._text, {alias: self._scope.tables[alias]})
                name = exp.column(each.copy())
                keys.append((earlier.resolved(name), own.resolved(name)))
            return keys
        on = join.args.get("on")
        candidates = [] if on is None else conjuncts(self._scope.resolved(on))
        if on is None:
            # Tables with commas between them: their equalities are in WHERE.
            candidates, self._later = self._later, []
        only_left: list[Expression] = []
        for each in candidates:
            pair = self._equality(each, before, alias)
            about = self._scope.where_of(each)
            if pair is not None:
                keys.append(pair)
            elif about <= {alias} and (on is not None or not optional):
                self._parts[alias] = Filter(self._parts[alias], each)
            elif not optional:
                self._later.append(each)
            elif about <= before:
                only_left.append(each)
            else:
                self._text.refuse(
                    each,
                    "a left join can be maintained on equalities only",
                    "Put the condition into WHERE, or make the join an inner one.",
                )
        if not keys:
            self._no_keys(join, candidates if on is not None else [])
        if only_left:
            # A left row for which it does not hold finds nothing: as with a key of null.
            first, other = keys[0]
            keys[0] = exp.case().when(exp.and_(*only_left), first), other
        return keys

    def _no_keys(self, join: exp.Join, conditions: Sequence[Expression]) -> None:
        self._text.refuse(
            conditions[0] if conditions else join,
            "a join without an equality of both sides cannot be maintained by key: each change "
            "would have to be compared with all rows",
            "Join ON a.x = b.y; other conditions may stand beside it.",
        )

    def _check_join(self, join: exp.Join) -> None:
        side, kind = str(join.side or "").upper(), str(join.kind or "").upper()
        if side == "RIGHT":
            self._text.refuse(self._text.keyword("RIGHT", join), "right joins are not taken",
                              "Write the tables the other way round, with LEFT JOIN.")  # fmt: skip
        if side == "FULL":
            at = self._text.keyword("FULL", join)
            self._text.refuse(at, "full outer joins are not maintained", "Unite two left joins.")
        if kind in {"SEMI", "ANTI"}:
            self._text.refuse(
                self._text.keyword(kind, join),
                f"{kind} joins are not maintained",
                "Join with SELECT DISTINCT of the key, or use a left join.",
            )
        other = join.args.get("method") or (kind if kind not in _JOINS else "")
        if other or side not in {"", "LEFT"}:
            self._text.refuse(join, f"{other or side} joins are not taken", "Say ON.")

    def _equality(
        self, condition: Expression, before: set[str], alias: str
    ) -> tuple[Expression, Expression] | None:
        while isinstance(condition, exp.Paren):
            condition = condition.this
        if not isinstance(condition, exp.EQ):
            return None
        one, other = condition.this, condition.expression
        of_one, of_other = self._scope.where_of(one), self._scope.where_of(other)
        if of_one and of_one <= before and of_other == {alias}:
            return one, other
        if of_other and of_other <= before and of_one == {alias}:
            return other, one
        return None

    def _push_down(self) -> None:
        """Conditions on one table are checked where it is read."""
        stay = []
        for each in self._later:
            about = self._scope.where_of(each)
            if len(about) == 1 and not about & self._optional:
                [alias] = about
                self._parts[alias] = Filter(self._parts[alias], each)
            else:
                stay.append(each)
        self._later = stay

    # ---- columns -------------------------------------------------------------------------

    def _shown(self, rows: Node) -> Node:
        outputs = self._outputs()
        having = self._node.args.get("having")
        grouped = self._node.args.get("group") is not None or having is not None
        if grouped or any(self._has_aggregate(each) for _, each in outputs):
            made: Node = _Grouping(self._text, self._scope, self._node, outputs).plan(
                rows, self._prefix
            )
        else:
            resolved = [
                (flat(self._prefix, name), self._scope.resolved(each)) for name, each in outputs
            ]
            made = Project(rows, tuple(resolved), self._prefix)
        distinct = self._node.args.get("distinct")
        if distinct is None:
            return made
        if distinct.args.get("on"):
            self._text.refuse(distinct, "DISTINCT ON cannot be maintained", "Use GROUP BY.")
        return _distinct(made)

    def _has_aggregate(self, expression: Expression) -> bool:
        found = expression.find_all(exp.AggFunc)
        return any(not isinstance(each.parent, exp.Window) for each in found)

    def _outputs(self) -> list[tuple[str, Expression]]:
        found: list[tuple[str, Expression]] = []
        for each in self._node.expressions:
            if isinstance(each, exp.Star) or (
                isinstance(each, exp.Column) and isinstance(each.this, exp.Star)
            ):
                found += self._star(each)
                continue
            if isinstance(each, exp.Aliases):
                self._text.refuse(each, "a column has one name", "Write one name behind AS.")
            inner = each.unalias()
            name = each.alias or each.output_name
            self._scope.check(inner)
            if not name:
                self._text.refuse(each, "this column has no name", "Give it one, with AS.")
            found.append((name, inner))
        for name, each in found:
            if name.startswith("_"):
                self._text.refuse(each, f"a column cannot be called {name}",
                                  "Names with _ before them are Penstock's own.")  # fmt: skip
        names = [name.lower() for name, _ in found]
        for (name, _), each in zip(found, names, strict=True):
            if names.count(each) > 1:
                self._text.refuse(self._node, f"two columns are called {name}",
                                  "Give one another name, with AS.")  # fmt: skip
        return found

    def _star(self, star: Expression) -> list[tuple[str, Expression]]:
        wanted = star.args["table"].name if isinstance(star, exp.Column) else None
        if isinstance(star, exp.Column) and star.args.get("db"):
            self._text.refuse(star, "the fields of a struct are not taken by *", "Name them.")
        if wanted is not None and wanted not in self._scope.tables:
            self._text.refuse(star, f"there is no table {wanted}",
                              f"There are {', '.join(self._scope.tables)}.")  # fmt: skip
        found = [
            (name, placed(exp.column(name, table=alias, quoted=True), star))
            for alias, columns in self._scope.tables.items()
            if wanted in {None, alias}
            for name in columns
            if wanted is not None
            or name.lower() not in self._scope.merged
            or alias == next(a for a, c in self._scope.tables.items() if name in c)
        ]
        left_out = set()
        for each in _arg(star.this if isinstance(star, exp.Column) else star, "except") or []:
            name = each.name.lower()
            if getattr(each, "table", "") or name not in {own.lower() for own, _ in found}:
                self._text.refuse(each, f"* has no column {each.sql(dialect=DIALECT)}",
                                  f"It has {', '.join(own for own, _ in found)}.")  # fmt: skip
            left_out.add(name)
        return [(name, each) for name, each in found if name.lower() not in left_out]


class _Grouping:
    """The aggregates of a SELECT: what rows are grouped by, and what is said of a group."""

    def __init__(
        self,
        text: Text,
        scope: Scope,
        node: exp.Select,
        outputs: Sequence[tuple[str, Expression]],
    ) -> None:
        self._text = text
        self._scope = scope
        self._node = node
        self._outputs = outputs
        self._by: dict[str, tuple[str, Expression]] = {}
        self._results: dict[str, Result] = {}

    def plan(self, rows: Node, prefix: str) -> Node:
        for each in self._group_expressions():
            resolved = self._scope.resolved(each)
            self._by.setdefault(resolved.sql(), (f"_group{len(self._by)}", resolved))
        shown = [(flat(prefix, name), self._of_group(each)) for name, each in self._outputs]
        having = self._node.args.get("having")
        condition = self._of_group(self._aliased(having.this)) if having is not None else None
        node: Node = Group(rows, tuple(self._by.values()), tuple(self._results.values()))
        if condition is not None:
            node = Filter(node, condition)
        return Project(node, tuple(shown), prefix)

    def _group_expressions(self) -> list[Expression]:
        group = self._node.args.get("group")
        if group is None:
            return []
        if group.args.get("all"):
            return [each for _, each in self._outputs if not list(each.find_all(exp.AggFunc))]
        return [self._ordinal(self._aliased(each)) for each in group.expressions]

    def _ordinal(self, each: Expression) -> Expression:
        if isinstance(each, exp.Literal) and each.is_int:
            number = int(each.name)
            if not 1 <= number <= len(self._outputs):
                self._text.refuse(each, f"there is no column {number} to group by")
            return self._outputs[number - 1][1]
        return each

    def _aliased(self, expression: Expression) -> Expression:
        """With names of the SELECT put in for what they stand for, unless tables have them."""
        names = {name.lower(): each for name, each in self._outputs}
        own = {name.lower() for columns in self._scope.tables.values() for name in columns}

        def put(node: Expression) -> Expression:
            if isinstance(node, exp.Column) and not node.table and node.name.lower() not in own:
                found = names.get(node.name.lower())
                return found.copy() if found is not None else node
            return node

        found = expression.copy().transform(put)
        assert isinstance(found, Expression)
        return found

    def _of_group(self, expression: Expression) -> Expression:
        """An expression in terms of the group's columns."""
        resolved = self._scope.resolved(expression)

        def put(node: Expression) -> Expression:
            text = node.sql()
            if text in self._by:
                return placed(column(self._by[text][0]), node)
            found = aggregate(node, f"_result{len(self._results)}", self._text)
            if found is not None:
                kept = self._results.setdefault(text, found)
                return placed(column(kept.name), node)
            if isinstance(node, exp.Column):
                shown = node.meta.get("shown", node.name)
                self._text.refuse(node, f"column {shown} is neither grouped by nor aggregated",
                                  f"Add it to GROUP BY, or use max({shown}).")  # fmt: skip
            return node

        found = resolved.transform(put)
        assert isinstance(found, Expression)
        return found
