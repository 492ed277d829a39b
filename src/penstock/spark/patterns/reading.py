"""Conditions and measures as trees: parsed by sqlglot, each name with its place in the text.

A slice of a longer text is parsed with all before it blanked out, so that places count from the
beginning of the whole. FIRST, LAST and aggregates are given names of the same length that sqlglot
does not know, because it would drop their second argument; RUNNING and FINAL are drawn into the
name of the function after them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

import sqlglot
from sqlglot import exp
from sqlglot.errors import ParseError, SqlglotError

from penstock.spark.patterns.errors import PatternTextError

_SKIPPED: Final = r"'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\"|`[^`]*`|--[^\n]*|/\*.*?\*/"
_NAMES: Final = re.compile(
    rf"({_SKIPPED})|\b(?:(RUNNING|FINAL)(\s+))?(FIRST|LAST|COUNT|SUM|AVG|MIN|MAX)(?=\s*\()",
    re.IGNORECASE | re.DOTALL,
)
# Of the same length as what they stand for.
_STANDS_FOR: Final = {
    "first": "f1rst",
    "last": "la5t",
    "count": "c0unt",
    "sum": "5um",
    "avg": "av9",
    "min": "m1n",
    "max": "m4x",
}
_MEANS: Final = {value: key for key, value in _STANDS_FOR.items()}
_CALLED: Final = re.compile(r"(?:(runn1ng|f1nal)_+)?(\w+)")


@dataclass(frozen=True, slots=True)
class Text:
    """A piece of text, and where it stands: what carets are drawn below."""

    whole: str
    start: int
    end: int
    # What it is, for people: "condition of B".
    label: str

    @classmethod
    def of(cls, text: str, label: str) -> Text:
        return cls(text, 0, len(text), label)

    @property
    def content(self) -> str:
        return self.whole[self.start : self.end]

    def first(self) -> int:
        """Where it begins, spaces apart."""
        return self.start + len(self.content) - len(self.content.lstrip())

    def error(self, problem: str, at: int | None = None, *, advice: str = "") -> PatternTextError:
        place = self.first() if at is None else at
        return PatternTextError(problem, self.whole, place, label=self.label, advice=advice)


# Of an expression; what follows it down has as many levels again for itself.
MAX_DEPTH: Final = 100


def parsed(text: Text) -> Any:
    """The expression of a text; where it is none, an error at the place."""
    before = "".join(each if each == "\n" else " " for each in text.whole[: text.start])
    if not text.content.strip():
        raise text.error("there is no expression here", text.end)
    renamed = before + _NAMES.sub(_stand_in, text.content)
    try:
        found = sqlglot.parse_one(renamed, dialect="spark")
    except ParseError as error:
        raise _located(text, error) from None
    except SqlglotError:
        raise text.error("this cannot be read: a quote or bracket that is not closed?") from None
    except RecursionError:
        raise text.error("this is nested too deeply") from None
    if _depth(found) > MAX_DEPTH:
        raise text.error("this is nested too deeply", advice="Compute a part with withColumn.")
    if not isinstance(found, exp.Expression) or isinstance(found, exp.Query | exp.Alias | exp.DDL):
        raise text.error("this is no expression")
    if isinstance(found, exp.Command):
        raise text.error("this is no expression")
    for bad in found.find_all(exp.Query, exp.Window):
        raise text.error("queries and window functions are not possible here", place(bad, text))
    return found


def _depth(node: Any) -> int:
    deepest, left = 0, [(node, 1)]
    while left:
        each, depth = left.pop()
        deepest = max(deepest, depth)
        left += [(inner, depth + 1) for inner in each.iter_expressions()]
    return deepest


def _stand_in(found: re.Match[str]) -> str:
    if found[1] is not None:
        return found[1]
    name = _STANDS_FOR[found[4].lower()]
    if found[2] is None:
        return name
    prefix = "runn1ng" if found[2].lower() == "running" else "f1nal"
    return f"{prefix}{'_' * len(found[3])}{name}"


def _located(text: Text, error: ParseError) -> PatternTextError:
    told = error.errors[0] if error.errors else {}
    line, column = told.get("line") or 1, told.get("col") or 1
    marked = told.get("highlight") or ""
    begin = 0
    for _ in range(line - 1):
        begin = text.whole.find("\n", begin) + 1
    at = max(text.start, min(begin + column - max(len(marked), 1), text.end))
    for_people = _for_people(str(told.get("description") or "this cannot be read"))
    return text.error(for_people, at)


def _for_people(description: str) -> str:
    if description.startswith("Required keyword"):
        return "something is missing here"
    if "Unexpected token" in description:
        return "this is not expected here"
    return description.split(" <class", 1)[0]


def called(node: Any) -> tuple[str, bool | None]:
    """The name of a function that is not of Spark, in small letters, and whether it is FINAL."""
    if not isinstance(node, exp.Anonymous):
        return "", None
    found = _CALLED.fullmatch(str(node.this).lower())
    if found is None:
        return str(node.this).lower(), None
    return _MEANS.get(found[2], found[2]), None if found[1] is None else found[1] == "f1nal"


def place(node: Any, text: Text) -> int:
    """Where a part of the expression begins, as far as that is known: at its first name."""
    found = [each.meta["start"] for each in node.find_all(exp.Identifier) if "start" in each.meta]
    return min(found, default=text.first())


def parts(node: exp.Column) -> list[exp.Identifier]:
    """`a.b.c` as its names."""
    return [each for each in node.parts if isinstance(each, exp.Identifier)]
