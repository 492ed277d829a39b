"""What can go wrong between a client and its brokers.

Every error is a `ClientError`. `retriable` says whether the same call may succeed later by itself;
calls of this package that retry have done so already, up to their time limit.
"""

from __future__ import annotations

from typing import ClassVar, Final

from penstock.errors import PenstockError
from penstock.wire.errors import RETRIABLE, ErrorCode

# Where a newer producer of the same transactional id has taken over, or its epoch is over.
FENCED: Final = frozenset((ErrorCode.PRODUCER_FENCED, ErrorCode.INVALID_PRODUCER_EPOCH))


_ADVICE: Final[dict[int, str]] = {
    ErrorCode.MESSAGE_TOO_LARGE: "Raise max.message.bytes of the topic, or send smaller batches.",
    ErrorCode.UNKNOWN_TOPIC_OR_PARTITION: "Create the topic first; is the name right?",
    ErrorCode.TOPIC_AUTHORIZATION_FAILED: "Ask for the right to use the topic.",
    ErrorCode.TRANSACTION_ABORTABLE: "Abort the transaction, and write it again.",
    ErrorCode.INVALID_TXN_STATE: "Abort the transaction, and write it again.",
    ErrorCode.INVALID_TRANSACTION_TIMEOUT: "Choose one below transaction.max.timeout.ms.",
}


class ClientError(PenstockError):
    """A broker could not be asked, or did not answer as it should."""


class UnreachableError(ClientError):
    """Nobody answers, or not any more."""

    retriable: ClassVar[bool] = True
    advice = "Is the broker running, the address right, and security.protocol the listener's?"


class UnsupportedError(ClientError):
    """The broker does not know what was to be asked, or not in a version that has it."""


class RefusedError(ClientError):
    """The broker answered with an error code."""

    def __init__(self, doing: str, code: int, message: str | None = None) -> None:
        name = name_of(code)
        super().__init__(f"{doing}: {name}" + (f" ({message})" if message else ""))
        self.code = code
        self.name = name


class BusyError(RefusedError):
    """The broker refused for now: the same request may succeed in a moment."""

    retriable: ClassVar[bool] = True


class FencedError(RefusedError):
    """These producer ids are not good any more: whatever they write is refused."""

    advice = (
        "Another process writes with the same transactional id, or a transaction took longer than "
        "its timeout and was aborted: begin anew, and have one writer for each id."
    )


class OffsetGoneError(ClientError):
    """An offset that the log does not have: deleted already, or not written yet."""

    advice = "Start from the log's start or end, or keep records for longer (retention.ms)."

    def __init__(self, topic: str, partition: int, offset: int, start: int, end: int) -> None:
        super().__init__(
            f"{topic}-{partition} has no offset {offset}: the log goes from {start} to {end}"
        )
        self.topic = topic
        self.partition = partition
        self.offset = offset
        self.log_start = start
        self.log_end = end


class LostRecordsError(ClientError):
    """The broker has lost records that it had acknowledged, or never saw those before these."""

    advice = "See the broker's log; what was acknowledged last may have to be written again."


class GaveUpError(ClientError):
    """Tried again until the time limit, in vain."""

    retriable: ClassVar[bool] = True
    advice = "Look at the broker; or allow more time."


class OutcomeUnknownError(ClientError):
    """A commit was asked for, and nobody can say whether it has happened."""

    advice = (
        "Read the target as read_committed to see what is there, or take the transactional id over "
        "again and write a marker of each batch, to know."
    )


class AuthenticationError(ClientError):
    """The broker does not take these credentials, or is not who it should be."""

    advice = "Check sasl.mechanism, the user name and the password."


def name_of(code: int) -> str:
    """Kafka's name of an error code."""
    return ErrorCode(code).name if code in set(ErrorCode) else f"error {code}"


def refused(doing: str, code: int, message: str | None = None) -> RefusedError:
    """The error for a code, of the kind that says what can be done about it."""
    kind = FencedError if code in FENCED else BusyError if code in RETRIABLE else RefusedError
    error = kind(doing, code, message)
    error.advice = _ADVICE.get(code, error.advice)
    return error


def check(code: int, doing: str, message: str | None = None) -> None:
    """RefusedError unless the code says that all is well."""
    if code:
        raise refused(doing, code, message)
