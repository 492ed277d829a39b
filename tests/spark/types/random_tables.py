"""Tables of random types and values, and what the values mean: to compare stores with databases.

A `Kind` is a type of a database: how a random value is written in SQL, which expression makes the
database print a value, and what its text, or a value read from a store, means. Two values are the
same if they mean the same.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from random import Random
from typing import Any, Final
from uuid import UUID

import numpy as np

Meaning = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Kind:
    """A type of a column."""

    sql: str
    literal: Callable[[Random], str]
    means: Meaning
    # The database's own text of column {c}.
    text: str = "{c}::text"
    # Whether a store has a type for a value with this meaning.
    fits: Callable[[Any], bool] = lambda meaning: True


# ---- what values mean ------------------------------------------------------------------------


def number(value: Any) -> Any:
    made = Decimal(str(value))
    return made.normalize() if made.is_finite() else str(made)


def double(value: Any) -> float:
    return float(value) + 0.0


def single(value: Any) -> float:
    return float(np.float32(float(value))) + 0.0


def whole(value: Any) -> int:
    return int(value)


def boolean(value: Any) -> bool:
    return {"t": True, "true": True, "f": False, "false": False}[value] if isinstance(
        value, str
    ) else bool(value)  # fmt: skip


def text(value: Any) -> str:
    return str(value)


def data(value: Any) -> bytes:
    if isinstance(value, str):
        return bytes.fromhex(value.removeprefix("\\x"))
    return bytes(value)


def day(value: Any) -> str:
    return value if isinstance(value, str) else value.isoformat()


def moment(value: Any) -> Any:
    """A timestamp without a zone, or in UTC."""
    if isinstance(value, str):
        if "infinity" in value or "BC" in value or len(value.split("-")[0]) > 4:
            return value
        value = dt.datetime.fromisoformat(value)
    made: dt.datetime = value
    return made.astimezone(dt.UTC).replace(tzinfo=None) if made.tzinfo else made


def clock(value: Any) -> dt.time:
    if isinstance(value, dt.timedelta):
        return (dt.datetime(2000, 1, 1) + value).time()  # noqa: DTZ001
    return dt.time.fromisoformat(value) if isinstance(value, str) else value


def document(value: Any) -> Any:
    return json.loads(value, parse_float=Decimal)


def bits(value: Any) -> bytes:
    """PostgreSQL shows 101; stores have bytes, the last bit in the first one."""
    if not isinstance(value, str):
        return bytes(value)
    return int(value or "0", 2).to_bytes((len(value) + 7) // 8, "little")


_SPAN: Final = re.compile(r"P(-?\d+)Y(-?\d+)M(-?\d+)DT(-?\d+)H(-?\d+)M(-?)(\d+)(?:\.(\d+))?S")


def span(value: str) -> tuple[int, ...]:
    """Months, days and microseconds of an interval."""
    found = _SPAN.fullmatch(value)
    if found is None:
        return tuple(int(Decimal(part)) for part in value.split(" "))
    years, months, days, hours, minutes, sign, seconds, fraction = found.groups()
    us = int(seconds) * 1_000_000 + int((fraction or "").ljust(6, "0"))
    us = (int(hours) * 3600 + int(minutes) * 60) * 1_000_000 + (-us if sign else us)
    return int(years) * 12 + int(months), int(days), us


def _has_year(value: Any) -> bool:
    """Of a date or moment: whether it is in a year from 1 to 9999."""
    return not isinstance(value, str) or bool(re.fullmatch(r"\d{4}-\d\d-\d\d", value))


def _is_finite(value: Any) -> bool:
    return isinstance(value, Decimal)


def _fits_any_scale(value: Any) -> bool:
    """decimal(38,18): the type of a numeric that says nothing."""
    return _fits(38, 18)(value)


def _fits(digits: int, scale: int) -> Callable[[Any], bool]:
    def fits(value: Any) -> bool:
        if not isinstance(value, Decimal):
            return False
        return abs(value) < Decimal(10) ** (digits - scale) and (
            -int(value.as_tuple().exponent) <= scale
        )

    return fits


# ---- random values ---------------------------------------------------------------------------


def integers(low: int, high: int) -> Callable[[Random], str]:
    edges = [each for each in (low, high, 0, 1, -1) if low <= each <= high]
    return lambda random: str(
        random.choice(edges) if random.random() < 0.3 else random.randint(low, high)
    )


def decimals(digits: int, scale: int, *words: str) -> Callable[[Random], str]:
    def literal(random: Random) -> str:
        if words and random.random() < 0.1:
            return f"'{random.choice(words)}'"
        whole_digits = random.randint(0, digits)
        unscaled = random.randint(0, 10**whole_digits - 1) * random.choice((1, -1))
        return str(Decimal(unscaled).scaleb(-scale))

    return literal


def doubles(random: Random) -> str:
    value = random.choice((
        random.uniform(-1e6, 1e6), random.random() * 10.0 ** random.randint(-300, 300), 0.1, 0.0,
    ))  # fmt: skip
    return repr(value)


def singles(random: Random) -> str:
    return repr(float(np.float32(random.uniform(-1e6, 1e6) * 10.0 ** random.randint(-20, 20))))


_LETTERS: Final = "ab XYZ09'\"\\%_\t\n{}[],:;$äßñ€漢🦆\u2028\u0301"


def words(most: int) -> Callable[[Random], str]:
    return lambda random: "".join(random.choices(_LETTERS, k=random.randint(0, most)))


def quoted(value: str, *, escape: str = "") -> str:
    value = value.replace("'", "''")
    return f"{escape}'{value.replace(chr(92), chr(92) * 2) if escape else value}'"


def strings(most: int, escape: str = "") -> Callable[[Random], str]:
    return lambda random: quoted(words(most)(random), escape=escape)


def days(first: int, last: int, *others: str) -> Callable[[Random], str]:
    def literal(random: Random) -> str:
        if others and random.random() < 0.05:
            return f"'{random.choice(others)}'"
        return f"'{dt.date.fromordinal(random.randint(first, last)).isoformat()}'"

    return literal


def moments(
    first: int, last: int, digits: int = 6, zone: str = "", *others: str
) -> Callable[[Random], str]:
    def literal(random: Random) -> str:
        if others and random.random() < 0.05:
            return f"'{random.choice(others)}'"
        day = dt.date.fromordinal(random.randint(first, last)).isoformat()
        return f"'{day} {clock_text(random, digits)}{zone}'"

    return literal


def clock_text(random: Random, digits: int) -> str:
    seconds, fraction = random.randint(0, 86_399), random.randint(0, 10**digits - 1)
    made = str(dt.timedelta(seconds=seconds)).rjust(8, "0")
    return f"{made}.{fraction:0{digits}d}" if digits and random.random() < 0.8 else made


def value_of_json(random: Random, depth: int = 0) -> Any:
    kind = random.randint(0, 7 if depth < 3 else 4)
    if kind >= 6:
        return [value_of_json(random, depth + 1) for _ in range(random.randint(0, 3))]
    if kind == 5:
        return {
            words(5)(random): value_of_json(random, depth + 1) for _ in range(random.randint(0, 3))
        }
    return (None, True, random.randint(-(2**53), 2**53), random.randint(-999, 999) / 8,
            words(8)(random))[kind]  # fmt: skip


def documents(escape: str = "") -> Callable[[Random], str]:
    return lambda random: quoted(json.dumps(value_of_json(random)), escape=escape)


def one_of(*values: str) -> Callable[[Random], str]:
    return lambda random: f"'{random.choice(values)}'"


def uuids(random: Random) -> str:
    return f"'{UUID(int=random.getrandbits(128), version=4)}'"


def arrays(literal: Callable[[Random], str], of: str) -> Callable[[Random], str]:
    def made(random: Random) -> str:
        items = [
            "NULL" if random.random() < 0.1 else literal(random)
            for _ in range(random.randint(0, 4))
        ]
        return f"ARRAY[{', '.join(items)}]::{of}[]"

    return made


def raw(most: int, form: str) -> Callable[[Random], str]:
    return lambda random: form % random.randbytes(random.randint(0, most)).hex()


def spans(random: Random) -> str:
    parts = [
        f"{random.randint(-30, 30)} {unit}"
        for unit in ("years", "months", "days", "hours", "minutes")
    ]
    parts = random.sample(parts, random.randint(1, 5))
    return f"'{' '.join(parts)} {random.randint(0, 10**8) / 1e6} s'"


FIRST: Final = 1
LAST: Final = dt.date(9999, 12, 31).toordinal()
_IN_UTC: Final = "({c} AT TIME ZONE 'UTC')::text"
_SPAN_SQL: Final = (
    "nullif(concat_ws(' ', extract(year from {c}) * 12 + extract(month from {c}), "
    "extract(day from {c}), "
    "(extract(hour from {c}) * 3600 + extract(minute from {c}) * 60) * 1000000 + "
    "extract(microseconds from {c})), '')"
)

POSTGRES_TYPES: Final = ("CREATE TYPE mood AS ENUM ('sad', 'it''s \"ok\"', 'happy')",)
POSTGRES: Final = (
    Kind("smallint", integers(-(2**15), 2**15 - 1), whole),
    Kind("integer", integers(-(2**31), 2**31 - 1), whole),
    Kind("bigint", integers(-(2**63), 2**63 - 1), whole),
    Kind("boolean", one_of("t", "f"), boolean),
    Kind("real", singles, single),
    Kind("double precision", doubles, double),
    Kind("numeric(12,2)", decimals(12, 2, "NaN"), number, fits=_is_finite),
    Kind("numeric(5,5)", decimals(5, 5), number),
    Kind("numeric(38,10)", decimals(38, 10), number),
    Kind("numeric(50,10)", decimals(50, 10), number, fits=_fits(38, 10)),
    Kind("numeric", decimals(45, 18, "NaN", "Infinity", "-Infinity"), number, fits=_fits_any_scale),
    Kind("numeric", decimals(30, 20), number, fits=_fits_any_scale),
    Kind("money", lambda random: f"'{random.randint(-(10**9), 10**9) / 100:.2f}'", number,
         "{c}::numeric::text"),
    Kind("text", strings(40), text),
    Kind("varchar(20)", strings(20), text),
    Kind("char(7)", strings(7), text, "rpad({c}, 7)"),
    Kind("uuid", uuids, text),
    Kind("json", documents(), document),
    Kind("jsonb", documents(), document),
    Kind("bytea", raw(30, "'\\x%s'"), data),
    Kind("date", days(FIRST, LAST, "infinity", "-infinity", "0044-03-15 BC", "10000-01-01"), day,
         fits=_has_year),
    Kind("time", lambda random: f"'{clock_text(random, 6)}'", clock),
    Kind("time(3)", lambda random: f"'{clock_text(random, 3)}'", clock),
    Kind("timestamp", moments(FIRST, LAST, 6, "", "infinity", "20000-01-01"), moment,
         fits=_has_year),
    Kind("timestamp(3)", moments(FIRST, LAST, 3), moment),
    Kind("timestamp with time zone", moments(2, LAST - 1, 6, "+05:30", "-infinity"), moment,
         _IN_UTC, fits=_has_year),
    Kind("interval", spans, span, _SPAN_SQL),
    Kind("bit(12)", lambda random: f"B'{random.getrandbits(12):012b}'", bits),
    Kind("bit varying(40)", lambda random: f"B'{random.getrandbits(40) >> 7:b}'", bits),
    Kind("inet", one_of("10.0.0.1/8", "::1", "2001:db8::/32"), text, "abbrev({c})"),
    Kind("macaddr", one_of("08:00:2b:01:02:03"), text),
    Kind("mood", one_of("sad", "it''s \"ok\"", "happy"), text),
    Kind("integer[]", arrays(integers(-9, 9), "integer"), document, "to_json({c})::text"),
    Kind("text[]", arrays(strings(6), "text"), document, "to_json({c})::text"),
    Kind("numeric(10,2)[]", arrays(decimals(10, 2), "numeric"), document, "to_json({c})::text"),
    Kind("date[]", arrays(days(FIRST, LAST), "date"), document, "to_json({c})::text"),
    Kind("uuid[]", arrays(uuids, "uuid"), document, "to_json({c})::text"),
    Kind("int4range", one_of("[1,5)", "empty"), text),
)  # fmt: skip

_SHOWN: Final = "CAST({c} AS CHAR)"
_ESCAPED: Final = "_utf8mb4"
MARIADB: Final = (
    Kind("TINYINT", integers(-128, 127), whole, _SHOWN),
    Kind("TINYINT UNSIGNED", integers(0, 255), whole, _SHOWN),
    Kind("SMALLINT UNSIGNED", integers(0, 2**16 - 1), whole, _SHOWN),
    Kind("MEDIUMINT", integers(-(2**23), 2**23 - 1), whole, _SHOWN),
    Kind("INT", integers(-(2**31), 2**31 - 1), whole, _SHOWN),
    Kind("INT UNSIGNED", integers(0, 2**32 - 1), whole, _SHOWN),
    Kind("BIGINT", integers(-(2**63), 2**63 - 1), whole, _SHOWN),
    Kind("BIGINT UNSIGNED", integers(0, 2**64 - 1), number, _SHOWN),
    Kind("DOUBLE", doubles, double, _SHOWN),
    Kind("DECIMAL(12,2)", decimals(12, 2), number, _SHOWN),
    Kind("DECIMAL(30,30)", decimals(30, 30), number, _SHOWN),
    Kind("DECIMAL(65,10)", decimals(60, 10), number, _SHOWN, fits=_fits(38, 10)),
    Kind("BIT(1)", integers(0, 1), lambda value: bool(int(value)), "CAST({c} + 0 AS CHAR)"),
    Kind("YEAR", integers(1901, 2155), whole, _SHOWN),
    Kind("DATE", days(FIRST, LAST), day, _SHOWN),
    Kind("TIME(6)", lambda random: f"'{clock_text(random, 6)}'", clock, _SHOWN),
    Kind("DATETIME(6)", moments(366, LAST), moment, _SHOWN),
    Kind("DATETIME", moments(366, LAST, 0), moment, _SHOWN),
    Kind("TIMESTAMP(6) NULL", moments(dt.date(1971, 1, 1).toordinal(),
         dt.date(2037, 1, 1).toordinal()), moment, _SHOWN),
    Kind("VARCHAR(60) CHARACTER SET utf8mb4", strings(20, _ESCAPED), text, "{c}"),
    Kind("LONGTEXT CHARACTER SET utf8mb4", strings(60, _ESCAPED), text, "{c}"),
    Kind("JSON", documents(_ESCAPED), document, "{c}"),
    Kind("VARBINARY(30)", raw(30, "X'%s'"), data, "HEX({c})"),
    Kind("LONGBLOB", raw(60, "X'%s'"), data, "HEX({c})"),
    Kind("ENUM('sad','o,k','happy')", one_of("sad", "o,k", "happy"), text, "{c}"),
    Kind("SET('a','b','c')", one_of("", "a", "a,c", "a,b,c"), text, "{c}"),
    Kind("UUID", uuids, text, _SHOWN),
    Kind("INET6", one_of("::1", "2001:db8::5"), text, _SHOWN),
)  # fmt: skip

SQLITE: Final = (
    Kind("INTEGER", integers(-(2**63) + 1, 2**63 - 1), whole, "{c}"),
    Kind("REAL", doubles, double, "{c}"),
    Kind("TEXT", strings(40), text, "{c}"),
    Kind("VARCHAR(20)", strings(20), text, "{c}"),
    Kind("BLOB", raw(30, "x'%s'"), data, "{c}"),
    Kind("DECIMAL(12,2)", decimals(12, 2), double, "{c}"),
    Kind("DATETIME", moments(FIRST, LAST), text, "{c}"),
    Kind("BOOLEAN", integers(0, 1), whole, "{c}"),
)


@dataclass(frozen=True, slots=True)
class RandomTable:
    """A table: its columns, c0 and so on behind `id`, and the statements that make it."""

    name: str
    kinds: tuple[Kind, ...]
    statements: tuple[str, ...]

    @property
    def query(self) -> str:
        """Asks the database for the text of all values."""
        columns = (each.text.format(c=f"c{at}") for at, each in enumerate(self.kinds))
        return f"SELECT id, {', '.join(columns)} FROM {self.name}"

    def meanings(self, rows: list[tuple[Any, ...]]) -> dict[int, tuple[Any, ...]]:
        """What rows mean, by id: of the database's texts, or of what a store's client gives."""
        return {
            int(row[0]): tuple(
                None if value is None else kind.means(value)
                for kind, value in zip(self.kinds, row[1:], strict=True)
            )
            for row in rows
        }

    def fits(self, row: tuple[Any, ...]) -> bool:
        return all(
            value is None or kind.fits(value) for kind, value in zip(self.kinds, row, strict=True)
        )


def random_table(
    random: Random, name: str, kinds: tuple[Kind, ...], *, columns: int, rows: int
) -> RandomTable:
    chosen = tuple(random.choices(kinds, k=columns))
    declared = ", ".join(f"c{at} {each.sql}" for at, each in enumerate(chosen))
    statements = [f"CREATE TABLE {name} (id BIGINT PRIMARY KEY, {declared})"]
    for number in range(rows):
        values = ", ".join(
            "NULL" if random.random() < 0.1 else each.literal(random) for each in chosen
        )
        statements.append(f"INSERT INTO {name} VALUES ({number}, {values})")
    return RandomTable(name, chosen, tuple(statements))
