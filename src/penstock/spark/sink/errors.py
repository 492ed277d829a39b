"""What the sink says when it cannot go on, and how a task says it to the driver.

A task's error reaches the driver as text only. So a task puts what it knows into its message, in a
form that the driver takes apart again: the user gets one error with the topic and the remedy, and
whoever supervises the query learns whether trying again helps.
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar, Final

from penstock.client.errors import FencedError, RefusedError
from penstock.errors import PenstockError

_BEGIN, _END = "<penstock-sink>", "</penstock-sink>"
_TOLD: Final = re.compile(f"{_BEGIN}(.*?){_END}", re.DOTALL)

# Kafka's codes, and what a person can do about them.
_REMEDIES: Final = {
    10: "Raise max.message.bytes of the topic, or make the values smaller.",
    18: "Raise max.message.bytes of the topic, or set kafka.batch.size lower.",
    29: "Allow this user to write to the topic, or use the credentials of one who may.",
    31: "Allow this user to make topics, or make the topic for it.",
    32: "A record's timestamp is outside of what the topic takes: look at the timestamp column.",
    44: "The topic's settings forbid this: `penstock topics describe` shows them.",
    50: "Lower kafka.transaction.timeout.ms to at most the broker's transaction.max.timeout.ms.",
    53: "Allow this user to use the transactional id, or use the credentials of one who may.",
    87: "The topic does not take such records; a compacted one needs keys.",
}


_NO_TOPIC: Final = 3
# How errors of the client name a topic: by itself, or with a partition behind it.
_TOPIC_NAMED: Final = re.compile(
    r"the topic '([^']+)'|(?:the leader of|writing to) ([A-Za-z0-9._-]+)-\d+"
)


class SinkError(PenstockError):
    """The sink cannot write this, and trying again will not help."""

    def __str__(self) -> str:
        text = super().__str__().rstrip(".")
        return f"{text}. {self.advice}" if self.advice else text


class SinkUnavailableError(SinkError):
    """The log could not be written to; the same batch may succeed later."""

    retriable: ClassVar[bool] = True


class FencedSinkError(SinkError):
    """Another driver writes the same query's output, and this one must not any more."""

    advice = (
        "Stop one of the two: a query has one driver. If there is no other, give each query a name "
        "of its own."
    )


class TimedOutTransactionError(SinkUnavailableError):
    """The batch took longer than its transaction may."""

    advice = "Raise kafka.transaction.timeout.ms, or read less at once (maxOffsetsPerTrigger)."


class RepeatedTaskError(SinkError):
    """Spark ran a writing task again: the batch must be written anew, as a whole."""

    retriable: ClassVar[bool] = True


class StaleCheckpointError(SinkError):
    """The checkpoint is older than what has been written."""


_KINDS: Final[dict[str, type[SinkError]]] = {
    kind.__name__: kind
    for kind in (SinkError, SinkUnavailableError, FencedSinkError, RepeatedTaskError)
}


class TaskError(Exception):
    """A task's error, in words that the driver understands."""

    def __init__(self, error: PenstockError) -> None:
        known = as_sink_error(error)
        told = {"kind": type(known).__name__, "text": known.args[0], "advice": known.advice}
        super().__init__(f"{known} {_BEGIN}{json.dumps(told)}{_END}")


def as_sink_error(error: PenstockError) -> SinkError:
    """Any error of ours as one of the sink, with the remedy that fits it."""
    if isinstance(error, SinkError):
        return error
    if isinstance(error, FencedError):
        return FencedSinkError(str(error))
    advice = error.advice
    if isinstance(error, RefusedError):
        advice = _REMEDIES.get(int(error.code), advice)
        if error.code == _NO_TOPIC:
            return SinkError(str(error), advice=_no_topic_advice(str(error)))
    kind = SinkUnavailableError if error.retriable else SinkError
    return kind(str(error), advice=advice)


def _no_topic_advice(text: str) -> str:
    """What to do about a topic, or a partition of it, that is not there."""
    found = _TOPIC_NAMED.search(text)
    name = (found[1] or found[2]) if found is not None else ""
    if "no such partition" in text:
        return f"Look at the column partition; `penstock topics describe {name}` shows how many."
    if not name:
        return "Make the topic first, with `penstock topics create`, or look at its name."
    return f"Make the topic first: `penstock topics create {name}`. Or look at its name."


def from_spark(error: Exception) -> SinkError | None:
    """What a task of ours has said, if the error of a Spark job is that."""
    found = _TOLD.search(str(error))
    if found is None:
        return None
    told: dict[str, Any] = json.loads(found.group(1))
    kind = _KINDS.get(told["kind"], SinkError)
    return kind(told["text"], advice=told["advice"])
