"""What a flow needs of Spark, seen from its plan: state or none, and which.

A function of rows alone (filters, projections, joins with tables, unions, explodes) gives the same
on each micro-batch as on the stream, so it can be run on the micro-batch: then several outputs and
the dead letters are written from one reading. Anything else is left to Spark as a streaming plan.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_ROWWISE: Final = frozenset(
    {
        "CollectMetrics", "EventTimeWatermark", "Filter", "Generate", "MapInArrow", "MapInPandas",
        "Project", "Repartition", "RepartitionByExpression", "ResolvedHint", "StreamingRelation",
        "StreamingRelationV2", "SubqueryAlias", "Union", "View", "WithCTE", "CTERelationDef",
        "CTERelationRef", "RebalancePartitions",
    }
)  # fmt: skip
_READING: Final = frozenset({"StreamingRelation", "StreamingRelationV2"})
# What looks at all rows, and as often as it is looked at itself.
_WHOLE: Final = _ROWWISE - {"MapInPandas", "WithCTE", "CTERelationDef", "CTERelationRef"}
# What keeps nothing although it is no function of single rows.
_STATELESS: Final = frozenset({"Sort", "GlobalLimit", "LocalLimit", "Sample", "Expand", "Window"})
# What keeps a row, or a group, until a watermark has passed it.
_KEEPING: Final = frozenset({"Aggregate", "Deduplicate", "Distinct", "Join"})
_IDS: Final = re.compile(r"#\d+L?(-T\d+ms)?")
_NAMES: Final = re.compile(r" AS [\w`.()]+")
_CONVERSION: Final = "precisetimestampconversion("
_SLIDE: Final = re.compile(r"LongType\) - \d+\) % (\d+)\)")
_LENGTH: Final = re.compile(r" \+ (\d+)\), LongType, Timestamp")
MAX_DESCRIBED: Final = 2_000
_OLD_ROW: Final = "_before"
_NEW_ROW: Final = "_after"


def _nodes(plan: Any) -> Iterator[Any]:
    yield plan
    children = plan.children()
    for at in range(children.size()):
        yield from _nodes(children.apply(at))


def streaming_nodes(rows: DataFrame) -> list[Any]:
    """The nodes of a DataFrame's plan that streams pass through."""
    plan = rows._jdf.queryExecution().analyzed()
    return [node for node in _nodes(plan) if node.isStreaming()]


def is_rowwise(rows: DataFrame) -> bool:
    """Whether each row of a stream is treated by itself."""
    return all(_keeps_nothing(node) for node in streaming_nodes(rows))


def reads_each_once(results: Iterable[DataFrame], streams: int) -> bool:
    """Whether results need one reading of each stream, and all of its rows.

    Streams are told apart by the options of the source, which have their numbers. Functions of
    users over batches of rows, and joins with tables, may stop before the last row; so may what
    stands in for a join, a query inside of a condition.
    """
    nodes = [node for rows in results for node in streaming_nodes(rows)]
    if not all(node.subqueries().isEmpty() for node in nodes):
        return False
    if not all(str(node.nodeName()) in _WHOLE for node in nodes):
        return False
    readings = [node for node in nodes if str(node.nodeName()) in _READING]
    if any(str(node.nodeName()) != "StreamingRelationV2" for node in readings):
        return False
    read = {str(node.extraOptions().asCaseSensitiveMap().toString()) for node in readings}
    return len(readings) == len(read) == streams


def is_one_operator(results: Iterable[DataFrame]) -> bool:
    """Whether there is one function over batches of rows, ours, and all streams go through it."""
    nodes = [node for rows in results for node in streaming_nodes(rows)]
    operators = [node for node in nodes if str(node.nodeName()) == "MapInArrow"]
    return len(operators) == 1 and _readings(nodes) == _readings(_nodes(operators[0]))


def _readings(nodes: Iterable[Any]) -> int:
    return sum(str(node.nodeName()) in _READING for node in nodes)


def topics_of(rows: DataFrame) -> set[str]:
    """The topics that a DataFrame is read from."""
    found = set()
    for node in streaming_nodes(rows):
        if str(node.nodeName()) == "StreamingRelationV2":
            topic = node.extraOptions().get("subscribe")
            found |= {str(topic)} if topic is not None else set()
    return found


def uses_old_rows(results: Iterable[DataFrame]) -> bool:
    """Whether something is computed from `_before`.

    To pass it on whole is none, and neither is to take from it what `_after` does not have, as
    views do with keys: both are right without it.
    """
    for node in (node for rows in results for node in streaming_nodes(rows)):
        expressions = node.expressions()
        # The text is one call to Java, the tree some for each part of an expression.
        if str(node.nodeName()) == "MapInArrow" or f"{_OLD_ROW}#" not in str(expressions):
            continue
        for at in range(expressions.size()):
            if not _passes_on_old_row(expressions.apply(at)) and _reads(expressions.apply(at)):
                return True
    return False


def _passes_on_old_row(expression: Any) -> bool:
    """Whether an expression is `_before` itself, under its own name."""
    while str(expression.nodeName()) == "Alias" and str(expression.name()) == _OLD_ROW:
        expression = expression.child()
    return _is_column(expression, _OLD_ROW)


def _reads(expression: Any) -> bool:
    """Whether an expression reads `_before`, other than where a part of `_after` is null."""
    if _is_column(expression, _OLD_ROW):
        return True
    children = _children(expression)
    if str(expression.nodeName()) == "Coalesce" and _mentions(children[0], _NEW_ROW):
        return _reads(children[0])
    return any(map(_reads, children))


def _mentions(expression: Any, column: str) -> bool:
    return _is_column(expression, column) or any(
        _mentions(child, column) for child in _children(expression)
    )


def _is_column(expression: Any, name: str) -> bool:
    return str(expression.nodeName()) == "AttributeReference" and str(expression.name()) == name


def _children(expression: Any) -> list[Any]:
    children = expression.children()
    return [children.apply(at) for at in range(children.size())]


def unbounded(rows: DataFrame) -> list[str]:
    """The operators of Spark that keep something for ever, since no watermark says until when."""
    nodes = streaming_nodes(rows)
    if any(str(node.nodeName()) == "EventTimeWatermark" for node in nodes):
        return []
    names = {str(node.nodeName()) for node in nodes if not _keeps_nothing(node)}
    return sorted(names & _KEEPING)


def time_windows(results: Iterable[DataFrame]) -> list[str]:
    """The lengths of Spark's windows of time: what groups by them has only the column's name.

    Spark writes such a window as sums of microseconds: a remainder by its slide, and its length.
    """
    found = set()
    for node in (each for rows in results for each in streaming_nodes(rows)):
        text = str(node.expressions()) if str(node.nodeName()) in _WHOLE | _STATELESS else ""
        if _CONVERSION in text:
            slides, lengths = set(_SLIDE.findall(text)), set(_LENGTH.findall(text))
            found |= {f"{_duration(length)}, every {_duration(slide)}"
                      for slide in slides for length in lengths}  # fmt: skip
    return sorted(found)


def _duration(us: str) -> str:
    seconds = int(us) / 1_000_000
    return f"{seconds:g} s"


def _keeps_nothing(node: Any) -> bool:
    name = str(node.nodeName())
    if name == "Join":
        # With a table: of two streams each waits for the other.
        return not (node.left().isStreaming() and node.right().isStreaming())
    return name in _ROWWISE


def operators(rows: DataFrame) -> list[str]:
    """The operators that keep state, each as text that changes if its state does."""
    found = []
    for node in streaming_nodes(rows):
        if not _keeps_nothing(node) and str(node.nodeName()) not in _STATELESS:
            types = [str(each.dataType().simpleString()) for each in node.schema().fields()]
            text = _NAMES.sub("", _IDS.sub("", str(node.simpleString(200)))).lstrip("~ ")
            found.append(f"{text} -> {', '.join(types)}"[:MAX_DESCRIBED])
    return found
