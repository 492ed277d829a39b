"""The tests that every kind of derived store passes: subclass `SinkKit`, say how it is reached.

    class TestSqlite(SinkKit):
        @pytest.fixture
        def store(self, tmp_path: Path) -> Store:
            return Store(f"sqlite:///{tmp_path}/shop.db?table=orders")

Random changes are compared with a dict; the rest goes for what the contract promises (see
`penstock.sinks`). `Store` says what a store cannot hold, which then must be refused, not lost.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from multiprocessing.connection import Connection
from typing import ClassVar, Final

import pyarrow as pa
import pytest

from penstock.errors import PenstockError
from penstock.sinks import (
    MAX_REFUSED,
    Changes,
    FencedError,
    NotReachedError,
    OutOfStepError,
    Position,
    Refused,
    Schema,
    SchemaChangedError,
    Sink,
    TooManyRefusedError,
)
from penstock.testing.sink_changes import (
    ALL,
    PLACE,
    SIMPLE,
    TEXTS,
    TOPIC,
    Load,
    Model,
    Row,
    Store,
    changes,
    check,
    merged,
    never,
    ordered,
    rank,
    read,
    same,
)
from penstock.testing.sink_hazards import FORKS, KILLED_S, HazardKit

__all__ = [
    "ALL",
    "PLACE",
    "SIMPLE",
    "TEXTS",
    "TOPIC",
    "Load",
    "Model",
    "Row",
    "SinkKit",
    "Store",
    "changes",
    "never",
    "ordered",
    "read",
    "same",
]

KILL_ROWS: Final = 200
BATCHES: Final = 12


class SinkKit(HazardKit):
    """The tests; subclasses have the fixture `store`."""

    # How many batches of random changes are written, one after the other.
    batches: ClassVar[int] = BATCHES

    @pytest.fixture
    def store(self) -> Store:
        raise NotImplementedError

    def test_random_changes_end_as_in_a_dict(self, store: Store, seed: int) -> None:
        load = Load(seed, store.cannot)
        with store.sink() as sink:
            assert sink.position() is None
            assert sink.stored_schema() is None
            assert sink.open(ALL) == Position()
            for number in range(self.batches):
                batch = load.next()
                assert sink.apply(batch, never).rows == batch.rows
                if number % 3 == 0:
                    # A repetition does nothing.
                    assert sink.apply(batch, never).rows == 0
            assert sink.position() == Position({PLACE: load.at})
            check(sink, load.model)
        with store.sink() as reader:
            assert reader.position() == Position({PLACE: load.at})
            found = reader.stored_schema()
            assert found is not None
            assert (found.key, found.arrow) == (ALL.key, ALL.arrow)
            check(reader, load.model)

    def test_ranges_of_keys(self, store: Store, seed: int) -> None:
        load = Load(seed, store.cannot)
        with store.sink() as sink:
            sink.open(ALL)
            for _ in range(max(2, self.batches // 2)):
                sink.apply(load.next(40), never)
            while len(load.model) < 12:
                sink.apply(load.next(40), never)
            if not sink.readable:
                return
            rows = ordered(load.model)
            keys = [(row["id"], row["part"]) for row in rows]
            for low, high in (
                (None, keys[5]),
                (keys[3], keys[9]),
                (keys[4], None),
                ((99, ""), None),
            ):
                first = 0 if low is None else sum(rank(key) < rank(low) for key in keys)
                last = len(keys) if high is None else sum(rank(k) < rank(high) for k in keys)
                assert same(read(sink, low, high), rows[first:last])

    def test_nothing_is_lost_between_opens(self, store: Store, seed: int) -> None:
        load = Load(seed, store.cannot)
        for _ in range(4):
            with store.sink() as sink:
                assert sink.open(ALL) == (Position({PLACE: load.at}) if load.at else Position())
                sink.apply(load.next(), never)
        with store.sink() as sink:
            check(sink, load.model)

    def test_gaps_and_steps_back_are_refused(self, store: Store) -> None:
        with store.sink() as sink:
            sink.open(SIMPLE)
            sink.apply(changes(SIMPLE, [{"id": 1, "name": "a"}], [], since=0, until=10), never)
            with pytest.raises(OutOfStepError, match="gap"):
                sink.apply(changes(SIMPLE, [], [(1,)], since=11, until=12), never)
            back = changes(SIMPLE, [], [(1,)], since=0, until=5)
            other = {PLACE: 5, (TOPIC, 1): 3}
            odd = Changes(back.upserts, back.deletes, Position(other), Position(), back.upserted_at,
                          back.deleted_at)  # fmt: skip
            with pytest.raises(OutOfStepError, match="back"):
                sink.apply(odd, never)
            assert sink.apply(back, never).rows == 0
            # Begins before and ends after: rows are put in once more.
            sink.apply(changes(SIMPLE, [{"id": 2, "name": "b"}], [], since=7, until=12), never)
            assert sink.position() == Position({PLACE: 12})
            if sink.readable:
                assert read(sink) == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]

    def test_another_position_is_taken_whole_or_not_at_all(self, store: Store) -> None:
        """The same records in another cluster: less is no step back."""
        here, there = Position({PLACE: 10}), Position({PLACE: 3}, {TOPIC: "other"})
        with store.sink() as sink:
            sink.open(SIMPLE)
            sink.apply(changes(SIMPLE, [{"id": 1, "name": "a"}], [], since=0, until=10), never)
            if not sink.relocate(there):
                assert sink.position() == here
                return
            found = sink.position()
            assert found == there
            assert found is not None
            assert found.ids == there.ids
            sink.apply(changes(SIMPLE, [{"id": 2, "name": "b"}], [], since=3, until=4), never)
        with store.sink() as sink:
            assert sink.position() == Position({PLACE: 4})
            if sink.readable:
                assert read(sink) == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]

    def test_changes_may_be_in_pieces(self, store: Store, seed: int) -> None:
        """Tables of Arrow have chunks, some of them empty, where they were put together."""
        load = Load(seed, store.cannot)
        with store.sink() as sink:
            sink.open(ALL)
            for _ in range(4):
                whole = load.next(40)
                sink.apply(
                    replace(
                        whole,
                        upserts=_in_pieces(whole.upserts),
                        deletes=_in_pieces(whole.deletes),
                        upserted_at=_in_pieces(whole.upserted_at),
                        deleted_at=_in_pieces(whole.deleted_at),
                    ),
                    never,
                )
            check(sink, load.model)

    def test_positions_of_several_partitions(self, store: Store) -> None:
        with store.sink() as sink:
            sink.open(SIMPLE)
            one = changes(SIMPLE, [{"id": 1, "name": "a"}], [], since=1000, until=1003)
            sink.apply(replace(one, since=Position()), never)
            # A key may move to another partition, where its offsets begin anew.
            rows = [{"id": 1, "name": "moved"}, {"id": 2, "name": "b"}]
            two = changes(SIMPLE, rows, [], since=0, until=5)
            other = Position({(TOPIC, 1): 5, ("kit.other", 7): 2**40})
            sink.apply(
                Changes(two.upserts, two.deletes, other, Position(), two.upserted_at,
                        two.deleted_at), never,
            )  # fmt: skip
            assert sink.position() == other.merged(Position({PLACE: 1003}))
            if sink.readable:
                assert read(sink) == rows

    def test_deletes_of_what_it_cannot_hold(self, store: Store) -> None:
        """A row that was put aside is deleted later: that must not be in the way either."""
        schema = Schema.of([pa.field("id", pa.string())], "id")
        keys = [("a\0b",), ("x" * 70_000,), ("gone",)]
        with store.sink() as sink:
            sink.open(schema)
            aside: list[Refused] = []
            sink.apply(changes(schema, [{"id": "gone"}], [], since=0, until=1), never)
            sink.apply(changes(schema, [], keys, since=1, until=4), aside.extend)
            assert sink.position() == Position({PLACE: 4})
            if sink.readable:
                assert read(sink) == []

    def test_an_older_writer_is_fenced(self, store: Store) -> None:
        first, second = store.sink(), store.sink()
        with first, second:
            first.open(SIMPLE)
            first.apply(changes(SIMPLE, [{"id": 1, "name": "a"}], [], since=0, until=1), never)
            assert second.open(SIMPLE) == Position({PLACE: 1})
            with pytest.raises(FencedError):
                first.apply(changes(SIMPLE, [], [(1,)], since=1, until=2), never)
            second.apply(changes(SIMPLE, [{"id": 2, "name": "b"}], [], since=1, until=2), never)
            with pytest.raises(FencedError):
                first.apply(changes(SIMPLE, [], [(2,)], since=2, until=3), never)
            if second.readable:
                assert read(second) == [{"id": 1, "name": "a"}, {"id": 2, "name": "b"}]

    def test_columns_are_added(self, store: Store) -> None:
        wider = Schema.of([*SIMPLE.fields, pa.field("age", pa.int32())], "id")
        with store.sink() as sink:
            sink.open(SIMPLE)
            sink.apply(changes(SIMPLE, [{"id": 1, "name": "a"}], [], since=0, until=1), never)
        with store.sink() as sink:
            assert sink.open(wider) == Position({PLACE: 1})
            row = {"id": 2, "name": "b", "age": 40}
            sink.apply(changes(wider, [row], [], since=1, until=2), never)
            if sink.readable:
                assert read(sink) == [{"id": 1, "name": "a", "age": None}, row]
        with store.sink() as sink:
            # The older schema again: the column stays, and is empty in what is written now.
            sink.open(SIMPLE)
            rows = [{"id": 2, "name": "c"}, {"id": 3, "name": "d"}]
            sink.apply(changes(SIMPLE, rows, [], since=2, until=4), never)
            found = sink.stored_schema()
            assert found is not None
            assert found.names == ("id", "name", "age")
            if sink.readable:
                assert read(sink)[1:] == [{**row, "age": None} for row in rows]

    def test_numbers_grow_and_other_types_do_not(self, store: Store) -> None:
        narrow = Schema.of([pa.field("id", pa.int64()), pa.field("n", pa.int32())], "id")
        wide = Schema.of([pa.field("id", pa.int64()), pa.field("n", pa.int64())], "id")
        text = Schema.of([pa.field("id", pa.int64()), pa.field("n", pa.string())], "id")
        with store.sink() as sink:
            sink.open(narrow)
            sink.apply(changes(narrow, [{"id": 1, "n": 5}], [], since=0, until=1), never)
        with store.sink() as sink, pytest.raises(SchemaChangedError, match="'n'"):
            sink.open(text)
        with store.sink() as sink, pytest.raises(SchemaChangedError, match="key"):
            sink.open(Schema.of(narrow.fields, ["id", "n"]))
        if "widen" in store.cannot:
            return
        with store.sink() as sink:
            sink.open(wide)
            row = {"id": 2, "n": 2**40}
            sink.apply(changes(wide, [row], [], since=1, until=2), never)
            if sink.readable:
                assert read(sink) == [{"id": 1, "n": 5}, row]

    def test_what_does_not_fit_is_put_aside(self, store: Store) -> None:
        wrong = [
            row
            for trouble, row in (
                ("nul", {"id": 11, "part": "x", "name": "with\0nul"}),
                ("nan", {"id": 12, "part": "x", "ratio": math.nan}),
                ("infinity", {"id": 13, "part": "x", "ratio": math.inf}),
            )
            if trouble in store.cannot
        ]
        fine = [{"id": number, "part": "x", "name": "fine"} for number in range(10)]
        aside: list[Refused] = []
        with store.sink() as sink:
            sink.open(ALL)
            rows = [*fine[:5], *wrong, *fine[5:]]
            done = sink.apply(changes(ALL, rows, [], since=0, until=len(rows)), aside.extend)
            assert done.rows == len(fine)
            assert list(done.refused) == aside
            assert [each.key for each in aside] == [(row["id"], "x") for row in wrong]
            assert [each.offset for each in aside] == list(range(5, 5 + len(wrong)))
            assert all(each.reason and each.topic == TOPIC for each in aside)
            assert sink.position() == Position({PLACE: len(rows)})
            if sink.readable:
                assert [row["id"] for row in read(sink)] == list(range(10))
            if wrong:
                many = [{**wrong[0], "id": number} for number in range(MAX_REFUSED + 1)]
                over = changes(ALL, many, [], since=len(rows), until=5000)
                with pytest.raises(TooManyRefusedError):
                    sink.apply(over, aside.extend)
                assert sink.position() == Position({PLACE: len(rows)})
                # As many as its user says.
                sink.max_refused = len(many)
                assert len(sink.apply(over, aside.extend).refused) == len(many)

    def test_nothing_moves_if_putting_aside_fails(self, store: Store) -> None:
        row: Row = {"id": 1, "part": "x", "name": "with\0nul", "ratio": math.nan}
        if not {"nul", "nan"} & store.cannot:
            return

        def fails(_: Sequence[Refused]) -> None:
            raise PenstockError("no place to put them")

        with store.sink() as sink:
            sink.open(ALL)
            with pytest.raises(PenstockError, match="no place"):
                sink.apply(changes(ALL, [row], [], since=0, until=1), fails)
            assert sink.position() == Position()
            aside: list[Refused] = []
            sink.apply(changes(ALL, [row], [], since=0, until=1), aside.extend)
            assert len(aside) == 1

    def test_built_anew_beside_and_switched(self, store: Store, seed: int) -> None:
        if "switch" in store.cannot:
            return
        load, other = Load(seed, store.cannot), Load(seed + 1, store.cannot)
        with store.sink() as sink:
            sink.open(ALL)
            sink.apply(load.next(40), never)
            with sink.beside(fresh=True) as begun:
                assert begun.open(ALL) == Position()
                begun.apply(other.next(40), never)
            # The old one is as it was, and goes on.
            sink.apply(load.next(40), never)
            check(sink, load.model)
            with sink.beside() as again:
                assert again.open(ALL) == Position({PLACE: other.at})
                again.apply(other.next(40), never)
                again.switch()
            with pytest.raises(FencedError):
                sink.apply(load.next(40), never)
        with store.sink() as sink:
            check(sink, other.model)
            assert sink.open(ALL) == Position({PLACE: other.at})
            sink.apply(other.next(40), never)
            check(sink, other.model)
            with sink.beside() as empty:
                assert empty.position() is None

    def test_it_knows_the_topic_that_it_was_filled_from(self, store: Store) -> None:
        def filled(sink: Sink, topic_id: str, *, since: int = 0) -> None:
            one = changes(SIMPLE, [{"id": since, "name": "a"}], [], since=since, until=since + 1)
            sink.apply(replace(one, position=replace(one.position, ids={TOPIC: topic_id})), never)

        with store.sink() as sink:
            assert sink.open(SIMPLE).ids == {}
            filled(sink, "first")
        with store.sink() as sink:
            # Also after changes of somebody who does not say it, and with more columns.
            sink.open(Schema.of([*SIMPLE.fields, pa.field("more", pa.int64())], "id"))
            sink.apply(changes(SIMPLE, [], [(7,)], since=1, until=2), never)
            found = sink.position()
            assert found is not None
            assert found.ids == {TOPIC: "first"}
        if "switch" in store.cannot:
            return
        with store.sink() as sink, sink.beside(fresh=True) as begun:
            begun.open(SIMPLE)
            filled(begun, "second")
            begun.switch()
        with store.sink() as sink:
            assert sink.open(SIMPLE).ids == {TOPIC: "second"}

    def test_a_fresh_one_beside_forgets_what_was_begun(self, store: Store) -> None:
        if "switch" in store.cannot:
            return
        row = {"id": 1, "name": "a"}
        with store.sink() as sink:
            sink.open(SIMPLE)
            with sink.beside() as begun:
                begun.open(SIMPLE)
                begun.apply(changes(SIMPLE, [row], [], since=0, until=9), never)
            with sink.beside(fresh=True) as begun:
                # Another key than before is welcome here.
                assert begun.open(Schema.of(SIMPLE.fields, "name")) == Position()
                begun.switch()
        with store.sink() as sink:
            found = sink.stored_schema()
            assert found is not None
            assert found.key == ("name",)
            if sink.readable:
                assert read(sink) == []

    def test_removed_without_a_trace(self, store: Store) -> None:
        with store.sink() as sink:
            sink.open(SIMPLE)
            sink.apply(changes(SIMPLE, [{"id": 1, "name": "a"}], [], since=0, until=1), never)
            sink.remove()
            sink.remove()
        with store.sink() as sink:
            assert sink.position() is None
            assert sink.open(ALL) == Position()
            if sink.readable:
                assert read(sink) == []

    def test_waiting_for_a_position(self, store: Store) -> None:
        with store.sink() as sink, store.sink() as reader:
            with pytest.raises(NotReachedError):
                reader.wait_for(Position({PLACE: 1}), 0.05)
            sink.open(SIMPLE)
            sink.apply(changes(SIMPLE, [], [], since=0, until=3), never)
            assert reader.wait_for(Position({PLACE: 2}), 30) == Position({PLACE: 3})
            with pytest.raises(NotReachedError, match="at 3"):
                reader.wait_for(Position({PLACE: 4}), 0.05)

    def test_killed_at_any_moment(self, store: Store, seed: int) -> None:
        chance = random.Random(seed)
        for _ in range(self.kills):
            _kill_a_writer(store, seed, chance.randint(1, 8))
        with store.sink() as sink:
            at = sink.open(ALL).offsets[PLACE]
            load = Load(seed, store.cannot)
            while load.at < at:
                load.next(KILL_ROWS)
            assert load.at == at
            # The log is cut anew: what may have been begun comes now in two batches, and of each
            # row that changes in both of them the older one comes again first.
            for _ in range(2):
                sink.apply(load.next(KILL_ROWS), never)
            check(sink, load.model)


def _in_pieces(rows: pa.Table) -> pa.Table:
    # Empty ones that are made so: those that are cut off are left out by Arrow.
    empty = rows.take(pa.array([], pa.int64()))
    return pa.concat_tables([empty, rows.slice(0, 3), empty, rows.slice(3)])


def _kill_a_writer(store: Store, seed: int, after: int) -> None:
    """Let a process write, and end it at once some moment after it has told of so many batches."""
    applied, tell = FORKS.Pipe(duplex=False)
    process = FORKS.Process(target=_write_for_ever, args=(store, seed, tell), daemon=True)
    process.start()
    tell.close()
    try:
        for _ in range(after):
            assert applied.poll(KILLED_S), "the writer does not get on"
            try:
                applied.recv()
            except EOFError:
                raise AssertionError("the writer has failed") from None
    finally:
        process.kill()
        process.join()
        applied.close()


def _write_for_ever(store: Store, seed: int, tell: Connection) -> None:
    load = Load(seed, store.cannot)
    with store.sink() as sink:
        at = sink.open(ALL).offsets.get(PLACE, 0)
        while load.at < at:
            load.next(KILL_ROWS)
        for _ in count():
            sink.apply(merged(load.next(KILL_ROWS), load.next(KILL_ROWS)), never)
            tell.send("applied")
