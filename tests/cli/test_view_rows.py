"""`penstock view rows`: the rows of a view as they are now, from a topic like those of views."""

from __future__ import annotations

import csv
import io
import json
import random
import threading
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer

from penstock.spark.flows.folder import Folder, Record
from penstock.spark.views import current
from tests.cli.runner import Ran, run

COLUMNS = {
    "country": "string",
    "n": "bigint",
    "total": "decimal(38,2)",
    "rate": "double",
    "last": "timestamp",
    "_key_of_more": "bigint",
}
Rows = dict[str, dict[str, Any] | None]


@pytest.fixture
def topic(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The topic of a view of a project."""
    name = f"view-{uuid4().hex[:8]}"
    (tmp_path / "penstock.toml").write_text("")
    (tmp_path / "views").mkdir()
    (tmp_path / "views" / "totals.sql").write_text(
        f"-- topic {name}\n-- table o = o(country string, n bigint) key country\n"
        "SELECT country, n FROM o\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_PROJECT", raising=False)
    return name


def write(at: str, topic: str, rows: Rows, *, commit: bool = True, end: bool = True) -> Producer:
    """Rows by key, in one transaction, as a micro-batch writes them."""
    own = {"bootstrap.servers": at, "transactional.id": uuid4().hex, "log_level": 0}
    producer = Producer(own)
    producer.init_transactions(60)
    producer.begin_transaction()
    for key, row in rows.items():
        value = None if row is None else json.dumps(row).encode()
        producer.produce(topic, value, json.dumps({"country": key}).encode())
    producer.flush(60)
    if end and commit:
        producer.commit_transaction(60)
    elif end:
        producer.abort_transaction(60)
    return producer


def row(country: str, n: int, **more: Any) -> dict[str, Any]:
    return {"country": country, "n": n, "total": None, "rate": None, "last": None, **more}


def shown(at: str, *args: str) -> list[dict[str, Any]]:
    ran = run("view", "rows", "totals", "--bootstrap", at, "--format", "json", *args).ok()
    return sorted(map(json.loads, ran.out.splitlines()), key=lambda each: each["country"])


def refused(at: str, *args: str) -> Ran:
    ran = run("view", "rows", *args, "--bootstrap", at)
    assert ran.status == 1
    assert "Traceback" not in ran.err
    return ran


def known(topic: str, columns: dict[str, str] = COLUMNS) -> None:
    """What a view leaves behind that has run in the folder."""
    Folder(Path(".penstock/flows")).write(Record("totals", columns={topic: columns}))


@pytest.mark.parametrize("compacted", [False, True])
def test_the_last_committed_record_of_each_key_is_shown(
    at: str, topic: str, monkeypatch: pytest.MonkeyPatch, compacted: bool
) -> None:
    """Random changes over several partitions and transactions, some of them aborted."""
    run("topics", "create", topic, "--partitions", "3", "--bootstrap", at).ok()
    monkeypatch.setattr(current, "_TOGETHER", 20)
    dice = random.Random(7)
    now: Rows = {}
    for batch in range(12):
        changes = {
            f"c{dice.randrange(20)}": row("", batch) if dice.random() < 0.8 else None
            for _ in range(12)
        }
        changes = {key: each and {**each, "country": key} for key, each in changes.items()}
        commits = dice.random() < 0.7
        write(at, topic, changes, commit=commits)
        now |= changes if commits else {}
    open_one = write(at, topic, {"c1": row("open", 1), "new": row("open", 2)}, end=False)
    wanted = sorted((each for each in now.values() if each), key=lambda each: each["country"])
    if compacted:
        _overtaken(monkeypatch, lambda: write(at, topic, {"c2": row("c2", 99)}))
    assert wanted
    found = shown(at)
    open_one.abort_transaction(60)
    assert found == wanted
    assert len(shown(at, "--limit", "3")) == 3


def _overtaken(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Something is written after the ends were read: it does not show."""
    real = current._Reader._last
    done: list[object] = []

    def last(self: Any, batches: Any) -> Any:
        if not done:
            done.append(change())
        return real(self, batches)

    monkeypatch.setattr(current._Reader, "_last", last)


def test_a_transaction_is_shown_wholly_or_not_at_all(at: str, topic: str) -> None:
    """What one account loses another one gets, in other partitions: the sum stays."""
    run("topics", "create", topic, "--partitions", "4", "--bootstrap", at).ok()
    dice, accounts, done = random.Random(3), [100] * 12, threading.Event()
    own = {"bootstrap.servers": at, "transactional.id": uuid4().hex, "log_level": 0}
    producer = Producer({**own, "linger.ms": 0})
    producer.init_transactions(60)

    def put(numbers: Iterable[int]) -> None:
        producer.begin_transaction()
        for number in numbers:
            value = json.dumps(row(str(number), accounts[number])).encode()
            key = json.dumps({"country": str(number)}).encode()
            producer.produce(topic, value, key, partition=number % 4)
        producer.commit_transaction(60)

    def work() -> None:
        while not done.is_set():
            one, other = dice.sample(range(12), 2)
            accounts[one] -= 1
            accounts[other] += 1
            put([one, other])

    put(range(12))
    writer = threading.Thread(target=work)
    writer.start()
    try:
        found = [list(current.rows("totals", bootstrap=at)) for _ in range(12)]
    finally:
        done.set()
        writer.join()
    assert [(len(each), sum(row["n"] for row in each)) for each in found] == [(12, 1200)] * 12


def test_what_compaction_takes_away_meanwhile_is_shown_as_it_is_now(
    at: str, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the two readings of a partition the record of a key is gone, a newer one is there."""
    write(at, topic, {"a": row("a", 1), "b": row("b", 1), "c": row("c", 1)})
    real = current._Reader._records
    readings = []

    def records(self: Any, fetcher: Any, place: Any, start: int, end: int) -> Any:
        readings.append(start)
        if len(readings) == 2:
            write(at, topic, {"a": row("a", 2), "b": None})
        for batch in real(self, fetcher, place, start, end):
            yield batch.slice(2) if len(readings) == 2 else batch

    monkeypatch.setattr(current._Reader, "_records", records)
    assert shown(at) == [row("a", 2), row("c", 1)]


def test_rows_are_chosen_by_key_and_by_conditions(at: str, topic: str) -> None:
    rows: Rows = {
        "de": row("de", 9007199254740993, total=12345678901234567890.25, rate=0.5,
                  last="2026-01-01T10:00:00.000100Z"),
        "fr": row("fr", 7, total=100, rate="NaN", last="2026-01-01T12:00:00.000000+02:00"),
        "it": row("it", -1),
    }  # fmt: skip
    write(at, topic, rows)

    def chosen(*args: str) -> list[str]:
        return [each["country"] for each in shown(at, *args)]

    for typed in (False, True):
        if typed:
            known(topic)
        assert chosen("--key", "country=de") == ["de"]
        assert chosen("--key", "country=xx") == []
        assert chosen("--where", "n > 7") == ["de"]
        assert chosen("--where", "n = 9007199254740992") == []
        assert chosen("-w", "n >= -1", "-w", "rate is null") == ["it"]
        assert chosen("--where", "country <> 'de'") == ["fr", "it"]
        assert chosen("--where", "total >= 100") == ["de", "fr"]
    # By their types: NaN is larger than anything, and two zones have one time.
    assert chosen("--where", "rate > 1e300") == ["fr"]
    assert chosen("--where", "last = 2026-01-01T10:00:00Z") == ["fr"]
    when = datetime(2026, 1, 1, 10, tzinfo=UTC)
    [found] = current.rows("totals", bootstrap=at, key={"country": "fr"}, where=["n >= 7"])
    assert (found["total"], found["last"]) == (Decimal(100), when)
    assert len(list(current.rows("totals", bootstrap=at, limit=2))) == 2
    with pytest.raises(current.NoSuchViewError, match="has no view 'other'"):
        next(current.rows("other", bootstrap=at))


def test_tables_and_csv(at: str, topic: str) -> None:
    write(at, topic, {"a,b": row("a,b", 1, rate=0.5), "c": row("c", 2)})
    known(topic)
    ran = run("view", "rows", "totals", "--bootstrap", at, "--format", "csv").ok()
    lines = sorted(csv.reader(io.StringIO(ran.out)))
    assert lines == [
        ["a,b", "1", "", "0.5", ""], ["c", "2", "", "", ""],
        ["country", "n", "total", "rate", "last"],
    ]  # fmt: skip
    ran = run("view", "rows", "totals", "--bootstrap", at, "--limit", "1").ok()
    assert "more than 1 rows" in ran.err
    assert "country" in ran.out
    assert len(ran.out.strip().splitlines()) == 3


def test_what_cannot_be_asked_for_is_told(at: str, topic: str) -> None:
    assert "has no view 'other'" in refused(at, "other").err
    told = refused(at, "totals").err
    assert f"there is no topic '{topic}'" in told
    assert "penstock run --views" in told
    write(at, topic, {"a": row("a", 1)})
    assert "'x' is no column of the view's key" in refused(at, "totals", "-k", "x=1").err
    assert "'x' is no column of the view" in refused(at, "totals", "-w", "x = 1").err
    assert "is compared with a number" in refused(at, "totals", "-w", "n = many").err
    known(topic)
    told = refused(at, "totals", "-w", "x = 1").err
    assert "the view has no column 'x'" in told
    assert "It has country, n, total" in told
    assert "'many' is no bigint, as column 'n' is" in refused(at, "totals", "-w", "n = many").err
    assert "'1' is no timestamp" in refused(at, "totals", "-w", "last < 1").err
    assert "is no condition" in refused(at, "totals", "-w", "n").err
    assert "is not COLUMN=VALUE" in refused(at, "totals", "-k", "de").err
    assert "'n' is no column of the view's key" in refused(at, "totals", "-k", "n=1").err
