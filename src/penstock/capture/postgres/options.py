"""The options that only PostgreSQL has, checked before anything else happens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Final

from penstock.capture.postgres.spool import DISK_MAX_BYTES, MEMORY_MAX_BYTES
from penstock.capture.postgres.types import TypeModes
from penstock.capture.source import SourceSettings
from penstock.errors import ConfigError

_SLOT_NAME: Final = re.compile(r"[a-z0-9_]{1,63}")
_KNOWN: Final = {
    "slot",
    "publication",
    "publication.all.tables",
    "streaming",
    "decimal.handling.mode",
    "interval.handling.mode",
    "spool.memory.bytes",
    "spool.max.bytes",
    "slot.timeout.ms",
}


@dataclass(frozen=True, slots=True)
class PostgresOptions:
    """What `SourceSettings.options` says, with what holds where it says nothing."""

    slot: str
    publication: str
    # Publish all tables, also future ones; only a superuser may. Otherwise the chosen ones, and new
    # ones as they are found.
    all_tables: bool
    # Let the server send large transactions before their commit.
    streaming: bool
    modes: TypeModes
    spool_memory_bytes: int
    spool_max_bytes: int
    # A new slot waits for all transactions that write; not for longer than this.
    slot_timeout_ms: int

    @classmethod
    def of(cls, settings: SourceSettings) -> PostgresOptions:
        options = settings.options
        for name in options:
            if name not in _KNOWN:
                raise ConfigError(
                    f"PostgreSQL captures have no option {name}",
                    advice=f"The options are {', '.join(sorted(_KNOWN))}.",
                )
        slot = options.get("slot") or object_name(settings.name)
        if not _SLOT_NAME.fullmatch(slot):
            raise ConfigError(
                f"{slot!r} cannot be the name of a replication slot",
                advice="Up to 63 of a-z, 0-9 and _.",
            )
        return cls(
            slot=slot,
            publication=options.get("publication") or object_name(settings.name),
            all_tables=_flag(options, "publication.all.tables", default=False),
            streaming=_flag(options, "streaming", default=True),
            modes=TypeModes(
                decimal=options.get("decimal.handling.mode", "precise"),
                interval=options.get("interval.handling.mode", "string"),
            ),
            spool_memory_bytes=_number(options, "spool.memory.bytes", MEMORY_MAX_BYTES),
            spool_max_bytes=_number(options, "spool.max.bytes", DISK_MAX_BYTES),
            slot_timeout_ms=_number(options, "slot.timeout.ms", 600_000),
        )


def object_name(capture: str) -> str:
    """The name of the slot and the publication: the capture's, in what PostgreSQL allows."""
    plain = re.sub(r"[^a-z0-9_]", "_", capture.lower())
    if plain == capture and len(plain) <= 50:
        return f"penstock_{plain}"
    # Two captures whose names differ only in what had to go are still two.
    return f"penstock_{plain[:40]}_{sha256(capture.encode()).hexdigest()[:8]}"


def _flag(options: Mapping[str, str], name: str, *, default: bool) -> bool:
    value = str(options.get(name, default)).lower()
    if value in ("true", "on", "yes", "1"):
        return True
    if value in ("false", "off", "no", "0"):
        return False
    raise ConfigError(f"{name}={value} is neither on nor off")


def _number(options: Mapping[str, str], name: str, default: int) -> int:
    value = options.get(name)
    if value is None:
        return default
    if not value.isdigit() or int(value) <= 0:
        raise ConfigError(f"{name}={value} is not a positive number")
    return int(value)
