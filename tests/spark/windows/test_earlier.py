"""Windows compared with earlier ones, on Arrow: as a plain loop says, however they are cut."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.spark.state import Shard, State
from penstock.spark.windows.analytics import FROM, KEY, ROWS, TO, Earlier
from penstock.spark.windows.errors import WindowError
from tests.harness.profiles import examples
from tests.spark.windows.cutting import SECOND, run

STAMP = pa.timestamp("us", "UTC")
STEP = 5
COLUMNS = pa.schema(
    [
        ("key", pa.string()),
        ("window_start", STAMP),
        ("window_end", STAMP),
        ("n", pa.int64()),
        ("x", pa.float64()),
        ("price", pa.decimal128(10, 2)),
    ]
)
VALUES = ("n", "x", "price")
LATE = 4 * STEP


@dataclass(frozen=True)
class Window:
    """A final window; `start` in seconds."""

    key: str | None
    start: int
    n: int | None
    x: float | None
    price: Decimal | None


Numbers = tuple[int | None, float | None, Decimal | None]
NUMBERS = st.tuples(
    st.none() | st.integers(-9, 9),
    st.none() | st.floats(-1e9, 1e9),
    st.none() | st.integers(-999, 999).map(lambda cents: Decimal(cents) / 100),
)
# The windows that exist, with gaps between them.
HISTORY = st.dictionaries(
    st.tuples(st.integers(0, 25), st.sampled_from(["a", "a", "b", None])), NUMBERS, max_size=40
).map(
    lambda found: [
        Window(key, turn * STEP, *numbers)
        for (turn, key), numbers in sorted(found.items(), key=lambda each: each[0][0])
    ]
)
# Tumbling windows, and hopping ones that overlap.
SIZES = st.sampled_from([STEP, 3 * STEP])


def compared(offset: int, late: int = 0) -> Earlier:
    return Earlier(COLUMNS, ("key",), VALUES, (offset * SECOND,), late * SECOND, None)


def averaged(over: int, *, zero: bool, late: int = 0) -> Earlier:
    offsets = tuple(turn * STEP * SECOND for turn in range(over))
    return Earlier(COLUMNS, ("key",), VALUES, offsets, late * SECOND, zero)


OPERATORS = st.one_of(
    st.builds(compared, st.sampled_from([STEP, 2 * STEP, 7 * STEP]), st.just(LATE)),
    st.builds(averaged, st.integers(1, 6), zero=st.booleans(), late=st.just(LATE)),
)


def table(windows: Sequence[Window], size: int) -> pa.Table:
    """Windows as they come to the operator, in no order of their own."""
    shuffled = sorted(windows, key=lambda each: (each.n or 0, each.start))
    starts = [each.start * SECOND for each in shuffled]
    ends = [each + size * SECOND for each in starts]
    return pa.table(
        {
            "key": pa.array([each.key for each in shuffled], pa.string()),
            "window_start": pa.array(starts, STAMP),
            "window_end": pa.array(ends, STAMP),
            "n": pa.array([each.n for each in shuffled], pa.int64()),
            "x": pa.array([each.x for each in shuffled], pa.float64()),
            "price": pa.array([each.price for each in shuffled], pa.decimal128(10, 2)),
            KEY: pa.array([named(each.key) for each in shuffled]),
            FROM: pa.array(starts, pa.int64()),
            TO: pa.array(ends, pa.int64()),
        }
    )


def named(key: str | None) -> str:
    return "-" if key is None else f"1:{key}"


def expected(
    operator: Earlier, batches: Sequence[Sequence[Window]]
) -> Iterator[list[dict[str, Any]]]:
    """For each micro-batch: every window with what is known of earlier ones by its end."""
    known: dict[tuple[str | None, int], Window] = {}
    for batch in batches:
        known |= {(each.key, each.start): each for each in batch}
        rows = []
        for window in sorted(batch, key=lambda each: (named(each.key), each.start)):
            row: dict[str, Any] = {"key": window.key, "window_start": window.start}
            looked_at = [
                known.get((window.key, window.start - offset // SECOND))
                for offset in operator.offsets_us
            ]
            for name in VALUES:
                now = row[name] = getattr(window, name)
                values = [None if each is None else getattr(each, name) for each in looked_at]
                if operator.rolling_zero is None:
                    [before] = values
                    change = None if None in {now, before} else now - before
                    row |= {f"{name}_before": before, f"{name}_change": change}
                else:
                    there = [float(each) for each in values if each is not None]
                    count = len(values) if operator.rolling_zero else len(there)
                    mean = math.fsum(there) / count if count else None
                    # Arrow's doubles of decimals may be off in the last bit.
                    row[f"{name}_rolling"] = pytest.approx(mean) if name == "price" else mean
            rows.append(row)
        yield rows


def found(
    operator: Earlier, batches: Sequence[Sequence[Window]], size: int
) -> Iterator[list[dict[str, Any]]]:
    tables = [{ROWS: table(batch, size)} for batch in batches]
    for out in run(operator, tables, [None] * len(tables)):
        assert out.schema == operator.schema
        rows = out.to_pylist()
        for row in rows:
            start, end = (
                round(row.pop(name).timestamp()) for name in ("window_start", "window_end")
            )
            assert end == start + size
            row["window_start"] = start
        yield rows


def cut(data: st.DataObject, windows: Sequence[Window]) -> list[list[Window]]:
    """Micro-batches, some of them empty; windows of one time may be in several."""
    places = sorted(data.draw(st.lists(st.integers(0, len(windows)), max_size=6)))
    return [list(windows[a:b]) for a, b in pairwise([0, *places, len(windows)])]


@settings(max_examples=examples(60))
@given(OPERATORS, HISTORY, SIZES, st.data())
def test_the_same_however_windows_are_cut(
    operator: Earlier, windows: list[Window], size: int, data: st.DataObject
) -> None:
    batches = cut(data, windows)
    rows = list(found(operator, batches, size))
    assert rows == list(expected(operator, batches))
    # No later window changes what is said of one: all at once says the same.
    [whole] = expected(operator, [windows])
    order = {(named(row["key"]), row["window_start"]): row for batch in rows for row in batch}
    assert [order[each] for each in sorted(order)] == whole


@settings(max_examples=examples(40))
@given(OPERATORS, HISTORY, SIZES, st.data())
def test_corrected_windows_are_compared_again(
    operator: Earlier, windows: list[Window], size: int, data: st.DataObject
) -> None:
    """Those within the lateness that was declared; what was forgotten is never missed."""
    batches: list[list[Window]] = []
    latest = 0
    for batch in cut(data, windows):
        latest = max([latest, *(each.start for each in batch)])
        recent = [
            each
            for each in windows
            if latest - LATE <= each.start <= latest
            and (each.key, each.start) not in {(one.key, one.start) for one in batch}
        ]
        some = data.draw(st.lists(st.sampled_from(recent), unique=True)) if recent else []
        batches.append([*batch, *(replace(each, n=100 + (each.n or 0)) for each in some)])
    assert list(found(operator, batches, size)) == list(expected(operator, batches))


@pytest.mark.parametrize("operator", [compared(4 * STEP), averaged(5, zero=False)])
def test_no_more_is_kept_than_is_looked_back_at(operator: Earlier) -> None:
    state = State()
    sizes = []
    for turn in range(60):
        window = Window("a", turn * STEP, turn, 0.5, None)
        operator.process(Shard(0, 1, turn, None, state), {ROWS: table([window], STEP)})
        sizes.append(sum(len(each) for each in state.tables.values()))
    assert 5 <= sizes[20] == max(sizes[20:]) <= 10


def test_a_difference_never_overflows() -> None:
    """A decimal that changes its sign needs one digit more."""
    most = Decimal("99999999.99")
    windows = [Window("a", 0, None, None, -most), Window("a", STEP, None, None, most)]
    [rows] = found(compared(STEP), [windows], STEP)
    assert rows[1]["price_change"] == 2 * most


def test_windows_that_by_does_not_tell_apart_are_refused() -> None:
    operator = compared(STEP)
    window = Window("a", 0, 1, 1.0, None)
    with pytest.raises(WindowError, match="by= does not tell apart: it names 'key'"):
        list(found(operator, [[window, replace(window, n=2)]], STEP))


def test_state_of_other_values_is_not_taken_for_this() -> None:
    described = {
        each.describes
        for each in (compared(STEP), compared(2 * STEP), averaged(5, zero=True),
                     replace(compared(STEP), values=("n",)))
    }  # fmt: skip
    assert len(described) == 4
    assert (compared(STEP).kind, averaged(2, zero=False).kind) == ("compare", "rolling")
