"""How kernels are compiled, and how they touch memory.

A kernel has an explicit signature: it is compiled when its module is imported, or loaded within
milliseconds from numba's cache, and never while data waits. numba keeps the machine code beside
the source, or where that is read-only in the user's own cache folder. Where neither can be
written (a service account without a home), it goes into a private folder below the temporary one.

Kernels take addresses, so that one call can walk many buffers. Nothing checks an address for
them: whoever reads through one has compared it with the end of its buffer.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba
from numba.core import cgutils, types
from numba.extending import intrinsic

F = TypeVar("F", bound=Callable[..., Any])

# numba's own types say less than we know: a kernel is called as the function it was made from.
_njit: Any = numba.njit
_settings: Any = numba.config
_raw_memcpy: Any = cgutils.raw_memcpy


def kernel(signature: str) -> Callable[[F], F]:
    """Compile a function with this signature now; it runs without the interpreter's lock."""

    def compiled(function: F) -> F:
        try:
            made: F = _njit(signature, nogil=True, cache=True)(function)
        except RuntimeError as error:
            if "no locator" not in str(error):
                raise
            made = _outside_of_home(signature, function)
        return made

    return compiled


def helper(function: F) -> F:
    """A function that only kernels call; it becomes part of them."""
    made: F = _njit(nogil=True)(function)
    return made


def inlined(maker: Callable[..., Any]) -> Any:
    """A function of one or two machine instructions that kernels call; `maker` makes the code."""
    return intrinsic(maker)


def _outside_of_home(signature: str, function: F) -> F:
    folder = private_folder(Path(tempfile.gettempdir()))
    if folder is None:
        uncached: F = _njit(signature, nogil=True)(function)
        return uncached
    before = _settings.CACHE_DIR
    _settings.CACHE_DIR = str(folder)
    try:
        made: F = _njit(signature, nogil=True, cache=True)(function)
    finally:
        _settings.CACHE_DIR = before
    return made


def private_folder(parent: Path) -> Path | None:
    """A folder that only this user can write to: machine code is loaded from it. None if there
    is no such thing."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    folder = parent / f"penstock-numba-{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    mine = stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077
    return folder if mine else None


def cache_folder_of(function: Any) -> str:
    """Where the machine code of a kernel is kept; empty if nowhere."""
    return str(function.stats.cache_path or "")


@inlined
def load_byte(typing: Any, address: Any) -> Any:
    """The byte at an address, as an int64."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.inttoptr(args[0], cgutils.int8_t.as_pointer())
        return builder.zext(builder.load(at), cgutils.intp_t)

    return types.int64(types.int64), code


@inlined
def store_byte(typing: Any, address: Any, value: Any) -> Any:
    """Put the low eight bits of a value to an address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.inttoptr(args[0], cgutils.int8_t.as_pointer())
        builder.store(builder.trunc(args[1], cgutils.int8_t), at)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64), code


@inlined
def load_int32(typing: Any, address: Any) -> Any:
    """The little-endian 32-bit integer at an address, as an int64."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.inttoptr(args[0], cgutils.int32_t.as_pointer())
        return builder.sext(builder.load(at, align=1), cgutils.intp_t)

    return types.int64(types.int64), code


@inlined
def copy_bytes(typing: Any, target: Any, source: Any, count: Any) -> Any:
    """memcpy."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        to = builder.inttoptr(args[0], cgutils.voidptr_t)
        origin = builder.inttoptr(args[1], cgutils.voidptr_t)
        _raw_memcpy(builder, to, origin, args[2], 1)
        return context.get_dummy_value()

    return types.none(types.int64, types.int64, types.int64), code
