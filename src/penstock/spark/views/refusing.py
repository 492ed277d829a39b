"""Errors in the text of a view: what is wrong, in which line and column, with the place marked."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

import sqlglot
from sqlglot.errors import ParseError, TokenError

from penstock.errors import PenstockError
from penstock.spark.views.expressions import Expression

DIALECT = "spark"
# Levels of an expression: what follows them down must not come to the end of Python's stack.
MAX_DEPTH = 150


@contextmanager
def _quiet() -> Iterator[None]:
    """What the parser makes of statements that are none of ours is told by our own errors."""
    log = logging.getLogger("sqlglot")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


class ViewError(PenstockError):
    """A view cannot be made as it is written."""

    advice = "Change the view."


@dataclass(frozen=True, slots=True)
class Text:
    """The text of a view, or of an expression in one."""

    sql: str
    # What errors begin with, such as the name of a file.
    name: str = ""
    # The text as it was written, if what stands before the SQL was blanked out.
    written: str = ""

    def parsed(self, *, into: type[Expression] | None = None) -> Expression:
        """The expression that the text is; ViewError if it is none."""
        try:
            with _quiet():
                found = sqlglot.parse_one(self.sql, dialect=DIALECT, into=into)
        except ParseError as error:
            first = error.errors[0] if error.errors else {}
            at = self._offset(int(first.get("line") or 1), int(first.get("col") or 1))
            at -= len(str(first.get("highlight") or " ")) - 1
            told = re.sub(r" but got <Token.*", "", str(first.get("description") or error))
            self.refuse(at, told.removesuffix("."), "Mend the SQL.")
        except TokenError:
            quotes = [match.start() for match in re.finditer("['\"`]", self.sql)]
            self.refuse(quotes[-1] if quotes else 0, "a text is not closed", "Close the quote.")
        except RecursionError:
            raise self.too_deep() from None
        assert isinstance(found, Expression)
        if _depth(found) > MAX_DEPTH:
            raise self.too_deep()
        return found

    def too_deep(self) -> ViewError:
        """For what goes deeper than can be followed."""
        return self.error(0, "this is too long, or nested too deeply",
                          "Make several views of it, one over the other.")  # fmt: skip

    def _offset(self, line: int, column: int) -> int:
        lines = self.sql.splitlines(keepends=True)
        return sum(map(len, lines[: line - 1])) + column - 1

    def refuse(self, at: int | Expression, reason: str, advice: str = "") -> NoReturn:
        """ViewError with the place: an offset, or an expression of this text."""
        raise self.error(at, reason, advice)

    def error(self, at: int | Expression, reason: str, advice: str = "") -> ViewError:
        """What `refuse` raises."""
        start = at if isinstance(at, int) else start_of(at)
        start = max(0, min(start, len(self.sql)))
        line = self.sql.count("\n", 0, start) + 1
        begin = self.sql.rfind("\n", 0, start) + 1
        shown = (self.written or self.sql)[begin:].split("\n", 1)[0]
        column = start - begin + 1
        mark = re.sub(r"\S", " ", shown[: column - 1]) + "^"
        place = f"{self.name}:{line}:{column}" if self.name else f"{line}:{column}"
        return ViewError(f"{place}: {reason}\n  {shown}\n  {mark}", advice=advice or None)

    def keyword(self, words: str, near: Expression) -> int:
        """Where the words stand that begin a clause of which `near` is a part."""
        pattern = re.compile(r"\b" + r"\s+".join(words.split()) + r"\b", re.IGNORECASE)
        found = [match.start() for match in pattern.finditer(self.sql)]
        before = [at for at in found if at <= start_of(near)]
        return (before or found or [start_of(near)])[-1]


def _depth(node: Expression) -> int:
    deepest, left = 0, [(node, 1)]
    while left:
        each, depth = left.pop()
        deepest = max(deepest, depth)
        left += [(inner, depth + 1) for inner in each.iter_expressions()]
    return deepest


def start_of(expression: Expression) -> int:
    """Where an expression begins in its text."""
    starts = [each.meta["start"] for each in expression.walk() if "start" in each.meta]
    return min(starts, default=0)
