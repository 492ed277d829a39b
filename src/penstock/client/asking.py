"""Questions and answers over topics: a flow, or any consumer, as a function that is far away.

    with Asker("127.0.0.1:9092", requests="questions", replies="answers") as asker:
        answer = asker.ask({"country": "DE", "amount": 100}, timeout_s=5).json()

A question is a record with headers that say who asks: a number of its own, and the topic and key
that the answer is to have. Each asker has a key of its own, so that all answers to it come to one
partition, which is the only one that it reads, from its end at the beginning on. Whoever answers
copies the number into a header of the answer (in a flow `penstock.spark.asking` does it).

**What can happen.** No answer in time: NoAnswerError, and the question is forgotten; an answer that
comes later is counted in `ignored`, as is a second one to the same question. The question stays in
the log, and may still be answered: ask again only what may be done twice. An answer that says that
the question was wrong: AnswerError. At most `max_open` questions are on their way at a time.

One thread, like all of the client. To have many questions on their way, `send` them, then `wait`.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Final, Self, TypeAlias

import orjson
import pyarrow as pa

from penstock.client.connection import Cluster
from penstock.client.errors import ClientError, OffsetGoneError
from penstock.client.fetching import Fetcher
from penstock.client.metadata import LATEST, Metadata, Place, offsets
from penstock.client.security import Security
from penstock.client.writer import LogWriter
from penstock.records.columns.decode import decode
from penstock.records.columns.partition import partitions_of

# The headers of a question, of which the first is that of its answer too.
ID: Final = "penstock.ask.id"
REPLY_TOPIC: Final = "penstock.ask.topic"
REPLY_KEY: Final = "penstock.ask.key"
# The header of an answer that is none, with the reason.
ERROR: Final = "penstock.ask.error"

TIMEOUT_S: Final = 5.0
MAX_OPEN: Final = 1_000
# How long one fetch waits for something to come.
_WAIT_MS: Final = 500

Value: TypeAlias = bytes | str | Mapping[str, Any] | list[Any] | int | float | None


class AskingError(ClientError):
    """A question could not be asked, or was not answered."""


class NoAnswerError(AskingError):
    """Nobody answered in time; what was asked for may still be done."""

    retriable: ClassVar[bool] = True
    advice = "Does whoever answers run, and keep up? A longer timeout_s waits longer."


class TooManyOpenError(AskingError):
    """More questions are on their way than there may be."""

    retriable: ClassVar[bool] = True
    advice = "Wait for some answers first, or raise max_open."


class AnswerError(AskingError):
    """The answer says that the question cannot be answered."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question that was sent."""

    id: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back."""

    value: bytes | None
    headers: Mapping[str, bytes | None] = field(default_factory=dict)

    def json(self) -> Any:
        """The value, which is JSON."""
        return None if self.value is None else orjson.loads(self.value)


class Asker:
    """Asks, and hears the answers; a context manager."""

    def __init__(
        self,
        bootstrap: str,
        *,
        requests: str,
        replies: str,
        max_open: int = MAX_OPEN,
        security: Security | None = None,
    ) -> None:
        if max_open < 1:
            raise AskingError("max_open must be at least 1")
        self._cluster = Cluster(bootstrap, security=security)
        self._requests = requests
        self._replies = replies
        self._max_open = max_open
        # Whoever asks after a restart is another one: what was asked before is not known any more.
        self._name = uuid.uuid4().hex
        self._count = 0
        # Questions without an answer yet, and answers that nobody has asked for yet.
        self._open: set[str] = set()
        self._answers: dict[str, Answer] = {}
        self.ignored = 0
        try:
            metadata = Metadata(self._cluster)
            self._place = self._find_place(metadata)
            self._offset = offsets(
                self._cluster,
                {self._place: LATEST},
                isolation="read_uncommitted",
                metadata=metadata,
            )[self._place]
            self._writer = LogWriter(self._cluster, linger_ms=0)
            self._fetcher = Fetcher(self._cluster, metadata=metadata)
        except BaseException:
            self._cluster.close()
            raise

    def _find_place(self, metadata: Metadata) -> Place:
        """The partition of our key, as whoever answers will choose it."""
        metadata.partitions(self._requests)
        count = len(metadata.partitions(self._replies))
        key = pa.array([self._name.encode()], pa.binary())
        return (self._replies, int(partitions_of(key, count)[0]))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(drop=kind is not None)

    def close(self, *, drop: bool = False) -> None:
        """Forget all questions, and end."""
        self._open.clear()
        self._answers.clear()
        try:
            self._writer.close(drop=drop)
        finally:
            self._fetcher.close()
            self._cluster.close()

    # ---- asking --------------------------------------------------------------------------

    def ask(
        self, value: Value, *, key: bytes | str | None = None, timeout_s: float = TIMEOUT_S
    ) -> Answer:
        """Ask, and wait for the answer. Bytes and text go as they are, anything else as JSON."""
        deadline = time.monotonic() + timeout_s
        return self._wait(self.send(value, key=key), deadline, timeout_s)

    def send(self, value: Value, *, key: bytes | str | None = None) -> Question:
        """Ask, and do not wait: the question is in the log when this returns."""
        if len(self._open) + len(self._answers) >= self._max_open:
            self._hear(0)
        if len(self._open) + len(self._answers) >= self._max_open:
            raise TooManyOpenError(
                f"{self._max_open} questions to {self._requests!r} are on their way"
            )
        self._count += 1
        question = Question(f"{self._name}:{self._count}")
        headers = [
            (ID, question.id.encode()),
            (REPLY_TOPIC, self._replies.encode()),
            (REPLY_KEY, self._name.encode()),
        ]
        self._open.add(question.id)
        try:
            self._writer.write(self._requests, [_bytes(key)], [_bytes(value)], headers=[headers])
            self._writer.flush()
        except BaseException:
            self._open.discard(question.id)
            # What was not sent must not go out with the next one.
            self._writer.abort()
            raise
        return question

    def wait(self, question: Question, *, timeout_s: float = TIMEOUT_S) -> Answer:
        """The answer to a question, which is forgotten with it, or when the time is over."""
        return self._wait(question, time.monotonic() + timeout_s, timeout_s)

    def _wait(self, question: Question, deadline: float, timeout_s: float) -> Answer:
        while question.id in self._open:
            left_ms = int((deadline - time.monotonic()) * 1000)
            if left_ms <= 0:
                self._hear(0)
                if question.id not in self._open:
                    break
                self._open.discard(question.id)
                raise NoAnswerError(
                    f"no answer from {self._requests!r} in {self._replies}-{self._place[1]} "
                    f"within {timeout_s:.1f} s"
                )
            self._hear(min(left_ms, _WAIT_MS))
        answer = self._answers.pop(question.id, None)
        if answer is None:
            raise AskingError("this question was not asked here, or its answer was taken already")
        wrong = answer.headers.get(ERROR)
        if wrong is not None:
            raise AnswerError(f"{self._requests!r} answers: {wrong.decode(errors='replace')}")
        return answer

    @property
    def open(self) -> int:
        """How many questions have no answer yet."""
        return len(self._open)

    # ---- hearing -------------------------------------------------------------------------

    def _hear(self, max_wait_ms: int) -> None:
        """Take in the answers that have come."""
        try:
            fetched = self._fetcher.fetch({self._place: self._offset}, max_wait_ms)
        except OffsetGoneError as error:
            # Deleted before we read it: what was in there has no answer.
            self._offset = error.log_start
            return
        for answered in fetched.values():
            decoded = decode(
                answered.data, first_offset=self._offset, aborted=answered.aborted, headers=True
            )
            self._offset = max(self._offset, decoded.next_offset)
            rows = decoded.batch
            columns = (rows.column(name).to_pylist() for name in ("value", "headers"))
            for value, items in zip(*columns, strict=True):
                self._take(value, {item["key"]: item["value"] for item in items or ()})

    def _take(self, value: bytes | None, headers: dict[str, bytes | None]) -> None:
        own = (headers.get(ID) or b"").decode(errors="replace")
        if own in self._open:
            self._open.discard(own)
            self._answers[own] = Answer(value, headers)
        elif own.startswith(f"{self._name}:"):
            self.ignored += 1


def _bytes(value: Value) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    return value.encode() if isinstance(value, str) else orjson.dumps(value)
