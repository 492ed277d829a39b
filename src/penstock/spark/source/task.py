"""What a task is told. Apart from `reading`: each stream has a process that only plans tasks, and
what reading needs would make it three times as large."""

from __future__ import annotations

from pyspark.sql.datasource import InputPartition

from penstock.spark.source.planning import Range


class Task(InputPartition):
    """What one task reads."""

    def __init__(self, ranges: tuple[Range, ...]) -> None:
        super().__init__(ranges)
        self.ranges = ranges
