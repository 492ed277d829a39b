"""Change events as a capture composes them, decoded by the schemas that they name."""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

import orjson
import pyarrow as pa
import pytest
from pyspark.sql import types as T  # noqa: N812

from penstock.capture.source import CREATE, Table
from penstock.client.connection import Cluster
from penstock.client.errors import RefusedError
from penstock.client.table_schemas import (
    UNSIGNED,
    PublishedSchemas,
    SchemaError,
    TableColumn,
    TableSchema,
    UnknownSchemaError,
    ValueType,
    event_schema_id,
)
from penstock.spark.reading import captured
from penstock.spark.reading.captured import CapturedEvents, SchemaChangedError, Target
from penstock.spark.reading.decoding import VALUE, Typing
from penstock.spark.source.reading import record_schema
from tests.capture.events.samples import change, composed, events, row_of

DAY = ValueType("int32", "io.debezium.time.Date")


def decimal(precision: int, scale: int) -> ValueType:
    shape = {"scale": str(scale), "connect.decimal.precision": str(precision)}
    return ValueType("bytes", "org.apache.kafka.connect.data.Decimal", parameters=shape)


def unscaled(number: int) -> str:
    return base64.b64encode(number.to_bytes(8, "big", signed=True)).decode()


def table(*columns: TableColumn) -> Table:
    return Table(
        "shop",
        "public",
        "orders",
        (TableColumn("id", ValueType("int64"), False), *columns),
        ("id",),
    )


def schema(of: Table) -> TableSchema:
    return TableSchema("public.orders", "postgresql", of.columns, of.key)


ORDERS = table(
    TableColumn("amount", decimal(10, 2), native="numeric(10,2)"),
    TableColumn("day", DAY, native="date"),
    TableColumn("ratio", ValueType("double"), native="double precision"),
    TableColumn("big", ValueType("int64", parameters={UNSIGNED: "true"}), native="bigint unsigned"),
    TableColumn("note", ValueType("string"), native="text"),
)
WIDER = table(TableColumn("amount", decimal(12, 3), native="numeric(12,3)"), *ORDERS.columns[2:])


def event(
    of: Table, before: dict[str, Any] | None = None, op: str = CREATE, **values: Any
) -> bytes:
    old = None if before is None else row_of(of, **before)
    new = None if op == "d" else row_of(of, **values)
    [(_, value, _), *_] = composed(events(), change(op, old, new, of))
    assert value is not None
    return value


def id_of(value: bytes) -> int:
    found = event_schema_id(value)
    assert found is not None
    return found


def reader(
    *tables: Table, written: bool = False, find: Any = None, row: T.StructType | None = None
) -> CapturedEvents:
    known = {id_of(event(each, id=1)): schema(each) for each in tables}
    target = row or captured.row_of(schema(tables[-1]))
    return CapturedEvents(Target(target, written), known, find)


def read(made: CapturedEvents, values: Sequence[bytes | None]) -> list[tuple[Any, str | None]]:
    """What became of each: the row afterwards, and the reason if there is none."""
    found, reasons = made.parse(pa.array(values, pa.binary()))
    found.validate(full=True)
    rows = [None if each is None else each["after"] for each in found.to_pylist()]
    return list(zip(rows, reasons.to_pylist(), strict=True))


def test_values_keep_their_types() -> None:
    value = event(
        ORDERS, id=1, amount=unscaled(-1_239), day=20_774, ratio=0.5, big=2**64 - 1, note="é"
    )
    row = {"id": 1, "amount": Decimal("-12.39"), "day": dt.date(2026, 11, 17), "ratio": 0.5,
           "big": Decimal(2**64 - 1), "note": "é"}  # fmt: skip
    assert read(reader(ORDERS), [value, None]) == [(row, None), (None, None)]


def test_what_does_not_fit_is_named_and_the_others_are_read() -> None:
    values = [
        event(ORDERS, id=1, day=2**31 - 1),
        event(ORDERS, id=2, ratio="NaN", big=3),
        event(ORDERS, id=3, ratio="much"),
        event(ORDERS, id="4"),
        event(ORDERS, id=5, amount="!"),
        event(ORDERS, id=6, big=6).replace(b'"big":6', b'"big":%d' % 2**70),
        b"{",
    ]
    found = read(reader(ORDERS), values)
    assert [why for _, why in found] == [
        "field day does not fit date: infinity",
        None,
        "field after.ratio is not double: much",
        "field after.id is not bigint: 4",
        "field amount does not fit decimal(10,2): '!'",
        "field after.big is not decimal(20,0): 1180591620717411303424",
        captured.UNSAID,
    ]
    assert str(found[1][0]["ratio"]) == "nan"


def test_each_event_is_read_by_its_own_schema() -> None:
    values = [
        event(ORDERS, id=1, amount=unscaled(111)),
        None,
        event(WIDER, id=2, amount=unscaled(1_110)),
        event(WIDER, id=3, amount=unscaled(1_239)),
        event(ORDERS, id=4, amount=unscaled(111)),
    ]
    target = captured.row_of(schema(ORDERS))
    found = read(reader(ORDERS, WIDER, row=target), values)
    amounts = [row and row["amount"] for row, _ in found]
    assert amounts == [Decimal("1.11"), None, Decimal("1.11"), None, Decimal("1.11")]
    assert found[3][1] == "field amount does not fit decimal(10,2): 1.239"


def test_columns_that_came_and_went() -> None:
    later = table(*ORDERS.columns[1:], TableColumn("extra", ValueType("string")))
    both = [event(ORDERS, id=1, note="a"), event(later, id=2, note="b", extra="c")]
    found = read(reader(ORDERS, later), both)
    assert [row["extra"] for row, _ in found] == [None, "c"]
    found = read(reader(later, ORDERS), both)
    assert [row["note"] for row, _ in found] == ["a", "b"]
    assert "extra" not in found[1][0]


def test_a_row_before_that_does_not_fit() -> None:
    """It was refused when it came: an update then has none, but a deletion must tell its row."""
    old = {"id": 1, "day": 2**31 - 1}
    values = [event(ORDERS, old, "u", id=1, day=1), event(ORDERS, old, "d")]
    found, reasons = reader(ORDERS).parse(pa.array(values, pa.binary()))
    assert reasons.to_pylist() == [None, "field day does not fit date: infinity"]
    assert found[0].as_py()["before"] is None
    assert found[0].as_py()["after"]["day"] == dt.date(1970, 1, 2)


def test_a_schema_that_is_published_later_is_looked_up() -> None:
    asked: list[int] = []

    def find(id_: int) -> TableSchema:
        asked.append(id_)
        return schema(later)

    later = table(*ORDERS.columns[1:], TableColumn("extra", ValueType("string")))
    made = reader(ORDERS, find=find)
    values = [event(later, id=2, note="b"), event(later, id=3, note="c")]
    assert [row["note"] for row, _ in read(made, values)] == ["b", "c"]
    assert read(made, values[:1])[0][1] is None
    assert asked == [id_of(values[0])]


@pytest.mark.parametrize("written", [False, True])
def test_an_alter_that_takes_a_column_away_stops_the_reader(written: bool) -> None:
    fewer = table(*ORDERS.columns[2:])
    made = reader(ORDERS, written=written, find=lambda _: schema(fewer))
    with pytest.raises(SchemaChangedError, match="column amount is gone"):
        read(made, [event(fewer, id=1)])


def test_an_alter_of_a_type_stops_only_who_cannot_read_it() -> None:
    value = event(WIDER, id=1, amount=unscaled(1_110))
    with pytest.raises(SchemaChangedError, match=r"amount is numeric\(12,3\) now, read as decimal"):
        read(reader(ORDERS, find=lambda _: schema(WIDER)), [value])
    own = reader(ORDERS, written=True, find=lambda _: schema(WIDER))
    assert read(own, [value])[0][0]["amount"] == Decimal("1.11")


def test_a_schema_that_nobody_knows_is_a_reason() -> None:
    def find(id_: int) -> TableSchema:
        raise UnknownSchemaError(f"schema {id_} is not there")

    value = event(ORDERS, id=1)
    made = CapturedEvents(Target(captured.row_of(schema(ORDERS)), written=False), {}, find)
    assert read(made, [value])[0][1] == f"schema {id_of(value)} is not there"


def test_events_with_their_schema_around_them() -> None:
    """As with Kafka Connect's `schemas.enable`, by whoever wrote them."""
    whole = events(schemas=True)
    row = row_of(ORDERS, id=1, amount=unscaled(111), day=0, big=7)
    [(_, value, _)] = composed(whole, change(CREATE, None, row, ORDERS))
    assert value is not None
    assert value.startswith(b'{"schema":')
    plain = event(ORDERS, id=2, amount=unscaled(222))
    found = read(reader(ORDERS), [value, plain, b'{"schema":{"a":1},"payload":{"op":"c"}}'])
    assert [row and row["amount"] for row, _ in found] == [Decimal("1.11"), Decimal("2.22"), None]
    assert found[0][0]["day"] == dt.date(1970, 1, 1)
    assert (found[2][1] or "").startswith("not the schema of a change event")
    with pytest.raises(SchemaError):
        captured.schema_of_block(b'{"schema":{"fields":[]},"payload":')


def test_who_may_not_read_schemas_reads_as_without_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(schemas: PublishedSchemas, topic: str) -> Any:
        raise RefusedError("reading", code)

    code = 29  # TOPIC_AUTHORIZATION_FAILED
    monkeypatch.setattr(PublishedSchemas, "history", refuse)
    cluster = Cluster("127.0.0.1:1")
    with caplog.at_level("WARNING", "penstock"):
        assert captured.history_of(cluster, "orders") == ()
    assert "right to read the topic __penstock_schemas" in caplog.text
    code = 3
    with pytest.raises(RefusedError):
        captured.history_of(cluster, "orders")


@pytest.mark.parametrize(
    ("ddl", "kind"),
    [("amount", T.DoubleType()), ("day", T.TimestampType()), ("note", T.BooleanType())],
)
def test_types_that_cannot_hold_a_column_are_found(ddl: str, kind: T.DataType) -> None:
    row = T.StructType([T.StructField("id", T.LongType()), T.StructField(ddl, kind)])
    [(field, column)] = captured.misfits(row, schema(ORDERS))
    assert (field.name, column.name) == (ddl, ddl)
    wide = T.StructType([T.StructField("amount", T.DecimalType(20, 4)),
                         T.StructField("day", T.StringType())])  # fmt: skip
    assert captured.misfits(wide, schema(ORDERS)) == []


def test_the_typed_frame() -> None:
    """What the source gives to Spark: the same columns, with the table's types."""
    row = captured.row_of(schema(ORDERS))
    value = event(ORDERS, id=1, amount=unscaled(111))
    known = {"written": False, "schemas": captured.as_json({id_of(value): schema(ORDERS)})}
    typing = Typing.of_option(Typing("debezium", row.json(), published=known).as_option())
    columns: dict[str, list[Any]] = {
        "key": [b"k", b"k"], "value": [value, b"{}"], "topic": ["t", "t"], "partition": [0, 0],
        "offset": [1, 2], "timestamp": [0, 0], "timestampType": [0, 0],
    }  # fmt: skip
    records = pa.Table.from_pydict(columns, schema=record_schema(headers=False))
    (batch,) = records.combine_chunks().to_batches()
    rows = typing.decode(batch).to_pylist()
    assert rows[0][VALUE]["_after"]["amount"] == Decimal("1.11")
    assert (rows[0][VALUE]["_op"], rows[0]["_error"]) == ("c", None)
    assert rows[1][VALUE] is None
    assert rows[1]["_error"] == captured.UNSAID
    assert orjson.loads(rows[1]["_raw"]["value"]) == {}


GRIDS = table(
    TableColumn("cells", ValueType("array", items=ValueType("int32")), native="integer[]"),
    TableColumn("prices", ValueType("array", items=decimal(6, 2)), native="numeric(6,2)[]"),
)
FLAT: dict[str, Any] = {"cells": [1, None], "prices": [unscaled(125)]}
GRID: dict[str, Any] = {"cells": [[1, 2], [3, None]], "prices": [[unscaled(125)], [None]]}


def grid_event(id_: int, values: dict[str, Any]) -> bytes:
    plain = event(GRIDS, id=id_, **FLAT)
    return plain.replace(
        orjson.dumps(FLAT)[1:-1], orjson.dumps(values)[1:-1]
    )  # fmt: skip


def test_arrays_have_the_dimensions_that_a_type_says() -> None:
    values = [
        grid_event(1, FLAT),
        grid_event(2, GRID),
        grid_event(3, {"cells": [], "prices": None}),
    ]
    assert values[1] != values[0]
    found = read(reader(GRIDS), values)
    assert found[0][0] == {"id": 1, "cells": [1, None], "prices": [Decimal("1.25")]}
    assert found[1] == (None, (
        "field cells has 2 dimensions and is read as array<int>: [[1,2],[3,null]]; write the "
        "columns by hand, with cells array<array<int>>, or cells string for the JSON of any"
    ))  # fmt: skip
    assert found[2][0] == {"id": 3, "cells": [], "prices": None}
    by_hand = T.StructType([
        T.StructField("id", T.LongType()), T.StructField("cells", T.StringType()),
        T.StructField("prices", T.ArrayType(T.ArrayType(T.DecimalType(8, 3)))),
    ])  # fmt: skip
    found = read(reader(GRIDS, written=True, row=by_hand), values)
    assert found[1][0] == {
        "id": 2, "cells": "[[1,2],[3,null]]", "prices": [[Decimal("1.250")], [None]],
    }  # fmt: skip
    assert found[2][0] == {"id": 3, "cells": "[]", "prices": None}
    assert "field prices has 1 dimension and" in str(found[0][1])
