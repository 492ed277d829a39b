"""The extras that a project needs, told from its URLs, asked for before they are imported."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Final

from penstock.cli.examples import files_of
from penstock.cli.project import Project
from penstock.extras import missing, require

_BY_SCHEME: Final = {
    "postgres": "postgres", "mysql": "mysql", "mariadb": "mysql", "tantivy": "search",
    "redis": "cache", "delta": "warehouse", "duckdb": "warehouse", "parquet": "warehouse",
    "s3": "warehouse",
}  # fmt: skip


def of_url(url: str) -> set[str]:
    """The extra for the driver of a database or store; none for SQLite and HTTP."""
    scheme = url.partition(":")[0].lower()
    return {extra for start, extra in _BY_SCHEME.items() if scheme.startswith(start)}


def of_captures(found: Project, only: Collection[str] = ()) -> set[str]:
    """What the captures of a project need, or `only` these."""
    return {"capture", *_drivers(found, "capture", only)}


def of_sinks(found: Project, only: Collection[str] = ()) -> set[str]:
    """What the sinks of a project need, or `only` these."""
    return {"spark", *_drivers(found, "sinks", only)}


def need_captures(found: Project, only: Collection[str] = (), *, drivers: bool = True) -> None:
    """MissingExtraError, with all that is to be installed, if captures lack something.

    Without `drivers`, a database that cannot be asked from here is no hindrance.
    """
    if drivers or missing(["capture"]):
        require(sorted(of_captures(found, only)), "captures")


def need_sinks(found: Project, only: Collection[str] = (), *, drivers: bool = True) -> None:
    """MissingExtraError, with all that is to be installed, if sinks lack something.

    Without `drivers`, a store that cannot be asked from here is no hindrance.
    """
    if drivers or missing(["spark"]):
        require(sorted(of_sinks(found, only)), "sinks")


def need_demo(servers: Iterable[str]) -> None:
    """MissingExtraError if the demo lacks something; `servers` are URLs of what it is given."""
    shop = Project(data=tomllib.loads(files_of("shop")["penstock.toml"]))
    drivers = {extra for url in servers for extra in of_url(url)}
    require(sorted(of_sinks(shop) | of_captures(shop) | drivers), "the parts of the demo")


def tables(found: Project, section: str) -> Mapping[str, Any]:
    """What a section has; nothing if it is no table, which is told elsewhere."""
    settings = found.data.get(section)
    return settings if isinstance(settings, Mapping) else {}


def _drivers(found: Project, section: str, only: Collection[str]) -> set[str]:
    urls = (
        str(settings.get("url", ""))
        for name, settings in tables(found, section).items()
        if isinstance(settings, Mapping) and (not only or name in only)
    )
    return {extra for url in urls for extra in of_url(url)}
