"""Windows compared with windows before them: rates, rolling averages, the same hour last week.

    counts = tumbling(orders, "1 hour", by=["shop"], values={"orders": count()})
    compare(counts, by=["shop"], values=["orders"], offset="7 days")
    rolling(counts, by=["shop"], values=["orders"], over=24, every="1 hour")
    rate(counts, ["orders"])

They take what `tumbling` and `hopping` give, and look at final windows only: early ones are left
out. `by` is what the windows are by: if it is not given, the columns before `window_start`. Kept
are the windows that a later one may look back at, so those of `offset`, or of the `over` last ones.
A window that is corrected (`allowed_lateness`) is compared again itself; what was said
of later windows by comparison with it is not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.state import Shard, apply
from penstock.spark.state.numbering import whole
from penstock.spark.state.operator import HINT
from penstock.spark.state.schemas import shown
from penstock.spark.windows.clock import WATERMARK
from penstock.spark.windows.declare import (
    by_schema,
    checked_columns,
    checked_keys,
    key_text,
    length,
    refused,
    spark_schema,
)
from penstock.spark.windows.errors import WindowError
from penstock.spark.windows.grouping import integers
from penstock.spark.windows.merging import END, FINAL, START
from penstock.spark.windows.spans import Span

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROWS: Final = "rows"
KEY: Final = "_penstock_key"
FROM: Final = "_penstock_from"
TO: Final = "_penstock_to"
_MOST_WINDOWS: Final = 10_000
_FORGOTTEN: Final = f"{HINT}forgotten"


def rate(windows: DataFrame, values: Sequence[str]) -> DataFrame:
    """Values by the length of their window: `NAME_per_second`."""
    checked_columns(windows, [*values, START, END], "values")
    seconds = (F.unix_micros(END) - F.unix_micros(START)) / F.lit(1e6)
    return windows.withColumns({f"{each}_per_second": F.col(f"`{each}`") / seconds
                                for each in values})  # fmt: skip


def compare(
    windows: DataFrame,
    *,
    by: Sequence[str] | None = None,
    values: Sequence[str],
    offset: Span,
    allowed_lateness: Span = "0 s",
    name: str | None = None,
) -> DataFrame:
    """Each window with what the values were `offset` before, and the difference.

    The columns are `NAME_before` and `NAME_change`, null where there was no such window. If the
    windows have an `allowed_lateness`, say it here too: earlier ones are kept that much longer.
    """
    offset_us = length(offset, "offset")
    late_us = length(allowed_lateness, "allowed_lateness", least=0)
    return _earlier(windows, by, values, (offset_us,), late_us, rolling_zero=None, name=name)


def rolling(
    windows: DataFrame,
    *,
    by: Sequence[str] | None = None,
    values: Sequence[str],
    over: int,
    every: Span,
    missing_is_zero: bool = False,
    allowed_lateness: Span = "0 s",
    name: str | None = None,
) -> DataFrame:
    """Each window with the average of the values over the last `over` windows: `NAME_rolling`.

    `every` is how far windows are apart, of tumbling ones their size. A window without events does
    not exist: it is left out of the average, or counts as zero.
    """
    if not 1 <= over <= _MOST_WINDOWS:
        raise refused(f"over={over} is not between 1 and {_MOST_WINDOWS:,}", "Take fewer windows.")
    step = length(every, "every")
    late_us = length(allowed_lateness, "allowed_lateness", least=0)
    offsets = tuple(turn * step for turn in range(over))
    return _earlier(windows, by, values, offsets, late_us, rolling_zero=missing_is_zero, name=name)


def _earlier(
    windows: DataFrame, by: Sequence[str] | None, values: Sequence[str], offsets: tuple[int, ...],
    late_us: int, *, rolling_zero: bool | None, name: str | None,
) -> DataFrame:  # fmt: skip
    checked_columns(windows, [*values, START, END], "values")
    if by is None:
        by = windows.columns[: windows.columns.index(START)]
    checked_keys(windows, by, "by")
    if not values:
        raise refused("values= is empty", "Name the values to look back at.")
    kept = [each for each in windows.columns if each != WATERMARK]
    columns = by_schema(windows, kept)
    for each in values:
        kind = columns.field(each).type
        if not (pa.types.is_integer(kind) or pa.types.is_floating(kind)
                or pa.types.is_decimal(kind)):  # fmt: skip
            raise refused(f"{each!r} is no number but {kind}", "Name values that are numbers.")
    operator = Earlier(columns, tuple(by), tuple(values), offsets, late_us, rolling_zero)
    final = windows.where(F.col(FINAL)) if FINAL in windows.columns else windows
    ready = final.withColumns(
        {KEY: key_text(windows, by), FROM: F.unix_micros(START), TO: F.unix_micros(END)}
    )
    return apply(
        {ROWS: ready}, operator, key=list(by), schema=spark_schema(operator.schema), name=name
    )


@dataclass(frozen=True)
class Earlier:
    """The operator: windows by key and start, looked up by others."""

    columns: pa.Schema
    by: tuple[str, ...]
    values: tuple[str, ...]
    offsets_us: tuple[int, ...]
    late_us: int
    # None: compared. Otherwise averaged, and whether what is missing counts as zero.
    rolling_zero: bool | None

    @property
    def kind(self) -> str:
        return "compare" if self.rolling_zero is None else "rolling"

    @property
    def describes(self) -> str:
        columns = shown(self.columns)
        far = f"{len(self.offsets_us)} windows up to {max(self.offsets_us)} us back"
        return f"{', '.join(self.values)} by {', '.join(self.by)}: {far} ({columns})"

    @property
    def schema(self) -> pa.Schema:
        more = []
        for each in self.values:
            kind = self.columns.field(each).type
            if self.rolling_zero is None:
                more += [(f"{each}_before", kind), (f"{each}_change", _difference(kind))]
            else:
                more.append((f"{each}_rolling", pa.float64()))
        return pa.schema([*self.columns, *(pa.field(*each) for each in more)])

    @property
    def _kept(self) -> pa.Schema:
        by = [self.columns.field(each) for each in self.by]
        values = [self.columns.field(each) for each in self.values]
        return pa.schema([pa.field(KEY, pa.string()), *by, pa.field(FROM, pa.int64()), *values])

    def process(self, shard: Shard, inputs: Mapping[str, pa.Table]) -> pa.Table:
        rows = inputs.get(ROWS)
        if rows is None:
            return self.schema.empty_table()
        self._check_single(rows)
        table = shard.state.table("windows", self._kept, [KEY, FROM])
        table.put(rows.select(self._kept.names).cast(self._kept))
        starts = integers(rows[FROM])
        found = []
        for offset in self.offsets_us:
            wanted = pa.table({KEY: rows[KEY], FROM: pa.array(starts - offset)})
            found.append(table.get(wanted))
        columns = [rows[each] for each in self.columns.names]
        for each in self.values:
            before = [whole(one[each]) for one in found]
            if self.rolling_zero is None:
                kind = _difference(before[0].type)
                now = whole(rows[each]).cast(kind)
                columns += [before[0], pc.subtract(now, before[0].cast(kind)).cast(kind)]
            else:
                columns.append(_averages(before, zero=self.rolling_zero))
        self._forget(shard, rows)
        out = pa.table(columns, schema=self.schema)
        order = pa.table({"k": whole(rows[KEY]), "s": pa.array(starts)})
        return out.take(pc.sort_indices(order, sort_keys=[("k", "ascending"), ("s", "ascending")]))

    def _check_single(self, rows: pa.Table) -> None:
        count = rows.group_by([KEY, FROM]).aggregate([([], "count_all")])["count_all"]
        if pc.max(count).as_py() > 1:
            by = ", ".join(map(repr, self.by)) or "no columns"
            raise WindowError(
                f"there are several windows from the same time on that by= does not tell apart: "
                f"it names {by}",
                advice="Let by= name all columns that the windows are by, or leave it out.",
            )

    def _forget(self, shard: Shard, rows: pa.Table) -> None:
        """Windows come in the order of their ends, but for late ones: older are looked at no more.

        All are gone through only now and then: what is kept is a little more than is needed.
        """
        table = shard.state.table("windows", self._kept, [KEY, FROM])
        ends, starts = integers(rows[TO]), integers(rows[FROM])
        size = int((ends - starts).max())
        needed = int(ends.max()) - 2 * size - max(self.offsets_us) - self.late_us
        kept = shard.state.value(_FORGOTTEN)
        before = None if kept is None else kept["upto_us"][0].as_py()
        if before is not None and needed - before < max(self.offsets_us) // 16:
            return
        shard.state.keep(_FORGOTTEN, pa.table({"upto_us": [needed]}))
        every = table.scan()
        old = integers(every[FROM]) < needed
        if old.any():
            table.delete(every.filter(pa.array(old)).select([KEY, FROM]))


def _difference(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_decimal(kind):
        return pa.decimal128(min(38, kind.precision + 1), kind.scale)
    return pa.float64() if pa.types.is_floating(kind) else pa.int64()


def _averages(columns: list[Any], *, zero: bool) -> pa.Array:
    """The average of each row over columns, the same in whatever order they come."""
    numbers = np.stack([
        np.asarray(each.cast(pa.float64()).to_numpy(zero_copy_only=False), dtype=np.float64)
        for each in columns
    ])  # fmt: skip
    there = np.stack([each.is_valid().to_numpy(zero_copy_only=False) for each in columns])
    found = []
    for values, valid in zip(numbers.T, there.T, strict=True):
        some = values[valid.astype(np.bool_)]
        count = len(values) if zero else len(some)
        found.append(math.fsum(some.tolist()) / count if count else None)
    return pa.array(found, pa.float64())
