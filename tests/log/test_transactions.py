"""Transactions in the log of a partition: what is stable, what was aborted, what survives."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.errors import (
    CoordinatorFencedError,
    InvalidRecordError,
    InvalidTxnStateError,
    OutOfOrderSequenceError,
    ProducerFencedError,
    StorageError,
)
from penstock.log.config import TopicConfig
from penstock.log.partition import Partition
from penstock.log.producers import EXPIRY_MS, BatchMeta, ProducerStates
from penstock.log.segment import TXN_INDEX_SUFFIX
from penstock.log.transactions import aborted_index
from penstock.log.txn_index import ABORTED_ENTRY, AbortedTransaction, TransactionIndex
from penstock.records.batch import TRANSACTIONAL, read_header
from penstock.records.control import Marker, encode_marker, read_marker
from penstock.records.record import BatchOptions, Record, encode
from tests.log.engine import SMALL, Engine
from tests.log.keeping import (
    append,
    close_segment,
    consume_committed,
    end_transaction,
    sync,
    write_in_transaction,
)

P, Q = 21, 22
OS = replace(SMALL, durability="os")


def values(partition: Partition) -> list[bytes | None]:
    return [item.value for item in consume_committed(partition)]


def write(partition: Partition, producer_id: int, *texts: bytes) -> int:
    return write_in_transaction(partition, producer_id, [(b"k", text) for text in texts])


def fill_segment(partition: Partition) -> None:
    """Until the next one begins."""
    base = partition.active.base_offset
    while partition.active.base_offset == base:
        append(partition, [(b"k", b"." * 100)])


# ---- markers ---------------------------------------------------------------------------------


def test_a_marker_is_a_control_batch_with_kafkas_key_and_value() -> None:
    batch = encode_marker(Marker(True, 5), P, 3, 1000)
    header = read_header(batch)
    assert (header.is_control, header.is_transactional) == (True, True)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (P, 3, -1)
    assert batch.endswith(b"\x08\x00\x00\x00\x01\x0c\x00\x00\x00\x00\x00\x05\x00")
    assert read_marker(batch) == Marker(True, 5)
    assert read_marker(encode_marker(Marker(False, 0), P, 3, 1000)) == Marker(False, 0)
    # As any other batch is made, and read the slow way if its record is told differently.
    options = BatchOptions(0, P, 3, -1, transactional=True, control=True)
    record = Record(0, 1000, b"\0\0\0\1", b"\0\0\0\0\0\5")
    assert encode([record], options) == batch
    longer = encode([record._replace(headers=(("h", b"x"),))], options)
    assert read_marker(longer) == Marker(True, 5)


@pytest.mark.parametrize("key", [None, b"", b"\0\0", b"\0\0\0\2", b"\0\0\0\5"])
def test_other_control_records_end_no_transaction(key: bytes | None) -> None:
    options = BatchOptions(0, P, 0, -1, transactional=True, control=True)
    assert read_marker(encode([Record(0, 0, key, b"\0\0\0\0\0\1")], options)) is None
    assert read_marker(b"nothing") is None


# ---- what is taken ---------------------------------------------------------------------------


def test_a_transactional_batch_needs_a_transaction_and_a_producer() -> None:
    partition = Engine().partition
    batch = encode([Record(0, 0, b"k", b"v")], BatchOptions(0, P, 0, 0, transactional=True))
    with pytest.raises(InvalidTxnStateError):
        partition.append(batch)
    partition.append(batch, in_transaction=True)
    nobody = encode([Record(0, 0, b"k", b"v")], BatchOptions(transactional=True))
    with pytest.raises(InvalidRecordError):
        partition.append(nobody, in_transaction=True)
    control = bytes(encode_marker(Marker(True, 0), P, 0, 0))
    with pytest.raises(InvalidRecordError):
        partition.append(control, in_transaction=True)


def test_a_producer_writes_nothing_beside_its_transaction() -> None:
    partition = Engine(OS).partition
    write(partition, P, b"a")
    beside = BatchOptions(0, P, 0, 1)
    with pytest.raises(InvalidTxnStateError):
        append(partition, [(b"k", b"b")], options=beside)
    # Others may, and it may again when the transaction has ended.
    append(partition, [(b"k", b"c")], options=BatchOptions(0, Q, 0, 0))
    end_transaction(partition, P, commit=True)
    append(partition, [(b"k", b"d")], options=beside)
    assert values(partition) == [b"a", b"c", b"d"]


def test_a_repeated_batch_is_a_duplicate_while_its_transaction_is_open() -> None:
    partition = Engine(OS).partition
    base = write(partition, P, b"a")
    batch = encode(
        [Record(0, partition.clock.now_ms(), b"k", b"a")],
        BatchOptions(0, P, 0, 0, transactional=True),
    )
    staged = partition.stage(memoryview(bytearray(batch)), 0, True)
    assert (staged.duplicate, staged.base_offset) == (True, base)


def test_epochs_of_markers() -> None:
    partition = Engine(OS).partition
    write_in_transaction(partition, P, [(b"k", b"a")], epoch=3)
    with pytest.raises(ProducerFencedError):
        end_transaction(partition, P, commit=True, epoch=2)
    assert partition.open_transactions() == {P: (3, 0)}
    # As a coordinator does that fences the producer.
    end_transaction(partition, P, commit=False, epoch=4, decided_in=7)
    assert partition.open_transactions() == {}
    with pytest.raises(ProducerFencedError):
        write_in_transaction(partition, P, [(b"k", b"b")], epoch=3)
    with pytest.raises(CoordinatorFencedError):
        end_transaction(partition, P, commit=True, epoch=4, decided_in=6)
    # The new epoch begins at sequence 0.
    late = BatchOptions(0, P, 4, 1, transactional=True)
    with pytest.raises(OutOfOrderSequenceError):
        append(partition, [(b"k", b"b")], options=late)
    write_in_transaction(partition, P, [(b"k", b"b")], epoch=4)
    known = partition.producers.by_id[P]
    assert (known.txn.coordinator_epoch, known.txn.first_offset) == (7, 2)


# ---- what is stable --------------------------------------------------------------------------


def test_readers_of_committed_records_stop_before_the_first_open_transaction() -> None:
    partition = Engine(OS).partition
    append(partition, [(b"k", b"plain")])
    assert partition.stable == partition.visible == 1
    write(partition, P, b"p1")
    write(partition, Q, b"q1")
    append(partition, [(b"k", b"later")])
    assert (partition.stable, partition.visible) == (1, 4)
    assert partition.open_transactions() == {P: (0, 1), Q: (0, 2)}
    end_transaction(partition, P, commit=True)
    assert partition.stable == 2
    end_transaction(partition, Q, commit=False)
    assert partition.stable == partition.visible == 6
    assert values(partition) == [b"plain", b"p1", b"later"]
    assert partition.aborted(0, 6) == [(Q, 2)]
    # Only what reaches into the range.
    assert partition.aborted(0, 2) == []
    assert partition.aborted(2, 3) == [(Q, 2)]
    assert partition.aborted(5, 6) == [(Q, 2)]
    assert partition.aborted(6, 6) == []


def test_a_marker_counts_when_readers_can_see_it() -> None:
    engine = Engine()
    partition = engine.partition
    write(partition, P, b"a")
    assert partition.stable == 0
    engine.sync()
    end_transaction(partition, P, commit=True)
    assert partition.open_transactions() == {}
    assert (partition.stable, partition.visible, partition.log_end) == (0, 1, 2)
    # Another one begins and ends before the first marker is synced.
    write(partition, P, b"b")
    end_transaction(partition, P, commit=False)
    assert partition.stable == 0
    engine.sync()
    assert partition.stable == partition.visible == 4
    assert values(partition) == [b"a"]


def test_the_start_of_the_log_may_pass_an_open_transaction() -> None:
    engine = Engine(OS)
    partition = engine.partition
    write(partition, P, b"a", b"b", b"c")
    partition.delete_before(2)
    assert partition.stable == 2
    assert consume_committed(partition) == []
    end_transaction(partition, P, commit=True)
    assert [item.offset for item in consume_committed(partition)] == [2]


def test_a_marker_without_a_transaction_changes_nothing_for_readers() -> None:
    partition = Engine(OS).partition
    end_transaction(partition, P, commit=False, epoch=5)
    assert partition.stable == partition.visible == 1
    assert partition.aborted(0, 1) == []
    assert partition.producers.by_id[P].epoch == 5


def test_append_time_is_stamped_on_markers_too() -> None:
    config = replace(OS, message_timestamp_type="LogAppendTime")
    partition = Engine(config).partition
    write(partition, P, b"a")
    end_transaction(partition, P, commit=True)
    heads = [header for header, _ in partition.batches(0)]
    assert all(header.has_append_time for header in heads)
    assert heads[0].attributes & TRANSACTIONAL


# ---- what fails ------------------------------------------------------------------------------


def test_a_failed_write_takes_the_transaction_back() -> None:
    engine = Engine()
    partition = engine.partition
    write(partition, P, b"a")
    engine.disk.fail("write", path_part=".log")
    with pytest.raises(StorageError):
        write(partition, Q, b"b")
    assert partition.open_transactions() == {P: (0, 0)}
    engine.disk.fail("write", path_part=".log")
    with pytest.raises(StorageError):
        end_transaction(partition, P, commit=False)
    assert partition.open_transactions() == {P: (0, 0)}
    engine.sync()
    assert partition.stable == 0
    assert partition.aborted(0, 1) == []
    end_transaction(partition, P, commit=True)
    engine.sync()
    assert values(partition) == [b"a"]


def test_open_transactions_stay_in_order_when_a_write_is_taken_back() -> None:
    engine = Engine()
    partition = engine.partition
    write(partition, P, b"a")
    write(partition, Q, b"b")
    engine.sync()
    engine.disk.fail("write", path_part=".log")
    with pytest.raises(StorageError):
        end_transaction(partition, P, commit=False)
    # P, whose end was taken back, is still the first.
    assert list(partition.open_transactions()) == [P, Q]
    assert partition.stable == 0


def test_a_failed_sync_undoes_the_marker() -> None:
    engine = Engine()
    partition = engine.partition
    write(partition, P, b"a")
    engine.sync()
    end_transaction(partition, P, commit=False)
    write(partition, Q, b"b")
    engine.disk.fail("sync", path_part=".log")
    engine.sync()
    assert partition.stable == 0
    partition.repair()
    assert partition.failure is None
    assert partition.open_transactions() == {P: (0, 0)}
    assert partition.stable == 0
    assert aborted_index(partition.segments[0]).entries == []
    end_transaction(partition, P, commit=True)
    engine.sync()
    assert values(partition) == [b"a"]


# ---- what survives ---------------------------------------------------------------------------


def long_life(engine: Engine) -> None:
    """Transactions over several segments: aborted, committed, open."""
    partition = engine.partition
    write(partition, P, b"aborted")
    write(partition, Q, b"committed")
    fill_segment(partition)
    end_transaction(partition, P, commit=False)
    end_transaction(partition, Q, commit=True)
    write(partition, P, b"open")
    fill_segment(partition)
    end_transaction(partition, Q, commit=False)
    write(partition, Q, b"aborted")
    end_transaction(partition, Q, commit=False)
    engine.sync()


def facts(partition: Partition) -> tuple[object, ...]:
    return (
        partition.open_transactions(),
        partition.stable,
        partition.aborted(0, partition.log_end),
        values(partition),
    )


@pytest.mark.parametrize("how", ["reopen", "kill", "lose_power"])
def test_a_restart_changes_nothing(how: str) -> None:
    engine = Engine()
    long_life(engine)
    before = facts(engine.partition)
    assert before[0]
    assert len(engine.names(TXN_INDEX_SUFFIX)) == 1
    for _ in range(2):
        getattr(engine, how)()
        assert facts(engine.partition) == before
    names = engine.names(TXN_INDEX_SUFFIX)
    # Of closed segments; that of the active one is with the state of the directory.
    assert len(names) == 1


@pytest.mark.parametrize("harm", ["remove", "change", "cut"])
@pytest.mark.parametrize("snapshots", [True, False], ids=["snapshots", "no-snapshots"])
def test_a_lost_or_damaged_index_is_made_anew(harm: str, snapshots: bool) -> None:
    engine = Engine()
    long_life(engine)
    before = facts(engine.partition)
    engine.store.close()
    for name in engine.names(TXN_INDEX_SUFFIX):
        if harm == "remove":
            engine.disk.remove(engine.path(name))
        else:
            file = engine.disk.open(engine.path(name))
            if harm == "change":
                file.pwritev([b"\1"], 12)
            else:
                file.truncate(file.size() - 5)
            file.close()
    if not snapshots:
        for name in engine.names(".snapshot")[:-1]:
            engine.disk.remove(engine.path(name))
    engine.open()
    assert facts(engine.partition) == before


def test_half_an_index_is_none() -> None:
    engine = Engine()
    long_life(engine)
    segment = engine.partition.segments[1]
    wanted = list(aborted_index(segment).entries)
    assert wanted
    segment.aborted = None
    engine.disk.remove(segment.path(".digest"))
    engine.disk.fail("read", path_part=".log", nth=2)
    with pytest.raises(StorageError):
        aborted_index(segment)
    assert segment.aborted is None
    assert aborted_index(segment).entries == wanted


def test_an_index_in_memory_is_let_go_and_loaded_again() -> None:
    engine = Engine()
    long_life(engine)
    before = facts(engine.partition)
    for segment in engine.partition.closed:
        segment.release()
    assert facts(engine.partition) == before


def test_what_was_begun_before_the_log_starts_is_known() -> None:
    engine = Engine()
    long_life(engine)
    partition = engine.partition
    gone = partition.segments[0]
    partition.delete_before(partition.segments[1].base_offset)
    engine.store.checkpoint()
    partition.replace_segments([gone])
    gone.remove()
    engine.kill()
    partition = engine.partition
    start = partition.log_start
    assert partition.aborted(start, partition.log_end)[0] == (P, 0)


def test_with_durability_memory_transactions_end_with_the_process() -> None:
    engine = Engine(replace(SMALL, durability="memory"))
    partition = engine.partition
    long_life_in_memory(partition)
    assert partition.open_transactions()
    engine.reopen()
    assert engine.partition.open_transactions() == {}
    assert engine.partition.stable == engine.partition.log_end


def long_life_in_memory(partition: Partition) -> None:
    write(partition, P, b"a")
    fill_segment(partition)
    end_transaction(partition, P, commit=False)
    write(partition, Q, b"b")
    assert partition.aborted(0, 1) == [(P, 0)]


# ---- producers -------------------------------------------------------------------------------


def test_a_producer_with_an_open_transaction_is_never_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.log.producers.MAX_PRODUCERS", 20)
    states = ProducerStates()
    states.update(P, 0, BatchMeta(0, 0, 5, 5, 0), 1, TRANSACTIONAL)
    states.update(Q, 0, BatchMeta(0, 0, 6, 6, 0), 1)
    for producer_id in range(100, 150):
        states.update(producer_id, 0, BatchMeta(0, 0, 7, 7, 0), 2)
    assert P in states.by_id
    assert Q not in states.by_id
    states.expire(3)
    states.expire(10 * EXPIRY_MS)
    assert list(states.by_id) == [P]
    ended = states.end(P, 0, Marker(False, 0), 9, 0, 3)
    assert ended is not None
    assert states.aborted(ended) == AbortedTransaction(P, 5, 9, 10)
    states.expire(10 * EXPIRY_MS)
    assert not states.by_id


def test_snapshots_keep_transactions() -> None:
    states = ProducerStates()
    states.update(Q, 1, BatchMeta(0, 1, 7, 8, 50), 1, TRANSACTIONAL)
    states.update(P, 0, BatchMeta(0, 0, 5, 5, 40), 1, TRANSACTIONAL)
    states.update(P, 0, BatchMeta(1, 1, 9, 9, 60), 1, TRANSACTIONAL)
    states.end(30, 4, Marker(True, 8), 10, 70, 1)
    back = ProducerStates.from_bytes(states.to_bytes())
    assert back is not None
    assert back.open == {P: 5, Q: 7}
    assert list(back.open) == [P, Q]
    assert back.by_id[P].txn.first_offset == 5
    assert len(back.by_id[P].batches) == 2
    assert (back.by_id[30].epoch, back.by_id[30].batches) == (4, ())
    assert back.by_id[30].txn.coordinator_epoch == 8
    assert back.by_id[30].last_timestamp_ms == 70
    # It begins at 0: a marker was all that it wrote in this epoch.
    assert back.check(30, 4, 0, 0) is None
    with pytest.raises(OutOfOrderSequenceError):
        back.check(30, 4, 3, 3)


# ---- the index -------------------------------------------------------------------------------


def test_the_index_stops_where_nothing_earlier_can_follow() -> None:
    index = TransactionIndex()
    index.append(AbortedTransaction(1, 0, 10, 5))
    index.append(AbortedTransaction(2, 5, 20, 21))
    index.append(AbortedTransaction(3, 25, 30, 31))
    found: list[AbortedTransaction] = []
    assert not index.collect(0, 5, found) or found == [index.entries[0]]
    found = []
    assert index.collect(8, 12, found)
    assert found == index.entries[:2]
    found = []
    assert index.collect(11, 21, found)
    assert found == index.entries[1:2]
    found = []
    assert not index.collect(0, 100, found)
    assert found == index.entries
    index.truncate(20)
    assert len(index.entries) == 1
    assert len(index.to_bytes()) == ABORTED_ENTRY.size == 34


def test_bytes_that_are_no_index() -> None:
    good = ABORTED_ENTRY.pack(0, 1, 5, 9, 10)
    assert TransactionIndex.from_bytes(good) is not None
    for wrong in (
        good[:-1],
        ABORTED_ENTRY.pack(1, 1, 5, 9, 10),
        ABORTED_ENTRY.pack(0, 1, 10, 9, 10),
        good + good,
    ):
        assert TransactionIndex.from_bytes(wrong) is None


def test_many_transactions_in_many_segments() -> None:
    """Every range of a longer log against a plain count."""
    config = TopicConfig(segment_bytes=600, index_interval_bytes=100, durability="os")
    partition = Engine(config).partition
    aborted: list[tuple[int, int, int]] = []
    for number in range(60):
        producer_id = 100 + number % 7
        first = write(partition, producer_id, b"x")
        if number % 3 == 0:
            close_segment(partition)
        if number % 2:
            append(partition, [(b"k", b"plain")])
        commit = number % 5 == 0
        offset = end_transaction(partition, producer_id, commit=commit)
        if not commit:
            aborted.append((producer_id, first, offset))
    sync(partition)
    assert partition.stable == partition.log_end
    for start in range(0, partition.log_end, 7):
        for end in range(start, partition.log_end + 1, 5):
            wanted = [(p, f) for p, f, last in aborted if f < end and last >= start]
            assert partition.aborted(start, end) == wanted


def test_a_segment_with_many_aborted_transactions_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.log.partition.MAX_ENTRIES", 3)
    partition = Engine(replace(OS, segment_bytes=1_000_000)).partition
    for _ in range(10):
        write(partition, P, b"x")
        end_transaction(partition, P, commit=False)
    assert [len(aborted_index(segment).entries) for segment in partition.segments] == [3, 3, 3, 1]
    assert len(partition.aborted(0, partition.log_end)) == 10
