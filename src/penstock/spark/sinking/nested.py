"""Columns of structs, arrays and maps: stores keep them as JSON, so they are checked here.

`fields = "tags array<string>, place struct<lat double, lon double>"` says what stands in them. What
does not fit is a dead letter, as in any other column. Of a struct fields may be missing, and fields
that it does not name are kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from penstock.errors import ConfigError
from penstock.sinks.fields import ANY_JSON, Column, from_text, split

# What is wrong with a value, as "[].a is not int32: 'x'"; None if nothing is.
Fault = Callable[[Any], str | None]
# For a scalar: fails where the value is none of its type.
Check = Callable[[Any, pa.DataType], None]


def fault_of(kind: str, check: Check) -> Fault:
    """The test for values of a type such as "array<struct<a int>>"; ConfigError if it is none."""
    text = kind.strip()
    name, bracket, rest = text.partition("<")
    name = name.strip().lower()
    if not bracket or not rest.endswith(">"):
        if name in ANY_JSON:
            return lambda value: None
        return _scalar(text, check)
    parts = split(rest[:-1])
    if name == "array" and len(parts) == 1:
        return _array(fault_of(parts[0], check))
    if name == "map" and len(parts) == 2:
        return _map(fault_of(parts[1], check))
    if name == "struct":
        named = [from_name(part) for part in parts]
        return _struct({field: fault_of(inner, check) for field, inner in named})
    raise ConfigError(
        f"{text!r} is no type", advice="Write array<T>, map<string, T> or struct<name T, ...>."
    )


def from_name(part: str) -> tuple[str, str]:
    """The name and the type of a field of a struct."""
    name, colon, kind = part.strip().partition(":")
    if not colon or " " in name.strip():
        name, _, kind = part.strip().partition(" ")
    if not kind.strip():
        raise ConfigError(f"{part.strip()!r} is no field", advice='A field is as in "a int".')
    return name.strip(" `"), kind.strip()


def _scalar(text: str, check: Check) -> Fault:
    (field,) = from_text(f"v {text}")
    column = Column(field)

    def fault(value: Any) -> str | None:
        if value is None:
            return None
        try:
            check(value, column.field.type)
        except Exception:  # whatever makes it no value of the type
            return f" is not {column.field.type}: {shown(value)}"
        return None

    return fault


def _array(inner: Fault) -> Fault:
    def fault(value: Any) -> str | None:
        if value is None:
            return None
        if not isinstance(value, list):
            return f" is not a list: {shown(value)}"
        found = next((bad for each in value if (bad := inner(each)) is not None), None)
        return None if found is None else f"[]{found}"

    return fault


def _map(inner: Fault) -> Fault:
    def fault(value: Any) -> str | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            return f" is not an object: {shown(value)}"
        found = next((bad for each in value.values() if (bad := inner(each)) is not None), None)
        return None if found is None else f"{{}}{found}"

    return fault


def _struct(fields: dict[str, Fault]) -> Fault:
    def fault(value: Any) -> str | None:
        if value is None:
            return None
        if not isinstance(value, dict):
            return f" is not an object: {shown(value)}"
        for name, inner in fields.items():
            found = inner(value.get(name))
            if found is not None:
                return f".{name}{found}"
        return None

    return fault


def shown(value: Any) -> str:
    """A value for people, not too much of it."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
