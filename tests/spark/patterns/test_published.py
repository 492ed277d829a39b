"""Published MATCH_RECOGNIZE examples: their rows, and what other systems give for them.

The rows and results are those of Trino's own tests and documentation and of Oracle's tutorial.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from tests.spark.patterns.trying import Trial

LETTERS = {
    "all": "ALL ROWS PER MATCH",
    "measures": "MEASURES MATCH_NUMBER() AS number, RUNNING LAST(value) AS val, "
    "CLASSIFIER() AS label",
}


def values(*numbers: int) -> pa.Table:
    ids = pa.array(range(1, len(numbers) + 1), pa.int64())
    return pa.table({"id": ids, "value": pa.array(numbers, pa.int64())})


def labelled(rows: pa.Table, rest: str) -> list[tuple[Any, ...]]:
    text = f"ORDER BY id {LETTERS['measures']} {LETTERS['all']} {rest}"
    found = Trial.sql(text, rows).run()
    return [(each["_p_row"]["id"], each["number"], each["val"], each["label"]) for each in found]


def short(found: list[tuple[Any, ...]]) -> str:
    """`1A 2B | 3A`: the rows and labels of each match."""
    parts: dict[int, list[str]] = {}
    for row, number, _, label in found:
        parts.setdefault(number, []).append(f"{row}{label}")
    return " | ".join(" ".join(each) for each in parts.values())


def test_down_and_up() -> None:
    found = labelled(
        values(90, 80, 70, 80, 90, 50, 40, 60),
        "AFTER MATCH SKIP PAST LAST ROW PATTERN (A B+ C+) "
        "DEFINE B AS B.value < PREV (B.value), C AS C.value > PREV (C.value)",
    )
    assert found == [
        (1, 1, 90, "A"),
        (2, 1, 80, "B"),
        (3, 1, 70, "B"),
        (4, 1, 80, "C"),
        (5, 1, 90, "C"),
        (6, 2, 50, "A"),
        (7, 2, 40, "B"),
        (8, 2, 60, "C"),
    ]


@pytest.mark.parametrize(
    ("pattern", "define", "expected"),
    [
        ("A B C", "B AS B.value < PREV(B.value), C AS C.value = PREV(C.value)", "2A 3B 4C"),
        (
            "B | C | A",
            "B AS B.value < PREV(B.value), C AS C.value <= PREV(C.value)",
            "1A | 2B | 3B | 4C",
        ),
        (
            "PERMUTE(B, C)",
            "B AS B.value < PREV(B.value), C AS C.value < PREV(C.value)",
            "2B 3C",
        ),
        ("((A) (B (C)))", "B AS B.value < PREV(B.value), C AS C.value = PREV(C.value)", "2A 3B 4C"),
    ],
)
def test_row_patterns(pattern: str, define: str, expected: str) -> None:
    rest = f"PATTERN ({pattern}) DEFINE {define}"
    assert short(labelled(values(90, 80, 70, 70), rest)) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("B*", "2B 3B 4B"),
        ("B*?", ""),
        ("B+", "2B 3B 4B"),
        ("B+?", "2B | 3B | 4B"),
        ("B?", "2B | 3B | 4B"),
        ("B??", ""),
        ("B{,}", "2B 3B 4B"),
        ("B{1,}", "2B 3B 4B"),
        ("B{1,}?", "2B | 3B | 4B"),
        ("B{2,}", "2B 3B 4B"),
        ("B{2,}?", "2B 3B"),
        ("B{5,}", ""),
        ("B{,1}", "2B | 3B | 4B"),
        ("B{,2}", "2B 3B | 4B"),
        ("B{,2}?", ""),
        ("B{,5}", "2B 3B 4B"),
        ("B{1,1}", "2B | 3B | 4B"),
        ("B{1,5}", "2B 3B 4B"),
        ("B{1,5}?", "2B | 3B | 4B"),
        ("B{2}", "2B 3B"),
    ],
)
def test_quantifiers(pattern: str, expected: str) -> None:
    """Matches without a row are left out here, which Trino gives as rows of nulls."""
    rest = f"PATTERN ({pattern}) DEFINE B AS B.value <= PREV (B.value)"
    assert short(labelled(values(90, 80, 70, 70), rest)) == expected


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("A {- B+ -} C+", "1A 4C 5C | 6A 8C"),
        ("{- A -} {- B+ -} C+", "4C 5C | 8C"),
        ("A {- {- B+ -} C+ -}", "1A | 6A"),
        ("{- A B+ C+ -}", ""),
        ("A {- B -}+ {- C -}+", "1A | 6A"),
        ("A {- B -}{1,2} {- C -}{1,2}", "1A | 6A"),
        ("A {- C -}{2,3} {- B -}{2,3}", "3A"),
    ],
)
def test_exclusions(pattern: str, expected: str) -> None:
    rest = (
        f"PATTERN ({pattern}) DEFINE B AS B.value < PREV (B.value), C AS C.value > PREV (C.value)"
    )
    found = labelled(values(90, 80, 70, 80, 90, 50, 40, 60), rest)
    assert short(found) == expected


def test_conditions_that_refer_to_other_variables() -> None:
    rest = "PATTERN ((A | B)* X) DEFINE X AS value = {}.value"
    assert short(labelled(values(1, 1), rest.format("A"))) == "1A 2X"
    assert short(labelled(values(1, 1), rest.format("B"))) == "1B 2X"
    sum_of = "PREV(LAST(A.value), 3) + FIRST(A.value) + PREV(LAST(B.value), 2)"
    text = (
        f"ORDER BY value MEASURES CLASSIFIER() AS classy, {sum_of} AS condition "
        f"ALL ROWS PER MATCH PATTERN ((A | B)* X) DEFINE X AS value = {sum_of}"
    )
    found = Trial.sql(text, values(1, 2, 3, 4, 5, 6)).run()
    assert [(each["classy"], each["condition"]) for each in found] == [
        ("B", None),
        ("A", None),
        ("A", None),
        ("A", None),
        ("B", 6),
        ("X", 6),
    ]


SKIPS = [
    ("PAST LAST ROW", "1A 2B 3B 4C"),
    ("TO NEXT ROW", "1A 2B 3B 4C | 2A 3B 4C | 4A 5B 6C"),
    ("TO FIRST C", "1A 2B 3B 4C | 4A 5B 6C"),
    ("TO LAST B", "1A 2B 3B 4C | 4A 5B 6C"),
    ("TO B", "1A 2B 3B 4C | 4A 5B 6C"),
    ("TO U", "1A 2B 3B 4C | 4A 5B 6C"),
]


@pytest.mark.parametrize(("skip", "expected"), SKIPS)
def test_skips(skip: str, expected: str) -> None:
    rest = (
        f"AFTER MATCH SKIP {skip} PATTERN (A B+ C+ D?) SUBSET U = (C, D) DEFINE "
        "B AS B.value < PREV (B.value), C AS C.value > PREV (C.value), D AS false"
    )
    assert short(labelled(values(90, 80, 70, 80, 70, 80), rest)) == expected


def test_union_variables() -> None:
    text = (
        "ORDER BY id MEASURES MATCH_NUMBER() AS number, LAST(value) AS val, "
        "CLASSIFIER(U) AS lower_or_higher, CLASSIFIER(W) AS label ALL ROWS PER MATCH "
        "PATTERN ((L | H) A) SUBSET U = (L, H), W = (A, L, H) "
        "DEFINE A AS A.value = 80, L AS L.value < 80, H AS H.value > 80"
    )
    found = Trial.sql(text, values(90, 80, 70, 80)).run()
    names = ("number", "val", "lower_or_higher", "label")
    assert [tuple(each[name] for name in names) for each in found] == [
        (1, 90, "H", "H"),
        (1, 80, "H", "A"),
        (2, 70, "L", "L"),
        (2, 80, "L", "A"),
    ]


@pytest.mark.parametrize(
    ("measure", "expected"),
    [
        ("value", [10, 20, 30]),
        ("LAST(value)", [10, 20, 30]),
        ("FINAL LAST(value)", [30, 30, 30]),
        ("FIRST(value)", [10, 10, 10]),
        ("FINAL LAST(value, 2)", [10, 10, 10]),
        ("LAST(value, 10)", [None, None, None]),
        ("PREV(value)", [None, 10, 20]),
        ("PREV(FIRST(value), 10)", [None, None, None]),
        ("PREV(LAST(value, 10), 2)", [None, None, None]),
        ("SUM(value)", [10, 30, 60]),
        ("FINAL SUM(A.value)", [60, 60, 60]),
        ("COUNT(*)", [1, 2, 3]),
        ("AVG(A.value + 1) - 1", [10.0, 15.0, 20.0]),
        ("MAX(value) - MIN(value)", [0, 10, 20]),
    ],
)
def test_navigation(measure: str, expected: list[Any]) -> None:
    text = (
        f"ORDER BY id MEASURES {measure} AS measure ALL ROWS PER MATCH PATTERN (A+) "
        "DEFINE A AS true"
    )
    found = Trial.sql(text, values(10, 20, 30)).run()
    assert [each["measure"] for each in found] == expected
