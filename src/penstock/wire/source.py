"""What the two source writers share: lines, fresh names, bound constants, struct formats.

Touches nothing but the `struct` module; holds no field descriptions and reads no message.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from struct import Struct as Layout
from struct import calcsize

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

FIXED = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "float64": "d",
    "uuid": "16s",
}
"""Wire type to `struct` code, for the types that always have the same width."""

SMALL_ARRAY = 17
"""Arrays of fewer numbers than this use a layout that is ready."""


@cache
def layout(formats: str) -> Layout:
    return Layout(">" + formats)


def unpack_from(formats: str) -> Callable[..., tuple[Any, ...]]:
    return layout(formats).unpack_from


@cache
def fixed_array_table(code: str, prefix: str = "") -> tuple[tuple[Layout, ...], int]:
    """Layouts of a prefix and 0, 1, … numbers, and the size of one number."""
    return tuple(layout(f"{prefix}{i}{code}") for i in range(SMALL_ARRAY)), calcsize(">" + code)


class SourceWriter:
    """Lines of source, and the values that they name."""

    def __init__(self, version: int, flexible: bool) -> None:
        self.version = version
        self.flexible = flexible
        self.lines: list[str] = []
        self.indent = 0
        self.names: dict[str, object] = {}
        # Fixed-width values that wait to be read or written by one struct call, and the lines
        # that can only run once they have been.
        self.pending: list[tuple[str, str]] = []
        self.after: list[str] = []
        self._count = 0
        self._bound: dict[object, str] = {}

    def emit(self, line: str) -> None:
        self.lines.append("    " * self.indent + line)

    def fresh(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def bind(self, prefix: str, value: object) -> str:
        """Name a value for the generated code; equal values share a name."""
        name = self._bound.get(value)
        if name is None:
            name = self._bound[value] = self.fresh(prefix)
            self.names[name] = value
        return name

    def size_of(self, formats: str) -> int:
        return calcsize(">" + formats)
