"""Chunks in the stream: in the order of any key, with conditions, and what cannot be read."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from penstock.capture.postgres.source import PostgresSource
from penstock.capture.source import Chunk, ChunkRequest, Row
from tests.capture.postgres.rebuilding import (
    Connection,
    Rebuilt,
    Values,
    assert_same,
    opened,
    start,
    values,
)


def ask(source: PostgresSource, rebuilt: Rebuilt, request: ChunkRequest) -> Chunk:
    """The answer to a request, whatever comes before it."""
    source.ask(request)
    stream = source.stream(rebuilt.position)
    for item in stream:
        if isinstance(item, Chunk):
            stream.close()  # type: ignore[attr-defined]
            return item
        rebuilt.apply(item)
    raise AssertionError("the stream has ended")


def read(
    source: PostgresSource, rebuilt: Rebuilt, table: str, limit: int, where: str = ""
) -> list[Values]:
    """A whole table, a chunk after the other."""
    return [
        row
        for chunk in chunks(lambda request: ask(source, rebuilt, request), table, limit, where)
        for row in chunk
    ]


def read_at_once(source: PostgresSource, rebuilt: Rebuilt, table: str, limit: int) -> list[Values]:
    """The same from one stream."""
    stream = source.stream(rebuilt.position)

    def ask(request: ChunkRequest) -> Chunk:
        source.ask(request)
        while not isinstance(item := next(stream), Chunk):
            rebuilt.apply(item)
        return item

    found = [row for chunk in chunks(ask, table, limit) for row in chunk]
    stream.close()  # type: ignore[attr-defined]
    return found


def chunks(
    ask: Callable[[ChunkRequest], Chunk], table: str, limit: int, where: str = ""
) -> Iterator[list[Values]]:
    """The rows of each chunk of a table."""
    after: Row | None = None
    while True:
        chunk = ask(ChunkRequest("x", table, after, limit, where))
        assert chunk.problem == ""
        yield [values(chunk.table, row) for row in chunk.rows]
        after = chunk.last_key
        if chunk.is_last:
            return


KEYS = [
    ("bigint", "g"),
    ('text COLLATE "C"', "'k\"\\ ' || g"),
    ("numeric(10, 2)", "g / 3.0"),
    ("timestamptz", "'2024-01-01'::timestamptz + g * interval '1 hour 1 us'"),
    ("uuid", "md5(g::text)::uuid"),
    ("bytea", "decode(md5(g::text), 'hex')"),
    ("mood", "(array['sad', 'ok', 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i'])[g]::mood"),
    ("date", "'2024-01-01'::date + g"),
    ("float8", "g / 7.0"),
]


def test_keys_of_every_kind(database: str, sql: Connection) -> None:
    sql.execute(
        "CREATE TYPE mood AS ENUM ('sad', 'ok', 'a', 'b', 'c', 'd', 'e', 'f', 'g', 'h', 'i')"
    )
    for number, (kind, value) in enumerate(KEYS):
        sql.execute(f"CREATE TABLE t{number} (g int, k {kind} PRIMARY KEY)".encode())
        sql.execute(
            f"INSERT INTO t{number} SELECT g, {value} FROM generate_series(1, 11) g".encode()
        )
    with opened(database) as source:
        rebuilt = start(source)
        for number in range(len(KEYS)):
            found = [row["g"] for row in read_at_once(source, rebuilt, f"public.t{number}", 4)]
            query = f"SELECT g FROM t{number} ORDER BY k"
            assert found == [row[0] for row in sql.execute(query.encode())], KEYS[number]


def test_a_key_of_several_columns_in_another_order(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (a int, b text, c int, PRIMARY KEY (b, a))")
    sql.execute("INSERT INTO t SELECT g, 'k' || g % 3, g FROM generate_series(1, 20) g")
    with opened(database) as source:
        rebuilt = start(source)
        assert source.tables()[0].key == ("a", "b")
        found = [row["a"] for row in read(source, rebuilt, "public.t", 3)]
        assert found == [row[0] for row in sql.execute("SELECT a FROM t ORDER BY b, a")]
        few = read(source, rebuilt, "public.t", 3, where="c > 15 OR c = 1")
        assert sorted(row["c"] for row in few) == [1, 16, 17, 18, 19, 20]


@pytest.mark.parametrize(
    ("table", "where", "words"),
    [
        ("public.nothere", "", "no table"),
        ("public.nokey", "", "no key"),
        ("public.excluded", "", "not a table that is captured"),
        ("public.t", "nonsense = 1", "nonsense"),
    ],
)
def test_what_cannot_be_read_is_said(
    database: str, sql: Connection, table: str, where: str, words: str
) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    sql.execute("CREATE TABLE nokey (id int)")
    sql.execute("ALTER TABLE nokey REPLICA IDENTITY FULL")
    sql.execute("CREATE TABLE excluded (id int PRIMARY KEY)")
    with opened(database, exclude=("public.excluded",)) as source:
        rebuilt = start(source)
        chunk = ask(source, rebuilt, ChunkRequest("1", table, None, 10, where))
        assert words in chunk.problem
        assert (chunk.rows, chunk.is_last) == ([], True)
        # The stream goes on all the same.
        sql.execute("INSERT INTO t VALUES (1)")
        assert len(read(source, rebuilt, "public.t", 10)) == 1


def test_an_empty_table(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY)")
    with opened(database) as source:
        chunk = ask(source, start(source), ChunkRequest("1", "public.t", None, 10))
        assert (chunk.rows, chunk.last_key, chunk.is_last) == ([], None, True)


def test_partitions_in_chunks(database: str, sql: Connection) -> None:
    sql.execute("CREATE TABLE t (id int PRIMARY KEY, a text) PARTITION BY HASH (id)")
    for number in range(3):
        sql.execute(
            f"CREATE TABLE t{number} PARTITION OF t "
            f"FOR VALUES WITH (MODULUS 3, REMAINDER {number})".encode()
        )
    sql.execute("INSERT INTO t SELECT g, 'x' FROM generate_series(1, 20) g")
    with opened(database) as source:
        rebuilt = start(source)
        rows = read(source, rebuilt, "public.t", 6)
        assert [row["id"] for row in rows] == list(range(1, 21))
        assert_same(rebuilt, sql, "public.t")
