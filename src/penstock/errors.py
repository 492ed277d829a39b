"""Every error that Penstock raises, under one root.

Each says in its message what happened, in `retriable` whether the same call may succeed later
without anyone doing anything, and in `advice` what a person can do about it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar


class PenstockError(Exception):
    """The root. Catch this to catch everything that Penstock itself raises."""

    retriable: ClassVar[bool] = False
    advice: str = ""

    def __init__(self, message: str, *, advice: str | None = None) -> None:
        super().__init__(message)
        if advice is not None:
            self.advice = advice


class ConfigError(PenstockError):
    """A setting is unknown or its value is not acceptable."""


class SeveralMistakesError(ConfigError):
    """Several settings are wrong; all are told together."""

    def __init__(self, each: Sequence[ConfigError]) -> None:
        super().__init__(
            "\n".join(map(str, each)),
            advice=" ".join(dict.fromkeys(e.advice for e in each if e.advice)),
        )
        self.each = tuple(each)


class WireError(PenstockError):
    """Bytes that are not the protocol message they should be."""


class LogError(PenstockError):
    """The root of what the storage engine raises."""


class CorruptBatchError(LogError):
    """A record batch whose bytes are damaged, torn or not a batch."""


class InvalidRecordError(LogError):
    """A batch that this log does not take; `records` counts out the ones at fault, if known."""

    def __init__(self, message: str, *, records: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.records = records


class InvalidTimestampError(LogError):
    """A record's timestamp is outside of what the topic accepts."""


class RecordTooLargeError(LogError):
    """A batch is larger than the topic's `max.message.bytes`."""

    advice = "Raise max.message.bytes of the topic, or send smaller batches."


class OutOfOrderSequenceError(LogError):
    """An idempotent producer's batch does not follow the one before it."""


class ProducerFencedError(LogError):
    """A producer with a newer epoch has taken over."""


class InvalidTxnStateError(LogError):
    """A write does not fit the state of its producer's transaction."""


class CoordinatorFencedError(LogError):
    """A newer coordinator has decided on transactions of this producer."""


class OffsetOutOfRangeError(LogError):
    """An offset below the start or above the end of the log."""


class StorageError(LogError):
    """The disk did not do what it was asked; nothing was acknowledged."""

    retriable = True
    advice = "Look at the broker's log for the cause; free space or repair the disk."


class DiskFullError(StorageError):
    """No space left. Writes resume by themselves once there is space."""

    advice = "Free disk space, or lower retention.bytes / retention.ms."


class DataDirectoryError(LogError):
    """A data directory that cannot be used: locked, foreign, or damaged."""
