"""A matcher straight from the definition: all ways through a pattern, in the order of preference.

It tries everything, row by row, and knows nothing of programs, bits or micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.spark.patterns import tree

Row = Mapping[str, Any]
# Rows and variables of a match so far: places in the list of rows, and names.
Path = tuple[tuple[int, str], ...]
# Of the rows, and the path with the row in question as its last.
Condition = Callable[[Sequence[Row], Path], bool | None]


class CannotMoveError(Exception):
    """The next match would have to begin where there is no row, or where this one did."""


@dataclass
class Naive:
    rows: Sequence[Row]
    names: Sequence[str]
    conditions: Mapping[str, Condition]
    within: int | None = None
    skip: tuple[str, str] = ("past last row", "")
    start: int = 0

    def fits(self, number: int, at: int, path: Path) -> bool:
        name = self.names[number]
        condition = self.conditions.get(name)
        return condition is None or condition(self.rows, (*path, (at, name))) is True

    def there(self, at: int) -> bool:
        """Whether there is a row, and within the time."""
        if at >= len(self.rows):
            return False
        passed = self.rows[at]["t"] - self.rows[self.start]["t"]
        return self.within is None or passed <= self.within

    def ways(self, node: tree.Node, at: int, path: Path) -> Iterator[tuple[int, Path]]:
        if isinstance(node, tree.Var):
            if self.there(at) and self.fits(node.number, at, path):
                yield at + 1, (*path, (at, self.names[node.number]))
        elif isinstance(node, tree.Seq):
            if not node.parts:
                yield at, path
            else:
                for next_at, next_path in self.ways(node.parts[0], at, path):
                    yield from self.ways(tree.Seq(node.parts[1:]), next_at, next_path)
        elif isinstance(node, tree.Alt):
            for each in node.ways:
                yield from self.ways(each, at, path)
        elif isinstance(node, tree.Repeat):
            yield from self.repeated(node, at, path, 0)
        elif isinstance(node, tree.Excluded):
            yield from self.ways(node.body, at, path)
        else:
            yield from self.unbound(node, at, path)

    def unbound(self, node: tree.Node, at: int, path: Path) -> Iterator[tuple[int, Path]]:
        assert isinstance(node, tree.Gap | tree.Silence | tree.PeekNot)
        bad = self.there(at) and any(self.fits(each, at, path) for each in node.forbidden)
        if isinstance(node, tree.Gap):
            yield at, path
            if self.there(at) and not bad:
                yield from self.unbound(node, at + 1, path)
        elif isinstance(node, tree.PeekNot) or not self.there(at):
            if not bad:
                yield at, path
        elif not bad:
            yield from self.unbound(node, at + 1, path)

    def repeated(
        self, node: tree.Repeat, at: int, path: Path, done: int
    ) -> Iterator[tuple[int, Path]]:
        def more() -> Iterator[tuple[int, Path]]:
            if node.most is None or done < node.most:
                for next_at, next_path in self.ways(node.body, at, path):
                    yield from self.repeated(node, next_at, next_path, done + 1)

        if done < node.least:
            yield from more()
        elif node.greedy:
            yield from more()
            yield at, path
        else:
            yield at, path
            yield from more()

    def matches(self, node: tree.Node) -> list[Path]:
        found = []
        self.start = 0
        while self.start < len(self.rows):
            _, path = next(self.ways(node, self.start, ()), (0, ()))
            following = self.start + 1
            if path:
                found.append(path)
                kind, variable = self.skip
                places = [at for at, name in path if name == variable]
                if kind == "past last row":
                    following = path[-1][0] + 1
                elif kind != "to next row":
                    place = places[0 if kind == "to first" else -1] if places else -1
                    if place <= self.start:
                        raise CannotMoveError
                    following = place
            self.start = max(following, self.start + 1)
        return found
