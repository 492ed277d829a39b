"""The embedded index passes the tests of all stores, and finds what it should."""

from __future__ import annotations

import datetime as dt
import random
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.errors import ConfigError
from penstock.sinks import Position, Refused, Schema, StoreError, open_sink
from penstock.sinks.schema import json_field
from penstock.sinks.search import QueryError, TantivySink
from penstock.testing.sinks import PLACE, Row, Store, changes, never, read
from tests.sinks.kit import StoreKit

WORDS = ("red", "green", "blue", "shoes", "boots", "hat", "wool", "leather", "small", "large")
GROUPS = ("Shoes/Boots", "Shoes/Sandals", "Hats", "/Hats/Warm")
PRODUCTS = Schema.of(
    [
        pa.field("sku", pa.string()),
        pa.field("title", pa.string()),
        pa.field("group", pa.string()),
        pa.field("status", pa.string()),
        pa.field("stock", pa.int32()),
        pa.field("price", pa.decimal128(10, 2)),
        pa.field("since", pa.date32()),
        pa.field("sold", pa.bool_()),
        json_field("more"),
    ],
    "sku",
)


class TestTantivy(StoreKit):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return Store(f"tantivy:///{tmp_path}/index")


def products(path: Path, **options: str) -> TantivySink:
    chosen = {"facet": "group", "keyword": "status", **options}
    made = open_sink(f"tantivy:///{path}/products", chosen)
    assert isinstance(made, TantivySink)
    return made


def some_rows(seed: int, count: int) -> list[Row]:
    chance = random.Random(seed)
    return [
        {
            "sku": f"p{number}",
            "title": " ".join(chance.choices(WORDS, k=4)).title(),
            "group": chance.choice(GROUPS),
            "status": chance.choice(["on sale", "sale"]),
            "stock": chance.randrange(100),
            "price": Decimal(chance.randrange(10_000)).scaleb(-2),
            "since": dt.date(2020, 1, 1) + dt.timedelta(chance.randrange(2000)),
            "sold": chance.random() < 0.5,
            "more": f'{{"size":{chance.randrange(5)},"maker":{{"name":"m{chance.randrange(3)}"}}}}',
        }
        for number in range(count)
    ]


def found(sink: TantivySink, text: str) -> list[str]:
    hits = sink.search(text, 1000)
    assert sink.count(text) == len(hits)
    return sorted(hit.row["sku"] for hit in hits)


def test_what_is_searched_for_is_found(tmp_path: Path, seed: int) -> None:
    rows = some_rows(seed, 300)
    with products(tmp_path) as sink:
        assert sink.search("red") == []
        sink.open(PRODUCTS)
        sink.apply(changes(PRODUCTS, rows, [], since=0, until=300), never)
        # Every third is changed, every seventh goes.
        new = [{**row, "title": f"{row['title']} renewed"} for row in rows[::3]]
        gone = [row["sku"] for row in rows[::7]]
        new = [row for row in new if row["sku"] not in gone]
        keys = [(sku,) for sku in gone]
        sink.apply(changes(PRODUCTS, new, keys, since=300, until=900), never)
        held = {row["sku"]: row for row in (*rows, *new) if row["sku"] not in gone}.values()

        def expect(text: str, *those: bool) -> None:
            assert found(sink, text) == sorted(
                row["sku"] for row, fits in zip(held, those, strict=True) if fits
            )

        words = [row["title"].lower().split() for row in held]
        expect("red", *("red" in each for each in words))
        expect("RED AND boots", *("red" in each and "boots" in each for each in words))
        expect("hat -wool", *("hat" in each and "wool" not in each for each in words))
        expect('"green hat"', *("green hat" in " ".join(each) for each in words))
        expect("renewed", *("renewed" in each for each in words))
        expect("group:/Hats", *("Hats" in row["group"] for row in held))
        expect("group:/Shoes/Boots", *(row["group"] == "Shoes/Boots" for row in held))
        expect("status:sale", *(row["status"] == "sale" for row in held))
        expect('status:"on sale"', *(row["status"] == "on sale" for row in held))
        expect("stock:[10 TO 20]", *(10 <= row["stock"] <= 20 for row in held))
        expect("price:{50 TO *}", *(row["price"] > 50 for row in held))
        expect("sold:true", *(row["sold"] for row in held))
        expect(
            "since:[2022-01-01T00:00:00Z TO 2023-01-01T00:00:00Z}",
            *(row["since"].year == 2022 for row in held),
        )
        expect("more.maker.name:m1", *('"m1"' in row["more"] for row in held))
        expect("sku:p1", *(row["sku"] == "p1" for row in held))
        expect("*", *(True for _ in held))
        # A hit is the row, and the first ones are the first by what is asked for.
        best = sink.search("stock:[0 TO 100]", 5, order_by="stock")
        assert [hit.row["stock"] for hit in best] == sorted(row["stock"] for row in held)[-5:][::-1]
        assert all(hit.row in held for hit in best)
        both = sink.search("red boots", 1000, all_words=True)
        assert len(both) == sum("red" in each and "boots" in each for each in words)


def test_new_columns_and_other_kinds_need_no_log(tmp_path: Path, seed: int) -> None:
    rows = some_rows(seed, 50)
    with products(tmp_path) as sink:
        sink.open(PRODUCTS)
        sink.apply(changes(PRODUCTS, rows, [], since=0, until=50), never)
        assert found(sink, "status:on") == []
    wider = Schema.of([*PRODUCTS.fields, pa.field("note", pa.string())], "sku")
    with products(tmp_path, keyword="") as sink, products(tmp_path) as reader:
        assert reader.count("*") == 50
        assert sink.open(wider) == Position({PLACE: 50})
        assert found(sink, "status:on") == found(reader, 'status:"on sale"')
        noted = {**rows[0], "note": "hand made"}
        sink.apply(changes(wider, [noted], [], since=50, until=51), never)
        hits = reader.search("hand", after=Position({PLACE: 51}))
        assert [hit.row for hit in hits] == [noted]
        assert len(list((tmp_path / "products").glob("index-*"))) == 1


def test_locks_and_half_made_indexes_left_behind_do_no_harm(tmp_path: Path) -> None:
    row = {"sku": "a", "title": "red"}
    with products(tmp_path) as sink:
        sink.open(PRODUCTS)
        sink.apply(changes(PRODUCTS, [row], [], since=0, until=1), never)
    folder = next((tmp_path / "products").glob("index-*"))
    for name in (".tantivy-writer.lock", ".tantivy-meta.lock"):
        (folder / name).touch()
    (tmp_path / "products" / "lock").touch()
    (tmp_path / "products" / "live.part").write_bytes(b"half")
    half = tmp_path / "products" / "index-ffffffff"
    half.mkdir()
    (half / "meta.json").write_bytes(b"{")
    (folder / "0123456789abcdef0123456789abcdef.store").write_bytes(b"half")
    with products(tmp_path) as sink:
        assert sink.open(PRODUCTS) == Position({PLACE: 1})
        sink.apply(changes(PRODUCTS, [{**row, "sku": "b"}], [], since=1, until=2), never)
        assert found(sink, "red") == ["a", "b"]
    assert not half.exists()


def test_what_cannot_be_searched_is_kept(tmp_path: Path) -> None:
    odd: list[Row] = [
        {"sku": "a", "since": dt.date(1, 1, 1), "group": "x\0y", "more": "[1]", "title": "\0"},
        {"sku": "b", "since": dt.date(9999, 12, 31), "group": "//", "more": "{", "title": "x" * 99},
        {"sku": "", "group": "a\\/b", "more": None, "title": "w " * 10_000},
        {"sku": "c", "status": "s" * 70_000, "group": "g" * 70_000},
    ]
    full = [dict.fromkeys(PRODUCTS.names) | row for row in odd]
    aside: list[Refused] = []
    with products(tmp_path) as sink:
        sink.open(PRODUCTS)
        long = {"sku": "k" * 70_000}
        done = sink.apply(changes(PRODUCTS, [*full, long], [], since=0, until=5), aside.extend)
        assert done.rows == 4
        assert [(each.offset, "long" in each.reason) for each in aside] == [(4, True)]
        assert read(sink) == sorted(full, key=lambda row: str(row["sku"]))
        sink.apply(changes(PRODUCTS, [], [("a",), ("k" * 70_000,)], since=5, until=7), never)
        assert len(read(sink)) == 3


def test_wrong_queries_and_options_are_told(tmp_path: Path) -> None:
    with products(tmp_path) as sink:
        sink.open(PRODUCTS)
        for wrong in ("title:(red", "nowhere:red", "stock:many"):
            with pytest.raises(QueryError):
                sink.search(wrong)
        with pytest.raises(QueryError):
            sink.search("red", order_by="title")
        with pytest.raises(ConfigError):
            sink.search("red", 0)
    for options in ({"text": "nothing"}, {"facet": "stock"}, {"text": "status"}):
        with products(tmp_path / "new", **options) as sink, pytest.raises(ConfigError):
            sink.open(PRODUCTS)
    for url, wrong_options in (
        ("tantivy://host/x", {}),
        ("tantivy:///x", {"language": "xx"}),
        ("tantivy:///x", {"memory_mb": "1"}),
    ):
        with pytest.raises(ConfigError):
            open_sink(url, wrong_options)
    (tmp_path / "file").touch()
    with open_sink(f"tantivy:///{tmp_path}/file") as sink_on_a_file:
        with pytest.raises(StoreError):
            sink_on_a_file.open(PRODUCTS)
        with pytest.raises(StoreError):
            sink_on_a_file.position()
