"""Delta and Parquet pass the tests of all stores, and are read by others."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import deltalake
import duckdb
import pyarrow as pa
import pytest

from penstock.errors import ConfigError
from penstock.sinks import (
    FencedError,
    Position,
    Schema,
    SchemaChangedError,
    Sink,
    StoreError,
    StoreUnreachableError,
    delta,
    objects,
    open_sink,
)
from penstock.sinks.delta import DeltaSink
from penstock.sinks.parquet import ParquetSink
from penstock.testing.sinks import (
    ALL,
    PLACE,
    SIMPLE,
    Load,
    Row,
    Store,
    changes,
    never,
    ordered,
    read,
    same,
)
from tests.harness.profiles import BUCKET_BATCHES
from tests.sinks.kit import StoreKit
from tests.waiting import eventually

ORDERS = Schema.of(
    [
        pa.field("id", pa.int64()),
        pa.field("country", pa.string()),
        pa.field("total", pa.decimal128(10, 2)),
    ],
    "id",
)


class TestDelta(StoreKit):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return Store(f"delta:///{tmp_path}/orders", {"optimize_every": 3})


class TestParquet(StoreKit):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return Store(f"parquet:///{tmp_path}/orders", {"compact_files": 4})


def some(chance: random.Random, at: int, model: dict[int, Row]) -> tuple[list[Row], list[int]]:
    """Rows to put in and keys to take out; the model has them already."""
    numbers = chance.sample(range(60), 30)
    rows: list[Row] = [
        {"id": number, "country": chance.choice(["DE", "FR", None]), "total": None}
        for number in numbers[:20]
    ]
    gone = numbers[20:]
    model.update({row["id"]: row for row in rows})
    for number in gone:
        model.pop(number, None)
    return rows, gone


# ---- Delta -----------------------------------------------------------------------------------


def orders(path: Path, **options: object) -> DeltaSink:
    made = open_sink(f"delta:///{path}/orders", options)
    assert isinstance(made, DeltaSink)
    return made


def test_delta_is_partitioned_and_read_by_others(tmp_path: Path, seed: int) -> None:
    chance, model = random.Random(seed), dict[int, Row]()
    with orders(tmp_path, partition_by="country", optimize_every=2) as sink:
        sink.open(ORDERS)
        for at in range(6):
            rows, gone = some(chance, at, model)
            made = changes(ORDERS, rows, [(n,) for n in gone], since=at * 30, until=at * 30 + 30)
            # Rows move from one partition to another.
            sink.apply(made, never)
        wanted = [model[key] for key in sorted(model)]
        assert read(sink) == wanted
    table = deltalake.DeltaTable(tmp_path / "orders")
    assert table.metadata().partition_columns == ["country"]
    # Another reader, that of pyarrow.
    found = table.to_pyarrow_table().sort_by("id").to_pylist()
    assert found == wanted
    # History: the table as it was after the first batch.
    versions = [v for v in range(table.version() + 1) if _offset(tmp_path, v) == 30]
    assert versions
    table.load_as_version(versions[0])
    assert table.count() == 20


def _offset(path: Path, version: int) -> int | None:
    table = deltalake.DeltaTable(path / "orders", version=version)
    return table.transaction_version(f"penstock:{PLACE[0]}:{PLACE[1]}")


def test_delta_forgets_old_files_when_asked(tmp_path: Path) -> None:
    with orders(tmp_path, retention_hours=0, optimize_every=0) as sink:
        sink.open(SIMPLE)
        for at in range(4):
            row = {"id": 1, "name": f"n{at}"}
            sink.apply(changes(SIMPLE, [row], [], since=at, until=at + 1), never)
        files = list((tmp_path / "orders").glob("*.parquet"))
        would = sink.vacuum(dry_run=True)
        assert len(would) == len(files) - 1 == 3
        assert sorted(sink.vacuum()) == sorted(would)
        sink.optimize()
        assert read(sink) == [{"id": 1, "name": "n3"}]
        assert sink.position() == Position({PLACE: 4})


def test_delta_goes_on_beside_commits_of_others(tmp_path: Path) -> None:
    with orders(tmp_path) as sink:
        sink.open(SIMPLE)
        sink.apply(changes(SIMPLE, [{"id": 1, "name": "a"}], [], since=0, until=1), never)
        table = deltalake.DeltaTable(tmp_path / "orders")
        table.optimize.compact()
        table.alter.set_table_properties({"delta.appendOnly": "false"})
        sink.apply(changes(SIMPLE, [{"id": 2, "name": "b"}], [], since=1, until=2), never)
        assert [row["id"] for row in read(sink)] == [1, 2]
        # Checkpoints of the log keep the position.
        deltalake.DeltaTable(tmp_path / "orders").create_checkpoint()
        assert sink.position() == Position({PLACE: 2})


def test_delta_commits_only_what_follows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer comes between our look at the table and our commit."""
    with orders(tmp_path) as old, orders(tmp_path) as new:
        old.open(SIMPLE)
        old.apply(changes(SIMPLE, [{"id": 1, "name": "a"}], [], since=0, until=1), never)
        write = DeltaSink._write
        came = iter([True])

        def late(sink: DeltaSink, *given: object) -> None:
            if sink is old and next(came, False):
                new.open(SIMPLE)
                row = {"id": 1, "name": "new"}
                new.apply(changes(SIMPLE, [row], [], since=1, until=2), never)
            write(sink, *given)  # type: ignore[arg-type]

        monkeypatch.setattr(DeltaSink, "_write", late)
        with pytest.raises(FencedError):
            old.apply(changes(SIMPLE, [], [(1,)], since=1, until=3), never)
        assert read(new) == [{"id": 1, "name": "new"}]
        assert new.position() == Position({PLACE: 2})


def test_delta_fences_before_a_new_partition_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first commit of a partition is two: another writer comes before the first of them."""
    with orders(tmp_path) as old, orders(tmp_path) as new:
        old.open(SIMPLE)
        know, came = delta._know, iter([True])

        def late(*given: Any) -> None:
            if next(came, False):
                new.open(SIMPLE)
            know(*given)

        monkeypatch.setattr(delta, "_know", late)
        with pytest.raises(FencedError):
            old.apply(changes(SIMPLE, [{"id": 1, "name": "a"}], [], since=0, until=1), never)
        assert read(new) == []
        assert new.position() == Position()


@pytest.mark.parametrize("first", [SIMPLE.fields, SIMPLE.fields[:1]])
def test_delta_tells_of_names_that_differ_only_in_case(
    tmp_path: Path, first: tuple[pa.Field, ...]
) -> None:
    both = Schema.of([*SIMPLE.fields, pa.field("Name", pa.string())], "id")
    with orders(tmp_path) as sink:
        with pytest.raises(StoreError, match=r"'name' and 'Name'") as told:
            sink.open(both)
        assert "fields" in told.value.advice
        assert sink.position() is None
        sink.open(Schema.of(first, "id"))
        with pytest.raises(StoreError, match=r"'name' and 'Name'"):
            sink.open(both)
        assert sink.stored_schema() == Schema.of(first, "id")


def test_delta_tells_what_is_wrong(tmp_path: Path) -> None:
    deltalake.write_deltalake(tmp_path / "orders", pa.table({"id": [1]}))
    with orders(tmp_path) as sink, pytest.raises(StoreError, match="not made"):
        sink.open(SIMPLE)
    with orders(tmp_path / "new", partition_by="nothing") as sink, pytest.raises(ConfigError):
        sink.open(SIMPLE)
    with orders(tmp_path / "other") as sink:
        sink.open(ORDERS)
    with orders(tmp_path / "other", partition_by="country") as sink:
        with pytest.raises(SchemaChangedError, match="partitioned"):
            sink.open(ORDERS)
    gone = (
        "delta+s3://bucket/orders?endpoint=http://127.0.0.1:1&access_key_id=a&secret_access_key=b"
    )
    with open_sink(gone) as lost, pytest.raises(StoreUnreachableError):
        lost.position()
    for url in ("delta://host/x", "delta:///", "delta+s3://bucket", "parquet:///x?compression=rar"):
        with pytest.raises(ConfigError):
            open_sink(url)


# ---- Parquet ---------------------------------------------------------------------------------


def test_parquet_is_read_by_others(tmp_path: Path, seed: int) -> None:
    chance, model = random.Random(seed), dict[int, Row]()
    with open_sink(f"parquet:///{tmp_path}/orders?compact_files=4") as sink:
        sink.open(ORDERS)
        with sink.beside() as anew:
            anew.open(ORDERS)
            for at in range(9):
                rows, gone = some(chance, at, model)
                keys = [(n,) for n in gone]
                made = changes(ORDERS, rows, keys, since=at * 30, until=at * 30 + 30)
                anew.apply(made, never)
            anew.switch()
        sink.open(ORDERS)
        rows, gone = some(chance, 9, model)
        sink.apply(changes(ORDERS, rows, [(n,) for n in gone], since=270, until=300), never)
        wanted = [model[key] for key in sorted(model)]
        assert read(sink) == wanted
    files = list((tmp_path / "orders" / "changes").glob("*.parquet"))
    assert len(files) < 6
    found = duckdb.execute(
        f"""SELECT id, country, total FROM '{tmp_path}/orders/changes/*.parquet'
        QUALIFY row_number() OVER (PARTITION BY id ORDER BY _seq DESC) = 1 AND _op = 'u'
        ORDER BY id"""
    ).fetchall()
    assert found == [tuple(row.values()) for row in wanted]
    total = duckdb.execute(f"SELECT count(*) FROM '{tmp_path}/orders/changes/*.parquet'").fetchone()
    assert total == (300,)


def test_parquet_removes_what_no_commit_names(tmp_path: Path) -> None:
    url = f"parquet:///{tmp_path}/orders"
    with open_sink(url) as sink:
        sink.open(SIMPLE)
        sink.apply(changes(SIMPLE, [{"id": 1, "name": "a"}], [], since=0, until=1), never)
        folder = tmp_path / "orders" / "changes"
        stray = folder / "000000000009-0123456789abcdef-00000000.parquet"
        stray.write_bytes(b"half")
        with open_sink(url) as again:
            again.open(SIMPLE)
            assert read(again) == [{"id": 1, "name": "a"}]
        assert not stray.exists()


def put(sink: Sink, number: int) -> None:
    row = {"id": number, "name": "a"}
    sink.apply(changes(SIMPLE, [row], [], since=number, until=number + 1), never)


def ids(sink: Sink) -> list[int]:
    return [row["id"] for row in read(sink)]


@pytest.mark.parametrize("after", [0, 1, 3, 4])
def test_parquet_is_read_while_it_is_compacted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int
) -> None:
    url = f"parquet:///{tmp_path}/orders?compact_files=4"
    with open_sink(url) as sink, open_sink(url) as reader:
        sink.open(SIMPLE)
        for number in range(3):
            put(sink, number)
        get, asked = ParquetSink._get, count()

        def late(self: ParquetSink, *given: Any) -> Any:
            if self is reader and next(asked) == after:
                put(sink, 3)
            return get(self, *given)

        monkeypatch.setattr(ParquetSink, "_get", late)
        # Of the commit before, or of the new one, if what was to be read is gone.
        assert ids(reader) == [0, 1, 2, 3]
        assert len(list((tmp_path / "orders" / "changes").iterdir())) == 1


def test_parquet_tells_of_a_file_that_is_gone(tmp_path: Path) -> None:
    with open_sink(f"parquet:///{tmp_path}/orders?compact_files=3") as sink:
        sink.open(SIMPLE)
        put(sink, 0)
        put(sink, 1)
        (tmp_path / "orders" / "changes").joinpath(
            min(os.listdir(tmp_path / "orders" / "changes"))
        ).unlink()
        with pytest.raises(StoreError, match="lacks a file") as told:
            read(sink)
        assert "rebuild" in told.value.advice
        with pytest.raises(StoreError, match="lacks a file"):
            put(sink, 2)
        with sink.beside(fresh=True) as anew:
            anew.open(SIMPLE)
            put(anew, 0)
            anew.switch()
        assert ids(sink) == [0]


@pytest.mark.parametrize("torn", [b"", b"\0" * 200, b'{"token":"5f', b"[]"])
def test_parquet_without_a_commit_that_a_power_loss_has_prevented(
    tmp_path: Path, torn: bytes
) -> None:
    url = f"parquet:///{tmp_path}/orders"
    folder = tmp_path / "orders" / "_penstock" / "commits" / "live"
    with open_sink(url) as sink:
        sink.open(SIMPLE)
        (folder / min(os.listdir(folder))).write_bytes(torn)
        assert sink.position() is None
        assert sink.open(SIMPLE) == Position()
        put(sink, 0)
        put(sink, 1)
    for _ in range(2):
        (folder / max(os.listdir(folder))).write_bytes(torn)
        with open_sink(url) as sink:
            assert sink.position() == Position({PLACE: 1})
            assert ids(sink) == [0]
            assert sink.open(SIMPLE) == Position({PLACE: 1})
            put(sink, 1)
            assert ids(sink) == [0, 1]
    with open_sink(url) as sink:
        sink.open(SIMPLE)
        for number in range(2, 20):
            put(sink, number)
        for name in os.listdir(folder):
            (folder / name).write_bytes(torn)
        with pytest.raises(StoreError, match="damaged") as told:
            sink.position()
        assert "Delete" in told.value.advice


def test_parquet_writes_rows_before_the_commit_that_names_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []
    commits = tmp_path / "orders" / "_penstock" / "commits" / "live"

    def noted(path: Path) -> None:
        synced.append((path.name if path.is_dir() else path.suffix, len(os.listdir(commits))))

    with open_sink(f"parquet:///{tmp_path}/orders") as sink:
        sink.open(SIMPLE)
        monkeypatch.setattr(objects, "sync", noted)
        put(sink, 0)
    assert synced == [(".parquet", 1), ("changes", 1), (".json", 2), ("live", 2)]


# ---- S3 --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def s3_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """moto's S3 server in a process of its own: deltalake keeps Python's lock while it waits."""
    log = tmp_path_factory.mktemp("moto") / "log"
    with log.open("wb") as writing:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"],
            stdout=writing,
            stderr=writing,
        )
    try:
        pattern = re.compile(r"Running on (http://127\.0\.0\.1:\d+)")
        yield eventually(lambda: "".join(pattern.findall(log.read_text())[:1]))
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def bucket(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "testing")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "testing")
    name = f"bucket-{uuid4().hex}"
    client = boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1")
    client.create_bucket(Bucket=name)
    return name


@pytest.mark.processes
def test_a_damaged_commit_on_s3_is_told(s3_endpoint: str, bucket: str) -> None:
    """What is written there is whole, so somebody has damaged what counts."""
    with open_sink(f"parquet+s3://{bucket}/orders?endpoint={s3_endpoint}") as sink:
        sink.open(SIMPLE)
        put(sink, 0)
        put(sink, 1)
        client = boto3.client("s3", endpoint_url=s3_endpoint, region_name="us-east-1")
        listed = client.list_objects_v2(Bucket=bucket, Prefix="orders/_penstock/")["Contents"]
        newest = max(each["Key"] for each in listed)
        client.put_object(Bucket=bucket, Key=newest, Body=b"")
        with pytest.raises(StoreError, match="damaged") as told:
            sink.position()
        # The advice is right.
        assert "Delete that file" in told.value.advice
        client.delete_object(Bucket=bucket, Key=newest)
        assert sink.open(SIMPLE) == Position({PLACE: 1})
        put(sink, 1)
        assert ids(sink) == [0, 1]


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["delta+s3", "parquet+s3"])
def test_the_same_on_s3(s3_endpoint: str, bucket: str, kind: str, seed: int) -> None:
    store = Store(f"{kind}://{bucket}/some/orders?endpoint={s3_endpoint}")
    kit, load = StoreKit(), Load(seed)
    with store.sink() as sink:
        assert sink.open(ALL) == Position()
        for _ in range(BUCKET_BATCHES):
            sink.apply(load.next(), never)
        assert same(read(sink), ordered(load.model))
        assert sink.position() == Position({PLACE: load.at})
        sink.remove()
    kit.test_an_older_writer_is_fenced(store)
    with store.sink() as sink:
        sink.remove()
    kit.test_a_fresh_one_beside_forgets_what_was_begun(store)
