"""What can go wrong with windows."""

from __future__ import annotations

from typing import Final

from penstock.errors import PenstockError

# What is late in the log never gets here: somebody has put another time in its place.
STRAY: Final = (
    "Let `_time` be the event time of the streams as it is. After `within` it is that of the left, "
    "which may be long past: make it the later of both first, with "
    'withColumn("_time", greatest("_time", "right__time")).'
)


class WindowError(PenstockError):
    """What goes by event time, such as a window, cannot be computed from what came."""
