"""The table map: what a table was at its place in the binlog.

With binlog_row_metadata=FULL it names the columns, their signedness, character sets, the values of
enums and sets, and the primary key. Without, columns have no names, and the capture stops.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from penstock.capture.mysql import types as t
from penstock.capture.mysql.binlog import HEADER_SIZE, BinlogError, length_encoded
from penstock.capture.mysql.charsets import BINARY, Charsets
from penstock.capture.mysql.types import Native
from penstock.capture.source import CaptureError

# Types as the binlog numbers them.
_TINY, _SHORT, _LONG, _FLOAT, _DOUBLE, _TIMESTAMP, _LONGLONG, _INT24 = 1, 2, 3, 4, 5, 7, 8, 9
_DATE, _TIME, _DATETIME, _YEAR, _NEWDATE, _VARCHAR, _BIT = 10, 11, 12, 13, 14, 15, 16
_TIMESTAMP2, _DATETIME2, _TIME2, _TYPED_ARRAY = 17, 18, 19, 20
_BLOB_COMPRESSED, _VARCHAR_COMPRESSED, _VECTOR, _JSON, _DECIMAL, _ENUM, _SET = (
    140, 141, 242, 245, 246, 247, 248
)  # fmt: skip
_TINY_BLOB, _MEDIUM_BLOB, _LONG_BLOB, _BLOB, _VAR_STRING, _STRING, _GEOMETRY = (
    249, 250, 251, 252, 253, 254, 255
)  # fmt: skip

_TWO_BYTES: Final = frozenset({_VARCHAR, _VARCHAR_COMPRESSED, _BIT, _DECIMAL, _ENUM, _SET,
                               _VAR_STRING, _STRING})  # fmt: skip
_ONE_BYTE: Final = frozenset({_FLOAT, _DOUBLE, _BLOB, _BLOB_COMPRESSED, _GEOMETRY, _JSON, _VECTOR,
                              _TIMESTAMP2, _DATETIME2, _TIME2})  # fmt: skip
_INTEGERS: Final = {_TINY: t.TINY, _SHORT: t.SHORT, _INT24: t.INT24, _LONG: t.LONG,
                    _LONGLONG: t.LONGLONG}  # fmt: skip
_NUMERIC: Final = frozenset({*_INTEGERS, _FLOAT, _DOUBLE, _DECIMAL})
_CHARACTER: Final = frozenset({_STRING, _VAR_STRING, _VARCHAR, _VARCHAR_COMPRESSED, _BLOB,
                               _BLOB_COMPRESSED, _GEOMETRY})  # fmt: skip
_PLAIN: Final = {_YEAR: t.YEAR, _DATE: t.DATE, _NEWDATE: t.DATE, _TIME: t.OLD_TIME,
                 _DATETIME: t.OLD_DATETIME, _TIMESTAMP: t.OLD_TIMESTAMP}  # fmt: skip
_TIMES: Final = {_TIMESTAMP2: t.TIMESTAMP, _DATETIME2: t.DATETIME, _TIME2: t.TIME}
_POINT: Final = 1

# Fields of the optional metadata.
_SIGNEDNESS, _DEFAULT_CHARSET, _COLUMN_CHARSET, _NAMES, _SET_VALUES, _ENUM_VALUES = 1, 2, 3, 4, 5, 6
_GEOMETRY_TYPE, _KEY, _KEY_WITH_PREFIX, _ENUM_CHARSET, _ENUM_CHARSETS = 7, 8, 9, 10, 11

MISSING_ADVICE: Final = (
    "SET GLOBAL binlog_row_metadata = 'FULL'; and in my.cnf under [mysqld]:"
    " binlog_row_metadata=FULL (changes from before that cannot be read: take a new snapshot)"
)


@dataclass(frozen=True, slots=True)
class TableMap:
    """A table at its place in the binlog."""

    database: str
    name: str
    columns: tuple[Native, ...]
    key: tuple[int, ...]


def names_of(data: bytes) -> tuple[str, str]:
    """Database and table of a table map event, without the rest."""
    try:
        at = HEADER_SIZE + 8
        size = data[at]
        database = data[at + 1 : at + 1 + size]
        at += size + 2
        return database.decode(), data[at + 1 : at + 1 + data[at]].decode()
    except (IndexError, UnicodeDecodeError):
        raise BinlogError("a table map that is cut") from None


def parse(data: bytes, charsets: Charsets, disguised: Mapping[str, str] | None = None) -> TableMap:
    """The table map in the data of an event. `disguised`: columns that are more than the BINARY(n)
    as which they appear."""
    database, name = names_of(data)
    try:
        return _parse(data, database, name, charsets, disguised or {})
    except (IndexError, KeyError, ValueError, struct.error):
        raise BinlogError(f"the table map of {database}.{name} is cut") from None


def _parse(
    data: bytes, database: str, name: str, charsets: Charsets, disguised: Mapping[str, str]
) -> TableMap:
    at = HEADER_SIZE + 8
    at += data[at] + 2
    at += data[at] + 2
    count, at = length_encoded(data, at)
    kinds = data[at : at + count]
    size, at = length_encoded(data, at + count)
    shapes = _shapes(kinds, data[at : at + size])
    at += size
    width = (count + 7) // 8
    optional = _bits(data[at : at + width], count)
    fields = _optional_fields(data, at + width)
    if len(kinds) != count or len(optional) != count:
        raise BinlogError(f"the table map of {database}.{name} is cut")
    # ENUM and SET appear as STRING and say what they are in their shape.
    real = [s >> 8 if k == _STRING and s >> 8 in (_ENUM, _SET) else k
            for k, s in zip(kinds, shapes, strict=True)]  # fmt: skip
    if _NAMES not in fields:
        raise CaptureError(
            f"the binlog does not name the columns of {database}.{name}: it was written without"
            " binlog_row_metadata=FULL",
            advice=MISSING_ADVICE,
        )
    names = _strings(fields[_NAMES])
    facts = _Facts(real, fields, charsets)
    if len(names) != count:
        raise BinlogError(
            f"the table map of {database}.{name} names {len(names)} of {count} columns"
        )
    columns = []
    for i, kind in enumerate(real):
        native = _native(names[i], kind, shapes[i], facts, i)
        if native.padded and t.DISGUISED.get(disguised.get(native.name, "")) == native.size:
            native = replace(native, kind=disguised[native.name], charset="")
        columns.append(replace(native, optional=optional[i]))
    return TableMap(database, name, tuple(columns), _key(fields, count))


class _Facts:
    """What the optional metadata says of single columns."""

    def __init__(
        self, real: Sequence[int], fields: Mapping[int, bytes], charsets: Charsets
    ) -> None:
        numeric = [i for i, kind in enumerate(real) if kind in _NUMERIC]
        signs = _msb_bits(fields.get(_SIGNEDNESS, b""), len(numeric))
        self.unsigned = dict(zip(numeric, signs, strict=True))
        character = [i for i, kind in enumerate(real) if kind in _CHARACTER]
        self._charset = _charsets(fields, _DEFAULT_CHARSET, _COLUMN_CHARSET, character)
        lists = [i for i, kind in enumerate(real) if kind in (_ENUM, _SET)]
        self._charset |= _charsets(fields, _ENUM_CHARSET, _ENUM_CHARSETS, lists)
        self._charsets = charsets
        self.values: dict[int, list[bytes]] = {}
        for kind, field in ((_ENUM, _ENUM_VALUES), (_SET, _SET_VALUES)):
            mine = [i for i in lists if real[i] == kind]
            self.values |= dict(zip(mine, _value_lists(fields.get(field, b"")), strict=True))
        shapes = [i for i, kind in enumerate(real) if kind == _GEOMETRY]
        self.geometry = dict(zip(shapes, _numbers(fields.get(_GEOMETRY_TYPE, b"")), strict=False))

    def charset(self, i: int) -> str:
        collation = self._charset.get(i)
        if collation is None:
            raise BinlogError(f"column {i} has no character set")
        return self._charsets.name(collation)

    def texts(self, i: int) -> tuple[str, ...]:
        # MySQL before 8.0.14 does not tell it for enums and sets.
        charset = self.charset(i) if i in self._charset else "utf8mb4"
        decode = self._charsets.decoder(charset)
        return tuple(map(decode, self.values[i]))


def _native(name: str, kind: int, shape: int, facts: _Facts, i: int) -> Native:
    if kind in _INTEGERS:
        return Native(name, _INTEGERS[kind], unsigned=facts.unsigned[i])
    if kind in (_FLOAT, _DOUBLE):
        return Native(name, t.FLOAT if kind == _FLOAT else t.DOUBLE)
    if kind == _DECIMAL:
        return Native(
            name, t.DECIMAL, size=shape >> 8, scale=shape & 255, unsigned=facts.unsigned[i]
        )
    if kind == _BIT:
        return Native(name, t.BIT, size=(shape >> 8) + 8 * (shape & 255))
    if kind in _PLAIN:
        return Native(name, _PLAIN[kind])
    if kind in _TIMES:
        return Native(name, _TIMES[kind], scale=shape)
    if kind in (_ENUM, _SET):
        values = facts.texts(i)
        return Native(name, t.ENUM if kind == _ENUM else t.SET, size=shape & 255, values=values)
    if kind == _GEOMETRY:
        point = facts.geometry.get(i) == _POINT
        return Native(name, t.POINT if point else t.GEOMETRY, prefix=shape)
    if kind == _JSON:
        return Native(name, t.JSON, prefix=shape)
    if kind == _VECTOR:
        return Native(name, t.BINARY, prefix=shape)
    if kind in (_VARCHAR, _VAR_STRING, _VARCHAR_COMPRESSED):
        little = (shape & 255) << 8 | shape >> 8
        return _text(name, facts.charset(i), 1 if little < 256 else 2, kind == _VARCHAR_COMPRESSED)
    if kind in (_BLOB, _BLOB_COMPRESSED):
        return _text(name, facts.charset(i), shape, kind == _BLOB_COMPRESSED)
    if kind == _STRING:
        # The two high bits of the length hide, turned round, in the type.
        size = (shape & 255) | ((shape >> 4 & 0x300) ^ 0x300)
        native = _text(name, facts.charset(i), 1 if size < 256 else 2, False)
        return replace(native, padded=True, size=size) if native.kind == t.BINARY else native
    raise CaptureError(
        f"column {name} has a type that the binlog numbers {kind}, which is not supported",
        advice="Leave the table out with --exclude, or change the column's type.",
    )


def _text(name: str, charset: str, prefix: int, compressed: bool) -> Native:
    settings: dict[str, Any] = {"prefix": prefix, "compressed": compressed}
    if charset == BINARY:
        return Native(name, t.BINARY, **settings)
    return Native(name, t.STRING, charset=charset, **settings)


def _shapes(kinds: bytes, data: bytes) -> list[int]:
    """What stands for each column in the metadata, big-endian where it is two bytes."""
    out, at = [], 0
    for kind in kinds:
        width = 2 if kind in _TWO_BYTES else 1 if kind in _ONE_BYTE else 0
        if at + width > len(data):
            raise BinlogError("a table map that is cut")
        out.append(int.from_bytes(data[at : at + width], "big"))
        at += width
    return out


def _optional_fields(data: bytes, at: int) -> dict[int, bytes]:
    fields: dict[int, bytes] = {}
    while at < len(data):
        kind = data[at]
        size, at = length_encoded(data, at + 1)
        if at + size > len(data):
            raise BinlogError("a table map that is cut")
        fields[kind] = data[at : at + size]
        at += size
    return fields


def _bits(data: bytes, count: int) -> list[bool]:
    return [bool(data[i >> 3] >> (i & 7) & 1) for i in range(count)]


def _msb_bits(data: bytes, count: int) -> list[bool]:
    return [bool(data[i >> 3] >> (7 - (i & 7)) & 1) for i in range(count)]


def _numbers(data: bytes) -> list[int]:
    out, at = [], 0
    while at < len(data):
        number, at = length_encoded(data, at)
        out.append(number)
    return out


def _raw_strings(data: bytes, at: int, count: int | None) -> tuple[list[bytes], int]:
    out: list[bytes] = []
    while at < len(data) if count is None else len(out) < count:
        size, at = length_encoded(data, at)
        if at + size > len(data):
            raise BinlogError("a table map that is cut")
        out.append(data[at : at + size])
        at += size
    return out, at


def _strings(data: bytes) -> list[str]:
    return [raw.decode("utf-8") for raw in _raw_strings(data, 0, None)[0]]


def _value_lists(data: bytes) -> list[list[bytes]]:
    out, at = [], 0
    while at < len(data):
        count, at = length_encoded(data, at)
        values, at = _raw_strings(data, at, count)
        out.append(values)
    return out


def _charsets(
    fields: Mapping[int, bytes], default: int, each: int, columns: Sequence[int]
) -> dict[int, int]:
    """Collation numbers by column: one for all with exceptions, or one for each."""
    if each in fields:
        return dict(zip(columns, _numbers(fields[each]), strict=True))
    if default not in fields:
        return {}
    first, *pairs = _numbers(fields[default])
    found = dict.fromkeys(columns, first)
    for place, collation in zip(pairs[::2], pairs[1::2], strict=True):
        found[columns[place]] = collation
    return found


def _key(fields: Mapping[int, bytes], count: int) -> tuple[int, ...]:
    if _KEY in fields:
        key = tuple(_numbers(fields[_KEY]))
    else:
        # A key of the first characters of a column: the column and how many.
        key = tuple(_numbers(fields.get(_KEY_WITH_PREFIX, b""))[::2])
    if any(i >= count for i in key):
        raise BinlogError("a key of columns that are not there")
    return key
