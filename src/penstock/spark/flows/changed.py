"""What has changed in a flow so that its state does not fit, in the words of its author.

Two things are told: how what the operators keep has changed, by the columns and expressions that
are new or gone, and which lines of the flow were changed since it last ran.
"""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Final

from penstock.spark.places import is_library

if TYPE_CHECKING:
    from penstock.spark.flows.declare import Flow

MAX_SOURCE: Final = 20_000
MAX_LINES: Final = 6
MAX_SHOWN: Final = 160

# What Spark calls its operators, and what they are called in a flow.
_SPARK: Final = {
    "Aggregate": "groupBy",
    "Deduplicate": "dropDuplicates",
    "DeduplicateWithinWatermark": "dropDuplicatesWithinWatermark",
    "Distinct": "distinct",
    "Join": "join",
    "FlatMapGroupsInPandasWithState": "applyInPandasWithState",
    "TransformWithStateInPySpark": "transformWithState",
    "TransformWithStateInPandas": "transformWithStateInPandas",
}
_OURS: Final = re.compile(r"([\w .-]+?): (.*)", re.DOTALL)
_TIME: Final = re.compile(r"time of (\S+): (.*)")
_DIGEST: Final = re.compile(r" \([0-9a-f]{16}\)$")
_MICROSECONDS: Final = re.compile(r"\b(\d+) us\b")
_PARTS: Final = re.compile(r",\s*|:\s+|;\s+|\s+with\s+|\s+->\s+|\s+by\s+")
_UNITS: Final = ((86_400_000_000, "day"), (3_600_000_000, "hour"), (60_000_000, "minute"),
                 (1_000_000, "second"), (1_000, "millisecond"))  # fmt: skip


def source_of(flow: Flow) -> str:
    """The text of a flow's function, or the SQL of a view; empty if nobody knows."""
    if flow.source:
        return flow.source[:MAX_SOURCE]
    function = inspect.unwrap(flow.function)
    try:
        if is_library(function.__code__.co_filename):
            return ""
        return inspect.getsource(function)[:MAX_SOURCE]
    except (OSError, TypeError, AttributeError):
        return ""


def operators(old: Sequence[str], new: Sequence[str]) -> list[str]:
    """How what is kept has changed; `old` and `new` are operators as fingerprints have them."""
    before, after = _named(old), _named(new)
    found = []
    for name in [*before, *(each for each in after if each not in before)]:
        if name not in after:
            found.append(f"{name} is gone, which kept state")
        elif name not in before:
            found.append(f"{name} is new, which keeps state" + _shown(after[name], "; ", ": "))
        elif before[name] != after[name]:
            found.append(f"{name}: {_difference(before[name], after[name])}")
    if not found:
        # The same ones in another order: each has the state of another.
        found.append("the order of its operators, which tells their states apart")
    return found


def _named(texts: Sequence[str]) -> dict[str, str]:
    """Operators by names that the flow's author knows."""
    found: dict[str, str] = {}
    for text in texts:
        name, what = _split(text)
        number, unique = 2, name
        while unique in found:
            unique, number = f"{name} ({number})", number + 1
        found[unique] = what
    return found


def _split(text: str) -> tuple[str, str]:
    time = _TIME.fullmatch(text)
    if time is not None:
        return f"time= of stream {time[1]}", time[2]
    ours = _OURS.fullmatch(text)
    if ours is not None and " " not in ours[1].split("[")[0]:
        return ours[1], ours[2]
    kind, _, rest = text.partition(" ")
    return _SPARK.get(kind, kind), rest


def _difference(old: str, new: str) -> str:
    was, now = _items(old), _items(new)
    gone = [each for each in was if each not in now]
    come = [each for each in now if each not in was]
    if not gone and not come:
        hidden = _DIGEST.search(old) is not None
        return "its conditions or columns" if hidden else f"was {_cut(old)}, now {_cut(new)}"
    if gone and come:
        return f"was {_list(gone)}, now {_list(come)}"
    return f"without {_list(gone)} now" if gone else f"also {_list(come)} now"


def _items(text: str) -> list[str]:
    """The parts of a description, each once, in its order."""
    text = _MICROSECONDS.sub(lambda found: _duration(int(found[1])), _DIGEST.sub("", text))
    parts: list[str] = []
    for each in _outside_brackets(text):
        part = each.strip(" []")
        if part and part not in parts:
            parts.append(part)
    return parts


def _outside_brackets(text: str) -> Iterator[str]:
    """Cut where a comma or the like stands outside of round brackets."""
    depth, begin, at = 0, 0, 0
    while at < len(text):
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        cut = _PARTS.match(text, at) if depth == 0 else None
        if cut is not None:
            yield text[begin:at]
            begin = at = cut.end()
        else:
            at += 1
    yield text[begin:]


def _duration(microseconds: int) -> str:
    for size, name in _UNITS:
        if microseconds and microseconds % size == 0:
            count = microseconds // size
            return f"{count} {name}{'' if count == 1 else 's'}"
    return f"{microseconds} microseconds"


def _list(items: Sequence[str]) -> str:
    return _cut(", ".join(items))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."


def _shown(text: str, between: str, before: str) -> str:
    items = _items(text)
    return before + _cut(between.join(items)) if items else ""


def lines(old: str, new: str, where: str) -> list[str]:
    """The lines of a flow that were changed; `where` is the file and line at which it begins."""
    if not old or not new or old == new:
        return []
    file, _, first = where.rpartition(":")
    begin = int(first) if first.isdecimal() else 1
    was, now = ([line.strip() for line in text.splitlines()] for text in (old, new))
    found = []
    for kind, a, b, c, d in difflib.SequenceMatcher(None, was, now, autojunk=False).get_opcodes():
        gone, come = (_code(each) for each in (was[a:b], now[c:d]))
        if kind == "equal" or not (gone or come):
            continue
        place = f"{file or where}:{begin + c}"
        if gone and come:
            found.append(f"{place}: was `{gone}`, now `{come}`")
        else:
            found.append(f"{place}: {f'`{come}` is new' if come else f'`{gone}` is gone'}")
    more = len(found) - MAX_LINES
    return [*found[:MAX_LINES], *([f"and {more} more places"] if more > 0 else [])]


def _code(told: Sequence[str]) -> str:
    """Lines in one, without comments that stand alone."""
    return _cut(" ".join(line for line in told if line and not line.startswith(("#", "--"))))
