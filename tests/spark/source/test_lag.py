"""The lag, from what Spark reports."""

from __future__ import annotations

from penstock.spark import lag


def test_offsets_between_the_ends_and_the_query() -> None:
    progress = {
        "sources": [
            {
                "endOffset": {"a": {"0": 5, "1": 10}},
                "latestOffset": {"a": {"0": 25, "1": 10}, "b": {"0": 3}},
            },
            # As older reports have it: text; and another source, of which nothing is known.
            {"endOffset": '{"c": {"0": 1}}', "latestOffset": '{"c": {"0": 2}}'},
            {"endOffset": "17", "latestOffset": None},
        ]
    }
    found = lag(progress)
    assert found is not None
    assert (found.min_offsets, found.max_offsets, found.total_offsets) == (0, 20, 24)
    assert found.avg_offsets == 6
    assert found.partitions["b", 0] == 3


def test_nothing_is_known_before_the_first_report() -> None:
    assert lag(None) is None
    assert lag({"sources": []}) is None
    assert lag({"sources": [{"endOffset": 5, "latestOffset": 7}]}) is None
