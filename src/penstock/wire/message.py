"""How a Kafka message is described as data.

Theory: a message class is a plain object with slots, one class for all versions of the protocol.
Its `SPEC` lists the fields in wire order; each `Field` says in which versions it exists, may be
null, or is a tagged field. The codec turns (class, version) into code; nothing here reads bytes.

Invariants: version ranges are inclusive pairs; a field that is absent from a version keeps its
default when decoded and is skipped when encoded. Imports nothing, so that message modules load
quickly.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import ClassVar

LATEST = 32767
"""Upper end of an open version range."""

NEVER = LATEST + 1
"""`FLEXIBLE_FROM` of a message that has no flexible version."""

_ZERO: object = object()


class Field:
    """One field: its wire type and the versions in which it exists, may be null, or is tagged.

    `type` is the name of a primitive or a struct class. `default` is the value of a fresh object:
    None for null, `()` for an empty array or a struct of defaults, `""` for the zero uuid.
    """

    __slots__ = ("array", "default", "name", "nullable", "tag", "tagged", "type", "versions")

    def __init__(
        self,
        name: str,
        type: str | type[Struct],
        versions: tuple[int, int] = (0, LATEST),
        *,
        array: bool = False,
        nullable: tuple[int, int] | None = None,
        tag: int = -1,
        tagged: tuple[int, int] | None = None,
        default: object = _ZERO,
    ) -> None:
        self.name = name
        self.type = type
        self.versions = versions
        self.array = array
        self.nullable = nullable
        self.tag = tag
        self.tagged = tagged
        self.default = _zero_of(type, array) if default is _ZERO else default

    def exists_in(self, version: int) -> bool:
        return self.versions[0] <= version <= self.versions[1]

    def nullable_in(self, version: int) -> bool:
        return self.nullable is not None and self.nullable[0] <= version <= self.nullable[1]

    def tagged_in(self, version: int) -> bool:
        return self.tagged is not None and self.tagged[0] <= version <= self.tagged[1]


def _zero_of(kind: str | type[Struct], array: bool) -> object:
    if array or not isinstance(kind, str):
        return ()
    return {"string": "", "uuid": "", "bytes": b"", "records": None, "bool": False}.get(kind, 0)


class Struct:
    """Base of every generated class: compared by value, printed with its fields, not hashable."""

    __slots__ = ()
    SPEC: ClassVar[tuple[Field, ...]] = ()

    def __eq__(self, other: object) -> bool:
        if type(self) is not type(other):
            return NotImplemented
        return all(getattr(self, f.name) == getattr(other, f.name) for f in self.SPEC)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in self.SPEC)
        return f"{type(self).__name__}({fields})"


class Message(Struct):
    """A whole request or response.

    `VERSIONS` is the stable range; `UNSTABLE_MAX` is the last version that Kafka defines, equal to
    the stable maximum unless a version is still under evolution.
    """

    __slots__ = ()
    NAME: ClassVar[str] = ""
    API_KEY: ClassVar[int] = -1
    VERSIONS: ClassVar[tuple[int, int]] = (0, 0)
    UNSTABLE_MAX: ClassVar[int] = 0
    FLEXIBLE_FROM: ClassVar[int] = 0
    IS_REQUEST: ClassVar[bool] = False
