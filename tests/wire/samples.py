"""Random messages, from a seeded generator, for every test of the codec.

`tame` keeps to values that the reference implementation can also represent: error codes that it
knows, moments and durations within the range of a calendar.
"""

from __future__ import annotations

import random
from typing import Any
from uuid import UUID

from penstock.wire import APIS, Api, Message, Struct
from penstock.wire.errors import ErrorCode
from penstock.wire.message import Field
from tests.harness.profiles import ORACLE_VERSIONS
from tests.harness.seeds import seed_of

SEED = seed_of("tests/wire/samples.py")
"""One seed per run, part of every failure's text; set PENSTOCK_SEED to see a failure again."""

RANGES = {
    "int8": (-(1 << 7), (1 << 7) - 1),
    "int16": (-(1 << 15), (1 << 15) - 1),
    "uint16": (0, (1 << 16) - 1),
    "int32": (-(1 << 31), (1 << 31) - 1),
    "uint32": (0, (1 << 32) - 1),
    "int64": (-(1 << 63), (1 << 63) - 1),
}
LETTERS = "abcdefghijklmnopqrstuvwxyz-._ÄøЖ漢🚰\0"


class Sampler:
    """Draws messages; everything comes from one seed."""

    def __init__(self, *seed: object, tame: bool = False, items_max: int = 3) -> None:
        self.rng = random.Random(repr((SEED, *seed)))
        self.tame = tame
        self.items_max = items_max

    def message(self, cls: type[Message], version: int) -> Message:
        message = self.struct(cls, version)
        assert isinstance(message, Message)
        return message

    def struct(self, cls: type[Struct], version: int) -> Struct:
        made = cls()
        for field in cls.SPEC:
            # A tagged field is often at its default, so that both branches are taken.
            at_default = field.tagged_in(version) and self.rng.random() < 0.5
            if field.exists_in(version) and not at_default:
                setattr(made, field.name, self.field(field, version))
        return made

    def field(self, field: Field, version: int) -> object:
        if field.nullable_in(version) and self.rng.random() < 0.25:
            return None
        if field.array:
            return [self.one(field, version) for _ in range(self.count())]
        return self.one(field, version)

    def count(self) -> int:
        # Now and then more than fit the ready layouts, or than a one-byte count can say.
        if self.items_max >= 3 and self.rng.random() < 0.02:
            return self.rng.choice((16, 17, 18, 130))
        return self.rng.randint(0, self.items_max)

    def one(self, field: Field, version: int) -> object:
        kind, rng = field.type, self.rng
        if not isinstance(kind, str):
            return self.struct(kind, version)
        if kind in RANGES:
            return self.number(field.name, *RANGES[kind])
        if kind == "bool":
            return rng.random() < 0.5
        if kind == "float64":
            return rng.uniform(-1e9, 1e9)
        if kind == "uuid":
            return UUID(int=rng.choice((0, rng.getrandbits(128))))
        if kind == "string":
            return "".join(rng.choices(LETTERS, k=self.length()))
        assert kind in {"bytes", "records"}, kind
        return rng.randbytes(self.length())

    def length(self) -> int:
        # 126 and 127 are where the length prefix of flexible versions becomes two bytes.
        if self.rng.random() < 0.05:
            return self.rng.choice((125, 126, 127, 128, 129, 300))
        return self.rng.randint(0, 8)

    def number(self, name: str, low: int, high: int) -> int:
        if self.tame and name.endswith("error_code"):
            return self.rng.choice(list(ErrorCode)).value
        if self.tame and ("time" in name or name.endswith("_ms")):
            return self.rng.choice((0, 1, self.rng.randrange(min(high, 1 << 31))))
        return self.rng.choice((low, high, 0, 1, 127, self.rng.randint(low, high)))


def every_message() -> list[tuple[Api, type[Message]]]:
    return [(api, cls) for api in APIS.values() for cls in (api.request, api.response)]


def versions_of(cls: type[Message]) -> range:
    """All versions, the unstable ones too."""
    return range(cls.VERSIONS[0], cls.UNSTABLE_MAX + 1)


def some_versions(versions: range) -> list[int]:
    """The oldest, the newest and some of those between, as many as the profile compares."""
    between = versions[1:-1]
    drawn = random.Random(SEED).sample(between, min(len(between), ORACLE_VERSIONS - 2))
    return sorted({versions[0], versions[-1], *drawn})


def name_of(value: Any) -> str:
    """How a class or an API is called in the name of a test."""
    return value.__name__ if isinstance(value, type) else str(getattr(value, "name", value))
