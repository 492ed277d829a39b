"""A session of its own, in which Spark runs failed tasks again: one batch, one failure."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark.sql import functions as F  # noqa: N812

from penstock.spark import session
from penstock.spark.archive import MODE_VARIABLE
from penstock.spark.sink import ExactlyOnce, exactly_once, tasks
from tests.spark.interpreted import INTERPRETED


class FailsOnce(tasks.Write):
    """Writes all of its records, and then fails, the first time."""

    def __init__(self, job: tasks.Job, flag: str) -> None:
        super().__init__(job)
        self._flag = flag

    def __call__(self, rows: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        told = list(super().__call__(rows))
        if not Path(self._flag).exists():
            Path(self._flag).touch()
            raise ValueError("injected")
        yield from told


def main(bootstrap: str, topic: str, flag: str) -> None:
    os.environ.setdefault(MODE_VARIABLE, "use")
    spark = session(
        name="retries",
        master="local[2,3]",
        **{
            "spark.driver.memory": "768m",
            "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
            "spark.ui.enabled": False,
            **INTERPRETED,
        },
    )
    sink = ExactlyOnce("retries", bootstrap, topic=topic, query_id="life", driver_bytes=0)
    rows = spark.range(0, 2000, 1, 3).select(F.col("id").cast("string").alias("value"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exactly_once, "Write", lambda job: FailsOnce(job, flag))
        sink.write_batch(rows, 0)
    assert sink.last is not None
    print(f"written: {sink.last.records}")
    sink.close()
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
