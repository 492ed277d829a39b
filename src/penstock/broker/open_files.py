"""Who gets how many of the files that the process may have open: logs, connections, all the rest.

A broker that is out of descriptors fails at whatever comes next. So connections are refused before
that, logs are closed when they are too many (`log.open_logs`), and some descriptors are kept for
the short-lived files of snapshots, indexes and checkpoints.
"""

from __future__ import annotations

import logging
import resource
from typing import Final, NamedTuple

log = logging.getLogger(__name__)

# No more than this is asked of a system that grants any number.
_MANY_FILES: Final = 65_536
# What else a broker has open: at most this many, or a part of the limit if that is low.
_MOST_OTHERS: Final = 256
_SHARE_OF_OTHERS: Final = 8
# Logs take half, and down to a third if the connections need it.
_MOST_LOGS: Final = 2
_LEAST_LOGS: Final = 3


class Shares(NamedTuple):
    """How many logs, and how many connections, may be open at a time."""

    logs: int
    connections: int


def raise_file_limit() -> int:
    """Take as many open files as the system grants; how many these are."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(hard, _MANY_FILES)
    if soft == resource.RLIM_INFINITY:
        return _MANY_FILES
    if soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (ValueError, OSError):
            log.debug("the limit of open files stays at %d", soft)
            return soft
    return max(soft, wanted)


def share_out(limit: int, max_connections: int) -> Shares:
    """What a process with this limit of open files can grant; it says so if that is less."""
    others = min(_MOST_OTHERS, limit // _SHARE_OF_OTHERS)
    left_by_connections = limit - others - max_connections
    logs = max(limit // _LEAST_LOGS, min(limit // _MOST_LOGS, left_by_connections))
    connections = min(max_connections, limit - others - logs)
    if connections < max_connections:
        log.warning(
            "at most %d connections instead of %d: the process may have %d open files, and logs "
            "need their share. Raise the limit of open files (ulimit -n).",
            connections, max_connections, limit,
        )  # fmt: skip
    return Shares(logs, connections)
