"""When a flow is started, started again, or given up: a state machine without threads or clocks.

    starting ──started──▶ running ──ended──▶ finished        (only a run with an end comes here)
       ▲                     │
       │ due                 │ failed, and trying again may help
    waiting ◀────────────────┤
                             │ failed, and it does not help, or it was tried too often
                             ▼
                           failed

`stop` leads from anywhere to `stopping` and then `stopped`; `restart` from there, and from
`failed`, back to `starting`. The machine answers each event with what is to be done: `START`,
`STOP` or nothing. Each flow has a machine of its own, so no failure of one is seen by another.

Tries are bounded: after `max_tries` failures in a row without progress between them the flow is
given up. A micro-batch that was completed is progress, and begins the count anew. The pause doubles
from try to try up to a limit; chance makes it up to half as short again, so that flows that failed
together do not come back together.

What only waits for something that others make, such as a topic, has not failed: it looks again and
again, at the same pace, which counts as no try; seen from outside it is `waiting` all the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

State = Literal["starting", "running", "waiting", "stopping", "stopped", "failed", "finished"]
ENDED: Final[tuple[State, ...]] = ("stopped", "failed", "finished")


class Do(StrEnum):
    """What an event asks for."""

    NOTHING = "nothing"
    START = "start"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Policy:
    """How often, and after how long, a failed flow is tried again."""

    first_pause_s: float = 1.0
    longest_pause_s: float = 60.0
    max_tries: int = 10
    # How often it is looked for what is waited for.
    look_s: float = 1.0

    def pause_s(self, failures: int, chance: float) -> float:
        """The pause after so many failures in a row; `chance` lies between 0 and 1."""
        doublings = min(failures - 1, 30)
        whole = min(self.longest_pause_s, self.first_pause_s * float(2**doublings))
        return whole * (1.0 - chance / 2)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a flow failed, in words for people."""

    message: str
    advice: str = ""
    retriable: bool = False
    # It lacks something that others make, and goes on once that is there.
    waits: bool = False
    # There is nothing to do: a run with an end has come to it.
    is_idle: bool = False


class Supervised:
    """The life of one flow. Times are seconds of any clock that only goes forward."""

    __slots__ = ("_again", "_chance", "_policy", "due", "failure", "failures", "given_up",
                 "restarts", "state")  # fmt: skip

    def __init__(self, policy: Policy, chance: Callable[[], float]) -> None:
        self._policy = policy
        self._chance = chance
        # Whether it is being stopped only to be started again.
        self._again = False
        self.state: State = "starting"
        # Failures in a row, without progress between them.
        self.failures = 0
        # How often it was started again by itself.
        self.restarts = 0
        self.failure: Failure | None = None
        # Whether it would have been tried again, had it not failed too often.
        self.given_up = False
        self.due = 0.0

    @property
    def is_ended(self) -> bool:
        return self.state in ENDED

    @property
    def is_looking(self) -> bool:
        """Whether it waits for something that others make."""
        waits = self.failure is not None and self.failure.waits
        return waits and self.state in {"starting", "waiting"}

    @property
    def shown(self) -> State:
        """The state for people: looking for what is not there yet is no start."""
        return "waiting" if self.is_looking else self.state

    def started(self) -> Do:
        """Spark has taken the query."""
        if self.state == "stopping":
            return Do.STOP
        if self.state == "starting":
            self.state = "running"
            # It runs again: why it had not is of no use any more. It still counts, until there is
            # progress.
            self.failure = None
        return Do.NOTHING

    def progressed(self) -> None:
        """A micro-batch was completed."""
        if self.state == "running":
            self.failures = 0
            self.failure = None

    def failed(self, failure: Failure, now: float) -> Do:
        """The query could not start, or died."""
        if self.state == "stopping":
            return self._stopped()
        if self.state not in {"starting", "running"}:
            return Do.NOTHING
        if failure.is_idle:
            return self.ended()
        self.failure = failure
        if failure.waits:
            self.state = "waiting"
            self.due = now + self._policy.look_s
            return Do.NOTHING
        self.failures += 1
        if not failure.retriable or self.failures > self._policy.max_tries:
            self.given_up = failure.retriable
            self.state = "failed"
        else:
            self.state = "waiting"
            self.due = now + self._policy.pause_s(self.failures, self._chance())
        return Do.NOTHING

    def ended(self) -> Do:
        """The query came to an end without an error."""
        if self.state == "stopping":
            return self._stopped()
        if self.state in {"starting", "running"}:
            self.state = "finished"
            self.failure = None
        return Do.NOTHING

    def _stopped(self) -> Do:
        self.state = "stopped"
        return self.restart() if self._again else Do.NOTHING

    def tick(self, now: float) -> Do:
        """Time has passed."""
        if self.state == "waiting" and now >= self.due:
            self.state = "starting"
            self.restarts += not self.is_looking
            return Do.START
        return Do.NOTHING

    def stop(self) -> Do:
        """Somebody wants it stopped."""
        self._again = False
        if self.is_looking:
            # Nobody waits any more.
            self.failure = None
        if self.state == "waiting":
            self.state = "stopped"
        elif self.state == "running":
            self.state = "stopping"
            return Do.STOP
        elif self.state == "starting":
            # Stopped as soon as Spark has taken it.
            self.state = "stopping"
        return Do.NOTHING

    def restart(self) -> Do:
        """Somebody wants it started anew: what went wrong before is forgotten."""
        if self.state in {"running", "stopping"}:
            stops_already = self.state == "stopping"
            self.state = "stopping"
            self._again = True
            return Do.NOTHING if stops_already else Do.STOP
        if self.state in {"waiting", *ENDED}:
            self._again = False
            self.state = "starting"
            self.failures = 0
            self.failure = None
            self.given_up = False
            return Do.START
        return Do.NOTHING
