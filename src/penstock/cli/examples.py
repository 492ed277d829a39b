"""The example projects, which `penstock init` and `penstock demo` copy.

They stand in `examples/` of the repository; a wheel carries a copy beside this file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from penstock.errors import ConfigError

NAMES: Final = ("shop", "empty")
_PACKAGED: Final = Path(__file__).resolve().parent / "projects"
_REPOSITORY: Final = Path(__file__).resolve().parents[3] / "examples"


def files_of(name: str) -> dict[str, str]:
    """The files of an example: name and text."""
    if name not in NAMES:
        raise ConfigError(f"there is no example {name!r}", advice=f"There are: {', '.join(NAMES)}.")
    for place in (_PACKAGED, _REPOSITORY):
        folder = place / name
        if folder.is_dir():
            return {
                file.name: file.read_text(encoding="utf-8")
                for file in sorted(folder.iterdir())
                if file.suffix in {".py", ".toml", ".md"}
            }
    raise ConfigError(
        f"the files of the example {name} are not in this installation",
        advice="Install the package again: pip install --force-reinstall penstock",
    )


def write(name: str, folder: Path) -> list[Path]:
    """Copy an example; ConfigError, and nothing is written, if one of its files is there."""
    texts = files_of(name)
    there = [file for file in texts if (folder / file).exists()]
    if there:
        raise ConfigError(
            f"{folder / there[0]} is there already, and is left as it is",
            advice="Choose another folder: penstock init DIR.",
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in texts.items():
            (folder / file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error
    return [folder / file for file in texts]
