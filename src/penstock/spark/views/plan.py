"""What a view is made of: tables, filters, projections, joins, groups, unions.

Columns have flat names, `TABLE.COLUMN`, and expressions are sqlglot's, whose columns are such
names. Each relation has an **identity**: columns that tell its rows apart. A table has its primary
key, a join those of both sides, a group what it is grouped by; a projection carries it along in
hidden columns, unless it shows it. At the end it is the key of the view.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import singledispatch
from typing import Final, Literal

from sqlglot import exp

from penstock.spark.views.aggregating import Function
from penstock.spark.views.expressions import Expression

How = Literal["inner", "left"]
BRANCH: Final = "_branch"
ROW: Final = "_row"
# The key of a view that is one row.
ALL: Final = "_all"
# Names that stages and flows have for columns of their own.
_OWN: Final = frozenset(
    {BRANCH, ROW, ALL, "_key", "_deleted", "_plus", "_present", "_topic", "_partition", "_offset"}
)


@dataclass(frozen=True, slots=True)
class Table:
    """A changelog; `alias` is what the view calls it."""

    name: str
    alias: str
    key: tuple[str, ...]
    columns: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Filter:
    input: Node
    condition: Expression


@dataclass(frozen=True, slots=True)
class Project:
    """Columns by expressions. `prefix` is the alias of a derived table; of the view itself none."""

    input: Node
    outputs: tuple[tuple[str, Expression], ...]
    prefix: str = ""


@dataclass(frozen=True, slots=True)
class Join:
    left: Node
    right: Node
    on: tuple[tuple[Expression, Expression], ...]
    how: How = "inner"


@dataclass(frozen=True, slots=True)
class Result:
    """One aggregate; no argument in count(*)."""

    name: str
    function: Function
    argument: Expression | None = None
    # As it was written, and what it was made from: for messages.
    text: str = field(default="", compare=False)
    at: Expression | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Group:
    """Rows by expressions; without results these are the distinct ones."""

    input: Node
    by: tuple[tuple[str, Expression], ...]
    results: tuple[Result, ...]


@dataclass(frozen=True, slots=True)
class Union:
    """All rows of several relations with the same columns."""

    inputs: tuple[Project, ...]
    prefix: str = ""


Node = Table | Filter | Project | Join | Group | Union


def flat(alias: str, column: str) -> str:
    return f"{alias}.{column}" if alias else column


def column(name: str) -> Expression:
    """A column by its flat name, as an expression."""
    return exp.column(exp.to_identifier(name, quoted=True))


def columns_in(expression: Expression) -> set[str]:
    """The flat names of the columns in an expression that was resolved."""
    return {each.name for each in expression.find_all(exp.Column)}


def as_column(expression: Expression) -> str | None:
    """The name, if an expression is nothing but a column."""
    return expression.name if isinstance(expression, exp.Column) else None


@singledispatch
def columns(node: Node) -> tuple[str, ...]:
    """The columns of a relation that can be asked for."""
    raise NotImplementedError(node)


@columns.register
def _(node: Table) -> tuple[str, ...]:
    return tuple(flat(node.alias, each) for each in node.columns)


@columns.register
def _(node: Filter) -> tuple[str, ...]:
    return columns(node.input)


@columns.register
def _(node: Project) -> tuple[str, ...]:
    return tuple(name for name, _ in node.outputs)


@columns.register
def _(node: Join) -> tuple[str, ...]:
    return (*columns(node.left), *columns(node.right))


@columns.register
def _(node: Group) -> tuple[str, ...]:
    return (*(name for name, _ in node.by), *(each.name for each in node.results))


@columns.register
def _(node: Union) -> tuple[str, ...]:
    return columns(node.inputs[0])


@singledispatch
def identity(node: Node) -> tuple[str, ...]:
    """The columns that tell the rows of a relation apart."""
    raise NotImplementedError(node)


@identity.register
def _(node: Table) -> tuple[str, ...]:
    return tuple(flat(node.alias, each) for each in node.key)


@identity.register
def _(node: Filter) -> tuple[str, ...]:
    return identity(node.input)


@identity.register
def _(node: Project) -> tuple[str, ...]:
    return tuple(name for name, _ in carried(node))


@identity.register
def _(node: Join) -> tuple[str, ...]:
    return (*identity(node.left), *identity(node.right))


@identity.register
def _(node: Group) -> tuple[str, ...]:
    return tuple(name for name, _ in node.by)


@identity.register
def _(node: Union) -> tuple[str, ...]:
    if not node.prefix:
        return BRANCH, ROW
    return f"{node.prefix}.#branch", f"{node.prefix}.#row"


def named_key(node: Node) -> dict[str, str]:
    """The identity for people: its columns by names without what only stages need to know."""
    found: dict[str, str] = {}
    if isinstance(node, Filter):
        return named_key(node.input)
    if isinstance(node, Group):
        found = {written(name, by): name for name, by in node.by}
    elif isinstance(node, Project):
        own = {below: shown for shown, below in named_key(node.input).items()}
        found = {own.get(below, below): name for name, below in carried(node)}
    elif isinstance(node, Join):
        sides = [*named_key(node.left).items(), *named_key(node.right).items()]
        shown = [name for name, _ in sides]
        found = {name if shown.count(name) == 1 else own: own for name, own in sides}
    else:
        found = {name.rpartition(".")[2]: name for name in identity(node)}
    return found if len(found) == len(identity(node)) else {each: each for each in identity(node)}


def written(name: str, by: Expression) -> str:
    """What rows are grouped by, as it was written: a name of its own, or the expression."""
    if not name.startswith("_group"):
        return name
    text = as_written(by)
    return text.rpartition(".")[2] if as_column(by) is not None else text


def as_written(expression: Expression) -> str:
    """An expression with the names that its columns have in the view, on one line."""

    def named(node: Expression) -> Expression:
        if isinstance(node, exp.Column) and node.meta.get("shown"):
            return exp.column(exp.to_identifier(str(node.meta["shown"]).replace("`", "")))
        return node

    text = str(expression.copy().transform(named).sql(dialect="spark"))
    return " ".join(text.replace("`", "").split())


def hidden(prefix: str, name: str, number: int) -> str:
    """The name of a column of the identity that is not shown."""
    return f"{prefix}.#{number}" if prefix else f"_{name.lstrip('_').replace('.', '_')}"


def carried(node: Project) -> Iterator[tuple[str, str]]:
    """The identity of a projection: each column's name in it, and the name it has below."""
    shown = {as_column(each): name for name, each in reversed(node.outputs)}
    taken = {*_OWN, *(name.lower() for name, _ in node.outputs)}
    for number, below in enumerate(identity(node.input)):
        name = shown.get(below)
        if name is None:
            name = hidden(node.prefix, below, number)
            # order.item_id and order_item.id would be one column.
            while name.lower() in taken:
                name = f"{name}_{number}"
            taken.add(name.lower())
        yield name, below


def tables(node: Node) -> Iterator[Table]:
    """The tables that a view reads, each as often as it is named."""
    if isinstance(node, Table):
        yield node
    elif isinstance(node, Join):
        yield from tables(node.left)
        yield from tables(node.right)
    elif isinstance(node, Union):
        for each in node.inputs:
            yield from tables(each)
    else:
        yield from tables(node.input)


def key_of(node: Node) -> tuple[str, ...]:
    """The columns that are the key of a view, in what `changes` gives."""
    return identity(node) or (ALL,)


def explained(node: Node, depth: int = 0) -> Iterator[str]:
    """The stages of a view in words, the last one first."""
    space = "  " * depth
    if isinstance(node, Table):
        yield f"{space}table {node.name} by {', '.join(node.key)}"
        return
    if isinstance(node, Filter):
        yield f"{space}where {_told(node.condition)}"
    elif isinstance(node, Project):
        yield f"{space}columns {', '.join(name for name, _ in node.outputs)}"
    elif isinstance(node, Group):
        by = ", ".join(_told(each) for _, each in node.by) or "nothing"
        results = ", ".join(each.text.replace("`", "") for each in node.results)
        yield f"{space}group by {by}: {results or 'distinct'}"
    elif isinstance(node, Join):
        on = " and ".join(f"{_told(one)} = {_told(other)}" for one, other in node.on)
        yield f"{space}{node.how} join on {on}"
        yield from explained(node.left, depth + 1)
        yield from explained(node.right, depth + 1)
        return
    else:
        yield f"{space}union"
        for each in node.inputs:
            yield from explained(each, depth + 1)
        return
    yield from explained(node.input, depth + 1)


def _told(expression: Expression) -> str:
    return str(expression.sql(dialect="spark")).replace("`", "")
