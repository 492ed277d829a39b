"""The topics of a flow, written: one transaction per micro-batch, and counts of what went where."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import Column, DataFrame, Observation
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark import reading
from penstock.spark.flows.dead_letters import described
from penstock.spark.flows.declare import Flow
from penstock.spark.flows.versions import physical
from penstock.spark.reading.frame import HEADER_PREFIX
from penstock.spark.sink import AtLeastOnce, ExactlyOnce, Written
from penstock.spark.sink.prepared import PreparedRows

if TYPE_CHECKING:
    from penstock.spark.flows.inputs import Place

OBSERVED_WAIT_S: Final = 5.0
# What is counted while the records of a micro-batch pass.
BAD: Final = "records"
EVERY: Final = "every"
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


def counting() -> tuple[Column, Column]:
    """Counts the records of a typed frame, and those that could not be read."""
    return F.count(reading.ERROR).alias(BAD), F.count(F.lit(1)).alias(EVERY)


def counted(bad: Observation | None) -> tuple[int, int] | None:
    """All records that `counting` has seen, and those that could not be read."""
    if bad is None:
        return None
    every, dead = observed(bad, EVERY), observed(bad, BAD)
    return None if every is None or dead is None else (every, dead)


def first_of(frames: Iterable[DataFrame]) -> str:
    """Where the first record of typed frames stood that could not be read, and why."""
    for rows in frames:
        found = reading.bad(rows).select("topic", "partition", "offset", reading.ERROR)
        for row in found.orderBy("partition", "offset").limit(1).collect():
            return described(*row)
    return ""


def first_letter(rows: DataFrame, topics: list[str]) -> str:
    """A dead letter among records that are to be written: its headers say what it is."""
    letters = rows.where(F.col("topic").isin(topics))
    for row in letters.select("headers").limit(1).collect():
        said = {each["key"]: bytes(each["value"] or b"").decode() for each in row["headers"]}
        names = ("topic", "partition", "offset", "reason")
        topic, partition, offset, reason = (said.get(HEADER_PREFIX + name, "") for name in names)
        return f"{topic}-{partition} at offset {offset}: {reason}"
    return ""


class TopicWriter:
    """Writes the records of a flow's micro-batches, each of which says its topic.

    Dead letters come with the other records, or in a transaction of their own, which has its own
    memory of what was written: `write_letters`.
    """

    def __init__(
        self, place: Place, flow: Flow, generation: int, query_id: str | None = None
    ) -> None:
        # A generation is a query of its own: the old one may still write while it is built.
        name = physical(flow.name, generation)
        self._letters = [each.dead_letters for each in flow.streams if each.dead_letters]
        self._sink = _sink(place, flow, name, query_id)
        self._letter_sink = _sink(place, flow, f"{name}.dead", query_id)
        # Counts those of the micro-batch that is written, where they come with the others.
        self.letters_seen: Observation | None = None

    def write(
        self,
        records: DataFrame,
        batch_id: int,
        *,
        with_letters: bool,
        check: Callable[[], None] | None = None,
    ) -> Counts:
        """Write a micro-batch, or see that it was written before.

        `check` may refuse it, when its records were sent and nothing of them counts yet.
        """
        seen = None
        if with_letters and self._letters:
            seen = Observation()
            is_letter = F.col("topic").isin(self._letters)
            records = records.observe(seen, F.count_if(is_letter).alias("letters"))
        self.letters_seen = seen
        written = _write(self._sink, records, batch_id, check)
        letters = 0
        if seen is not None and not written.skipped:
            letters = observed(seen, "letters") or 0
        return Counts(max(0, written.records - letters), letters, written.skipped)

    def write_prepared(
        self, rows: PreparedRows, batch_id: int, check: Callable[[], None] | None
    ) -> Counts:
        """Write a micro-batch by a plan that is prepared; PreparedFailedError if that fails."""
        assert isinstance(self._sink, ExactlyOnce)
        self._sink.write_batch(rows, batch_id, check)
        written = self._sink.last
        assert written is not None
        return Counts(written.records, 0, written.skipped)

    def write_letters(self, letters: DataFrame, batch_id: int) -> int:
        """Write the dead letters of a micro-batch; how many there were."""
        return _write(self._letter_sink, letters, batch_id).records

    @property
    def letter_topics(self) -> list[str]:
        """The topics that dead letters go to."""
        return self._letters

    def close(self) -> None:
        for each in (self._sink, self._letter_sink):
            if isinstance(each, ExactlyOnce):
                each.end()


def _sink(place: Place, flow: Flow, name: str, query_id: str | None) -> ExactlyOnce | AtLeastOnce:
    if flow.exactly_once:
        return ExactlyOnce(name, place.bootstrap, options=place.options, query_id=query_id)
    return AtLeastOnce(place.bootstrap, options=place.options)


def _write(
    sink: ExactlyOnce | AtLeastOnce,
    records: DataFrame,
    batch_id: int,
    check: Callable[[], None] | None = None,
) -> Written:
    sink.write_batch(records, batch_id, check)
    assert sink.last is not None
    return sink.last
