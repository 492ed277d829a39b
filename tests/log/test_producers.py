"""What a partition remembers of its producers: duplicates, gaps, fencing, snapshots, bounds."""

from __future__ import annotations

import struct

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import OutOfOrderSequenceError, ProducerFencedError
from penstock.log import producers
from penstock.log.producers import (
    EXPIRY_MS,
    KEPT_BATCHES,
    BatchMeta,
    ProducerStates,
    load_snapshot,
    snapshot_offsets,
    write_snapshot,
)
from penstock.records.batch import next_sequence, read_header
from penstock.testing.faults import SimulatedDisk
from tests.harness.profiles import examples
from tests.log.engine import batch

ID, EPOCH = 7, 3


def states_after(*sizes: int, first: int = 0, now_ms: int = 0) -> ProducerStates:
    """A producer that has written batches of so many records."""
    states = ProducerStates()
    sequence, offset = first, 100
    for size in sizes:
        last = next_sequence(sequence, size - 1)
        meta = BatchMeta(sequence, last, offset, offset + size - 1, 5000 + offset)
        states.update(ID, EPOCH, meta, now_ms)
        sequence, offset = next_sequence(sequence, size), offset + size
    return states


def test_an_unknown_producer_may_begin_anywhere() -> None:
    assert ProducerStates().check(ID, EPOCH, 42, 45) is None


def test_the_latest_batches_are_duplicates() -> None:
    states = states_after(3, 2, 1, 4, 1, 2, 3)
    known = states.by_id[ID].batches
    assert len(known) == KEPT_BATCHES
    for meta in known:
        found = states.check(ID, EPOCH, meta.first_sequence, meta.last_sequence)
        assert found == meta
    # Older than what is remembered, and not what comes next.
    with pytest.raises(OutOfOrderSequenceError):
        states.check(ID, EPOCH, 0, 2)


def test_what_follows_is_new_and_a_gap_is_not() -> None:
    states = states_after(3, 2)
    assert states.check(ID, EPOCH, 5, 6) is None
    for wrong in (4, 6, 100):
        with pytest.raises(OutOfOrderSequenceError):
            states.check(ID, EPOCH, wrong, wrong)
    # The same beginning with another length is not the same batch.
    with pytest.raises(OutOfOrderSequenceError):
        states.check(ID, EPOCH, 3, 5)


def test_sequences_wrap() -> None:
    states = states_after(3, 2, first=2**31 - 4)
    assert states.by_id[ID].batches[-1][:2] == (2**31 - 1, 0)
    assert states.check(ID, EPOCH, 1, 1) is None
    assert states.check(ID, EPOCH, 2**31 - 1, 0) is not None


def test_epochs() -> None:
    states = states_after(3)
    with pytest.raises(ProducerFencedError):
        states.check(ID, EPOCH - 1, 3, 3)
    with pytest.raises(OutOfOrderSequenceError):
        states.check(ID, EPOCH + 1, 3, 3)
    assert states.check(ID, EPOCH + 1, 0, 0) is None
    states.update(ID, EPOCH + 1, BatchMeta(0, 0, 103, 103, 1))
    # Batches of the epoch before are no longer duplicates.
    with pytest.raises(ProducerFencedError):
        states.check(ID, EPOCH, 0, 2)


def test_restore() -> None:
    states = states_after(3)
    before = states.by_id[ID]
    states.update(ID, EPOCH, BatchMeta(3, 3, 103, 103, 1))
    states.restore(ID, before)
    assert states.check(ID, EPOCH, 3, 3) is None
    states.restore(ID, None)
    assert ID not in states.by_id


def test_observing_a_log_gives_the_same() -> None:
    states = ProducerStates()
    states.observe(read_header(batch("a", "b", producer=(ID, EPOCH, 0))))
    states.observe(read_header(batch("no producer")))
    assert list(states.by_id) == [ID]
    assert states.by_id[ID].batches[0][:4] == (0, 1, 0, 1)


metas = st.builds(
    lambda first, delta, offset, time: BatchMeta(
        first, next_sequence(first, delta), offset, offset + delta, time
    ),
    st.integers(0, 2**31 - 1),
    st.integers(0, 1000),
    st.integers(0, 2**60),
    st.integers(-1, 2**60),
)


@settings(max_examples=examples(50))
@given(st.dictionaries(st.integers(0, 2**60), st.lists(metas, min_size=1, max_size=7), max_size=5))
def test_snapshots_forget_nothing(content: dict[int, list[BatchMeta]]) -> None:
    states = ProducerStates()
    for producer_id, batches in content.items():
        for meta in batches:
            states.update(producer_id, EPOCH, meta, 99)
    back = ProducerStates.from_bytes(states.to_bytes())
    assert back is not None
    assert {pid: known.batches for pid, known in back.by_id.items()} == {
        pid: tuple(batches[-KEPT_BATCHES:]) for pid, batches in content.items()
    }
    assert {known.epoch for known in back.by_id.values()} <= {EPOCH}


def test_a_damaged_snapshot_reads_as_none() -> None:
    data = states_after(3, 2).to_bytes()
    for size in range(len(data)):
        assert ProducerStates.from_bytes(data[:size]) is None
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 0x10
        assert ProducerStates.from_bytes(bytes(damaged)) is None
    # A right checksum over a wrong count.
    body = struct.pack(">i", 5)
    assert ProducerStates.from_bytes(struct.pack(">hI", 1, crc32c(body)) + body) is None


def test_snapshot_files() -> None:
    disk = SimulatedDisk()
    disk.make_dirs("/p")
    write_snapshot(disk, "/p", 105, states_after(3, 2))
    assert disk.names("/p") == ["00000000000000000105.snapshot"]
    assert snapshot_offsets([*disk.names("/p"), "x.snapshot", "5.log"]) == [105]
    found = load_snapshot(disk, "/p", 105)
    assert found is not None
    assert found.check(ID, EPOCH, 3, 4) is not None
    assert load_snapshot(disk, "/p", 106) is None


def test_silence_is_counted_by_the_logs_clock() -> None:
    # The records are from 1970, the producer is not.
    states = states_after(3, now_ms=10 * EXPIRY_MS)
    states.expire(11 * EXPIRY_MS)
    assert ID in states.by_id
    states.expire(11 * EXPIRY_MS + 1)
    assert ID not in states.by_id


def test_producers_of_an_earlier_run_get_their_day_too() -> None:
    states = ProducerStates.from_bytes(states_after(3, now_ms=1).to_bytes())
    assert states is not None
    states.expire(10 * EXPIRY_MS)
    states.expire(11 * EXPIRY_MS)
    assert ID in states.by_id
    states.expire(11 * EXPIRY_MS + 1)
    assert ID not in states.by_id


def test_the_number_of_producers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(producers, "MAX_PRODUCERS", 20)
    states = ProducerStates()
    for producer_id in range(50):
        states.update(producer_id, 0, BatchMeta(0, 0, producer_id, producer_id, 0), producer_id)
        assert len(states.by_id) <= 20
    # The longest silent ones are gone.
    assert 49 in states.by_id
    assert 0 not in states.by_id
