"""Compaction of logs with transactions: what is void goes, markers outlive what they mark."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.log.cleaner import Cleaner
from penstock.log.compaction import DELETE_HORIZON, Job
from penstock.log.disk import OsDisk
from penstock.log.partition import Partition
from penstock.log.segment import TXN_INDEX_SUFFIX
from penstock.log.txn_index import AbortedTransaction
from penstock.log.verify import verify
from penstock.records.batch import BatchHeader
from penstock.records.record import BatchOptions
from penstock.testing.clock import ManualClock
from penstock.testing.kafka_tools import KafkaTools, parse_dump
from tests.log.keeping import (
    COMPACTED,
    HOUR_MS,
    ID,
    append,
    close_segment,
    consume_committed,
    contents,
    end_transaction,
    open_store,
    run_pass,
    stored_headers,
    sync,
    write_in_transaction,
)

P, Q = 21, 22


def begin() -> tuple[Partition, Cleaner, ManualClock]:
    clock = ManualClock()
    partition = open_store(COMPACTED, clock).partitions[ID]
    return partition, Cleaner(partition), clock


def write(partition: Partition, producer_id: int, key: bytes, value: bytes) -> int:
    return write_in_transaction(partition, producer_id, [(key, value)])


def compact(partition: Partition, cleaner: Cleaner) -> None:
    """Close what is there and run a pass over it."""
    append(partition, [(b"pad", b"%d" % partition.log_end)])
    close_segment(partition)
    assert run_pass(partition, cleaner) is not None


def records(partition: Partition) -> list[tuple[int, bytes | None, bytes | None]]:
    """Without the padding and the markers."""
    control = {h.base_offset for h in stored_headers(partition) if h.is_control}
    return [item for item in contents(partition) if item[1] != b"pad" and item[0] not in control]


def markers(partition: Partition) -> list[BatchHeader]:
    return [header for header in stored_headers(partition) if header.is_control]


def aborted_in(partition: Partition) -> list[tuple[int, int]]:
    return partition.aborted(0, partition.log_end)


# ---- the rules, one by one -------------------------------------------------------------------


def test_records_of_aborted_transactions_go_and_replace_nothing() -> None:
    partition, cleaner, _ = begin()
    append(partition, [(b"a", b"old")])
    write(partition, P, b"a", b"void")
    write(partition, Q, b"b", b"good")
    end_transaction(partition, P, commit=False)
    end_transaction(partition, Q, commit=True)
    compact(partition, cleaner)
    assert records(partition) == [(0, b"a", b"old"), (2, b"b", b"good")]
    # The producer's last batch stays without its records, and so its end is known still.
    (kept,) = [h for h in stored_headers(partition) if h.base_offset == 1]
    assert (kept.record_count, kept.is_transactional, kept.producer_id) == (0, True, P)
    assert aborted_in(partition) == [(P, 1)]
    assert [item.value for item in consume_committed(partition)][:2] == [b"old", b"good"]


def test_a_committed_record_replaces_and_is_replaced() -> None:
    partition, cleaner, _ = begin()
    append(partition, [(b"a", b"1")])
    write(partition, P, b"a", b"2")
    end_transaction(partition, P, commit=True)
    write(partition, P, b"a", b"3")
    end_transaction(partition, P, commit=True)
    compact(partition, cleaner)
    assert records(partition) == [(3, b"a", b"3")]


def test_nothing_is_compacted_from_the_first_open_transaction_on() -> None:
    partition, cleaner, _ = begin()
    append(partition, [(b"a", b"1")])
    append(partition, [(b"a", b"2")])
    close_segment(partition)
    write(partition, P, b"a", b"3")
    append(partition, [(b"a", b"4")])
    close_segment(partition)
    assert run_pass(partition, cleaner) is not None
    assert records(partition) == [
        (1, b"a", b"2"), (2, b"a", b"3"), (3, b"a", b"4"),
    ]  # fmt: skip
    assert cleaner.clean_until == 2
    assert cleaner.due(partition.clock.now_ms()) is None
    end_transaction(partition, P, commit=False)
    compact(partition, cleaner)
    assert records(partition) == [(3, b"a", b"4")]


def test_a_marker_goes_when_it_marks_nothing_and_readers_have_had_their_time() -> None:
    partition, cleaner, clock = begin()
    write(partition, P, b"a", b"void")
    write(partition, Q, b"b", b"1")
    end_transaction(partition, P, commit=False)
    end_transaction(partition, Q, commit=True)
    # Both go on, so that their batches above need not stay for their sequence numbers.
    for producer_id in (P, Q):
        write(partition, producer_id, b"b", b"2")
        end_transaction(partition, producer_id, commit=True)
    compact(partition, cleaner)
    # The pass met records of each: the markers stay as they were.
    assert [h.base_offset for h in markers(partition)] == [2, 3, 5, 7]
    assert not any(h.attributes & DELETE_HORIZON for h in markers(partition))
    assert aborted_in(partition) == [(P, 0)]
    compact(partition, cleaner)
    # Of two transactions nothing is left: their markers wait.
    waiting = [h for h in markers(partition) if h.attributes & DELETE_HORIZON]
    assert [h.base_offset for h in waiting] == [2, 3]
    assert {h.base_timestamp for h in waiting} == {clock.now_ms() + HOUR_MS}
    assert aborted_in(partition) == []
    clock.advance(HOUR_MS - 1)
    compact(partition, cleaner)
    assert [h.base_offset for h in markers(partition)][:2] == [2, 3]
    clock.advance(1)
    assert run_pass(partition, cleaner) is not None
    assert [h.base_offset for h in markers(partition)] == [5, 7]
    assert records(partition)[-1] == (6, b"b", b"2")


def test_the_marker_of_a_producer_of_which_nothing_else_is_known_stays() -> None:
    partition, cleaner, clock = begin()
    end_transaction(partition, P, commit=False, epoch=9)
    for _ in range(3):
        compact(partition, cleaner)
        clock.advance(2 * HOUR_MS)
    assert [h.producer_epoch for h in markers(partition)] == [9]
    assert cleaner.due(clock.now_ms()) is None
    partition.producers.by_id.pop(P)
    for _ in range(2):
        compact(partition, cleaner)
        clock.advance(2 * HOUR_MS)
    assert markers(partition) == []


def test_a_pass_that_ends_at_its_bound_keeps_what_is_behind() -> None:
    partition, cleaner, _ = begin()
    for number in range(6):
        write(partition, P, b"key %d" % number, b"good")
    end_transaction(partition, P, commit=True)
    void = write(partition, P, b"key 0", b"void")
    end = end_transaction(partition, P, commit=False)
    append(partition, [(b"key 1", b"new")])
    close_segment(partition)
    result = run_pass(partition, cleaner, max_keys=3)
    assert result is not None
    assert (result.complete, result.clean_until) == (False, 3)
    assert [item for item in records(partition) if item[0] == void]
    found = partition.aborted_transactions(0, partition.log_end)
    assert found == [AbortedTransaction(P, void, end, end + 1)]
    assert b"void" not in [item.value for item in consume_committed(partition)]


def test_the_job_goes_through_json() -> None:
    partition, cleaner, clock = begin()
    write(partition, P, b"a", b"void")
    end_transaction(partition, P, commit=False)
    end_transaction(partition, Q, commit=True, epoch=3)
    close_segment(partition)
    due = cleaner.due(clock.now_ms())
    assert due is not None
    assert due.job.aborted == (AbortedTransaction(P, 0, 1, 2),)
    assert due.job.producer_markers == ((Q, 3),)
    assert Job.from_json(json.loads(json.dumps(due.job.to_json()))) == due.job


def test_after_compaction_the_log_itself_tells_what_is_open() -> None:
    """A snapshot from before a marker went would call its transaction open for ever."""
    partition, cleaner, clock = begin()
    write(partition, P, b"a", b"1")
    close_segment(partition)
    end_transaction(partition, P, commit=True)
    write(partition, P, b"a", b"2")
    end_transaction(partition, P, commit=True)
    for _ in range(4):
        compact(partition, cleaner)
        clock.advance(2 * HOUR_MS)
    assert len(markers(partition)) == 1
    disk, folder = partition.disk, partition.folder
    newest = max(name for name in disk.names(folder) if name.endswith(".snapshot"))
    disk.remove(f"{folder}/{newest}")
    partition = open_store(COMPACTED, clock, _crashed(partition)).partitions[ID]
    assert partition.open_transactions() == {}
    assert partition.stable == partition.log_end


def _crashed(partition: Partition):  # type: ignore[no-untyped-def]
    disk = partition.disk
    disk.crash(power_loss=False)  # type: ignore[attr-defined]
    return disk.after_crash()  # type: ignore[attr-defined]


# ---- at random -------------------------------------------------------------------------------


class Log:
    """A partition on the real disk, what was committed, and what of it must still be there."""

    def __init__(self, folder: Path, rng: random.Random) -> None:
        self.rng = rng
        self.folder = folder
        self.clock = ManualClock()
        self.config = replace(COMPACTED, segment_bytes=1500, durability="os")
        # Key → offset and value: the later record counts, whichever was committed later.
        self.committed: dict[bytes, tuple[int, bytes]] = {}
        self.pending: dict[int, list[tuple[bytes, tuple[int, bytes]]]] = {}
        self.epochs: dict[int, int] = {}
        self.counter = 0
        self.start()

    def start(self) -> None:
        self.store = open_store(self.config, self.clock, OsDisk(), self.folder)
        self.partition = self.store.partitions[ID]
        self.cleaner = Cleaner(self.partition)

    def step(self) -> None:
        choice = self.rng.random()
        producer_id = self.rng.choice((31, 32, 33))
        if choice < 0.55:
            self.write(producer_id)
        elif choice < 0.75:
            self.end(producer_id)
        elif choice < 0.82:
            key, value = self.pair()
            self.commit(key, (append(self.partition, [(key, value)]), value))
        elif choice < 0.86:
            self.clock.advance(self.rng.choice((1000, HOUR_MS)))
        elif choice < 0.96:
            close_segment(self.partition)
            run_pass(self.partition, self.cleaner, max_keys=self.rng.choice((4, 1000)))
            self.check()
        else:
            sync(self.partition)
            if self.rng.random() < 0.5:
                self.store.close()
            else:
                self.store.abandon()
            self.start()
            self.check()

    def pair(self) -> tuple[bytes, bytes]:
        self.counter += 1
        return b"key %d" % self.rng.randrange(9), b"%d" % self.counter + b"." * 40

    def write(self, producer_id: int) -> None:
        pairs = [self.pair() for _ in range(self.rng.randint(1, 3))]
        epoch = self.epochs.get(producer_id, 0)
        base = write_in_transaction(self.partition, producer_id, [*pairs], epoch=epoch)
        self.pending.setdefault(producer_id, []).extend(
            (key, (base + at, value)) for at, (key, value) in enumerate(pairs)
        )

    def end(self, producer_id: int) -> None:
        commit = self.rng.random() < 0.6
        if not commit and self.rng.random() < 0.3:
            self.epochs[producer_id] = self.epochs.get(producer_id, 0) + 1
        epoch = self.epochs.get(producer_id, 0)
        end_transaction(self.partition, producer_id, commit=commit, epoch=epoch)
        written = self.pending.pop(producer_id, [])
        if commit:
            for key, place in written:
                self.commit(key, place)

    def commit(self, key: bytes, place: tuple[int, bytes]) -> None:
        self.committed[key] = max(place, self.committed.get(key, place))

    def check(self) -> None:
        partition = self.partition
        assert set(partition.open_transactions()) == set(self.pending)
        found = consume_committed(partition)
        seen = {item.key: (item.offset, item.value) for item in found}
        if not self.pending:
            assert seen == self.committed
        # What is behind the first open transaction is not there for this reader yet.
        stable = partition.stable
        for key, place in self.committed.items():
            assert place[0] >= stable or seen[key] == place


@pytest.mark.parametrize("part", range(2))
def test_committed_records_survive_any_passes(tmp_path: Path, seed: int, part: int) -> None:
    log = Log(tmp_path / "data", random.Random(seed + part))
    for _ in range(250):
        log.step()
    for producer_id in list(log.pending):
        log.end(producer_id)
    for _ in range(5):
        compact(log.partition, log.cleaner)
        log.clock.advance(2 * HOUR_MS)
    left = [item for item in consume_committed(log.partition) if item.key != b"pad"]
    found = {item.key: (item.offset, item.value) for item in left}
    assert found == log.committed
    # Each key once, and nothing else.
    assert len(left) == len(found)
    assert len(records(log.partition)) == len(found)
    # Nothing is left of aborted transactions but what tells where their producers were.
    assert len(markers(log.partition)) <= 40
    log.store.close()
    assert verify(str(tmp_path / "data"), open_records=True).damage == []


def test_kafka_reads_what_is_left(kafka_tools: KafkaTools, tmp_path: Path, seed: int) -> None:
    log = Log(tmp_path / "data", random.Random(seed))
    for _ in range(250):
        log.step()
    # The indexes of a last segment are not in its folder.
    log.partition.roll()
    log.store.close()
    folder = tmp_path / "data" / str(ID)
    files = sorted([*folder.glob("*.log"), *folder.glob(f"*{TXN_INDEX_SUFFIX}")])
    arguments = ["--deep-iteration", "--files", ",".join(map(str, files))]
    answer = kafka_tools.call({"op": "dump", "arguments": arguments})
    assert "failure" not in answer
    lines, findings = parse_dump(answer["text"])
    assert [text for text in findings if not text.startswith("Non-consecutive offsets")] == []
    shown = [line for line in lines if line.kind == "txn-index"]
    log.start()
    index = log.partition.aborted_transactions(0, log.partition.log_end)
    assert [line.number("lastOffset") for line in shown] == [item.last_offset for item in index]
    assert list(folder.glob(f"*{TXN_INDEX_SUFFIX}"))
    log.store.abandon()


def test_plain_idempotent_batches_are_as_before() -> None:
    partition, cleaner, _ = begin()
    append(partition, [(b"a", b"1")], options=BatchOptions(0, P, 0, 0))
    append(partition, [(b"a", b"2")], options=BatchOptions(0, P, 0, 1))
    compact(partition, cleaner)
    assert records(partition) == [(1, b"a", b"2")]
