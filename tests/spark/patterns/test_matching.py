"""Random patterns over random rows: the same as a naive matcher, however micro-batches are cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.spark.patterns import Pattern, begin
from penstock.spark.patterns.errors import PatternSkipError
from penstock.spark.patterns.plan import Definition
from penstock.spark.patterns.text import recognized
from penstock.spark.windows import WindowError
from tests.harness.profiles import examples
from tests.spark.patterns.naive import CannotMoveError, Condition, Naive, Path, Row
from tests.spark.patterns.trying import Trial

SECOND = 1_000_000
# The first import compiles the kernels.
pytestmark = pytest.mark.timeout(600)


def of(rows: Sequence[Row], path: Path, name: str, column: str) -> list[Any]:
    return [rows[at][column] for at, each in path if name in {"", each}]


def last(rows: Sequence[Row], path: Path, name: str, column: str, offset: int = 0) -> Any:
    found = of(rows, path, name, column)
    return found[-1 - offset] if len(found) > offset else None


def less(a: Any, b: Any) -> bool | None:
    return None if a is None or b is None else a < b


def plus(*numbers: Any) -> Any:
    return None if None in numbers else sum(numbers)


def mean(numbers: Sequence[Any]) -> Any:
    there = [each for each in numbers if each is not None]
    return sum(there) / len(there) if there else None


def total(numbers: Sequence[Any]) -> Any:
    there = [each for each in numbers if each is not None]
    return sum(there) if there else None


def either(a: bool | None, b: bool | None) -> bool | None:
    if a or b:
        return True
    return None if a is None or b is None else False


def both(a: bool | None, b: bool | None) -> bool | None:
    if a is False or b is False:
        return False
    return None if a is None or b is None else True


def previous(rows: Sequence[Row], path: Path, column: str, back: int = 1) -> Any:
    at = path[-1][0] - back
    return rows[at][column] if at >= 0 else None


def between(rows: Sequence[Row], path: Path) -> bool | None:
    places = [at for at, name in path if name == "b"]
    value = rows[places[0] - 1]["v"] if places and places[0] > 0 else None
    value = last(rows, path, "", "v") if value is None else value
    return None if value is None else 1 <= value <= 3


# Conditions as text, and what they mean.
MENU: dict[str, Condition] = {
    "v < 3": lambda r, p: less(last(r, p, "", "v"), 3),
    "v >= 2": lambda r, p: less(1, last(r, p, "", "v")),
    "v = 1 or s = 'x'": lambda r, p: either(
        None if last(r, p, "", "v") is None else last(r, p, "", "v") == 1,
        last(r, p, "", "s") == "x",
    ),
    "v > prev(v)": lambda r, p: less(previous(r, p, "v"), last(r, p, "", "v")),
    "v <= 4 and v > prev(v, 2)": lambda r, p: both(
        less(last(r, p, "", "v"), 5), less(previous(r, p, "v", 2), last(r, p, "", "v"))
    ),
    "v > a.v": lambda r, p: less(last(r, p, "a", "v"), last(r, p, "", "v")),
    "a.v is null or v + 1 > last(a.v)": lambda r, p: either(
        last(r, p, "a", "v") is None,
        less(last(r, p, "a", "v"), plus(last(r, p, "", "v"), 1)),
    ),
    "count(b.*) < 2": lambda r, p: len(of(r, p, "b", "v")) < 2,
    "sum(b.v) + v > 3 and v < 5": lambda r, p: both(
        less(3, plus(total(of(r, p, "b", "v")), last(r, p, "", "v"))), less(last(r, p, "", "v"), 5)
    ),
    "v >= avg(a.v)": lambda r, p: (
        None
        if None in {mean(of(r, p, "a", "v")), last(r, p, "", "v")}
        else last(r, p, "", "v") >= mean(of(r, p, "a", "v"))
    ),
    "s = first(a.s)": lambda r, p: (
        of(r, p, "a", "s")[0] == last(r, p, "", "s") if of(r, p, "a", "s") else None
    ),
    "upper(s) > upper(last(b).s)": lambda r, p: less(
        last(r, p, "b", "s"), last(r, p, "", "s")
    ),
    "t - a.t < interval 3 seconds": lambda r, p: less(
        plus(last(r, p, "", "t"), -last(r, p, "a", "t")) if of(r, p, "a", "t") else None, 3
    ),
    "coalesce(prev(first(b.v)), v) between 1 and 3": between,
}  # fmt: skip


NAMES = ("a", "b", "c")


def quantified(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    marks = st.sampled_from(["", "", "?", "*", "+", "{2}", "{1,2}", "{,2}", "{2,}"])
    lazy = st.booleans()
    one = st.tuples(inner, marks, lazy).map(
        lambda each: f"({each[0]}){each[1]}{'?' if each[1] and each[2] else ''}"
    )
    return st.one_of(
        one,
        st.lists(inner, min_size=2, max_size=3).map(" ".join),
        st.lists(inner, min_size=2, max_size=2).map(lambda each: f"({' | '.join(each)})"),
        st.lists(inner, min_size=2, max_size=2).map(lambda each: f"PERMUTE({', '.join(each)})"),
    )


texts = st.recursive(st.sampled_from(NAMES), quantified, max_leaves=4)
skips = st.sampled_from(["PAST LAST ROW", "TO NEXT ROW", "TO FIRST b", "TO LAST b"])
defines = st.fixed_dictionaries({}, optional={n: st.sampled_from(sorted(MENU)) for n in NAMES})
tables = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.one_of(st.none(), st.integers(0, 5)),
        st.sampled_from("xyz"),
        st.integers(0, 3),
    ),
    min_size=1,
    max_size=11,
)  # fmt: skip


def table(drawn: Sequence[tuple[int, int | None, str, int]]) -> pa.Table:
    """Rows whose times ascend, two or more at the same one included."""
    now, times = 0, []
    for *_, step in drawn:
        now += step
        times.append(now * SECOND)
    return pa.table(
        {
            # One key has both zeros, the other all that is no number.
            "k": pa.array([math.nan if key else -0.0 if v == 1 else 0.0 for key, v, *_ in drawn]),
            "v": pa.array([each[1] for each in drawn], pa.int64()),
            "s": pa.array([each[2] for each in drawn], pa.string()),
            "t": pa.array(times, pa.timestamp("us", "UTC")),
            "_offset": pa.array(range(len(drawn)), pa.int64()),
        }
    )


def expected(defined: Definition, rows: pa.Table, conditions: dict[str, Condition]) -> list[Any]:
    out = []
    seconds = None if defined.within_us is None else defined.within_us // SECOND
    for key in ("0.0", "nan"):
        mine: list[Row] = [
            {**each, "t": int(each["t"].timestamp())}
            for each in rows.to_pylist()
            if str(abs(each["k"])) == key
        ]
        naive = Naive(mine, defined.names, conditions, seconds, defined.skip)
        found = naive.matches(defined.node)
        out += [[(mine[at]["_offset"], name) for at, name in path] for path in found]
    return sorted(out)


def labels(rows: list[dict[str, Any]]) -> list[Any]:
    return sorted(
        [(event["_offset"], event["variable"]) for event in each["events"]] for each in rows
    )


def cut(data: st.DataObject, rows: pa.Table) -> tuple[list[int], list[int]]:
    """Sizes of micro-batches, and a watermark after each that holds what it promises."""
    sizes = data.draw(st.lists(st.integers(0, 4), max_size=8), label="sizes")
    sizes.append(max(0, len(rows) - sum(sizes)))
    times = [each.value for each in rows["t"].cast(pa.timestamp("us", "UTC"))]
    marks: list[int] = []
    at = 0
    for size in sizes:
        at += size
        later = times[at:]
        mark = min(later) if later else max(times)
        mark -= data.draw(st.integers(0, 2), label="behind") * SECOND
        marks.append(max([mark, *marks[-1:]]))
    return [*sizes, 0], [*marks, max(times) + 1_000 * SECOND]


def check(trial: Trial, conditions: dict[str, Condition], data: st.DataObject) -> None:
    try:
        wanted = expected(trial.defined, trial.rows, conditions)
    except CannotMoveError:
        with pytest.raises(PatternSkipError, match="the pattern skips"):
            trial.run()
        return
    assert labels(trial.run()) == wanted
    sizes, marks = cut(data, trial.rows)
    if trial.defined.within_us is not None:
        assert labels(trial.run_in_batches(sizes, marks)) == wanted
    else:
        # What is open at the end stays open; all else is as in one micro-batch.
        one = trial.run_in_batches([len(trial.rows)], marks[-1:])
        got = labels(one)
        assert all(each in wanted for each in got)
        assert labels(trial.run_in_batches(sizes, marks)) == got


@settings(max_examples=examples(20))
@given(texts, defines, tables, skips, st.sampled_from([None, 2, 5]), st.data())
def test_texts(
    text: str,
    define: dict[str, str],
    drawn: list[tuple[int, int | None, str, int]],
    skip: str,
    within: int | None,
    data: st.DataObject,
) -> None:
    used = {name: each for name, each in define.items() if name in set(text)}
    if skip.endswith("b") and "b" not in text:
        skip = "TO NEXT ROW"
    whole = f"PARTITION BY k ORDER BY t MEASURES match_number() AS n AFTER MATCH SKIP {skip} "
    whole += f"PATTERN ({text}) "
    whole += f"WITHIN INTERVAL '{within}' SECOND " if within is not None else ""
    # Conditions may refer to variables that the pattern has not: as a subset they are known.
    missing = [name for name in NAMES if name not in set(text.replace("PERMUTE", ""))]
    if any(f"{name}." in each or f"({name})" in each for name in missing for each in used.values()):
        return
    if used:
        whole += "DEFINE " + ", ".join(f"{name} AS {each}" for name, each in used.items())
    try:
        recognized(whole)
    except Exception as error:
        assert "could be empty" in str(error)  # noqa: PT017
        return
    check(Trial.sql(whole, table(drawn)), {n: MENU[each] for n, each in used.items()}, data)


Stage = tuple[str, str | None, str, str]
stages = st.lists(
    st.tuples(
        st.sampled_from(["next", "then", "then_any", "not_followed_by", "not_next"]),
        st.one_of(st.none(), st.sampled_from(sorted(MENU))),
        st.sampled_from(["{1}", "{1}", "?", "*", "+", "+?", "{1,2}", "{2}"]),
        st.sampled_from(["next", "then", "any"]),
    ),
    max_size=3,
)


def built(first: str | None, more: Sequence[Stage]) -> tuple[Pattern, dict[str, Condition]] | None:
    conditions: dict[str, Condition] = {}
    made = begin("a", first)
    if first is not None:
        conditions["a"] = MENU[first]
    for name, (how, condition, times, gaps) in zip("bcd", more, strict=False):
        if condition is not None:
            conditions[name] = MENU[condition]
        call: Callable[..., Pattern] = getattr(made, how)
        if how.startswith("not"):
            if condition is None:
                return None
            made = call(name, condition)
        elif how == "next" and made.forbidden:
            return None
        else:
            made = call(name, condition, times=times, gaps=gaps)
    if any(f"{b}" in t for b in ("b.", "(b)") for t in _texts(made)) and "b" not in made.names:
        return None
    return made, conditions


def _texts(made: Pattern) -> list[str]:
    return [each.content for each in made.conditions.values()]


@settings(max_examples=examples(20))
@given(
    st.one_of(st.none(), st.sampled_from(sorted(MENU))),
    stages,
    tables,
    st.sampled_from(["past last row", "to next row", "to last a"]),
    st.integers(1, 6),
    st.data(),
)
def test_stages(
    first: str | None,
    more: list[Stage],
    drawn: list[tuple[int, int | None, str, int]],
    skip: str,
    within: int,
    data: st.DataObject,
) -> None:
    made = built(first, more)
    if made is None:
        return
    whole = made[0].within(f"{within} seconds").skip(skip)
    trial = Trial(whole.definition(), table(drawn), {"n": "count(*)"}, ["k"], "t")
    check(trial, made[1], data)


def test_rows_before_the_watermark_are_refused() -> None:
    """A row that comes out of another operator with a time of long ago: matches were given."""
    rows = pa.table({"k": ["a"] * 3, "x": [2, 9, 1], "t": pa.array([10, 20, 5], pa.int64())})
    text = "PARTITION BY k ORDER BY t PATTERN (A B) DEFINE A AS x = 1, B AS x = 2"
    with pytest.raises(WindowError, match="watermark"):
        Trial.sql(text, rows).run_in_batches([2, 1], [15, 30])
    # Time passes without rows, too.
    with pytest.raises(WindowError, match="watermark"):
        Trial.sql(text, rows).run_in_batches([0, 3], [15, 30])


@pytest.mark.parametrize(
    ("condition", "expected"),
    [
        ("x = a.x", [2, 3]),
        ("x <=> a.x", [2, 3]),
        ("x != a.x", [1]),
        ("x > a.x", [1]),
        ("x < a.x", []),
        ("x >= a.x", [1, 2, 3]),
        ("x <= a.x", [2, 3]),
        ("least(x, a.x) = 1", [1]),
        ("greatest(x, a.x) = 1", []),
        ("max(a.x) = x", [2, 3]),
        ("a.x between 0 and x", [1, 2, 3]),
    ],
)
def test_nan_is_equal_to_itself_and_above_all_else(condition: str, expected: list[int]) -> None:
    """As Spark has it: in what is 1, NaN, NaN, NaN, which rows follow their first one?"""
    nan = float("nan")
    rows = pa.table({"o": [0, 1, 2, 3], "x": [1.0, nan, nan, nan]})
    text = f"""ORDER BY o MEASURES B.o AS o AFTER MATCH SKIP TO NEXT ROW
        PATTERN (A B) DEFINE B AS {condition}"""
    assert [each["o"] for each in Trial.sql(text, rows).run()] == expected
