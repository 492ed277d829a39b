"""The parts of a view that its results depend on: see `penstock.spark.flows.shapes`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from penstock.spark.flows import shapes
from penstock.spark.flows.shapes import Part
from penstock.spark.views.expressions import Expression
from penstock.spark.views.plan import (
    Filter,
    Group,
    Join,
    Node,
    Project,
    Table,
    as_written,
    columns_in,
    flat,
    written,
)
from penstock.spark.views.refusing import DIALECT, place_of


def shape(node: Node, types: Mapping[str, Mapping[str, str]]) -> list[Part]:
    """All parts of a plan; `types` are those of the columns of its tables."""
    used = set().union(*(columns_in(each) for each in _expressions(node)))
    return list(_parts(node, types, used))


def _parts(node: Node, types: Mapping[str, Mapping[str, str]], used: set[str]) -> Iterator[Part]:
    if isinstance(node, Table):
        yield Part(shapes.TABLE, node.alias, node.name)
        yield Part(shapes.KEY, node.alias, ", ".join(node.key))
        for name in node.columns:
            own = flat(node.alias, name)
            if own in used or name in node.key:
                kind = types.get(node.name, {}).get(name, "")
                yield Part(shapes.TYPE, f"{name} of table {node.alias}", kind)
        return
    if isinstance(node, Filter):
        yield _part(shapes.CONDITION, "", node.condition)
    elif isinstance(node, Project):
        for name, each in node.outputs:
            yield _part(shapes.COLUMN, name, each)
    elif isinstance(node, Group):
        if node.by:
            text = ", ".join(written(name, by) for name, by in node.by)
            exactly = ", ".join(_exactly(by) for _, by in node.by)
            yield Part(shapes.GROUP, "", text, place_of(node.by[0][1]), exactly)
        # Others are part of columns and conditions.
        for result in node.results:
            if not result.name.startswith("_result"):
                text = result.text.replace("`", "")
                yield Part(shapes.COLUMN, result.name, text, place_of(result.at))
    elif isinstance(node, Join):
        on = " AND ".join(f"{as_written(one)} = {as_written(other)}" for one, other in node.on)
        exactly = " AND ".join(f"{_exactly(one)} = {_exactly(other)}" for one, other in node.on)
        how = f"{node.how} join on"
        yield Part(shapes.JOIN, "", f"{how} {on}", place_of(node.on[0][1]), f"{how} {exactly}")
        yield from _parts(node.left, types, used)
        yield from _parts(node.right, types, used)
        return
    else:
        yield Part(shapes.UNION, "", f"of {len(node.inputs)} parts")
        for part in node.inputs:
            yield from _parts(part, types, used)
        return
    yield from _parts(node.input, types, used)


def _part(kind: str, name: str, expression: Expression) -> Part:
    return Part(kind, name, as_written(expression), place_of(expression), _exactly(expression))


def _exactly(expression: Expression) -> str:
    return str(expression.sql(dialect=DIALECT))


def _expressions(node: Node) -> Iterator[Expression]:
    """All expressions of a plan."""
    if isinstance(node, Table):
        return
    if isinstance(node, Filter):
        yield node.condition
    elif isinstance(node, Project):
        yield from (each for _, each in node.outputs)
    elif isinstance(node, Group):
        yield from (each for _, each in node.by)
        yield from (each.argument for each in node.results if each.argument is not None)
    elif isinstance(node, Join):
        for pair in node.on:
            yield from pair
        yield from _expressions(node.left)
        yield from _expressions(node.right)
        return
    else:
        for each in node.inputs:
            yield from _expressions(each)
        return
    yield from _expressions(node.input)
