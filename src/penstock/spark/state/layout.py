"""Where the states of a flow are, and in how many shards.

    CHECKPOINT/penstock-state/current.json     which folder counts, and how many shards it has
    CHECKPOINT/penstock-state/s4/OPERATOR/SHARD/...
    CHECKPOINT/penstock-state/s4/_time/...     how far event time has come

The number of shards is fixed when a flow first runs. To change it, all state is written anew in
another folder, and `current.json` is replaced, in one step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import orjson

from penstock.spark.state.files import Files, StateError

FOLDER: Final = "penstock-state"
CURRENT: Final = "current.json"
TIME: Final = "_time"


@dataclass(frozen=True, slots=True)
class Layout:
    """The states of a generation of a flow."""

    checkpoint: str
    shards: int
    name: str

    @property
    def folder(self) -> str:
        return f"{self.checkpoint.rstrip('/')}/{FOLDER}/{self.name}"


def find(checkpoint: str) -> Layout | None:
    """What counts now; None if the flow has kept no state yet."""
    try:
        found = orjson.loads(bytes(_files(checkpoint).read(CURRENT)))
        return Layout(checkpoint, int(found["shards"]), str(found["folder"]))
    except FileNotFoundError:
        return None
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise StateError(
            f"{checkpoint}/{FOLDER}/{CURRENT} is damaged: {error}",
            advice="Rebuild the flow from the log, with `penstock flows reset`.",
        ) from error


def begin(checkpoint: str, shards: int) -> Layout:
    """What counts now, made if there is nothing."""
    found = find(checkpoint)
    if found is None:
        found = Layout(checkpoint, shards, f"s{shards}")
        use(found)
    return found


def use(layout: Layout) -> None:
    """Let this one count from now on."""
    told = {"folder": layout.name, "shards": layout.shards}
    _files(layout.checkpoint).write(CURRENT, orjson.dumps(told))


def _files(checkpoint: str) -> Files:
    return Files(f"{checkpoint.rstrip('/')}/{FOLDER}")
