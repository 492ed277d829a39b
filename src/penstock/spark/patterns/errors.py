"""What can be wrong with a pattern: said with the place in its text, and a caret below it."""

from __future__ import annotations

from penstock.spark.flows.errors import DeclarationError


class PatternError(DeclarationError):
    """A pattern that cannot work, or rows that it cannot be matched on."""


class PatternTextError(PatternError):
    """A pattern, a condition or MATCH_RECOGNIZE text that is wrong at some place of it."""

    def __init__(self, problem: str, text: str, at: int, *, label: str, advice: str = "") -> None:
        self.line, self.column, shown = _place(text, at)
        super().__init__(
            f"{label}, {self.line}:{self.column}: {problem}\n{shown}", advice=advice or None
        )


class PatternLimitError(PatternError):
    """A key has more rows, or more possibilities, than a pattern may hold open."""


class PatternSkipError(PatternError):
    """After a match the next one cannot begin where the pattern says."""

    advice = "Skip to the last row of a stage that is never the first, or to the next row."


def _place(text: str, at: int) -> tuple[int, int, str]:
    """Line and column, from 1, of a place in a text, and the line with a caret below."""
    at = max(0, min(at, len(text)))
    begin = text.rfind("\n", 0, at) + 1
    end = text.find("\n", at)
    line = text[begin : len(text) if end < 0 else end]
    column = at - begin
    spaces = "".join("\t" if each == "\t" else " " for each in line[:column])
    return text.count("\n", 0, at) + 1, column + 1, f"    {line}\n    {spaces}^"
