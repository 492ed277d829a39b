"""The optional packages: what `pip install 'penstock[EXTRA]'` brings, and what to say without it.

It imports none of them. Rooms check what they need with `require` before they import it; the
command line turns a `ModuleNotFoundError` that is left over into the same message.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from typing import Final

from penstock.errors import ConfigError

_COLUMNAR: Final = ("pyarrow", "numba", "numpy")
# The modules of each extra. Those that one takes from another are here only where that is all there
# is to it, or where nothing else asks for the other.
EXTRAS: Final[Mapping[str, tuple[str, ...]]] = {
    "archive": ("obstore",),
    "columnar": _COLUMNAR,
    "capture": _COLUMNAR,
    "spark": ("pyspark", "pandas", "sqlglot", "datasketches", "fastavro", *_COLUMNAR),
    "postgres": ("psycopg",),
    "mysql": ("pymysql",),
    "search": ("tantivy",),
    "cache": ("redis",),
    "warehouse": ("deltalake", "duckdb", "obstore"),
}
# Whoever installs the one has the others.
INCLUDED: Final[Mapping[str, tuple[str, ...]]] = {
    "capture": ("columnar",),
    "spark": ("columnar", "capture"),
    "postgres": ("capture", "columnar"),
    "mysql": ("capture", "columnar"),
    "search": ("spark", "capture", "columnar"),
    "cache": ("spark", "capture", "columnar"),
    "warehouse": ("spark", "archive", "capture", "columnar"),
}
# The names of packages that are not those of their modules.
PACKAGES: Final[Mapping[str, str]] = {"pymysql": "PyMySQL"}


class MissingExtraError(ConfigError):
    """Packages that a command needs are not installed."""


def package_of(module: str) -> str:
    """What pip calls the package of a module."""
    return PACKAGES.get(module, module)


def install(extras: Iterable[str]) -> str:
    """The command that installs extras, without those that others bring along."""
    wanted = set(extras)
    brought = {each for extra in wanted for each in INCLUDED.get(extra, ())}
    return f"pip install 'penstock[{','.join(sorted(wanted - brought))}]'"


def missing(extras: Iterable[str]) -> list[str]:
    """The modules of extras that are not there."""
    modules = dict.fromkeys(module for extra in extras for module in EXTRAS[extra])
    return [module for module in modules if find_spec(module) is None]


def require(extras: Iterable[str], what: str) -> None:
    """MissingExtraError if `what` (a plural, for the message) lacks a package."""
    wanted = list(extras)
    if absent := missing(wanted):
        packages = ", ".join(map(package_of, absent))
        raise MissingExtraError(
            f"{what} need packages that are not installed: {packages}",
            advice=f"Install them: {install(wanted)}",
        )


def explain(error: ModuleNotFoundError) -> MissingExtraError | None:
    """Our error for a module that was not found; None if no extra brings it."""
    module = (error.name or "").partition(".")[0]
    extra = next((extra for extra, modules in EXTRAS.items() if module in modules), None)
    if extra is None:
        return None
    return MissingExtraError(
        f"this needs the package {package_of(module)}, which is not installed",
        advice=f"Install it: {install([extra])}",
    )
