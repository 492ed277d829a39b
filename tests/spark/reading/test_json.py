"""JSON by a schema, against Python's parser and the rules of types as an oracle."""

from __future__ import annotations

import itertools
import json
import math
import random
import struct
from decimal import Decimal
from typing import Any

import pytest
from pyspark.sql import SparkSession

from penstock.spark import reading
from tests.harness.profiles import JSON_DOCUMENTS
from tests.spark.reading.topics import HEADERS, TIME, frame

DDL = (
    "id BIGINT NOT NULL, small TINYINT, short SMALLINT, count INT, name STRING, price DOUBLE, "
    "ratio FLOAT, ok BOOLEAN, "
    "inner STRUCT<x: INT NOT NULL, y: STRING>, items ARRAY<INT>, tags MAP<STRING, BIGINT>"
)
RANGES = {"id": 63, "small": 7, "short": 15, "count": 31}
BAD = object()


def refuse(_: str) -> Any:
    raise ValueError("no JSON")


def oracle(value: bytes) -> Any:
    """What the schema makes of a value: a dict of columns, or BAD."""
    try:
        found = json.loads(value.decode("utf-8", "strict"), parse_constant=refuse)
    except ValueError:
        return BAD
    if not isinstance(found, dict):
        return BAD
    try:
        row = {
            **{name: whole(found.get(name), bits) for name, bits in RANGES.items()},
            "name": text(found.get("name")),
            "price": number(found.get("price"), "d"),
            "ratio": number(found.get("ratio"), "f"),
            "ok": typed(found.get("ok"), bool),
            "inner": inner(found.get("inner")),
            "items": items(found.get("items")),
            "tags": tags(found.get("tags")),
        }
    except (ValueError, OverflowError):
        return BAD
    return BAD if row["id"] is None else row


WORDS = ("NaN", "Infinity", "-Infinity")


def typed(value: Any, kind: type) -> Any:
    if value is not None and type(value) is not kind:
        raise ValueError(value)
    return value


def whole(value: Any, bits: int) -> int | None:
    found: int | None = typed(value, int)
    if found is not None and not -(1 << bits) <= found < 1 << bits:
        raise ValueError(found)
    return found


def number(value: Any, form: str) -> float | None:
    if value is None:
        return None
    if isinstance(value, str) and value in WORDS:
        return float(value)
    if type(value) not in {int, float}:
        raise ValueError(value)
    found: float = struct.unpack(form, struct.pack(form, float(value)))[0]
    if math.isinf(found):
        raise ValueError(value)
    return found


def text(value: Any) -> Any:
    """A string field takes any value, as its text in JSON."""
    if isinstance(value, str) and any(0xD800 <= ord(c) < 0xE000 for c in value):
        raise ValueError(value)
    return value


def check_text(found: str | None, expected: Any) -> None:
    if expected is None or isinstance(expected, str):
        assert found == expected
    else:
        assert found is not None
        assert json.loads(found) == expected


def inner(value: Any) -> Any:
    found = typed(value, dict)
    if found is None:
        return None
    row = {"x": whole(found.get("x"), 31), "y": text(found.get("y"))}
    if row["x"] is None:
        raise ValueError(value)
    return row


def items(value: Any) -> Any:
    found = typed(value, list)
    return None if found is None else [whole(each, 31) for each in found]


def tags(value: Any) -> Any:
    found = typed(value, dict)
    return None if found is None else {key: whole(each, 63) for key, each in found.items()}


def sample(rng: random.Random) -> bytes:
    """An object that may or may not fit the schema, and may be damaged afterwards."""
    numbers = [0, 1, -1, 127, 128, 200, -129, 40_000, 1 << 31, 1 << 63, 1.5, 1e39, -1e300, True]
    odd = [None, "5", "", "NaN", {}, [], {"x": 1}, {"x": None}, {"x": 2, "y": "z"}, [1, None], [""]]
    fitting: dict[str, list[Any]] = {
        "id": [1, 2, -5],
        "small": [1, -128, 127],
        "short": [1000],
        "count": [100_000],
        "name": ["x", "größe", 'quo"te', "],", "a]  , [b", "\\ud800", "😀", 5, True],
        "price": [1, 2.5, -1e10],
        "ratio": [0.5, 3],
        "ok": [True, False],
        "inner": [{"x": 1}, {"x": 2, "y": "t"}],
        "items": [[1, 2], [], [None]],
        "tags": [{"a": 1}, {}, {"b": None}],
        "unknown": [1, {"deep": [{}]}],
    }
    made: dict[str, Any] = {}
    for name, good in fitting.items():
        if rng.random() < (0.95 if name == "id" else 0.6):
            made[name] = rng.choice(good if rng.random() < 0.93 else numbers + odd)
    data = json.dumps(made, ensure_ascii=rng.random() < 0.5).encode()
    if rng.random() < 0.3:
        data = damaged(rng, data)
    return data


def damaged(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return rng.choice(
        [
            data[:at],
            data[at:],
            data[:at] + bytes([rng.randrange(256)]) + data[at:],
            data[:at] + bytes([rng.choice(b'{}[]",: \\')]) + data[at + 1 :],
            data + data,
            data + b"," + data,
            data + b"\n" + data,
            data + rng.choice([b"}", b"]", b" ", b"\x00", b"//", b"]}", b'],"x":[1', b"],[1"]),
            b"[" + data + b"]",
            b" \n" + data + b"\t",
        ]
    )


FIXED = [
    b"",
    b"  ",
    b"null",
    b"5",
    b'"x"',
    b"[]",
    b'[{"id":1}]',
    b'{"id":1}xyz',
    b'{"id":1}{"id":2}',
    b'{"id":1},{"id":2}',
    b'{"id":1}],"x":[2',
    b'{"id":1}],"_":[{"id":2}',
    b'{"id":1,"items":[1,2],"name":"x"}',
    b"{'id':1}",
    b"{id:1}",
    b'{"id":01}',
    b'{"id":"1"}',
    b'{"id":1.0}',
    b'{"id":9223372036854775808}',
    b'{"id":1,"small":200}',
    b'{"id":1,"price":1e400}',
    b'{"id":1,"price":NaN}',
    b'{"id":1,"price":"NaN","ratio":"-Infinity"}',
    b'{"id":1,"price":"Infinity","ratio":"NaN"}',
    b'{"id":1,"price":"infinity"}',
    b'{"id":1,"price":Infinity}',
    b'{"id":1,"ratio":1e39}',
    b'{"id":1,"name":"\xff"}',
    b'{"id":1,"name":"\\ud800"}',
    b'{"id":1,"name":"\\udc00x"}',
    b'{"id":1,"name":"\\ud83d\\ude00"}',
    b'{"id":1,"name":"\\\\ud800"}',
    b'{"id":1,"inner":{}}',
    b'{"id":1,"inner":{"x":null}}',
    b'{"id":null}',
    b"{}",
    b'\xef\xbb\xbf{"id":1}',
    b'{"id":1,"id":2}',
]


@pytest.mark.timeout(300)
def test_good_and_bad_are_what_an_oracle_says(spark: SparkSession, seed: int) -> None:
    rng = random.Random(seed)
    values = FIXED + [sample(rng) for _ in range(6 * JSON_DOCUMENTS)]
    rows = reading.json(frame(spark, values), DDL).collect()
    assert len(rows) == len(values)
    bad = 0
    for row in rows:
        value = values[row.offset]
        expected = oracle(value)
        if expected is BAD:
            bad += 1
            assert row._error, value
            assert row._raw.value == value
            assert row.id is None
            continue
        assert row._error is None, (value, row._error)
        assert row._raw is None
        found = {name: row[name] for name in expected}
        check_text(found.pop("name"), expected.pop("name"))
        inside, inside_expected = found.pop("inner"), expected.pop("inner")
        assert (inside is None) == (inside_expected is None)
        if inside is not None:
            assert inside.x == inside_expected["x"]
            check_text(inside.y, inside_expected["y"])
        # NaN is what it is, and equal to nothing.
        assert repr(found) == repr(expected), value
    assert len(values) / 8 < bad < len(values) * 7 / 8


def test_half_a_surrogate_pair_is_what_python_finds(spark: SparkSession) -> None:
    """Whatever stands beside it: pairs, other halves, and backslashes that are text themselves."""
    parts = ("\\ud83d", "\\uDE00", "\\\\", "ud83d", "\\u0041", "\\n", "d", "\U0001f600")
    names = ["".join(each) for n in range(1, 5) for each in itertools.product(parts, repeat=n)]
    values = [f'{{"id":1,"name":"{name}"}}'.encode() for name in names]
    rows = reading.json(frame(spark, values), "id long, name string").collect()
    assert len(rows) == len(values)
    halves = 0
    for row in rows:
        wanted = json.loads(values[row.offset])["name"]
        if any(0xD800 <= ord(char) <= 0xDFFF for char in wanted):
            halves += 1
            assert row._error == "the value has half a surrogate pair", values[row.offset]
        else:
            assert (row._error, row.name) == (None, wanted), values[row.offset]
    assert 0 < halves < len(values)


def test_position_headers_and_reason_go_to_the_dead_letters(spark: SparkSession) -> None:
    values = [b'{"id":1}', b'{"id":', None, b'{"name":"x"}', b"\xff", b'{"id":"x"}']
    rows = reading.json(frame(spark, values), "id BIGINT NOT NULL, name STRING").cache()
    good = reading.good(rows)
    assert good.columns == ["id", "name", *reading.POSITION]
    assert [(row.id, row.offset, row.topic, row.partition) for row in good.collect()] == [
        (1, 0, "input", 3)
    ]
    letters = reading.dead_letters(rows, "dead").collect()
    reasons = []
    for letter in letters:
        headers = [(header.key, header.value) for header in letter.headers]
        assert headers[:2] == HEADERS
        told = {key.removeprefix("penstock.error."): value for key, value in headers[2:]}
        assert told["topic"] == b"input"
        assert told["partition"] == b"3"
        assert told["timestamp"] == str(int(TIME.timestamp() * 1000)).encode()
        offset = int(told["offset"])
        assert letter.topic == "dead"
        assert letter.value == values[offset]
        assert letter.key == b"key-%d" % offset
        reasons.append((offset, told["reason"].decode()))
    assert sorted(reasons) == [
        (1, "the value is not valid JSON"),
        (3, "field id is missing or null"),
        (4, "the value is not UTF-8"),
        (5, 'field id is not bigint: "x"'),
    ]
    rows.unpersist()


def test_null_values_are_dropped_kept_or_refused(spark: SparkSession) -> None:
    given = frame(spark, [b'{"id":1}', None])
    assert reading.json(given, "id BIGINT").count() == 1
    kept = reading.json(given, "id BIGINT", tombstones="keep").collect()
    assert [(row.id, row._tombstone, row._error) for row in kept] == [
        (1, False, None),
        (None, True, None),
    ]
    refused = reading.json(given, "id BIGINT", tombstones="error").collect()
    assert [row._error for row in refused] == [None, "the value is null"]
    assert refused[1]._raw.headers is not None


def test_both_outputs_of_one_pass(spark: SparkSession) -> None:
    rows = reading.json(frame(spark, [b'{"id":7}', b"x"]), "id BIGINT")
    routed = reading.routed(
        rows, topic="out", value=rows["id"].cast("string"), dead_letter_topic="dead"
    )
    out = {row.topic: row for row in routed.collect()}
    assert (out["out"].value, out["out"].key, out["out"].headers) == (b"7", b"key-0", None)
    assert (out["dead"].value, out["dead"].key) == (b"x", b"key-1")
    assert len(out["dead"].headers) == 7


def test_columns_in_each_others_way_and_missing_ones(spark: SparkSession) -> None:
    given = frame(spark, [b'{"key":"a"}'])
    with pytest.raises(reading.ReadingError, match="key"):
        reading.json(given, "key STRING")
    assert reading.json(given, "key STRING", into="data").first().data.key == "a"  # type: ignore[union-attr]
    with pytest.raises(reading.ReadingError, match="offset"):
        reading.json(given.drop("offset"), "id BIGINT")
    with pytest.raises(reading.ReadingError, match="not binary"):
        reading.json(given.withColumn("value", given["value"].cast("string")), "id BIGINT")


def test_decimals_dates_and_elements_that_must_be_there(spark: SparkSession) -> None:
    values = [
        b'{"d":12.5,"t":"2026-01-02T03:04:05Z","l":[1]}',
        b'{"d":123456.7}',
        b'{"t":"soon"}',
        b'{"l":[1,null]}',
        b'{"m":{"a":null}}',
        b'{"s":[{"b":300}]}',
        b'{"s":[{"b":-3}]}',
        b'{"d":1.239}',
    ]
    from pyspark.sql import types as T  # noqa: N812

    schema = T.StructType(
        [
            T.StructField("d", T.DecimalType(5, 2)),
            T.StructField("t", T.TimestampType()),
            T.StructField("l", T.ArrayType(T.IntegerType(), containsNull=False)),
            T.StructField("m", T.MapType(T.StringType(), T.IntegerType(), valueContainsNull=False)),
            T.StructField("s", T.ArrayType(T.StructType([T.StructField("b", T.ByteType())]))),
        ]
    )
    rows = reading.json(frame(spark, values), schema).orderBy("offset").collect()
    assert [row._error for row in rows] == [
        None,
        "field d is not decimal(5,2): 123456.7",
        'field t is not timestamp: "soon"',
        "field l[] is missing or null",
        "field m{} is missing or null",
        "field s[].b is out of range",
        None,
        "field d is not decimal(5,2): 1.239",
    ]
    assert rows[0].d == Decimal("12.50")
    assert rows[6].s[0].b == -3


def test_raw_values_and_text(spark: SparkSession) -> None:
    given = frame(spark, [b"a", b"\xff", None])
    assert [row.value for row in reading.raw(given).collect()] == [b"a", b"\xff", None]
    rows = reading.raw(given, text=True).collect()
    assert [(row.value, row._error) for row in rows] == [
        ("a", None),
        (None, "the value is not UTF-8"),
        (None, None),
    ]
