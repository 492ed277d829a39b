"""At least once: tasks send as they go, acknowledged by all replicas, without a transaction.

Quicker, for nothing is shuffled and nothing waits for a commit. A task or a batch that Spark
repeats is in the log twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyspark.sql import DataFrame

from penstock.client.connection import Cluster
from penstock.client.metadata import Metadata
from penstock.errors import PenstockError
from penstock.spark.sink.columns import prepare
from penstock.spark.sink.errors import SinkError, as_sink_error, from_spark
from penstock.spark.sink.exactly_once import Written
from penstock.spark.sink.target import Target
from penstock.spark.sink.tasks import WRITTEN, Job, Send


class AtLeastOnce:
    """A sink for `foreachBatch`: `df.writeStream.foreachBatch(sink.write_batch)`."""

    def __init__(
        self,
        bootstrap: str,
        *,
        topic: str | None = None,
        options: Mapping[str, str] | None = None,
    ) -> None:
        self.topic = topic
        self.target = Target.from_options(bootstrap, options)
        self.last: Written | None = None
        # Whether frames come with the columns as tasks want them.
        self.is_prepared = False
        self._cluster: Cluster | None = None
        self._metadata: Metadata | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cluster": None, "_metadata": None}

    def close(self) -> None:
        """Close the driver's connections; the next batch opens new ones."""
        cluster, self._cluster, self._metadata = self._cluster, None, None
        if cluster is not None:
            cluster.close()

    def __del__(self) -> None:
        # Spark tells nobody that a query has ended: it only lets go of the sink.
        if getattr(self, "_cluster", None) is not None:
            self.close()

    def write_batch(
        self, df: DataFrame, batch_id: int, check: Callable[[], None] | None = None
    ) -> None:
        """Write one micro-batch; `check` is called when its rows are written."""
        rows = df if self.is_prepared else prepare(df, self.topic)
        try:
            counts: dict[str, int] = {}
            if self.topic is not None:
                if self._cluster is None or self._metadata is None:
                    self._cluster = self.target.connect()
                    self._metadata = Metadata(self._cluster)
                counts[self.topic] = len(self._metadata.partitions(self.topic))
            job = Job(self.target, self.topic, counts)
            written = rows.mapInArrow(Send(job), WRITTEN).collect()
        except PenstockError as error:
            self.close()
            if isinstance(error, SinkError):
                raise
            raise as_sink_error(error) from error
        except Exception as error:
            told = from_spark(error)
            if told is None:
                raise
            raise told from error
        self.last = Written(
            int(batch_id), sum(row.records for row in written), sum(row.bytes for row in written)
        )
        if check is not None:
            check()

    __call__ = write_batch
