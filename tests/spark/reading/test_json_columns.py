"""JSON in columns: the same whether alone or among others, in bulk or one by one, or by Spark."""

from __future__ import annotations

import datetime as dt
import json
import pickle
import random
import re
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql import types as T  # noqa: N812

from penstock.spark import reading
from penstock.spark.reading.json_columns import BLOCK_ROWS, JsonColumns, is_supported
from penstock.spark.reading.json_records import Records, has_half_pair
from tests.harness.profiles import JSON_DOCUMENTS, examples
from tests.spark.reading.topics import frame

SCALARS: list[T.DataType] = [
    T.StringType(),
    T.BooleanType(),
    T.ByteType(),
    T.ShortType(),
    T.IntegerType(),
    T.LongType(),
    T.FloatType(),
    T.DoubleType(),
    T.TimestampType(),
    T.DateType(),
    T.DecimalType(10, 2),
    T.DecimalType(38, 0),
]
NAMES = ["a", "b", "id", "é", "at"]
ODD_TEXTS = [
    *("2026-01-02T03:04:05Z", "2026-01-02 03:04:05.123456", "2026-01-02T03:04:05.1234567Z"),
    *("2026-01-02T03:04:05.123456789+05:30", "2026-01-02T03:04:05.1234567890Z"),
    *("2026-01-02", "2026-1-2", "2026", "2026-02-29", "2024-02-29", "2026-01-02T03:04Z"),
    *("2026-01-02T03", "2026-01-02T03:04", "2026-01-02T03Z", "2026-01-02T24:00:00Z"),
    *("2026-01-02T03:04:05+01:00", "2026-01-02T03:04:05-18:00", "2026-01-02T03:04:05+18:30"),
    *("2026-01-02T03:04:05+0100", "2026-01-02T03:04:05+1:00", "2026-01-02T03:04:05+01"),
    *("2026-01-02T03:04:05.5+23:59", "2026-03-29T02:30:00 Europe/Amsterdam", "0000-01-01"),
    *("2026-10-25T02:30:00 Europe/Amsterdam", "2026-01-02T03:04:05 PST", "-0044-03-15T00:00:00"),
    *("2026-01-02T03:04:05GMT+2", " 2026-01-02T03:04:05Z ", "2026-01-02T", "2026-01-02T03:04:"),
    *("2026-01-02T03:04:05.", "2026-01-02T03:04:05.Z", "2026-01-02T03:04:05z", "99999-01-01"),
    *("2026-13-01T00:00:00Z", "2026-01-00T00:00:00Z", "2026-01-02T03:04:60Z", "1969-12-31"),
    *("1582-10-10", "0001-01-01T00:00:00Z", "9999-12-31T23:59:59.999999Z", "294248-01-01"),
    *(
        "",
        " ",
        "NaN",
        "Infinity",
        "5",
        "true",
        "é",
        "\U0001f600",
        "\x00",
        "\\",
        '"',
        "a\nb",
        ", NaN",
    ),
]
ODD_NUMBERS = [
    *("0", "-0", "-0.0", "1.0", "1e2", "1E+2", "127", "128", "-129", "32768", "2147483648"),
    *("9223372036854775807", "9223372036854775808", "18446744073709551616", "1e400", "-1e400"),
    *("3.4028235e38", "3.5e38", "1e-400", "0.1", "123456789.125", "1e16", "0.0001", "1.5e300"),
    *("1767323045", "9223372036855", "1" + "0" * 30, "1" + "0" * 320, "1" * 1001, "1e-5"),
]
BROKEN_PARTS = ["NaN", "-Infinity", "01", "+1", ".5", "1.", "'x'", "tru", '"\\ud800"', '"\\udc00"',
                '"\\ud83d\\ude00"', '"\t"', '"\\x"', "", "[1,]", "{,}", "/**/1"]  # fmt: skip


def schema_of(fields: list[tuple[str, T.DataType, bool]]) -> T.StructType:
    return T.StructType([T.StructField(*field) for field in fields])


def kinds(depth: int = 2) -> st.SearchStrategy[T.DataType]:
    scalar = st.sampled_from(SCALARS)
    if not depth:
        return scalar
    inner = kinds(depth - 1)
    return st.one_of(
        scalar, scalar, st.builds(T.ArrayType, inner, st.booleans()), structs(depth - 1)
    )


def structs(depth: int) -> st.SearchStrategy[T.StructType]:
    field = st.tuples(st.sampled_from(NAMES), kinds(depth), st.sampled_from([True, True, False]))
    return st.lists(field, min_size=1, max_size=4, unique_by=lambda each: each[0]).map(schema_of)


class Writer:
    """JSON text that mostly fits a schema."""

    def __init__(self, rng: random.Random, oddity: float) -> None:
        self.rng, self.oddity = rng, oddity

    def value(self, kind: T.DataType) -> str:
        rng = self.rng
        if rng.random() < self.oddity:
            return self.odd(kind)
        if isinstance(kind, T.StructType):
            return self.struct(kind)
        if isinstance(kind, T.ArrayType):
            return (
                "[" + ",".join(self.value(kind.elementType) for _ in range(rng.randrange(3))) + "]"
            )
        if isinstance(kind, T.BooleanType):
            return rng.choice(["true", "false"])
        if isinstance(kind, T.StringType):
            return json.dumps(rng.choice(["", "x", "é", "a b", "\U0001f600", "NaN"]),
                              ensure_ascii=rng.random() < 0.5)  # fmt: skip
        if isinstance(kind, T.TimestampType):
            return f'"2026-0{rng.randint(1, 9)}-1{rng.randint(0, 9)}T03:0{rng.randint(0, 9)}:05Z"'
        if isinstance(kind, T.DateType):
            return f'"19{rng.randint(10, 99)}-1{rng.randint(0, 2)}-0{rng.randint(1, 9)}"'
        if isinstance(kind, T.FloatType | T.DoubleType):
            return rng.choice([repr(rng.uniform(-1e3, 1e3)), str(rng.randrange(100))])
        if kind == T.DecimalType(10, 2):
            cents = rng.choice(["", ".5", ".07", ".50000"])
            return rng.choice(["{}", '"{}"']).format(f"{rng.randrange(-9999, 9999)}{cents}")
        return str(rng.randrange(-128, 128))

    def odd(self, kind: T.DataType) -> str:
        rng = self.rng
        chosen = rng.randrange(7)
        if chosen < 2:
            return json.dumps(rng.choice(ODD_TEXTS), ensure_ascii=rng.random() < 0.5)
        if chosen < 4:
            return rng.choice(ODD_NUMBERS)
        if chosen == 4:
            return rng.choice(
                ["null", "true", "[]", "{}", "[null]", '{"a":1, "a" : [1.50, "é\\n"]}']
            )
        if chosen == 5 and rng.random() < 0.3:
            return rng.choice(BROKEN_PARTS)
        return (
            self.value(rng.choice(SCALARS)) if rng.random() < 0.5 else self.struct(T.StructType())
        )

    def struct(self, kind: T.StructType) -> str:
        rng = self.rng
        blank = rng.choice(["", "", "", " ", "\n", "\r\n\t"])
        fields = [
            f"{blank}{json.dumps(f.name, ensure_ascii=rng.random() < 0.5)}:{self.value(f.dataType)}"
            for f in kind.fields
            if rng.random() < 0.95
        ]
        if rng.random() < 0.3:
            fields.append(f'"other":{blank}{self.odd(kind)}')
        if fields and rng.random() < self.oddity / 2:
            fields.append(fields[0])
        rng.shuffle(fields)
        return "{" + ",".join(fields) + blank + "}"


AROUND = ["", " ", "\n", "x", "\ufeff", "]", "}", ",", "\x00", "null", "[{}]", "{}", " {}", ",{}"]


def document(rng: random.Random, schema: T.StructType, oddity: float) -> bytes | None:
    """A value for a schema: fitting, odd, or damaged."""
    text = Writer(rng, oddity).struct(schema)
    value = text.encode()
    if rng.random() >= oddity:
        return value
    chosen = rng.randrange(8)
    if chosen == 0:
        return value[: rng.randrange(len(value) + 1)]
    if chosen == 1:
        return value + rng.choice(AROUND).encode()
    if chosen == 2:
        return rng.choice(AROUND).encode() + value
    if chosen == 3:
        return rng.choice([None, b"", b"  ", b"\n", b"null", b"5", b'"x"', b"[]", b"{}",
                           b"{},{}", b'{}],"x":[{}', b"{}],[{}", b"{}{}"])  # fmt: skip
    if chosen == 4:
        at = rng.randrange(len(value))
        return value[:at] + rng.choice([b"\xff", b"\x00", b"\xed\xa0\x80", b" "]) + value[at:]
    return value


def told(found: tuple[pa.StructArray, pa.StringArray]) -> list[tuple[str, str | None]]:
    """Rows in a form to compare: every bit of a float, and times beyond Python's."""
    rows, reasons = found
    rows.validate(full=True)
    assert len(rows) == len(reasons)
    return list(zip(map(repr, plain(rows)), reasons.to_pylist(), strict=True))


def plain(column: pa.Array) -> list[Any]:
    if pa.types.is_struct(column.type):
        fields = [plain(column.field(number)) for number in range(column.type.num_fields)]
        valid = column.is_valid().to_pylist()
        return [
            [field[row] for field in fields] if there else None for row, there in enumerate(valid)
        ]
    if pa.types.is_list(column.type):
        values = plain(column.values)
        offsets, valid = column.offsets.to_pylist(), column.is_valid().to_pylist()
        return [
            values[offsets[row] : offsets[row + 1]] if there else None
            for row, there in enumerate(valid)
        ]
    if pa.types.is_timestamp(column.type):
        return list(column.cast(pa.int64()).to_pylist())
    if pa.types.is_date(column.type):
        return list(column.cast(pa.int32()).to_pylist())
    return list(column.to_pylist())


def one_by_one(columns: JsonColumns, schema: T.StructType, values: list[bytes | None]) -> Any:
    """What the careful way alone says."""
    records = Records(schema)
    found = [(None, None) if value is None else records.read(value) for value in values]
    return told(
        (
            pa.array([row for row, _ in found], columns.arrow),
            pa.array([why for _, why in found], pa.string()),
        )
    )


@settings(max_examples=examples(25), suppress_health_check=list(HealthCheck))
@given(
    schema=structs(2),
    seed=st.integers(0, 1 << 32),
    oddity=st.sampled_from([0.0, 0.02, 0.1, 0.4]),
    count=st.integers(0, 40),
)
def test_a_record_is_read_the_same_alone_and_among_others(
    schema: T.StructType, seed: int, oddity: float, count: int
) -> None:
    rng = random.Random(seed)
    values = [document(rng, schema, oddity) for _ in range(count)]
    assert is_supported(schema)
    columns = JsonColumns(schema)
    together = told(columns.parse(pa.array(values, pa.binary())))
    alone = [told(columns.parse(pa.array([value], pa.binary())))[0] for value in values]
    assert together == alone
    assert together == one_by_one(columns, schema, values)


PIECES = [*'{}[]":,.-\n1e \\\x00\x1fé\ufeff', '"a"', '"b"', "NaN", "Inf", "inity", "null", "{}",
          "-0", '{"a":"x"}', '"b":[{"a":1}]', "\\u", "\\ud800", "\\udc00", "\\ud83d\\ude00",
]  # fmt: skip


def test_no_value_reaches_into_its_neighbours() -> None:
    inner = schema_of([("a", T.DoubleType(), True)])
    schema = schema_of([("a", T.StringType(), True), ("b", T.ArrayType(inner), True)])
    columns, rng = JsonColumns(schema), random.Random(11)
    for _ in range(JSON_DOCUMENTS):
        values: list[bytes | None] = []
        for _ in range(rng.randint(2, 4)):
            text = rng.choice(["{}", '{"a":"x","b":[{"a":1.5}]}', '{"a":"x\\n","c":{"d":[1]}}'])
            for _ in range(rng.randint(0, 2)):
                at = rng.randrange(1, len(text))
                text = text[:at] + rng.choice(PIECES) + text[at + rng.randrange(2) :]
            values.append(text.encode())
        found = told(columns.parse(pa.array(values, pa.binary())))
        assert found == one_by_one(columns, schema, values), values


def test_large_blocks_with_few_odd_records_are_read_the_same() -> None:
    schema = schema_of([("a", T.LongType(), False), ("b", T.StringType(), True),
                        ("at", T.TimestampType(), True)])  # fmt: skip
    rng = random.Random(7)
    columns = JsonColumns(schema)
    for oddity, count in ((0.0005, BLOCK_ROWS + 1000), (0.005, 3000), (0.2, 1000)):
        values = [document(rng, schema, oddity) for _ in range(count)]
        # A slice: offsets that do not begin at zero.
        found = columns.parse(pa.array([b"{", *values], pa.binary()).slice(1))
        assert told(found) == one_by_one(columns, schema, values)
    assert not len(columns.parse(pa.array([], pa.binary()))[0])


def test_what_is_nested_deep_or_long_is_refused_by_itself() -> None:
    schema = schema_of([("a", T.LongType(), True), ("b", T.StringType(), True)])
    columns = JsonColumns(schema)
    values: list[bytes | None] = [
        b'{"a":1,"x":%s}' % (b"[" * depth + b"]" * depth)
        for depth in (498, 499, 500, 2000, 200_000)
    ]
    values += [b'{"a":1,"b":%s}' % (b"[" * depth + b"]" * depth) for depth in (499, 500)]
    values += [b'{"a":1,"x":"%s"}' % (b"[" * 2000), b'{"a":1,"x":%s}' % (b"1" * 1001)]
    reasons = columns.parse(pa.array(values, pa.binary()))[1].to_pylist()
    deep = "the value is nested too deep"
    assert reasons[:7] == [None, None, deep, deep, deep, None, deep]
    assert reasons[7:] == [None, "the value is not valid JSON"]


def test_it_can_be_sent_to_a_worker() -> None:
    schema = schema_of([("a", T.ArrayType(T.DateType()), True)])
    columns = pickle.loads(pickle.dumps(JsonColumns(schema)))
    found = columns.parse(pa.array([b'{"a":["1970-01-02",null]}'], pa.binary()))
    assert told(found) == [("[[1, None]]", None)]


@pytest.mark.parametrize(
    "kind",
    [T.BinaryType(), T.MapType(T.StringType(), T.StringType()),
     T.TimestampNTZType(), T.VarcharType(5), T.StructType(), T.VariantType(),
     T.StringType("UTF8_LCASE"), T.NullType(), T.ArrayType(T.BinaryType())],
)  # fmt: skip
def test_other_types_are_left_to_spark(kind: T.DataType) -> None:
    assert not is_supported(schema_of([("a", T.LongType(), True), ("b", kind, True)]))


CLICK = (
    "user BIGINT, page STRING, at TIMESTAMP, day DATE, price DOUBLE, ok BOOLEAN, "
    "total DECIMAL(10,2)"
)
NESTED = (
    "id INT, small TINYINT, short SMALLINT, ratio FLOAT, inner STRUCT<x: INT NOT NULL, s: STRING, "
    "t: ARRAY<TIMESTAMP>>, items ARRAY<INT>, tags ARRAY<STRING>, rows ARRAY<STRUCT<n: TINYINT, "
    "d: DATE>>"
)
ROW = "STRUCT<id: BIGINT NOT NULL, name: STRING, balance: DOUBLE, updated: TIMESTAMP>"
ENVELOPE = f"before {ROW}, after {ROW}, op STRING NOT NULL, ts_ms BIGINT"
# Times of day without a date, and dates that are digits: where we differ.
NOT_OURS = re.compile(r"\s*(T?[0-9]{0,2}:.*|[+-]?[0-9]{1,3}|[+-]?[0-9]{8,})\s*", re.DOTALL)


# Spark wraps these seconds around, takes this date for days since 1970, and this decimal for 0.
REFUSED = (b"9223372036854775807", b"9223372036855", b'"5"', b'"total":1e-400')


UNFIT_NUMBER = re.compile(
    r'(field .* is not .*?)(: (?:-?[0-9][-+.0-9eE]*(?:\.\.\.)?|"-?Infinity"))?'
)


def is_same_fault(ours: tuple[str, str | None], theirs: tuple[str, str | None]) -> bool:
    """Whether both name the same field: a number that stands there may be written otherwise, and
    where a field is there twice Spark does not say what it found."""
    told = [UNFIT_NUMBER.fullmatch(each[1] or "") for each in (ours, theirs)]
    heads = {each and each[1] for each in told}
    if ours[0] != theirs[0]:
        return False
    return (len(heads) == 1 and None not in heads) or (ours[1] or "").startswith(f"{theirs[1]}: ")


def has_moment(value: Any, kind: T.DataType) -> bool:
    """Whether a number with a fraction, or an exponent, stands for a time."""
    if isinstance(kind, T.StructType) and isinstance(value, dict):
        return any(has_moment(value.get(each.name), each.dataType) for each in kind)
    if isinstance(kind, T.ArrayType) and isinstance(value, list):
        return any(has_moment(each, kind.elementType) for each in value)
    return isinstance(kind, T.TimestampType) and isinstance(value, float)


def excused(value: bytes, schema: T.StructType, mine: str | None, spark: str | None) -> bool:
    """Whether a difference from Spark is one that the module's text names."""
    try:
        found = json.loads(value)
    except ValueError:
        return mine == "the value is not valid JSON" and spark is not None
    if has_moment(found, schema):
        return spark is not None
    if has_half_pair(value):
        return mine is not None and spark is not None
    return mine is not None and any(part in value for part in REFUSED)


def hand_picked(schema: T.StructType) -> list[bytes]:
    values = []
    for field in schema.fields:
        name = json.dumps(field.name)
        values += [f"{{{name}:{json.dumps(text, ensure_ascii=False)}}}" for text in ODD_TEXTS]
        for part in [*ODD_NUMBERS, *BROKEN_PARTS]:
            values += [f"{{{name}:{part}}}", f'{{"other":{part}}}', f"{{{name}:[{part}]}}"]
    return [value.encode() for value in values]


def damaged_times(rng: random.Random) -> list[bytes]:
    """Texts that are almost times, or times in other forms."""
    values: list[bytes] = []
    while len(values) < 700:
        chars = list(rng.choice(ODD_TEXTS[:37]))
        for _ in range(rng.randint(1, 2)):
            at = rng.randrange(len(chars) + 1)
            chars[at : at + rng.randrange(2)] = rng.choice(["", *"0123456789-+:. TZ"])
        text = "".join(chars)
        if not NOT_OURS.fullmatch(text) and "/" not in text and "PST" not in text:
            values += [json.dumps({name: text}).encode() for name in ("at", "day")]
    return values


MOMENTS = {
    b"1795127237.5": "2026-11-19T22:27:17.500000",
    b"1795127237.123456": "2026-11-19T22:27:17.123456",
    # What is less than a microsecond is cut off, as in texts.
    b"1795127237.1234567": "2026-11-19T22:27:17.123456",
    b"-1.5": "1969-12-31T23:59:58.500000",
    b"1.7951272375e9": "2026-11-19T22:27:17.500000",
    b"8589934591.999999": "2242-03-16T12:56:31.999999",
    # Farther away doubles do not tell microseconds apart, and the text has them.
    b"8589934592.000001": None,
    b"1e300": None,
}


def test_a_time_is_a_number_with_a_fraction() -> None:
    schema = schema_of([("at", T.TimestampType(), True)])
    values = [b'{"at":%s}' % each for each in MOMENTS]
    rows, reasons = JsonColumns(schema).parse(pa.array(values, pa.binary()))
    told = [row and row["at"].isoformat(timespec="microseconds")[:26] for row in rows.to_pylist()]
    assert told == list(MOMENTS.values())
    assert reasons.to_pylist()[-2:] == [
        "field at is not timestamp: 8.589934592000002E9", "field at is not timestamp: 1.0E300",
    ]  # fmt: skip
    # Of milliseconds, too, and as columns that are asked for in bulk.
    counted, _ = JsonColumns(schema, "ms").parse(pa.array([b'{"at":1795127237500.25}'] * 3))
    wanted = dt.datetime(2026, 11, 19, 22, 27, 17, 500250, dt.UTC)
    assert [row["at"] for row in counted.to_pylist()] == [wanted] * 3


@pytest.mark.parametrize("quote", ["", '"'])
def test_decimals_are_not_rounded(quote: str) -> None:
    texts = ["1.239", "1.23", "-0.5", "1.2300", "1e3", "123456789.1", "99999999.99", "1e-400", "7"]
    values = [f'{{"d":{quote}{each}{quote}}}'.encode() for each in texts]
    columns = JsonColumns(schema_of([("d", T.DecimalType(10, 2), True)]))
    rows, reasons = columns.parse(pa.array(values, pa.binary()))
    wanted = [None, "1.23", "-0.50", "1.23", "1000.00", None, "99999999.99", None, "7.00"]
    assert [row and str(row["d"]) for row in rows.to_pylist()] == wanted
    assert reasons[0].as_py() == f"field d is not decimal(10,2): {quote}1.239{quote}"


@pytest.mark.parametrize("ddl", [CLICK, NESTED, ENVELOPE], ids=["click", "nested", "envelope"])
def test_spark_reads_the_same(penstock_spark: SparkSession, ddl: str) -> None:
    schema = T.StructType.fromDDL(ddl)
    assert isinstance(schema, T.StructType)
    rng = random.Random(ddl)
    values: list[bytes | None] = [*hand_picked(schema)]
    if ddl == CLICK:
        values += damaged_times(rng)
    for oddity in (0.0, 0.05, 0.2):
        values += [document(rng, schema, oddity) for _ in range(JSON_DOCUMENTS)]
    found = reading.json(frame(penstock_spark, values), schema, into="row", tombstones="keep")
    table = found.select("offset", "row", "_error").orderBy("offset").toArrow()
    columns = JsonColumns(schema)
    mine = told(columns.parse(pa.array(values, pa.binary())))
    rows = table.column("row").combine_chunks()
    spark = list(zip(map(repr, plain(rows)), table.column("_error").to_pylist(), strict=True))
    wrong = [
        (value, ours, theirs)
        for value, ours, theirs in zip(values, mine, spark, strict=True)
        if ours != theirs
        and not is_same_fault(ours, theirs)
        and not (value is not None and excused(value, schema, ours[1], theirs[1]))
    ]
    assert wrong == []
