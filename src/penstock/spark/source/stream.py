"""The source as a stream: what Spark asks of it between micro-batches.

Theory: Spark keeps the end of every micro-batch in the checkpoint before it runs it; its start is
the end of the one before. The first has no start there: a restart asks for the initial position
again. Where that is "the end of the log", it would be another one by then, and records in between
would be skipped. So the first micro-batch is empty then: its end is the initial position.

A partition that appears is in the end of a micro-batch and not in its start, and is read from its
beginning. One that is gone, or whose log ends before where we are, is data loss: an error, or a
warning where `failOnDataLoss` is false; a log that was begun anew is then read from its start.

This object lives in a process of its own beside the driver, for as long as the query runs. Copies
of it, made before anything is connected, go to the tasks.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator, Mapping, Set
from types import TracebackType
from typing import Any, Final

from pyspark.sql.datasource import DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    ReadMinRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from penstock.client.errors import RefusedError
from penstock.spark.source.errors import (
    DELETED,
    KEEP_LONGER,
    START_ANEW,
    UNKNOWN_TOPIC,
    DataLossError,
    told,
)
from penstock.spark.source.options import Options, Place, Positions
from penstock.spark.source.planning import Range, limited, tasks
from penstock.spark.source.positions import Log, from_json, show, to_json
from penstock.spark.source.task import Task

log: Final = logging.getLogger("penstock.spark.source")

_RECHECKS: Final = 3
_PAUSE_S: Final = 0.1
_APPEAR_S: Final = 1.0
# Spark asks a hundred times a second for news. After so many times without any we answer a little
# later, or a query that waits would take a good part of a core.
_IDLE_AFTER: Final = 50
_IDLE_PAUSE_S: Final = 0.02


# The program that Spark runs us in.
_RUNNER: Final = "pyspark.sql.streaming.python_streaming_source_runner"


def _leave_quietly() -> None:
    """Say nothing at the end of this process if it is Spark's for us, and Spark has gone first.

    It tells Spark of any error, also of the end of the connection. If Spark has closed that by
    then, a query being stopped, the error of telling came to the user's terminal.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if main is not None and main.name == _RUNNER:
        sys.excepthook = _unless_spark_has_gone


def _unless_spark_has_gone(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if not isinstance(error, BrokenPipeError | ConnectionResetError):
        sys.__excepthook__(kind, error, trace)


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans micro-batches; `read` runs in the tasks."""

    def __init__(self, options: Options, schema: StructType) -> None:
        _leave_quietly()
        self._options = options
        self._schema = schema
        self._opened: Log | None = None
        # What initialOffset said, and whether the first micro-batch still has to keep it.
        self._initial: Positions | None = None
        self._to_pin = False
        # With Trigger.AvailableNow: how far to go.
        self._target: Positions | None = None
        self._latest: Positions = {}
        self._ids: dict[str, object] = {}
        self._batch_at = float("-inf")
        self._idle = 0
        self._checked = False
        self._planned: tuple[Any, Any, list[InputPartition]] | None = None

    @property
    def _log(self) -> Log:
        if self._opened is None:
            self._opened = Log(self._options)
        return self._opened

    @property
    def _starts_at_end(self) -> bool:
        start = self._options.start
        return start.has_latest or (start.by_time and self._options.latest_without_match)

    # ---- positions -----------------------------------------------------------------------

    def initialOffset(self) -> dict[str, dict[str, int]]:  # noqa: N802 (Spark's name)
        with told():
            self._initial = self._log.resolve(self._options.start, starting=True)
            self._to_pin = self._starts_at_end
            return to_json(self._initial)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        if self._options.max_offsets is not None:
            return ReadMaxRows(self._options.max_offsets)
        if self._options.min_offsets is not None:
            return ReadMinRows(self._options.min_offsets)
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        with told():
            strict = self._options.fail_on_data_loss
            places = self._log.chosen() if strict else self._log.places(fresh=True)
            self._target = self._log.latest(places)

    def reportLatestOffset(self) -> dict[str, dict[str, int]] | None:  # noqa: N802
        return to_json(self._latest) if self._latest else None

    def latestOffset(  # noqa: N802
        self, start: Mapping[str, Mapping[str, int]], limit: ReadLimit
    ) -> dict[str, dict[str, int]]:
        with told():
            at = from_json(start)
            if self._to_pin and at == self._initial:
                self._to_pin = False
                self._latest = dict(at)
                return to_json(at)
            self._to_pin = False
            try:
                return to_json(self._next_end(at, limit))
            except RefusedError as error:
                if error.name != UNKNOWN_TOPIC:
                    raise
                # Deleted since we asked which partitions there are: ask again, and say so.
                self._log.places(fresh=True)
                return to_json(self._next_end(at, limit))

    def _next_end(self, at: Positions, limit: ReadLimit) -> Positions:
        there = self._there(at)
        begins = {place: offset for place, offset in at.items() if place in there}
        added = there - at.keys()
        if self._target is not None:
            added &= self._target.keys()
        begins |= self._beginnings(added)
        ends = self._ends(begins)
        if ends != at:
            # The ends may be those of a topic that was made anew since we looked.
            self._log.places(fresh=True)
            self._report_anew(at)
        self._latest = dict(ends)
        self._rest_if_idle(ends == at)
        if isinstance(limit, ReadAllAvailable):
            return ends
        if self._target is None and self._is_too_little(begins, ends):
            return {place: offset for place, offset in at.items() if place in there}
        if isinstance(limit, ReadMaxRows):
            ends = limited(limit.max_rows, begins, ends)
        return ends

    def _rest_if_idle(self, nothing_new: bool) -> None:
        self._idle = self._idle + 1 if nothing_new and self._target is None else 0
        if self._idle > _IDLE_AFTER:
            time.sleep(_IDLE_PAUSE_S)

    def _there(self, at: Positions) -> frozenset[Place]:
        """The partitions; those that are gone, and topics that are others now, are reported."""
        there = self._log.places()
        if at.keys() - there:
            # Perhaps an old answer: look again before somebody is alarmed.
            deadline = time.monotonic() + _APPEAR_S
            while at.keys() - there and time.monotonic() < deadline:
                time.sleep(_PAUSE_S)
                there = self._log.places(fresh=True)
            gone = at.keys() - there
            if gone:
                topic, number = min(gone)
                self._lost(
                    f"{show(gone)} of the checkpoint is not there any more; {topic}-{number} was "
                    f"read up to offset {at[topic, number]}",
                    DELETED,
                )
        self._report_anew(at)
        return there

    def _report_anew(self, at: Positions) -> None:
        for topic, now in self._log.topic_ids.items():
            before = self._ids.setdefault(topic, now)
            if before != now:
                self._ids[topic] = now
                read = sorted(place for place in at if place[0] == topic)
                if read:
                    self._lost(
                        f"the topic {topic!r} was deleted and made anew while it was read; "
                        f"{topic}-{read[0][1]} stood at offset {at[read[0]]}",
                        DELETED,
                    )

    def _beginnings(self, places: frozenset[Place]) -> Positions:
        if not places:
            return {}
        log.info("new partitions are read from their beginning: %s", show(places))
        return self._log.earliest(places)

    def _ends(self, begins: Positions) -> Positions:
        """How far each can be read; ends that lie before us are looked at again."""
        if self._target is not None:
            return {
                place: max(begin, self._target.get(place, begin)) for place, begin in begins.items()
            }
        for attempt in range(_RECHECKS):
            ends = self._log.latest(begins)
            behind = [place for place, end in ends.items() if end < begins[place]]
            if not behind:
                return ends
            if attempt < _RECHECKS - 1:
                time.sleep(_PAUSE_S)
        self._report_behind(begins, ends, behind)
        return ends

    def _report_behind(self, begins: Positions, ends: Positions, behind: list[Place]) -> None:
        topic, number = min(behind)
        self._lost(
            f"{topic}-{number} was read up to offset {begins[topic, number]}, and its log ends at "
            f"{ends[topic, number]} now: the topic was deleted and made anew, or lost its end",
            START_ANEW,
        )

    def _report_first(self, begins: Positions, end: Positions, behind: frozenset[Place]) -> None:
        """The first micro-batch once more, whose own start was not kept, ends before its start."""
        if self._starts_at_end:
            # It was empty.
            return
        topic, number = min(behind)
        self._lost(
            f"{topic}-{number} was to be read up to offset {end[topic, number]}, and its log "
            f"starts at {begins[topic, number]} now",
            KEEP_LONGER,
        )

    def _is_too_little(self, begins: Positions, ends: Positions) -> bool:
        """Whether to wait for more, as minOffsetsPerTrigger and maxTriggerDelay say."""
        least, now = self._options.min_offsets, time.monotonic()
        if least is None:
            return False
        waiting = sum(max(0, end - begins[place]) for place, end in ends.items())
        if waiting < least and now - self._batch_at < self._options.max_delay_ms / 1000:
            return True
        self._batch_at = now
        return False

    def _lost(self, text: str, advice: str) -> None:
        if self._options.fail_on_data_loss:
            raise DataLossError(text, advice=advice)
        log.warning("%s; going on, for failOnDataLoss is false", text)

    # ---- tasks ---------------------------------------------------------------------------

    def partitions(
        self, start: Mapping[str, Mapping[str, int]], end: Mapping[str, Mapping[str, int]]
    ) -> list[InputPartition]:
        # Spark asks several times for one micro-batch.
        if self._planned is None or self._planned[:2] != (start, end):
            with told():
                self._planned = (start, end, self._plan(from_json(start), from_json(end)))
        return self._planned[2]

    def _plan(self, start: Positions, end: Positions) -> list[InputPartition]:
        added = end.keys() - start.keys()
        begins = start | self._firsts(added)
        behind = frozenset(place for place in end if end[place] < begins[place])
        if behind and start == self._initial:
            self._report_first(begins, end, behind)
            behind = frozenset()
        if behind:
            self._report_behind(begins, end, list(behind))
            begins |= self._log.earliest(behind)
        if not self._checked:
            self._check(begins, end)
            self._checked = True
        ranges = [Range(*place, begins[place], end[place]) for place in end]
        planned = tasks(
            ranges,
            min_partitions=self._options.min_partitions,
            max_records=self._options.max_records,
        )
        return [Task(ranges) for ranges in planned]

    def _firsts(self, added: Set[Place]) -> Positions:
        """Where new partitions begin: with their first record, or something of them is lost."""
        firsts = self._log.earliest(added)
        for (topic, number), first in sorted(firsts.items()):
            if first > 0:
                self._lost(
                    f"{first} offsets of {topic}-{number}, which is new, are lost, from 0 on: its "
                    f"log starts at {first} now",
                    KEEP_LONGER,
                )
        return firsts

    def _check(self, begins: Positions, end: Positions) -> None:
        """Once after a start: are the records of the checkpoint's positions still there?"""
        there = self._there({place: begins[place] for place in end})
        wanted = {place for place in end if place in there and end[place] > begins[place]}
        starts = self._log.earliest(wanted)
        for (topic, number), first in sorted(starts.items()):
            at = begins[topic, number]
            if first > at:
                self._lost(
                    f"{first - at} offsets of {topic}-{number} are lost, from {at} on: "
                    f"its log starts at {first} now",
                    KEEP_LONGER,
                )
        ends = self._log.latest(wanted)
        short = [place for place in wanted if ends[place] < end[place]]
        if short:
            self._report_behind({place: end[place] for place in short}, ends, short)

    def read(self, partition: InputPartition) -> Iterator[Any]:
        from penstock.spark.source.table import read_task

        return read_task(self._options, partition, self._schema)

    def commit(self, end: Mapping[str, Mapping[str, int]]) -> None:
        """Nothing to do: the checkpoint keeps the position."""

    def stop(self) -> None:
        if self._opened is not None:
            self._opened.close()
            self._opened = None
