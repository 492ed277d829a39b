"""Trying again: with growing pauses, and up to a limit of time.

tries = Tries(60.0)
while True:
    try:
        return ask()
    except ClientError as error:
        tries.pause(error, "asking for the offsets of orders")
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Final, TypeVar

from penstock.client.errors import ClientError, GaveUpError, RefusedError, UnreachableError
from penstock.wire.errors import ErrorCode

FIRST_PAUSE_S: Final = 0.02
LONGEST_PAUSE_S: Final = 1.0
# How long a topic may be unknown to the broker that is asked: news of it need time to spread.
UNKNOWN_TOPIC_S: Final = 5.0
_UNKNOWN: Final = frozenset((ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, ErrorCode.UNKNOWN_TOPIC_ID))

T = TypeVar("T")


class Tries:
    """Counts attempts and time; `pause` waits for the next one, or raises."""

    def __init__(
        self,
        timeout_s: float,
        *,
        unknown_topic_s: float = UNKNOWN_TOPIC_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._began = clock()
        self._timeout_s = timeout_s
        self._unknown_topic_s = min(unknown_topic_s, timeout_s)
        self.attempts = 0

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._began

    def pause(self, error: ClientError, doing: str) -> None:
        """Wait before the next attempt.

        An error that will not go away is raised as it is, a passing one as a GaveUpError once the
        time is over.
        """
        if not error.retriable:
            raise error
        unknown = isinstance(error, RefusedError) and error.code in _UNKNOWN
        limit_s = self._unknown_topic_s if unknown else self._timeout_s
        pause_s = pause_after(self.attempts)
        if self.elapsed_s + pause_s > limit_s:
            if unknown:
                raise error
            raise gave_up(doing, self.elapsed_s, error) from error
        self.attempts += 1
        time.sleep(pause_s)


def pause_after(attempts: int) -> float:
    """Twice as long each time, up to a limit, and never all at the same moment."""
    pause_s: float = min(FIRST_PAUSE_S * 2.0 ** min(attempts, 10), LONGEST_PAUSE_S)
    return pause_s * random.uniform(0.8, 1.2)


def gave_up(doing: str, elapsed_s: float, error: Exception) -> GaveUpError:
    advice = error.advice if isinstance(error, UnreachableError) else None
    return GaveUpError(f"{doing}: gave up after {elapsed_s:.0f} s; last: {error}", advice=advice)


def until_answered(ask: Callable[[], T], doing: str, timeout_s: float) -> T:
    """What `ask` returns, asked again while the error is a passing one."""
    tries = Tries(timeout_s)
    while True:
        try:
            return ask()
        except ClientError as error:
            tries.pause(error, doing)
