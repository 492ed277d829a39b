"""PostgreSQL, MariaDB and DuckDB pass the tests of all stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import duckdb
import pyarrow as pa
import pytest

from penstock.sinks import OutOfStepError, Position, Refused, Schema
from penstock.sinks.sql.postgresql import PostgresSink
from penstock.testing.mariadb import MariaDB
from penstock.testing.postgres import PostgresServer
from penstock.testing.sinks import PLACE, SIMPLE, Store, changes, never, read
from tests.harness.profiles import PROFILE, Profile
from tests.sinks.sql_kit import SqlKit


@pytest.fixture
def postgres(shared_postgres: PostgresServer) -> PostgresServer:
    return shared_postgres


@pytest.fixture
def mariadb(shared_mariadb: MariaDB) -> MariaDB:
    return shared_mariadb


class TestPostgres(SqlKit):
    @pytest.fixture
    def store(self, postgres: PostgresServer) -> Store:
        return Store(postgres.create_database(), {"table": "orders"}, cannot=frozenset({"nul"}))

    def test_a_key_that_the_server_does_not_take_need_not_be_deleted(
        self, store: Store, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody here knew it before: it is the server that says so."""
        monkeypatch.setattr(PostgresSink, "_unfit", lambda sink, rows: [])
        schema = Schema.of([pa.field("id", pa.string())], "id")
        keys = [("a",), ("with\0nul",), ("b",)]
        with store.sink() as sink:
            sink.open(schema)
            rows = [{"id": name} for name in "abc"]
            sink.apply(changes(schema, rows, [], since=0, until=3), never)
            sink.apply(changes(schema, [], keys, since=3, until=6), never)
            assert read(sink) == [{"id": "c"}]


class TestMariadb(SqlKit):
    forgets = True

    @pytest.fixture
    def store(self, mariadb: MariaDB) -> Store:
        url = mariadb.url(mariadb.create_database())
        return Store(url, {"table": "orders"}, cannot=frozenset({"nan", "infinity"}))


class TestDuckdb(SqlKit):
    """A sink opens the file for each batch, of which DuckDB needs most of the time. So the file is
    kept open beside it, in `proof` never: who opens it then shares what there is."""

    from_disk: ClassVar[frozenset[str]] = frozenset({
        "test_a_look_makes_no_store",
        "test_killed_at_any_moment",
        "test_killed_inside_of_open",
        "test_nothing_is_lost_between_opens",
        "test_the_file_is_given_back_after_each_batch",
    })  # fmt: skip

    @pytest.fixture
    def store(self, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Store]:
        made = Store(f"duckdb:///{tmp_path}/shop.duckdb?table=orders")
        if PROFILE is Profile.PROOF or request.function.__name__ in self.from_disk:
            yield made
            return
        with duckdb.connect(str(tmp_path / "shop.duckdb")):
            yield made

    def test_the_file_is_given_back_after_each_batch(self, store: Store, tmp_path: Path) -> None:
        """Nobody can open it in another way for as long as somebody else has it open."""

        def is_free() -> bool:
            with duckdb.connect(str(tmp_path / "shop.duckdb"), read_only=True) as found:
                return bool(found.execute("SELECT count(*) FROM orders").fetchall())

        with store.sink() as sink:
            sink.open(SIMPLE)
            assert is_free()
            sink.apply(changes(SIMPLE, [{"id": 1, "name": "a"}], [], since=0, until=1), never)
            assert is_free()
            assert sink.position() == Position({PLACE: 1})
            assert is_free()
            assert read(sink) == [{"id": 1, "name": "a"}]
            assert is_free()
            with pytest.raises(OutOfStepError):
                sink.apply(changes(SIMPLE, [], [(1,)], since=7, until=8), never)
            assert is_free()

    def test_it_has_no_time_that_duckdb_dies_of(self, store: Store, tmp_path: Path) -> None:
        schema = Schema.of([pa.field("id", pa.int64()), pa.field("at", pa.timestamp("us"))], "id")
        # What capture makes of PostgreSQL's -infinity and infinity.
        times = pa.array([-9_223_372_036_832_400_000, 9_223_372_036_825_200_000], pa.int64())
        rows = pa.table([[1, 2], times.cast(pa.timestamp("us"))], schema=schema.arrow)
        aside: list[Refused] = []
        with store.sink() as sink:
            sink.open(schema)
            given = changes(schema, [{"id": 1}, {"id": 2}], [], since=0, until=2)
            sink.apply(replace(given, upserts=rows), aside.extend)
        assert [each.key for each in aside] == [(1,)]
        with duckdb.connect(str(tmp_path / "shop.duckdb")) as found:
            shown = found.sql("SELECT CAST(orders.at AS VARCHAR) FROM orders").fetchall()
        assert shown == [("294247-01-10 04:00:25.2",)]
