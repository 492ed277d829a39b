"""Whether the demo's flows have done all that there was to do when the shop closed.

What a flow has read, and written what came of it, is what Spark has committed: the end of the last
micro-batch whose number stands in the checkpoint's `commits`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from penstock.cli.verifying.flow_graph import committed
from penstock.sinks.contract import Position
from penstock.spark.flows.folder import Folder
from penstock.spark.flows.inputs import Place
from penstock.spark.sinking.lag import ends_of
from penstock.spark.state.files import Files

Ends = Mapping[tuple[str, int], int]

# A flow in one of these states reads no more.
_ENDED: Final = ("failed", "stopped", "finished")


def ends_at(bootstrap: str, topics: Iterable[str]) -> dict[tuple[str, int], int]:
    """Where the logs of topics end now, as far as they are there."""
    return ends_of(Place(bootstrap, {}, str), set(topics))


def unread(data: Path, flows: Iterable[Mapping[str, Any]], ends: Ends) -> list[str]:
    """The flows that have not read up to these ends of their inputs."""
    folder = Folder(data / ".penstock" / "flows")
    names = []
    for each in flows:
        if each["rebuilding"] or each["state"] in _ENDED:
            continue
        at = committed(Files(folder.checkpoint(each["name"], each["generation"])))
        if at is None or not is_past(at, ends):
            names.append(str(each["name"]))
    return names


def is_past(at: Position, ends: Ends) -> bool:
    """Whether a position is at the ends of the topics that it is about."""
    topics = {topic for topic, _ in at.offsets}
    return all(at.offsets.get(place, 0) >= end for place, end in ends.items() if place[0] in topics)
