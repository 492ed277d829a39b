"""What can go wrong between a sink and its store."""

from __future__ import annotations

from typing import ClassVar

from penstock.errors import PenstockError


class SinkError(PenstockError):
    """The root of what sinks raise."""


class StoreUnreachableError(SinkError):
    """The store does not answer, is busy, or broke off: the same call may succeed later."""

    retriable: ClassVar[bool] = True
    advice = "Is the store running, and its address right?"


class StoreAwayError(StoreUnreachableError):
    """Nobody answers at the store's address, which may be wrong."""


class StoreError(SinkError):
    """The store refuses, and trying again does not help."""


class SchemaChangedError(SinkError):
    """The store holds a table that cannot become the one that is wanted."""

    advice = "Build it anew: `penstock sinks rebuild NAME` fills another beside it and switches."


class FencedError(SinkError):
    """Another writer has taken the store over; nothing was written."""

    advice = (
        "If two processes feed the same sink, stop one of them. If not, somebody has emptied the "
        "store or built it anew: start the sink again."
    )


class OutOfStepError(SinkError):
    """The changes do not follow what the store holds; nothing was written."""

    advice = "Read again from the position that the store gives."


class NotReachedError(SinkError):
    """The store has not come to the position in time."""

    retriable: ClassVar[bool] = True
    advice = "Wait for longer, or look at `penstock sinks list`: the sink may have stopped."


class NotReadableError(SinkError):
    """What is written there cannot be read back, as with webhooks."""


class TooManyRefusedError(SinkError):
    """So many rows do not fit that something other than the rows must be wrong."""

    advice = "Compare the schema of the sink with the rows of the topic."


class MissingPackageError(SinkError):
    """A package that this kind of store needs is not installed."""
