"""Puts the measured tables into `docs/benchmarks.md`, between two markers; the prose around them
is written by hand and stays.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

BEGIN: Final = "<!-- bench-broker: begin (written by `make bench-broker`) -->"
END: Final = "<!-- bench-broker: end -->"


def replace_section(path: Path, text: str) -> None:
    """Replace what is between the markers; without them, add the section at the end."""
    page = path.read_text() if path.exists() else "# Benchmarks\n"
    section = f"{BEGIN}\n\n{text.strip()}\n\n{END}"
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    page = f"{before}{section}{after}" if begin and end else f"{page.rstrip()}\n\n{section}\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page)
