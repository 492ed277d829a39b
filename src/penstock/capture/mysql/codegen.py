"""How each kind of column is read, and the compiling of code that is made for one table.

A recipe says how the bytes of a value become its fragment, as a Python expression: `struct` is the
format of a value of fixed size, whose unpacked form the expression calls `{x}`; values of varying
size begin with `prefix` bytes that say how many follow, and are sliced into `{x}`.

The expressions call functions by names that `bind` hands out, so that generated code looks nothing
up while it runs.
"""

from __future__ import annotations

import zlib
from binascii import b2a_base64
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.capture.mysql import jsonb, types, values
from penstock.capture.mysql.binlog import UNPACKED_MAX, BinlogError
from penstock.capture.mysql.charsets import UTF8, Charsets
from penstock.capture.mysql.types import Modes, Native

_INTEGER_CODES: Final = {types.TINY: "b", types.SHORT: "h", types.LONG: "i", types.LONGLONG: "q"}
_NUMBER: Final = 'b"%d" % {x}'


@dataclass(slots=True)
class Names:
    """The names that generated code may use."""

    known: dict[str, Any] = field(default_factory=dict)

    def bind(self, value: object, hint: str = "F") -> str:
        name = f"{hint}{len(self.known)}"
        self.known[name] = value
        return name

    def compile(self, source: str, name: str) -> Callable[..., Any]:
        """The function of this name that the source defines."""
        space = dict(self.known)
        exec(compile(source, f"<{name}>", "exec"), space)  # our own text
        made: Callable[..., Any] = space[name]
        return made


@dataclass(frozen=True, slots=True)
class Recipe:
    """How to read one column."""

    expression: str
    struct: str = ""
    size: int = 0
    prefix: int = 0


def binary_recipe(native: Native, modes: Modes, charsets: Charsets, names: Names) -> Recipe:
    """How the binlog has it."""
    kind = native.kind
    if kind in types.INTEGERS:
        return _integer(native, modes, names)
    if kind == types.FLOAT:
        return Recipe(f"{names.bind(values.float32)}({{x}})", "f", 4)
    if kind == types.DOUBLE:
        return Recipe("repr({x}).encode()", "d", 8)
    if kind == types.YEAR:
        years = tuple(b"%d" % (1900 + i if i else 0) for i in range(256))
        return Recipe(f"{names.bind(years)}[{{x}}]", "B", 1)
    if kind == types.DECIMAL:
        size, read = values.decimal_binary(native.size, native.scale, modes.decimal)
        return Recipe(f"{names.bind(read)}({{x}})", f"{size}s", size)
    if kind == types.BIT:
        size = (native.size + 7) // 8
        return Recipe(f"{names.bind(values.bits(native.size))}({{x}})", f"{size}s", size)
    if kind == types.ENUM:
        listed = (b'""', *map(values.dumps, native.values))
        return Recipe(f"{names.bind(listed)}[{{x}}]", "B" if native.size == 1 else "H", native.size)
    if kind == types.SET:
        members = values.Cache(values.set_members(native.values))
        return Recipe(f"{names.bind(members)}[{{x}}]", f"{native.size}s", native.size)
    if native.prefix:
        return Recipe(_sized(native, charsets, names), prefix=native.prefix)
    size, read = _temporal(native)
    return Recipe(
        f"{names.bind(read)}{'[{x}]' if kind == types.DATE else '({x})'}", f"{size}s", size
    )


def _integer(native: Native, modes: Modes, names: Names) -> Recipe:
    size = types.INTEGERS[native.kind]
    if native.kind == types.INT24:
        read = names.bind(values.from_bytes)
        return Recipe(f'b"%d" % {read}({{x}}, "little", signed={not native.unsigned})', "3s", 3)
    code = _INTEGER_CODES[native.kind]
    if types.is_precise_bigint(native, modes):
        return Recipe(f"{names.bind(values.unscaled)}({{x}})", "Q", 8)
    return Recipe(_NUMBER, code.upper() if native.unsigned else code, size)


def _zero(native: Native, epoch: bytes = b"0") -> bytes:
    return values.NULL if native.optional else epoch


def _temporal(native: Native) -> tuple[int, Any]:
    kind, extra = native.kind, (native.scale + 1) // 2
    if kind == types.DATE:
        return 3, values.Cache(values.date_binary(_zero(native)))
    if kind == types.DATETIME:
        return 5 + extra, values.datetime_binary(native.scale, _zero(native))
    if kind == types.TIMESTAMP:
        zero = _zero(native, values.ZERO_TIMESTAMP)
        return 4 + extra, values.timestamp_binary(native.scale, zero)
    if kind == types.TIME:
        return 3 + extra, values.time_binary(native.scale)
    if kind == types.OLD_TIME:
        return 3, values.old_time
    if kind == types.OLD_DATETIME:
        return 8, values.old_datetime(_zero(native))
    if kind == types.OLD_TIMESTAMP:
        return 4, values.old_timestamp(_zero(native, values.ZERO_TIMESTAMP))
    raise BinlogError(f"column {native.name}: {kind} cannot be read from the binlog")


_BY_BYTES: Final = {
    types.JSON: jsonb.render,
    types.GEOMETRY: values.geometry,
    types.POINT: values.point,
    types.UUID: values.uuid,
    types.INET6: values.inet6,
    types.INET4: values.inet4,
}


def _sized(native: Native, charsets: Charsets, names: Names) -> str:
    raw = f"{names.bind(uncompressed)}({{x}})" if native.compressed else "{x}"
    if native.kind in _BY_BYTES:
        return f"{names.bind(_BY_BYTES[native.kind])}({raw})"
    if native.kind == types.STRING:
        quoted = names.bind(values.quoted)
        if native.charset in UTF8:
            return f'{quoted}({raw}.decode("utf-8", "replace")).encode()'
        return f"{quoted}({names.bind(charsets.decoder(native.charset))}({raw})).encode()"
    if native.padded:
        raw = f'{raw}.ljust({native.size}, b"\\0")'
    return f"b'\"%b\"' % {names.bind(b2a_base64)}({raw}, newline=False)"


def uncompressed(raw: bytes) -> bytes:
    """A value of one of MariaDB's COMPRESSED columns."""
    if not raw:
        return raw
    head = raw[0]
    if head == 0:
        return raw[1:]
    width = head & 7
    if head & 0xF0 != 0x80:
        raise BinlogError(f"a compressed value of unknown kind {head}")
    size = int.from_bytes(raw[1 : 1 + width], "big")
    if size > UNPACKED_MAX:
        raise BinlogError(f"a compressed value that says it has {size} bytes")
    try:
        out = zlib.decompressobj(-15 if head & 8 else 15).decompress(raw[1 + width :], size + 1)
    except zlib.error as error:
        raise BinlogError(f"a compressed value is damaged: {error}") from None
    if len(out) != size:
        raise BinlogError(f"a compressed value should have {size} bytes")
    return out


def text_recipe(native: Native, modes: Modes, names: Names) -> str:
    """How a result set has it: an expression of `{x}`, the bytes of the value."""
    kind = native.kind
    if types.is_precise_bigint(native, modes):
        return f"{names.bind(values.unscaled)}(int({{x}}))"
    if kind in types.INTEGERS:
        return "{x}"
    read: Any = _TEXTS.get(kind)
    if kind == types.DECIMAL:
        read = values.decimal_text(native.scale, modes.decimal)
    elif kind == types.BIT:
        read = values.bits(native.size)
    elif kind == types.DATE:
        return f"{names.bind(values.Cache(values.date_text(_zero(native))))}[{{x}}]"
    elif kind == types.DATETIME:
        read = values.datetime_text(native.scale, _zero(native))
    elif kind == types.TIMESTAMP:
        read = values.timestamp_text(_zero(native, values.ZERO_TIMESTAMP))
    elif kind in (types.STRING, types.ENUM, types.SET, types.JSON):
        return f'{names.bind(values.quoted)}({{x}}.decode("utf-8", "replace")).encode()'
    return f"{names.bind(read)}({{x}})"


_TEXTS: Final[dict[str, Any]] = {
    types.FLOAT: values.float32_text,
    types.DOUBLE: values.double_text,
    types.YEAR: lambda raw: b"%d" % int(raw),
    types.TIME: values.time_text,
    types.BINARY: values.base64,
    types.GEOMETRY: values.geometry,
    types.POINT: values.point,
    types.UUID: values.text,
    types.INET6: values.text,
    types.INET4: values.text,
}
