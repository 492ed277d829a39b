"""Processor time and memory of this process and all below it: Python, Java and the workers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_TICKS: Final = os.sysconf("SC_CLK_TCK")
_PAGE: Final = os.sysconf("SC_PAGE_SIZE")


def _stats() -> dict[int, list[str]]:
    """The fields of /proc/PID/stat from the state on, by process, and the name first."""
    found = {}
    for each in Path("/proc").iterdir():
        if each.name.isdecimal():
            try:
                text = (each / "stat").read_text()
            except OSError:
                continue
            name, _, rest = text.partition(" (")[2].rpartition(")")
            found[int(each.name)] = [name, *rest.split()]
    return found


def _below(stats: dict[int, list[str]], root: int, without: int) -> Iterator[int]:
    children: dict[int, list[int]] = {}
    for pid, fields in stats.items():
        children.setdefault(int(fields[2]), []).append(pid)
    left = [root]
    while left:
        pid = left.pop()
        if pid == without or pid not in stats:
            continue
        yield pid
        left += children.get(pid, [])


def cpu_s(*, without: int = 0) -> float:
    """Seconds of processor time so far, those of processes that have ended included."""
    stats = _stats()
    ticks = 0
    for pid in _below(stats, os.getpid(), without):
        ticks += sum(map(int, stats[pid][12:16]))
    return ticks / _TICKS


def memory(*, without: int = 0) -> tuple[int, int]:
    """Resident bytes: of Python and of Java."""
    stats = _stats()
    python = java = 0
    for pid in _below(stats, os.getpid(), without):
        size = int(stats[pid][22]) * _PAGE
        if stats[pid][0] == "java":
            java += size
        else:
            python += size
    return python, java
