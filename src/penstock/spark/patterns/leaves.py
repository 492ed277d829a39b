"""What an expression takes from rows: the leaves between which everything else is arithmetic.

A leaf is a value of **one** row, however it is computed (`upper(A.name)`: Spark computes it for
all rows beforehand), together with how the row is found (FIRST, LAST, PREV over the rows of a
variable), or an aggregate of such values over the rows of a variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from sqlglot import exp

from penstock.spark.patterns.errors import PatternTextError
from penstock.spark.patterns.reading import Text, called, parts, place

AGGREGATES: Final = ("count", "sum", "avg", "min", "max")
MAX_OFFSET: Final = 1_000
_NAVIGATIONS: Final = ("first", "last", "prev", "next")
_OF_MATCHES: Final = ("classifier", "match_number")
# What may have a value although it is given null.
_NOT_STRICT: Final = (
    exp.Is,
    exp.Coalesce,
    exp.Case,
    exp.If,
    exp.And,
    exp.Or,
    exp.NullSafeEQ,
    exp.Least,
    exp.Greatest,
)
# The bits of all variables: a name without a variable means the rows of any.
ALL: Final = (1 << 60) - 1


@dataclass(frozen=True, slots=True)
class Nav:
    """The value of a row that is found from the match: LAST(B.x, offset), PREV(…, back)."""

    sql: str
    mask: int
    first: bool = False
    offset: int = 0
    back: int = 0
    final: bool = False

    @property
    def is_current(self) -> bool:
        return self.mask == ALL and not (self.first or self.offset or self.back)


@dataclass(frozen=True, slots=True)
class Agg:
    """An aggregate over rows of variables; `sql` empty for count(*)."""

    kind: str
    sql: str
    mask: int
    final: bool = False


@dataclass(frozen=True, slots=True)
class Classifier:
    """The name of the variable of a row."""

    at: Nav


@dataclass(frozen=True, slots=True)
class MatchNumber:
    """Which match of the key it is."""


Leaf = Nav | Agg | Classifier | MatchNumber


@dataclass(slots=True)
class Scope:
    """What names mean: variables and their bits, columns of the rows."""

    variables: Mapping[str, int]
    columns: Mapping[str, str]
    # The bit of the variable that is being defined; 0 in measures.
    own: int = 0
    leaves: list[tuple[Leaf, int]] = field(default_factory=list)


@dataclass(slots=True)
class Finder:
    """Finds the leaves of one expression."""

    text: Text
    scope: Scope

    def error(self, problem: str, node: Any, advice: str = "") -> PatternTextError:
        return self.text.error(problem, place(node, self.text), advice=advice)

    def leaf(self, node: Any, *, atoms: bool = False) -> Leaf | None:
        """What a node is if it is a leaf as a whole; None if it is made of several.

        With `atoms` only names and navigations themselves are leaves, not what is computed from
        them. Otherwise all that takes its values from one row is, if either this row is always
        there or what is computed is null without it.
        """
        name, final = called(node)
        if name in _NAVIGATIONS:
            return self._navigation(node, name, bool(final))
        if name in AGGREGATES:
            return self._aggregate(node, name, bool(final))
        if name == "classifier":
            return self._classifier(node)
        if name == "match_number":
            return MatchNumber()
        whole = self._dotted(node)
        if whole is not None:
            return self._normal(whole)
        if isinstance(node, exp.Column):
            return self._normal(Nav(self.row_sql(node), self._mask(node)))
        if atoms:
            return None
        return self._computed(node)

    def _computed(self, node: Any) -> Nav | None:
        found: set[Leaf] = set()
        for each in self._outermost(node):
            leaf = self.leaf(each)
            found.add(replace(leaf, sql="") if isinstance(leaf, Nav) else MatchNumber())
        if len(found) > 1:
            return None
        at = next(iter(found), Nav("", ALL))
        if not isinstance(at, Nav):
            return None
        if not at.is_current and any(isinstance(each, _NOT_STRICT) for each in node.walk()):
            return None
        return replace(at, sql=self.row_sql(self._inner(node)))

    def _outermost(self, node: Any) -> Iterator[Any]:
        """The names and navigations in an expression, not those inside of others."""
        if self._is_atom(node):
            yield node
            return
        for each in node.iter_expressions():
            yield from self._outermost(each)

    def _is_atom(self, node: Any) -> bool:
        name = called(node)[0]
        known = name in _NAVIGATIONS or name in AGGREGATES or name in _OF_MATCHES
        dotted = isinstance(node, exp.Dot) and called(node.this)[0] in {"first", "last"}
        return known or dotted or isinstance(node, exp.Column)

    def _inner(self, node: Any) -> Any:
        """The same with the values of rows in the place of navigations."""
        if called(node)[0] in _NAVIGATIONS:
            return self._inner(node.expressions[0])
        if isinstance(node, exp.Dot) and called(node.this)[0] in {"first", "last"}:
            return exp.column(node.expression.copy())
        made = node.copy()
        for each in list(self._outermost(made)):
            if not isinstance(each, exp.Column):
                each.replace(exp.paren(self._inner(each)))
        return made

    def _normal(self, nav: Nav) -> Nav:
        """The row that a variable is being tried for is the last of all."""
        if nav.mask & self.scope.own and not (nav.first or nav.offset):
            return Nav(nav.sql, ALL, back=nav.back, final=nav.final)
        return nav

    def _mask(self, column: exp.Column) -> int:
        names = parts(column)
        if len(names) > 1 or isinstance(column.this, exp.Star):
            found = self.scope.variables.get(names[0].name.lower())
            if found is not None:
                return found
        return ALL

    def row_sql(self, node: Any) -> str:
        """The same expression over the columns of one row: without the variables."""

        def stripped(each: Any) -> Any:
            if not isinstance(each, exp.Column):
                return each
            names = parts(each)
            if len(names) > 1 and names[0].name.lower() in self.scope.variables:
                names = names[1:]
            self._check(names[0])
            quoted = [exp.to_identifier(name.name, quoted=True) for name in names]
            made: Any = exp.Column(this=quoted[0])
            for name in quoted[1:]:
                made = exp.Dot(this=made, expression=name)
            return made

        return str(node.copy().transform(stripped).sql(dialect="spark", normalize_functions=False))

    def _check(self, name: exp.Identifier) -> None:
        if name.name.lower() in self.scope.columns:
            return
        at = name.meta.get("start", self.text.first())
        if name.name.lower() in self.scope.variables:
            raise self.text.error(
                f"{name.name!r} is a variable, and cannot stand here by itself",
                at,
                advice=f"Its rows can be counted and navigated: count({name.name}.*), "
                f"last({name.name}.x), sum({name.name}.x).",
            )
        known = ", ".join(each for each in self.scope.columns.values() if not each.startswith("_"))
        raise self.text.error(
            f"there is no column {name.name!r}, nor a variable of this name",
            at,
            advice=f"The columns are: {known}; the variables: {', '.join(self.scope.variables)}.",
        )

    def _dotted(self, node: Any) -> Nav | None:
        """`last(b).x`, the same as LAST(b.x)."""
        if not (isinstance(node, exp.Dot) and called(node.this)[0] in {"first", "last"}):
            return None
        arguments = node.this.expressions
        variable = arguments[0] if arguments else None
        if not (isinstance(variable, exp.Column) and len(parts(variable)) == 1):
            raise self.error("this wants the name of a variable, as in last(b).x", node)
        mask = self.scope.variables.get(parts(variable)[0].name.lower())
        if mask is None:
            raise self.error(f"there is no variable {parts(variable)[0].name!r}", node)
        sql = self.row_sql(exp.column(node.expression.copy()))
        return Nav(sql, mask, called(node.this)[0] == "first", self._offset(node.this, 0))

    def _offset(self, node: Any, default: int) -> int:
        if len(node.expressions) < 2:
            return default
        given = node.expressions[1]
        if len(node.expressions) > 2 or not (isinstance(given, exp.Literal) and given.is_int):
            raise self.error("the second argument is a whole number", node)
        number = int(given.this)
        if number > MAX_OFFSET:
            raise self.error(f"at most {MAX_OFFSET} rows can be looked back", node)
        return number

    def _plain(self, node: Any, what: str) -> Nav:
        """The argument of a navigation or an aggregate: values of one variable's rows."""
        masks = {self._mask(each) for each in node.find_all(exp.Column)}
        if len(masks) > 1:
            raise self.error(f"{what} takes columns of one variable, not of several", node)
        for each in node.find_all(exp.Anonymous):
            if called(each)[0] in {*_NAVIGATIONS, *AGGREGATES}:
                raise self.error(f"{called(each)[0].upper()} is not possible inside {what}", each)
        return Nav(self.row_sql(node), next(iter(masks), ALL))

    def _navigation(self, node: Any, name: str, final: bool) -> Leaf:
        if name == "next":
            raise self.error(
                "NEXT looks at a row that is not there yet on a stream",
                node,
                "Put the condition on a variable that comes later, which may use PREV or LAST.",
            )
        if not node.expressions:
            raise self.error(f"{name.upper()} wants a column", node)
        inner = node.expressions[0]
        if called(inner)[0] == "classifier":
            found = self._classifier(inner)
            nav = found.at
        elif name == "prev" and called(inner)[0] in {"first", "last"}:
            within = self._navigation(inner, called(inner)[0], bool(called(inner)[1]))
            assert isinstance(within, Nav)
            back = self._offset(node, 1)
            return Nav(
                within.sql, within.mask, within.first, within.offset, back, within.final or final
            )
        else:
            nav = self._plain(inner, name.upper())
        if name == "prev":
            made = self._normal(Nav(nav.sql, nav.mask, back=self._offset(node, 1), final=final))
        else:
            offset = self._offset(node, 0)
            made = self._normal(Nav(nav.sql, nav.mask, name == "first", offset, final=final))
        return Classifier(made) if called(inner)[0] == "classifier" else made

    def _aggregate(self, node: Any, kind: str, final: bool) -> Leaf:
        if len(node.expressions) != 1:
            raise self.error(f"{kind.upper()} wants one argument", node)
        inner = node.expressions[0]
        if isinstance(inner, exp.Distinct):
            raise self.error("DISTINCT is not possible here", node)
        if isinstance(inner, exp.Star) or isinstance(inner.this, exp.Star):
            if kind != "count":
                raise self.error(f"{kind.upper()} wants a column, not *", node)
            mask = self._mask(inner) if isinstance(inner, exp.Column) else ALL
            return Agg("count", "", mask, final)
        nav = self._plain(inner, kind.upper())
        return Agg(kind, nav.sql, nav.mask, final)

    def _classifier(self, node: Any) -> Classifier:
        if not node.expressions:
            return Classifier(Nav("", ALL))
        named = node.expressions[0]
        name = named.name if isinstance(named, exp.Column) else ""
        mask = self.scope.variables.get(name.lower())
        if mask is None:
            raise self.error(f"CLASSIFIER wants a variable, {name!r} is none", node)
        return Classifier(Nav("", mask))


def replaced(node: Any, finder: Finder, name: Callable[[Leaf, int], str]) -> Any:
    """A copy of an expression with the columns that hold its leaves in their place."""

    def change(each: Any) -> Any:
        found = finder.leaf(each, atoms=True)
        if found is None:
            for key, value in list(each.args.items()):
                if isinstance(value, exp.Expression):
                    each.set(key, change(value))
                elif isinstance(value, list):
                    inner = [change(v) if isinstance(v, exp.Expression) else v for v in value]
                    each.set(key, inner)
            return each
        return exp.column(name(found, place(each, finder.text)))

    return change(node.copy())
