"""Rounds: the answers of many consumers go into the journal together.

While one round is on its way to the disk, further answers gather; then all that they changed is
written at once, one entry for each queue. So the busier it is, the less an answer costs.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from penstock.errors import StorageError

if TYPE_CHECKING:
    from penstock.broker.server import Broker

log = logging.getLogger(__name__)

Outcome = asyncio.Future[StorageError | None]


class ShareRounds:
    """Writes what has changed in the queues, and tells those who wait for it."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._waiting: list[Outcome] = []
        # Whether a round is about to be written, or is not safe yet.
        self._under_way = False
        self.stopped = False

    def stop(self) -> None:
        """Write nothing any more: the broker stops, and what is not written was not promised."""
        self.stopped = True

    def request(self) -> None:
        """Have what has changed written soon."""
        if not self._under_way:
            self._under_way = True
            self._broker.loop.call_soon(self._write)

    def durable(self) -> Outcome:
        """What has changed so far is safe when this is done; its result is why it is not."""
        outcome: Outcome = self._broker.loop.create_future()
        self._waiting.append(outcome)
        self.request()
        return outcome

    def _write(self) -> None:
        coordination = self._broker.coordination
        waiting, self._waiting = self._waiting, []
        if self.stopped:
            self._finish(waiting, StorageError("the broker stops"))
            return
        try:
            coordination.write(coordination.shares.changes())
            # Others may have staged some of the changes before: they are waited for as well.
            coordination.journal.when_durable(lambda error: self._finish(waiting, error))
        except StorageError as error:
            self._broker.warn_now_and_then("writing what share groups have acknowledged", error)
            self._finish(waiting, error)
        except Exception:
            # A bug; those who wait must hear of it all the same.
            log.exception("writing what share groups have acknowledged")
            self._finish(waiting, StorageError("writing failed"))

    def _finish(self, waiting: list[Outcome], error: StorageError | None) -> None:
        self._under_way = False
        for outcome in waiting:
            # Whoever waited may have been cancelled meanwhile.
            if not outcome.done():
                outcome.set_result(error)
        if self._waiting:
            self.request()
