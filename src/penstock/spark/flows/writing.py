"""The topics of a flow, written: one transaction per micro-batch, and counts of what went where."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.flows.declare import Flow
from penstock.spark.flows.versions import physical
from penstock.spark.sink import AtLeastOnce, ExactlyOnce, Written

if TYPE_CHECKING:
    from penstock.spark.flows.inputs import Place

OBSERVED_WAIT_S: Final = 5.0
_STEP_S: Final = 0.005


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows that a micro-batch wrote."""

    rows: int = 0
    dead_letters: int = 0
    # All of it had been written before, by a try that did not come to its end.
    skipped: bool = False

    def plus(self, rows: int, dead_letters: int = 0) -> Counts:
        return Counts(self.rows + rows, self.dead_letters + dead_letters, self.skipped)


def observed(seen: Observation, name: str) -> int | None:
    """A number that Spark has counted; None if it did not, because nothing was computed.

    Spark tells it shortly after the rows were computed. If it found that it need not compute them,
    as for a filter that is always false, it tells nothing, or what it tells is empty.
    """
    future: Any = seen._jo.future() if seen._jo is not None else None
    deadline = time.monotonic() + OBSERVED_WAIT_S
    while future is not None and not future.isCompleted():
        if time.monotonic() > deadline:
            return None
        time.sleep(_STEP_S)
    if future is None:
        return None
    try:
        return int(seen.get[name])
    except Exception:  # Spark's own check fails where there is nothing in it
        return None


class TopicWriter:
    """Writes the records of a flow's micro-batches, each of which says its topic.

    Dead letters come with the other records, or in a transaction of their own, which has its own
    memory of what was written: `write_letters`.
    """

    def __init__(self, place: Place, flow: Flow, generation: int) -> None:
        # A generation is a query of its own: the old one may still write while it is built.
        name = physical(flow.name, generation)
        self._letters = [each.dead_letters for each in flow.streams if each.dead_letters]
        self._sink = _sink(place, flow, name)
        self._letter_sink = _sink(place, flow, f"{name}.dead")

    def write(self, records: DataFrame, batch_id: int, *, with_letters: bool) -> Counts:
        """Write a micro-batch, or see that it was written before."""
        seen = None
        if with_letters and self._letters:
            seen = Observation()
            is_letter = F.col("topic").isin(self._letters)
            records = records.observe(seen, F.count_if(is_letter).alias("letters"))
        written = _write(self._sink, records, batch_id)
        letters = 0
        if seen is not None and not written.skipped:
            letters = observed(seen, "letters") or 0
        return Counts(max(0, written.records - letters), letters, written.skipped)

    def write_letters(self, letters: DataFrame, batch_id: int) -> int:
        """Write the dead letters of a micro-batch; how many there were."""
        return _write(self._letter_sink, letters, batch_id).records

    def close(self) -> None:
        for each in (self._sink, self._letter_sink):
            if isinstance(each, ExactlyOnce):
                each.close()


def _sink(place: Place, flow: Flow, name: str) -> ExactlyOnce | AtLeastOnce:
    if flow.exactly_once:
        return ExactlyOnce(name, place.bootstrap, options=place.options)
    return AtLeastOnce(place.bootstrap, options=place.options)


def _write(sink: ExactlyOnce | AtLeastOnce, records: DataFrame, batch_id: int) -> Written:
    sink.write_batch(records, batch_id)
    assert sink.last is not None
    return sink.last
