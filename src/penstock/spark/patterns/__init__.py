"""Patterns over streams: complex events from the events of a key, in Python or MATCH_RECOGNIZE.

    from penstock.spark import pattern

    testing = pattern.begin("small", "amount < 1").then("large", "amount > 500")
    alarms = testing.within("10 minutes").match(payments, by="card", measures={
        "first": "small.amount", "total": "sum(large.amount)"})

    falls = pattern.match_recognize(ticks, '''
        PARTITION BY symbol ORDER BY _time
        MEASURES A.price AS top, LAST(B.price) AS bottom
        PATTERN (A B+ C) WITHIN INTERVAL '1' HOUR
        DEFINE B AS price < PREV(price), C AS price > PREV(price)''')

**What comes out**, for each match: the columns of `by`, `match_start` and `match_end` (the times
of its first and last row), the measures, and `events`: the rows of the match, each with the name of
its variable. With ALL ROWS PER MATCH (`per="row"`) each row of the match with the measures so far.

**Which rows match.** Those of a key in the order of their event time, ties in the order of the
log; with `order=None` in the order of the log. From the first row on the match that the standard
(SQL:2016, row pattern recognition) prefers: greedy takes more, reluctant fewer, of alternatives the
first. The next match begins where the skip strategy says, or at the next row if there was none.

**When it is given.** Only rows before the watermark are looked at; the others wait. A match is
given as soon as it is certain, that is when no row still to come could lead to one that is
preferred. So live, on replay with other micro-batches and in batch the matches are the same. In
batch without a watermark the rows are all there are, and what is open at their end is decided.

**What is kept**: rows that are not before the watermark yet, and rows of attempts that are still
open, which `within` bounds. An attempt spans at most `max_rows` rows: past that the flow fails and
names the key, or with `overflow="skip"` gives this attempt up. Without `within`, with PREV or with
MATCH_NUMBER something is kept for each key for ever, and a warning says so at declaration.

**Speed.** Conditions on the row itself are computed by Spark for all rows at once; those that refer
to other rows of the match by a compiled program. If all stages follow with `then`, rows that fit
none of them are not even sent.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from penstock.spark.patterns.declare import Pattern, begin, begin_one_of
from penstock.spark.patterns.errors import (
    PatternError,
    PatternLimitError,
    PatternSkipError,
    PatternTextError,
)
from penstock.spark.patterns.plan import DEFAULT_MAX_ROWS, Overflow

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pyspark.sql import DataFrame

__all__ = [
    "Pattern",
    "PatternError",
    "PatternLimitError",
    "PatternSkipError",
    "PatternTextError",
    "begin",
    "begin_one_of",
    "match_recognize",
]

# `from penstock.spark import pattern` means this.
pattern = sys.modules[__name__]


def match_recognize(
    rows: DataFrame,
    text: str,
    *,
    events: bool | Sequence[str] = True,
    max_rows: int = DEFAULT_MAX_ROWS,
    overflow: Overflow = "fail",
    name: str | None = None,
) -> DataFrame:
    """The matches of a MATCH_RECOGNIZE clause, given as text, over rows.

    See `penstock.spark.patterns.text` for the clauses. `events=False` leaves the matched rows out,
    a list of columns chooses what they show.
    """
    from penstock.spark.patterns.frames import Wanted, matched
    from penstock.spark.patterns.text import recognized

    clauses = recognized(text)
    wanted = Wanted(
        by=tuple(each for each, _ in clauses.by),
        order=None if clauses.order is None else clauses.order[0],
        measures=clauses.measures,
        all_rows=clauses.all_rows,
        events=events if isinstance(events, bool) else tuple(events),
        max_rows=max_rows,
        overflow=overflow,
        name=name,
    )
    return matched(clauses.definition, rows, wanted)
