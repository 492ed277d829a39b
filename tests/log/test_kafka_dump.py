"""Apache Kafka's own dump tool reads what we write: logs, both indexes, producers' snapshots."""

from __future__ import annotations

import re
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.errors import StorageError
from penstock.log.config import TopicConfig
from penstock.log.partition import Partition, PartitionId
from penstock.log.store import LogStore
from penstock.records.batch import headers
from penstock.records.compression import NAMES
from penstock.records.record import BatchOptions, Record, decode, encode
from penstock.testing.clock import START_MS, ManualClock
from penstock.testing.kafka_tools import DumpedLine, DumpError, KafkaTools, parse_dump

ID = PartitionId("events", 0)
TOPIC_ID = uuid.UUID(int=77)
CONFIG = TopicConfig(segment_bytes=4000, index_interval_bytes=500)


def open_store(
    folder: Path, config: TopicConfig = CONFIG, *, epoch: int = 0
) -> tuple[LogStore, Partition]:
    store = LogStore(str(folder), clock=ManualClock())
    store.open()
    return store, store.load(ID, config, topic_id=TOPIC_ID, leader_epoch=epoch)


def sync(partition: Partition) -> None:
    plan = partition.plan_sync()
    plan.run()
    partition.finish_sync(plan)
    assert partition.failure is None


def write(
    partition: Partition,
    count: int,
    *,
    producer_id: int = -1,
    epoch: int | None = None,
    transactional: bool = False,
) -> None:
    """Batches of one to three records in all codecs, their times now and then out of order."""
    known = partition.producers.by_id.get(producer_id)
    sequence = known.last_sequence + 1 if known is not None else 0
    if epoch is None:
        epoch = known.epoch if known is not None else 0
    for number in range(count):
        size = 1 + number % 3
        at = partition.log_end
        records = [
            Record(
                place,
                START_MS + 10 * at - (700 if number % 5 == 4 else 0) + place,
                b"key %d" % (at + place) if number % 4 else None,
                b"value %d " % (at + place) * 8 if number % 7 else None,
                (("trace", b"%d" % at), ("empty", None)) if number % 2 else (),
            )
            for place in range(size)
        ]
        options = BatchOptions(codec=number % len(NAMES))
        if producer_id >= 0:
            options = replace(
                options,
                producer_id=producer_id,
                producer_epoch=epoch,
                base_sequence=sequence,
                transactional=transactional,
            )
        partition.append(encode(records, options), in_transaction=transactional)
        sequence += size


def of_kind(lines: list[DumpedLine], kind: str) -> list[DumpedLine]:
    return [line for line in lines if line.kind == kind]


def check_logs(lines: list[DumpedLine], folder: Path) -> None:
    """Every batch and record that Kafka reads is the one that we read."""
    batches, records = iter(of_kind(lines, "batch")), iter(of_kind(lines, "record"))
    for path in sorted(folder.glob("*.log")):
        data = path.read_bytes()
        end = 0
        for position, header in headers(data):
            end = position + header.size
            line = next(batches)
            assert line.file == path
            assert (
                line.number("baseOffset"),
                line.number("lastOffset"),
                line.number("count"),
                line.number("baseSequence"),
                line.number("lastSequence"),
                line.number("producerId"),
                line.number("producerEpoch"),
                line.number("partitionLeaderEpoch"),
                line.number("position"),
                line.number("size"),
                line.number("crc"),
                line.fields["compresscodec"],
                line.fields["isvalid"],
            ) == (
                header.base_offset,
                header.last_offset,
                header.record_count,
                header.base_sequence,
                header.last_sequence if header.producer_id >= 0 else -1,
                header.producer_id,
                header.producer_epoch,
                header.leader_epoch,
                position,
                header.size,
                header.crc,
                NAMES[header.codec],
                True,
            )
            kind = "LogAppendTime" if header.has_append_time else "CreateTime"
            assert line.number(kind) == header.max_timestamp
            for record in decode(data[position:end]):
                shown = next(records)
                assert shown.number("offset") == record.offset
                assert shown.number(kind) == record.timestamp_ms
                assert shown.number("keySize") == (-1 if record.key is None else len(record.key))
                assert shown.number("valueSize") == (
                    -1 if record.value is None else len(record.value)
                )
        assert end == len(data)
    assert next(batches, None) is None
    assert next(records, None) is None


def check_indexes(lines: list[DumpedLine], partition: Partition) -> None:
    """The entries that Kafka found in order are those that we look things up with."""
    for segment in partition.segments:
        file = Path(segment.path(".index"))
        shown = [line for line in of_kind(lines, "offset-index") if line.file == file]
        pairs = [(line.number("offset"), line.number("position")) for line in shown]
        # Kafka shows an empty index as one entry of zeros.
        if segment.index.offsets:
            assert pairs == [
                (segment.base_offset + offset, position)
                for offset, position in zip(
                    segment.index.offsets, segment.index.positions, strict=True
                )
            ]
        file = Path(segment.path(".timeindex"))
        times = [line for line in of_kind(lines, "time-index") if line.file == file]
        if segment.size:
            assert [(line.number("timestamp"), line.number("offset")) for line in times] == [
                (time, segment.base_offset + offset)
                for time, offset in zip(
                    segment.time_index.timestamps, segment.time_index.offsets, strict=True
                )
            ]
            assert times[-1].number("timestamp") == segment.max_timestamp_ms


def check_sanity(kafka_tools: KafkaTools, folder: Path) -> None:
    """What Kafka looks at when it opens a log."""
    files = sorted((*folder.glob("*.index"), *folder.glob("*.timeindex")))
    arguments = ["--index-sanity-check", "--files", ",".join(map(str, files))]
    answer = kafka_tools.call({"op": "dump", "arguments": arguments})
    assert parse_dump(answer["text"]) == ([], ())
    assert answer["text"].count("passed sanity check") == len(files)
    assert "failure" not in answer


@pytest.mark.parametrize("stamped", [False, True], ids=["create-time", "append-time"])
def test_a_log_with_everything_in_it(
    kafka_tools: KafkaTools, tmp_path: Path, stamped: bool
) -> None:
    config = replace(CONFIG, message_timestamp_type="LogAppendTime") if stamped else CONFIG
    store, partition = open_store(tmp_path / "data", config)
    write(partition, 60)
    write(partition, 30, producer_id=1000)
    write(partition, 9, producer_id=2000, epoch=3)
    sync(partition)
    store.close()
    # The second run goes on in the same segment, under a new leader epoch.
    store, partition = open_store(tmp_path / "data", config, epoch=1)
    write(partition, 25, producer_id=1000)
    # Kafka looks for indexes beside the log; after a stop those of the last are not.
    partition.roll()
    sync(partition)
    assert len(partition.segments) > 3
    store.close()
    folder = tmp_path / "data" / str(ID)
    lines = kafka_tools.dump_log(folder)
    check_logs(lines, folder)
    store, partition = open_store(tmp_path / "data", config, epoch=1)
    check_indexes(lines, partition)
    store.abandon()
    check_sanity(kafka_tools, folder)


def test_snapshots_of_producers(kafka_tools: KafkaTools, tmp_path: Path) -> None:
    store, partition = open_store(tmp_path / "data")
    for _ in range(4):
        write(partition, 12, producer_id=1000)
        write(partition, 7, producer_id=2000, epoch=3)
        sync(partition)
    store.close()
    snapshots = sorted((tmp_path / "data" / str(ID)).glob("*.snapshot"))
    assert len(snapshots) > 2
    for path in snapshots:
        shown = kafka_tools.dump_snapshot(path)
        # Kafka keeps the last entry of each producer: its newest batch.
        newest = {line.number("producerId"): line for line in shown}
        states = {}
        for log in sorted(path.parent.glob("*.log")):
            for _, header in headers(log.read_bytes()):
                if header.last_offset < int(path.stem) and header.producer_id >= 0:
                    states[header.producer_id] = header
        assert set(newest) == set(states)
        for producer_id, header in states.items():
            line = newest[producer_id]
            assert line.number("producerEpoch") == header.producer_epoch
            assert line.number("lastSequence") == header.last_sequence
            assert line.number("lastOffset") == header.last_offset
            assert line.number("lastTimestamp") == header.max_timestamp


def write_transactions(partition: Partition, rounds: int) -> None:
    """Three producers whose transactions overlap; one ends each round, by turns either way."""
    for number in range(rounds):
        write(partition, 2, producer_id=3000 + number % 3, transactional=True)
        write(partition, 1)
        producer_id = 3000 + (number + 1) % 3
        staged = partition.stage_marker(
            producer_id, number // 7, number % 2 == 0, 4 + number // 5, START_MS + number
        )
        partition.flush()
        assert staged.next_offset == partition.log_end


def test_transactions(kafka_tools: KafkaTools, tmp_path: Path) -> None:
    """Kafka reads our markers, finds our aborted transactions, and what a snapshot leaves open."""
    store, partition = open_store(tmp_path / "data")
    write_transactions(partition, 25)
    partition.roll()
    sync(partition)
    opened = partition.open_transactions()
    assert opened
    assert len(partition.segments) > 2
    index = {
        item.last_offset: item for item in partition.aborted_transactions(0, partition.log_end)
    }
    assert index
    end = partition.log_end
    store.close()
    folder = tmp_path / "data" / str(ID)
    lines = kafka_tools.dump_log(folder)
    check_logs(lines, folder)
    markers = [line for line in of_kind(lines, "record") if "endTxnMarker" in line.fields]
    assert len(markers) == 25
    assert [line.fields["endTxnMarker"] for line in markers[:2]] == ["COMMIT", "ABORT"]
    assert [line.number("coordinatorEpoch") for line in markers[::5]] == [4, 5, 6, 7, 8]
    control = [line for line in of_kind(lines, "batch") if line.fields["isControl"]]
    assert [line.fields["isTransactional"] for line in control] == [True] * 25
    shown = of_kind(lines, "txn-index")
    assert [
        (
            line.number("producerId"),
            line.number("firstOffset"),
            line.number("lastOffset"),
            line.number("lastStableOffset"),
        )
        for line in shown
    ] == list(index.values())
    (last,) = folder.glob(f"*{end}.snapshot")
    newest = {line.number("producerId"): line for line in kafka_tools.dump_snapshot(last)}
    for producer_id, line in newest.items():
        first = opened.get(producer_id, (0, None))[1]
        shown_first = re.findall(r"\d+", str(line.fields["currentTxnFirstOffset"]))
        assert shown_first == ([] if first is None else [str(first)]), line
        assert line.number("coordinatorEpoch") <= 8
    assert set(opened) <= set(newest)


def test_a_log_after_a_crash(kafka_tools: KafkaTools, tmp_path: Path) -> None:
    store, partition = open_store(tmp_path / "data")
    write(partition, 70, producer_id=5)
    store.abandon()
    folder = tmp_path / "data" / str(ID)
    last = max(folder.glob("*.log"))
    # A torn batch at the end, which Kafka finds as well.
    with last.open("ab") as file:
        file.write(last.read_bytes()[:90])
    with pytest.raises(DumpError):
        kafka_tools.dump_log(last)
    store, partition = open_store(tmp_path / "data", epoch=1)
    write(partition, 20, producer_id=5)
    sync(partition)
    store.close()
    lines = kafka_tools.dump_log(folder)
    check_logs(lines, folder)


def test_a_log_after_a_repair(kafka_tools: KafkaTools, tmp_path: Path) -> None:
    """The offsets that were lost leave a gap between two segments, as after compaction."""
    store, partition = open_store(tmp_path / "data")
    write(partition, 20)
    sync(partition)
    safe = partition.visible
    write(partition, 40)
    plan = partition.plan_sync()
    plan.error = StorageError("the disk said no")
    partition.finish_sync(plan)
    end = partition.log_end
    partition.repair()
    write(partition, 10)
    sync(partition)
    store.close()
    folder = tmp_path / "data" / str(ID)
    lines = kafka_tools.dump_log(folder)
    check_logs(lines, folder)
    offsets = [line.number("offset") for line in of_kind(lines, "record")]
    assert offsets[safe - 1 : safe + 1] == [safe - 1, end]
