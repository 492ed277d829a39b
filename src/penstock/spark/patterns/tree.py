"""A row pattern as a tree, and the small program that it becomes.

The program is for a backtracking machine (`kernel`): it takes rows one after the other, and at a
`SPLIT` tries the first way before the second, so that the first way through is the match that the
standard prefers. Repetitions are written out: `{2,4}` is two copies and two optional ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from math import inf
from typing import Final

import numpy as np
import numpy.typing as npt

VAR: Final = 0
SPLIT: Final = 1
JUMP: Final = 2
GAP: Final = 3
SILENCE: Final = 4
PEEK_NOT: Final = 5
DONE: Final = 6

MAX_VARIABLES: Final = 60
MAX_PROGRAM: Final = 2_000
MAX_PERMUTED: Final = 5


@dataclass(frozen=True, slots=True)
class Var:
    """One row that fulfils the condition of a variable."""

    number: int


@dataclass(frozen=True, slots=True)
class Seq:
    """One after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Alt:
    """One of several, the first preferred."""

    ways: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """So many times; `most` None is without a bound. Greedy prefers more, reluctant fewer."""

    body: Node
    least: int
    most: int | None
    greedy: bool = True


@dataclass(frozen=True, slots=True)
class Gap:
    """As few rows as possible, none of which fulfils the condition of a forbidden variable."""

    forbidden: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Silence:
    """Until the time of the match is over no row fulfils a condition. Only at the end."""

    forbidden: frozenset[int]


@dataclass(frozen=True, slots=True)
class PeekNot:
    """The next row, if there is one within the time, does not fulfil a condition."""

    forbidden: frozenset[int]


@dataclass(frozen=True, slots=True)
class Excluded:
    """`{- -}`: matched, and left out of the rows that are given."""

    body: Node


Node = Var | Seq | Alt | Repeat | Gap | Silence | PeekNot | Excluded
EMPTY: Final = Seq(())


def children(node: Node) -> tuple[Node, ...]:
    if isinstance(node, Seq):
        return node.parts
    if isinstance(node, Alt):
        return node.ways
    if isinstance(node, Repeat | Excluded):
        return (node.body,)
    return ()


def walk(node: Node) -> Iterator[Node]:
    yield node
    for each in children(node):
        yield from walk(each)


def can_be_empty(node: Node) -> bool:
    """Whether it may match without taking a row of its own."""
    if isinstance(node, Var):
        return False
    if isinstance(node, Seq):
        return all(can_be_empty(each) for each in node.parts)
    if isinstance(node, Alt):
        return any(can_be_empty(each) for each in node.ways)
    if isinstance(node, Repeat):
        return node.least == 0 or can_be_empty(node.body)
    if isinstance(node, Excluded):
        return can_be_empty(node.body)
    return True


def first_variables(node: Node) -> frozenset[int]:
    """The variables with which a match of it can begin."""
    if isinstance(node, Var):
        return frozenset([node.number])
    if isinstance(node, Seq):
        found: frozenset[int] = frozenset()
        for each in node.parts:
            found |= first_variables(each)
            if not can_be_empty(each):
                break
        return found
    return frozenset().union(*(first_variables(each) for each in children(node)))


def bound_variables(node: Node) -> frozenset[int]:
    return frozenset(each.number for each in walk(node) if isinstance(each, Var))


def needs_more_rows(node: Node) -> bool:
    """Whether its first row alone may leave open what comes of it, until there are more."""
    looks_on = any(isinstance(each, Gap | Silence | PeekNot) for each in walk(node))
    return looks_on or _longest(node) > 1


def _longest(node: Node) -> float:
    """How many rows it takes at most."""
    if isinstance(node, Var):
        return 1
    if isinstance(node, Alt):
        return max(map(_longest, node.ways), default=0)
    if isinstance(node, Repeat):
        own = _longest(node.body)
        return own * (inf if node.most is None else node.most) if own else 0
    return sum(map(_longest, children(node)))


def is_relaxed(node: Node, *, free: bool = True) -> bool:
    """Whether rows that no variable can take make no difference: there is a gap before each row.

    Such rows need not be sent to the tasks at all. `free` says that what comes before it is the
    beginning, or a gap.
    """
    if isinstance(node, Seq):
        for each in node.parts:
            if not is_relaxed(each, free=free):
                return False
            free = isinstance(each, Gap)
        return True
    if isinstance(node, Repeat):
        return is_relaxed(node.body, free=free and node.most == 1)
    if isinstance(node, Alt):
        return all(is_relaxed(each, free=free) for each in node.ways)
    if isinstance(node, Excluded):
        return is_relaxed(node.body, free=free)
    return isinstance(node, Gap | Silence) or (isinstance(node, Var) and free)


def permuted(nodes: tuple[Node, ...]) -> Node:
    """Any order, in the order of the standard: the first as written."""
    return Alt(tuple(Seq(each) for each in permutations(nodes)))


class ProgramTooLongError(ValueError):
    """Repetitions that, written out, are too long."""


def compiled(node: Node) -> npt.NDArray[np.int64]:
    """The program of a pattern: rows of operation and two arguments."""
    code: list[list[int]] = []
    _emit(node, code, excluded=0)
    _put(code, DONE)
    return np.array(code, dtype=np.int64)


def _put(code: list[list[int]], op: int, a: int = 0, b: int = 0) -> int:
    if len(code) >= MAX_PROGRAM:
        raise ProgramTooLongError
    code.append([op, a, b])
    return len(code) - 1


def _mask(variables: frozenset[int]) -> int:
    return sum(1 << each for each in variables)


def _emit(node: Node, code: list[list[int]], *, excluded: int) -> None:
    if isinstance(node, Var):
        _put(code, VAR, node.number, excluded)
    elif isinstance(node, Seq):
        for each in node.parts:
            _emit(each, code, excluded=excluded)
    elif isinstance(node, Alt):
        _emit_alternatives(node, code, excluded)
    elif isinstance(node, Repeat):
        _emit_repetition(node, code, excluded)
    elif isinstance(node, Gap):
        split = _put(code, SPLIT)
        _put(code, GAP, _mask(node.forbidden))
        _put(code, JUMP, split)
        code[split][1:] = [len(code), split + 1]
    elif isinstance(node, Silence):
        _put(code, SILENCE, _mask(node.forbidden))
    elif isinstance(node, PeekNot):
        _put(code, PEEK_NOT, _mask(node.forbidden))
    else:
        _emit(node.body, code, excluded=1)


def _emit_alternatives(node: Alt, code: list[list[int]], excluded: int) -> None:
    ends = []
    for way in node.ways[:-1]:
        split = _put(code, SPLIT)
        _emit(way, code, excluded=excluded)
        ends.append(_put(code, JUMP))
        code[split][1:] = [split + 1, len(code)]
    _emit(node.ways[-1], code, excluded=excluded)
    for each in ends:
        code[each][1] = len(code)


def _emit_repetition(node: Repeat, code: list[list[int]], excluded: int) -> None:
    for _ in range(node.least):
        _emit(node.body, code, excluded=excluded)
    splits = []
    if node.most is None:
        split = _put(code, SPLIT)
        _emit(node.body, code, excluded=excluded)
        _put(code, JUMP, split)
        splits.append(split)
    else:
        for _ in range(node.most - node.least):
            splits.append(_put(code, SPLIT))
            _emit(node.body, code, excluded=excluded)
    for split in splits:
        code[split][1:] = [split + 1, len(code)] if node.greedy else [len(code), split + 1]
