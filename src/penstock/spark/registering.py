"""Makes the formats of Penstock known to a Spark session.

All streaming queries of a session share the environment of the source, a plain table of Java's, and
Spark puts some variables into it when it starts a query, in a thread for each. Where two queries
start at once, an entry that is new to both can break the table; then the tasks of all queries fail,
for as long as the session lives. An entry that is there is only overwritten. So they are there.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import SparkSession

# What Spark's runner of streaming sources sets, to values of its own.
SET_BY_SPARK: Final = (
    "SPARK_AUTH_SOCKET_TIMEOUT",
    "SPARK_BUFFER_SIZE",
    "SPARK_LOCAL_DIRS",
    "SPARK_PYTHON_RUNTIME",
)


def register(spark: SparkSession) -> None:
    """Let `format("penstock")` be known to this session, for reading as a table or a stream."""
    from penstock.spark.source import PenstockSource

    environment = spark.sparkContext.environment
    added = [name for name in SET_BY_SPARK if name not in environment]
    environment.update(dict.fromkeys(added, ""))
    try:
        spark.dataSource.register(PenstockSource)
    finally:
        for name in added:
            del environment[name]
