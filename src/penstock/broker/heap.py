"""Memory that the process has freed, given back to the operating system.

What many clients made the broker allocate in small pieces stays with the C library's heap when they
are gone. Where the library can hand it back, it is asked to.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable


@functools.cache
def heap_trimmer() -> Callable[[], None] | None:
    """What gives free memory back; None where the C library has no such thing.

    It takes milliseconds and needs no interpreter: run it on a thread.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None
    trim.argtypes, trim.restype = (ctypes.c_size_t,), ctypes.c_int
    return functools.partial(trim, 0)
