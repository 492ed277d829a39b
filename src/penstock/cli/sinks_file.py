"""The sinks that a project file declares, `[sinks.NAME]`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from penstock.cli import project

if TYPE_CHECKING:
    from penstock.sinks.spec import SinkSpec

# Stores that are files: a relative path is meant from where the project file is.
_FILES: Final = ("sqlite", "duckdb", "tantivy", "delta", "parquet")


def declared(found: project.Project, only: Collection[str] = ()) -> list[SinkSpec]:
    """All sinks of the project, or `only` these; ConfigError, with the line, if one is wrong."""
    return [read(found, name) for name in found.named("sinks") if not only or name in only]


def read(found: project.Project, name: str) -> SinkSpec:
    """One section; ConfigError, with the line, if it is wrong."""
    from penstock.sinks.spec import from_config
    from penstock.sinks.stores import parse

    found.need("sinks", name)
    with found.explained(f"sinks.{name}"):
        spec = from_config(name, found.named("sinks")[name])
    if spec.url.startswith("webhook+") and found.path is not None:
        # What was sent must be known wherever the command is run.
        told = parse(spec.url, spec.options, name).option("state") or f"{name}.webhook.db"
        spec = replace(spec, options={**spec.options, "state": str(found.folder.resolve() / told)})
    return replace(spec, url=_from_there(spec.url, found))


def named(found: project.Project, name: str) -> SinkSpec:
    """One of them; UnknownSinkError if there is none of this name."""
    from penstock.spark.sinking.errors import UnknownSinkError

    there = found.named("sinks")
    if name not in there:
        where = str(found.path) if found.path is not None else f"no {project.FILE_NAME}"
        raise UnknownSinkError(
            f"there is no sink {name!r} in {where}",
            advice=f"There are: {', '.join(there)}."
            if there
            else f"Declare it there, as [sinks.{name}] with topic = and url =.",
        )
    return read(found, name)


def _from_there(url: str, found: project.Project) -> str:
    scheme, _, rest = url.partition(":///")
    if scheme not in _FILES or not rest or rest.startswith("/") or found.path is None:
        return url
    return f"{scheme}:///{found.folder.resolve()}/{rest}"
