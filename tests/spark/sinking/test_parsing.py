"""Records to rows: the last of each key, whatever the batches; bad ones aside; types exact."""

from __future__ import annotations

import base64
import datetime as dt
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from confluent_kafka import Producer

from penstock.client.connection import Cluster
from penstock.client.topics import create
from penstock.errors import ConfigError
from penstock.sinks import Position, Schema
from penstock.sinks.fields import (
    Column,
    columns_of,
    from_block,
    from_samples,
    from_text,
    nested_types,
)
from penstock.sinks.schema import is_json
from penstock.sinks.spec import SinkSpec, from_config
from penstock.spark.reading.heartbeat_keys import HEARTBEATS
from penstock.spark.sinking import learning
from penstock.spark.sinking.errors import TruncatedError
from penstock.spark.sinking.findings import Findings
from penstock.spark.sinking.learning import SAMPLES, parser_of
from penstock.spark.sinking.parsing import Format, Parser
from penstock.testing import Broker

NOVEMBER = dt.datetime(2023, 11, 14, 22, 13, 20, 500_000, dt.UTC)
Record = tuple[bytes | None, bytes | None]


def parser(fields: str, *key: str, format_: Format = "json", precise: bool = False) -> Parser:
    columns = columns_of(from_text(fields), unit="us", precise=precise,
                         json_text=format_ == "debezium")  # fmt: skip
    nested = nested_types(fields)
    columns = [replace(each, nested=nested.get(each.name, "")) for each in columns]
    return Parser(tuple(columns), key, format_)


def table(records: list[Record], first: int = 0, partition: int = 0) -> pa.Table:
    moment = dt.datetime(2026, 1, 1, tzinfo=dt.UTC)
    return pa.table(
        {
            "key": pa.array([key for key, _ in records], pa.binary()),
            "value": pa.array([value for _, value in records], pa.binary()),
            "topic": pa.array(["t"] * len(records)),
            "partition": pa.array([partition] * len(records), pa.int32()),
            "offset": pa.array(range(first, first + len(records)), pa.int64()),
            "timestamp": pa.array([moment] * len(records), pa.timestamp("us", "UTC")),
        }
    )


def apply(reader: Parser, records: list[Record], cut: list[int]) -> dict[Any, Any]:
    """What a store would hold, if the records came in these batches."""
    rows: dict[Any, Any] = {}
    for low, high in zip([0, *cut], [*cut, len(records)], strict=True):
        parsed = reader.parse(table(records[low:high], low))
        for row in parsed.deletes.to_pylist():
            rows.pop(tuple(row.values()), None)
        for row in parsed.upserts.to_pylist():
            rows[tuple(row[name] for name in reader.key)] = row
    return rows


def test_the_table_does_not_depend_on_the_batches(seed: int) -> None:
    chance = random.Random(seed)
    reader = parser("id int, name string", "id", format_="debezium")
    records: list[Record] = []
    model: dict[Any, Any] = {}
    for number in range(300):
        key = chance.randrange(15)
        kind = chance.randrange(6)
        row = {"id": key, "name": f"n{number}"}
        name = json.dumps({"id": key}).encode()
        if kind == 0:
            records.append((name, b"{broken"))
        elif kind == 1:
            records.append((name, None))
            model.pop((key,), None)
        elif kind == 2:
            records.append((name, json.dumps({"op": "d", "before": row, "after": None}).encode()))
            model.pop((key,), None)
        elif kind == 3:
            records.append((name, json.dumps({"op": "u", "after": {"id": key, "name": None,
                                                                   "x": 1}}).encode()))  # fmt: skip
            model[key,] = {"id": key, "name": None}
        else:
            wrapped = {"schema": {}, "payload": {"op": "c", "after": row}}
            records.append((name, json.dumps(wrapped).encode()))
            model[key,] = row
    for _ in range(8):
        cut = sorted(chance.sample(range(1, 300), chance.randrange(10)))
        assert apply(reader, records, cut) == model


@pytest.mark.parametrize(
    ("fields", "value", "wanted"),
    [
        ("bigint", 2**63 - 1, 2**63 - 1),
        ("bigint", "12", 12),
        ("int", 2**31, None),
        ("smallint", 1.5, None),
        ("double", 1, 1.0),
        ("double", "NaN", "nan"),
        ("boolean", 1, True),
        ("boolean", 2, None),
        ("string", "x\0🦆", "x\0🦆"),
        ("string", {"a": [1]}, '{"a":[1]}'),
        ("json", {"a": [1, None]}, '{"a":[1,null]}'),
        ("array<int>", [1, 2], "[1,2]"),
        ("array<int>", [1, "x"], None),
        ("array<int>", "x", None),
        ("array<int>", {"a": 1}, None),
        ("map<string, double>", {"a": 1.5, "b": None}, '{"a":1.5,"b":null}'),
        ("map<string, double>", {"a": "x"}, None),
        ("struct<a int, b: array<timestamp>>", {"a": 1, "c": 2}, '{"a":1,"c":2}'),
        ("struct<a int, b: array<timestamp>>", {"a": 1, "b": ["soon"]}, None),
        ("struct<a int, b: array<timestamp>>", {"a": 2**40}, None),
        ("struct<a json>", {"a": [1, "x"]}, '{"a":[1,"x"]}'),
        ("decimal(10,2)", "12.34", Decimal("12.34")),
        ("decimal(10,2)", 12.5, Decimal("12.50")),
        ("decimal(4,2)", "123.45", None),
        ("decimal(10,2)", "12.345", None),
        ("binary", base64.b64encode(b"\0\xff").decode(), b"\0\xff"),
        ("binary", "not base64!", None),
        ("date", 19723, dt.date(2024, 1, 1)),
        ("date", "2024-01-01", dt.date(2024, 1, 1)),
        ("time", 1_000_001, dt.time(0, 0, 1, 1)),
        ("timestamp", 1_700_000_000_000_001, dt.datetime(2023, 11, 14, 22, 13, 20, 1, dt.UTC)),
        ("timestamp", "2024-01-01T01:00:00+01:00", dt.datetime(2024, 1, 1, tzinfo=dt.UTC)),
        ("timestamp", "2024", dt.datetime(2024, 1, 1, tzinfo=dt.UTC)),
        ("timestamp", "yesterday", None),
        ("timestamp", 1_700_000_000_500_000.5, NOVEMBER),
        ("timestamp", 1e300, None),
        ("bigint", 1e18, None),
        ("bigint", 2.0**53, 2**53),
    ],
)  # fmt: skip
def test_types(fields: str, value: Any, wanted: Any) -> None:
    reader = parser(f"id int, v {fields}", "id")
    good, other = {"id": 1, "v": None}, {"id": 2, "v": value}
    records: list[Record] = [(b"1", json.dumps(good).encode()), (b"2", json.dumps(other).encode())]
    parsed = reader.parse(table(records))
    rows = parsed.upserts.to_pylist()
    assert rows[0] == good
    if wanted is None:
        assert len(rows) == 1
        (bad,) = parsed.bad.to_pylist()
        assert bad["offset"] == 1
        assert "field v" in bad["reason"]
    elif wanted == "nan":
        assert rows[1]["v"] != rows[1]["v"]
    else:
        assert rows[1]["v"] == wanted


def test_numbers_keep_the_digits_that_a_double_lacks() -> None:
    """As flows write decimals."""
    number = "1234567890123456789.0123456789"
    reader = parser("id int, d decimal(38,10), j json, x decimal(38,0)", "id")
    inner = f'{{"a":[{number},1.50,12345678901234567890123,"{number}"]}}'
    value = f'{{"id":1,"d":{number},"j":{inner},"x":{"9" * 38}}}'
    wrapped = f'{{"schema":{{}},"payload":{value.replace("1,", "2,", 1)}}}'
    parsed = reader.parse(table([(b"1", value.encode()), (b"2", wrapped.encode())]))
    assert parsed.bad.num_rows == 0
    for id_, row in enumerate(parsed.upserts.to_pylist(), 1):
        assert row == {"id": id_, "d": Decimal(number), "j": inner, "x": Decimal("9" * 38)}
    events = parser("id int, d decimal(38,10)", "id", format_="debezium")
    event = f'{{"op":"c","after":{{"id":1,"d":{number}}}}}'
    (row,) = events.parse(table([(b"1", event.encode())])).upserts.to_pylist()
    assert row["d"] == Decimal(number)
    # A column of doubles that was found out from records takes what is one.
    doubles = replace(parser("id int, d double", "id"), grows=True)
    texts = ["0.30000000000000004", "1e300", "1.1000000000000000", number, "0.1234567890123456781"]
    parsed = doubles.parse(table([(str(n).encode(), f'{{"id":{n},"d":{each}}}'.encode())
                                  for n, each in enumerate(texts)]))  # fmt: skip
    assert [row["d"] for row in parsed.upserts.to_pylist()] == [0.30000000000000004, 1e300, 1.1]
    assert parsed.bad["reason"][0].as_py() == (
        f"field d has more digits than a double, which it was taken for: {number}; say its type in "
        "fields, as decimal(38,10)"
    )


def test_what_cannot_be_read_is_told() -> None:
    reader = parser("id int, name string", "id", format_="debezium")
    records: list[Record] = [
        (None, b'{"op":"c","after":{"name":"no key"}}'),
        (b"2", b"[]"),
        (b"3", b'{"after":{"id":3}}'),
        (b"4", b'{"op":"u"}'),
        (b"5", b'{"op":"u","after":{"id":5,"name":"__debezium_unavailable_value"}}'),
        (b"x", None),
        (b'{"other":1}', b'{"op":"u","after":{"name":"no key"}}'),
        *((key, None) for key in HEARTBEATS),
    ]
    parsed = reader.parse(table(records))
    told = {row["offset"]: row["reason"] for row in parsed.bad.to_pylist()}
    assert sorted(told) == [0, 1, 2, 3, 4, 5, 6]
    assert "neither" in told[0]
    assert "no op" in told[2]
    assert "fill" in told[4]
    assert parsed.upserts.num_rows == parsed.deletes.num_rows == 0


def test_schema_blocks_and_samples() -> None:
    block = {"fields": [
        {"field": "before", "type": "struct"},
        {"field": "after", "type": "struct", "fields": [
            {"field": "id", "type": "int32"},
            {"field": "at", "type": "int64", "name": "io.debezium.time.Timestamp"},
            {"field": "price", "type": "bytes", "name": "org.apache.kafka.connect.data.Decimal",
             "parameters": {"scale": "2", "connect.decimal.precision": "10"}},
            {"field": "more", "type": "string", "name": "io.debezium.data.Json"},
        ]},
        {"field": "op", "type": "string"},
    ]}  # fmt: skip
    columns = from_block(block)
    reader = Parser(tuple(columns), ("id",), "debezium")
    price = base64.b64encode((-1234).to_bytes(2, "big", signed=True)).decode()
    after = {"id": 1, "at": 1_700_000_000_000, "price": price, "more": '{"a":1}'}
    value = json.dumps({"schema": block, "payload": {"op": "c", "after": after}}).encode()
    key = b'{"schema":{},"payload":{"id":1}}'
    (row,) = reader.parse(table([(key, value)])).upserts.to_pylist()
    assert row["price"] == Decimal("-12.34")
    assert row["at"].isoformat() == "2023-11-14T22:13:20"
    assert row["more"] == '{"a":1}'
    assert reader.parse(table([(key, None)])).deletes.to_pylist() == [{"id": 1}]
    fields = from_samples([{"a": 1, "b": None}, {"a": 1.5, "c": [1]}, {"d": "x", "e": True}])
    assert [(each.name, str(each.type)) for each in fields] == [
        ("a", "double"), ("b", "string"), ("c", "string"), ("d", "string"), ("e", "bool"),
    ]  # fmt: skip


def test_partitions_are_put_together_with_each_key_once() -> None:
    reader = parser("id int, name string", "id")
    one = reader.parse(table([(b"1", b'{"id":1,"name":"a"}'), (b"2", b'{"id":2,"name":"b"}')]))
    # The same row under another key of the log, in another partition, later.
    two = reader.parse(table([(b'{"id":1}', None), (b"bad", b"{")], first=50, partition=1))
    found = Findings(reader.schema, [one, two])
    changes = found.changes(Position(), Position({("t", 0): 2, ("t", 1): 52}))
    assert changes.upserts.to_pylist() == [{"id": 2, "name": "b"}]
    assert changes.deletes.to_pylist() == [{"id": 1}]
    assert changes.upserted_at.column("offset").to_pylist() == [1]
    assert changes.deleted_at.column("offset").to_pylist() == [50]
    assert found.letters.column("offset").to_pylist() == [51]
    assert found.records == 4


def test_settings_that_are_wrong() -> None:
    good = {"topic": "t", "url": "sqlite:///x.db"}
    assert from_config("a", {**good, "max_lag": "2m", "key": ["x"]}).max_lag_s == 120
    for wrong in (
        {"format": "xml"},
        {"max_records": 0},
        {"every": "often"},
        {"key": [1]},
        {"fields": "id"},
        {"options": 1},
        {"max_dead_letters": 0},
        {"max_dead_share": 0},
        {"max_dead_share": "half"},
        {"max_dead_share": True},
    ):
        with pytest.raises(ConfigError, match=r"sinks\.a"):
            from_config("a", {**good, **wrong})
    spec = from_config("a", {**good, "max_dead_letters": 5, "max_dead_share": 1})
    assert (spec.max_dead_letters, spec.max_dead_share) == (5, 1.0)
    assert from_config("a", good).max_dead_letters == 1000
    with pytest.raises(ConfigError):
        Schema.of(from_text("id double"), "id")


def _in_store(reader: Parser, batches: list[pa.Table]) -> dict[Any, Any]:
    """What a store would hold; each batch is the records of one or more partitions."""
    rows: dict[Any, Any] = {}
    for records in batches:
        numbers = sorted(set(records.column("partition").to_pylist()))
        parsed = [
            reader.parse(records.filter(pc.equal(records.column("partition"), number)))
            for number in numbers
        ]
        changes = Findings(reader.schema, parsed).changes(Position(), Position({("t", 0): 1}))
        for row in changes.deletes.to_pylist():
            rows.pop(tuple(row.values()), None)
        for row in changes.upserts.to_pylist():
            rows[tuple(row[name] for name in reader.key)] = row
    return rows


@pytest.mark.parametrize("keyed_by", ["customer", "nothing", "json"])
def test_records_that_are_keyed_by_something_else_all_count(seed: int, keyed_by: str) -> None:
    chance = random.Random(seed)
    reader = parser("id int, customer string", "id")
    records: list[Record] = []
    model: dict[Any, Any] = {}
    for number in range(200):
        customer = f"c{number % 5}"
        row = {"id": chance.randrange(150), "customer": customer}
        keys = {
            "customer": customer.encode(),
            "nothing": None,
            "json": json.dumps({"customer": customer}).encode(),
        }
        records.append((keys[keyed_by], json.dumps(row).encode()))
        model[row["id"],] = row
    for _ in range(5):
        cut = sorted(chance.sample(range(1, 200), chance.randrange(6)))
        pieces = [
            table(records[low:high], low)
            for low, high in zip([0, *cut], [*cut, len(records)], strict=True)
        ]
        assert _in_store(reader, pieces) == model


def test_a_row_whose_key_in_the_store_changes_leaves_nothing_behind() -> None:
    reader = parser("id int, email string", "email", format_="debezium")

    def event(op: str, before: str | None, after: str | None) -> bytes:
        rows = [None if mail is None else {"id": 1, "email": mail} for mail in (before, after)]
        return json.dumps({"op": op, "before": rows[0], "after": rows[1]}).encode()

    key = b'{"id":1}'
    records: list[Record] = [
        (key, event("c", None, "a")), (key, event("u", "a", "b")), (key, event("u", "b", "c")),
    ]  # fmt: skip
    for cut in range(4):
        assert list(_in_store(reader, [table(records[:cut]), table(records[cut:], cut)])) == [
            ("c",)
        ]
    gone: list[Record] = [(key, event("d", "c", None)), (key, None)]
    parsed = reader.parse(table([*records, *gone]))
    assert parsed.bad.num_rows == 0
    for cut in range(6):
        every = [*records, *gone]
        assert _in_store(reader, [table(every[:cut]), table(every[cut:], cut)]) == {}


def test_flattened_rows_keep_the_types_of_their_schema(
    log_broker: Broker, topic: str, tmp_path: Path
) -> None:
    """As ExtractNewRecordState of Debezium leaves them, with Connect's schema around them."""
    decimal = {"type": "bytes", "name": "org.apache.kafka.connect.data.Decimal",
               "parameters": {"scale": "2", "connect.decimal.precision": "10"}}  # fmt: skip
    scaled = {
        "type": "struct", "name": "io.debezium.data.VariableScaleDecimal",
        "fields": [{"field": "scale", "type": "int32"}, {"field": "value", "type": "bytes"}],
    }  # fmt: skip
    block = {"type": "struct", "fields": [
        {"field": "id", "type": "int64"}, {"field": "price", **decimal},
        {"field": "free", **scaled},
        {"field": "prices", "type": "array", "items": decimal},
        {"field": "day", "type": "int32", "name": "io.debezium.time.Date"},
        {"field": "at", "type": "string", "name": "io.debezium.time.ZonedTimestamp"},
    ]}  # fmt: skip
    row = {"id": 1, "price": "bw==", "free": {"scale": 5, "value": "BMsv"}, "prices": ["bw=="],
           "day": 20774, "at": "2026-11-17T10:00:00.5Z"}  # fmt: skip
    values = [
        json.dumps({"schema": block, "payload": each}, separators=(",", ":")).encode()
        for each in (row, {**row, "id": 2, "price": 12.5}, {**row, "id": 3, "price": "?"})
    ]
    with Cluster(log_broker.bootstrap) as cluster:
        create(cluster, topic, partitions=1)
        producer = Producer({"bootstrap.servers": log_broker.bootstrap})
        for number, value in enumerate(values, 1):
            producer.produce(topic, value, b'{"id":%d}' % number)
        assert producer.flush(60) == 0
        reader = parser_of(SinkSpec("s", topic, "sqlite:///s"), cluster, topic, None)
    records: list[Record] = [(b'{"id":%d}' % at, each) for at, each in enumerate(values, 1)]
    parsed = reader.parse(table(records))
    wanted = {
        "id": 1, "price": Decimal("1.11"), "free": Decimal("3.14159"), "prices": "[1.11]",
        "day": dt.date(2026, 11, 17),
        "at": dt.datetime(2026, 11, 17, 10, 0, 0, 500_000, dt.UTC),
    }  # fmt: skip
    assert parsed.upserts.to_pylist() == [wanted, {**wanted, "id": 2, "price": Decimal("12.50")}]
    assert parsed.bad["reason"].to_pylist() == ["field price does not fit decimal128(10, 2): '?'"]


def test_columns_that_were_taken_for_whole_numbers() -> None:
    reader = replace(parser("id bigint, n bigint", "id"), grows=True, is_guessed=True)
    values = [(b"1", b'{"id":1,"n":2.0}'), (b"2", b'{"id":2,"n":2.5}'), (b"3", b'{"id":3,"n":"x"}')]
    parsed = reader.parse(table(list(values)))
    assert parsed.fractions == {"n": "2.5 at t-0, offset 1"}
    assert parsed.bad.num_rows == 2
    assert not reader.parse(table([values[0], values[2]])).fractions


def test_the_same_row_twice_counts_as_it_stands_in_its_partition() -> None:
    reader = parser("id int, v int", "id")
    records = table([(b"x", b'{"id":1,"v":1}'), (b"y", b'{"id":1,"v":2}')])
    # The clock of whoever wrote the second was behind.
    late = [dt.datetime(2026, 1, 2, tzinfo=dt.UTC), dt.datetime(2026, 1, 1, tzinfo=dt.UTC)]
    times = pa.array(late, pa.timestamp("us", "UTC"))
    records = records.set_column(5, "timestamp", times)
    assert _in_store(reader, [records]) == {(1,): {"id": 1, "v": 2}}


def test_a_truncated_table_is_not_passed_over() -> None:
    reader = parser("id int", "id", format_="debezium")
    with pytest.raises(TruncatedError, match="truncated"):
        reader.parse(table([(b'{"id":1}', b'{"op":"t","before":null,"after":null}')]))
    with pytest.raises(TruncatedError):
        reader.parse(table([(None, b'{"op":"t","before":null,"after":null}')]))


def test_a_truncate_whose_deletes_were_told_is_passed_over() -> None:
    told = b'{"op":"t","before":null,"after":null,"expanded":true}'
    records: list[Record] = [
        (b'{"id":1}', b'{"op":"c","after":{"id":1}}'),
        (b'{"id":2}', b'{"op":"c","after":{"id":2}}'),
        (b'{"id":1}', b'{"op":"d","before":{"id":1},"after":null}'),
        (b'{"id":1}', None),
        (b"null", told),
        (b'{"schema":null,"payload":null}', b'{"schema":{},"payload":%b}' % told),
    ]
    for reader in (
        parser("id int", "id", format_="debezium"),
        replace(parser("id int", "id", format_="debezium"), by_row=True),
    ):
        found = reader.parse(table(records))
        assert found.bad.num_rows == 0
        assert found.upserts.to_pylist()[-1] == {"id": 2}
        assert found.deletes.to_pylist()[-1] == {"id": 1}


def test_a_new_column_that_differs_between_partitions() -> None:
    reader = replace(parser("id int", "id"), grows=True)
    values = (b'{"id":1,"v":1,"w":1}', b'{"id":1,"v":1.5,"w":"x"}')
    parsed = [reader.parse(table([(b"1", value)])) for value in values]
    new = Findings(reader.schema, parsed).new
    assert new["v"].field.type == pa.float64()
    assert is_json(new["w"].field)


def _block(fields: list[dict[str, Any]]) -> dict[str, Any]:
    rows = [{"field": name, "type": "struct", "fields": fields} for name in ("before", "after")]
    return {"type": "struct", "fields": [*rows, {"field": "op", "type": "string"}]}


def _event(fields: list[dict[str, Any]], row: dict[str, Any]) -> bytes:
    payload = {"op": "c", "before": None, "after": row}
    return json.dumps({"schema": _block(fields), "payload": payload}).encode()


ID = {"field": "id", "type": "int64"}
# What came later, its type as the capture tells it.
LATER: list[dict[str, Any]] = [
    {"field": "price", "type": "bytes", "name": "org.apache.kafka.connect.data.Decimal",
     "parameters": {"scale": "2", "connect.decimal.precision": "10"}},
    {"field": "due", "type": "int64", "name": "io.debezium.time.Timestamp"},
    {"field": "day", "type": "int32", "name": "io.debezium.time.Date"},
    {"field": "blob", "type": "bytes"},
    {"field": "small", "type": "int16"},
    {"field": "more", "type": "string", "name": "io.debezium.data.Json"},
]  # fmt: skip
LATER_ROW = {
    "id": 1, "price": base64.b64encode((1050).to_bytes(2, "big")).decode(),
    "due": 1_700_000_000_000, "day": 20454, "blob": "AAE=", "small": None, "more": '{"a":1}',
}  # fmt: skip
LATER_WANTED = {
    "id": 1, "price": Decimal("10.50"), "due": dt.datetime.fromisoformat("2023-11-14T22:13:20"),
    "day": dt.date(2026, 1, 1), "blob": b"\0\1", "small": None, "more": '{"a":1}',
}  # fmt: skip


def test_new_columns_are_what_their_schema_block_says() -> None:
    reader = Parser(tuple(from_block(_block([ID]))), ("id",), "debezium", grows=True)
    plain = json.dumps({"op": "c", "after": {"id": 2, "guess": 1}}).encode()
    records = table([(b'{"id":1}', _event([ID, *LATER], LATER_ROW)), (b'{"id":2}', plain)])
    new = Findings(reader.schema, [reader.parse(records)]).new
    assert new.pop("guess") == Column(pa.field("guess", pa.int64()))
    assert new == {each.name: each for each in from_block(_block(LATER))}
    grown = replace(reader, columns=(*reader.columns, *new.values()))
    parsed = grown.parse(records.slice(0, 1))
    assert not parsed.new
    assert parsed.upserts.to_pylist() == [LATER_WANTED]


def test_new_columns_of_a_block_that_is_none() -> None:
    reader = Parser(tuple(from_block(_block([ID]))), ("id",), "debezium", grows=True)
    for block in ({}, {"fields": 3}, {"fields": [{"type": "x"}]}, {"fields": ["a"]}):
        value = {"schema": block, "payload": {"op": "c", "after": {"id": 1, "v": "x"}}}
        found = reader.parse(table([(b'{"id":1}', json.dumps(value).encode())]))
        assert found.new == {"v": Column(pa.field("v", pa.string()))}


def test_columns_that_came_later_are_still_known_at_the_next_start(
    log_broker: Broker, topic: str, tmp_path: Path
) -> None:
    """What the first records do not have, the last ones tell: also how their times are counted."""
    spec = SinkSpec("orders", topic, f"sqlite:///{tmp_path}/s.db")
    with Cluster(log_broker.bootstrap) as cluster:
        create(cluster, topic, partitions=1)
        producer = Producer({"bootstrap.servers": log_broker.bootstrap})
        for number in range(2 * SAMPLES + 1):
            event = _event([ID], {"id": number})
            producer.produce(topic, event, json.dumps({"id": number}))
        producer.produce(topic, _event([ID, *LATER], LATER_ROW), b'{"id":1}')
        producer.produce(topic, None, b'{"id":2}')
        assert producer.flush(60) == 0
        first = parser_of(spec, cluster, topic, None)
        again = parser_of(spec, cluster, topic, first.schema)
    for reader in (first, again):
        parsed = reader.parse(table([(b'{"id":1}', _event([ID, *LATER], LATER_ROW))]))
        assert parsed.upserts.to_pylist() == [LATER_WANTED]


def test_only_the_first_records_of_a_partition_are_samples(
    log_broker: Broker, topic: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = 0

    def batches(*_: Any, **__: Any) -> Iterator[tuple[int, pa.RecordBatch]]:
        nonlocal read
        for _number in range(100):
            read += SAMPLES
            keys, values = [b"1"] * SAMPLES, [b'{"id":1}'] * SAMPLES
            yield 0, pa.RecordBatch.from_pydict({"key": keys, "value": values})

    monkeypatch.setattr(learning, "read_batches", batches)
    monkeypatch.setattr(learning, "_told_last", lambda *_: [])
    with Cluster(log_broker.bootstrap) as cluster:
        create(cluster, topic, partitions=1)
        parser_of(SinkSpec("s", topic, "sqlite:///s", key=("id",)), cluster, topic, None)
    assert read == SAMPLES


def test_what_is_wrong_inside_of_a_column_is_told_with_its_place() -> None:
    reader = parser("id int, v struct<a int, b: array<struct<c double>>>", "id")
    value = {"id": 1, "v": {"a": 1, "b": [{"c": 1.5}, {"c": "much"}]}}
    (bad,) = reader.parse(table([(b"1", json.dumps(value).encode())])).bad.to_pylist()
    assert bad["reason"] == "field v.b[].c is not double: 'much'"


def test_numbers_of_rows_are_seconds_unless_said_otherwise(tmp_path: Path) -> None:
    """As flows and views read them; of change events they are microseconds, as capture has them."""
    wanted = {
        ("json", ""): "s", ("json", "ms"): "ms", ("debezium", ""): "us", ("debezium", "s"): "s",
    }  # fmt: skip
    for (format_, unit), how in wanted.items():
        spec = SinkSpec("s", "t", f"sqlite:///{tmp_path}/a.db", key=("id",), format=format_,
                        fields="id int, at timestamp", time_unit=unit)  # fmt: skip
        found = learning._columns(spec, "json" if format_ == "json" else "debezium", [], None, [],
                                  None)  # fmt: skip
        assert [each.how for each in found] == ["", how]
