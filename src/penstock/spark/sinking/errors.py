"""What can be wrong with feeding a sink."""

from __future__ import annotations

from typing import ClassVar

from penstock.errors import PenstockError


class FeedingError(PenstockError):
    """The root of what goes wrong on the way from a topic to a sink."""


class NothingToLearnFromError(FeedingError):
    """The columns are to be found out from records, and there are none yet."""

    retriable: ClassVar[bool] = True
    advice = 'Write records, or say which columns there are: fields = "id bigint, name string".'


class TopicReplacedError(FeedingError):
    """The store is ahead of the topic: it is another topic of the same name."""


class RecordsGoneError(FeedingError):
    """The log does not have any more what the store lacks."""


class TruncatedError(FeedingError):
    """The source has emptied its table: what the store holds is not what the source has."""

    advice = (
        'Capture the table with penstock capture, a key and truncates = "deletes" into another '
        "topic, with a snapshot, and feed the sink from that one."
    )


class TableAlteredError(FeedingError):
    """The captured table was altered, and the sink is to stop then."""


class NoWholeNumbersError(FeedingError):
    """A column that was found out from whole numbers has others."""


class UnknownSinkError(FeedingError):
    """There is no sink of this name."""
