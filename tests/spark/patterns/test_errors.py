"""Wrong patterns: the place, a caret below it, and no stack trace; limits that name the key."""

from __future__ import annotations

import re
from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.spark.patterns import PatternError, PatternLimitError, PatternTextError, begin
from penstock.spark.patterns.text import recognized
from tests.harness.profiles import examples
from tests.spark.patterns.trying import Trial

# The first import compiles the kernels.
pytestmark = pytest.mark.timeout(600)

ROWS = pa.table(
    {
        "card": ["ann"] * 20,
        "amount": [float(n) for n in range(20)],
        "name": ["x"] * 20,
        "at": pa.array([n * 1_000_000 for n in range(20)], pa.timestamp("us", "UTC")),
    }
)

# The text, a part of what is said, and the place.
TEXTS = [
    ("ORDER BY at\nPATERN (A B) DEFINE B AS true", "PATERN is not known", 12),
    ("PATTERN (A B", "this bracket is not closed", 8),
    ("PATTERN (A B\nDEFINE B AS (amount > 1)", "this bracket is not closed", 8),
    ("MATCH_RECOGNIZE (PATTERN (A B\nDEFINE B AS amount > 1)", "this bracket is not closed", 25),
    ("MATCH_RECOGNIZE (PATTERN (A B)\nDEFINE B AS true", "this bracket is not closed", 16),
    ("MATCH_RECOGNIZE PATTERN (A B)", "followed by", 16),
    ("PATTERN (A | *)", "a variable is expected", 13),
    ("PATTERN (A B) DEFINE C AS true", "'C' is defined, but not in the pattern", 21),
    ("PATTERN (A{3,2})", "smaller than the first", 10),
    ("PATTERN ((A?)+)", "could be empty", 9),
    ("PATTERN (^ A)", "no first or last row", 9),
    ("PATTERN (A NOT B)", "needs WITHIN", 11),
    ("PATTERN (A (NOT B) C)", "NOT stands between", 12),
    ("PATTERN (A) WITHIN 5", "takes an interval", 19),
    ("PATTERN (A) AFTER MATCH SKIP TO LAST X", "'X' is no variable", 37),
    ("PATTERN (A) PATTERN (B)", "given twice", 12),
    ("MEASURES A.amount PATTERN (A)", "EXPRESSION AS NAME", 17),
    ("ORDER BY at DESC PATTERN (A)", "ascending", 12),
    ("ALL ROWS PER MATCH WITH UNMATCHED ROWS PATTERN (A)", "not possible", 19),
    ("SELECT 1", "not the beginning of a clause", 0),
    ("ORDER BY at", "there is no PATTERN", 11),
    ("PATTERN (A)\nDEFINE A AS amount > AND 1", "something is missing", 33),
    ("PATTERN (A)\nDEFINE A AS", "VARIABLE AS CONDITION", 19),
    ("PATTERN (A) SUBSET U = (A, Z)", "'Z' of subset 'U'", 19),
]


@pytest.mark.parametrize(("text", "told", "at"), TEXTS)
def test_texts(text: str, told: str, at: int) -> None:
    with pytest.raises(PatternTextError) as caught:
        recognized(text)
    message = str(caught.value)
    assert told in message
    *_, shown, caret = message.split("\n")
    line = text[:at].count("\n")
    column = at - (text.rfind("\n", 0, at) + 1)
    assert (caught.value.line, caught.value.column) == (line + 1, column + 1)
    assert shown == f"    {text.splitlines()[line] if text.splitlines() else ''}"
    assert caret == " " * (4 + column) + "^"


CONDITIONS = [
    ("amuont > 1", "there is no column 'amuont'", 1),
    ("amount > z.amount", "there is no column 'z'", 10),
    ("cuont(a.*) > 1", "'a' is a variable", 7),
    ("NEXT(amount) > 1", "not there yet on a stream", 6),
    ("amount > concat(a.name, name)", "over the values of several rows", 17),
    ("name > a.amount", "do not go together|can be compared", 1),
    ("amount + a.amount", "true or false", 1),
    ("amount + 1", "true or false", 1),
    ("sum(a.name) > amount", "SUM of string", 5),
    ("first(a.amount + b.amount) > amount", "columns of one variable", 7),
    ("sum(last(a.amount)) > amount", "not possible inside SUM", 10),
    ("last(a.amount, amount) > amount", "whole number", 6),
    ("classifier() = 'a' and amount > a.amount", "for measures", 1),
]


@pytest.mark.parametrize(("condition", "told", "column"), CONDITIONS)
def test_conditions(condition: str, told: str, column: int) -> None:
    pattern = begin("a").then("b", condition)
    with pytest.raises(PatternTextError, match=told) as caught:
        Trial(pattern.definition(), ROWS, {}, ["card"], "at").plan()
    assert "condition of 'b', 1:" in str(caught.value)
    assert caught.value.column == column


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: begin("a", "amount >"), "condition of 'a', 1:"),
    (lambda: begin("a b"), "no name for a stage"),
    (lambda: begin("a").then("b", "true").then("b", "false"), "there already"),
    (lambda: begin("a").within("soon"), "no length of time"),
    (lambda: begin("a").skip("to last b"), "'b' is no stage"),
    (lambda: begin("a").then("b", times="{3,1}"), "the second not smaller"),
    (lambda: begin("a").then("b", times="often"), "not how often"),
    (lambda: begin("a").not_followed_by("b", "true").next("c"), "before next"),
    (lambda: begin("a").not_followed_by("b", "true").definition(), "needs within"),
    (lambda: begin("a").then(begin("b", times="?"), times="+"), "obligatory"),
]


@pytest.mark.parametrize(("make", "told"), WRONG)
def test_stages(make: Callable[[], object], told: str) -> None:
    with pytest.raises(PatternError, match=told):
        make()


def test_a_limit_names_the_key_or_gives_the_attempt_up() -> None:
    endless = begin("a").then("b", "amount > 15").within("1 hour").definition()
    with pytest.raises(PatternLimitError, match="key ann: a match is still open after 10 rows"):
        Trial(endless, ROWS, {}, ["card"], "at", max_rows=10).run()
    found = Trial(endless, ROWS, {}, ["card"], "at", max_rows=10, overflow="skip")
    [first, *_] = found.run()
    assert [each["amount"] for each in first["events"]] == [7.0, 16.0]
    # Where micro-batches end makes no difference to what is given up.
    cut = found.run_in_batches([3, 8, 9, 0], [2_000_000, 9_000_000, 12_000_000, 10**12])
    assert [each["events"] for each in cut] == [each["events"] for each in found.run()]


def test_combinations_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.spark.patterns.operator.MAX_STEPS", 1_000)
    text = (
        "PATTERN ((A+ B+)+ C) DEFINE A AS amount >= FIRST(B.amount) or B.amount is null, C AS false"
    )
    with pytest.raises(PatternLimitError, match="possibilities from one first row"):
        Trial.sql(f"PARTITION BY card ORDER BY at {text}", ROWS).run()


WORDS = re.findall(
    r"\S+",
    "PARTITION BY k ORDER BY t MEASURES A.p AS q LAST(B.p) ONE ROW PER MATCH ALL ROWS PER MATCH "
    "AFTER MATCH SKIP TO NEXT ROW PATTERN ( A B+ C* ) {2,3} {- -} | ? ^ PERMUTE( , NOT WITHIN "
    "INTERVAL '1' HOUR SUBSET = DEFINE AS p < PREV ( final classifier() 'x ` ; -- /* {999999} "
    "{,} {0} 1e9 é CASE WHEN",
)


@settings(max_examples=examples(60))
@given(st.one_of(st.lists(st.sampled_from(WORDS), max_size=14).map(" ".join), st.text(max_size=20)))
@example("-- nothing but a comment")
@example(f"PATTERN ({'(' * 3000}A{')' * 3000})")
@example(f"PATTERN (A) DEFINE A AS {'(' * 3000}p{')' * 3000} > 1")
@example(f"PATTERN (A) DEFINE A AS {'+'.join('p' * 3000)} > 1")
def test_whatever_is_written_is_a_pattern_or_an_error_with_its_place(text: str) -> None:
    try:
        recognized(text)
    except PatternTextError as error:
        assert error.line > 0  # noqa: PT017
        assert error.column > 0  # noqa: PT017
