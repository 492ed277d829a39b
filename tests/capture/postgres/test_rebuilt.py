"""The table rebuilt from snapshot and stream is the table, row by row, whatever was done to it."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import psycopg
import pytest

from penstock.capture.postgres.chunks import Visibility, precedes, settle
from penstock.capture.postgres.decoders import Relation
from penstock.capture.postgres.source import PostgresSource
from penstock.capture.postgres.types import Coding
from penstock.capture.source import (
    UNAVAILABLE,
    Change,
    Chunk,
    ChunkRequest,
    Item,
    Row,
    Table,
)
from penstock.client.table_schemas import TableColumn, ValueType
from penstock.testing.postgres import PostgresServer
from tests.capture.postgres.rebuilding import (
    MISSING,
    Rebuilt,
    assert_same,
    catch_up,
    follow,
    opened,
    start,
)
from tests.capture.postgres.workload import Load, ignore_conflicts, prepare
from tests.harness.profiles import LOAD_ROUNDS, LOADED_SNAPSHOTS


@pytest.mark.parametrize(
    ("release", "identity"), [("system", "DEFAULT"), ("16", "DEFAULT"), ("18", "FULL")]
)
def test_a_random_load(
    postgres_of: Callable[[str], PostgresServer], release: str, identity: str, seed: int
) -> None:
    """With the stream opened again and again at positions it has told before."""
    rng = random.Random(seed)
    url = postgres_of(release).create_database()
    with psycopg.connect(url, autocommit=True) as sql:
        prepare(sql)
        sql.execute(f"ALTER TABLE t REPLICA IDENTITY {identity}".encode())
        with opened(url) as source:
            rebuilt = start(source)
            assert_same(rebuilt, sql, "public.t")
            earlier = [rebuilt.copy()]
            load = Load(sql, rng)
            for _ in range(LOAD_ROUNDS):
                load.run(15)
                catch_up(source, rebuilt, sql)
                assert_same(rebuilt, sql, "public.t")
                earlier.append(rebuilt.copy())
                if rng.random() < 0.5:
                    rebuilt = rng.choice(earlier).copy()
            catch_up(source, rebuilt, sql)
            assert_same(rebuilt, sql, "public.t")
            assert len(set(rebuilt.transactions)) == len(rebuilt.transactions)


def test_a_snapshot_under_load(database: str, seed: int) -> None:
    """Writers do not wait for it, and nothing falls between it and the stream."""
    with psycopg.connect(database, autocommit=True) as sql:
        prepare(sql)
        with opened(database) as source, writers(database, seed) as stop:
            for _ in range(LOADED_SNAPSHOTS):
                # Also again, when the slot has long been there.
                rebuilt = start(source)
            stop()
            catch_up(source, rebuilt, sql)
            assert_same(rebuilt, sql, "public.t")


def test_chunks_under_load(database: str, seed: int) -> None:
    """A table that is only read in chunks, while others write to it, ends up whole."""
    with psycopg.connect(database, autocommit=True) as sql:
        prepare(sql)
        sql.execute("INSERT INTO t SELECT g, 'r', 0, '' FROM generate_series(-2000, -1) g")
        with opened(database) as source:
            watching = Asking(source)
            with source.snapshot() as snapshot:
                watching.position = snapshot.position
            with writers(database, seed, truncates=False) as stop:
                follow(source, watching, lambda: watching.is_complete)
                stop()
                catch_up(source, watching, sql)
            assert_same(watching, sql, "public.t")
            assert all(MISSING not in row.values() for row in watching.rows("public.t").values())
            assert len(watching.asked) > 15


class Asking(Rebuilt):
    """Asks for the table, a chunk after the other."""

    def __init__(self, source: PostgresSource) -> None:
        super().__init__()
        self._source = source
        self.is_complete = False
        self.asked: list[ChunkRequest] = []
        self._ask(None)

    def _ask(self, after: Row | None) -> None:
        self.asked.append(ChunkRequest(str(len(self.asked)), "public.t", after, 100))
        self._source.ask(self.asked[-1])

    def apply(self, item: Item) -> None:
        super().apply(item)
        if isinstance(item, Chunk):
            assert item.request == self.asked[-1]
            self.is_complete = item.is_last
            if not item.is_last:
                self._ask(item.last_key)


class writers:  # noqa: N801
    """Two connections that write at random until told to stop."""

    def __init__(self, url: str, seed: int, *, truncates: bool = True) -> None:
        self._truncates = truncates
        self._stop = threading.Event()
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(url, seed + n, 10_000_000 * (n + 1)))
            for n in range(2)
        ]

    def _run(self, url: str, seed: int, first_id: int) -> None:
        try:
            with psycopg.connect(url, autocommit=True) as sql:
                load = Load(sql, random.Random(seed), first_id, truncates=self._truncates)
                while not self._stop.is_set():
                    ignore_conflicts(load, 1)
        except BaseException as error:
            self._failures.append(error)

    def __call__(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()
        assert self._failures == []

    def __enter__(self) -> writers:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


TEXT = Coding(ValueType("string"), inline="text({v})")
TABLE = Table(
    "d",
    "public",
    "t",
    tuple(TableColumn(name, TEXT.type, name != "k") for name in ("k", "a", "big")),
    ("k",),
)
RELATION = Relation(1, TABLE, [TEXT] * 3, "d")


def change(op: str, before: Row | None, after: Row | None) -> Change:
    return Change(TABLE, op, before, after, b"{}", 0)


def test_rows_that_a_later_change_overtook() -> None:
    rows: list[Row] = [
        (b"1", b"a", b"B"),
        (b"2", b"a", b"B"),
        (b"3", b"a", b"B"),
        (b"4", b"a", b"B"),
    ]
    u = UNAVAILABLE
    late = [
        change("u", None, (b"1", b"b", b"C")),
        change("d", (b"2", b"null", b"null"), None),
        # It left the large value alone: only the row that was read has it.
        change("u", None, (b"3", b"b", u)),
        change("u", (b"3", b"null", b"null"), (b"9", b"c", u)),
    ]
    assert settle(RELATION, rows, late) == [(b"4", b"a", b"B"), (b"9", b"c", b"B")]
    assert settle(RELATION, rows, [*late, change("t", None, None)]) == []
    # The stream has told the large value itself, before it was left alone.
    known = [change("u", None, (b"1", b"b", b"C")), change("u", None, (b"1", b"c", u))]
    assert settle(RELATION, rows[:1], known) == []


def test_which_transactions_a_snapshot_sees() -> None:
    seen = Visibility.parse("4294967300:4294967310:4294967303,4294967305")
    assert (seen.xmax, seen.running) == (14, frozenset({7, 9}))
    assert [xid for xid in range(5, 16) if seen.sees(xid)] == [5, 6, 8, 10, 11, 12, 13]
    assert seen.sees(2**32 - 5)
    assert precedes(2**32 - 5, 3)
    assert not precedes(3, 3)
