"""Which start of the operating system this is: what was written before it may be lost."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_LINUX: Final = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str | None:
    """The same until the machine is started anew; None where that cannot be told."""
    try:
        return _LINUX.read_text(encoding="ascii").strip()
    except OSError:
        return None
