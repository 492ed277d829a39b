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


class UnknownSinkError(FeedingError):
    """There is no sink of this name."""
