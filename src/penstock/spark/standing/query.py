"""The language of standing queries, and its parser. A wrong query is told with the place.

    title:"red shoes" AND price:[10 TO 50} AND NOT brand:acme
    (shoes OR boots) at:[2026-01-01 TO *] price:>=10 colour:(red OR blue)

A word alone is looked for in all text fields, FIELD:WORD in one; "a phrase" is words that follow
one another. Case does not count in text, and neither does what is between words. A field that is a
keyword is compared as a whole, as it is written. Numbers and times have ranges, [ and ] with their
end and { and } without it, * for no end, or >, >=, <, <=; a number alone means this number, and a
day, such as 2026-01-31, the whole day (UTC). Side by side means AND, which binds stronger than OR;
NOT or - binds strongest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal, NamedTuple

from penstock.errors import PenstockError
from penstock.spark.standing.words import words

Kind = Literal["text", "keyword", "number", "time"]
KINDS: Final = ("text", "keyword", "number", "time")
MAX_LENGTH: Final = 10_000
MAX_LEAVES: Final = 256
MAX_DEPTH: Final = 40


class QueryError(PenstockError):
    """A query that cannot be understood; `position` counts its characters from 0."""

    def __init__(self, reason: str, text: str, position: int) -> None:
        start = max(0, position - 40)
        shown = text[start : position + 40].replace("\n", " ")
        super().__init__(
            f"{reason}, at character {position + 1}:\n  {shown}\n  {' ' * (position - start)}^"
        )
        self.reason = reason
        self.position = position


# ---- what a query is ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Word:
    """A field has a word; or a keyword field is this."""

    field: str
    word: str

    def __str__(self) -> str:
        return f"{self.field}:{self.word}"


@dataclass(frozen=True, slots=True)
class Phrase:
    """A field has words that follow one another."""

    field: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f'{self.field}:"{" ".join(self.words)}"'


@dataclass(frozen=True, slots=True)
class Range:
    """A number, or a time in microseconds, is between two others."""

    field: str
    low: float
    high: float
    with_low: bool
    with_high: bool
    shown: str

    def __str__(self) -> str:
        return f"{self.field}:{self.shown}"


@dataclass(frozen=True, slots=True)
class Not:
    inner: Node


@dataclass(frozen=True, slots=True)
class All:
    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Either:
    parts: tuple[Node, ...]


Leaf = Word | Phrase | Range
Node = Leaf | Not | All | Either


def leaves(node: Node) -> Iterator[Leaf]:
    """All that a query looks at."""
    if isinstance(node, Not):
        yield from leaves(node.inner)
    elif isinstance(node, All | Either):
        for each in node.parts:
            yield from leaves(each)
    else:
        yield node


# ---- reading it --------------------------------------------------------------------------


class _Token(NamedTuple):
    kind: str
    text: str
    at: int


_LEX: Final = re.compile(
    r"""(?P<space>\s+)
      | (?P<open>\() | (?P<close>\))
      | (?P<quoted>"(?:[^"\\]|\\.)*")
      | (?P<range>[\[{][^\]}]*[\]}])
      | (?P<field>[^\W\d][\w.]*:)
      | (?P<compare>[<>]=?)
      | (?P<minus>-(?=[^\s)]))
      | (?P<word>[^\s()"\[\]{}<>:]+)
    """,
    re.VERBOSE,
)
# What stands right behind a field or a comparison may have signs and colons in it.
_VALUE: Final = re.compile(r"""(?P<word>[^\s()"\[\]{}<>]+)""")
_RANGE: Final = re.compile(
    r"""([\[{])\s*("[^"]*"|[^\s"]+)\s+TO\s+("[^"]*"|[^\s"]+)\s*([\]}])""", re.IGNORECASE
)
_DAY: Final = re.compile(r"\d{4}-\d\d-\d\d")


def parse(text: str, fields: Mapping[str, Kind]) -> Node:
    """The query that a text says; QueryError if it says none."""
    if len(text) > MAX_LENGTH:
        raise QueryError(f"a query has at most {MAX_LENGTH} characters", text, MAX_LENGTH)
    return _Parser(text, fields).whole()


class _Parser:
    def __init__(self, text: str, fields: Mapping[str, Kind]) -> None:
        self._text = text
        self._fields = fields
        self._tokens = list(self._lexed())
        self._at = 0
        self._leaves = 0
        self._depth = 0

    def _lexed(self) -> Iterator[_Token]:
        at, is_value = 0, False
        while at < len(self._text):
            found = _VALUE.match(self._text, at) if is_value else None
            found = found or _LEX.match(self._text, at)
            if found is None:
                raise QueryError(_unreadable(self._text[at]), self._text, at)
            kind = str(found.lastgroup)
            text = found.group()
            if kind == "word" and not is_value and text in {"AND", "OR", "NOT"}:
                kind = text
            if kind != "space":
                yield _Token(kind, text, at)
            at, is_value = found.end(), kind in {"field", "compare"}
        yield _Token("end", "", len(self._text))

    def _error(self, reason: str, at: int) -> QueryError:
        return QueryError(reason, self._text, at)

    @property
    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _take(self) -> _Token:
        self._at += 1
        return self._tokens[self._at - 1]

    def whole(self) -> Node:
        if self._next.kind == "end":
            raise self._error("the query is empty", 0)
        found = self._any(None)
        if self._next.kind != "end":
            raise self._error("a ) without its (", self._next.at)
        return found

    def _any(self, field: str | None) -> Node:
        parts = [self._all(field)]
        while self._next.kind == "OR":
            self._take()
            parts.append(self._all(field))
        return parts[0] if len(parts) == 1 else Either(tuple(parts))

    def _all(self, field: str | None) -> Node:
        parts = [self._not(field)]
        while self._next.kind not in {"OR", "close", "end"}:
            if self._next.kind == "AND":
                self._take()
            parts.append(self._not(field))
        return parts[0] if len(parts) == 1 else All(tuple(parts))

    def _not(self, field: str | None) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise self._error(f"more than {MAX_DEPTH} levels deep", self._next.at)
        try:
            if self._next.kind in {"NOT", "minus"}:
                self._take()
                return Not(self._not(field))
            return self._one(field)
        finally:
            self._depth -= 1

    def _one(self, field: str | None) -> Node:
        token = self._take()
        if token.kind == "open":
            found = self._any(field)
            if self._next.kind != "close":
                raise self._error("a ( without its )", token.at)
            self._take()
            return found
        if token.kind == "field":
            name = token.text[:-1]
            if field is not None:
                raise self._error(f"{name}: inside of {field}:(...)", token.at)
            if name not in self._fields:
                known = ", ".join(self._fields)
                raise self._error(f"no field {name!r}; there are {known}", token.at)
            if self._next.kind in {"end", "AND", "OR", "NOT", "field", "close"}:
                raise self._error(f"{name}: without a value", self._next.at)
            return self._one(name)
        if token.kind in {"AND", "OR", "close", "end", "minus", "NOT"}:
            wrong = {"end": "the query ends too early", "close": "nothing before )"}
            raise self._error(wrong.get(token.kind, f"nothing for {token.text} to join"), token.at)
        return self._leaf(token, field)

    def _leaf(self, token: _Token, field: str | None) -> Node:
        self._leaves += 1
        if self._leaves > MAX_LEAVES:
            raise self._error(f"more than {MAX_LEAVES} conditions", token.at)
        if field is not None:
            return self._of_field(token, field)
        if token.kind in {"range", "compare"}:
            raise self._error("a range needs its field, as in price:[1 TO 5]", token.at)
        found = tuple(
            self._text_leaf(token, name) for name, kind in self._fields.items() if kind == "text"
        )
        if not found:
            raise self._error("a word needs its field, for none is text", token.at)
        self._leaves += len(found) - 1
        return found[0] if len(found) == 1 else Either(found)

    def _of_field(self, token: _Token, field: str) -> Node:
        kind = self._fields[field]
        if kind in {"number", "time"}:
            return self._range(token, field, kind)
        if token.kind in {"range", "compare"}:
            raise self._error(f"{field} is {kind} and has no ranges", token.at)
        if kind == "text":
            return self._text_leaf(token, field)
        return Word(field, _unquoted(token))

    def _text_leaf(self, token: _Token, field: str) -> Leaf:
        if token.kind == "word" and ("*" in token.text or "?" in token.text):
            raise self._error("* and ? are not known in words", token.at)
        found = words(_unquoted(token))
        if not found:
            raise self._error(f"no word in {token.text}", token.at)
        return Word(field, found[0]) if len(found) == 1 else Phrase(field, tuple(found))

    # ---- numbers and times -----------------------------------------------------------------

    def _range(self, token: _Token, field: str, kind: Kind) -> Range:
        if token.kind == "range":
            found = _RANGE.fullmatch(token.text)
            if found is None:
                raise self._error("a range is [LOW TO HIGH]", token.at)
            opening, low, high, closing = found.groups()
            start, end = _DOWN, _UP
            if low != "*":
                start = self._bound(low, kind, token.at + found.start(2))
            if high != "*":
                end = self._bound(high, kind, token.at + found.start(3))
            return self._made(field, start, end, opening == "[", closing == "]", token.text)
        if token.kind == "compare":
            value = self._take()
            if value.kind not in {"word", "quoted"}:
                raise self._error(f"{token.text} without a value", value.at)
            bound = self._bound(value.text, kind, value.at)
            shown = f"{token.text}{value.text}"
            has_end = token.text.endswith("=")
            if token.text.startswith(">"):
                return self._made(field, bound, _UP, has_end, False, shown)
            return self._made(field, _DOWN, bound, False, has_end, shown)
        bound = self._bound(token.text, kind, token.at)
        return self._made(field, bound, bound, True, True, token.text)

    def _made(
        self, field: str, low: _Bound, high: _Bound, with_low: bool, with_high: bool, shown: str
    ) -> Range:
        # A day has a width: to its end, or from its end on.
        start = low.first if with_low or low.first == low.last else low.last
        end = high.last if with_high else high.first
        wide_low, wide_high = low.first != low.last, high.first != high.last
        return Range(
            field, start, end, with_low or wide_low, with_high and not wide_high, shown
        )  # fmt: skip

    def _bound(self, text: str, kind: Kind, at: int) -> _Bound:
        text = text.strip('"')
        if kind == "number":
            try:
                value = float(text)
            except ValueError:
                raise self._error(f"{text!r} is no number", at) from None
            if math.isnan(value):
                raise self._error("nan is no number", at)
            return _Bound(value, value)
        try:
            when = datetime.fromisoformat(text)
        except ValueError:
            raise self._error(f"{text!r} is no time, such as 2026-01-31T12:00:00", at) from None
        when = when.replace(tzinfo=UTC) if when.tzinfo is None else when
        start = micros(when)
        if _DAY.fullmatch(text):
            return _Bound(start, start + micros_of(timedelta(days=1)))
        return _Bound(start, start)


class _Bound(NamedTuple):
    first: float
    last: float


_UP: Final = _Bound(math.inf, math.inf)
_DOWN: Final = _Bound(-math.inf, -math.inf)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def micros(when: datetime) -> float:
    return micros_of(when - _EPOCH)


def micros_of(span: timedelta) -> float:
    return float(span // timedelta(microseconds=1))


def _unquoted(token: _Token) -> str:
    if token.kind != "quoted":
        return token.text
    return re.sub(r"\\(.)", r"\1", token.text[1:-1])


def _unreadable(character: str) -> str:
    if character == '"':
        return 'a " without its second'
    if character in "[{":
        return f"a {character} without its end"
    return f"unexpected {character!r}"
