"""What a window says of its events: each aggregate in three steps.

**Partials** are expressions that Spark evaluates over a micro-batch, in Java, so that one row for
each key and window comes to Python and not one for each event. They are **merged** with those of
micro-batches before, by columns, and **finished** when a window is emitted. No aggregate depends on
where micro-batches end: sums are exact until they are finished (of doubles too, see `exact`), what
is first or last is so by event time and then by place in the log.

Nulls are left out everywhere; an aggregate of nothing is null, a count 0. NaN is left out of min
and max and of quantiles, and makes a sum NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from decimal import ROUND_HALF_UP, Decimal, localcontext
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.state.numbering import whole
from penstock.spark.windows import exact
from penstock.spark.windows.errors import WindowError
from penstock.spark.windows.grouping import Groups, integers

_MOST: Final = 2**63 - 1


@dataclass(frozen=True)
class Aggregate:
    """One value of a window. Columns it keeps begin with `at`, a name of its own."""

    column: Any = None
    # Of the column; known once it is declared over a frame.
    type: Any = None

    def bound(self, column: str, type_: pa.DataType) -> Aggregate:
        """The same for a column of a type."""
        return replace(self, column=column, type=type_)

    @property
    def refusal(self) -> str:
        """Why it cannot be had of such a column; empty if it can."""
        return ""

    @property
    def error(self) -> str:
        """How far off it may be, in words."""
        return "exact"

    @property
    def result(self) -> pa.DataType:
        raise NotImplementedError

    def partials(self, value: Column, order: Sequence[Column]) -> dict[str, Column]:
        """Expressions over the rows of a group, by the ends of their names."""
        raise NotImplementedError

    def fields(self) -> dict[str, tuple[pa.DataType, str]]:
        """What is kept: types, and the Arrow functions that merge them."""
        raise NotImplementedError

    def arrived(self, rows: pa.Table, at: str) -> dict[str, pa.Array]:
        """What is kept, from what Spark has computed."""
        return {end: whole(rows[at + end]).cast(kind) for end, (kind, _) in self.fields().items()}

    def merged(self, rows: pa.Table, at: str, groups: Groups) -> dict[str, pa.Array]:
        """What is kept of rows that belong together."""
        fields = self.fields()
        columns = [(rows[at + end], function) for end, (_, function) in fields.items()]
        return dict(zip(fields, groups.merged(columns), strict=True))

    def finished(self, rows: pa.Table, at: str) -> pa.Array:
        """The value of each row."""
        raise NotImplementedError

    def __str__(self) -> str:
        return f"{type(self).__name__.lower()}({self.column or ''}: {self.type})"


@dataclass(frozen=True)
class Count(Aggregate):
    """How many events, or how many that have a value in a column."""

    @property
    def result(self) -> pa.DataType:
        return pa.int64()

    def partials(self, value: Column, order: Sequence[Column]) -> dict[str, Column]:
        return {"n": F.count(value)}

    def fields(self) -> dict[str, tuple[pa.DataType, str]]:
        return {"n": (pa.int64(), "sum")}

    def finished(self, rows: pa.Table, at: str) -> pa.Array:
        return whole(rows[at + "n"])


def _is_number(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind)
    )


@dataclass(frozen=True)
class Sum(Aggregate):
    """The exact sum; of doubles too, rounded once at the end."""

    @property
    def refusal(self) -> str:
        return "" if _is_number(self.type) else "it is not a number"

    @property
    def result(self) -> pa.DataType:
        if pa.types.is_integer(self.type):
            return pa.int64()
        if pa.types.is_decimal(self.type):
            return pa.decimal128(min(38, self.type.precision + 10), self.type.scale)
        return pa.float64()

    def partials(self, value: Column, order: Sequence[Column]) -> dict[str, Column]:
        if pa.types.is_floating(self.type):
            return {**exact.partials(value), "n": F.count(value)}
        return {"sum": F.sum(value), "n": F.count(value)}

    def fields(self) -> dict[str, tuple[pa.DataType, str]]:
        if pa.types.is_floating(self.type):
            kept = {name: (kind, "sum") for name, kind in exact.schema()}
            return {**kept, "n": (pa.int64(), "sum")}
        kind = pa.decimal128(38, self.type.scale) if pa.types.is_decimal(self.type) else pa.int64()
        return {"sum": (kind, "sum"), "n": (pa.int64(), "sum")}

    def merged(self, rows: pa.Table, at: str, groups: Groups) -> dict[str, pa.Array]:
        found = super().merged(rows, at, groups)
        if pa.types.is_floating(self.type):
            limbs = exact.carried([integers(found[each]) for each in exact.LIMBS])
            found |= {name: pa.array(limb) for name, limb in zip(exact.LIMBS, limbs, strict=True)}
        elif pa.types.is_integer(self.type):
            self._check_room(rows, at, groups)
        return found

    def __str__(self) -> str:
        # What is kept of doubles is not as it was when there were fewer.
        limbs = f" in {len(exact.LIMBS)} limbs" if pa.types.is_floating(self.type) else ""
        return f"{super().__str__()}{limbs}"

    def _check_room(self, rows: pa.Table, at: str, groups: Groups) -> None:
        """Arrow's sums go round silently where 64 bits do not suffice."""
        parts = whole(rows[at + "sum"].cast(pa.float64()))
        (rough,) = groups.merged([(parts, "sum")])
        most = pc.max(pc.abs(rough)).as_py()
        if most is not None and most > 0.999 * _MOST:
            raise WindowError(
                f"the sum of {self.column!r} in a window does not fit into 64 bits",
                advice="Sum a decimal instead: cast the column to decimal(20, 0).",
            )

    def finished(self, rows: pa.Table, at: str) -> pa.Array:
        if pa.types.is_floating(self.type):
            return self._finished_doubles(rows, at, average=False)
        found = whole(rows[at + "sum"])
        return found if found.type == self.result else found.cast(self.result)

    def _finished_doubles(self, rows: pa.Table, at: str, *, average: bool) -> pa.Array:
        limbs = [integers(rows[at + each]) for each in exact.LIMBS]
        wild = whole(rows[at + exact.WILD]).to_numpy(zero_copy_only=False)
        lost, n = (integers(rows[at + each]) for each in (exact.LOST, "n"))
        return pa.array(exact.finished(limbs, wild, lost, n if average else None), mask=n == 0)


@dataclass(frozen=True)
class Avg(Sum):
    """The exact sum by the number of values, rounded once."""

    @property
    def result(self) -> pa.DataType:
        if not pa.types.is_decimal(self.type):
            return pa.float64()
        scale = min(38, self.type.scale + 4)
        return pa.decimal128(min(38, self.type.precision + 4), scale)

    def finished(self, rows: pa.Table, at: str) -> pa.Array:
        if pa.types.is_floating(self.type):
            return self._finished_doubles(rows, at, average=True)
        sums, counts = rows[at + "sum"].to_pylist(), rows[at + "n"].to_pylist()
        pairs = zip(sums, counts, strict=True)
        if pa.types.is_integer(self.type):
            return pa.array([s / n if n else None for s, n in pairs], pa.float64())
        return pa.array([divided(s, n, self.result.scale) for s, n in pairs], self.result)


def divided(total: Decimal | None, by: int, scale: int) -> Decimal | None:
    if total is None or not by:
        return None
    with localcontext() as context:
        context.prec = 80
        return (total / by).quantize(Decimal(1).scaleb(-scale), ROUND_HALF_UP)


@dataclass(frozen=True)
class Min(Aggregate):
    """The least value."""

    @property
    def function(self) -> str:
        return "min"

    @property
    def refusal(self) -> str:
        return "its values have no order here" if pa.types.is_nested(self.type) else ""

    @property
    def result(self) -> pa.DataType:
        return self.type

    def partials(self, value: Column, order: Sequence[Column]) -> dict[str, Column]:
        if pa.types.is_floating(self.type):
            # There is one zero, and NaN is none of the numbers.
            value = F.when(~F.isnan(value), value + F.lit(0.0)).cast(
                "float" if self.type == pa.float32() else "double"
            )
        return {self.function: getattr(F, self.function)(value)}

    def fields(self) -> dict[str, tuple[pa.DataType, str]]:
        return {self.function: (self.type, self.function)}

    def finished(self, rows: pa.Table, at: str) -> pa.Array:
        return whole(rows[at + self.function])


@dataclass(frozen=True)
class Max(Min):
    """The greatest value."""

    @property
    def function(self) -> str:
        return "max"


@dataclass(frozen=True)
class First(Aggregate):
    """The value of the earliest event, by event time and then by place in the log."""

    # How many columns say which event comes first.
    places: int = 1

    def of_places(self, places: int) -> First:
        return replace(self, places=places)

    @property
    def last(self) -> bool:
        return False

    @property
    def result(self) -> pa.DataType:
        return self.type

    @property
    def refusal(self) -> str:
        return "it is a list or a struct" if pa.types.is_nested(self.type) else ""

    def partials(self, value: Column, order: Sequence[Column]) -> dict[str, Column]:
        names = [f"order{at}" for at in range(len(order))]
        parts = [each.alias(name) for each, name in zip(order, names, strict=True)]
        event = F.when(value.isNotNull(), F.struct(*parts, value.alias("value")))
        best = F.max(event) if self.last else F.min(event)
        return {name: best.getField(name) for name in [*names, "value"]}

    def fields(self) -> dict[str, tuple[pa.DataType, str]]:
        # Event time, then topic, partition and offset as far as there are any.
        kinds = [pa.int64(), pa.string(), pa.int32(), pa.int64()][: self.places]
        return {**{f"order{at}": (kind, "") for at, kind in enumerate(kinds)},
                "value": (self.type, "")}  # fmt: skip

    def merged(self, rows: pa.Table, at: str, groups: Groups) -> dict[str, pa.Array]:
        # Without a place the value itself decides between events of the same time.
        by = [at + end for end in self.fields() if end != "value" or self.places == 1]
        best = pa.array(groups.best(rows, by, last=self.last))
        return {end: whole(rows[at + end].take(best)) for end in self.fields()}

    def finished(self, rows: pa.Table, at: str) -> pa.Array:
        return whole(rows[at + "value"])


@dataclass(frozen=True)
class Last(First):
    """The value of the latest event, by event time and then by place in the log."""

    @property
    def last(self) -> bool:
        return True


def numbers(rows: pa.Table, name: str) -> np.ndarray[Any, Any]:
    """A column as numpy has it."""
    return np.asarray(whole(rows[name]).to_numpy(zero_copy_only=False))
