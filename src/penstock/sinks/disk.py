"""What a power loss leaves of files: they and their names are there when both were synced."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Return when a file, or the names in a folder, would survive a power loss."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
