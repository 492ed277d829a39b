"""Versions of a topic: what a flow writes is rebuilt as NAME.v2, NAME.v3 beside NAME.

Whoever reads the output of a flow names the topic without a version and gets the one that counts,
which the flow's record in the data folder says. A reader that stands in an older version follows:
it is rebuilt from the newer one, and goes on with the older one meanwhile.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_SUFFIX: Final = re.compile(r"\.v([2-9]|[1-9]\d+)")


def physical(name: str, generation: int) -> str:
    """The topic that holds a generation of what a flow writes: NAME, then NAME.v2, NAME.v3, ..."""
    return name if generation <= 1 else f"{name}.v{generation}"


def is_version(topic: str, name: str) -> bool:
    """Whether a topic is NAME or one that was rebuilt beside it."""
    if topic == name:
        return True
    return topic.startswith(name) and _SUFFIX.fullmatch(topic, len(name)) is not None


def name_of(topic: str) -> str:
    """The name of which a topic is a version, as far as its own tells."""
    found = _SUFFIX.search(topic)
    return topic[: found.start()] if found is not None and found.end() == len(topic) else topic


@dataclass(frozen=True, slots=True)
class Behind:
    """A topic that is read in an older version than the one that counts."""

    name: str
    reads: str
    present: str

    def __str__(self) -> str:
        return f"{self.reads}, whose place {self.present} has taken"


def behind(names: Sequence[str], read: Sequence[str], present: Mapping[str, str]) -> list[Behind]:
    """Which streams are read in an older version; none if they differ in more than that.

    `names` are the topics as they are declared, `read` those that were read for them, `present`
    the topics that count by name.
    """
    if len(names) != len(read):
        return []
    found = []
    for name, topic in zip(names, read, strict=True):
        if not is_version(topic, name):
            return []
        if topic != present[name]:
            found.append(Behind(name, topic, present[name]))
    return found
