"""Patterns in Python: stages one after the other.

    from penstock.spark import pattern

    testing = (
        pattern.begin("small", "amount < 1")
        .then("large", "amount > 500 and amount > 100 * small.amount", times="+")
        .within("10 minutes")
    )
    alarms = testing.match(
        payments, by=["card"], measures={"first": "small.amount", "total": "sum(large.amount)"}
    )

**How stages follow each other.** `next`: the very next row of the key. `then`: the first row after
it that fits; rows that do not are passed over. `then_any`: rows that would fit may be passed over
as well, if no match comes of them otherwise. `not_followed_by` forbids a row between the stages
before and after it, or, at the end, until `within` is over; `not_next` forbids it as the next row.

**How often.** `times` is a number, or as in MATCH_RECOGNIZE: "?", "*", "+", "{2}", "{2,5}", "{2,}",
greedy, that is as many as possible; with another "?" behind it reluctant, as few. A greedy stage
without a bound is complete only when no further row can belong to it, so with `then` its matches
come when `within` is over: "+?" gives them at once. Rows of one stage follow each other as the
stage follows the one before; `gaps` says otherwise.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal

from penstock.spark.patterns import tree
from penstock.spark.patterns.errors import PatternError
from penstock.spark.patterns.plan import DEFAULT_MAX_ROWS, Definition, Overflow, Skip
from penstock.spark.patterns.reading import Text, parsed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

Gaps = Literal["next", "then", "any"]
Times = int | str | tuple[int, int | None]
_TIMES: Final = re.compile(r"(\?|\*|\+|\{(\d*)(,?)(\d*)\})(\??)")
_LENGTH: Final = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+?)s?\s*", re.IGNORECASE)
_UNITS_US: Final = {
    "microsecond": 1,
    "millisecond": 1_000,
    "second": 1_000_000,
    "minute": 60_000_000,
    "hour": 3_600_000_000,
    "day": 86_400_000_000,
    "week": 604_800_000_000,
}
_SKIP: Final = re.compile(r"(past last row|to next row)|(to first|to last) (\w+)", re.IGNORECASE)
_MAX_REPEAT: Final = 1_000


@dataclass(frozen=True, slots=True)
class Pattern:
    """A pattern, complete or not: each method gives a new one with something added."""

    parts: tuple[tree.Node, ...]
    names: tuple[str, ...]
    conditions: Mapping[str, Text]
    within_us: int | None = None
    after: Skip = ("past last row", "")
    # A forbidden variable that the gap before the next stage has to respect.
    forbidden: frozenset[int] = frozenset()

    # ---- stages --------------------------------------------------------------------------

    def next(
        self,
        name: str | Pattern,
        condition: str | None = None,
        *,
        times: Times = 1,
        gaps: Gaps | None = None,
    ) -> Pattern:
        """Then, as the very next row, this stage."""
        return self._staged(name, condition, times, "next", gaps)

    def then(
        self,
        name: str | Pattern,
        condition: str | None = None,
        *,
        times: Times = 1,
        gaps: Gaps | None = None,
    ) -> Pattern:
        """Then, at the first row that fits, this stage; rows that do not fit are passed over."""
        return self._staged(name, condition, times, "then", gaps)

    followed_by = then

    def then_any(
        self,
        name: str | Pattern,
        condition: str | None = None,
        *,
        times: Times = 1,
        gaps: Gaps | None = None,
    ) -> Pattern:
        """Then, at some row that fits, this stage: the first from which a match comes."""
        return self._staged(name, condition, times, "any", gaps)

    def one_of(
        self, ways: Mapping[str, str | None], *, times: Times = 1, gaps: Gaps = "then"
    ) -> Pattern:
        """Then one of several, by name and condition; the first that fits is preferred."""
        made = self
        numbers = []
        for name, condition in ways.items():
            made, number = made._with(name, condition)
            numbers.append(number)
        if not numbers:
            raise PatternError("one_of needs at least one way")
        node = tree.Alt(tuple(tree.Var(each) for each in numbers))
        return made._added(node, times, gaps, gaps)

    def not_followed_by(self, name: str, condition: str) -> Pattern:
        """No such row before the next stage; at the end of the pattern, until `within` is over."""
        self._check_open()
        made, number = self._with(name, condition)
        return replace(made, forbidden=made.forbidden | {number})

    def not_next(self, name: str, condition: str) -> Pattern:
        """The very next row, if it comes within the time, is not such a one."""
        self._check_open()
        made, number = self._with(name, condition)
        return replace(made, parts=(*made.parts, tree.PeekNot(frozenset([number]))))

    # ---- bounds --------------------------------------------------------------------------

    def within(self, length: str) -> Pattern:
        """The longest time from the first row to the last, such as "10 minutes"."""
        found = _LENGTH.fullmatch(length)
        unit = found[2].lower() if found else ""
        if found is None or unit not in _UNITS_US:
            raise Text.of(length, "within").error(
                "this is no length of time", advice='Such as "10 minutes" or "1.5 hours".'
            )
        return replace(self, within_us=round(float(found[1]) * _UNITS_US[unit]))

    def skip(self, where: str) -> Pattern:
        """Where the next match may begin: "past last row" (unless said otherwise), "to next row",
        "to first NAME" or "to last NAME". A match that has no such row, or of which it is the first
        one, is an error (PatternSkipError): the next match could not begin there.
        """
        found = _SKIP.fullmatch(" ".join(where.split()))
        if found is None:
            raise Text.of(where, "skip").error(
                "this is not known",
                advice='One of "past last row", "to next row", "to first NAME", "to last NAME".',
            )
        if found[1] is not None:
            kind: Literal["past last row", "to next row"] = (
                "past last row" if found[1].lower() == "past last row" else "to next row"
            )
            return replace(self, after=(kind, ""))
        if found[3].lower() not in {each.lower() for each in self.names}:
            raise Text.of(where, "skip").error(f"{found[3]!r} is no stage", where.find(found[3]))
        to: Literal["to first", "to last"] = (
            "to first" if found[2].lower() == "to first" else "to last"
        )
        return replace(self, after=(to, found[3]))

    # ---- matching ------------------------------------------------------------------------

    def definition(self) -> Definition:
        """The whole, checked."""
        parts = self.parts
        if self.forbidden:
            if self.within_us is None:
                name = self.names[max(self.forbidden)]
                raise PatternError(
                    f"not_followed_by({name!r}) at the end of a pattern needs within(): until when "
                    "is nothing to come?"
                )
            parts = (*parts, tree.Silence(self.forbidden))
        node = parts[0] if len(parts) == 1 else tree.Seq(parts)
        return Definition(
            node, self.names, self.conditions, within_us=self.within_us, skip=self.after
        )

    def match(
        self,
        rows: DataFrame,
        *,
        by: str | Sequence[str] = (),
        measures: Mapping[str, str] | None = None,
        order: str | None = "_time",
        per: Literal["match", "row"] = "match",
        events: bool | Sequence[str] = True,
        max_rows: int = DEFAULT_MAX_ROWS,
        overflow: Overflow = "fail",
        name: str | None = None,
    ) -> DataFrame:
        """The matches over rows with the same values of `by`: see `penstock.spark.patterns`."""
        from penstock.spark.patterns.frames import Wanted, matched

        texts = {key: Text.of(value, f"measure {key!r}") for key, value in (measures or {}).items()}
        wanted = Wanted(
            by=(by,) if isinstance(by, str) else tuple(by),
            order=order,
            measures=texts,
            all_rows=per == "row",
            events=events if isinstance(events, bool) else tuple(events),
            max_rows=max_rows,
            overflow=overflow,
            name=name,
        )
        return matched(self.definition(), rows, wanted)

    # ---- building ------------------------------------------------------------------------

    def _check_open(self) -> None:
        if not self.parts:
            raise PatternError("a pattern begins with begin(), not with what must not come")

    def _staged(
        self,
        name: str | Pattern,
        condition: str | None,
        times: Times,
        gaps: Gaps,
        inner: Gaps | None,
    ) -> Pattern:
        if isinstance(name, Pattern):
            made, node = self._merged(name)
        else:
            made, number = self._with(name, condition)
            node = tree.Var(number)
        return made._added(node, times, gaps, inner or gaps)

    def _with(self, name: str, condition: str | None) -> tuple[Pattern, int]:
        """With a variable of this name, and its number."""
        if not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise PatternError(f"{name!r} is no name for a stage", advice="Letters and digits.")
        lowered = [each.lower() for each in self.names]
        if name.lower() in lowered:
            if condition is not None:
                raise PatternError(
                    f"stage {name!r} is there already, with a condition",
                    advice="Give it another name, or leave the condition out to use the same.",
                )
            return self, lowered.index(name.lower())
        if len(self.names) >= tree.MAX_VARIABLES:
            raise PatternError(f"a pattern has at most {tree.MAX_VARIABLES} stages")
        conditions = dict(self.conditions)
        if condition is not None:
            conditions[name.lower()] = Text.of(condition, f"condition of {name!r}")
            # What cannot be read at all is said here, where it stands.
            parsed(conditions[name.lower()])
        made = replace(self, names=(*self.names, name), conditions=conditions)
        return made, len(self.names)

    def _merged(self, other: Pattern) -> tuple[Pattern, tree.Node]:
        """With the variables of another pattern, which becomes a group."""
        if other.forbidden or other.within_us is not None:
            raise PatternError("a group inside a pattern has no within() and no open negation")
        made = self
        numbers = []
        for name in other.names:
            text = other.conditions.get(name.lower())
            made, number = made._with(name, None if text is None else text.content)
            numbers.append(number)
        return made, _renumbered(tree.Seq(other.parts), numbers)

    def _added(self, node: tree.Node, times: Times, gaps: Gaps, inner: Gaps) -> Pattern:
        least, most, greedy = _times(times)
        if (most is None or most > 1) and tree.can_be_empty(node):
            raise PatternError("a group that is repeated has to have an obligatory stage")
        if gaps == "next" and self.forbidden:
            raise PatternError(
                "not_followed_by() before next() says nothing: there is no row in between",
                advice="Use then() after it, or not_next().",
            )
        before = _gap(gaps, node, self.forbidden) if self.parts else ()
        first = tree.Seq((*before, node)) if before else node
        again = tree.Seq((*_gap(inner, node, frozenset()), node))
        parts: list[tree.Node] = [first]
        if most != 1:
            rest = None if most is None else most - 1
            parts.append(tree.Repeat(again, max(least - 1, 0), rest, greedy))
        whole = parts[0] if len(parts) == 1 else tree.Seq(tuple(parts))
        if least == 0:
            whole = tree.Repeat(whole, 0, 1, greedy)
        made = whole.parts if isinstance(whole, tree.Seq) else (whole,)
        return replace(self, parts=(*self.parts, *made), forbidden=frozenset())


def _gap(gaps: Gaps, node: tree.Node, forbidden: frozenset[int]) -> tuple[tree.Node, ...]:
    if gaps == "next":
        return ()
    if gaps not in {"then", "any"}:
        raise PatternError(f"gaps={gaps!r} is not known", advice="One of next, then and any.")
    passed = tree.first_variables(node) if gaps == "then" else frozenset()
    return (tree.Gap(passed | forbidden),)


def _renumbered(node: tree.Node, numbers: Sequence[int]) -> tree.Node:
    if isinstance(node, tree.Var):
        return tree.Var(numbers[node.number])
    if isinstance(node, tree.Seq):
        return tree.Seq(tuple(_renumbered(each, numbers) for each in node.parts))
    if isinstance(node, tree.Alt):
        return tree.Alt(tuple(_renumbered(each, numbers) for each in node.ways))
    if isinstance(node, tree.Repeat):
        return replace(node, body=_renumbered(node.body, numbers))
    if isinstance(node, tree.Excluded):
        return tree.Excluded(_renumbered(node.body, numbers))
    return replace(node, forbidden=frozenset(numbers[each] for each in node.forbidden))


def _times(times: Times) -> tuple[int, int | None, bool]:
    """Least, most and whether greedy."""
    if isinstance(times, int):
        least, most, greedy = times, times, True
        found: tuple[int, int | None, bool] = (least, most, greedy)
    elif isinstance(times, tuple):
        found = (times[0], times[1], True)
    else:
        read = _TIMES.fullmatch(times.strip())
        if read is None or read[1] == "{}":
            raise Text.of(times, "times").error(
                "this is not how often", advice='A number, or "?", "*", "+", "{2,5}", "+?"…'
            )
        if read[1][0] != "{":
            bounds = {"?": (0, 1), "*": (0, None), "+": (1, None)}[read[1]]
        else:
            low = int(read[2] or 0)
            bounds = (low, (int(read[4]) if read[4] else None) if read[3] else low)
        found = (bounds[0], bounds[1], not read[5])
    least, limit, _ = found
    if not 0 <= least <= _MAX_REPEAT or (limit is not None and not max(least, 1) <= limit <= 1_000):
        raise PatternError(f"times={times!r}: from 0 to {_MAX_REPEAT}, the second not smaller")
    return found


def begin(
    name: str | Pattern, condition: str | None = None, *, times: Times = 1, gaps: Gaps = "then"
) -> Pattern:
    """A pattern that begins with a row that fits `condition`, an expression of Spark's SQL.

    Columns stand for those of the row itself; `small.amount` is that of the last row of the stage
    `small` so far. FIRST, LAST, PREV and COUNT, SUM, AVG, MIN, MAX over the rows of a stage are
    those of MATCH_RECOGNIZE.
    """
    return Pattern((), (), {})._staged(name, condition, times, "next", gaps)


def begin_one_of(ways: Mapping[str, str | None], *, times: Times = 1) -> Pattern:
    """A pattern that begins with one of several rows, by name and condition."""
    return Pattern((), (), {}).one_of(ways, times=times)
