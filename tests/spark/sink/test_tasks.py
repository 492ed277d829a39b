"""Tasks, run as Spark runs them, and once more than they should be."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch
from uuid import uuid4

import pyarrow as pa
import pytest

from penstock.client.connection import Cluster
from penstock.client.transacting import Transaction
from penstock.records.record import decode
from penstock.spark.sink import tasks
from penstock.spark.sink.errors import RepeatedTaskError, TaskError, from_spark
from penstock.spark.sink.target import Target, drop
from penstock.spark.sink.tasks import (
    HERALD,
    ORDER,
    TOO_MUCH,
    Job,
    Numbering,
    Pack,
    Task,
    Write,
    check_heralds,
)
from tests.spark.sink.log import make_topic, values

ROWS = 5000


@pytest.fixture
def job(bootstrap: str) -> Iterator[Job]:
    target = Target.from_options(bootstrap, {"kafka.batch.size": "2000"})
    made = Job(target, make_topic(bootstrap), {}, f"t-{uuid4()}", slots=2)
    yield made
    drop(target, made.transactional_id)


def rows() -> pa.RecordBatch:
    names = [b"%d" % number for number in range(ROWS)]
    return pa.RecordBatch.from_pydict({"key": names, "value": names})


def of(job: Job, transaction: Transaction) -> Job:
    return Job(job.target, job.topic, {}, job.transactional_id, transaction.ids, job.slots)


def run(task: Task, given: list[pa.RecordBatch]) -> pa.Table:
    return pa.Table.from_batches(list(task(iter(given))))


def write_all(job: Job) -> int:
    packed = run(Pack(job), [rows()])
    written = 0
    for slot in range(job.slots):
        part = packed.filter(pa.compute.equal(packed["slot"], slot))
        part = part.sort_by([(name, "ascending") for name in ORDER])
        told = run(Write(job), part.combine_chunks().to_batches())
        written += sum(told["records"].to_pylist())
    return written


def test_a_stage_that_is_run_again_is_refused_and_written_anew(job: Job, bootstrap: str) -> None:
    assert job.topic is not None
    assert job.transactional_id is not None
    with Cluster(bootstrap) as cluster:
        transaction = Transaction(cluster, job.transactional_id)
        transaction.init()
        assert write_all(of(job, transaction)) == ROWS
        for _ in range(2):
            # By the same worker, and by one that knows nothing of the first.
            with pytest.raises(TaskError) as caught:
                write_all(of(job, transaction))
            assert isinstance(from_spark(caught.value), RepeatedTaskError)
            drop(job.target, job.transactional_id)
        transaction.init()
        assert values(bootstrap, job.topic) == []
        assert write_all(of(job, transaction)) == ROWS
        transaction.add_partitions([(job.topic, 0)])
        transaction.end(commit=True)
    assert values(bootstrap, job.topic) == sorted(b"%d" % number for number in range(ROWS))


def test_a_packing_task_that_ran_again_in_between_is_noticed(job: Job, bootstrap: str) -> None:
    assert job.transactional_id is not None
    with Cluster(bootstrap) as cluster:
        transaction = Transaction(cluster, job.transactional_id)
        transaction.init()
        ours = of(job, transaction)
        heard = []
        for slot, attempt in ((0, 7), (1, 8)):
            with patch.object(tasks, "_attempt", lambda attempt=attempt: attempt):
                packed = run(Pack(ours), [rows()])
            part = packed.filter(pa.compute.equal(packed["slot"], slot))
            part = part.sort_by([(name, "ascending") for name in ORDER])
            told = run(Write(ours), part.combine_chunks().to_batches())
            heralds = told.filter(pa.compute.equal(told["topic"], HERALD)).to_pylist()
            heard += [(row["partition"], row["bytes"]) for row in heralds]
        transaction.end(commit=False)
    assert heard == [(0, 7), (0, 8)]
    check_heralds([heard[0], heard[0], (1, 9)])
    with pytest.raises(RepeatedTaskError, match="packing task 0"):
        check_heralds(heard)


def test_a_task_says_when_it_is_too_much_for_the_driver(job: Job, bootstrap: str) -> None:
    assert job.transactional_id is not None
    with Cluster(bootstrap) as cluster:
        transaction = Transaction(cluster, job.transactional_id)
        transaction.init()
        ids = transaction.ids
    small = Job(job.target, job.topic, {}, job.transactional_id, ids, limit_bytes=1000)
    told = run(Pack(small), [rows()])
    assert told["count"].to_pylist() == [TOO_MUCH]
    assert run(Pack(small), [rows().slice(0, 0)] * 2 + [rows().slice(0, 5)]).num_rows <= 3


def test_batches_get_the_numbers_of_their_partition(job: Job, bootstrap: str) -> None:
    assert job.transactional_id is not None
    with Cluster(bootstrap) as cluster:
        transaction = Transaction(cluster, job.transactional_id)
        transaction.init()
        packed = run(Pack(of(job, transaction)), [rows()])
        packed = packed.filter(pa.compute.not_equal(packed["topic"], HERALD))
    numbering = Numbering()
    next_of: dict[int, int] = {}
    for row in packed.to_pylist():
        data = numbering.numbered(("t", row["partition"]), row["count"], row["data"])
        sequence = int.from_bytes(data[53:57], "big")
        assert sequence == next_of.get(row["partition"], 0)
        next_of[row["partition"]] = sequence + row["count"]
        # It is checked against its checksum.
        assert len(list(decode(bytes(data)))) == row["count"]
    assert sum(next_of.values()) == ROWS
