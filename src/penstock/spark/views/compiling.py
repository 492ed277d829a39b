"""A plan into stages: what rows need by themselves is the engine's, what takes state is ours.

The engine (`Engine`) is Spark; anything that can filter, project and unite tables will do. Between
stages rows have a column that says whether they go or come. Only columns that are needed later
travel, and a table that is joined by its primary key needs no stage before the join.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, Generic, Protocol, TypeVar

import pyarrow as pa
from sqlglot import exp

from penstock.spark.state import Operator
from penstock.spark.views import set_aside
from penstock.spark.views.aggregating import Aggregate, Aggregated, AggregateError
from penstock.spark.views.columns import DELETED, PRESENT, SIGN, shown
from penstock.spark.views.expressions import Expression
from penstock.spark.views.joining import LEFT, RIGHT, Side
from penstock.spark.views.joining import Join as JoinRows
from penstock.spark.views.netting import INPUT, Latest, Net
from penstock.spark.views.plan import (
    ALL,
    Filter,
    Group,
    Join,
    Node,
    Project,
    Result,
    Table,
    Union,
    as_column,
    carried,
    column,
    columns,
    columns_in,
    identity,
    key_of,
    named_key,
    written,
)
from penstock.spark.views.refusing import ViewError, located, place_of
from penstock.spark.views.scope import conjuncts

ORDER: Final = ("_topic", "_partition", "_offset")
# Columns that rows have besides those of their relation.
_MARKS: Final = frozenset({SIGN, PRESENT, *ORDER, *set_aside.COLUMNS})
# The whole key as JSON, which is never null: right for the key of a topic.
KEY: Final = "_key"
# What decimals are joined as; with other digits where these are not enough.
_WIDE_DIGITS, _WIDE_SCALE = 28, 10
_MOST_DIGITS: Final = 38
# What numbers are compared as where one is a float, in Spark too.
_LOSSY: Final = "DOUBLE"
_DIGITS_OF_BITS: Final = {8: 3, 16: 5, 32: 10, 64: 19}

Frame = TypeVar("Frame")
Columns = Sequence[tuple[str, Expression]]
Key = Mapping[str, str]


class Engine(Protocol[Frame]):
    """What runs the parts of a plan that need no state."""

    def source(self, table: Table, wanted: Sequence[str]) -> Frame:
        """A changelog: wanted columns and the key under their flat names, PRESENT, and ORDER."""
        ...

    def schema(self, rows: Frame) -> pa.Schema: ...

    @property
    def guarded(self) -> bool:
        """Whether rows that cannot be computed are to go on, and say so: see `set_aside`.

        Then what selects and filters needs to know `key`: the columns that tell rows apart, by
        the names that people know.
        """
        ...

    def select(self, rows: Frame, wanted: Columns, key: Key | None = None) -> Frame: ...

    def where(self, rows: Frame, condition: Expression, key: Key | None = None) -> Frame: ...

    def union(self, parts: Sequence[Frame]) -> Frame: ...

    def text(self, rows: Frame, wanted: Sequence[str], into: str) -> Frame:
        """One more column, the JSON of several, with nulls."""
        ...

    def apply(
        self, inputs: Mapping[str, Frame], operator: Operator, key: Sequence[str], out: pa.Schema
    ) -> Frame: ...


class Compiler(Generic[Frame]):
    """Builds the stages of a plan."""

    def __init__(self, engine: Engine[Frame]) -> None:
        self._engine = engine

    # ---- the end -------------------------------------------------------------------------

    def changes(self, top: Node) -> Frame:
        """The view's changelog: its columns, hidden ones of its key, KEY and `_deleted`."""
        shown = columns(top)
        key = key_of(top)
        rows = self._net(top)
        wanted = [(name, column(name)) for name in (*shown, *(k for k in key if k not in shown))
                  if name != ALL]  # fmt: skip
        if key == (ALL,):
            wanted.append((ALL, exp.Literal.string("all")))
        rows = self._engine.select(rows, [*wanted, (DELETED, column(DELETED))])
        return self._engine.text(rows, key, KEY)

    def _net(self, top: Node) -> Frame:
        if isinstance(top, Project):
            base = _bare(top.input)
            if base is not None:
                return self._net_of_table(top)
            plain = all(as_column(each) is not None for _, each in top.outputs)
            if isinstance(top.input, Group) and plain:
                rows = self._group(top.input, net=True)
                renamed = [*((name, below) for name, below in carried(top)),
                           *((name, each.name) for name, each in top.outputs)]  # fmt: skip
                if all(name == below for name, below in renamed):
                    return rows
                picked = [(name, column(below)) for name, below in dict(renamed).items()]
                return self._engine.select(rows, [*picked, (DELETED, column(DELETED))])
        if isinstance(top, Group):
            return self._group(top, net=True)
        names = dict.fromkeys((*identity(top), *columns(top)))
        rows = self.rows(top, set(columns(top)))
        schema = self._engine.schema(rows)
        fields = pa.schema([schema.field(name) for name in names])
        net = Net(identity(top), fields, self._engine.guarded)
        return self._engine.apply({INPUT: rows}, net, identity(top), net.out)

    def _net_of_table(self, top: Project) -> Frame:
        """Projected before it is kept, so that what does not show does not change anything."""
        rows = self._raw(top.input, set().union(*(columns_in(each) for _, each in top.outputs)))
        wanted = {name: column(below) for name, below in carried(top)}
        wanted.update((name, _if_present(each)) for name, each in top.outputs)
        picked = [*wanted.items(), (PRESENT, column(PRESENT)), *self._places(rows)]
        rows = self._engine.select(rows, picked, named_key(top.input))
        return self._latest(rows, identity(top), net=True)

    # ---- tables --------------------------------------------------------------------------

    def _raw(self, node: Node, needed: set[str]) -> Frame:
        """A table's changelog, with its filters: what does not pass counts as deleted."""
        conditions = []
        while isinstance(node, Filter):
            conditions.append(node.condition)
            node = node.input
        assert isinstance(node, Table)
        if not conditions:
            return self._engine.source(node, sorted(needed & set(columns(node))))
        asked = needed.union(*(columns_in(each) for each in conditions))
        rows = self._engine.source(node, [name for name in columns(node) if name in asked])
        present: Expression = column(PRESENT)
        # In the order in which they were written: what does not pass one is not asked the next.
        for each in reversed(conditions):
            passes = exp.func("coalesce", exp.paren(each.copy()), exp.false())
            passes.meta["condition"] = True
            present = _guarded(present, passes).else_(exp.false())
        kept = dict.fromkeys([*identity(node), *sorted(needed & set(columns(node)))])
        wanted = [*((name, column(name)) for name in kept), (PRESENT, present)]
        return self._engine.select(rows, [*wanted, *self._places(rows)], named_key(node))

    def _places(self, rows: Frame) -> list[tuple[str, Expression]]:
        there = self._engine.schema(rows).names
        return [(name, column(name)) for name in ORDER if name in there]

    def _latest(self, rows: Frame, key: tuple[str, ...], *, net: bool) -> Frame:
        schema = self._engine.schema(rows)
        for name in key:
            _check_key(schema.field(name).type, column(name), f"{name} cannot be a primary key")
        fields = [field for field in schema if field.name not in _MARKS]
        latest = Latest(key, pa.schema(fields), net, self._engine.guarded)
        return self._engine.apply({INPUT: rows}, latest, key, latest.out)

    # ---- rows with signs -----------------------------------------------------------------

    def rows(self, node: Node, needed: set[str]) -> Frame:
        """What goes and comes in a relation: the needed columns, the identity, and the sign."""
        if _bare(node) is not None:
            return self._latest(self._raw(node, needed), identity(node), net=False)
        if isinstance(node, Filter):
            rows = self.rows(node.input, needed | columns_in(node.condition))
            return self._engine.where(rows, node.condition, named_key(node.input))
        if isinstance(node, Project):
            return self._project(node, needed)
        if isinstance(node, Join):
            return self._join(node, needed)
        if isinstance(node, Group):
            return self._group(node, net=False)
        assert isinstance(node, Union)
        return self._union(node)

    def _project(self, node: Project, needed: set[str]) -> Frame:
        outputs = {name: each for name, each in node.outputs if name in needed}
        below = set().union(*(columns_in(each) for each in outputs.values()))
        rows = self.rows(node.input, below)
        wanted = {name: column(each) for name, each in carried(node)}
        wanted.update(outputs)
        marked = [*wanted.items(), (SIGN, column(SIGN))]
        return self._engine.select(rows, marked, named_key(node.input))

    def _union(self, node: Union) -> Frame:
        branch, row = identity(node)
        parts = []
        for number, each in enumerate(node.inputs):
            rows = self.rows(each, set(columns(each)))
            rows = self._engine.text(rows, identity(each), row)
            wanted = [(name, column(own)) for name, own in
                      zip(columns(node), columns(each), strict=True)]  # fmt: skip
            wanted += [(branch, exp.Literal.number(number)), (row, column(row)),
                       (SIGN, column(SIGN))]  # fmt: skip
            parts.append(self._engine.select(rows, wanted))
        try:
            return self._engine.union(parts)
        except ViewError:
            self._check_alike(node, parts)
            raise

    def _check_alike(self, node: Union, parts: Sequence[Frame]) -> None:
        """ViewError, with the place, for the first column that cannot be put below the first's."""
        first, *others = parts
        for each, rows in zip(node.inputs[1:], others, strict=True):
            for name, (_, expression) in zip(columns(node), each.outputs, strict=True):
                wanted = [(name, column(name))]
                pair = [self._engine.select(part, wanted) for part in (first, rows)]
                try:
                    self._engine.union(pair)
                except ViewError:
                    one, own = (shown(self._engine.schema(part).field(name).type) for part in pair)
                    reason = f"{name} is {one} in the first part of the UNION, and {own} here"
                    raise located(expression, reason, "Cast one of them.") from None

    def _group(self, node: Group, *, net: bool) -> Frame:
        arguments: dict[str, str] = {}
        wanted = list(node.by)
        for each in node.results:
            if each.argument is not None and (text := each.argument.sql()) not in arguments:
                arguments[text] = f"_arg{len(arguments)}"
                wanted.append((arguments[text], each.argument))
        below = set().union(*(columns_in(each) for _, each in wanted)) if wanted else set()
        rows = self.rows(node.input, below)
        rows = self._engine.select(rows, [*wanted, (SIGN, column(SIGN))], named_key(node.input))
        schema = self._engine.schema(rows)
        names = tuple(name for name, _ in node.by)
        results = []
        for each in node.results:
            own = arguments[each.argument.sql()] if each.argument is not None else None
            kind = schema.field(own).type if own is not None else None
            place = place_of(each.at or each.argument)
            place = f"{place}: " if place else ""
            made = Aggregated(each.name, each.function, own, kind, each.text, place)
            _check_result(made, each)
            results.append(made)
        kinds = tuple(schema.field(name).type for name in names)
        for (_, by), kind in zip(node.by, kinds, strict=True):
            _check_key(kind, by, "rows cannot be grouped by it")
        texts = tuple(written(name, by) for name, by in node.by)
        group = Aggregate(names, kinds, tuple(results), net, self._engine.guarded, texts)
        return self._engine.apply({INPUT: rows}, group, names, group.out)

    # ---- joins ---------------------------------------------------------------------------

    def _join(self, node: Join, needed: set[str]) -> Frame:
        lefts, rights = [each for each, _ in node.on], [each for _, each in node.on]
        left, left_raw = self._side(node.left, lefts, needed)
        right, right_raw = self._side(node.right, rights, needed)
        keys = tuple(f"_join{at}" for at in range(len(node.on)))
        casts = self._casts(node, left, right, keys)
        if _LOSSY in casts.values():
            # Two primary keys may be one key of the join.
            if left_raw:
                left, left_raw = self._side(node.left, lefts, needed, as_rows=True)
            if right_raw:
                right, right_raw = self._side(node.right, rights, needed, as_rows=True)
        if casts:
            left = self._cast(left, casts, named_key(node.left))
            right = self._cast(right, casts, named_key(node.right))
        schema = self._engine.schema(left)
        kinds = tuple(schema.field(name).type for name in keys)
        if not left_raw and node.how == "inner":
            left = self._engine.where(left, _not_null(keys))
        if not right_raw:
            right = self._engine.where(right, _not_null(keys))
        sides = []
        for rows, own, raw in ((left, node.left, left_raw), (right, node.right, right_raw)):
            outside = {*keys, *_MARKS}
            fields = [each for each in self._engine.schema(rows) if each.name not in outside]
            sides.append(Side(pa.schema(fields), identity(own), raw))
        outer, guarded = node.how == "left", self._engine.guarded
        join = JoinRows(keys, kinds, sides[0], sides[1], outer, guarded)
        return self._engine.apply({LEFT: left, RIGHT: right}, join, keys, join.out)

    def _side(
        self, node: Node, on: Sequence[Expression], needed: set[str], *, as_rows: bool = False
    ) -> tuple[Frame, bool]:
        """The rows of a side with the columns of the join's key; whether as a changelog."""
        own = needed & set(columns(node))
        raw = not as_rows and _bare(node) is not None
        raw = raw and {as_column(each) for each in on} == set(identity(node))
        below = own.union(*(columns_in(each) for each in on))
        rows = self._raw(node, below) if raw else self.rows(node, below)
        kept = dict.fromkeys([*identity(node), *sorted(own)])
        wanted = [(name, column(name)) for name in kept]
        wanted += [(f"_join{at}", each) for at, each in enumerate(on)]
        marks = [PRESENT] if raw else [SIGN]
        wanted += [(name, column(name)) for name in marks]
        wanted += self._places(rows) if raw else []
        return self._engine.select(rows, wanted, named_key(node)), raw

    def _casts(self, node: Join, left: Frame, right: Frame, keys: Sequence[str]) -> dict[str, str]:
        """What keys are to be cast to, so that both sides have the same types."""
        of_left, of_right = self._engine.schema(left), self._engine.schema(right)
        casts = {}
        for at, name in enumerate(keys):
            one, other = of_left.field(name).type, of_right.field(name).type
            for kind, each in zip((one, other), node.on[at], strict=True):
                _check_key(kind, each, "rows cannot be joined by it")
            if one != other:
                casts[name] = _common(one, other, node.on[at])
        return casts

    def _cast(self, rows: Frame, casts: Mapping[str, str], key: Key) -> Frame:
        wanted = []
        for name in self._engine.schema(rows).names:
            value = column(name)
            if name not in set_aside.COLUMNS:
                wanted.append((name, exp.cast(value, casts[name]) if name in casts else value))
        return self._engine.select(rows, wanted, key)


def _if_present(expression: Expression) -> Expression:
    """An expression of a table's rows; null, and not computed, where no row is left."""
    if isinstance(expression, exp.Column | exp.Literal):
        return expression
    return _guarded(column(PRESENT), expression)


def _guarded(condition: Expression, value: Expression) -> exp.Case:
    """Computed only where a condition holds. Spark may compute both sides of an AND."""
    made = exp.case().when(condition, value)
    made.meta["guard"] = True
    return made


def _bare(node: Node) -> Table | None:
    """The table, if a relation is one, filtered or not."""
    while isinstance(node, Filter):
        node = node.input
    return node if isinstance(node, Table) else None


def _check_key(kind: pa.DataType, at: Expression, reason: str) -> None:
    """ViewError for what state cannot be kept by."""
    if pa.types.is_nested(kind):
        raise located(at, f"this is {shown(kind)}: {reason}",
                      "Use one of its parts, or to_json(...) of it.")  # fmt: skip


def _check_result(made: Aggregated, written: Result) -> None:
    """ViewError, with the place, for an aggregate of what it cannot be of."""
    try:
        _ = made.type
    except AggregateError as error:
        at = written.at or written.argument
        if at is None:
            raise
        raise located(at, str(error), error.advice) from None


def _not_null(names: Sequence[str]) -> Expression:
    return exp.and_(*(exp.not_(exp.Is(this=column(each), expression=exp.null())) for each in names))


def never_null(condition: Expression) -> list[str] | None:
    """The columns, if a condition says nothing but that some are not null."""
    names = []
    for each in conjuncts(condition):
        inner = each.unnest()
        is_null = inner.this.unnest() if isinstance(inner, exp.Not) else None
        if not isinstance(is_null, exp.Is) or not isinstance(is_null.expression, exp.Null):
            return None
        name = as_column(is_null.this)
        if name is None:
            return None
        names.append(name)
    return names


def _common(one: pa.DataType, other: pa.DataType, on: tuple[Expression, Expression]) -> str:
    kinds = (one, other)
    if all(pa.types.is_integer(each) for each in kinds):
        return "BIGINT"
    if all(pa.types.is_integer(each) or pa.types.is_decimal(each) for each in kinds):
        return _decimal(kinds, on)
    numbers = [pa.types.is_integer(k) or pa.types.is_floating(k) or pa.types.is_decimal(k)
               for k in kinds]  # fmt: skip
    if all(numbers):
        return _LOSSY
    if all(pa.types.is_date(each) or pa.types.is_timestamp(each) for each in kinds):
        return "TIMESTAMP"
    raise located(
        on[0],
        f"the join on {_equality(on)} compares {shown(one)} with {shown(other)}",
        "Cast one of them, as in cast(a.id as string) = b.id.",
    )


def _decimal(kinds: tuple[pa.DataType, pa.DataType], on: tuple[Expression, Expression]) -> str:
    """The decimal that holds both without a loss: what would be rounded could become equal."""
    scale = max(each.scale if pa.types.is_decimal(each) else 0 for each in kinds)
    whole = max(each.precision - each.scale if pa.types.is_decimal(each)
                else _DIGITS_OF_BITS[each.bit_width] for each in kinds)  # fmt: skip
    if whole <= _WIDE_DIGITS and scale <= _WIDE_SCALE:
        whole, scale = _WIDE_DIGITS, _WIDE_SCALE
    if whole + scale > _MOST_DIGITS:
        raise located(
            on[0],
            f"the join on {_equality(on)} compares {' with '.join(map(shown, kinds))}, and no "
            "decimal holds both",
            "Cast one of them to the type of the other.",
        )
    return f"DECIMAL({whole + scale}, {scale})"


def _equality(on: tuple[Expression, Expression]) -> str:
    return " = ".join(each.sql(dialect="spark").replace("`", "") for each in on)
