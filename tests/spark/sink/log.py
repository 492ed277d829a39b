"""Topics and what is in them, for tests of the sink on any broker."""

from __future__ import annotations

import warnings
from uuid import uuid4

from pyspark.errors import StreamingQueryException
from pyspark.sql.streaming.query import StreamingQuery
from pyspark.sql.streaming.readwriter import DataStreamWriter

from penstock.client import topics
from penstock.client.connection import Cluster
from penstock.client.metadata import LATEST, offsets
from penstock.spark.sink import marks
from penstock.testing.reading import read_messages
from tests.spark.feeding import Record, as_read

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from kafka.partitioner.default import murmur2


def partition_of(key: bytes, count: int) -> int:
    """Where another client puts a key."""
    return int((murmur2(key) & 0x7FFFFFFF) % count)


def make_topic(bootstrap: str, partitions: int = 3, **config: str) -> str:
    name = f"out-{uuid4().hex[:12]}"
    settings = {key.replace("_", "."): value for key, value in config.items()}
    with Cluster(bootstrap) as cluster:
        topics.create(cluster, name, partitions=partitions, config=settings)
    return name


def committed(bootstrap: str, topic: str) -> list[Record]:
    """All committed records, as another client reads them."""
    return as_read(read_messages(bootstrap, topic))


def finished(writer: DataStreamWriter) -> StreamingQuery:
    """Run a stream over all that is there, to its end.

    Spark gives the Python process of a source ten seconds to start, which is not always enough on
    a machine that is busy; then one starts the query again.
    """
    for _ in range(5):
        query = writer.trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(200)
        except StreamingQueryException as error:
            if "failed to connect back" not in str(error):
                raise
        else:
            return query
    raise AssertionError("no Python process of the source has started in time")


def values(bootstrap: str, topic: str) -> list[bytes | None]:
    return sorted((record.value for record in committed(bootstrap, topic)), key=lambda v: v or b"")


def end_of_marks(bootstrap: str) -> int:
    place = (marks.TOPIC, marks.PARTITION)
    with Cluster(bootstrap) as cluster:
        marks.make_topic(cluster)
        return offsets(cluster, {place: LATEST}, isolation="read_uncommitted")[place]
