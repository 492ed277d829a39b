"""The database of a capture: asked whether it will do and how it stands, and left as it was."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

from penstock.cli import output, project
from penstock.cli.capture_project import configured, safe_url
from penstock.errors import ConfigError, PenstockError

if TYPE_CHECKING:
    from penstock.capture.delivery.config import CaptureConfig
    from penstock.capture.source import Check, Source


def open_database(config: CaptureConfig) -> Source:
    from penstock.capture.sources import open_source

    return open_source(config.source)


def passed(checks: list[Check]) -> bool:
    return all(item.ok or not item.required for item in checks)


def show_checks(checks: list[Check]) -> None:
    def word(item: Check) -> str:
        return "ok" if item.ok else ("missing" if item.required else "warning")

    rows = [(word(item), item.name, item.found) for item in checks]
    output.print_table(("", "check", "found"), rows)
    for item in checks:
        if not item.ok and item.remedy:
            print(f"{item.name}: {item.remedy}")


def must_have(found: project.Project, name: str, patterns: list[str]) -> None:
    """ConfigError if a capture has no table of these names.

    Only if the database can be asked from here; else the capture itself will complain.
    """
    if not patterns or name not in found.named("capture"):
        return
    config = configured(found, name)
    try:
        with open_database(config) as source:
            names = [table.full_name for table in source.tables()]
    except PenstockError:
        return
    for pattern in patterns:
        if not any(fnmatchcase(table, pattern) for table in names):
            raise ConfigError(
                f"the capture {name} has no table {pattern!r}, so no snapshot was asked for",
                advice=f"It has: {_some(names)}.",
            )


def _some(names: list[str]) -> str:
    """Names for a message, not too many."""
    shown = ", ".join(names[:20]) or "none"
    return f"{shown}, and {len(names) - 20} more" if len(names) > 20 else shown


def database_status(found: project.Project) -> Any:
    """A way to ask the databases of the project what they keep."""

    def ask(name: str) -> dict[str, Any]:
        if name not in found.named("capture"):
            return {}
        try:
            with open_database(configured(found, name)) as source:
                told = source.status()
        except PenstockError as error:
            return {"problem": str(error)}
        return {
            "retained_bytes": told.retained_bytes,
            "retained_limit_bytes": told.retained_limit_bytes,
            "lag_bytes": told.lag_bytes,
            "time_left_s": told.time_left_s,
            **told.details,
        }

    return ask


def remove_from_database(config: CaptureConfig, *, force: bool) -> list[str]:
    """Take what a capture has made out of its database; what that was."""
    try:
        with open_database(config) as source:
            return source.remove()
    except PenstockError as error:
        if not force:
            advice = f"{error.advice} " if error.advice else ""
            raise PenstockError(
                str(error),
                advice=f"{advice}If the database is gone for good: "
                f"penstock capture remove {config.name} --force",
            ) from error
        output.warn(f"{safe_url(config)} was left as it is: {error}")
        for line in _left_in_database(config):
            output.warn(line)
        return []


def _left_in_database(config: CaptureConfig) -> list[str]:
    """What may be in a database that nobody has asked, and how to remove it."""
    scheme = config.source.url.partition("://")[0].lower()
    if scheme in {"postgresql", "postgres"}:
        from penstock.capture.postgres.options import PostgresOptions

        options = PostgresOptions.of(config.source)
        return [
            (
                f"the slot {options.slot} may be left, for which the server keeps its WAL: "
                f"SELECT pg_drop_replication_slot('{options.slot}')"
            ),
            (
                f"the publication {options.publication} may be left: "
                f"DROP PUBLICATION {options.publication}"
            ),
        ]
    if scheme == "sqlite":
        from penstock.capture.sqlite.catalog import names_of

        prefix = names_of(config.name).prefix
        return [f"triggers and tables named {prefix}* may be left"]
    return []
