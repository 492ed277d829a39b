"""What every source must do, by nothing but its interface: the same tests on every database."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import orjson
import pytest

from penstock.capture.source import (
    Change,
    Chunk,
    ChunkRequest,
    DatabaseUnreachableError,
    Idle,
    Item,
    Part,
    Position,
    Source,
)
from penstock.capture.sources import open_source
from tests.capture.kit.databases import Database
from tests.capture.kit.following import (
    MARKS,
    Replica,
    changes,
    follow,
    has_mark,
    make_marks,
    mark,
    opened,
    settings_of,
    told,
    values,
)
from tests.waiting import eventually


@pytest.fixture
def database(each: Database) -> Database:
    make_marks(each)
    each.run("CREATE TABLE t (id $int PRIMARY KEY, n $int, v $text)")
    return each


def start(source: Source) -> Replica:
    replica = Replica()
    replica.read(source)
    return replica


def catch_up(source: Source, replica: Replica, database: Database) -> list[Item]:
    """Stream all that is committed by now."""
    return follow(source, replica.position, has_mark(mark(database)), see=replica.apply)


# What MariaDB calls a deadlock, and a lock that was waited for too long.
ROLLED_BACK = (1213, 1205)


@contextmanager
def writing(database: Database, *steps: Callable[[Database], None]) -> Iterator[threading.Event]:
    """Users who write while something else happens, until the event is set."""
    stop, failures = threading.Event(), []

    def write(step: Callable[[Database], None]) -> None:
        try:
            while not stop.is_set():
                step(database)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    try:
        yield stop
    finally:
        stop.set()
        for thread in threads:
            thread.join(60)
    assert not failures, failures


class Writer:
    """Random transactions on rows of its own, by a seed."""

    def __init__(self, seed: int, first: int) -> None:
        self._random = random.Random(seed)
        self._first = first
        self.written = 0

    def __call__(self, database: Database) -> None:
        try:
            self._write(database)
        except Exception as error:
            # InnoDB locks gaps between rows, so writers of different rows can meet: one of them is
            # rolled back, and users try again.
            if not error.args or error.args[0] not in ROLLED_BACK:
                raise
        self.written += 1

    def _write(self, database: Database) -> None:
        chance = self._random
        with database.connect() as session:
            session.run("BEGIN")
            for _ in range(chance.randint(1, 5)):
                id_ = self._first + chance.randint(0, 40)
                match chance.randint(0, 3):
                    case 0:
                        session.run(f"DELETE FROM t WHERE id = {id_}")
                    case 1:
                        session.run(f"UPDATE t SET n = n + 1 WHERE id = {id_}")
                    case 2:
                        session.run(f"DELETE FROM t WHERE id = {id_ + 50}")
                        session.run(f"UPDATE t SET id = {id_ + 50} WHERE id = {id_}")
                    case _:
                        session.run(f"DELETE FROM t WHERE id = {id_}")
                        session.run(f"INSERT INTO t VALUES ({id_}, 0, 'ü{chance.random()}')")
            session.run("COMMIT" if chance.random() < 0.8 else "ROLLBACK")


# ---- before anything is made -------------------------------------------------------------


def test_a_good_database(database: Database) -> None:
    with open_source(settings_of(database)) as source:
        assert source.kind == database.kind
        checks = source.check()
        assert checks
        assert [check for check in checks if check.required and not check.ok] == []
        assert all(check.name and check.found for check in checks)
        assert all(check.remedy for check in checks if not check.ok)
    assert database.leftovers() == []


def test_a_bad_database(database: Database) -> None:
    before = database.leftovers()
    with open_source(settings_of(database, url=database.forbidden())) as source:
        bad = [check for check in source.check() if check.required and not check.ok]
        assert bad
        assert all(check.remedy for check in bad)
    assert database.leftovers() == before


def test_a_database_that_is_not_there(database: Database) -> None:
    """It may be there later: neither looking nor setting up fails for good."""
    for step in (Source.check, Source.setup):
        with pytest.raises(DatabaseUnreachableError) as caught:
            with open_source(settings_of(database, url=database.unreachable())) as source:
                getattr(source, step.__name__)()
        assert "secret" not in f"{caught.value} {caught.value.advice}"


def test_tables(database: Database) -> None:
    database.run(
        "CREATE TABLE pair (a $int NOT NULL, b $key NOT NULL, c $double, PRIMARY KEY (b, a))",
        "CREATE TABLE other (id $int PRIMARY KEY)",
    )
    hidden = database.full_name("other")
    with open_source(settings_of(database, exclude=(hidden,))) as source:
        tables = {table.name: table for table in source.tables()}
    assert sorted(tables) == [MARKS, "pair", "t"]
    pair = tables["pair"]
    assert pair.full_name == database.full_name("pair")
    assert set(pair.key) == {"a", "b"}
    assert [column.name for column in pair.columns] == ["a", "b", "c"]
    assert [column.optional for column in pair.columns] == [False, False, True]


# ---- set up and taken away ---------------------------------------------------------------


def test_set_up_twice_and_removed_twice(database: Database) -> None:
    with opened(database) as source:
        source.setup()
        made = database.leftovers()
    with opened(database) as source:
        assert database.leftovers() == made
        replica = start(source)
        database.run("INSERT INTO t VALUES (1, 1, 'a')")
        catch_up(source, replica, database)
        replica.compare(database, "t")
    with open_source(settings_of(database)) as source:
        removed = source.remove()
        assert bool(removed) == bool(made)
        assert database.leftovers() == []
        assert source.remove() == []
    database.run("INSERT INTO t VALUES (2, 1, 'a')")


def test_two_captures_of_one_database(database: Database) -> None:
    with opened(database) as one, opened(database, name="another") as other:
        replicas = [start(one), start(other)]
        database.run("INSERT INTO t VALUES (1, 1, 'a')")
        for source, replica in zip((one, other), replicas, strict=True):
            catch_up(source, replica, database)
            replica.compare(database, "t")
        one.remove()
        database.run("UPDATE t SET n = 2")
        catch_up(other, replicas[1], database)
        replicas[1].compare(database, "t")
        other.remove()
    assert database.leftovers() == []


# ---- snapshot and stream -----------------------------------------------------------------


def test_snapshot_and_stream_are_the_table(database: Database, seed: int) -> None:
    """The snapshot is taken, and the stream read, while users write."""
    writers = [Writer(seed + number, first=100 * number) for number in range(2)]
    with opened(database) as source, writing(database, *writers) as stop:
        eventually(lambda: all(writer.written >= 5 for writer in writers))
        replica = start(source)
        goal = [writer.written + 15 for writer in writers]

        def enough(_: Item) -> bool:
            return all(w.written >= least for w, least in zip(writers, goal, strict=True))

        follow(source, replica.position, enough, see=replica.apply)
        stop.set()
        catch_up(source, replica, database)
    # Whoever writes has ended by now; the rest is read from where the replica stands.
    with opened(database) as source:
        catch_up(source, replica, database)
        replica.compare(database, "t", MARKS)


def test_resumed_at_every_position(database: Database) -> None:
    """What comes after a position is the same, whenever and however often it is read."""
    with opened(database) as source:
        position = start(source).position
    database.run(
        "INSERT INTO t VALUES (1, 0, 'a')",
        "BEGIN",
        "INSERT INTO t VALUES (2, 0, 'b')",
        "UPDATE t SET n = 1",
        "COMMIT",
        "UPDATE t SET id = 3 WHERE id = 2",
        "ALTER TABLE t ADD COLUMN w $text",
        "UPDATE t SET w = 'w'",
        "DELETE FROM t WHERE id = 1",
    )
    last = mark(database)
    places: list[tuple[Position, int]] = [(position, 0)]
    seen: list[Change] = []

    def note(item: Item) -> None:
        if isinstance(item, Part):
            seen.extend(changes([item]))
        if isinstance(item, Idle) or (isinstance(item, Part) and item.is_last):
            places.append((item.position, len(seen)))

    with opened(database) as source:
        follow(source, position, has_mark(last), see=note)
    assert len(seen) >= 7
    for place, passed in places[:-1]:
        with opened(database) as source:
            rest = changes(follow(source, place, has_mark(last)))
        assert [told(change) for change in rest] == [told(change) for change in seen[passed:]]


def test_parts_of_a_large_transaction(database: Database) -> None:
    """However many parts it has, it begins once and ends once, and nothing comes in between."""
    with opened(database) as source:
        replica = start(source)
        rows = ", ".join(f"({number}, 0, '{'v' * 100}')" for number in range(2_000))
        database.run(
            "BEGIN", f"INSERT INTO t VALUES {rows}", "UPDATE t SET n = 7", "COMMIT",
            "DELETE FROM t WHERE id >= 100",
        )  # fmt: skip
        items = catch_up(source, replica, database)
        replica.compare(database, "t")
    begun = ""
    for item in items:
        assert isinstance(item, Part)
        assert item.is_first == (not begun)
        assert not begun or item.transaction == begun
        begun = "" if item.is_last else item.transaction
    assert [change.op for change in changes(items)] == (
        ["c"] * 2_000 + ["u"] * 2_000 + ["d"] * 1_900
    )


# ---- nothing that is not committed -------------------------------------------------------


def test_only_what_is_committed(database: Database) -> None:
    with opened(database) as source, database.connect() as session:
        replica = start(source)
        session.run("BEGIN")
        session.run("INSERT INTO t VALUES (1, 1, 'not yet')")
        looks = iter(range(10))
        early = follow(source, replica.position, lambda item: next(looks, None) is None)
        assert changes(early) == []
        session.run("COMMIT")
        session.run("BEGIN")
        session.run("INSERT INTO t VALUES (2, 1, 'never')")
        session.run("ROLLBACK")
        session.run("BEGIN")
        session.run("INSERT INTO t VALUES (3, 1, 'kept')")
        session.run("SAVEPOINT s")
        session.run("UPDATE t SET v = 'never'")
        session.run("INSERT INTO t VALUES (4, 1, 'never')")
        session.run("ROLLBACK TO SAVEPOINT s")
        session.run("COMMIT")
        items = catch_up(source, replica, database)
    assert [told(change)[3] for change in changes(items)] == [
        {"id": 1, "n": 1, "v": "not yet"},
        {"id": 3, "n": 1, "v": "kept"},
    ]


def test_order_within_a_key(database: Database) -> None:
    """Each change of a row follows the one that made it what it was."""
    database.run("INSERT INTO t VALUES (1, 0, 'a')", "INSERT INTO t VALUES (2, 0, 'a')")

    def count(database: Database) -> None:
        with database.connect() as session:
            for id_ in (1, 2):
                session.run(f"UPDATE t SET n = n + 1 WHERE id = {id_}")

    last = {1: 0, 2: 0}
    with opened(database) as source:
        position = start(source).position

        def see(item: Item) -> None:
            for change in changes([item]):
                after = values(change.table, change.after or ())
                assert after["n"] == last[after["id"]] + 1
                last[after["id"]] = after["n"]

        with writing(database, count, count, count):
            follow(source, position, lambda item: min(last.values()) >= 30, see=see)


# ---- rows that are asked for -------------------------------------------------------------


def test_chunks_while_users_write(database: Database, seed: int) -> None:
    """A table that is read in pieces while it changes is right at every place of the stream."""
    for number in range(3):
        rows = ", ".join(f"({1000 * number + id_}, 0, 'old')" for id_ in range(300))
        database.run(f"INSERT INTO t VALUES {rows}")
    name = database.full_name("t")
    writers = [Writer(seed + number, first=1000 * number) for number in range(2)]
    ended: list[bool] = []
    with opened(database) as source, writing(database, *writers) as stop:
        replica = start(source)
        # Only the pieces tell what is in it.
        replica.tables["t"] = {}
        known = Replica()
        known.tables["t"] = {}
        source.ask(ChunkRequest("0", name, None, 50))

        def see(item: Item) -> None:
            if isinstance(item, Chunk):
                assert not item.problem
                known.upsert(item.table, item.rows)
                if item.is_last:
                    ended.append(True)
                else:
                    request = ChunkRequest(str(len(known.tables["t"])), name, item.last_key, 50)
                    source.ask(request)
            elif isinstance(item, Part):
                for change in item.changes:
                    _lenient(known, change)
            if not isinstance(item, Chunk):
                position = item.position
                if isinstance(item, Idle) or item.is_last:
                    known.position = position

        follow(source, replica.position, lambda item: bool(ended), see=see)
        stop.set()
    with opened(database) as source:
        follow(source, known.position, has_mark(mark(database)), see=see)
    known.compare(database, "t")


def _lenient(replica: Replica, change: Change) -> None:
    """Apply a change to a table of which only some rows are known yet."""
    table = change.table
    rows = replica.tables.setdefault(table.name, {})
    for row in (change.before or change.after, change.before):
        if row is not None:
            found = values(table, row)
            rows.pop(tuple(found[name] for name in table.key), None)
    if change.after is not None:
        replica.upsert(table, [change.after])


def test_a_chunk_that_cannot_be_read(database: Database) -> None:
    with opened(database) as source:
        position = start(source).position
        source.ask(ChunkRequest("1", database.full_name("nosuchtable"), None, 10))
        (item,) = follow(source, position, lambda item: isinstance(item, Chunk))
        assert isinstance(item, Chunk)
        assert item.problem
        assert item.is_last


# ---- confirmed, and looked at ------------------------------------------------------------


def test_confirmed_and_gone_on(database: Database) -> None:
    """What is confirmed may be forgotten; what comes after it may not."""
    with opened(database) as source:
        replica = start(source)
        source.confirm(replica.position)
        for number in range(3):
            database.run(f"INSERT INTO t VALUES ({number}, 0, 'a')", "UPDATE t SET n = n + 1")
            catch_up(source, replica, database)
            source.confirm(replica.position)
            assert source.status().details is not None
    database.run("INSERT INTO t VALUES (9, 0, 'later')")
    with opened(database) as source:
        status = source.status()
        assert status.position is None or orjson.dumps(dict(status.position))
        for size in (status.retained_bytes, status.lag_bytes):
            assert size is None or size >= 0
        items = catch_up(source, replica, database)
        assert [told(change)[1:] for change in changes(items)] == [
            ("c", None, {"id": 9, "n": 0, "v": "later"})
        ]
        replica.compare(database, "t")


def test_closed_from_another_thread(database: Database) -> None:
    with opened(database) as source:
        position = start(source).position
        seen = threading.Event()
        ended = threading.Event()

        def read() -> None:
            for _ in source.stream(position):
                seen.set()
            ended.set()

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        assert seen.wait(60)
        source.close()
        assert ended.wait(60)
        thread.join(60)


# ---- tables that change ------------------------------------------------------------------


def test_truncated(database: Database) -> None:
    database.run("INSERT INTO t VALUES (1, 0, 'a'), (2, 0, 'b')")
    with opened(database) as source:
        replica = start(source)
        database.run("$truncate t", "INSERT INTO t VALUES (1, 5, 'c')")
        items = catch_up(source, replica, database)
        replica.compare(database, "t")
    ops = "".join(change.op for change in changes(items))
    assert ops == ("tc" if database.truncates else "ddc")


def test_columns_that_come_and_are_renamed(database: Database) -> None:
    """Rows are told with the columns that the table had when they were written."""
    database.run("INSERT INTO t VALUES (1, 0, 'a')")
    with opened(database) as source:
        replica = start(source)
        database.run("INSERT INTO t VALUES (2, 0, 'b')")
        database.run("ALTER TABLE t ADD COLUMN w $text")
        database.run("INSERT INTO t (id, n, v, w) VALUES (3, 0, 'c', 'w')")
        if database.kind == "sqlite":
            # It follows when it is looked at, and reads again what it must.
            catch_up(source, replica, database)
        database.run("ALTER TABLE t RENAME COLUMN v TO u")
        database.run("UPDATE t SET n = 1", "INSERT INTO t VALUES (4, 0, 'd', 'x')")
        items = catch_up(source, replica, database)
        replica.compare(database, "t")
    last = [told(change)[3] for change in changes(items)][-4:]
    assert last == [
        {"id": 1, "n": 1, "u": "a", "w": None},
        {"id": 2, "n": 1, "u": "b", "w": None},
        {"id": 3, "n": 1, "u": "c", "w": "w"},
        {"id": 4, "n": 0, "u": "d", "w": "x"},
    ]


def test_a_table_that_comes_later(database: Database) -> None:
    with opened(database) as source:
        replica = start(source)
        database.run("CREATE TABLE later (id $int PRIMARY KEY, v $text)")
    # A capture that begins anew finds it, and tells what happens from then on.
    with opened(database) as source:
        assert database.full_name("later") in {table.full_name for table in source.tables()}
        database.run("INSERT INTO later VALUES (1, 'a')", "UPDATE later SET v = 'b'")
        catch_up(source, replica, database)
        replica.compare(database, "later")


def test_dropped_and_made_anew(database: Database) -> None:
    database.run("INSERT INTO t VALUES (1, 0, 'a')")
    with opened(database) as source:
        replica = start(source)
        database.run("DELETE FROM t")
        catch_up(source, replica, database)
        database.run("DROP TABLE t", "CREATE TABLE t (id $int PRIMARY KEY, z $double)")
    with opened(database) as source:
        database.run("INSERT INTO t VALUES (1, 0.5)")
        catch_up(source, replica, database)
        replica.compare(database, "t")
