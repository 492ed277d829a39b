"""Rows to batches: all of them, each to the partition where every client would put it."""

from __future__ import annotations

import random
from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest

from penstock.client.transactions import Ids
from penstock.records.record import BatchOptions, Record, decode, encode
from penstock.spark.sink.errors import SinkError
from penstock.spark.sink.exactly_once import NOBODY
from penstock.spark.sink.packing import GATHERED_BYTES, Form, Packer, Piece
from penstock.spark.sink.tasks import Numbering, slot_of
from tests.spark.sink.log import partition_of

NOW = 1_700_000_000_000
COUNTS = {"a": 3, "b": 1, "c": 7}


def packer(topic: str | None = None, **form: Any) -> Packer:
    settings: dict[str, Any] = {"codec": "lz4", "batch_bytes": 2000, **form}
    return Packer(
        Form(**settings),
        topic=topic,
        partition_count=COUNTS.__getitem__,
        clock_ms=lambda: NOW,
    )


def rows_of(rng: random.Random, count: int, first: int) -> list[dict[str, Any]]:
    return [
        {
            "key": rng.choice([None, b"", b"k%d" % rng.randrange(20), rng.randbytes(9)]),
            "value": rng.choice([None, b"v" * rng.randrange(300)]),
            "topic": rng.choice("abc"),
            "partition": 0 if rng.random() < 0.1 else None,
            "headers": rng.choice([None, [], [{"key": "n", "value": b"%d" % number}]]),
            "timestamp": rng.choice([None, 1_600_000_000_000_000 + number]),
        }
        for number in range(first, first + count)
    ]


SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("headers", pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))),
        ("timestamp", pa.timestamp("us", "UTC")),
    ]
)


def batch_of(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    return pa.RecordBatch.from_pylist(rows, SCHEMA)


def shown(row: dict[str, Any]) -> tuple[Any, ...]:
    headers = tuple((item["key"], item["value"]) for item in row["headers"] or ())
    time_ms = NOW if row["timestamp"] is None else row["timestamp"] // 1000
    return row["key"], row["value"], headers, time_ms


def opened(pieces: list[Piece]) -> dict[tuple[str, int], list[tuple[Any, ...]]]:
    found: dict[tuple[str, int], list[tuple[Any, ...]]] = defaultdict(list)
    for piece in pieces:
        records = list(decode(piece.packed.data))
        assert len(records) == piece.packed.count
        found[piece.topic, piece.partition] += [
            (record.key, record.value, record.headers, record.timestamp_ms) for record in records
        ]
    return found


@pytest.mark.parametrize("codec", ["none", "lz4", "zstd"])
def test_all_rows_in_order_where_clients_expect_them(codec: str, seed: int) -> None:
    rng = random.Random(seed)
    under_test = packer(codec=codec, producer=(9, 2), transactional=True)
    pieces: list[Piece] = []
    given: list[dict[str, Any]] = []
    for _ in range(20):
        rows = rows_of(rng, rng.randrange(100), len(given))
        given += rows
        pieces += under_test.add(batch_of(rows))
    pieces += under_test.finish()
    found = opened(pieces)
    for topic, count in COUNTS.items():
        expected = [row for row in given if row["topic"] == topic]
        loose = [shown(r) for r in expected if r["key"] is None and r["partition"] is None]
        for partition in range(count):
            wanted = [
                shown(row)
                for row in expected
                if (row["partition"] is not None and row["partition"] == partition)
                or (
                    row["partition"] is None
                    and row["key"] is not None
                    and partition_of(row["key"], count) == partition
                )
            ]
            here = found[topic, partition]
            placed = [each for each in here if each in wanted]
            assert [each for each in placed if each[0] is not None] == [
                each for each in wanted if each[0] is not None
            ]
        everything = [each for partition in range(count) for each in found[topic, partition]]
        assert sorted(map(repr, everything)) == sorted(repr(shown(row)) for row in expected)
        assert all(each in everything for each in loose)


def test_memory_is_bounded_and_batches_are_not_too_large() -> None:
    under_test = packer(topic="c", batch_bytes=100_000, codec="none")
    rows = [{"value": b"x" * 10_000} for _ in range(400)]
    schema = pa.schema([("value", pa.binary())])
    batch = pa.RecordBatch.from_pylist(rows, schema)
    seen: list[Piece] = []
    for _ in range(GATHERED_BYTES // batch.nbytes + 1):
        seen += under_test.add(batch)
    assert seen
    assert max(len(piece.packed.data) for piece in seen) <= 100_000
    # Without keys whole batches go to one partition after the other.
    assert {piece.partition for piece in seen} == set(range(7))


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"value": b"x", "topic": None}], "1 rows have no topic"),
        ([{"value": b"x", "topic": "a", "partition": 3}], "says 3"),
        ([{"value": b"x", "topic": "a", "partition": -1}], "says -1"),
        ([{"value": b"x", "topic": "a", "timestamp": -5_000}], "before 1970"),
    ],
)
def test_rows_that_cannot_be_written(rows: list[dict[str, Any]], words: str) -> None:
    under_test = packer()
    under_test.add(batch_of(rows))
    with pytest.raises(SinkError, match=words):
        under_test.finish()


def test_neighbouring_partitions_go_to_different_tasks() -> None:
    assert sorted(slot_of("topic", partition, 4) for partition in range(8)) == [
        0, 0, 1, 1, 2, 2, 3, 3,
    ]  # fmt: skip


def test_ids_and_numbers_are_put_into_batches_of_nobody() -> None:
    def packed(producer_id: int, epoch: int, sequence: int) -> bytes:
        options = BatchOptions(
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=True,
        )
        return encode([Record(0, 1_760_000_000_000, b"key", b"value")], options)

    numbering = Numbering(ids=Ids(1 << 40, 7))
    nobodys = packed(NOBODY.producer_id, NOBODY.epoch, 0)
    for sequence in range(3):
        found = numbering.numbered(("topic", 0), 1, nobodys)
        assert bytes(found) == packed(1 << 40, 7, sequence)
    # Of whom it was packed for it stays.
    own = packed(5, 1, 0)
    assert bytes(Numbering().numbered(("topic", 0), 1, own)) == own
