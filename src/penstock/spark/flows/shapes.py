"""What a view is made of, as far as its state and its results depend on it; and what has changed.

A view that goes on from its state has results of rows that it does not look at again. So whatever
would change them makes another view of it, whether or not its state would fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple


class Part(NamedTuple):
    """A column, a condition, a table ...: `name` tells it apart from others of its kind, if it can
    be told apart; `place` is where it stands in the view's text, as LINE:COLUMN, if that is known.
    `exactly` is the same text with each column's table, where it may be written without.
    """

    kind: str
    name: str
    text: str
    place: str = ""
    exactly: str = ""

    @property
    def meaning(self) -> str:
        return self.exactly or self.text


TABLE, KEY, TYPE, COLUMN = "table", "key", "type", "column"
CONDITION, JOIN, GROUP, UNION = "condition", "join", "group", "union"
_NAMED: Final = (TABLE, KEY, TYPE, COLUMN)
_WITHOUT_NAME: Final = (JOIN, CONDITION, GROUP, UNION)
_WORDS: Final = {JOIN: "the join", CONDITION: "the condition", GROUP: "what it groups by",
                 UNION: "its UNION"}  # fmt: skip


def differences(old: Sequence[Part], new: Sequence[Part]) -> list[str]:
    """What has changed, in words."""
    found: list[str] = []
    for kind in _NAMED:
        found += _of_named(kind, _numbered(old, kind), _numbered(new, kind))
    for kind in _WITHOUT_NAME:
        was = [each for each in old if each.kind == kind]
        now = [each for each in new if each.kind == kind]
        found += _of_others(_WORDS[kind], was, now)
    if not found and _order(old) != _order(new):
        found.append("its columns are in another order")
    return found


def _numbered(parts: Sequence[Part], kind: str) -> dict[tuple[str, int], Part]:
    """By name; of several that have one, by which of them it is."""
    found: dict[tuple[str, int], Part] = {}
    for each in parts:
        if each.kind == kind:
            number = sum(name == each.name for name, _ in found)
            found[each.name, number] = each
    return found


def _order(parts: Sequence[Part]) -> list[str]:
    return [each.name for each in parts if each.kind == COLUMN]


def _of_named(
    kind: str, old: dict[tuple[str, int], Part], new: dict[tuple[str, int], Part]
) -> Iterator[str]:
    tables = (TABLE, KEY)
    for known, was in old.items():
        now = new.get(known)
        if now is None and kind not in {KEY, TYPE}:
            what = f"table {was.text}" if kind == TABLE else f"column {was.name} ({was.text})"
            yield f"{what} is gone"
        elif now is not None and now.meaning != was.meaning:
            what = {
                TABLE: f"{was.name} was table {was.text} and now is table {now.text}",
                KEY: f"the key of table {was.name} was {was.text} and now is {now.text}",
                TYPE: f"column {was.name} was {was.text} and now is {now.text}",
                COLUMN: f"column {was.name} was {was.text} and now is {now.text}",
            }[kind]
            yield what if kind in tables else f"{_line(now)}{what}"
    for known, now in new.items():
        if known not in old and kind not in {KEY, TYPE}:
            what = f"table {now.text}" if kind == TABLE else f"column {now.name} ({now.text})"
            yield f"{_line(now)}{what} is new"


def _of_others(what: str, old: list[Part], new: list[Part]) -> Iterator[str]:
    left = list(new)
    gone = []
    for was in old:
        same = next((each for each in left if each.meaning == was.meaning), None)
        if same is None:
            gone.append(was)
        else:
            left.remove(same)
    for was, now in zip(gone, left, strict=False):
        yield f"{_line(now)}{what} was {was.text} and now is {now.text}"
    for was in gone[len(left) :]:
        yield f"{what} {was.text} is gone"
    for now in left[len(gone) :]:
        yield f"{_line(now)}{what} {now.text} is new"


def _line(part: Part) -> str:
    line = part.place.partition(":")[0]
    return f"line {line}: " if line else ""
