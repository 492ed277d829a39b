"""The topics of a flow, written: one transaction per micro-batch, and counts of what went where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyspark.sql import DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.flows.declare import Flow, physical
from penstock.spark.sink import AtLeastOnce, ExactlyOnce

if TYPE_CHECKING:
    from penstock.spark.flows.inputs import Place


@dataclass(frozen=True, slots=True)
class Counts:
    """Rows that a micro-batch wrote."""

    rows: int = 0
    dead_letters: int = 0

    def plus(self, rows: int) -> Counts:
        return Counts(self.rows + rows, self.dead_letters)


class TopicWriter:
    """Writes the records of a flow's micro-batches, each of which says its topic."""

    def __init__(self, place: Place, flow: Flow, generation: int) -> None:
        self._letters = [each.dead_letters for each in flow.streams if each.dead_letters]
        self._sink: ExactlyOnce | AtLeastOnce
        if flow.exactly_once:
            # A generation is a query of its own: the old one may still write while it is built.
            name = physical(flow.name, generation)
            self._sink = ExactlyOnce(name, place.bootstrap, options=place.options)
        else:
            self._sink = AtLeastOnce(place.bootstrap, options=place.options)

    def write(self, records: DataFrame, batch_id: int) -> Counts:
        """Write a micro-batch, or see that it was written before."""
        seen = None
        if self._letters:
            seen = Observation()
            is_letter = F.col("topic").isin(self._letters)
            records = records.observe(seen, F.count_if(is_letter).alias("letters"))
        self._sink.write_batch(records, batch_id)
        written = self._sink.last
        assert written is not None
        if written.skipped:
            return Counts()
        # Known once the records were computed, which those of a batch without any were too.
        letters = int(seen.get["letters"]) if seen is not None else 0
        return Counts(max(0, written.records - letters), letters)

    def close(self) -> None:
        if isinstance(self._sink, ExactlyOnce):
            self._sink.close()
