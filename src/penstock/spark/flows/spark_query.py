"""A streaming query of Spark's, as a flow sees it: what Spark itself keeps state for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, Protocol

import orjson

from penstock.spark.flows.turns import is_idle

if TYPE_CHECKING:
    from pyspark.sql.streaming.query import StreamingQuery

# How long a stop waits for Spark to note down a batch that is done.
COMMIT_WAIT_S: Final = 10.0
_STEP_S: Final = 0.05


class FlowQuery(Protocol):
    """What runs the micro-batches of a flow."""

    @property
    def is_active(self) -> bool: ...

    @property
    def is_idle(self) -> bool:
        """Whether it has looked for records, and found none."""

    def error(self) -> BaseException | None:
        """Why it has ended; None if it came to its end, or was stopped."""

    def reports(self) -> list[dict[str, Any]]:
        """What became of the last micro-batches; some may have been told before."""

    def wait(self, batch_id: int) -> None:
        """Until it is noted down that the last micro-batch is done."""

    def stop(self) -> None:
        """End it, in the middle of a micro-batch."""


class SparkQuery:
    """Spark's own."""

    def __init__(self, query: StreamingQuery) -> None:
        self._query = query
        self._newest = -1

    @property
    def is_active(self) -> bool:
        return bool(self._query.isActive)

    @property
    def is_idle(self) -> bool:
        return is_idle(self._query)

    def error(self) -> BaseException | None:
        return self._query.exception()

    def reports(self) -> list[dict[str, Any]]:
        last = self._query.lastProgress
        if last is None:
            return []
        found = [last]
        if int(last["batchId"]) > self._newest + 1:
            found = list(self._query.recentProgress)
        self._newest = int(last["batchId"])
        return [orjson.loads(each.json) for each in found]

    def wait(self, batch_id: int) -> None:
        """So that it need not run again."""
        deadline = time.monotonic() + COMMIT_WAIT_S
        while self.is_active and time.monotonic() < deadline:
            last = self._query.lastProgress
            done = -1 if last is None else int(last["batchId"])
            if done >= batch_id or not self._query.status["isTriggerActive"]:
                return
            time.sleep(_STEP_S)

    def stop(self) -> None:
        self._query.stop()
