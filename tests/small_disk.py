"""A real file system that is small enough to fill."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_DETACH = 2


@contextmanager
def small_file_system(place: Path, mebibytes: int) -> Iterator[Path]:
    """A file system of this size, in a new folder; skips the test where none may be mounted."""
    if os.uname().sysname != "Linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux can mount a small disk")
    libc = ctypes.CDLL(None, use_errno=True)
    place.mkdir()
    size = f"size={mebibytes}m".encode()
    if libc.mount(b"tmpfs", os.fsencode(place), b"tmpfs", 0, size) != 0:
        pytest.skip(f"mounting is not allowed here: {os.strerror(ctypes.get_errno())}")
    try:
        yield place
    finally:
        libc.umount2(os.fsencode(place), _DETACH)


def fill(place: Path) -> Path:
    """Take all the space that is left; removing the file gives it back."""
    filler = place / "filler"
    with filler.open("wb", buffering=0) as out:
        while True:
            try:
                out.write(bytes(4096))
            except OSError:
                return filler
