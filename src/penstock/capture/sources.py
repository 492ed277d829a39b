"""Which source reads a database: decided by the scheme of its URL.

Each is imported only when it is asked for, since each needs a driver of its own.
"""

from __future__ import annotations

from importlib import import_module
from typing import Final, NamedTuple

from penstock.capture.source import CaptureError, Source, SourceSettings
from penstock.extras import install


class _Kind(NamedTuple):
    module: str
    name: str
    # What pip installs for it, in brackets.
    extra: str


_POSTGRES: Final = _Kind("penstock.capture.postgres.source", "PostgresSource", "postgres")
_MYSQL: Final = _Kind("penstock.capture.mysql.source", "MysqlSource", "mysql")
_SQLITE: Final = _Kind("penstock.capture.sqlite.source", "SqliteSource", "capture")
_BY_SCHEME: Final = {
    "postgresql": _POSTGRES,
    "postgres": _POSTGRES,
    "mysql": _MYSQL,
    "mariadb": _MYSQL,
    "sqlite": _SQLITE,
}

EXAMPLES: Final = (
    "postgresql://user:password@host/database, mysql://user:password@host/database or "
    "sqlite:///relative.db (sqlite:////absolute.db)"
)


def open_source(settings: SourceSettings) -> Source:
    """The source for the database that the settings name."""
    scheme, separator, _ = settings.url.partition("://")
    kind = _BY_SCHEME.get(scheme.lower()) if separator else None
    if kind is None:
        raise CaptureError(
            f"capture {settings.name}: {shown(settings.url)!r} is no database that can be captured",
            advice=f"Give its URL: {EXAMPLES}.",
        )
    try:
        module = import_module(kind.module)
    except ImportError as error:
        if (error.name or "").startswith("penstock"):
            raise
        told = f"the package {error.name}, which is not installed"
        if not isinstance(error, ModuleNotFoundError):
            told = f"a package that cannot be loaded: {error}"
        raise CaptureError(
            f"capture {settings.name}: {scheme} needs {told}",
            advice=f"Install it: {install([kind.extra])}",
        ) from error
    made: Source = getattr(module, kind.name)(settings)
    return made


def shown(url: str) -> str:
    """A URL without its password, for messages."""
    scheme, separator, rest = url.partition("://")
    authority, slash, path = rest.partition("/")
    credentials, at, host = authority.rpartition("@")
    user, colon, _ = credentials.partition(":")
    hidden = f"{user}{colon}{'***' if colon else ''}" if at else credentials
    return f"{scheme}{separator}{hidden}{at}{host}{slash}{path}"
