"""Spark's reports of micro-batches, reduced to numbers."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.spark.flows.progress import Progress


def report(batch_id: int, rows: int, *, ran: bool = True, **more: Any) -> dict[str, Any]:
    return {
        "batchId": batch_id,
        "numInputRows": rows,
        "timestamp": "2026-01-01T00:00:00.000Z",
        "durationMs": {"triggerExecution": 500, **({"addBatch": 400} if ran else {})},
        "eventTime": {},
        "stateOperators": [],
        "sources": [],
        **more,
    }


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 3)), max_size=20))
def test_each_batch_counts_once_however_often_it_is_reported(
    batches: list[tuple[int, int]],
) -> None:
    progress = Progress()
    written = {at: rows * 2 for at, (rows, _) in enumerate(batches)}
    for at, (rows, times) in enumerate(batches):
        for time in range(times):
            assert progress.take(report(at, rows), written) == (time == 0)
        # Idle: the id of the batch to come.
        assert not progress.take(report(at + 1, 0, ran=False), written)
    assert progress.batches == len(batches)
    assert progress.rows_in == sum(rows for rows, _ in batches)
    assert progress.rows_out == 2 * progress.rows_in


def test_rates_lag_state_and_watermark() -> None:
    progress = Progress()
    progress.take(
        report(
            0,
            1000,
            eventTime={"watermark": "2026-01-01T00:00:05.000Z"},
            stateOperators=[
                {"numRowsTotal": 7, "memoryUsedBytes": 100, "numRowsDroppedByWatermark": 2},
                {"numRowsTotal": 1, "memoryUsedBytes": 11, "numRowsDroppedByWatermark": 1},
            ],
            sources=[
                {"endOffset": {"t": {"0": 5, "1": 5}}, "latestOffset": {"t": {"0": 9, "1": 5}}},
                {"endOffset": '{"u": {"0": 1}}', "latestOffset": '{"u": {"0": 2}}'},
            ],
        ),
        {0: 10},
    )
    assert (progress.in_per_s, progress.out_per_s, progress.batch_ms) == (2000.0, 20.0, 500)
    assert (progress.state_rows, progress.state_bytes, progress.late_rows) == (8, 111, 3)
    assert progress.lag == 5
    assert progress.watermark_s() == 1767225605.0
    # Before the first row Spark's watermark is the beginning of time.
    progress.take(report(1, 0, eventTime={"watermark": "1970-01-01T00:00:00.000Z"}), {})
    assert progress.watermark_s() is None


def test_rows_that_were_read_twice_count_once() -> None:
    progress = Progress()
    sources = [
        {"numInputRows": 6, "endOffset": None, "latestOffset": None},
        {"numInputRows": 5, "endOffset": None, "latestOffset": None},
    ]
    progress.take(report(0, 11, sources=sources), {}, [2, 1])
    assert progress.rows_in == 8
    progress.take(report(1, 11, sources=sources), {})
    assert progress.rows_in == 19
