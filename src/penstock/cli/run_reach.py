"""Whether the broker still answers while a run with an end, `--once`, is under way.

Flows and sinks wait for a broker that is away, with growing pauses, as is right for those that run
for days. A run with an end is waited for, by a person or a script: it ends, and says why.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from typing import Final

from penstock.cli.kafka import CONNECT_TIMEOUT_S, DEFAULT_PORT
from penstock.cli.values import parse_address
from penstock.spark.flows.supervisor import Failure

# A broker that is started again is back sooner.
AWAY_S: Final = 15.0
LOOK_S: Final = 2.0


class BrokerWatch:
    """Looks now and then; knows since when nobody answers."""

    def __init__(self, bootstrap: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._bootstrap = bootstrap
        self._clock = clock
        parts = filter(None, (part.strip() for part in bootstrap.split(",")))
        self._addresses: Sequence[tuple[str, int]] = [
            parse_address(each.rpartition("://")[2], default_port=DEFAULT_PORT) for each in parts
        ]
        self._looked = self._answered = clock()

    @property
    def is_away(self) -> bool:
        """Whether it was for so long that the run is to end."""
        return self._looked - self._answered >= AWAY_S

    def look(self) -> Failure | None:
        """Why the run is to end; None if it is not."""
        if self._clock() - self._looked < LOOK_S:
            return None
        if self._answers():
            self._answered = self._clock()
        self._looked = self._clock()
        if not self.is_away:
            return None
        away_s = self._looked - self._answered
        return Failure(
            f"no broker answers at {self._bootstrap} any more, for {away_s:.0f} s",
            "What was committed is done; run it again when the broker is back, and it goes on from "
            "there. Without --once it would wait.",
        )

    def _answers(self) -> bool:
        for address in self._addresses:
            try:
                socket.create_connection(address, CONNECT_TIMEOUT_S).close()
            except OSError:
                continue
            return True
        return False
