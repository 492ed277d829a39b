"""Servers that crash, forget, are set up wrongly, or give way to another."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import orjson
import pymysql
import pytest

from penstock.capture.mysql.source import MysqlSource
from penstock.capture.source import (
    CaptureError,
    Check,
    DatabaseUnreachableError,
    Idle,
    Part,
    Position,
    PositionLostError,
    SourceSettings,
)
from penstock.testing.mariadb import PASSWORD, USER, MariaDB
from tests.capture.mysql.kit import changes_of, place_of, read_to_end, source_of
from tests.harness.profiles import SERVER_CRASHES
from tests.waiting import eventually


@pytest.fixture
def own_server() -> Iterator[MariaDB]:
    """A server that a test may kill."""
    with MariaDB() as server:
        yield server


def table(server: MariaDB, columns: str = "id INT PRIMARY KEY AUTO_INCREMENT, v INT") -> str:
    database = server.create_database()
    server.query(f"CREATE TABLE t ({columns})", database)
    return database


def start_of(source: MysqlSource) -> Position:
    with source.snapshot() as snapshot:
        return snapshot.position


def ids(items: Any) -> list[int]:
    return [int(c.after[0]) for c in changes_of(items) if c.after]


@pytest.mark.databases
@pytest.mark.timeout(240)
def test_after_a_crash_of_the_server_nothing_is_missing_or_twice(own_server: MariaDB) -> None:
    database = table(own_server)
    source = source_of(own_server, database)
    position = start_of(source)
    seen: list[int] = []
    for _ in range(SERVER_CRASHES):
        stop = threading.Event()
        writer = threading.Thread(target=write_until, args=(own_server, database, stop))
        writer.start()
        position = read_until_crash(own_server, source, position, seen)
        stop.set()
        writer.join()
        own_server.start()
    items, _ = read_to_end(own_server, source, position)
    seen += ids(items)
    stored = [row[0] for row in own_server.query("SELECT id FROM t ORDER BY id", database)]
    assert seen == stored


def read_until_crash(
    server: MariaDB, source: MysqlSource, position: Position, seen: list[int]
) -> Position:
    count = 0
    try:
        for item in source.stream(position):
            if isinstance(item, Part):
                seen += [int(c.after[0]) for c in item.changes if c.after]
                position = item.position
                count += 1
                if count == 20:
                    server.crash()
    except DatabaseUnreachableError:
        return position
    raise AssertionError("the stream did not tell that the server is gone")


def write_until(server: MariaDB, database: str, stop: threading.Event) -> None:
    try:
        with server.connect(database) as connection, connection.cursor() as cursor:
            while not stop.is_set():
                cursor.execute("INSERT INTO t (v) VALUES (1), (2)")
    except pymysql.MySQLError:
        return


@pytest.mark.databases
@pytest.mark.parametrize("cut", ["in an event", "between events", "in the first event"])
@pytest.mark.timeout(240)
def test_what_a_crash_left_half_written_in_the_binlog_is_no_transaction(
    own_server: MariaDB, cut: str
) -> None:
    database = table(own_server)
    source = source_of(own_server, database)
    position = start_of(source)
    own_server.query("INSERT INTO t (v) VALUES (1), (2)", database)
    file, group_at = own_server.query("SHOW MASTER STATUS")[0][:2]
    own_server.query("INSERT INTO t (v) VALUES (3), (4)", database)
    own_server.crash()
    binlog = own_server.folder / "data" / file
    # Again what the last transaction begins with: GTID, table map, rows, without the end.
    group = binlog.read_bytes()[group_at:]
    sizes = event_sizes(group)
    assert len(sizes) >= 4
    kept = {
        "in an event": sum(sizes[:-2]) + 30,
        "between events": sum(sizes[:-1]),
        "in the first event": 19,
    }[cut]
    with binlog.open("ab") as end:
        end.write(group[:kept])
    own_server.start()
    own_server.query("INSERT INTO t (v) VALUES (5)", database)
    items, reached = read_to_end(own_server, source, position)
    stored = [row[0] for row in own_server.query("SELECT id FROM t ORDER BY id", database)]
    assert ids(items) == stored
    assert [len(item.changes) for item in items if isinstance(item, Part)] == [2, 2, 1]
    # The position is one that the server knows, too.
    own_server.query("INSERT INTO t (v) VALUES (6)", database)
    items, _ = read_to_end(own_server, source, reached)
    assert len(ids(items)) == 1


def event_sizes(data: bytes) -> list[int]:
    sizes = []
    while data:
        sizes.append(int.from_bytes(data[9:13], "little"))
        data = data[sizes[-1] :]
    return sizes


@pytest.mark.databases
def test_a_binlog_that_is_torn_without_a_crash_is_told_never_skipped(own_server: MariaDB) -> None:
    database = table(own_server)
    source = source_of(own_server, database)
    position = start_of(source)
    own_server.query("INSERT INTO t (v) VALUES (1)", database)
    file, end = own_server.query("SHOW MASTER STATUS")[0][:2]
    own_server.query("INSERT INTO t (v) VALUES (2)", database)
    own_server.query("FLUSH BINARY LOGS")
    own_server.query("INSERT INTO t (v) VALUES (3)", database)
    binlog = own_server.folder / "data" / file
    binlog.write_bytes(binlog.read_bytes()[: end + 30])
    with pytest.raises(PositionLostError, match="no longer has"):
        read_to_end(own_server, source, position)


@pytest.mark.databases
def test_a_binlog_that_is_gone_is_told_never_skipped(own_server: MariaDB) -> None:
    database = table(own_server)
    source = source_of(own_server, database)
    position = start_of(source)
    own_server.query("INSERT INTO t (v) VALUES (1)", database)
    own_server.query("FLUSH BINARY LOGS")
    own_server.query("FLUSH BINARY LOGS")
    last = own_server.query("SHOW MASTER STATUS")[0][0]

    def purged() -> bool:
        # A file that was just closed may still be in use.
        own_server.query(f"PURGE BINARY LOGS TO '{last}'")
        return len(own_server.query("SHOW BINARY LOGS")) == 1

    eventually(purged)
    with pytest.raises(PositionLostError, match="no longer has"):
        next(source.stream(position))
    by_gtid = source_of(own_server, database, options={"gtid": "always"})
    with pytest.raises(PositionLostError, match="no longer has"):
        next(by_gtid.stream(position))
    beyond = {**position, "file": last, "pos": 10**6}
    with pytest.raises(PositionLostError):
        next(source.stream(beyond))
    source.confirm(position)
    assert "no longer" in source.status().details["lost"]


def test_a_reset_server_is_another_server(own_server: MariaDB, mariadb: MariaDB) -> None:
    database = table(own_server)
    position = start_of(source_of(own_server, database))
    elsewhere = MysqlSource(SourceSettings("c", mariadb.url(), options={"gtid": "never"}))
    with pytest.raises(PositionLostError, match="another server"):
        next(elsewhere.stream(position))
    with pytest.raises(PositionLostError, match="not a position"):
        next(elsewhere.stream({"lsn": 5}))


@pytest.mark.databases
def test_a_server_that_was_set_up_anew_is_another(own_server: MariaDB) -> None:
    """Same address, same identity, same file names, other transactions."""
    database = table(own_server)
    source = source_of(own_server, database, options={"gtid": "never"})
    position = start_of(source)
    own_server.query("RESET MASTER")
    own_server.query("SET GLOBAL gtid_slave_pos = '0-9-100'")
    for i in range(30):
        own_server.query(f"INSERT INTO t (v) VALUES ({i})", database)
    file, *_ = own_server.query("SHOW MASTER STATUS")[0]
    found = own_server.query(f"SHOW BINLOG EVENTS IN '{file}'")
    # A place that is there in the new file, too.
    ends = [int(row[4]) for row in found if row[2] == "Xid"]
    assert position["file"] == file
    with pytest.raises(PositionLostError, match="set up anew"):
        next(source.stream({**position, "pos": ends[3]}))


@pytest.mark.databases
@pytest.mark.timeout(240)
def test_another_server_goes_on_by_gtid(own_server: MariaDB) -> None:
    """A replica with its own binlog takes over: files and positions differ, GTIDs do not."""
    options = {"server_id": "2", "log_slave_updates": "ON", "gtid_domain_id": "0"}
    database = table(own_server)
    with MariaDB(**options) as replica:
        # So that the files of the two are not alike.
        for _ in range(3):
            replica.query("FLUSH BINARY LOGS")
        replica.query(
            f"CHANGE MASTER TO MASTER_HOST='127.0.0.1', MASTER_PORT={own_server.port},"
            f" MASTER_USER='{USER}', MASTER_PASSWORD='{PASSWORD}', MASTER_USE_GTID=slave_pos"
        )
        replica.query("START SLAVE")
        source = source_of(own_server, database)
        position = start_of(source)
        own_server.query("INSERT INTO t (v) VALUES (1), (2)", database)
        items, position = read_to_end(own_server, source, position)
        assert ids(items) == [1, 2]
        own_server.query("INSERT INTO t (v) VALUES (3)", database)
        own_server.query("INSERT INTO t (v) VALUES (4)", database)
        wanted = own_server.query("SELECT @@gtid_binlog_pos")[0][0]
        eventually(lambda: replica.query("SELECT @@gtid_slave_pos")[0][0] == wanted)
        own_server.stop()
        replica.query("STOP SLAVE")
        replica.query("INSERT INTO t (v) VALUES (5)", database)
        other = source_of(replica, database)
        items, reached = read_to_end(replica, other, position)
        assert ids(items) == [3, 4, 5]
        assert reached["server"] != position["server"]
        replica.query("INSERT INTO t (v) VALUES (6)", database)
        assert ids(read_to_end(replica, other, reached)[0]) == [6]
        # The writer was away when the replica went its own way: it does not have this GTID.
        own_server.start()
        with pytest.raises(PositionLostError):
            next(source_of(own_server, database).stream(reached))


@pytest.mark.databases
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "options",
    [
        {"log_bin_compress": "ON", "log_bin_compress_min_len": "10"},
        {"binlog_checksum": "NONE"},
        {"binlog_row_event_max_size": "1048576", "max_binlog_size": "4096"},
    ],
    ids=["compressed", "no checksum", "large events, small files"],
)
def test_binlogs_of_other_shapes(options: dict[str, str]) -> None:
    with MariaDB(**options) as server:
        database = table(server, "id INT PRIMARY KEY, v VARCHAR(200), w TEXT")
        source = source_of(server, database)
        position = start_of(source)
        for i in range(0, 1000, 100):
            values = ", ".join(f"({i + j}, REPEAT('x', 150), 'w{j}')" for j in range(100))
            server.query(f"INSERT INTO t VALUES {values}", database)
        server.query("UPDATE t SET v = CONCAT(v, id)", database)
        server.query("ALTER TABLE t ADD COLUMN longer_than_ten_bytes INT FIRST", database)
        server.query("DELETE FROM t WHERE id % 2", database)
        items, _ = read_to_end(server, source, position)
        changes = changes_of(items)
        assert [c.op for c in changes] == ["c"] * 1000 + ["u"] * 1000 + ["d"] * 500
        assert ids(items)[:1000] == list(range(1000))
        assert changes[1007].after is not None
        assert changes[1007].after[1] == b'"' + b"x" * 150 + b'7"'
        assert changes[2000].before is not None
        assert len(changes[2000].before) == 4
        where = orjson.loads(changes[-1].source)
        said = server.query(f"SHOW BINLOG EVENTS IN '{where['file']}' FROM {where['pos']} LIMIT 1")
        assert str(said[0][2]).startswith("Delete_rows")
        server.query("SET GLOBAL binlog_checksum = 'CRC32'")
        server.query("INSERT INTO t (id) VALUES (5000)", database)
        again, _ = read_to_end(server, source, position)
        assert len(changes_of(again)) == 2501


def failing(checks: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in checks if not check.ok}


@pytest.mark.databases
def test_checks_name_what_is_wrong_and_what_mends_it() -> None:
    wrong = {
        "binlog_format": "MIXED",
        "binlog_row_image": "MINIMAL",
        "binlog_row_metadata": "NO_LOG",
        "expire_logs_days": "0.01",
    }
    with MariaDB(**wrong) as server:
        database = table(server, "v INT")
        server.query("CREATE TABLE m (id INT PRIMARY KEY) ENGINE=MyISAM", database)
        source = source_of(server, database, options={"server_id": "1"})
        found = failing(source.check())
        for name, value in (("binlog_format", "ROW"), ("binlog_row_image", "FULL")):
            assert f"SET GLOBAL {name} = '{value}'" in found[name].remedy
            assert "my.cnf" in found[name].remedy
        assert "replica id" in found
        assert not found[f"key of {database}.t"].required
        assert "InnoDB" in found[f"engine of {database}.m"].remedy
        assert not found["binlog expiry"].required
        with pytest.raises(CaptureError, match="cannot be captured") as caught:
            source.setup()
        assert "SET GLOBAL" in caught.value.advice
        # The remedies do mend it.
        for name in ("binlog_format", "binlog_row_image", "binlog_row_metadata"):
            server.query(found[name].remedy.partition(";")[0])
        mended = source_of(server, database)
        assert not [check for check in mended.check() if check.required and not check.ok]
        mended.setup()
        assert mended.remove() == []


@pytest.mark.databases
def test_a_binlog_without_names_of_columns_stops_the_capture(own_server: MariaDB) -> None:
    database = table(own_server)
    source = source_of(own_server, database)
    position = start_of(source)
    own_server.query("SET GLOBAL binlog_row_metadata = 'MINIMAL'")
    own_server.query("INSERT INTO t (v) VALUES (1)", database)
    with pytest.raises(CaptureError, match="does not name the columns") as caught:
        read_to_end(own_server, source, position)
    assert "binlog_row_metadata" in caught.value.advice


def test_what_a_user_may_not_do_is_told_with_the_grant(mariadb: MariaDB, database: str) -> None:
    mariadb.query("CREATE TABLE t (id INT PRIMARY KEY)", database)
    user = f"u{database}"
    mariadb.query(f"CREATE USER {user}@'%' IDENTIFIED BY 'p'")
    mariadb.query(f"GRANT INSERT ON {database}.* TO {user}@'%'")
    url = mariadb.url(database, user=user, password="p")
    source = MysqlSource(SourceSettings(f"u{database}", url))
    found = failing(source.check())
    assert all(f"TO '{user}'@'%'" in check.remedy for check in found.values())
    assert found["BINLOG MONITOR"].remedy.startswith("GRANT BINLOG MONITOR ON *.*")
    assert found["REPLICATION SLAVE"].remedy.startswith("GRANT REPLICATION SLAVE ON *.*")
    assert found[f"SELECT on {database}.t"].remedy.startswith("GRANT SELECT ON")
    mariadb.query(f"GRANT BINLOG MONITOR, REPLICATION SLAVE ON *.* TO {user}@'%'")
    mariadb.query(f"GRANT SELECT ON {database}.* TO {user}@'%'")
    assert failing(source.check()) == {}
    position = start_of(source)
    mariadb.query("INSERT INTO t VALUES (1)", database)
    assert ids(read_to_end(mariadb, source, position)[0]) == [1]
    wrong = MysqlSource(SourceSettings("x", mariadb.url(database, user=user, password="wrong")))
    denied = failing(wrong.check())["connection"]
    assert "Access denied" in denied.found
    assert f"TO '{user}'@'%'" in denied.remedy
    empty = MysqlSource(
        SourceSettings("x", mariadb.url(f"{database}_none", user=user, password="p"))
    )
    assert f"GRANT SELECT ON `{database}_none`.*" in failing(empty.check())["tables"].remedy
    nobody = MysqlSource(SourceSettings("x", "mysql://root@127.0.0.1:1/x"))
    for step in (nobody.check, nobody.setup):
        with pytest.raises(DatabaseUnreachableError, match="does not answer") as caught:
            step()
        assert "host and port" in caught.value.advice
    mariadb.query(f"DROP USER {user}@'%'")


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("postgresql://localhost/x", {}),
        ("mysql:///x", {}),
        ("mysql://h:port/x", {}),
        ("mysql://h/x?color=red", {}),
        ("mysql://h/x?ssl_mode=maybe", {}),
        ("mysql://h/x", {"decimal": "rough"}),
        ("mysql://h/x", {"server_id": "0"}),
        ("mysql://h/x", {"slot": "a"}),
    ],
)
def test_wrong_settings_are_told_at_once(url: str, options: dict[str, str]) -> None:
    with pytest.raises(CaptureError) as caught:
        MysqlSource(SourceSettings("x", url, options=options))
    assert caught.value.advice


def test_close_ends_a_stream_that_waits(mariadb: MariaDB, database: str) -> None:
    source = MysqlSource(SourceSettings(f"c{database}", mariadb.url(database), idle_ms=30_000))
    position = start_of(source)
    started = threading.Event()
    items: list[Any] = []

    def read() -> None:
        started.set()
        items.extend(source.stream(position))

    thread = threading.Thread(target=read)
    thread.start()
    started.wait(60)
    eventually(lambda: f"{mariadb.query('SHOW SLAVE HOSTS')}".find(str(source._replica_id)) >= 0)
    source.close()
    thread.join(60)
    assert not thread.is_alive()


def test_status_tells_how_far_behind(mariadb: MariaDB, database: str) -> None:
    mariadb.query("CREATE TABLE t (id INT PRIMARY KEY, v TEXT)", database)
    source = source_of(mariadb, database)
    assert source.status().lag_bytes is None
    position = start_of(source)
    source.confirm(position)
    mariadb.query("INSERT INTO t VALUES (1, REPEAT('x', 10000))", database)
    mariadb.query("FLUSH BINARY LOGS")
    mariadb.query("INSERT INTO t VALUES (2, REPEAT('x', 10000))", database)
    lag = source.status().lag_bytes
    assert lag is not None
    assert lag > 20_000
    _, reached = read_to_end(mariadb, source, position)
    source.confirm(reached)
    after = source.status().lag_bytes
    assert after is not None
    assert after < lag


def test_quiet_tables_do_not_hold_the_position_back(mariadb: MariaDB, database: str) -> None:
    """Other tables' changes move it, so that the server may forget them."""
    source = source_of(mariadb, database)
    position = start_of(source)
    other = table(mariadb)
    mariadb.query("INSERT INTO t (v) SELECT seq FROM seq_1_to_1000", other)
    items, reached = read_to_end(mariadb, source, position)
    assert items == []
    assert place_of(reached) > place_of(position)
    assert isinstance(next(iter(source.stream(reached))), Idle)
    mariadb.query(f"DROP DATABASE {other}")


def test_a_snapshot_is_read_by_several_at_a_time(mariadb: MariaDB, database: str) -> None:
    """Connections that see the same position see the same rows, while others write."""
    for name in ("a", "b", "c"):
        mariadb.query(f"CREATE TABLE {name} (id INT PRIMARY KEY AUTO_INCREMENT, v INT)", database)
        mariadb.query(f"INSERT INTO {name} (v) SELECT seq FROM seq_1_to_2000", database)
    stop = threading.Event()

    def write() -> None:
        with mariadb.connect(database, autocommit=False) as connection:
            cursor = connection.cursor()
            while not stop.is_set():
                for name in ("a", "b", "c"):
                    cursor.execute(f"INSERT INTO {name} (v) VALUES (1)")
                connection.commit()

    writer = threading.Thread(target=write)
    writer.start()
    counts: dict[str, int] = {}
    try:
        with source_of(mariadb, database, snapshot_workers=3).snapshot() as snapshot:

            def count(place: int) -> None:
                chosen = snapshot.tables[place]
                counts[chosen.name] = sum(len(rows) for rows in snapshot.rows(chosen))

            threads = [threading.Thread(target=count, args=(i,)) for i in range(3)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert all(snapshot.estimate(chosen) is not None for chosen in snapshot.tables)
    finally:
        stop.set()
        writer.join()
    assert len(set(counts.values())) == 1
    assert counts["a"] >= 2000


def test_part_of_a_table_and_a_reader_that_stops(mariadb: MariaDB, database: str) -> None:
    mariadb.query("CREATE TABLE t (id INT PRIMARY KEY, v VARCHAR(100))", database)
    mariadb.query("INSERT INTO t SELECT seq, REPEAT('x', 100) FROM seq_1_to_20000", database)
    source = source_of(mariadb, database, snapshot_workers=1)
    with source.snapshot() as snapshot:
        (chosen,) = snapshot.tables
        rows = [row for some in snapshot.rows(chosen, where="id % 2 = 0") for row in some]
        assert len(rows) == 10_000
        with pytest.raises(CaptureError, match="syntax"):
            list(snapshot.rows(chosen, where="id ="))
        assert len(next(iter(snapshot.rows(chosen, where="id < 5")))) == 4
    with source.snapshot() as snapshot:
        (chosen,) = snapshot.tables
        begun = snapshot.rows(chosen)
        assert next(begun)
        begun.close()  # type: ignore[attr-defined]
        with pytest.raises(DatabaseUnreachableError):
            list(snapshot.rows(chosen))
