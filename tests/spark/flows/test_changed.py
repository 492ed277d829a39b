"""What has changed in a flow, in its author's words."""

from __future__ import annotations

import pytest
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark.flows.changed import lines, operators
from penstock.spark.flows.folder import Fingerprint
from penstock.spark.flows.planning import time_windows

OLD = """@flow(inputs=events, output=topic("counts"))
def counts(events):
    # By one column.
    return (
        events.groupBy("a")
        .count()
    )
"""
NEW = OLD.replace('"a"', '"a", "b"').replace("one column", "two columns")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        # Spark's own: texts as they are noted down of its plans.
        (["Aggregate [a], [a, count(1)] -> string, bigint"],
         ["Aggregate [b], [b, count(1)] -> string, bigint"], ["groupBy: was a, now b"]),
        (["Aggregate [a], [a, count(1)] -> string, bigint"],
         ["Aggregate [a], [a, count(1), sum(n)] -> string, bigint, bigint"],
         ["groupBy: also sum(n) now"]),
        (["Deduplicate [n]"], [], ["dropDuplicates is gone, which kept state"]),
        (["Join Inner, ((id = other) AND (at >= since))"],
         ["Join LeftOuter, ((id = other) AND (at >= since))"],
         ["join: was Inner, now LeftOuter"]),
        # Ours.
        (["sums-1: by a string: count of rows"], ["sums-1: by a string, b int: count of rows"],
         ["sums-1: also b int now"]),
        (["window-1: tumbling 60000000 us by [user string]: n = count; 0 us of lateness"],
         ["window-1: tumbling 300000000 us by [user string]: n = count; 0 us of lateness"],
         ["window-1: was tumbling 1 minute, now tumbling 5 minutes"]),
        (["time of orders: at"], ["time of orders: placed"],
         ["time= of stream orders: was at, now placed"]),
        (["pattern-1: pattern of A, B by card, order log (0123456789abcdef)"],
         ["pattern-1: pattern of A, B by card, order log (fedcba9876543210)"],
         ["pattern-1: its conditions or columns"]),
        ([], ["dedup-1: once for each id within 1500000 us"],
         ["dedup-1 is new, which keeps state: once for each id within 1500 milliseconds"]),
        (["a-1: x", "b-1: y"], ["b-1: y", "a-1: x"],
         ["the order of its operators, which tells their states apart"]),
    ],
)  # fmt: skip
def test_operators_are_told_by_what_is_new_and_gone(
    old: list[str], new: list[str], told: list[str]
) -> None:
    assert operators(old, new) == told


def test_the_changed_lines_are_shown_and_comments_are_none() -> None:
    assert lines(OLD, NEW, "flows.py:10") == [
        'flows.py:14: was `events.groupBy("a")`, now `events.groupBy("a", "b")`'
    ]
    assert lines(OLD, OLD.replace("one", "two"), "flows.py:10") == []
    assert lines(OLD, OLD.replace("        .count()\n", ""), "flows.py:10") == [
        "flows.py:15: `.count()` is gone"
    ]
    assert lines("", NEW, "flows.py:10") == []
    many = "\n".join(f"x{n} = {n}\nsame{n}" for n in range(20))
    assert lines(many, many.replace(" = ", " == "), "f.py:1")[-1] == "and 14 more places"


def test_a_fingerprint_is_the_same_whatever_the_code_looks_like() -> None:
    old, new = Fingerprint(source=OLD), Fingerprint(source=NEW)
    assert old == new
    assert old.differences(new) == []
    assert Fingerprint.of(old.as_dict()).source == OLD


@pytest.mark.parametrize(
    ("window", "told"),
    [
        (("1 minute",), "60 s, every 60 s"),
        (("1 hour", "30 minutes"), "3600 s, every 1800 s"),
        (("1 hour", "20 minutes", "5 minutes"), "3600 s, every 1200 s"),
        (("1500 milliseconds",), "1.5 s, every 1.5 s"),
    ],
)
def test_the_lengths_of_windows_of_spark_are_noted(
    penstock_spark: SparkSession, window: tuple[str, ...], told: str
) -> None:
    events = penstock_spark.readStream.format("rate").load()
    counted = events.groupBy(F.window("timestamp", *window), "value").count()
    assert time_windows([counted.select("value", "count")]) == [told]
    assert time_windows([events.groupBy("value").count()]) == []


def test_another_length_of_a_window_is_a_change() -> None:
    old = Fingerprint(windows=("60 s, every 60 s",))
    assert old.differences(Fingerprint(windows=("300 s, every 300 s",))) == [
        "its windows of time were 60 s, every 60 s and now are 300 s, every 300 s"
    ]
    # Who was run by an older Penstock does not say it.
    assert Fingerprint().differences(old) == []
    assert Fingerprint.of(old.as_dict()) == old
