"""What the source says when it cannot go on.

Spark shows a user the last line of a Python traceback. So these errors carry the remedy in their
text, and name the topic, the partition and the offset.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Final

from penstock.errors import ConfigError, PenstockError

# Kafka's name of the error for a topic or a partition that is not there.
UNKNOWN_TOPIC: Final = "UNKNOWN_TOPIC_OR_PARTITION"

KEEP_LONGER: Final = (
    "Keep records for longer (retention.ms, retention.bytes) or read faster; to go on without "
    "them, set failOnDataLoss to false."
)
START_ANEW: Final = (
    "Start the query with a new checkpoint folder; or set failOnDataLoss to false, to read the "
    "topic as it is now from its beginning."
)
DELETED: Final = (
    "If it was deleted on purpose, start the query with a new checkpoint folder, or set "
    "failOnDataLoss to false to go on without it."
)


class SourceError(PenstockError):
    """The source cannot go on."""

    def __str__(self) -> str:
        text = super().__str__().rstrip(".")
        return f"{text}. {self.advice}" if self.advice else text


class OptionError(SourceError, ConfigError):
    """An option of the source is unknown, missing or not acceptable."""


class DataLossError(SourceError):
    """Records that were to be read are not in the log any more."""


class SourceUnavailableError(SourceError):
    """The log could not be asked; the same query may go on later."""

    retriable: ClassVar[bool] = True


@contextmanager
def told() -> Iterator[None]:
    """Errors of other rooms leave with their remedy in the text."""
    try:
        yield
    except SourceError:
        raise
    except PenstockError as error:
        kind = SourceUnavailableError if error.retriable else SourceError
        raise kind(str(error), advice=error.advice) from error
