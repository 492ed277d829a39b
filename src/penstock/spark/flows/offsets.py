"""How many records a micro-batch has, before it runs: by what Spark has noted down.

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


def records_of(checkpoint: str, batch_id: int) -> int | None:
    """The most that a micro-batch can have; None if it cannot be told."""
    files = Files(f"{checkpoint.rstrip('/')}/{FOLDER}")
    end = _read(files, batch_id)
    begin = _read(files, batch_id - 1)
    if end is None or begin is None or len(end) != len(begin):
        return None
    return sum(_total(each) for each in end) - sum(_total(each) for each in begin)


def _read(files: Files, batch_id: int) -> list[Any] | None:
    """The offsets of each source: the lines after the format's version and Spark's own words."""
    try:
        text = bytes(files.read(str(batch_id)))
        return [orjson.loads(line) for line in text.splitlines()[2:]]
    except (OSError, orjson.JSONDecodeError):
        return None


def _total(found: Any) -> int:
    """The sum of all offsets in what a source says."""
    if isinstance(found, Mapping):
        return sum(_total(each) for each in found.values())
    return found if isinstance(found, int) else 0
