"""From a URL to a sink. Each kind of store is loaded when it is asked for.

    sqlite:///shop.db?table=orders           a file, relative to the current folder
    sqlite:////var/lib/shop.db?table=orders  an absolute path has four slashes
    postgresql://user:password@host/db?table=orders

What stands behind `?` are options of the store, as are those given by name; a wrong one is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Final
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from penstock.errors import ConfigError
from penstock.extras import install
from penstock.sinks.contract import Sink
from penstock.sinks.errors import MissingPackageError


@dataclass(frozen=True, slots=True)
class Address:
    """A store's URL taken apart. `options` has what stood behind `?` and what was given beside."""

    scheme: str
    host: str = ""
    port: int | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    # Without the first slash of the URL's path: "shop.db", or "/var/lib/shop.db".
    path: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    # The name that the sink has in the project: a table or index without a name is called so.
    name: str = ""
    url: str = field(default="", repr=False)

    @property
    def shown(self) -> str:
        """The URL without its password and options, for people."""
        at = f"{quote(self.user)}@" if self.user else ""
        port = f":{self.port}" if self.port is not None else ""
        return f"{self.scheme}://{at}{self.host}{port}/{self.path}"

    @property
    def is_local(self) -> bool:
        """Whether it can be written on this machine only: files, or a server at `localhost`."""
        in_files = not self.scheme.endswith(("s3", "http", "https")) and self.scheme not in _SERVERS
        # What was sent is remembered in a file.
        if in_files or self.scheme.startswith("webhook+"):
            return True
        remote = self.scheme.endswith("s3")
        return not remote and (
            self.host in {"", "localhost", "::1"} or self.host.startswith("127.")
        )

    def only(self, *known: str) -> None:
        """ConfigError if an option is none of these."""
        for name in self.options:
            if name not in known:
                raise ConfigError(
                    f"{self.shown}: there is no option {name!r}",
                    advice=f"Known are {', '.join(sorted(known))}.",
                )

    def option(self, name: str, otherwise: str = "") -> str:
        return self.options.get(name, otherwise)

    def number(self, name: str, otherwise: int, *, least: int = 0) -> int:
        """An option that is a whole number; ConfigError if it is not, or too small."""
        text = self.options.get(name)
        if text is None:
            return otherwise
        if not text.isascii() or not text.isdigit() or int(text) < least:
            raise ConfigError(f"{self.shown}: {name} must be a number from {least}, not {text!r}")
        return int(text)

    def flag(self, name: str, otherwise: bool) -> bool:
        """An option that is true or false."""
        text = self.options.get(name, "true" if otherwise else "false").lower()
        if text not in {"true", "false", "1", "0", "yes", "no"}:
            raise ConfigError(f"{self.shown}: {name} must be true or false, not {text!r}")
        return text in {"true", "1", "yes"}


@dataclass(frozen=True, slots=True)
class _Kind:
    """Where a kind of store lives: a module with `make(address) -> Sink`."""

    module: str
    # The extra of the package that brings what it needs; empty if nothing more is needed.
    extra: str = ""


# Kinds of stores that are reached over the network; others say it in their names.
_SERVERS: Final = frozenset({"postgresql", "postgres", "mysql", "mariadb", "redis", "rediss"})
_SQL, _OPENSEARCH = "penstock.sinks.sql", "penstock.sinks.opensearch"
KINDS: Final[Mapping[str, _Kind]] = {
    "sqlite": _Kind(f"{_SQL}.sqlite"),
    "postgresql": _Kind(f"{_SQL}.postgresql", "postgres"),
    "postgres": _Kind(f"{_SQL}.postgresql", "postgres"),
    "mysql": _Kind(f"{_SQL}.mysql", "mysql"),
    "mariadb": _Kind(f"{_SQL}.mysql", "mysql"),
    "duckdb": _Kind(f"{_SQL}.duckdb", "warehouse"),
    "tantivy": _Kind("penstock.sinks.search", "search"),
    "opensearch+http": _Kind(_OPENSEARCH),
    "opensearch+https": _Kind(_OPENSEARCH),
    "elasticsearch+http": _Kind(_OPENSEARCH),
    "elasticsearch+https": _Kind(_OPENSEARCH),
    "redis": _Kind("penstock.sinks.cache", "cache"),
    "rediss": _Kind("penstock.sinks.cache", "cache"),
    "delta": _Kind("penstock.sinks.warehouse", "warehouse"),
    "delta+s3": _Kind("penstock.sinks.warehouse", "warehouse"),
    "s3": _Kind("penstock.sinks.warehouse", "warehouse"),
    "parquet": _Kind("penstock.sinks.warehouse", "warehouse"),
    "parquet+s3": _Kind("penstock.sinks.warehouse", "warehouse"),
    "webhook+http": _Kind("penstock.sinks.webhook"),
    "webhook+https": _Kind("penstock.sinks.webhook"),
}


def parse(url: str, options: Mapping[str, object] | None = None, name: str = "") -> Address:
    """A URL and options beside it, checked as far as all stores have it in common."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        # What it says may be a part of the password.
        kind = url.partition(":")[0]
        raise ConfigError(
            f"the URL of the {kind} store cannot be read: its host or port is wrong",
            advice="It is KIND://USER:PASSWORD@HOST:PORT/PATH; write / as %2F, @ as %40, : as %3A, "
            "# as %23 and ? as %3F in a password.",
        ) from None
    if parts.scheme not in KINDS:
        raise ConfigError(
            f"no kind of store is called {parts.scheme!r}"
            if parts.scheme
            else "the URL of a store begins with its kind, as in sqlite:///shop.db",
            advice=f"There are {', '.join(KINDS)}.",
        )
    found = dict(parse_qsl(parts.query, keep_blank_values=True))
    found.update({key: _text(value) for key, value in (options or {}).items()})
    return Address(
        scheme=parts.scheme,
        host=parts.hostname or "",
        port=port,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        path=unquote(parts.path.removeprefix("/")),
        options=found,
        name=name,
        url=url,
    )


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return ",".join(map(str, value))
    return str(value)


def open_sink(url: str, options: Mapping[str, object] | None = None, *, name: str = "") -> Sink:
    """The sink for a URL. Nothing is asked of the store yet: `Sink.open` does, or reading."""
    address = parse(url, options, name)
    kind = KINDS[address.scheme]
    try:
        made = import_module(kind.module).make(address)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("penstock"):
            raise
        remedy = install([kind.extra]) if kind.extra else f"pip install {error.name}"
        raise MissingPackageError(
            f"{address.scheme} needs the package {error.name}, which is not installed",
            advice=f"Install it: {remedy}",
        ) from error
    assert isinstance(made, Sink)
    return made
