"""A pattern over the columns of given rows: all that a task needs, and what Spark computes first.

Nothing of Spark is run here; only the types of expressions are asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
from pyspark.sql import types as T  # noqa: N812

from penstock.spark.patterns import kernel as K  # noqa: N812
from penstock.spark.patterns import tree
from penstock.spark.patterns.conditions import (
    Column,
    Condition,
    Programs,
    TypeOf,
    condition,
    depends_on_path,
)
from penstock.spark.patterns.errors import PatternError
from penstock.spark.patterns.leaves import (
    Agg,
    Classifier,
    Finder,
    Leaf,
    MatchNumber,
    Nav,
    Scope,
    replaced,
)
from penstock.spark.patterns.reading import Text, parsed
from penstock.spark.reasons import reason, remedy

DEFAULT_MAX_ROWS: Final = 10_000
MAX_STEPS: Final = 20_000_000
Overflow = Literal["fail", "skip"]
Skip = tuple[Literal["past last row", "to next row", "to first", "to last"], str]
_SKIPS: Final = {
    "past last row": K.SKIP_PAST_LAST,
    "to next row": K.SKIP_TO_NEXT,
    "to first": K.SKIP_TO_FIRST,
    "to last": K.SKIP_TO_LAST,
}


@dataclass(frozen=True, slots=True)
class Definition:
    """A pattern as it was declared, in either form, before it meets any rows."""

    node: tree.Node
    # Variables in the order of their numbers.
    names: tuple[str, ...]
    # By name, in small letters; a variable without a condition takes any row.
    conditions: Mapping[str, Text]
    subsets: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    within_us: int | None = None
    skip: Skip = ("past last row", "")
    # The text of it all, if there is one.
    text: Text | None = None

    def masks(self) -> dict[str, int]:
        masks = {name.lower(): 1 << number for number, name in enumerate(self.names)}
        for name, members in self.subsets.items():
            masks[name.lower()] = sum(masks[each.lower()] for each in members)
        return masks


@dataclass(frozen=True, slots=True)
class Measured:
    """A value that a task gives for each match, from which Spark computes measures."""

    leaf: Leaf
    # The column with the values of rows; empty if there is none.
    column: str
    type: T.DataType


@dataclass(frozen=True, slots=True)
class Plan:
    """What the tasks know of a pattern."""

    names: tuple[str, ...]
    code: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    ops: npt.NDArray[np.int64]
    constants: tuple[float | str, ...]
    columns: tuple[Column, ...]
    memo: bool
    within_us: int
    skip: int
    skip_mask: int
    # The same in words.
    skips_to: Skip
    lookback: int
    max_rows: int
    fails_on_rows: bool
    # For each variable the expression of its bit; empty if it is always set.
    bits: tuple[str, ...]
    # Rows that no variable can take need not be sent.
    drops_unused: bool
    measured: tuple[Measured, ...]
    # Over the columns `_n0`, `_n1`, ... that hold what was measured.
    measures: Mapping[str, str]

    @property
    def counts(self) -> bool:
        return any(isinstance(each.leaf, MatchNumber) for each in self.measured)

    def measured_sql(self) -> list[str]:
        """The expressions over rows that measures need, each once."""
        return list(dict.fromkeys(each.column for each in self.measured if each.column))

    def bits_sql(self) -> str:
        terms = [
            f"{1 << n}L" if not sql else f"CASE WHEN {sql} THEN {1 << n}L ELSE 0L END"
            for n, sql in enumerate(self.bits)
        ]
        return " + ".join(terms)


def planned(
    defined: Definition,
    columns: Sequence[str],
    type_of: TypeOf,
    measures: Mapping[str, Text],
    *,
    max_rows: int = DEFAULT_MAX_ROWS,
    overflow: Overflow = "fail",
    max_lookback: int = 0,
) -> Plan:
    """Put a pattern together with the columns it is for."""
    scope_columns = {each.lower(): each for each in columns}
    masks = defined.masks()
    programs = Programs()
    made = []
    for number, name in enumerate(defined.names):
        text = defined.conditions.get(name.lower())
        if text is None:
            made.append(Condition("", -1, ()))
            continue
        finder = Finder(text, Scope(masks, scope_columns, own=1 << number))
        made.append(condition(text, finder, programs, _located(type_of, text)))
    measuring = _Measuring(Scope(masks, scope_columns), type_of)
    sqls = {name: measuring.add(text) for name, text in measures.items()}
    leaves = [leaf for each in made for leaf in each.leaves]
    leaves += [each.leaf for each in measuring.measured]
    navs = [each.at if isinstance(each, Classifier) else each for each in leaves]
    lookback = max((each.back for each in navs if isinstance(each, Nav)), default=0)
    anchor = _anchor(defined.node)
    skip, variable = defined.skip
    return Plan(
        names=defined.names,
        code=_program(defined),
        starts=np.array([each.start for each in made], dtype=np.int64),
        ops=programs.array(),
        constants=tuple(programs.constants),
        columns=tuple(programs.columns),
        memo=not any(depends_on_path(leaf, anchor) for each in made for leaf in each.leaves),
        within_us=-1 if defined.within_us is None else defined.within_us,
        skip=_SKIPS[skip],
        skip_mask=masks[variable.lower()] if variable else 0,
        skips_to=defined.skip,
        lookback=lookback,
        max_rows=max_rows,
        fails_on_rows=overflow == "fail",
        bits=tuple(each.static for each in made),
        drops_unused=(
            lookback == 0 and all(each.static for each in made) and tree.is_relaxed(defined.node)
        ),
        measured=tuple(measuring.measured),
        measures=sqls,
    )


def _program(defined: Definition) -> npt.NDArray[np.int64]:
    try:
        return tree.compiled(defined.node)
    except tree.ProgramTooLongError:
        raise PatternError(
            f"the pattern is too long: written out it has more than {tree.MAX_PROGRAM} steps",
            advice="Smaller numbers in {n,m}, or several patterns one after the other.",
        ) from None


def _anchor(node: tree.Node) -> int:
    """The bit of the variable that takes the first row of each match and no other; 0 if none."""
    first = node.parts[0] if isinstance(node, tree.Seq) and node.parts else node
    if not isinstance(first, tree.Var):
        return 0
    times = sum(isinstance(each, tree.Var) and each == first for each in tree.walk(node))
    return 1 << first.number if times == 1 else 0


def _located(type_of: TypeOf, text: Text) -> TypeOf:
    """The same, with what Spark says put at the place in the text."""

    def ask(sql: str) -> T.DataType:
        try:
            return type_of(sql)
        except PatternError:
            raise
        except Exception as error:
            raise text.error(reason(error), advice=remedy(error)) from None

    return ask


@dataclass(slots=True)
class _Measuring:
    """What tasks have to give so that Spark can compute the measures."""

    scope: Scope
    type_of: TypeOf
    measured: list[Measured] = field(default_factory=list)

    def add(self, text: Text) -> str:
        finder = Finder(text, self.scope)
        ask = _located(self.type_of, text)

        def name(leaf: Leaf, at: int) -> str:
            for number, each in enumerate(self.measured):
                if each.leaf == leaf:
                    return f"_n{number}"
            self.measured.append(self._measured(leaf, ask, finder, at))
            return f"_n{len(self.measured) - 1}"

        node = parsed(text)
        return str(replaced(node, finder, name).sql(dialect="spark", normalize_functions=False))

    def _measured(self, leaf: Leaf, ask: TypeOf, finder: Finder, at: int) -> Measured:
        if isinstance(leaf, MatchNumber):
            return Measured(leaf, "", T.LongType())
        if isinstance(leaf, Classifier):
            return Measured(leaf, "", T.StringType())
        if isinstance(leaf, Agg) and not leaf.sql:
            return Measured(leaf, "", T.LongType())
        found = ask(leaf.sql)
        if isinstance(leaf, Agg):
            if leaf.kind in {"sum", "avg"} and not isinstance(found, T.NumericType):
                raise finder.text.error(
                    f"{leaf.kind.upper()} of {found.simpleString()} is not possible", at
                )
            found = aggregate_type(leaf.kind, found)
        return Measured(leaf, leaf.sql, found)


def aggregate_type(kind: str, of: T.DataType) -> T.DataType:
    """The type of an aggregate, as in Spark; averages are doubles."""
    if kind == "count":
        return T.LongType()
    if kind == "avg":
        return T.DoubleType()
    if kind == "sum":
        if isinstance(of, T.DecimalType):
            return T.DecimalType(min(38, of.precision + 10), of.scale)
        return T.LongType() if isinstance(of, T.IntegralType) else T.DoubleType()
    return of
