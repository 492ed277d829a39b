"""Errors in the text of a view: what is wrong, in which line and column, with the place marked."""

from __future__ import annotations

import difflib
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError, TokenError

from penstock.spark.flows.errors import DeclarationError
from penstock.spark.views.expressions import Expression

DIALECT: Final = "spark"
# Levels of an expression: what follows them down must not come to the end of Python's stack.
MAX_DEPTH: Final = 150
# What a word that the parser does not expect may have been meant to be.
_WORDS: Final = (
    *("SELECT", "FROM", "WHERE", "GROUP", "BY", "HAVING", "DISTINCT", "UNION", "ALL", "AS"),
    *("LEFT", "INNER", "OUTER", "JOIN", "ON", "USING", "AND", "OR", "NOT", "WITH", "CASE", "WHEN"),
)
COLUMNS_ADVICE: Final = "Write names and types of Spark: id bigint, amount double."
_QUERY: Final = frozenset({"SELECT", "WITH", "FROM", "VALUES", "TABLE"})
_WORD: Final = re.compile(r"[A-Za-z_]\w*")
_CALL: Final = re.compile(r"\b[A-Za-z_]\w*\s*\(\s*$")
_BEFORE: Final = re.compile(r"(?:\s+|--[^\n]*(?:\n|$)|/\*.*?\*/|\()*", re.DOTALL)


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


class ViewError(DeclarationError):
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

    def __deepcopy__(self, memo: dict[int, Any]) -> Text:
        # Parts of expressions carry it, and are copied often.
        return self

    def query(self) -> Expression:
        """The query that the text is; ViewError if it is none."""
        first = _WORD.match(self.sql, _BEFORE.match(self.sql).end())  # type: ignore[union-attr]
        if first is not None and first[0].upper() not in _QUERY and (meant := _meant(first[0])):
            self.refuse(first.start(), f"{first[0]} is not known", f"Is it {meant}?")
        return self.parsed()

    def parsed(self, *, into: type[Expression] | None = None) -> Expression:
        """The expression that the text is; ViewError if it is none."""
        try:
            with _quiet():
                found = sqlglot.parse_one(self.sql, dialect=DIALECT, into=into)
        except ParseError as error:
            at, _, reason = self._wrong(error)
            self._misspelt(at)
            self.refuse(at, reason, "Mend the SQL.")
        except TokenError:
            quotes = [match.start() for match in re.finditer("['\"`]", self.sql)]
            self.refuse(quotes[-1] if quotes else 0, "a text is not closed", "Close the quote.")
        except RecursionError:
            raise self.too_deep() from None
        assert isinstance(found, Expression)
        if _depth(found) > MAX_DEPTH:
            raise self.too_deep()
        found = found.transform(_by_one_name, copy=False)
        for each in found.walk():
            if "start" in each.meta:
                each.meta["text"] = self
        return found

    def columns(self) -> tuple[str, ...]:
        """The names of columns, of a text that is names and types; ViewError if it is not."""
        head = "CREATE TABLE t ("
        whole = Text(f"{head}{self.sql})")
        try:
            with _quiet():
                found = sqlglot.parse_one(whole.sql, dialect=DIALECT)
        except (ParseError, TokenError) as error:
            at, word, _ = whole._wrong(error)
            reason = f"{word} is no type" if _WORD.fullmatch(word) else "this cannot be read"
            if at >= len(head) + len(self.sql):
                at, reason = len(head) + self.sql.rfind("("), "a bracket is not closed"
            self.refuse(at - len(head), reason, COLUMNS_ADVICE)
        schema = found.this if isinstance(found, exp.Create) else None
        parts = schema.expressions if isinstance(schema, exp.Schema) else []
        for each in parts:
            if not isinstance(each, exp.ColumnDef) or each.kind is None:
                name = each.sql(dialect=DIALECT)
                self.refuse(start_of(each) - len(head), f"column {name} has no type",
                            COLUMNS_ADVICE)  # fmt: skip
        if not parts:
            self.refuse(0, "there are no columns", COLUMNS_ADVICE)
        return tuple(each.name for each in parts)

    def _wrong(self, error: ParseError | TokenError) -> tuple[int, str, str]:
        """Where the parser stopped, at which word, and why."""
        first = (error.errors[0] if error.errors else {}) if isinstance(error, ParseError) else {}
        word = str(first.get("highlight") or "")
        at = self._offset(int(first.get("line") or 1), int(first.get("col") or 1))
        reason = re.sub(r" but got <Token.*", "", str(first.get("description") or error))
        if reason.startswith("Required keyword"):
            reason = "an argument is missing"
        return at - max(len(word), 1) + 1, word, reason.removesuffix(".")

    def _misspelt(self, at: int) -> None:
        """ViewError if what is at a place, or just before it, is nearly a word of SQL."""
        words = [found for found in _WORD.finditer(self.sql) if found.start() <= at]
        for each in words[:-3:-1]:
            if meant := _meant(each[0]):
                self.refuse(each.start(), f"{each[0]} is not expected here", f"Is it {meant}?")

    def too_deep(self) -> ViewError:
        """For what goes deeper than can be followed."""
        return self.error(0, "this is too long, or nested too deeply",
                          "Make several views of it, one over the other.")  # fmt: skip

    def _offset(self, line: int, column: int) -> int:
        lines = self.sql.split("\n")
        return sum(len(each) + 1 for each in lines[: line - 1]) + column - 1

    def refuse(self, at: int | Expression, reason: str, advice: str = "") -> NoReturn:
        """ViewError with the place: an offset, or an expression of this text."""
        raise self.error(at, reason, advice)

    def place(self, at: int | Expression) -> tuple[int, int]:
        """Line and column of an offset, or of an expression of this text."""
        start = at if isinstance(at, int) else self._start(at)
        start = max(0, min(start, len(self.sql)))
        begin = self.sql.rfind("\n", 0, start) + 1
        return self.sql.count("\n", 0, start) + 1, start - begin + 1

    def error(self, at: int | Expression, reason: str, advice: str = "") -> ViewError:
        """What `refuse` raises."""
        line, column = self.place(at)
        shown = (self.written or self.sql).split("\n")[line - 1]
        mark = re.sub(r"\S", " ", shown[: column - 1]) + "^"
        place = f"{self.name}:{line}:{column}" if self.name else f"{line}:{column}"
        return ViewError(f"{place}: {reason}\n  {shown}\n  {mark}", advice=advice or None)

    def _start(self, at: Expression) -> int:
        """Where an expression begins: not all that the parser makes knows its own name's place."""
        start = start_of(at)
        if isinstance(at, exp.Case):
            return self.keyword("CASE", at)
        if isinstance(at, exp.Func) and "start" not in at.meta:
            name = _CALL.search(self.sql[:start])
            return name.start() if name is not None else start
        return start

    def keyword(self, words: str, near: Expression) -> int:
        """Where the words stand that begin a clause of which `near` is a part."""
        pattern = re.compile(r"\b" + r"\s+".join(words.split()) + r"\b", re.IGNORECASE)
        found = [match.start() for match in pattern.finditer(self.sql)]
        before = [at for at in found if at <= start_of(near)]
        return (before or found or [start_of(near)])[-1]


def _meant(word: str) -> str:
    """The word of SQL that another one nearly is, if it is none itself."""
    if word.upper() in _WORDS:
        return ""
    return next(iter(difflib.get_close_matches(word.upper(), _WORDS, 1, 0.75)), "")


def located(at: Expression, reason: str, advice: str = "") -> ViewError:
    """An error at an expression of a view, with its place if its text is known."""
    for each in at.walk():
        if isinstance(text := each.meta.get("text"), Text):
            return text.error(at, reason, advice)
    return ViewError(reason, advice=advice or None)


def place_of(at: Expression | None) -> str:
    """Where an expression of a view stands, as LINE:COLUMN; empty if that is not known."""
    for each in at.walk() if at is not None else ():
        if isinstance(text := each.meta.get("text"), Text):
            return ":".join(map(str, text.place(at)))  # type: ignore[arg-type]
    return ""


def _by_one_name(node: Expression) -> Expression:
    """Spark's mean is its avg; the parser knows only the one."""
    is_mean = isinstance(node, exp.Anonymous) and node.name.lower() == "mean"
    if not is_mean or len(node.expressions) != 1:
        return node
    made = exp.Avg(this=node.expressions[0])
    made.meta.update(node.meta)
    return made


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
