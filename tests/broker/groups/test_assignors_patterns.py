"""Patterns of topics: RE2's language, in bounded time."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.broker.groups.patterns import (
    MAX_LENGTH,
    PatternBook,
    PatternError,
    TopicPattern,
)
from tests.harness.profiles import examples

NAMES = ("a", "ab", "A.b", "b-1", "orders", "orders-2024", "x_y", "7", ".", "-a")


def matching(pattern: str, *names: str) -> set[str]:
    return TopicPattern(pattern).matching(names or NAMES)


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("orders", {"orders"}),
        ("orders.*", {"orders", "orders-2024"}),
        ("^orders(-[0-9]{4})?$", {"orders", "orders-2024"}),
        ("(?i)a\\.B", {"A.b"}),
        ("(?i:A)B", set()),
        ("(?i:A)b", {"ab"}),
        ("[[:alpha:]]+", {"a", "ab", "orders"}),
        ("[^[:^digit:]]", {"7"}),
        ("\\pL+|\\p{Nd}", {"a", "ab", "orders", "7"}),
        ("\\PL", {"7", "."}),
        ("\\w+\\W\\w+", {"A.b", "b-1", "orders-2024"}),
        ("\\Qx_y\\E|\\Q.", {"x_y", "."}),
        ("x[\\w]y", {"x_y"}),
        ("[a-c]{1,2}?", {"a", "ab"}),
        ("(?P<n>a)(?<m>b)", {"ab"}),
        (".*\\b.*-\\B.*", set()),
        ("\\b7\\b", {"7"}),
        ("\\B.", {"."}),
        ("a|", {"a"}),
        ("()a", {"a"}),
        ("(a*)*b?", {"a", "ab"}),
        ("[]a]", {"a"}),
        ("[a-]+", {"a", "-a"}),
        ("\\x61\\x{62}", {"ab"}),
        ("\\0567?|a", {".", "a"}),
        ("a{,2}", set()),
        ("a$b", set()),
        ("\\A.\\z", {"a", "7", "."}),
        ("(?s-m).", {"a", "7", "."}),
    ],
)
def test_a_pattern_means(pattern: str, expected: set[str]) -> None:
    assert matching(pattern) == expected


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "a)",
        "[a",
        "[]",
        "[b-a]",
        "*a",
        "a**",
        "a{2}{3}",
        "a{1001}",
        "a{3,2}",
        "(a)\\1",
        "(?=a)",
        "(?!a)",
        "(?<=a)b",
        "(?<!a)b",
        "(?P=n)",
        "(?x)a",
        "\\",
        "\\y",
        "\\p{Klingon}",
        "[[:foo:]]",
        "\\x{zz}",
        "(?P<>a)",
        "((a{1000}){1000}){1000}",
        "(((){1000}){1000}){1000}",
        "(" * 200 + ")" * 200,
        "a" * (MAX_LENGTH + 1),
    ],
)
def test_what_is_no_pattern_or_too_much_is_refused(pattern: str) -> None:
    with pytest.raises(PatternError):
        TopicPattern(pattern)


def test_patterns_that_are_exponential_elsewhere_take_no_time_here() -> None:
    name = "a" * 248 + "-"
    for pattern in ("(a+)+", "(a|a)*b", "(a*)*(a*)*x", "(.*)*y", "a?" * 200 + "a" * 200):
        assert matching(pattern, name) == set()


def test_a_resolution_that_takes_too_much_work_is_given_up() -> None:
    pattern = TopicPattern("(a|b)*a(a|b){120}x")
    names = [f"{n:0200b}".replace("0", "a").replace("1", "b") for n in range(0, 1 << 40, 1 << 33)]
    with pytest.raises(PatternError):
        pattern.matching(names * 100 + [name[::-1] for name in names])


def test_a_book_looks_at_new_names_and_forgets_old_ones() -> None:
    book = PatternBook()
    assert book.matching("a+", {"a", "b"}) == {"a"}
    assert book.matching("a+", {"aa", "b"}) == {"aa"}
    assert book.matching("a+", {"a", "aa", "b"}) == {"a", "aa"} == book.known("a+")
    book.retain({"b"})
    assert book.known("a+") == set()


# ---- beside Python's engine ------------------------------------------------------------------

atoms = st.sampled_from(
    ("a", "b", "-", "\\.", ".", "[ab]", "[^a]", "[a-z_]", "\\d", "\\w", "\\W", "^", "$", "\\b")
)


def combined(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    grouped = inner.map(lambda text: f"(?:{text})")
    return st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=2, max_size=3).map(lambda parts: f"({'|'.join(parts)})"),
        st.tuples(grouped, st.sampled_from(("?", "*", "+", "{2}", "{0,2}", "{1,}"))).map("".join),
    )


@given(
    st.recursive(atoms, combined, max_leaves=6),
    st.lists(st.text("ab-._1Z", min_size=1, max_size=6), min_size=1, max_size=8),
)
@settings(max_examples=examples(100))
def test_the_same_matches_as_with_python(pattern: str, names: list[str]) -> None:
    expected = {name for name in names if re.fullmatch(pattern, name, re.ASCII)}
    assert TopicPattern(pattern).matching(names) == expected
