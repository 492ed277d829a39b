"""The operator: rows of a shard brought into order, matched, and kept as far as undecided.

State is rows: those not before the watermark yet, and of each key those from the first row on
whose match, or lack of one, is not certain yet (and a few before it, for PREV). They are matched
again with the rows of the next micro-batch, so nothing else need be remembered but, where
MATCH_NUMBER is used, how many matches each key has had.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from penstock.spark.patterns import kernel
from penstock.spark.patterns.errors import PatternError, PatternLimitError, PatternSkipError
from penstock.spark.patterns.plan import MAX_STEPS, Plan
from penstock.spark.patterns.results import Found, given
from penstock.spark.patterns.values import numbers_of, ranked_constants
from penstock.spark.state.numbering import numbered
from penstock.spark.state.operator import Shard
from penstock.spark.windows.clock import Clock

INPUT: Final = "rows"
TIME: Final = "_p_time"
BITS: Final = "_p_bits"
ROW: Final = "_p_row"
# Set in state: the match that begins here is decided.
DECIDED: Final = "_p_decided"
# The time after which nothing comes, where the rows themselves say it; the event time of rows that
# are ordered by another column.
WATERMARK: Final = "_p_watermark"
EVENT_TIME: Final = "_p_event_time"
PLACE: Final = ("_topic", "_partition", "_offset")
_NEVER: Final = -(2**63)
Ints = npt.NDArray[np.int64]


def key_column(number: int) -> str:
    return f"_p_key{number}"


def value_column(number: int) -> str:
    return f"_p_value{number}"


def measure_column(number: int) -> str:
    return f"_p_measure{number}"


@dataclass(frozen=True, slots=True)
class Matcher:
    """Matches a pattern over the rows of each key."""

    plan: Plan
    keys: int
    # Columns with values for the measures: by their expression.
    measure_columns: Mapping[str, str]
    has_time: bool
    # All rows are there, and none comes after them: in batch.
    complete: bool
    all_rows: bool
    events: bool
    schema: pa.Schema
    title: str
    describes: str
    kind: str = "pattern"

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        rows = self._rows(shard, inputs)
        watermark = self._watermark(shard, rows)
        clock = Clock.at(shard, watermark)
        if self.has_time and inputs.get(INPUT) is not None:
            clock.refuse_strays(_ints(inputs[INPUT][TIME]))
        clock.keep(shard)
        if rows is None:
            return self.schema.empty_table()
        complete = self.complete and shard.watermark_us is None
        order, groups = self._ordered(rows)
        times = _ints(rows[TIME])[order]
        first = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
        ends = np.append(first[1:], len(order))
        if self.has_time and not complete:
            # Times ascend within a key: those before the watermark come first.
            before = np.concatenate([[0], np.cumsum(times < watermark)])
            usable = first + before[ends] - before[first]
        else:
            usable = ends
        decided = np.concatenate([[0], np.cumsum(_ints(rows[DECIDED])[order])])
        begins = first + decided[ends] - decided[first]
        rows = rows.take(pa.array(order))
        found = self._find(rows, times, first, usable, begins, watermark, complete)
        result = given(self, rows, found, self._numbers(shard, rows, found))
        kept = np.maximum(found.next - self.plan.lookback, first)
        shard.state.keep("rows", self._kept(rows, ends, kept, found.next))
        return result

    def _rows(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table | None:
        parts = []
        kept = shard.state.value("rows")
        if kept is not None and len(kept):
            parts.append(kept)
        fresh = inputs.get(INPUT)
        if fresh is not None and len(fresh):
            fresh = self._checked(fresh)
            undecided = pa.array(np.zeros(len(fresh), np.int64))
            parts.append(fresh.append_column(DECIDED, undecided))
        if not parts:
            return None
        return pa.concat_tables(parts, promote_options="permissive").combine_chunks()

    def _watermark(self, shard: Shard, rows: pa.Table | None) -> int:
        if shard.watermark_us is not None:
            return shard.watermark_us
        if rows is not None and WATERMARK in rows.column_names:
            found = pc.min(rows[WATERMARK]).as_py()
            return _NEVER if found is None else int(found)
        return _NEVER

    def _checked(self, fresh: pa.Table) -> pa.Table:
        if fresh[TIME].null_count:
            at = pc.index(fresh[TIME].is_null(), True).as_py()
            raise PatternError(
                f"{self.title}: a row of key {self._key(fresh, at)} has no time{_place(fresh, at)}",
                advice="Take such rows out before, with where().",
            )
        if EVENT_TIME in fresh.column_names:
            differs = pc.not_equal(fresh[EVENT_TIME], fresh[TIME])
            if pc.any(differs).as_py():
                at = pc.index(differs, True).as_py()
                raise PatternError(
                    f"{self.title}: the column it is ordered by is not the event time of the stream"
                    f"{_place(fresh, at)}: nobody could say when all rows up to a time are there",
                    advice="Order by _time, or give the stream this column as its time.",
                )
        return fresh

    def _key(self, rows: pa.Table, at: int) -> str:
        return ", ".join(str(rows[key_column(n)][at].as_py()) for n in range(self.keys)) or "all"

    def _ordered(self, rows: pa.Table) -> tuple[Ints, Ints]:
        """The order by key, time and place in the log, and the number of each row's key."""
        columns = [rows[key_column(number)] for number in range(self.keys)]
        codes, _ = numbered(columns, len(rows))
        by: list[Any] = []
        if PLACE[2] in rows.column_names:
            by.append(_ints(rows[PLACE[2]]))
        place = np.zeros(len(rows), np.int64)
        if PLACE[0] in rows.column_names:
            place = _ranks(rows[PLACE[0]]) << 32
        if PLACE[1] in rows.column_names:
            place += _ints(rows[PLACE[1]])
        if place.any():
            by.append(place)
        if self.has_time:
            by.append(_ints(rows[TIME]))
        order = np.lexsort([*by, codes])
        return order, codes[order]

    def _find(
        self,
        rows: pa.Table,
        times: Ints,
        first: Ints,
        usable: Ints,
        begins: Ints,
        watermark: int,
        complete: bool,
    ) -> Found:
        plan = self.plan
        values, valid, domains = numbers_of(
            rows, [(value_column(n), each.encoding) for n, each in enumerate(plan.columns)],
            plan.constants,
        )  # fmt: skip
        group, end, row, variable, following, status, culprit = kernel.find(
            first, usable, begins, times, watermark, complete, plan.within_us,
            _ints(rows[BITS]), values, valid, plan.ops,
            ranked_constants(plan.constants, domains), plan.starts, plan.code, plan.memo,
            plan.skip, plan.skip_mask, plan.max_rows, plan.fails_on_rows, MAX_STEPS,
        )  # fmt: skip
        if status != 0:
            at = int(first[culprit])
            if status in {kernel.NO_ROW_TO_SKIP_TO, kernel.SKIPS_NOWHERE}:
                raise self._stuck(rows, at, int(following[culprit]), status)
            raise self._limit(rows, at, status)
        return Found(group, end, row, variable, following, first)

    def _limit(self, rows: pa.Table, at: int, status: int) -> PatternLimitError:
        key = self._key(rows, at)
        if status == kernel.TOO_MANY_ROWS:
            return PatternLimitError(
                f"{self.title}: key {key}: a match is still open after {self.plan.max_rows} rows",
                advice="Give the pattern a shorter `within`, raise max_rows=, or let the oldest "
                'attempt be given up with overflow="skip".',
            )
        return PatternLimitError(
            f"{self.title}: key {key}: more than {MAX_STEPS} possibilities from one first row",
            advice="Repetitions inside repetitions whose conditions refer to other rows are tried "
            "in all combinations: make the conditions narrower, or `within` shorter.",
        )

    def _stuck(self, rows: pa.Table, key_at: int, begin: int, status: int) -> PatternSkipError:
        place = _place(rows, begin)
        where, name = self.plan.skips_to
        why = f"the match that begins here{place} has no row of {name}"
        if status == kernel.SKIPS_NOWHERE:
            why = f"that is the first row of the match{place}, which would be found again for ever"
        return PatternSkipError(
            f"{self.title}: key {self._key(rows, key_at)}: the pattern skips {where} {name}, and "
            f"{why}"
        )

    def _kept(self, rows: pa.Table, ends: Ints, kept: Ints, begins: Ints) -> pa.Table:
        sizes = ends - kept
        chosen = np.repeat(kept - np.concatenate([[0], np.cumsum(sizes)[:-1]]), sizes)
        chosen = chosen + np.arange(len(chosen))
        decided = (chosen < np.repeat(begins, sizes)).astype(np.int64)
        left = rows.take(pa.array(chosen))
        return left.set_column(
            left.schema.get_field_index(DECIDED), DECIDED, pa.array(decided)
        ).combine_chunks()

    def _numbers(self, shard: Shard, rows: pa.Table, found: Found) -> Ints:
        """For each match which one of its key it is, from 1."""
        groups = found.group
        if not len(groups):
            return np.zeros(0, np.int64)
        begins = np.flatnonzero(np.concatenate([[True], groups[1:] != groups[:-1]]))
        sizes = np.diff(np.append(begins, len(groups)))
        within: Ints = np.arange(len(groups)) - np.repeat(begins, sizes) + 1
        if not self.plan.counts:
            return within
        names = [key_column(n) for n in range(self.keys)] or [BITS]
        keys = rows.select(names).take(pa.array(found.first[groups[begins]]))
        if not self.keys:
            keys = keys.set_column(0, BITS, pa.array([0], pa.int64()))
        table = shard.state.table(
            "numbers", keys.schema.append(pa.field("_p_number", pa.int64())), names
        )
        before: Ints = table.get(keys)["_p_number"].fill_null(0).to_numpy()
        table.put(keys.append_column("_p_number", pa.array(before + sizes)))
        return within + np.repeat(before, sizes)


def _place(rows: pa.Table, at: int) -> str:
    """Where a row stands in the log, as far as it is known."""
    if not all(each in rows.column_names for each in PLACE):
        return ""
    topic, partition, offset = (rows[each][at].as_py() for each in PLACE)
    return f" (topic {topic}, partition {partition}, offset {offset})"


def _ints(column: pa.ChunkedArray) -> Ints:
    # Writable, as the kernel's signature has it: what Arrow shares is not.
    return np.require(column.to_numpy(), dtype=np.int64, requirements=["C", "W"])


def _ranks(column: pa.ChunkedArray) -> Ints:
    ranks = pc.rank(column, tiebreaker="dense").to_numpy(zero_copy_only=False)
    made: Ints = np.asarray(ranks, dtype=np.int64)
    return made - 1
