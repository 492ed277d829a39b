"""The memory of what was written, beside others who write there."""

from __future__ import annotations

from uuid import uuid4

import pytest

from penstock.client.connection import Cluster
from penstock.client.transacting import Transaction
from penstock.records.compression import CODES
from penstock.records.record import BatchOptions, Record, encode
from penstock.spark.sink import marks
from penstock.spark.sink.errors import SinkError
from penstock.spark.sink.marks import Mark


def put(transaction: Transaction, name: str, mark: Mark) -> None:
    transaction.put(marks.TOPIC, marks.PARTITION, name.encode(), mark.value())


def test_the_last_committed_mark_counts_whatever_others_do(bootstrap: str) -> None:
    name, other = f"q-{uuid4()}", f"q-{uuid4()}"
    with Cluster(bootstrap) as cluster:
        marks.make_topic(cluster)
        marks.make_topic(cluster)
        assert marks.last(cluster, name) is None
        ours, theirs = Transaction(cluster, name), Transaction(cluster, other)
        ours.init()
        theirs.init()
        # Theirs stays open: readers of committed records see nothing after it.
        put(theirs, other, Mark("x", 99))
        for number in range(5):
            put(ours, name, Mark("life", number, records=number))
            ours.end(commit=number != 4)
        assert marks.last(cluster, name) == Mark("life", 3, 3)
        put(ours, name, Mark("life", 5))
        # Whoever takes over knows: it was not committed.
        Transaction(cluster, name).init()
        assert marks.last(cluster, name) == Mark("life", 3, 3)
        theirs.end(commit=True)
        assert marks.last(cluster, other) == Mark("x", 99)
        assert marks.last(cluster, name[:-1]) is None


def test_a_stranger_s_record_is_not_taken_for_a_mark() -> None:
    for value in (b"", b"{}", b"5", b"\xff", b'{"query": "x"}'):
        with pytest.raises(SinkError, match="not a mark"):
            Mark.from_value(value)


@pytest.mark.parametrize("codec", CODES)
def test_a_mark_is_found_however_the_broker_has_compressed_it(codec: str) -> None:
    mark = Mark("life", 7, 3)
    record = Record(0, 5, b"q" * 40, mark.value())
    batch = encode([record], BatchOptions(codec=CODES[codec], producer_id=1, transactional=True))
    scan = marks._Scan(b"q" * 40)
    assert scan.read(memoryview(batch), 0) == 1
    assert scan.result() == mark
