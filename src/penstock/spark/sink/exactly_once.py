"""Exactly once: a micro-batch is one transaction of the log, and says so in it.

Theory. A query has a name, and the name is its transactional id. A driver that starts takes the id
over: what a predecessor left open is aborted, and the predecessor, should it still run, is fenced.
Then it reads the query's mark (`marks`): the last batch that was committed.

For each micro-batch the driver hands its producer id and epoch to the tasks. They write all of the
batch, over all partitions and topics, within one transaction; each partition of the log is written
by one task. When they are done, the driver adds the mark of this batch and commits. So the mark is
there if and only if the batch is:

- replayed after the commit, a batch is recognised by its mark, and skipped;
- failed before, it was aborted, and is written anew under a new epoch: what a late task of the
  first try still sends is refused;
- if nobody can say whether a commit happened, the id is taken over again, which settles it, and
  the mark tells.

A batch without rows costs nothing: no transaction, no mark. Nothing was written of it, so nothing
can be written twice.

Batch numbers count within a checkpoint. The mark therefore names the checkpoint (Spark's id of the
query): a query of the same name with a new checkpoint starts anew. One with an older copy of its
checkpoint is refused, for it would write again what is there.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from pyspark.sql import DataFrame, Row

from penstock.client.connection import Cluster
from penstock.client.errors import ClientError, FencedError, OutcomeUnknownError
from penstock.client.metadata import Metadata
from penstock.client.producing import Sender
from penstock.client.transacting import Ids, Transaction
from penstock.errors import PenstockError
from penstock.spark.sink import marks
from penstock.spark.sink.columns import prepare
from penstock.spark.sink.errors import (
    FencedSinkError,
    RepeatedTaskError,
    SinkError,
    SinkUnavailableError,
    StaleCheckpointError,
    TimedOutTransactionError,
    as_sink_error,
    from_spark,
)
from penstock.spark.sink.marks import Mark
from penstock.spark.sink.prepared import (
    PreparedFailedError,
    PreparedRows,
    PreparedTooMuchError,
)
from penstock.spark.sink.target import Joined, Target
from penstock.spark.sink.tasks import (
    HERALD,
    ORDER,
    PACKED,
    TOO_MUCH,
    WRITTEN,
    Job,
    Numbering,
    Pack,
    PackAndWrite,
    Write,
    check_heralds,
)

log = logging.getLogger(__name__)

# How often a batch is written anew because Spark repeated a task.
ATTEMPTS: Final = 4
ID_PREFIX: Final = "penstock-flow-"
_QUERY_ID: Final = "sql.streaming.queryId"
# How long a failed batch's transaction is tried to be aborted; the next driver does it anyway.
_ABORT_S: Final = 10.0
# Whose batches are, before the driver puts in its own ids.
NOBODY: Final = Ids(0, 0)
_MARKS: Final = (marks.TOPIC, marks.PARTITION)
# What the driver sends by itself; more is sent by tasks.
DRIVER_BYTES: Final = 8 << 20
# The least that a task may give to the driver, and how many tasks there are if nobody knows.
_TASK_BYTES: Final = 128 << 10
_UNKNOWN_TASKS: Final = 16
_EXPIRED: Final = "INVALID_PRODUCER_ID_MAPPING"
# What Spark calls the rows that it hands to `foreachBatch`.
_MICRO_BATCH: Final = "LogicalRDD"


@dataclass(frozen=True, slots=True)
class Written:
    """What became of a micro-batch."""

    batch_id: int
    records: int = 0
    bytes: int = 0
    # It had been written before.
    skipped: bool = False


class _RefusedError(Exception):
    """A micro-batch is not to be committed."""

    def __init__(self, why: Exception) -> None:
        super().__init__(str(why))
        self.why = why


@dataclass(frozen=True, slots=True)
class _Sent:
    records: int = 0
    bytes: int = 0
    topics: frozenset[str] = frozenset()


@dataclass(slots=True)
class _Hold:
    """The driver's connections, and what it knows, as long as all goes well."""

    cluster: Cluster
    metadata: Metadata
    transaction: Transaction
    sender: Sender
    mark: Mark | None = None

    def close(self) -> None:
        self.sender.close()
        self.cluster.close()


class ExactlyOnce:
    """A sink for `foreachBatch`: `df.writeStream.foreachBatch(sink.write_batch)`.

    `name` must be the query's alone. `topic` is where rows go; without it they have a column
    `topic`. Options are Kafka's producer settings (`kafka.compression.type`, security and so on).
    Batches of up to `driver_bytes`, compressed, are sent by the driver itself, larger ones by the
    tasks.
    """

    def __init__(
        self,
        name: str,
        bootstrap: str,
        *,
        topic: str | None = None,
        options: Mapping[str, str] | None = None,
        query_id: str | None = None,
        driver_bytes: int = DRIVER_BYTES,
    ) -> None:
        if not name.strip():
            raise SinkError(
                "the query has no name", advice="Exactly once needs one, and always the same."
            )
        self.name = name
        self.topic = topic
        self.target = Target.from_options(bootstrap, options)
        self.last: Written | None = None
        self._query_id = query_id
        # Whether frames come with the columns as tasks want them.
        self.is_prepared = False
        # What the last batch was like.
        self._driver_bytes = driver_bytes
        # Nobody knows yet, and a large batch that is taken for a small one is computed twice.
        self._is_large = True
        self._topics: frozenset[str] = frozenset()
        self._hold: _Hold | None = None
        self._is_ended = False
        self._lock = threading.Lock()

    @property
    def transactional_id(self) -> str:
        return ID_PREFIX + self.name

    def __getstate__(self) -> dict[str, Any]:
        kept = self.__dict__.copy()
        kept["_hold"] = kept["_lock"] = None
        return kept

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close the connections; the next batch opens new ones and takes the id over again."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.close()

    def end(self) -> None:
        """Close it for good: whoever writes on would disturb a successor."""
        self._is_ended = True
        self.close()

    def __del__(self) -> None:
        # Spark tells nobody that a query has ended: it only lets go of the sink.
        if getattr(self, "_hold", None) is not None:
            self.close()

    # ---- a micro-batch -------------------------------------------------------------------

    def write_batch(
        self,
        df: DataFrame | PreparedRows,
        batch_id: int,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Write one micro-batch, or see that it was written already.

        `check` is called when all rows were sent, and nothing of them counts yet: what it raises
        aborts the transaction, and leaves here as it is. PreparedFailedError if a prepared plan
        did not come to its end, or gives too much: nothing was sent then.
        """
        with self._lock:
            try:
                self.last = self._write(df, int(batch_id), check)
            except PreparedFailedError:
                raise
            except _RefusedError as error:
                self.close()
                raise error.why from None
            except PenstockError as error:
                self.close()
                if isinstance(error, SinkError):
                    raise
                raise as_sink_error(error) from error
            except BaseException:
                self.close()
                raise

    __call__ = write_batch

    def _write(
        self, df: DataFrame | PreparedRows, batch_id: int, check: Callable[[], None] | None
    ) -> Written:
        rows = df
        if not self.is_prepared and not isinstance(df, PreparedRows):
            rows = prepare(df, self.topic)
        query_id = self._query_id or _query_id_of(df) or ""
        for attempt in range(1, ATTEMPTS + 1):
            hold = self._held()
            if _is_written(hold.mark, query_id, batch_id, self.name):
                log.info("%s: batch %d was written before", self.name, batch_id)
                return Written(batch_id, skipped=True)
            try:
                return self._write_once(hold, rows, query_id, batch_id, check)
            except (RepeatedTaskError, OutcomeUnknownError) as error:
                # To take the id over again aborts what is open, or tells that it was committed.
                self.close()
                if attempt == ATTEMPTS:
                    raise
                log.warning("%s: batch %d is written anew: %s", self.name, batch_id, error)
        raise AssertionError("unreachable")

    def _write_once(
        self,
        hold: _Hold,
        rows: DataFrame | PreparedRows,
        query_id: str,
        batch_id: int,
        check: Callable[[], None] | None,
    ) -> Written:
        began = time.monotonic()
        try:
            sent = (
                self._send_prepared(hold, rows)
                if isinstance(rows, PreparedRows)
                else self._send(hold, rows)
            )
            if check is not None:
                _must_pass(check)
            if sent.records == 0:
                return Written(batch_id)
            mark = Mark(query_id, batch_id, sent.records)
            hold.transaction.add_partitions([_MARKS])
            hold.sender.send(*_MARKS, marks.packed(self.name, mark, hold.transaction.ids))
            hold.sender.flush()
            hold.transaction.end(commit=True)
        except (FencedError, FencedSinkError) as error:
            raise self._fenced(error, time.monotonic() - began) from error
        except OutcomeUnknownError as error:
            if isinstance(error.__cause__, FencedError):
                # The successor knows what became of it; to take over would disturb it.
                raise self._fenced(error.__cause__, time.monotonic() - began) from error
            raise
        except (RepeatedTaskError, PreparedFailedError):
            raise
        except BaseException:
            self._abort(hold)
            raise
        hold.mark = mark
        return Written(batch_id, sent.records, sent.bytes)

    def _send(self, hold: _Hold, rows: DataFrame) -> _Sent:
        """The one job of the batch: all rows to their partitions.

        How much there is shows only when it is computed. So a batch is taken to be as small or as
        large as the last; where a small one turns out to be large, it is computed once more.
        """
        job = self._job(hold, rows)
        sent: _Sent | None = None
        if not self._is_large:
            sent = self._send_from_driver(hold, rows, job)
        if sent is None:
            sent = self._send_from_tasks(rows, job)
        self._is_large = sent.bytes >= self._driver_bytes
        self._topics |= sent.topics
        return sent

    def _job(self, hold: _Hold, rows: DataFrame) -> Job:
        topics = self._topics if self.topic is None else {self.topic}
        counts = {name: len(hold.metadata.partitions(name)) for name in topics}
        slots = max(1, rows.sparkSession.sparkContext.defaultParallelism)
        if self.topic is not None:
            slots = min(slots, counts[self.topic])
        ids = hold.transaction.ids
        return Job(self.target, self.topic, counts, self.transactional_id, ids, slots)

    def _send_from_driver(self, hold: _Hold, rows: DataFrame, job: Job) -> _Sent | None:
        """Tasks pack, the driver sends; None if it is too much for that."""
        limit_bytes = self._driver_bytes // (_partitions_of(rows) or _UNKNOWN_TASKS)
        pack = Pack(replace(job, limit_bytes=max(limit_bytes, _TASK_BYTES)))
        packed = _collect(rows.mapInArrow(pack, PACKED))
        if any(row["count"] == TOO_MUCH for row in packed):
            return None
        return self._send_packed(hold, packed)

    def _send_prepared(self, hold: _Hold, rows: PreparedRows) -> _Sent:
        counts = {name: len(hold.metadata.partitions(name)) for name in rows.topics}
        # Brokers may raise the epoch with each transaction; the plan is to stay the same.
        job = Job(
            self.target, None, counts, self.transactional_id, NOBODY,
            limit_bytes=self._driver_bytes,
        )  # fmt: skip
        packed = rows.packed(job)
        if any(row["count"] == TOO_MUCH for row in packed):
            raise PreparedTooMuchError
        return self._send_packed(hold, packed)

    def _send_packed(self, hold: _Hold, packed: list[Row]) -> _Sent:
        if not packed:
            return _Sent()
        packed.sort(key=lambda row: tuple(row[name] for name in ORDER))
        hold.transaction.add_partitions(
            {_MARKS} | {(row["topic"], row["partition"]) for row in packed}
        )
        numbering = Numbering(ids=hold.transaction.ids)
        for row in packed:
            place = (row["topic"], row["partition"])
            hold.sender.send(*place, numbering.numbered(place, row["count"], row["data"]))
        return _Sent(
            sum(row["count"] for row in packed),
            sum(len(row["data"]) for row in packed),
            frozenset(row["topic"] for row in packed),
        )

    def _send_from_tasks(self, rows: DataFrame, job: Job) -> _Sent:
        if _partitions_of(rows) == 1:
            out = rows.mapInArrow(PackAndWrite(job), WRITTEN)
        else:
            packed = rows.mapInArrow(Pack(job), PACKED)
            sorted_ = packed.repartitionById(job.slots, "slot").sortWithinPartitions(*ORDER)
            out = sorted_.mapInArrow(Write(job), WRITTEN)
        told = _collect(out)
        check_heralds((row["partition"], row["bytes"]) for row in told if row["topic"] == HERALD)
        written = [row for row in told if row["topic"] != HERALD]
        return _Sent(
            sum(row["records"] for row in written),
            sum(row["bytes"] for row in written),
            frozenset(row["topic"] for row in written),
        )

    # ---- the transactional id ------------------------------------------------------------

    def _held(self) -> _Hold:
        """The transactional id, ours: taken over if need be, and the query's mark with it."""
        if self._is_ended:
            raise SinkError(f"{self.name}: nothing is written any more after its end")
        if self._hold is None:
            cluster = self.target.connect()
            try:
                self._hold = self._take_over(cluster)
            except BaseException:
                cluster.close()
                raise
        return self._hold

    def _take_over(self, cluster: Cluster) -> _Hold:
        timeout_s = self.target.delivery_timeout_s
        metadata = Metadata(cluster, timeout_s=timeout_s)
        transaction = Transaction(
            cluster,
            self.transactional_id,
            timeout_ms=self.target.transaction_timeout_ms,
            retry_s=timeout_s,
            metadata=metadata,
        )
        sender = Sender(
            cluster,
            transactional_id=self.transactional_id,
            timeout_s=timeout_s,
            metadata=metadata,
        )
        marks.make_topic(cluster)
        transaction.init()
        mark = marks.last(cluster, self.name)
        return _Hold(cluster, metadata, transaction, sender, mark)

    def _abort(self, hold: _Hold) -> None:
        """Let readers go on: what the batch has written so far is not to come."""
        # With our own ids, not by taking over: a successor must not be disturbed.
        abort = Joined(hold.cluster, self.transactional_id, retry_s=_ABORT_S)
        try:
            abort.join(hold.transaction.ids)
            abort.add_partitions([_MARKS])
            abort.end(commit=False)
        except ClientError as error:
            log.warning("%s: not aborted, the next start will: %s", self.name, error)

    def _fenced(self, error: Exception, took_s: float) -> SinkError:
        if _EXPIRED in str(error):
            # Nobody has taken over: brokers forget ids that were not used for days.
            return RepeatedTaskError(f"the broker has forgotten {self.transactional_id!r}")
        limit_s = self.target.transaction_timeout_ms / 1000
        if took_s >= limit_s:
            return TimedOutTransactionError(
                f"the batch of {self.name!r} took {took_s:.0f} s, its transaction may take "
                f"{limit_s:.0f} s and was aborted"
            )
        return FencedSinkError(f"another driver has taken over {self.name!r}: {error}")


def _must_pass(check: Callable[[], None]) -> None:
    try:
        check()
    except Exception as error:
        raise _RefusedError(error) from error


def _is_written(mark: Mark | None, query_id: str, batch_id: int, name: str) -> bool:
    if mark is None or mark.query_id != query_id or mark.batch_id < batch_id:
        return False
    if mark.batch_id > batch_id:
        raise StaleCheckpointError(
            f"{name!r} is to write batch {batch_id}, but {mark.batch_id} is written already: its "
            "checkpoint is older than its output",
            advice="Use the checkpoint that belongs to the output, or rebuild it with a new one.",
        )
    return True


def _query_id_of(df: DataFrame | PreparedRows) -> str | None:
    """Spark's id of the streaming query that calls us, which is kept in its checkpoint."""
    if isinstance(df, PreparedRows):
        return None
    found = df.sparkSession.sparkContext.getLocalProperty(_QUERY_ID)
    return None if found is None else str(found)


def _partitions_of(df: DataFrame) -> int | None:
    """In how many tasks a micro-batch comes; None where that cannot be told at once."""
    frame = getattr(df, "_jdf", None)
    if frame is None:
        return None
    plan = frame.logicalPlan()
    if plan.nodeName() != _MICRO_BATCH:
        return None
    return int(plan.rdd().getNumPartitions())


def _collect(df: DataFrame) -> list[Row]:
    try:
        return df.collect()
    except Exception as error:
        told = from_spark(error)
        if told is None:
            raise
        raise told from error


__all__ = ["ExactlyOnce", "SinkUnavailableError", "Written"]
