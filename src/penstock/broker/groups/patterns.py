"""Regular expressions that members subscribe with, matched by the broker in bounded time.

KIP-848 leaves it to the broker to find the topics that a pattern means, in the language of RE2:
no back-references, no looking around, and so no pattern that takes exponential time. Python's own
engine gives no such promise, and one pattern must not stop the broker. So a pattern is parsed here
into an automaton that reads a name once, and whose states are remembered for the next name.

Topic names consist of letters, digits, dot, underscore and dash, so a class of characters is the
set of those among them that it contains, and flags about lines mean nothing. As in Kafka a pattern
must match the whole name.

What a client can make the broker do has bounds: the pattern's length, its nesting, the automaton's
size (counted repetitions are written out), the states remembered, and the work of one resolution.
"""

from __future__ import annotations

import string
from collections.abc import Container, Iterable, Set
from dataclasses import dataclass
from typing import Final

MAX_LENGTH: Final = 4_096
_MAX_DEPTH: Final = 100
# RE2's bound of a counted repetition.
_MAX_REPEAT: Final = 1_000
_MAX_PROGRAM: Final = 10_000
_MAX_STATES: Final = 2_000
# Instructions that are looked at for one resolution: some tenths of a second.
_MAX_WORK: Final = 2_000_000

_DIGITS: Final = frozenset(string.digits)
_UPPER: Final = frozenset(string.ascii_uppercase)
_LOWER: Final = frozenset(string.ascii_lowercase)
_LETTERS: Final = _UPPER | _LOWER
_WORD: Final = _LETTERS | _DIGITS | {"_"}
_PUNCTUATION: Final = frozenset("._-")
ALPHABET: Final = _WORD | _PUNCTUATION
_NONE: Final[frozenset[str]] = frozenset()

_PERL: Final = {"d": _DIGITS, "w": _WORD, "s": _NONE}
_POSIX: Final = {
    "alnum": _LETTERS | _DIGITS,
    "alpha": _LETTERS,
    "ascii": ALPHABET,
    "blank": _NONE,
    "cntrl": _NONE,
    "digit": _DIGITS,
    "graph": ALPHABET,
    "lower": _LOWER,
    "print": ALPHABET,
    "punct": _PUNCTUATION,
    "space": _NONE,
    "upper": _UPPER,
    "word": _WORD,
    "xdigit": frozenset(string.hexdigits),
}
_UNICODE: Final = {
    "L": _LETTERS,
    "Lu": _UPPER,
    "Ll": _LOWER,
    "N": _DIGITS,
    "Nd": _DIGITS,
    "P": _PUNCTUATION,
    "Pc": frozenset("_"),
    "Pd": frozenset("-"),
    "Po": frozenset("."),
    "Latin": _LETTERS,
    "Common": _DIGITS | _PUNCTUATION,
}
_CONTROLS: Final = {"a": "\a", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_ASSERTIONS: Final = {"A": "^", "z": "$", "b": "b", "B": "B"}

# What is before or after a place in a name.
_EDGE, _IN_WORD, _NO_WORD = range(3)


class PatternError(ValueError):
    """This is no pattern, or it asks for too much."""


@dataclass(frozen=True, slots=True)
class _Chars:
    chars: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Assert:
    kind: str


@dataclass(frozen=True, slots=True)
class _Sequence:
    nodes: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Choice:
    nodes: tuple[_Node, ...]


@dataclass(frozen=True, slots=True)
class _Repeat:
    node: _Node
    low: int
    high: int | None


_Node = _Chars | _Assert | _Sequence | _Choice | _Repeat


class _Parser:
    """RE2's syntax, as far as it can mean anything for topic names."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self._ignore_case = False

    def parse(self) -> _Node:
        node = self._choice()
        if self._at < len(self._text):
            raise PatternError("there is a ')' without its '('")
        return node

    def _peek(self, text: str) -> bool:
        return self._text.startswith(text, self._at)

    def _accept(self, text: str) -> bool:
        if self._peek(text):
            self._at += len(text)
            return True
        return False

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise PatternError("the pattern ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _until(self, end: str) -> str:
        found = self._text.find(end, self._at)
        if found < 0:
            raise PatternError(f"{end!r} is missing")
        text, self._at = self._text[self._at : found], found + len(end)
        return text

    def _choice(self) -> _Node:
        # Flags hold to the end of the group they are set in.
        flags = self._ignore_case
        nodes = [self._sequence()]
        while self._accept("|"):
            nodes.append(self._sequence())
        self._ignore_case = flags
        return nodes[0] if len(nodes) == 1 else _Choice(tuple(nodes))

    def _sequence(self) -> _Node:
        nodes: list[_Node] = []
        while self._at < len(self._text) and not self._peek("|") and not self._peek(")"):
            if self._accept("\\Q"):
                end = self._text.find("\\E", self._at)
                quoted = self._text[self._at :] if end < 0 else self._until("\\E")
                self._at = len(self._text) if end < 0 else self._at
                nodes += [self._literal(char) for char in quoted]
            else:
                nodes.append(self._repeated(self._atom()))
        return nodes[0] if len(nodes) == 1 else _Sequence(tuple(nodes))

    def _repeated(self, node: _Node) -> _Node:
        bounds = self._bounds()
        if bounds is None:
            return node
        # Whether as much or as little as possible: for a whole match it is the same.
        self._accept("?")
        if self._bounds() is not None:
            raise PatternError("a repetition cannot be repeated without a group")
        return _Repeat(node, *bounds)

    def _bounds(self) -> tuple[int, int | None] | None:
        """The repetition that follows, if any; a brace that is none is a literal."""
        for sign, bounds in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self._accept(sign):
                return bounds
        if not self._peek("{"):
            return None
        end = self._text.find("}", self._at)
        low, comma, high = self._text[self._at + 1 : max(end, 0)].partition(",")
        if end < 0 or not _is_number(low) or (high and not _is_number(high)):
            return None
        self._at = end + 1
        least = int(low)
        most = (int(high) if high else None) if comma else least
        if max(least, most or 0) > _MAX_REPEAT or (most is not None and most < least):
            raise PatternError(f"a repetition of {low}{comma}{high} is not possible")
        return least, most

    def _atom(self) -> _Node:
        char = self._next()
        if char == "(":
            return self._group()
        if char == "[":
            return _Chars(self._folded(self._char_class()))
        if char == ".":
            return _Chars(ALPHABET)
        if char in "^$":
            return _Assert(char)
        if char in "*+?":
            raise PatternError(f"there is nothing that {char!r} could repeat")
        if char == "\\":
            if self._at < len(self._text) and self._text[self._at] in _ASSERTIONS:
                return _Assert(_ASSERTIONS[self._next()])
            return _Chars(self._folded(self._escape()))
        return self._literal(char)

    def _literal(self, char: str) -> _Node:
        return _Chars(self._folded(frozenset(char) & ALPHABET))

    def _folded(self, chars: frozenset[str]) -> frozenset[str]:
        if not self._ignore_case:
            return chars
        return chars | {char.swapcase() for char in chars}

    def _group(self) -> _Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise PatternError(f"groups are nested deeper than {_MAX_DEPTH}")
        flags = self._ignore_case
        if self._accept("?"):
            if self._accept("P<") or (self._accept("<") and not self._peek_lookbehind()):
                name = self._until(">")
                if not name or not set(name) <= _WORD:
                    raise PatternError(f"{name!r} is no name of a group")
            elif not self._flags():
                # Flags alone: for the rest of the group that this is in.
                self._depth -= 1
                return _Sequence(())
        node = self._choice()
        if not self._accept(")"):
            raise PatternError("')' is missing")
        self._depth -= 1
        self._ignore_case = flags
        return node

    def _peek_lookbehind(self) -> bool:
        if self._peek("=") or self._peek("!"):
            raise PatternError("looking behind is not possible")
        return False

    def _flags(self) -> bool:
        """Flags up to ':' or ')'; whether a group follows them."""
        on = True
        while True:
            char = self._next()
            if char == "i":
                self._ignore_case = on
            elif char == "-" and on:
                on = False
            elif char in ":)":
                return char == ":"
            elif char not in "msU":
                raise PatternError(f"(?{char} is not possible")

    def _escape(self) -> frozenset[str]:
        """What follows a backslash, as a set of characters."""
        char = self._next()
        if char.lower() in _PERL:
            chars = _PERL[char.lower()]
            return chars if char.islower() else ALPHABET - chars
        if char in "pP":
            name = self._until("}") if self._accept("{") else self._next()
            negated = (char == "P") != name.startswith("^")
            found = _UNICODE.get(name.removeprefix("^"))
            if found is None:
                raise PatternError(f"\\{char}{{{name}}} is not known")
            return ALPHABET - found if negated else found
        if char == "C":
            return ALPHABET
        return frozenset(self._escaped_char(char)) & ALPHABET

    def _escaped_char(self, char: str) -> str:
        if char == "x":
            digits = self._until("}") if self._accept("{") else self._next() + self._next()
            return _char(digits, 16)
        if char == "0":
            digits = char
            while len(digits) < 3 and self._at < len(self._text) and self._text[self._at] in _OCTAL:
                digits += self._next()
            return _char(digits, 8)
        if char in _CONTROLS:
            return _CONTROLS[char]
        if char.isalnum():
            raise PatternError(f"\\{char} is not possible")
        return char

    def _char_class(self) -> frozenset[str]:
        negated = self._accept("^")
        chars: set[str] = set()
        first = True
        while first or not self._peek("]"):
            first = False
            if self._accept("[:"):
                chars |= self._posix(self._until(":]"))
                continue
            low = self._class_item()
            if len(low) == 1 and self._peek("-") and not self._peek("-]"):
                self._accept("-")
                high = self._class_item()
                if len(high) != 1 or high < low:
                    raise PatternError(f"there is no range from {low!r} to {high!r}")
                chars |= {char for char in ALPHABET if low <= char <= high}
            else:
                chars.update(low)
        self._accept("]")
        # Before it is turned round: what is not this letter is not the other one either.
        found = self._folded(frozenset(chars) & ALPHABET)
        return ALPHABET - found if negated else found

    def _class_item(self) -> str:
        """One character, or several that an escape means."""
        char = self._next()
        if char != "\\":
            return char
        if self._at < len(self._text) and self._text[self._at] in "dDwWsSpP":
            # Never one alone: that would be taken for the beginning of a range.
            return "".join(sorted(self._escape())) * 2
        return self._escaped_char(self._next())

    def _posix(self, name: str) -> frozenset[str]:
        chars = _POSIX.get(name.removeprefix("^"))
        if chars is None:
            raise PatternError(f"[:{name}:] is not known")
        return ALPHABET - chars if name.startswith("^") else chars


_OCTAL: Final = "01234567"


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 6


def _char(digits: str, base: int) -> str:
    try:
        return chr(int(digits, base))
    except (ValueError, OverflowError):
        raise PatternError(f"{digits!r} is no character") from None


class TopicPattern:
    """A pattern, ready to be matched with topic names; PatternError if it is none."""

    def __init__(self, text: str) -> None:
        if len(text) > MAX_LENGTH:
            raise PatternError(f"a pattern has at most {MAX_LENGTH} characters, not {len(text)}")
        self.text = text
        # Instruction n: characters (or an assertion) and where it goes on, or two ways to go on.
        self._chars: list[frozenset[str] | None] = []
        self._asserts: list[str | None] = []
        self._goes_on: list[tuple[int, ...]] = []
        self._parts = 0
        self._match = self._add(None, None, ())
        start = self._compile(_Parser(text).parse(), self._match)
        # A state: instructions that are reached, and what the last character was.
        self._start = (frozenset((start,)), _EDGE)
        self._steps: dict[tuple[_State, str], _State] = {}
        self._work = 0

    def matching(self, names: Iterable[str]) -> set[str]:
        """Those of the names that match; PatternError if that takes too much work."""
        self._work = 0
        return {name for name in names if self._matches(name)}

    def _matches(self, name: str) -> bool:
        state = self._start
        for char in name:
            known = self._steps.get((state, char))
            if known is None:
                known = self._step(state, char)
                if len(self._steps) >= _MAX_STATES:
                    self._steps.clear()
                self._steps[state, char] = known
            state = known
            if not state[0]:
                return False
        return self._match in self._reached(state, _EDGE)

    def _step(self, state: _State, char: str) -> _State:
        after = _IN_WORD if char in _WORD else _NO_WORD
        reached = frozenset(
            self._goes_on[at][0]
            for at in self._reached(state, after)
            if (chars := self._chars[at]) is not None and char in chars
        )
        return reached, after

    def _reached(self, state: _State, after: int) -> set[int]:
        """All instructions that are reached without reading on."""
        starts, before = state
        reached: set[int] = set()
        pending = list(starts)
        while pending:
            at = pending.pop()
            if at in reached:
                continue
            reached.add(at)
            kind = self._asserts[at]
            if self._chars[at] is None and (kind is None or _holds(kind, before, after)):
                pending += self._goes_on[at]
        self._work += len(reached)
        if self._work > _MAX_WORK:
            raise PatternError("the pattern takes too much work")
        return reached

    def _add(self, chars: frozenset[str] | None, kind: str | None, goes_on: tuple[int, ...]) -> int:
        self._chars.append(chars)
        self._asserts.append(kind)
        self._goes_on.append(goes_on)
        return len(self._chars) - 1

    def _compile(self, node: _Node, then: int) -> int:
        """Add the instructions for a node that goes on at `then`; where they begin."""
        self._parts += 1
        if self._parts > _MAX_PROGRAM:
            raise PatternError("the pattern is too large with its repetitions written out")
        if isinstance(node, _Chars):
            return self._add(node.chars, None, (then,))
        if isinstance(node, _Assert):
            return self._add(None, node.kind, (then,))
        if isinstance(node, _Sequence):
            for part in reversed(node.nodes):
                then = self._compile(part, then)
            return then
        if isinstance(node, _Choice):
            return self._add(None, None, tuple(self._compile(part, then) for part in node.nodes))
        return self._compile_repeat(node, then)

    def _compile_repeat(self, node: _Repeat, then: int) -> int:
        if node.high is None:
            start = self._add(None, None, ())
            self._goes_on[start] = (self._compile(node.node, start), then)
        else:
            start = then
            for _ in range(node.high - node.low):
                start = self._add(None, None, (self._compile(node.node, start), then))
        for _ in range(node.low):
            start = self._compile(node.node, start)
        return start


_State = tuple[frozenset[int], int]


def _holds(kind: str, before: int, after: int) -> bool:
    if kind == "^":
        return before == _EDGE
    if kind == "$":
        return after == _EDGE
    return ((before == _IN_WORD) != (after == _IN_WORD)) == (kind == "b")


class PatternBook:
    """The patterns of one group, with the topics that each is known to match.

    A name is matched once with each pattern: what is new since the last time is looked at, and
    what is gone is forgotten.
    """

    def __init__(self) -> None:
        self._patterns: dict[str, TopicPattern] = {}
        self._seen: dict[str, set[str]] = {}
        self._matched: dict[str, set[str]] = {}

    def matching(self, text: str, names: Set[str]) -> frozenset[str]:
        """Those of the topics that match; PatternError if that cannot be said."""
        pattern = self._patterns.get(text)
        if pattern is None:
            pattern = TopicPattern(text)
            matched = pattern.matching(names)
            self._patterns[text] = pattern
            self._seen[text] = set(names)
            self._matched[text] = matched
            return frozenset(matched)
        new = names - self._seen[text]
        # Seen even if they cannot be matched: they would be looked at again and again.
        self._seen[text] = set(names)
        self._matched[text] &= self._seen[text]
        self._matched[text] |= pattern.matching(new)
        return frozenset(self._matched[text])

    def matches(self, text: str, name: str) -> bool:
        """Whether one topic matches; not if that cannot be said."""
        if text in self._patterns:
            return name in self._matched[text]
        try:
            return bool(TopicPattern(text).matching((name,)))
        except PatternError:
            return False

    def known(self, text: str) -> frozenset[str]:
        """What has been found to match."""
        return frozenset(self._matched.get(text, ()))

    def retain(self, texts: Container[str]) -> None:
        """Forget all patterns but these."""
        for text in [text for text in self._patterns if text not in texts]:
            del self._patterns[text], self._seen[text], self._matched[text]
