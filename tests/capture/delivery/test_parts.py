"""The parts that need no log: queues of snapshots, marks, the handover, meters, signals, state."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.capture.delivery import ghosts as ghosts_module
from penstock.capture.delivery.config import SnapshotSettings
from penstock.capture.delivery.ghosts import Ghosts
from penstock.capture.delivery.handover import Handover, HandoverClosedError
from penstock.capture.delivery.incremental import QUEUE_MAX, Done, Incremental
from penstock.capture.delivery.marks import Marks, with_mark
from penstock.capture.delivery.metering import CaptureStatus, Meter, Progress, TableStatus
from penstock.capture.delivery.owners import Owners
from penstock.capture.delivery.pace import Pace
from penstock.capture.delivery.signals import (
    Signal,
    SignalError,
    snapshot_all_signal,
    snapshot_signal,
)
from penstock.capture.delivery.state import State, TableSnapshot
from penstock.capture.events.filling import LastValues
from penstock.capture.events.settings import AVRO, EventSettings
from penstock.capture.source import CaptureError, Chunk, ChunkRequest, Row, Table
from tests.capture.delivery.fake import table
from tests.capture.delivery.running import on_thread
from tests.waiting import eventually

A, B = table("a"), table("b")


def chunk(request: ChunkRequest, rows: int, last: int | None, *, is_last: bool = False) -> Chunk:
    key = None if last is None else (b"%d" % last,)
    return Chunk(request, A, [(b"1", b"null")] * rows, b"{}", 1, key, is_last)


# ---- incremental snapshots ---------------------------------------------------------------


def test_tables_are_read_one_after_the_other_from_where_the_log_says() -> None:
    state = State()
    reading = Incremental(state, SnapshotSettings(chunk_rows=100))
    assert reading.next_request(0, 5) is None
    reading.add("s1", "a")
    reading.add("s2", "a")
    reading.add("s3", "b", "x > 1")
    assert [item.id for item in state.queue] == ["s1", "s3"]
    first = reading.next_request(0, 5)
    assert first == ChunkRequest("s1/0", "a", None, 100)
    assert reading.next_request(0, 5) is None
    assert reading.take(chunk(first, 100, 7), 0.6) is None
    # Whoever goes on after a crash has only the state.
    state = State.decode(state.encode())
    reading = Incremental(state, SnapshotSettings(chunk_rows=100))
    second = reading.next_request(1, 6)
    assert second == ChunkRequest("s1/1", "a", (b"7",), 100)
    assert reading.take(chunk(second, 3, 9, is_last=True), 1.6) == Done("a", 103)
    assert reading.next_request(2, 7) == ChunkRequest("s3/0", "b", None, 100, "x > 1")


def test_chunks_grow_and_shrink_with_the_time_they_take() -> None:
    reading = Incremental(State(), SnapshotSettings(chunk_rows=100, chunk_rows_max=300))
    reading.add("s", "a")
    sizes = []
    for took_s in (0.01, 0.01, 0.01, 0.5, 2.0, 2.0, 2.0, 2.0):
        request = reading.next_request(10, 1)
        assert request is not None
        sizes.append(request.limit)
        reading.take(chunk(request, 1, 1), 10 + took_s)
    assert sizes == [100, 200, 300, 300, 300, 150, 75, 64]


def test_a_snapshot_is_paused_stopped_and_bounded() -> None:
    state = State()
    reading = Incremental(state, SnapshotSettings())
    reading.add("s1", "a")
    asked = reading.next_request(0, 1)
    assert asked is not None
    assert reading.is_ours(chunk(asked, 0, None))
    state.queue_paused = True
    reading.drop(["a"])
    assert not reading.is_ours(chunk(asked, 0, None))
    reading.add("s2", "b")
    assert reading.next_request(0, 1) is None
    state.queue_paused = False
    assert reading.next_request(0, 1) is not None
    reading.drop([])
    assert state.queue == []
    for number in range(QUEUE_MAX):
        reading.add(str(number), f"t{number}")
    with pytest.raises(CaptureError, match="t-more"):
        reading.add("more", "t-more")


# ---- marks -------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.sampled_from([A, B]), st.integers(0, 4)), max_size=8),
    st.permutations([A, B]),
)
def test_every_row_is_marked_once_and_one_is_the_last(
    reads: list[tuple[object, int]], order: list[object]
) -> None:
    marks, given_rows, got = Marks(), [], []
    number = 0
    for where, count in reads:
        rows: list[Row] = [(b"%d" % (number + at),) for at in range(count)]
        number += count
        given_rows += [(where, row) for row in rows]
        got += marks.add(where, rows)  # type: ignore[arg-type]
    for where in order:
        got += marks.end(where)  # type: ignore[arg-type]
    got += marks.finish()
    flat = [(item.table, row, item.mark) for item in got for row in item.rows]
    for which in (A, B):
        assert [row for where, row, _ in flat if where is which] == [
            row for where, row in given_rows if where is which
        ]
    names = [mark for _, _, mark in flat]
    assert names[-1:] == (["last"] if given_rows else [])
    assert names.count("last") <= 1
    assert names.count("first") <= 1
    if number > 2:
        assert set(names) <= {
            "first",
            "first_in_data_collection",
            "true",
            "last_in_data_collection",
            "last",
        }


def test_a_source_block_says_its_mark() -> None:
    assert (
        with_mark(b'{"a":1,"snapshot":"true","b":2}', "last") == b'{"a":1,"snapshot":"last","b":2}'
    )
    assert with_mark(b'{"snapshot":false}', "true") == b'{"snapshot":"true"}'
    assert with_mark(b'{"x":"\\"snapshot\\":"}', "true") == b'{"x":"\\"snapshot\\":"}'


# ---- the handover ------------------------------------------------------------------------


def test_what_is_put_is_taken_in_order_and_no_more_waits_than_fits() -> None:
    handover: Handover[int] = Handover(10)
    highest = 0
    taken: list[int] = []

    def put() -> None:
        for number in range(1_000):
            handover.put(number, 3)
        handover.end()

    thread, failures = on_thread(put)
    while not handover.is_over:
        some = handover.take(1.0)
        highest = max(highest, len(some))
        taken += some
    thread.join(60)
    assert failures == []
    assert taken == list(range(1_000))
    assert 0 < highest <= 3


def test_a_heavy_item_goes_through_alone_and_a_closed_one_wakes_who_waits() -> None:
    handover: Handover[str] = Handover(10)
    handover.put("heavy", 1_000)
    thread, failures = on_thread(lambda: handover.put("more"))
    assert handover.take(0) == ["heavy"]
    assert eventually(lambda: handover.take(0)) == ["more"]
    thread.join(60)
    handover.put("full", 10)
    thread, failures = on_thread(lambda: handover.put("never"))
    handover.close()
    thread.join(60)
    assert [type(error) for error in failures] == [HandoverClosedError]
    assert handover.take(0.001) == []


def test_taking_waits_until_something_comes() -> None:
    handover: Handover[int] = Handover(10)
    got: list[int] = []
    ready = threading.Event()

    def take() -> None:
        ready.set()
        got.extend(handover.take(60))

    thread, _ = on_thread(take)
    ready.wait(60)
    handover.put(5)
    thread.join(60)
    assert got == [5]


# ---- ghosts, meters, signals, state ------------------------------------------------------


def test_ghosts_are_the_keys_that_nobody_saw() -> None:
    gone = orjson.dumps({"before": {}, "after": None, "op": "d"})
    wrapped = orjson.dumps({"schema": {}, "payload": {"after": None, "op": "d"}})
    there = orjson.dumps({"before": None, "after": {"x": '"after":null'}, "op": "c"})
    ghosts = Ghosts()
    records = [(b"1", there), (b"2", there), (b"3", there), (b"3", None), (b"4", gone)]
    ghosts.load("t", [*records, (b"5", wrapped), (b"6", b'\x00\x00avro"after":null')])
    ghosts.seen("t", [b"1", b"9"])
    assert [key for key, _ in ghosts.unseen_rows("t")] == [b"2", b"6"]
    assert list(ghosts.unseen_rows("t")) == []
    assert ghosts.knows("t")
    assert not ghosts.knows("u")
    assert ghosts.has_any("t")
    ghosts.load("u", [(b"1", there), (b"1", None)])
    assert ghosts.knows("u")
    assert not ghosts.has_any("u")
    ghosts.close()


def test_of_a_ghost_the_schema_is_kept() -> None:
    """Its delete must not be read with the schema of now."""
    ghosts = Ghosts()
    event = b'{"schema_id":7,"before":null,"after":{"x":1},"op":"c"}'
    ghosts.load("t", [(b"1", event), (b"2", event[:10])])
    assert list(ghosts.unseen_rows("t")) == [(b"1", b'{"schema_id":7}'), (b"2", b"")]
    ghosts.load("u", [(b"1", event)], keep_bytes=100)
    assert list(ghosts.unseen_rows("u")) == [(b"1", event)]
    ghosts.close()


def test_ghosts_are_told_by_their_owners() -> None:
    ghosts = Ghosts()
    records = [(b"1", b"a"), (b"2", b"b"), (b"3", b"b"), (b"4", b"-"), (b"1", b"b"), (b"2", b"a")]
    owners = {b"a": "a", b"b": "b", b"-": None}
    ghosts.load("t", records, keep_bytes=1, owner_of=owners.__getitem__)
    assert ghosts.measure("t", "a") == (1, 2)
    assert ghosts.count_others("t", "a") == 2
    assert list(ghosts.unseen_rows("t", "a")) == [(b"2", b"a")]
    assert [key for key, _ in ghosts.unseen_rows("t", "b")] == [b"1", b"3"]
    ghosts.close()


def test_large_ghosts_are_handed_out_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ghosts_module, "_FEW_BYTES", 5_000)
    ghosts = Ghosts()
    ghosts.load("t", ((b"%03d" % at, bytes(1_000)) for at in range(20)), keep_bytes=1_000)
    counts: list[int] = []
    seen = ghosts.seen

    def spy(topic: str, keys: list[bytes]) -> None:
        counts.append(len(keys))
        seen(topic, keys)

    monkeypatch.setattr(ghosts, "seen", spy)
    assert [key for key, _ in ghosts.unseen_rows("t")] == [b"%03d" % at for at in range(20)]
    assert counts == [5, 5, 5, 5]
    ghosts.close()


def test_a_file_that_cannot_be_kept(tmp_path: Path) -> None:
    """Where it is, and what to do, is told; nothing of it is left, however the process ends."""
    folder = tmp_path / "state"
    ghosts = Ghosts(folder)
    ghosts._db.execute("PRAGMA max_page_count = 4")
    with pytest.raises(CaptureError, match="full") as failed:
        ghosts.load("t", ((b"%d" % at, b"v") for at in range(20_000)))
    assert str(folder) in str(failed.value)
    assert "state_dir" in failed.value.advice
    assert list(folder.iterdir()) == []
    ghosts.close()
    (folder / "file").touch()
    for made in (Ghosts, partial(LastValues, lambda topic: ())):
        with pytest.raises(CaptureError, match="file"):
            made(folder=folder / "file")


def test_whose_an_event_is() -> None:
    block = {"version": "1", "name": "shop", "db": "d", "schema": "public", "table": "t}"}
    settings = EventSettings("shop")
    tables = Table("d", "public", "t}", (), ()), Table("d", "", "t}", (), ())
    schema, database = (Owners(settings, table) for table in tables)
    owner = schema.named(orjson.dumps(block))
    row = {"source": {"name": "x", "table": "y"}, "table": "t}", "x": ',"source":{"version":"1"}'}
    event = {"before": None, "after": row, "source": block, "op": "c"}
    for layout in (event, {"schema": {}, "payload": event}, {"source": block, "after": row}):
        assert schema.of(orjson.dumps(layout)) == owner
    for field, same in (("name", False), ("schema", False), ("table", False), ("db", True)):
        other = orjson.dumps({**event, "source": {**block, field: "other"}})
        assert (schema.of(other) == owner) is same
        in_database = database.of(other) == database.named(orjson.dumps(block))
        assert in_database is False
    for nothing in (b"", b"no json", b"[]", b"{}", b'{"source":7}', b'{"payload":7}'):
        assert schema.of(nothing) == ""
    avro = Owners(EventSettings("shop", format=AVRO), tables[0])
    assert avro.of(orjson.dumps(event)) == avro.named(orjson.dumps(block)) == ""


def test_meters() -> None:
    now = [100.0]
    meter = Meter(lambda: now[0], lambda: int(now[0] * 1e9))
    assert meter.lag_ms(0.5) is None
    assert meter.changes_per_s() == 0
    for number in range(100):
        meter.part(10, int(100e6) - number * 1_000, is_last=True)
    meter.committed()
    now[0] += 2
    meter.part(5, 1, is_last=True)
    meter.dropped()
    assert meter.changes == 1_000
    assert meter.changes_per_s() == 500
    assert meter.lag_ms(0.5) == 50
    assert meter.lag_ms(0.99) == 99
    now[0] += 100
    assert meter.changes_per_s() == 0
    meter.begin_snapshot(1_000)
    meter.snapshot_rows = 100
    now[0] += 10
    assert meter.progress("t", 100, 1_000) == Progress("t", 100, 1_000, 10.0, 90.0)


def test_status_and_state_come_back_from_the_log() -> None:
    table = TableStatus("public.t", "x.public.t", 2, 7, "added age integer")
    progress = Progress("t", 1, None, 2.0, None)
    status = CaptureStatus("x", "streaming", snapshot=progress, tables=(table,), table_count=1)
    assert CaptureStatus.decode(status.encode()) == status
    later = orjson.dumps({**orjson.loads(status.encode()), "something": "newer"})
    assert CaptureStatus.decode(later) == status
    state = State({"lsn": 1}, queue=[TableSnapshot("i", "t", after=["1", '"ü"'])], signals=5)
    again = State.decode(state.encode())
    assert again == state
    assert again.queue[0].cursor == (b"1", '"ü"'.encode())
    for bad in (b"{", b"[]", b'{"version":2}', b'{"version":1}', b'{"version":1,"queue":[],"x":1}'):
        with pytest.raises(CaptureError):
            State.decode(bad)
    with pytest.raises(CaptureError, match="no plain JSON"):
        State({"x": {1, 2}}).encode()


def test_signals_are_debeziums() -> None:
    made = Signal.decode(
        b'{"id":"a","type":"execute-snapshot","data":{"data-collections":["s.t"],'
        b'"type":"INCREMENTAL","additional-conditions":'
        b'[{"data-collection":"s.t","filter":"id > 5"}]}}'
    )
    assert (made.id, made.tables, made.is_blocking) == ("a", ["s.t"], False)
    assert (made.where("s.t"), made.where("s.u")) == ("id > 5", "")
    again = Signal.decode(snapshot_signal("s.t", where="x").encode())
    assert again.id
    assert again.where("s.t") == "x"
    assert Signal.decode(snapshot_all_signal().encode()).is_blocking
    assert Signal.decode(b'{"type":"log","data":"{\\"message\\":\\"x\\"}"}').data == {
        "message": "x"
    }
    for bad in (b"x", b"{}", b"[]", b'{"type":"nonsense"}', b'{"type":"log","data":5}'):
        with pytest.raises(SignalError):
            Signal.decode(bad)


@pytest.mark.parametrize(
    ("per_s", "is_worth"), [(10, False), (10_000, False), (25_000, False), (40_000, True)]
)
def test_waiting_for_more_is_for_those_who_get_much(per_s: int, is_worth: bool) -> None:
    pace, now = Pace(0.010, 0.0), 0.0
    # Nothing is known at first: nobody waits.
    assert pace.wait_s(now, now) == 0
    for _ in range(3):
        now += 0.004
        pace.added(per_s * 4 // 1_000)
        pace.committed(now)
        assert pace.wait_s(now, now) == (pytest.approx(0.010) if is_worth else 0)
        assert pace.wait_s(now, now + 0.003) == (pytest.approx(0.007) if is_worth else 0)
        assert pace.wait_s(now, now + 0.011) == 0
    # After a quiet time the first one that comes does not wait, either.
    now += 60
    pace.added(1)
    pace.committed(now)
    assert pace.wait_s(now, now) == 0


def test_without_a_linger_nobody_waits() -> None:
    pace = Pace(0, 0.0)
    pace.added(1_000_000)
    pace.committed(0.001)
    assert pace.wait_s(0.001, 0.001) == 0
