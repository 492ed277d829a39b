"""The streams of a micro-batch, each with what is known of its bad and late records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import reduce
from typing import TYPE_CHECKING, Final

from penstock.spark import reading, sql
from penstock.spark.flows import inputs
from penstock.spark.flows.late import late_letters
from penstock.spark.flows.writing import BAD, Counts, counted, observed
from penstock.spark.reading.decoding import ASIDE, TIME
from penstock.spark.state import time as clock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation

    from penstock.spark.flows.declare import Stream
    from penstock.spark.flows.running import Running
    from penstock.spark.state import watching

PLACE: Final = ["topic", "partition", "offset"]


@dataclass(frozen=True, slots=True)
class Part:
    """One stream of a micro-batch."""

    declared: Stream
    # With the bad ones, if it is typed.
    rows: DataFrame
    # As they were read; as they are in the log, unless the source has typed them.
    records: DataFrame
    # Counts the bad ones while they pass, if they go to a topic.
    bad: Observation | None = None
    # How many there are, if that is known from elsewhere, and how many records in all.
    bad_count: int | None = None
    count: int | None = None
    # Where the late rows are and how late, and how many; None where none is.
    told: DataFrame | None = None
    late: int = 0
    # The first and last of them in each partition.
    late_at: Mapping[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def bad_and_all(self) -> tuple[int | None, int] | None:
        """All records, if their number is known, and the bad ones; None if nothing is known."""
        if self.bad_count is not None:
            return self.count, self.bad_count
        return counted(self.bad)

    @property
    def on_time(self) -> DataFrame:
        if self.told is None:
            return self.rows
        return self.rows.join(self.told.select(*PLACE), PLACE, "left_anti")

    def with_told(
        self, told_of: list[watching.Told], kept: list[DataFrame], *, is_kept: bool
    ) -> Part:
        """With what the source has told of rows that go aside."""
        bad = sum(each.bad for each in told_of)
        late = sum(each.late for each in told_of)
        is_told = self.declared.late is not None and late > 0
        goes_aside = is_told or (self.declared.dead_letters is not None and bad > 0)
        if goes_aside and not is_kept:
            kept.append(self.rows.persist())
        told = None
        if is_told:
            named = {clock.BEFORE: f"{ASIDE}.before", clock.BEHIND: f"{ASIDE}.behind"}
            rows = self.rows.where(f"{ASIDE} IS NOT NULL")
            told = sql.select(rows, named, *PLACE, TIME)
        late_at = {each.partition: each.late_at for each in told_of if each.late_at}
        return replace(self, bad_count=bad, told=told, late=late, late_at=late_at)


class Aside:
    """Writes what of a micro-batch goes to dead letters and late records."""

    def __init__(self, running: Running) -> None:
        self._running = running

    def written(self, parts: list[Part], counts: Counts, batch_id: int) -> Counts:
        aside = [
            late_letters(self._as_read(each), each.told, each.declared.late)
            for each in parts
            if each.declared.late is not None and each.told is not None
        ]
        letters = []
        for each in parts:
            if each.declared.dead_letters is None:
                continue
            # After a replay nothing was computed, and so nothing counted.
            known = each.bad_count
            if each.bad is not None and not counts.skipped:
                known = observed(each.bad, BAD)
            if known != 0:
                letters.append(
                    reading.dead_letters(
                        each.rows, each.declared.dead_letters, self._running.flow.name
                    )
                )
        if not letters and not aside:
            return counts
        whole = reduce(lambda a, b: a.unionByName(b), [*letters, *aside])
        written = self._running.write_letters(whole, batch_id)
        late = sum(each.late for each in parts if each.declared.late is not None)
        return counts.plus(0, max(0, written - late))

    def _as_read(self, part: Part) -> DataFrame:
        """At least the late records of a stream as they are in the log."""
        if not inputs.is_typed(part.records):
            return part.records
        running = self._running
        spark = part.records.sparkSession
        return inputs.read_again(spark, running.place, part.declared, part.late_at)
