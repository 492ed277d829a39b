"""`penstock verify` on a real capture and real stores, under a writer that never stops."""

from __future__ import annotations

import random
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.compute as pc
import pytest

from penstock.capture.delivery.capture import Capture
from penstock.capture.delivery.control import state_of
from penstock.capture.delivery.state import DONE, State
from penstock.cli.capture_project import configured
from penstock.cli.project import load
from penstock.cli.sinks_file import named
from penstock.cli.verifying import Progress, Report, captured, verify
from penstock.cli.verifying.captured import reached
from penstock.cli.verifying.origins import as_records, log_ends, records_since
from penstock.client.connection import Cluster
from penstock.client.topics import create
from penstock.errors import PenstockError
from penstock.sinks.contract import Position
from penstock.spark.sinking.findings import Findings
from penstock.spark.sinking.learning import parser_of
from penstock.spark.sinking.letters import Letters
from tests.cli.runner import run
from tests.harness.profiles import VERIFIED_ROWS, some
from tests.spark.sinking.changelog import Changelog
from tests.waiting import eventually

pytestmark = pytest.mark.timeout(300)
ROWS = VERIFIED_ROWS
# The writer leaves rows from here on alone; the faults are in them.
QUIET = ROWS * 2 // 3
WRITES = ROWS // 10
STORES = {
    "sqlite": "sqlite:///{name}.db",
    "duckdb": "duckdb:///{name}.duckdb?table={name}",
    "tantivy": "tantivy:///{name}-index",
}
Tamper = Callable[[pa.Table], pa.Table]


def nothing(rows: pa.Table) -> pa.Table:
    return rows


class Feeder:
    """Feeds a sink as its query does, without Spark."""

    def __init__(self, name: str, bootstrap: str, tamper: Tamper = nothing) -> None:
        self._spec = named(load(), name)
        self._bootstrap = bootstrap
        self._tamper = tamper
        self._stop = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._guarded, daemon=True)

    def __enter__(self) -> Feeder:
        self._thread.start()
        eventually(lambda: self._failure is not None or _exists(self._spec.name))
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def once(self) -> None:
        """Feed what is there now, in this thread."""
        self._run(once=True)

    def _guarded(self) -> None:
        try:
            self._run()
        except BaseException as failure:
            self._failure = failure

    def _run(self, *, once: bool = False) -> None:
        topic = self._spec.topic
        with Cluster(self._bootstrap) as cluster, self._spec.sink() as sink:
            parser = parser_of(self._spec, cluster, topic, sink.stored_schema())
            at = sink.open(parser.schema)
            while not self._stop.wait(0.05):
                end = log_ends(cluster, topic)
                if at.reaches(end):
                    if once:
                        return
                    continue
                # Where only the end of a transaction was left, there are none.
                parts = records_since(cluster, topic, at if at.offsets else None)
                records = pa.concat_tables([as_records([], [], topic), *parts])
                parsed = [parser.parse(records)]
                # What was read may go beyond the end that was asked for before.
                last = records.group_by("partition").aggregate([("offset", "max")]).to_pylist()
                read = Position({(topic, r["partition"]): r["offset_max"] + 1 for r in last})
                position = at.merged(end).merged(read)
                findings = Findings(parser.schema, parsed)
                if findings.unknown:
                    # The table was altered.
                    parser = parser_of(self._spec, cluster, topic, sink.stored_schema())
                    sink.open(parser.schema)
                    continue
                Letters(cluster, self._spec.letters, self._spec.name).unread(findings.letters)
                changes = findings.changes(at, position)
                changes = type(changes)(
                    self._tamper(changes.upserts), changes.deletes, position, at,
                    changes.upserted_at, changes.deleted_at,
                )  # fmt: skip
                sink.apply(changes, lambda refused: None)
                at = position


def spoilt(rows: pa.Table) -> pa.Table:
    """One row with another value, and another row under a key that is nowhere: so one is missing,
    one is too many, and one is different."""
    ids = rows.column("id")
    name = pc.if_else(pc.equal(ids, QUIET + 1), "spoilt", rows.column("name"))
    moved = pc.if_else(pc.equal(ids, QUIET + 2), pa.scalar(999_999, ids.type), ids)
    rows = rows.set_column(rows.schema.get_field_index("name"), rows.schema.field("name"), name)
    return rows.set_column(rows.schema.get_field_index("id"), rows.schema.field("id"), moved)


class Writer:
    """Changes rows of the table all the time, one of them very often."""

    def __init__(self, path: Path, seed: int) -> None:
        self._path = path
        self._random = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.count = 0

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        with closing(sqlite3.connect(self._path, timeout=60)) as database:
            while not self._stop.wait(0.003):
                self.count += 1
                key = self._random.randrange(QUIET)
                chance = self._random.random()
                database.execute("UPDATE orders SET price = ? WHERE id = 7", (self.count / 8,))
                if chance < 0.2 and key != 7:
                    database.execute("DELETE FROM orders WHERE id = ?", (key,))
                else:
                    database.execute(
                        "INSERT OR REPLACE INTO orders VALUES (?, ?, ?, ?, ?)",
                        (key, f"näme {self.count} 🦆", self.count / 4, None, bytes([key % 256])),
                    )
                database.commit()


@pytest.fixture
def capture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> Iterator[str]:
    """A capture that runs, of a database with one table; its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)
    name = f"s{uuid4().hex[:8]}"
    with closing(sqlite3.connect("shop.db")) as database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute(
            "CREATE TABLE orders (id INTEGER PRIMARY KEY, name TEXT, price REAL, note TEXT,"
            " mark BLOB)"
        )
        database.executemany(
            "INSERT INTO orders VALUES (?, ?, ?, ?, ?)",
            [(n, f"name {n}", n / 3, None if n % 3 else f"note {n}", b"\0\xff") for n in
             range(ROWS)],
        )  # fmt: skip
        database.commit()
    lines = [
        f"[capture.{name}]", 'url = "sqlite:///shop.db"', "partitions = 2",
    ]  # fmt: skip
    for kind, url in STORES.items():
        for sink in (kind, f"bad_{kind}"):
            lines += [f"[sinks.{sink}]", f'topic = "{name}.orders"',
                      f'url = "{url.format(name=sink)}"']  # fmt: skip
    lines += [
        "[sinks.hook]",
        f'topic = "{name}.orders"',
        'url = "webhook+http://127.0.0.1:1/x?secret=whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw&state=hook.db"',
    ]
    Path("penstock.toml").write_text("\n".join(lines) + "\n")
    with running(name, at):
        yield name


@contextmanager
def running(name: str, at: str) -> Iterator[None]:
    stop = threading.Event()
    capture = Capture(configured(load(), name), at)
    thread = threading.Thread(target=capture.run, args=(stop,), daemon=True)
    thread.start()
    try:
        with Cluster(at) as cluster:
            eventually(lambda: (state_of(cluster, name) or State()).snapshot == DONE)
        yield
    finally:
        stop.set()
        thread.join()


def found(report: Report) -> list[tuple[str, Any, list[str]]]:
    return [(each.kind, each.key["id"], sorted(each.columns)) for each in report.differences]


WRONG = [
    ("other", QUIET + 1, ["name"]),
    ("missing", QUIET + 2, []),
    ("extra", 999_999, []),
]


@pytest.mark.parametrize("kind", some(["sqlite", "tantivy"], test=1))
def test_faults_are_found_and_nothing_else(kind: str, capture: str, at: str, seed: int) -> None:
    told: list[Progress] = []
    with ExitStack() as stack:
        writer = stack.enter_context(Writer(Path("shop.db"), seed))
        stack.enter_context(Feeder(kind, at))
        stack.enter_context(Feeder(f"bad_{kind}", at, spoilt))
        before = writer.count
        # As often as it takes until much was written meanwhile.
        while writer.count - before < WRITES:
            report = verify(load(), f"{capture}.orders", kind, timeout_s=90, bootstrap=at,
                            on_progress=told.append)  # fmt: skip
            assert report.equal, report.differences
            assert report.rows > ROWS - QUIET
            wrong = verify(load(), f"{capture}.orders", f"bad_{kind}", timeout_s=90, bootstrap=at)
            assert found(wrong) == WRONG
            assert wrong.count == 3
    assert {each.phase for each in told} >= {"source", "log", "sink"}
    assert wrong.differences[0].columns["name"] == (f"name {QUIET + 1}", "spoilt")


def test_at_rest(capture: str, at: str) -> None:
    # A file of DuckDB is for one process at a time, so nobody feeds it meanwhile.
    Feeder("duckdb", at).once()
    Feeder("bad_duckdb", at, spoilt).once()
    report = verify(load(), f"{capture}.orders", "duckdb", timeout_s=90, bootstrap=at)
    assert (report.equal, report.rows, report.rounds) == (True, ROWS, 1)
    wrong = verify(load(), f"{capture}.orders", "bad_duckdb", timeout_s=90, bootstrap=at)
    assert found(wrong) == WRONG


def _exists(name: str) -> bool:
    with named(load(), name).sink() as sink:
        at = sink.position()
        return at is not None and bool(at.offsets)


def test_the_command(capture: str, at: str, seed: int) -> None:
    source = f"{capture}.orders"
    assert "is not there yet" in refused(source, "sqlite")
    with Feeder("sqlite", at):
        ran = run("verify", source, "sqlite", "--json").ok()
        assert ran.json["equal"]
        assert ran.json["rows"] == ROWS
        run("verify", f"topic:{source}", "sqlite").ok()
        run("verify", source, f"sqlite:///{Path.cwd()}/sqlite.db?table=sqlite").ok()
    # Somebody else has written to the store: behind its back, no position moves.
    with closing(sqlite3.connect("sqlite.db", timeout=60)) as store, store:
        store.execute("UPDATE sqlite SET price = 1, note = 'x' WHERE id = 5")
        store.execute("DELETE FROM sqlite WHERE id = ?", (ROWS - 1,))
        store.execute("INSERT INTO sqlite (id, name) VALUES (-1, 'extra')")
    for each in (source, f"topic:{source}"):
        ran = run("verify", each, "sqlite", "--json")
        assert ran.status == 1, ran.err
        rows = {(item["kind"], item["key"]["id"]): item for item in ran.json["differences"]}
        assert set(rows) == {("other", 5), ("missing", ROWS - 1), ("extra", -1)}
        assert set(rows["other", 5]["columns"]) == {"price", "note"}
        assert rows["other", 5]["columns"]["note"] == {"source": None, "sink": "x"}
    ran = run("verify", source, "sqlite", "--limit", "1")
    assert ran.status == 1
    assert "DIFFERENT" in ran.err
    assert "2 keys more" in ran.err
    # Larger tables are compared in shares; the answer is the same.
    shared = verify(load(), source, "sqlite", timeout_s=60, bootstrap=at, share_rows=ROWS // 6)
    assert (shared.count, shared.rows) == (3, ROWS)
    with closing(sqlite3.connect("shop.db", timeout=60)) as database, database:
        database.execute("UPDATE orders SET name = 'later' WHERE id = 0")
    # On a slow machine the time may be over before the source is read.
    times = ("500ms", "10s", "60s")
    assert any("has not reached" in refused(source, "sqlite", "--timeout", each) for each in times)


def refused(*args: str) -> str:
    ran = run("verify", *args)
    assert ran.status == 2, (ran.status, ran.err)
    assert "Traceback" not in ran.err
    return ran.err


def test_what_cannot_be_compared(capture: str, at: str, topic: str, seed: int) -> None:
    for source, sink, told in (
        ("orders", "sqlite", "is no source"),
        ("other.orders", "sqlite", "has no capture 'other'"),
        (f"{capture}.nothing", "sqlite", "no table 'nothing'"),
        (f"{capture}.orders", "nosuch", "there is no sink 'nosuch'"),
        (f"{capture}.orders", "hook", "cannot be read back"),
        (f"{capture}.orders", "nosql:///x", "no kind of store"),
        ("topic:nosuch", "sqlite", "topic nosuch does not exist"),
    ):
        assert told in refused(source, sink)
    Changelog(at, topic, seed).feed(10)
    assert "is fed from the topic" in refused(f"topic:{topic}", "sqlite")


def test_a_capture_that_does_not_run_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"s{uuid4().hex[:8]}"
    with closing(sqlite3.connect("shop.db")) as database, database:
        database.execute("PRAGMA journal_mode=WAL")
        database.execute("CREATE TABLE orders (id INTEGER PRIMARY KEY, name TEXT)")
        database.execute("INSERT INTO orders VALUES (1, 'a')")
    Path("penstock.toml").write_text(
        f'[capture.{name}]\nurl = "sqlite:///shop.db"\n'
        f'[sinks.s]\ntopic = "{name}.orders"\nurl = "sqlite:///s.db"\n'
    )
    assert "has never run" in refused(f"{name}.orders", "s")
    with running(name, at), Feeder("s", at):
        run("verify", f"{name}.orders", "s").ok()
    # What is in the log is enough, whoever runs.
    run("verify", f"{name}.orders", "s").ok()
    with closing(sqlite3.connect("shop.db", timeout=60)) as database, database:
        database.execute("INSERT INTO orders VALUES (2, 'b')")
    monkeypatch.setattr(captured, "GRACE_S", 0.5)
    assert "does not run" in refused(f"{name}.orders", "s")


def test_positions_of_databases() -> None:
    assert reached("sqlite", {"id": 1, "seq": 5}, {"id": 1, "seq": 5})
    assert not reached("postgresql", {"system": "a", "lsn": 4}, {"system": "a", "lsn": 5})
    older = {"server": "s", "file": "bin.000009", "pos": 900}
    newer = {"server": "s", "file": "bin.000010", "pos": 4}
    assert reached("mysql", newer, older)
    assert not reached("mysql", older, newer)
    with pytest.raises(PenstockError, match="another database"):
        reached("sqlite", {"id": 1, "seq": 5}, {"id": 2, "seq": 5})


def test_an_empty_topic_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"t-{uuid4().hex[:8]}"
    with Cluster(at) as cluster:
        create(cluster, name)
    assert "is not there yet" in refused(f"topic:{name}", "sqlite:///none.db?table=x")
