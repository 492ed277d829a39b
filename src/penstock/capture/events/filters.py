"""Row filters: a small expression decides which events are written.

    op != 'd' and after.country == 'DE'
    row.amount > 100 or row.state in ('open', 'held')
    startswith(lower(after.email), 'test') and before.state is not None

It is parsed by Python's own parser, and built from a short list of what may stand in it; nothing is
ever evaluated as code. Names: `op` (c, u, d, r), `after.COLUMN` or `after['COLUMN']`, the same with
`before`, and with `row`, which is after where there is one and before otherwise. Values are those
of the JSON event; what is not there is None. As in SQL a comparison with None does not hold (`==`
and `!=` with the constant None do), nor one of a text with a number.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, Final

import orjson

from penstock.capture.source import DELETE, UNAVAILABLE, CaptureError, Row, Table

Values = tuple[str, Row | None, Row | None]
Term = Callable[[Values], Any]
Predicate = Callable[[str, Row | None, Row | None], bool]

_LENGTH_MAX: Final = 4_096
_UNAVAILABLE_TEXT: Final = orjson.loads(UNAVAILABLE)

_COMPARISONS: Final[Mapping[type[ast.cmpop], Callable[[Any, Any], bool]]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: Final[Mapping[str, tuple[int, Callable[..., Any]]]] = {
    "lower": (1, lambda text: text.lower()),
    "upper": (1, lambda text: text.upper()),
    "length": (1, len),
    "startswith": (2, lambda text, start: text.startswith(start)),
    "endswith": (2, lambda text, end: text.endswith(end)),
    "contains": (2, lambda text, part: part in text),
}


class FilterError(CaptureError):
    """An expression that is no row filter."""

    advice = (
        "Use op, after.COLUMN, before.COLUMN, row.COLUMN, constants, and, or, not, comparisons, "
        "in, is None, and the functions " + ", ".join(_FUNCTIONS) + "."
    )


def parse(text: str, what: str = "filter") -> ast.expr:
    """The expression's tree; FilterError if it is none. Columns are not looked at."""
    if len(text) > _LENGTH_MAX:
        raise FilterError(f"{what}: longer than {_LENGTH_MAX} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        place = getattr(error, "offset", None) or 1
        raise FilterError(f"{what}: {_shown(text, place)}: {_reason(error)}") from error
    try:
        _Builder(text.strip(), what, None).check(tree.body)
    except RecursionError as error:
        raise FilterError(f"{what}: nested too deeply") from error
    return tree.body


def compiled(text: str, table: Table, what: str = "filter") -> Predicate:
    """The filter for one table; FilterError if it names a column that the table does not have."""
    tree = parse(text, what)
    columns = {column.name: place for place, column in enumerate(table.columns)}
    term = _Builder(text.strip(), what, columns).term(tree)

    def passes(op: str, before: Row | None, after: Row | None) -> bool:
        return bool(term((op, before, after)))

    return passes


def takes_deletes(text: str, table: Table) -> bool:
    """Whether a filter lets deletes pass; where that depends on the row, some."""
    columns = {column.name: place for place, column in enumerate(table.columns)}
    return _of_delete(parse(text), _Builder(text.strip(), "filter", columns)) is not False


def _of_delete(node: ast.expr, builder: _Builder) -> bool | None:
    """What holds of a delete, whatever its row is; None where that depends on it."""
    match node:
        case ast.BoolOp():
            parts = [_of_delete(part, builder) for part in node.values]
            decides = isinstance(node.op, ast.Or)
            return decides if decides in parts else None if None in parts else not decides
        case ast.UnaryOp(op=ast.Not()):
            inner = _of_delete(node.operand, builder)
            return None if inner is None else not inner
    names = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
    return None if names & {"before", "row"} else bool(builder.term(node)((DELETE, None, None)))


def _reason(error: BaseException) -> str:
    return getattr(error, "msg", None) or str(error) or type(error).__name__


def _shown(text: str, place: int) -> str:
    """The expression with an arrow at the place, on one line: `after.x >>> = 1`."""
    at = max(place - 1, 0)
    return f"{text[:at].rstrip()} >>> {text[at:]}".strip()


class _Builder:
    """Makes a function of each node; what is not on the list is refused with its place."""

    def __init__(self, text: str, what: str, columns: Mapping[str, int] | None) -> None:
        self._text = text
        self._what = what
        # None: any column will do, only the form is checked.
        self._columns = columns

    def check(self, tree: ast.expr) -> None:
        self.term(tree)

    def refuse(self, node: ast.AST, reason: str) -> FilterError:
        # Places of nodes count bytes.
        at = len(self._text.encode()[: getattr(node, "col_offset", 0)].decode(errors="replace"))
        return FilterError(f"{self._what}: {_shown(self._text, at + 1)}: {reason}")

    def term(self, node: ast.expr) -> Term:
        match node:
            case ast.BoolOp():
                return self._bool(node)
            case ast.UnaryOp(op=ast.Not()):
                inner = self.term(node.operand)
                return lambda values: not inner(values)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                negative = -number
                return lambda values: negative
            case ast.Compare():
                return self._compare(node)
            case ast.Constant(value=None | str() | int() | float()):
                constant = node.value
                return lambda values: constant
            case ast.Tuple() | ast.List():
                items = tuple(self._constant(item) for item in node.elts)
                return lambda values: items
            case ast.Name(id="op"):
                return lambda values: values[0]
            case ast.Attribute(value=ast.Name(id="after" | "before" | "row" as side)):
                return self._column(node, side, node.attr)
            case ast.Subscript(
                value=ast.Name(id="after" | "before" | "row" as side),
                slice=ast.Constant(value=str() as name),
            ):
                return self._column(node, side, name)
            case ast.Call():
                return self._call(node)
        raise self.refuse(node, f"{type(node).__name__} may not stand here")

    def _bool(self, node: ast.BoolOp) -> Term:
        terms = [self.term(part) for part in node.values]
        if isinstance(node.op, ast.And):
            return lambda values: all(term(values) for term in terms)
        return lambda values: any(term(values) for term in terms)

    def _constant(self, node: ast.expr) -> Any:
        match node:
            case ast.Constant(value=None | str() | int() | float()):
                return node.value
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as number)):
                return -number
        raise self.refuse(node, "only constants may stand in a list")

    def _compare(self, node: ast.Compare) -> Term:
        terms = [self.term(part) for part in (node.left, *node.comparators)]
        parts = [node.left, *node.comparators]
        tests = [self._test(sort, parts[at], parts[at + 1]) for at, sort in enumerate(node.ops)]

        def holds(values: Values) -> bool:
            left = terms[0](values)
            for test, term in zip(tests, terms[1:], strict=True):
                right = term(values)
                if not test(left, right):
                    return False
                left = right
            return True

        return holds

    def _test(self, sort: ast.cmpop, left: ast.expr, right: ast.expr) -> Callable[[Any, Any], bool]:
        none = any(isinstance(side, ast.Constant) and side.value is None for side in (left, right))
        if isinstance(sort, ast.Is | ast.IsNot):
            if not none:
                raise self.refuse(right, "`is` goes with None only; use ==")
            return operator.is_ if isinstance(sort, ast.Is) else operator.is_not
        if isinstance(sort, ast.In | ast.NotIn):
            if not isinstance(right, ast.Tuple | ast.List):
                raise self.refuse(right, "`in` needs a list of constants, as in ('a', 'b')")
            wanted = isinstance(sort, ast.In)
            return lambda value, items: value is not None and (value in items) is wanted
        if isinstance(sort, ast.Eq):
            return operator.eq if none else _equal
        if isinstance(sort, ast.NotEq):
            return operator.ne if none else _different
        compare = _COMPARISONS[type(sort)]
        return lambda value, other: _ordered(compare, value, other)

    def _column(self, node: ast.expr, side: str, name: str) -> Term:
        if self._columns is None:
            return lambda values: None
        place = self._columns.get(name)
        if place is None:
            known = ", ".join(self._columns)
            raise self.refuse(node, f"no column {name!r}; there are {known}")
        at = place
        if side == "row":
            return lambda values: _value(values[1] if values[2] is None else values[2], at)
        index = 1 if side == "before" else 2
        return lambda values: _value(values[index], at)  # type: ignore[arg-type]

    def _call(self, node: ast.Call) -> Term:
        name = node.func.id if isinstance(node.func, ast.Name) else ""
        if name not in _FUNCTIONS or node.keywords:
            raise self.refuse(node, "no such function")
        count, function = _FUNCTIONS[name]
        if len(node.args) != count:
            raise self.refuse(node, f"{name} takes {count} value(s), not {len(node.args)}")
        terms = [self.term(part) for part in node.args]

        def call(values: Values) -> Any:
            arguments = [term(values) for term in terms]
            if not all(isinstance(argument, str) for argument in arguments):
                return None
            return function(*arguments)

        return call


def _value(row: Row | None, place: int) -> Any:
    if row is None:
        return None
    value = orjson.loads(row[place])
    return None if value == _UNAVAILABLE_TEXT else value


def _equal(left: Any, right: Any) -> bool:
    return left is not None and right is not None and bool(left == right)


def _different(left: Any, right: Any) -> bool:
    return left is not None and right is not None and bool(left != right)


def _ordered(compare: Callable[[Any, Any], bool], left: Any, right: Any) -> bool:
    if left is None or right is None:
        return False
    try:
        return compare(left, right)
    except TypeError:
        return False
