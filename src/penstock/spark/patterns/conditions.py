"""Conditions become two things: what Spark computes beforehand, and a program over numbers.

The parts of a condition that look only at the row itself are one expression, which Spark computes
for all rows at once: a bit for each variable. The other parts compare values of several rows of
the match; they become programs for the stack machine of the kernel. Its values are doubles: exact
for whole numbers up to 2**53 and for times. Text, and large numbers that are only compared, are
replaced by their rank among all values of their type, so that comparing them is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from pyspark.sql import types as T  # noqa: N812
from sqlglot import exp

from penstock.spark.patterns import kernel as K  # noqa: N812
from penstock.spark.patterns.leaves import ALL, Agg, Classifier, Finder, Leaf, MatchNumber, Nav
from penstock.spark.patterns.reading import Text, called, parsed

# The type of an expression over the columns of a row; it raises where there is none.
TypeOf = Callable[[str], T.DataType]

RAW: Final = "raw"
_EXACT_DIGITS: Final = 15
_UNITS_US: Final = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
_AGGREGATES: Final = {"count": K.COUNT, "sum": K.SUM, "avg": K.AVG, "min": K.MIN, "max": K.MAX}
_ARITHMETIC: Final[dict[Any, int]] = {
    exp.Add: K.ADD,
    exp.Sub: K.SUB,
    exp.Mul: K.MUL,
    exp.Div: K.DIV,
    exp.Mod: K.MOD,
}
# The operation, and whether its sides are swapped.
_COMPARISONS: Final[dict[Any, tuple[int, bool]]] = {
    exp.EQ: (K.EQ, False),
    exp.NEQ: (K.NE, False),
    exp.LT: (K.LT, False),
    exp.LTE: (K.LE, False),
    exp.GT: (K.LT, True),
    exp.GTE: (K.LE, True),
    exp.NullSafeEQ: (K.SAME, False),
}


def interval_us(node: exp.Interval) -> int | None:
    """An interval of a fixed length, microseconds; None for months and nonsense."""
    unit = node.args.get("unit")
    name = str(unit.name if unit is not None else "").lower().rstrip("s")
    try:
        amount = float(node.this.name)
    except (AttributeError, ValueError):
        return None
    return round(amount * _UNITS_US[name]) if name in _UNITS_US else None


@dataclass(frozen=True, slots=True)
class Column:
    """A value of each row that programs use, and how it becomes a number.

    `encoding` is "raw" or the type among whose values its rank is taken.
    """

    sql: str
    encoding: str


@dataclass(slots=True)
class Programs:
    """The programs of all conditions of a pattern, one after the other."""

    ops: list[list[int]] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)
    # Text stands for its rank, which is known when the rows are.
    constants: list[float | str] = field(default_factory=list)

    def column(self, sql: str, encoding: str) -> int:
        made = Column(sql, encoding)
        if made not in self.columns:
            self.columns.append(made)
        return self.columns.index(made)

    def constant(self, value: float | str) -> int:
        self.constants.append(value)
        return len(self.constants) - 1

    def array(self) -> npt.NDArray[np.int64]:
        return np.array(self.ops or [[0] * 6], dtype=np.int64).reshape(-1, 6)


@dataclass(frozen=True, slots=True)
class Condition:
    """What a variable's condition became."""

    # For the row itself, an expression of Spark; empty if there is none.
    static: str
    # Where its program begins; -1 if there is none.
    start: int
    # What it looks at in other rows.
    leaves: tuple[Leaf, ...]


def condition(text: Text, finder: Finder, programs: Programs, type_of: TypeOf) -> Condition:
    """Split a condition into what looks at the row itself and what does not, and compile that."""
    static, others = [], []
    for part in _conjuncts(parsed(text)):
        leaf = finder.leaf(part)
        if isinstance(leaf, Nav) and leaf.is_current:
            found = type_of(leaf.sql)
            if not isinstance(found, T.BooleanType | T.NullType):
                raise finder.error(f"a condition is true or false, this is {_name(found)}", part)
            static.append(f"({leaf.sql})")
        else:
            others.append(part)
    if not others:
        return Condition(" AND ".join(static), -1, ())
    start = len(programs.ops)
    programs.ops.append([0] * 6)
    emitter = Emitter(finder, programs, type_of)
    for number, part in enumerate(others):
        kind = emitter.emit(part)
        if kind not in {"bool", "null"}:
            raise finder.error("a condition is true or false, this is neither", part)
        if number:
            emitter.op(K.AND, takes=2)
    programs.ops[start][1] = len(programs.ops) - start - 1
    return Condition(" AND ".join(static), start, tuple(emitter.leaves))


def _conjuncts(node: Any) -> list[Any]:
    inner = node.unnest()
    if isinstance(inner, exp.And):
        return [*_conjuncts(inner.this), *_conjuncts(inner.expression)]
    return [inner]


def _name(found: T.DataType) -> str:
    return str(found.simpleString())


@dataclass(slots=True)
class Emitter:
    """Writes the program of an expression; each method gives the kind of value it leaves."""

    finder: Finder
    programs: Programs
    type_of: TypeOf
    leaves: list[Leaf] = field(default_factory=list)
    depth: int = 0

    def op(self, op: int, *arguments: int, takes: int = 0) -> None:
        self.depth += 1 - takes
        if self.depth > K.STACK - 2:
            raise self.finder.text.error("this condition is too complicated")
        self.programs.ops.append([op, *arguments, *[0] * (5 - len(arguments))])

    def emit(self, node: Any, encoding: str | None = None) -> str:
        node = node.unnest()
        simple = self._simple(node, encoding)
        if simple is not None:
            return simple
        leaf = self.finder.leaf(node)
        if leaf is not None:
            return self._leaf(leaf, node, encoding)
        if type(node) in _COMPARISONS:
            return self._comparison(node)
        if type(node) in _ARITHMETIC:
            return self._arithmetic(node)
        if isinstance(node, exp.And | exp.Or):
            self._boolean(node.this)
            self._boolean(node.expression)
            self.op(K.AND if isinstance(node, exp.And) else K.OR, takes=2)
            return "bool"
        if isinstance(node, exp.Not):
            self._boolean(node.this)
            self.op(K.NOT, takes=1)
            return "bool"
        return self._rarer(node)

    def _simple(self, node: Any, encoding: str | None) -> str | None:
        if isinstance(node, exp.Literal) and not node.is_string:
            self.op(K.CONST, self.programs.constant(float(node.this)))
            return "number"
        if isinstance(node, exp.Literal) and encoding == "string":
            self.op(K.CONST, self.programs.constant(str(node.this)))
            return "string"
        if isinstance(node, exp.Boolean):
            self.op(K.CONST, self.programs.constant(1.0 if node.this else 0.0))
            return "bool"
        if isinstance(node, exp.Null):
            self.op(K.NULL)
            return "null"
        if isinstance(node, exp.Interval):
            length = interval_us(node)
            if length is None:
                raise self.finder.error("an interval of a fixed length is needed here", node)
            self.op(K.CONST, self.programs.constant(float(length)))
            return "interval"
        if isinstance(node, exp.Neg) and self.finder.leaf(node) is None:
            kind = self.emit(node.this)
            self.op(K.NEG, takes=1)
            return kind
        return None

    def _boolean(self, node: Any) -> None:
        if self.emit(node) not in {"bool", "null"}:
            raise self.finder.error("this is neither true nor false", node)

    def _rarer(self, node: Any) -> str:
        if isinstance(node, exp.Between):
            low = exp.GTE(this=node.this.copy(), expression=node.args["low"].copy())
            high = exp.LTE(this=node.this.copy(), expression=node.args["high"].copy())
            return self.emit(exp.And(this=low, expression=high))
        if isinstance(node, exp.In) and node.expressions:
            made: Any = exp.false()
            for each in node.expressions:
                equal = exp.EQ(this=node.this.copy(), expression=each.copy())
                made = equal if isinstance(made, exp.Boolean) else exp.Or(
                    this=made, expression=equal
                )  # fmt: skip
            return self.emit(made)
        if isinstance(node, exp.Is) and isinstance(node.expression, exp.Null):
            self.emit(node.this)
            self.op(K.IS_NULL, takes=1)
            return "bool"
        if isinstance(node, exp.Abs):
            kind = self.emit(node.this)
            self.op(K.ABS, takes=1)
            return kind
        if isinstance(node, exp.Coalesce | exp.Least | exp.Greatest):
            return self._folded(node)
        if isinstance(node, exp.Case) and node.this is None:
            return self._case(node)
        raise self.finder.error(
            f"{node.key.upper()} over the values of several rows is not possible",
            node,
            "Possible are comparisons, arithmetic, AND, OR, NOT, BETWEEN, IN, IS NULL, CASE, ABS, "
            "COALESCE, LEAST and GREATEST; any function of Spark over the values of one row.",
        )

    def _folded(self, node: Any) -> str:
        folds: dict[Any, int] = {
            exp.Coalesce: K.COALESCE,
            exp.Least: K.LEAST,
            exp.Greatest: K.GREATEST,
        }
        op = folds[type(node)]
        kind = self.emit(node.this)
        for each in node.expressions:
            self._same(kind, self.emit(each), node)
            self.op(op, takes=2)
        return kind

    def _case(self, node: exp.Case) -> str:
        ways = node.args["ifs"]
        kind = "null"
        for each in ways:
            self._boolean(each.this)
            kind = self.emit(each.args["true"])
        default = node.args.get("default")
        self.emit(default if default is not None else exp.null())
        for _ in ways:
            self.op(K.IF, takes=3)
        return kind

    def _same(self, a: str, b: str, node: Any) -> None:
        if a != b and "null" not in {a, b}:
            raise self.finder.error(f"{a} and {b} do not go together here", node)

    def _arithmetic(self, node: Any) -> str:
        a, b = self.emit(node.this), self.emit(node.expression)
        self.op(_ARITHMETIC[type(node)], takes=2)
        kinds = {a, b} - {"null"}
        if kinds <= {"number"}:
            return "number"
        if isinstance(node, exp.Sub) and a == b and a in {"time", "interval"}:
            return "interval"
        if isinstance(node, exp.Add | exp.Sub) and (a, b) == ("time", "interval"):
            return "time"
        if isinstance(node, exp.Add) and (a, b) == ("interval", "interval"):
            return "interval"
        if isinstance(node, exp.Mul | exp.Div) and kinds == {"interval", "number"}:
            return "interval"
        raise self.finder.error(f"{a} and {b} cannot be computed with like this", node)

    def _comparison(self, node: Any) -> str:
        op, swapped = _COMPARISONS[type(node)]
        sides = [node.expression, node.this] if swapped else [node.this, node.expression]
        encoding = self._rank(sides)
        kinds = [self.emit(each, encoding) for each in sides]
        self._same(kinds[0], kinds[1], node)
        self.op(op, takes=2)
        return "bool"

    def _rank(self, sides: list[Any]) -> str | None:
        """The type by whose ranks two sides are compared; None for numbers."""
        types = []
        for side in sides:
            leaf = None if isinstance(side.unnest(), exp.Literal) else self.finder.leaf(side)
            if isinstance(leaf, Nav) or (isinstance(leaf, Agg) and leaf.kind in {"min", "max"}):
                types.append(self.type_of(leaf.sql))
        names = {_name(each) for each in types}
        if len(types) == 2 and len(names) == 1 and isinstance(types[0], T.LongType | T.DecimalType):
            return names.pop()
        plain = T.NumericType | T.BooleanType | T.TimestampType | T.TimestampNTZType | T.DateType
        ranked = [each for each in types if not isinstance(each, plain)]
        return _name(ranked[0]) if ranked else None

    def _leaf(self, leaf: Leaf, node: Any, encoding: str | None) -> str:
        if isinstance(leaf, Classifier | MatchNumber):
            raise self.finder.error(
                "CLASSIFIER and MATCH_NUMBER are for measures, not for conditions", node
            )
        self.leaves.append(leaf)
        if isinstance(leaf, Agg) and not leaf.sql:
            self.op(K.AGG, -1, leaf.mask, K.COUNT)
            return "number"
        kind, column = self._column(leaf, node, encoding)
        if isinstance(leaf, Agg):
            self.op(K.AGG, column, leaf.mask, _AGGREGATES[leaf.kind])
            return "number" if leaf.kind == "count" else kind
        direction = K.FIRST if leaf.first else K.LAST
        self.op(K.NAV, column, leaf.mask, direction, leaf.offset, leaf.back)
        return kind

    def _column(self, leaf: Nav | Agg, node: Any, encoding: str | None) -> tuple[str, int]:
        found = self.type_of(leaf.sql)
        name = _name(found)
        summed = isinstance(leaf, Agg) and leaf.kind in {"sum", "avg"}
        if summed and not isinstance(found, T.NumericType):
            raise self.finder.error(f"{leaf.kind.upper()} of {name} is not possible", node)  # type: ignore[union-attr]
        if isinstance(leaf, Agg) and leaf.kind == "count":
            return "number", self.programs.column(f"isnotnull({leaf.sql}) or null", RAW)
        if encoding == name:
            return name if name == "string" else _kind(found) or name, self.programs.column(
                leaf.sql, encoding
            )
        kind = _kind(found)
        if kind is None:
            raise self.finder.error(
                f"{name} can be compared with {name} of another row, and nothing else", node
            )
        return kind, self.programs.column(leaf.sql, RAW)


def _kind(found: T.DataType) -> str | None:
    """What a value of a type is as a number; None if it is none."""
    if isinstance(found, T.NumericType):
        return "number"
    if isinstance(found, T.BooleanType):
        return "bool"
    if isinstance(found, T.TimestampType | T.TimestampNTZType):
        return "time"
    if isinstance(found, T.DateType):
        return "date"
    return "null" if isinstance(found, T.NullType) else None


def depends_on_path(leaf: Leaf, anchor: int) -> bool:
    """Whether a value depends on more than the row itself and the first row of the match."""
    if isinstance(leaf, Nav):
        own = leaf.mask == ALL and not leaf.first and not leaf.offset
        return not (own or (anchor and leaf.mask == anchor))
    return True


__all__ = ["Column", "Condition", "Programs", "called", "condition", "depends_on_path"]
