"""MATCH_RECOGNIZE as text: its clauses, and the row pattern.

    PARTITION BY card
    ORDER BY at
    MEASURES FIRST(A.amount) AS first, COUNT(B.*) AS tries
    ONE ROW PER MATCH
    AFTER MATCH SKIP PAST LAST ROW
    PATTERN (A B{2,}? NOT C D) WITHIN INTERVAL '10' MINUTE
    SUBSET U = (A, B)
    DEFINE B AS amount > 2 * A.amount, C AS kind = 'cancel'

As in SQL:2016, with two additions. `WITHIN` bounds the time from the first row of a match to the
last (both ends belong to it). `NOT C`, between the variables of the pattern, stands for any number
of rows, as few as possible, of which none fulfils the condition of C; at the end of the pattern,
that no row fulfils it until the time of WITHIN is over.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Final, Literal, cast

from sqlglot import exp

from penstock.spark.patterns import tree
from penstock.spark.patterns.conditions import interval_us
from penstock.spark.patterns.plan import Definition, Skip
from penstock.spark.patterns.reading import Text, parsed

LABEL: Final = "MATCH_RECOGNIZE"
_TOKEN: Final = re.compile(
    r"(?P<space>\s+|--[^\n]*|/\*.*?\*/)"
    r"|(?P<text>'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<name>`[^`]+`|[A-Za-z_]\w*)"
    r"|(?P<number>\d+(?:\.\d+)?)"
    r"|(?P<sign>\{-|-\}|.)",
    re.DOTALL,
)
# How each clause begins. Those of several words first.
_CLAUSES: Final = (
    ("partition", "by"),
    ("order", "by"),
    ("measures",),
    ("one", "row", "per", "match"),
    ("all", "rows", "per", "match"),
    ("after", "match", "skip"),
    ("pattern",),
    ("within",),
    ("subset",),
    ("define",),
)
_MAX_REPEAT: Final = 1_000


@dataclass(frozen=True, slots=True)
class Token:
    kind: str
    text: str
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.text)

    @property
    def name(self) -> str:
        return self.text.strip("`")


@dataclass(slots=True)
class Clauses:
    """What the text says, apart from the pattern itself."""

    definition: Definition
    by: list[tuple[str, int]] = field(default_factory=list)
    order: tuple[str, int] | None = None
    measures: dict[str, Text] = field(default_factory=dict)
    all_rows: bool = False


def tokens(whole: str, start: int, end: int) -> list[Token]:
    return [
        Token(str(found.lastgroup), found[0], found.start())
        for found in _TOKEN.finditer(whole, start, end)
        if found.lastgroup != "space"
    ]


@dataclass(slots=True)
class _Reader:
    """Walks over the tokens of a part of the text."""

    whole: str
    tokens: list[Token]
    end: int
    label: str = LABEL
    at: int = 0

    def error(self, problem: str, token: Token | None = None, advice: str = "") -> Exception:
        token = token or self.peek()
        place = self.end if token is None else token.start
        return Text(self.whole, 0, self.end, self.label).error(problem, place, advice=advice)

    def peek(self, ahead: int = 0) -> Token | None:
        place = self.at + ahead
        return self.tokens[place] if place < len(self.tokens) else None

    def take(self) -> Token:
        token = self.peek()
        if token is None:
            raise self.error("the text ends here, and something is missing")
        self.at += 1
        return token

    def sees(self, text: str) -> bool:
        token = self.peek()
        return token is not None and token.text.lower() == text

    def takes(self, text: str) -> bool:
        if self.sees(text):
            self.at += 1
            return True
        return False

    def expect(self, text: str) -> Token:
        if not self.sees(text):
            raise self.error(f"{text.upper()!r} is expected here")
        return self.take()

    def name(self, what: str) -> Token:
        token = self.peek()
        if token is None or token.kind != "name":
            raise self.error(f"{what} is expected here")
        return self.take()


# ---- clauses -----------------------------------------------------------------------------


def recognized(text: str) -> Clauses:
    """All clauses of a text; what is wrong in it is an error at its place."""
    found = _split(text)
    if "pattern" not in found:
        for token in tokens(text, 0, len(text)):
            if get_close_matches(token.text.lower(), ["pattern"], 1, 0.75):
                raise Text.of(text, LABEL).error(
                    f"{token.text} is not known", token.start, advice="Is it PATTERN?"
                )
        raise Text.of(text, LABEL).error("there is no PATTERN (…)", len(text))
    subsets = _subsets(text, found.get("subset"))
    conditions = _defined(text, found.get("define"))
    row_pattern = RowPattern(_part(text, found["pattern"]), subsets)
    try:
        node = row_pattern.read()
    except RecursionError:
        problem = "the pattern is nested too deeply"
        raise Text.of(text, LABEL).error(problem, found["pattern"][0]) from None
    names = tuple(row_pattern.names.values())
    for name, place in conditions.items():
        if name not in row_pattern.names:
            at = text.rfind(place[0], 0, place[1].start)
            raise Text.of(text, LABEL).error(f"{place[0]!r} is defined, but not in the pattern", at)
    known = {each.lower() for each in names} | {each.lower() for each in subsets}
    for name, (members, at) in subsets.items():
        for each in members:
            if each.lower() not in row_pattern.names:
                raise Text.of(text, LABEL).error(f"{each!r} of subset {name!r} is no variable", at)
    definition = Definition(
        node=node,
        names=names,
        conditions={name: condition for name, (_, condition) in conditions.items()},
        subsets={name: members for name, (members, _) in subsets.items()},
        within_us=_within(text, found.get("within")),
        skip=_skip(text, found.get("after"), known),
        text=Text.of(text, LABEL),
    )
    row_pattern.check(definition.within_us)
    for piece in definition.conditions.values():
        parsed(piece)
    clauses = Clauses(definition)
    clauses.by = _columns(text, found.get("partition"))
    clauses.order = _order(text, found.get("order"))
    clauses.measures = _measures(text, found.get("measures"))
    clauses.all_rows = "all" in found
    _check_rows(text, found)
    return clauses


def _split(text: str) -> dict[str, tuple[int, int]]:
    """Where the content of each clause begins and ends, by its first word."""
    all_tokens = tokens(text, 0, len(text))
    if len(all_tokens) > 1 and all_tokens[0].text.lower() == "match_recognize":
        # The whole clause may be given, with its brackets.
        first = all_tokens[1]
        if first.text != "(":
            raise Text.of(text, LABEL).error("MATCH_RECOGNIZE is followed by (…)", first.start)
        if all_tokens[-1].text != ")":
            raise Text.of(text, LABEL).error("this bracket is not closed", first.start)
        all_tokens = all_tokens[2:-1]
    opened: list[Token] = []
    at = 0
    heads: list[tuple[str, int, int]] = []
    while at < len(all_tokens):
        token = all_tokens[at]
        if token.text == "(":
            opened.append(token)
        if token.text == ")":
            if not opened:
                problem = "a bracket is closed that was not opened"
                raise Text.of(text, LABEL).error(problem, token.start)
            opened.pop()
        words = _clause_at(all_tokens, at) if not opened else None
        if words is not None:
            heads.append((words[0], token.start, all_tokens[at + len(words) - 1].end))
            at += len(words)
            continue
        if not heads:
            raise Text.of(text, LABEL).error(
                f"{token.text!r} is not the beginning of a clause", token.start
            )
        at += 1
    if opened:
        raise Text.of(text, LABEL).error("this bracket is not closed", opened[-1].start)
    found: dict[str, tuple[int, int]] = {}
    if not heads:
        return found
    stop = all_tokens[-1].end
    ends = [start for _, start, _ in heads[1:]] + [stop]
    for (name, start, content), end in zip(heads, ends, strict=True):
        if name in found:
            raise Text.of(text, LABEL).error(f"{name.upper()} is given twice", start)
        found[name] = (content, end)
    return found


def _clause_at(all_tokens: list[Token], at: int) -> tuple[str, ...] | None:
    for words in _CLAUSES:
        if tuple(each.text.lower() for each in all_tokens[at : at + len(words)]) == words:
            return words
    return None


def _part(text: str, span: tuple[int, int]) -> _Reader:
    return _Reader(text, tokens(text, *span), span[1])


def _items(text: str, span: tuple[int, int]) -> list[tuple[int, int, list[Token]]]:
    """What commas outside of brackets part."""
    items, begin, depth = [], span[0], 0
    current: list[Token] = []
    for token in tokens(text, *span):
        depth += {"(": 1, ")": -1}.get(token.text, 0)
        if token.text == "," and depth == 0:
            items.append((begin, token.start, current))
            begin, current = token.end, []
        else:
            current.append(token)
    return [*items, (begin, span[1], current)]


def _columns(text: str, span: tuple[int, int] | None) -> list[tuple[str, int]]:
    found = []
    for _, end, item in _items(text, span) if span else ():
        if len(item) != 1 or item[0].kind != "name":
            at = item[0].start if item else end
            raise Text.of(text, LABEL).error(
                "PARTITION BY takes names of columns", at, advice="Compute it with withColumn."
            )
        found.append((item[0].name, item[0].start))
    return found


def _order(text: str, span: tuple[int, int] | None) -> tuple[str, int] | None:
    if span is None:
        return None
    [*items] = _items(text, span)
    _, end, first = items[0]
    words = [each.text.lower() for each in first]
    if not first or first[0].kind != "name" or words[1:] not in ([], ["asc"]):
        at = (first[1] if len(first) > 1 else first[0]).start if first else end
        raise Text.of(text, LABEL).error("ORDER BY takes one column, ascending", at)
    if len(items) > 1:
        raise Text.of(text, LABEL).error(
            "ORDER BY takes one column: ties are in the order of the log", items[1][0]
        )
    return first[0].name, first[0].start


def _measures(text: str, span: tuple[int, int] | None) -> dict[str, Text]:
    found: dict[str, Text] = {}
    for begin, end, item in _items(text, span) if span else ():
        if len(item) < 3 or item[-2].text.lower() != "as" or item[-1].kind != "name":
            at = item[-1].end if item else end
            raise Text.of(text, LABEL).error("a measure is EXPRESSION AS NAME", at)
        name = item[-1].name
        if name.lower() in {each.lower() for each in found}:
            raise Text.of(text, LABEL).error(f"measure {name!r} is given twice", item[-1].start)
        found[name] = Text(text, begin, item[-2].start, LABEL)
    return found


def _defined(text: str, span: tuple[int, int] | None) -> dict[str, tuple[str, Text]]:
    found: dict[str, tuple[str, Text]] = {}
    for _, end, item in _items(text, span) if span else ():
        if len(item) < 3 or item[0].kind != "name" or item[1].text.lower() != "as":
            at = item[0].start if item else end
            raise Text.of(text, LABEL).error("a definition is VARIABLE AS CONDITION", at)
        name = item[0].name
        if name.lower() in found:
            raise Text.of(text, LABEL).error(f"{name!r} is defined twice", item[0].start)
        found[name.lower()] = (item[0].text, Text(text, item[1].end, end, LABEL))
    return found


def _subsets(text: str, span: tuple[int, int] | None) -> dict[str, tuple[tuple[str, ...], int]]:
    found: dict[str, tuple[tuple[str, ...], int]] = {}
    for _, end, item in _items(text, span) if span else ():
        reader = _Reader(text, item, end)
        name = reader.name("the name of a subset")
        reader.expect("=")
        reader.expect("(")
        members = [reader.name("a variable").name]
        while reader.takes(","):
            members.append(reader.name("a variable").name)
        reader.expect(")")
        found[name.name] = (tuple(members), name.start)
    return found


def _within(text: str, span: tuple[int, int] | None) -> int | None:
    if span is None:
        return None
    piece = Text(text, span[0], span[1], LABEL)
    node = parsed(piece)
    length = interval_us(node) if isinstance(node, exp.Interval) else None
    if length is None or length < 0:
        raise piece.error("WITHIN takes an interval, such as INTERVAL '10' MINUTE")
    return length


def _skip(text: str, span: tuple[int, int] | None, known: set[str]) -> Skip:
    if span is None:
        return ("past last row", "")
    reader = _part(text, span)
    words = " ".join(each.text.lower() for each in reader.tokens)
    if words in {"past last row", "to next row"}:
        return (cast(Literal["past last row", "to next row"], words), "")
    reader.expect("to")
    where: Literal["to first", "to last"] = "to last"
    if len(reader.tokens) == 3:
        where = "to first" if reader.takes("first") else "to last"
        if where == "to last":
            reader.expect("last")
    variable = reader.name("a variable, or NEXT ROW,")
    if variable.name.lower() not in known:
        raise reader.error(f"{variable.name!r} is no variable of the pattern", variable)
    if reader.peek() is not None:
        raise reader.error("this is not expected here")
    return (where, variable.name)


def _check_rows(text: str, found: Mapping[str, tuple[int, int]]) -> None:
    if "one" in found and "all" in found:
        raise Text.of(text, LABEL).error(
            "ONE ROW PER MATCH or ALL ROWS PER MATCH, not both", found["all"][0]
        )
    for name in ("one", "all"):
        rest = tokens(text, *found[name]) if name in found else []
        words = " ".join(each.text.lower() for each in rest)
        if words not in {"", "omit empty matches"}:
            raise Text.of(text, LABEL).error(
                f"{words.upper()} is not possible", rest[0].start,
                advice="Rows and matches without any matched row are not given.",
            )  # fmt: skip


# ---- the row pattern ---------------------------------------------------------------------


@dataclass(slots=True)
class RowPattern:
    """Reads what stands in PATTERN (…)."""

    reader: _Reader
    subsets: Mapping[str, object]
    # By the name in small letters, in the order of their numbers.
    names: dict[str, str] = field(default_factory=dict)
    silent_at: Token | None = None

    def read(self) -> tree.Node:
        self.reader.expect("(")
        node = self._alternatives(top=True)
        self.reader.expect(")")
        if self.reader.peek() is not None:
            raise self.reader.error("this is not expected here")
        return node

    def check(self, within_us: int | None) -> None:
        if self.silent_at is not None and within_us is None:
            raise self.reader.error(
                "NOT at the end of a pattern needs WITHIN: until when is nothing to come?",
                self.silent_at,
            )

    def _alternatives(self, *, top: bool = False) -> tree.Node:
        ways = [self._sequence(top=top)]
        while self.reader.takes("|"):
            ways.append(self._sequence(top=top))
        return ways[0] if len(ways) == 1 else tree.Alt(tuple(ways))

    def _sequence(self, *, top: bool) -> tree.Node:
        parts: list[tree.Node] = []
        nots: list[tuple[int, Token]] = []
        while True:
            token = self.reader.peek()
            if token is None or token.text in {")", "|", ",", "-}"}:
                break
            if token.text.lower() == "not":
                nots.append((len(parts), self.reader.take()))
                if not top or not parts:
                    raise self.reader.error(
                        "NOT stands between two variables of the whole pattern, or at its end",
                        token,
                    )
                parts.append(tree.Gap(frozenset([self._variable()])))
            else:
                parts.append(self._quantified())
        for at, token in nots:
            if at == len(parts) - 1:
                gap = parts[at]
                assert isinstance(gap, tree.Gap)
                parts[at] = tree.Silence(gap.forbidden)
                self.silent_at = token
            elif tree.can_be_empty(parts[at + 1]):
                raise self.reader.error("what follows NOT X must have a row", token)
        return parts[0] if len(parts) == 1 else tree.Seq(tuple(parts))

    def _variable(self) -> int:
        token = self.reader.name("a variable")
        if token.name.lower() in {each.lower() for each in self.subsets}:
            raise self.reader.error("a subset cannot stand in the pattern", token)
        if token.name.lower() not in self.names:
            if len(self.names) >= tree.MAX_VARIABLES:
                raise self.reader.error(f"more than {tree.MAX_VARIABLES} variables", token)
            self.names[token.name.lower()] = token.name
        return list(self.names).index(token.name.lower())

    def _element(self) -> tree.Node:
        token = self.reader.peek()
        assert token is not None
        if self.reader.takes("("):
            node = tree.EMPTY if self.reader.sees(")") else self._alternatives()
            self.reader.expect(")")
            return node
        if self.reader.takes("{-"):
            node = tree.Excluded(self._alternatives())
            self.reader.expect("-}")
            return node
        if token.text in {"^", "$"}:
            raise self.reader.error(
                "a stream has no first or last row to hold on to: ^ and $ are not possible", token
            )
        following = self.reader.peek(1)
        if token.text.lower() == "permute" and following is not None and following.text == "(":
            return self._permuted()
        return tree.Var(self._variable())

    def _permuted(self) -> tree.Node:
        token = self.reader.take()
        self.reader.expect("(")
        nodes = [self._sequence(top=False)]
        while self.reader.takes(","):
            nodes.append(self._sequence(top=False))
        self.reader.expect(")")
        if len(nodes) > tree.MAX_PERMUTED:
            raise self.reader.error(f"PERMUTE takes up to {tree.MAX_PERMUTED}", token)
        return tree.permuted(tuple(nodes))

    def _quantified(self) -> tree.Node:
        start = self.reader.peek()
        node = self._element()
        mark = self.reader.peek()
        bounds = self._bounds()
        if bounds is None:
            return node
        least, most = bounds
        greedy = not self.reader.takes("?")
        if most is not None and (most < least or most == 0):
            raise self.reader.error("the second number is smaller than the first, or 0", mark)
        if most != 1 and tree.can_be_empty(node):
            raise self.reader.error(
                "what is repeated could be empty", start, "Make a part of it obligatory."
            )
        return tree.Repeat(node, least, most, greedy)

    def _bounds(self) -> tuple[int, int | None] | None:
        for sign, bounds in (("?", (0, 1)), ("*", (0, None)), ("+", (1, None))):
            if self.reader.takes(sign):
                return cast(tuple[int, int | None], bounds)
        if not self.reader.takes("{"):
            return None
        least = self._number()
        if self.reader.takes(","):
            most = self._number()
        else:
            if least is None:
                raise self.reader.error("a number is expected here")
            most = least
        self.reader.expect("}")
        return least or 0, most

    def _number(self) -> int | None:
        token = self.reader.peek()
        if token is None or token.kind != "number":
            return None
        self.reader.take()
        if not token.text.isdigit() or int(token.text) > _MAX_REPEAT:
            raise self.reader.error(f"a whole number up to {_MAX_REPEAT} is expected here", token)
        return int(token.text)
