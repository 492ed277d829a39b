"""What a micro-batch has of each stream, before it runs: by what Spark has noted down.

    CHECKPOINT/offsets/BATCH      up to where each source is read in a micro-batch

Spark writes it before the micro-batch begins. Offsets of transactions, and those that compaction
has taken away, are counted as well: it is the most that there can be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson

from penstock.spark.state.files import Files

FOLDER: Final = "offsets"


def records_of(checkpoint: str, batch_id: int, *, each_topic_once: bool = False) -> int | None:
    """The most that a micro-batch can have; None if it cannot be told.

    With `each_topic_once` a topic that several sources read counts as for the one that read most.
    """
    found = _both(checkpoint, batch_id)
    if found is None:
        return None
    if each_topic_once:
        return _by_topic(*found)
    counts = [_count(begin, end) for begin, end in zip(*found, strict=True)]
    known = [each for each in counts if each is not None]
    return sum(known) if len(known) == len(counts) else None


def _both(checkpoint: str, batch_id: int) -> tuple[list[Any], list[Any]] | None:
    """Where a micro-batch begins and ends, source by source."""
    files = Files(f"{checkpoint.rstrip('/')}/{FOLDER}")
    begin, end = _read(files, batch_id - 1), _read(files, batch_id)
    if begin is None or end is None or len(begin) != len(end):
        return None
    return begin, end


def _read(files: Files, batch_id: int) -> list[Any] | None:
    """The offsets of each source: the lines after the format's version and Spark's own words."""
    try:
        text = bytes(files.read(str(batch_id)))
        return [orjson.loads(line) for line in text.splitlines()[2:]]
    except (OSError, orjson.JSONDecodeError):
        return None


def _by_topic(begins: list[Any], ends: list[Any]) -> int | None:
    most: dict[str, int] = {}
    for begin, end in zip(begins, ends, strict=True):
        if not isinstance(end, Mapping):
            return None
        before = begin if isinstance(begin, Mapping) else {}
        for topic, parts in end.items():
            count = _count(before.get(topic), parts)
            if count is None:
                return None
            most[topic] = max(most.get(topic, 0), count)
    return sum(most.values())


def _count(begin: Any, end: Any) -> int | None:
    """By how much all offsets of a source have grown; None if one has become less.

    So it is where a topic was made anew: what is read of it cannot be told from here.
    """
    if isinstance(end, Mapping):
        before = begin if isinstance(begin, Mapping) else {}
        counts = [_count(before.get(name), each) for name, each in end.items()]
        known = [each for each in counts if each is not None]
        return sum(known) if len(known) == len(counts) else None
    if not isinstance(end, int):
        return 0
    grown = end - (begin if isinstance(begin, int) else 0)
    return grown if grown >= 0 else None
