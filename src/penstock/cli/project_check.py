"""All sections of the project file, checked by the rooms that they are for, without connecting.

What a room cannot check without heavy company is left to it: Spark would have to be loaded for the
text of `[views.tables]`.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.cli.project import VIEWS, Project


def check(found: Project) -> None:
    """ConfigError, with the line, if a section is wrong."""
    check_captures(found)
    check_sinks(found)
    check_views(found)


def check_captures(found: Project) -> None:
    captures = found.named("capture")
    if captures:
        from penstock.cli.capture_project import configured

        for name in captures:
            configured(found, name)


def check_sinks(found: Project) -> None:
    if not found.named("sinks"):
        return
    try:
        from penstock.cli.sinks_file import declared

        declared(found)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("penstock"):
            raise
        # A broker without Arrow: whoever is to feed the sinks says what is missing for it.


def check_views(found: Project) -> None:
    found.check_names("views", VIEWS)
    tables = found.section("views").get("tables", {})
    if not isinstance(tables, Mapping):
        raise found.error("views.tables", f"views.tables must be a table, not {tables!r}")
    for name, text in tables.items():
        path = f"views.tables.{name}"
        if not isinstance(text, str):
            raise found.error(path, f"{path} must be a text, not {text!r}")
