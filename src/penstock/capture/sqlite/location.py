"""Where the database is, and how it is opened.

`sqlite:///relative.db`, `sqlite:////absolute.db`. The file is never created here.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final
from urllib.parse import quote, unquote

from penstock.capture.source import (
    CaptureError,
    DatabaseBusyError,
    DatabaseUnreachableError,
    SourceSettings,
)

# How long we wait for others' locks.
BUSY_MS: Final = 10_000
_PREFIX: Final = "sqlite:///"
VERSION_MIN: Final = (3, 37, 0)


def path_of(settings: SourceSettings) -> Path:
    """The file that a URL names, with links resolved: SQLite keeps its journals beside it."""
    url = settings.url
    if not url.lower().startswith(_PREFIX) or len(url) == len(_PREFIX):
        raise CaptureError(
            f"capture {settings.name}: {url!r} does not name a file",
            advice="Give it as sqlite:///relative.db or sqlite:////absolute/path.db.",
        )
    name = url[len(_PREFIX) :]
    if "?" in name or name == ":memory:":
        raise CaptureError(
            f"capture {settings.name}: {url!r} must be a file, without parameters",
            advice="A ? in the file's name is written %3F. Databases in memory cannot be captured.",
        )
    return Path(os.path.realpath(unquote(name)))


def connect(path: Path, *, read_only: bool = False, busy_ms: int = BUSY_MS) -> sqlite3.Connection:
    """A connection without implicit transactions; DatabaseUnreachableError if there is no file."""
    if sqlite3.sqlite_version_info < VERSION_MIN:
        raise CaptureError(
            f"SQLite {sqlite3.sqlite_version} is too old to be captured with",
            advice="Use a Python with SQLite 3.37 or newer.",
        )
    try:
        made = sqlite3.connect(
            f"file:{quote(str(path))}?mode=rw",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=busy_ms / 1000,
        )
    except sqlite3.OperationalError as error:
        if not path.exists():
            raise DatabaseUnreachableError(
                f"there is no {path} yet", advice="Make it, or name another file."
            ) from error
        raise DatabaseUnreachableError(
            f"{path} cannot be opened: {error}", advice="Is it there, and may we write to it?"
        ) from error
    try:
        if read_only:
            made.execute("PRAGMA query_only = ON")
        # Is it a database at all? A lock that others hold is the next statement's matter.
        made.execute("PRAGMA busy_timeout = 0")
        made.execute("SELECT rowid FROM sqlite_schema LIMIT 1").fetchall()
    except sqlite3.Error as error:
        if not is_busy(error):
            made.close()
            raise mapped(error, path) from error
    made.execute(f"PRAGMA busy_timeout = {busy_ms}")
    return made


def is_busy(error: sqlite3.Error) -> bool:
    """Whether somebody else's lock was in the way."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def mapped(error: sqlite3.Error, path: Path) -> CaptureError:
    """What an error of SQLite means to a capture."""
    if isinstance(error, sqlite3.OperationalError) and not _is_ours(error):
        if is_busy(error):
            return DatabaseBusyError(
                f"{path}: {error}", advice="Another program holds a lock on it."
            )
        return DatabaseUnreachableError(f"{path}: {error}")
    return CaptureError(f"{path}: {error}", advice="Look at it with: PRAGMA integrity_check")


def _is_ours(error: sqlite3.Error) -> bool:
    """A statement of ours that SQLite does not take: trying again would not help."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_ERROR


@contextmanager
def errors_of(path: Path) -> Iterator[None]:
    """Errors of SQLite as those of a capture."""
    try:
        yield
    except sqlite3.Error as error:
        raise mapped(error, path) from error


@contextmanager
def transaction(connection: sqlite3.Connection, kind: str = "DEFERRED") -> Iterator[None]:
    """BEGIN ... COMMIT, or ROLLBACK on any error."""
    connection.execute(f"BEGIN {kind}")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
