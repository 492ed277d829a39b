"""The captures of the project file: which one is meant, its settings, and its log."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli import project
from penstock.cli.values import parse_pairs
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.capture.delivery.config import CaptureConfig
    from penstock.client.connection import Cluster


def config_of(name: str, data: dict[str, Any], folder: Path | None = None) -> CaptureConfig:
    from penstock.capture.delivery.config import CaptureConfig

    url = str(data.get("url", ""))
    relative = url.removeprefix("sqlite:///")
    if url.startswith("sqlite:///") and not relative.startswith("/") and folder is not None:
        # A file is meant from where the project file is.
        data = {**data, "url": f"sqlite:///{folder.resolve() / relative}"}
    return CaptureConfig.from_mapping(name, data)


def configured(found: project.Project, name: str) -> CaptureConfig:
    """The settings of a capture of the project file."""
    captures = found.named("capture")
    if name not in captures:
        where = found.path.name if found.path is not None else "no penstock.toml was found, which"
        raise ConfigError(
            f"{where} has no capture {name!r}",
            advice=f"It has: {', '.join(captures)}." if captures
            else f"Add one: penstock capture add {name} URL",
        )  # fmt: skip
    settings: Any = captures[name]
    path = f"capture.{name}"
    found.need("capture", name)
    if not isinstance(settings, Mapping):
        raise found.error(path, f"{path} must be a table of settings")
    with found.explained(path):
        return config_of(name, dict(settings), found.folder)


def the_one(found: project.Project, name: str, option: str = "NAME") -> str:
    """The capture that is meant if none is named."""
    captures = list(found.named("capture"))
    if name or len(captures) == 1:
        return name or captures[0]
    if not captures:
        raise ConfigError(
            "there is no capture in the project file",
            advice="Add one: penstock capture add NAME URL",
        )
    raise ConfigError(
        "there are several captures",
        advice=f"Say which by {option}, one of {', '.join(captures)}.",
    )


def cluster_of(bootstrap: str, client: list[str], client_id: str = "penstock-cli") -> Cluster:
    from penstock.client.connection import Cluster
    from penstock.client.security import Security

    return Cluster(
        bootstrap, client_id=client_id, security=Security.from_options(parse_pairs(client))
    )


def safe_url(config: CaptureConfig) -> str:
    """The URL without the password."""
    scheme, _, rest = config.source.url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"
