"""What SQL databases pass beside the tests of all stores."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from penstock.sinks import FencedError, Position, Schema, SchemaChangedError, Sink, SinkError
from penstock.sinks.errors import StoreError
from penstock.sinks.sql.base import POSITIONS, SqlSink
from penstock.testing.sinks import PLACE, SIMPLE, Store, changes, never, read
from tests.harness.profiles import STATEMENTS_PER_KILL
from tests.sinks.kit import StoreKit

ONE = {"id": 1, "name": "a"}
TWO = {"id": 2, "name": "b"}
REMEDY = "penstock sinks rebuild kit"


def drop(store: Store) -> None:
    """As somebody does by hand."""
    with store.sink() as other:
        assert isinstance(other, SqlSink)
        other._run(f"DROP TABLE {other.quote(other.table)}")


class Killed(BaseException):
    """Not an error that anybody would handle."""


def killed(store: Store, at: int, step: Callable[[SqlSink], object], *, beside: bool) -> bool:
    """Do something with a store whose process ends before its statement number `at`: none of those
    that would clean up are run either. Whether it came to that."""
    with store.sink() as found:
        sink = found.beside() if beside else found
        assert isinstance(sink, SqlSink)
        run, number = sink._run, count()

        def broken(sql: str, values: Sequence[Any] = ()) -> Any:
            if next(number) >= at:
                raise Killed
            return run(sql, values)

        if beside:
            sink.open(SIMPLE)
        sink._run = broken  # type: ignore[method-assign]
        try:
            step(sink)
        except Killed:
            return True
        finally:
            sink._run = run  # type: ignore[method-assign]
            sink.close()
        return False


def statements(seed: int) -> Iterator[int]:
    """Before which statements to be killed: in `proof`, before each."""
    return count(random.Random(seed).randrange(STATEMENTS_PER_KILL), STATEMENTS_PER_KILL)


def put(sink: Sink, row: dict[str, Any], at: int) -> None:
    """A row, at a position."""
    sink.apply(changes(SIMPLE, [row], [], since=at, until=at + 1), never)


def remove(store: Store) -> None:
    """Nothing must be left."""
    with store.sink() as sink:
        sink.remove()
        assert sink.position() is None
        assert isinstance(sink, SqlSink)
        with sink._explaining():
            assert sink._one(f"SELECT count(*) FROM {POSITIONS}")[0] == 0


class SqlKit(StoreKit):
    """All of them; kills between any two statements; tables of others, or dropped by them."""

    # Whether the position goes with the table: then the next start begins anew by itself.
    forgets: ClassVar[bool] = False

    def test_a_look_makes_no_store(self, store: Store, tmp_path: Path) -> None:
        with store.sink() as sink:
            assert sink.position() is None
            assert sink.stored_schema() is None
            sink.remove()
        assert not list(tmp_path.iterdir())

    def test_a_table_that_was_dropped_is_told_with_the_remedy(self, store: Store) -> None:
        row = {"id": 1, "name": "a"}
        with store.sink() as sink:
            sink.open(SIMPLE)
            sink.apply(changes(SIMPLE, [row], [], since=0, until=1), never)
            drop(store)
            # In the middle, at the next start, and read.
            with pytest.raises(StoreError, match="is gone") as caught:
                sink.apply(changes(SIMPLE, [], [(1,)], since=1, until=2), never)
            assert REMEDY in caught.value.advice
            assert not caught.value.retriable
        if self.forgets:
            with store.sink() as sink:
                assert sink.open(SIMPLE) == Position()
            return
        for step in (lambda sink: sink.open(SIMPLE), read):
            with store.sink() as sink, pytest.raises(StoreError, match="is gone") as caught:
                step(sink)
            assert REMEDY in caught.value.advice
        # The remedy mends it.
        with store.sink() as sink, sink.beside(fresh=True) as anew:
            anew.open(SIMPLE)
            anew.apply(changes(SIMPLE, [row], [], since=0, until=2), never)
            anew.switch()
        with store.sink() as sink:
            assert read(sink) == [row]
            assert sink.open(SIMPLE).offsets

    def test_killed_before_any_statement_of_open(self, store: Store, seed: int) -> None:
        more = Schema.of([*SIMPLE.fields, pa.field("more", pa.string())], "id")
        other = Schema.of([*SIMPLE.fields, pa.field("more", pa.int64())], "id")
        for at in statements(seed):
            making = killed(store, at, lambda sink: sink.open(SIMPLE), beside=False)
            with store.sink() as sink:
                assert sink.open(SIMPLE) == Position()
                put(sink, ONE, 0)
            growing = killed(store, at, lambda sink: sink.open(more), beside=False)
            # It need not be the same columns that are wanted next.
            with store.sink() as sink:
                try:
                    assert sink.open(other) == Position({PLACE: 1})
                    row = {**TWO, "more": 7}
                    sink.apply(changes(other, [row], [], since=1, until=2), never)
                except SchemaChangedError:
                    assert sink.open(more) == Position({PLACE: 1})
                    row = {**TWO, "more": "7"}
                    sink.apply(changes(more, [row], [], since=1, until=2), never)
                assert read(sink) == [{**ONE, "more": None}, row]
            remove(store)
            if not making and not growing:
                break
        assert at > 3

    def test_killed_before_any_statement_of_a_switch(self, store: Store, seed: int) -> None:
        for at in statements(seed):
            with store.sink() as sink, sink.beside() as begun:
                sink.open(SIMPLE)
                put(sink, ONE, 0)
                begun.open(SIMPLE)
                put(begun, TWO, 0)
                begun.apply(changes(SIMPLE, [], [], since=1, until=5), never)
            switching = killed(store, at, lambda sink: sink.switch(), beside=True)
            with store.sink() as sink:
                if sink.open(SIMPLE) == Position({PLACE: 1}):
                    assert read(sink) == [ONE]
                    with sink.beside() as begun:
                        assert begun.open(SIMPLE) == Position({PLACE: 5})
                        begun.switch()
                assert sink.open(SIMPLE) == Position({PLACE: 5})
                assert read(sink) == [TWO]
            remove(store)
            if not switching:
                break
        assert at > 3

    def test_killed_before_any_statement_of_a_removal(self, store: Store, seed: int) -> None:
        for at in statements(seed):
            with store.sink() as sink:
                sink.open(SIMPLE)
                put(sink, ONE, 0)
            removing = killed(store, at, lambda sink: sink.remove(), beside=False)
            remove(store)
            if not removing:
                break
        assert at > 3

    def test_of_those_who_open_at_once_one_is_the_writer(self, store: Store) -> None:
        def opened(sink: Sink) -> bool:
            try:
                sink.open(SIMPLE)
            except SinkError as error:
                if not error.retriable:
                    raise
                return False
            return True

        for at in range(6):
            sinks = [store.sink() for _ in range(4)]
            with ThreadPoolExecutor(len(sinks)) as pool:
                done = list(pool.map(opened, sinks))
            writers = [sink for sink, is_open in zip(sinks, done, strict=True) if is_open]
            wrote = []
            for sink in writers:
                try:
                    put(sink, ONE, at)
                    wrote.append(sink)
                except FencedError:
                    pass
            for sink in sinks:
                sink.close()
            assert len(wrote) == 1

    def test_a_writer_of_a_table_that_was_removed_is_fenced(self, store: Store) -> None:
        with store.sink() as old, store.sink() as new:
            old.open(SIMPLE)
            new.remove()
            new.open(SIMPLE)
            with pytest.raises(FencedError):
                put(old, ONE, 0)
            # One that has had a number as high as any in the table built beside.
            for _ in range(3):
                old.open(SIMPLE)
            with new.beside() as built:
                built.open(SIMPLE)
                built.switch()
            with pytest.raises(FencedError):
                put(old, ONE, 0)

    def test_tables_of_others_are_left_alone(self, store: Store) -> None:
        others = ("orders__old", "penstock_gone_orders", "orders__building")
        with store.sink() as sink:
            assert isinstance(sink, SqlSink)
            sink.open(SIMPLE)
            with sink._explaining():
                for name in others:
                    sink._run(f"CREATE TABLE {name} (id BIGINT PRIMARY KEY)")
                    sink._run(f"INSERT INTO {name} VALUES (7)")
            with sink.beside(fresh=True) as begun, pytest.raises(StoreError) as caught:
                begun.open(SIMPLE)
            assert "orders__building that Penstock has not made" in str(caught.value)
            assert caught.value.advice
            with sink._explaining():
                assert sink._one("SELECT id FROM orders__building") == (7,)
                sink._run("DROP TABLE orders__building")
        with store.sink() as sink, sink.beside() as begun:
            assert isinstance(sink, SqlSink)
            sink.open(SIMPLE)
            begun.open(SIMPLE)
            begun.switch()
            sink.remove()
            with sink._explaining():
                for name in others[:2]:
                    assert sink._one(f"SELECT id FROM {name}") == (7,)
